"""Keyword search over a local corpus: `read_corpus` reads files of texts, `search` makes the tool of it.

    search(read_corpus("wiki.jsonl")).call({"query": "capital of France"})
        [1] France: Paris is the capital of France ... (wiki.jsonl:12)

BM25 (Robertson and Zaragoza, 2009) by the package bm25s, over words in lower case as they stand, without stems or stop
words. Equal scores stand in the order of the corpus, so that equal queries give equal answers.
"""

import importlib.util
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from flowgrpo.contracts import Tool
from flowgrpo.data.task_files import json_lines
from flowgrpo.files import pip_install
from flowgrpo.tools.schema import tool
from flowgrpo.tools.toolset import ToolError
from flowgrpo.types import BadInput

__all__ = ["Corpus", "read_corpus", "search"]

TEXTS = (".txt", ".md")
LONGEST = 1000  # characters of a query
WORD = re.compile(r"\w+")


# The corpus ---------------------------------------------------------------------------------------------


class Document(NamedTuple):
    """A text with its title and where it begins. A file of text has its own lines, a JSONL record lies on one."""

    title: str
    text: str
    file: str
    line: int
    many_lines: bool


class Corpus(NamedTuple):
    """Collection of documents to search."""

    documents: tuple[Document, ...]


class Passage(NamedTuple):
    """A piece of a document, and the place that leads back to it."""

    title: str
    text: str
    place: str  # file:line


def read_corpus(path: str | Path) -> Corpus:
    """Read a .jsonl file ({"title"?, "text"} a line), a .txt or .md file (its paragraphs), or a folder of such files.

    The files of a folder and of those below it are read in the order of their names.
    """
    path = Path(path)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in (*TEXTS, ".jsonl") and file.is_file())
        if not files:
            raise BadInput(f"{path}: there is no .txt, .md or .jsonl file in this folder")
        found = [document for file in files for document in _read(file, file.relative_to(path).as_posix())]
    elif path.is_file():
        found = list(_read(path, path.name))
    else:
        raise BadInput(f"{path}: there is no such file or folder")
    if not found:
        raise BadInput(f"{path}: it holds no text; give it at least one record or paragraph")
    return Corpus(tuple(found))


def passages_of(corpus: Corpus, words: int, overlap: int) -> list[Passage]:
    """Cut the documents into pieces of at most `words` words, of which `overlap` stood in the piece before, too."""
    return [passage for document in corpus.documents for passage in _cut(document, words, overlap)]


def _read(path: Path, name: str) -> Iterator[Document]:
    if path.suffix == ".jsonl":
        return _records(path, name)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise BadInput(f"{path}, line {line}: this is not UTF-8; convert the file") from error
    except OSError as error:
        raise BadInput(f"{path}: it can't be read ({error.strerror}); fix its permissions") from error
    return _paragraphs(path, name, text)


def _records(path: Path, name: str) -> Iterator[Document]:
    """Yield a document for each line of JSONL."""
    for place, record, number in json_lines(path, 'write {"title": ..., "text": ...}'):
        if isinstance(record, str):
            raise BadInput(f"{place}: {record}")
        title = record.get("title") or ""
        if not isinstance(title, str):
            raise BadInput(f"{place}: field 'title' must be a text; fix it, or leave it out")
        if not isinstance(record.get("text"), str) or not record["text"].strip():
            raise BadInput(f"{place}: field 'text' must be a text that isn't empty; fill it, or take the line out")
        yield Document(" ".join(title.split()), record["text"], name, number, False)


def _paragraphs(path: Path, name: str, text: str) -> Iterator[Document]:
    """Yield a document for each paragraph; its title is the heading above it (Markdown), or the name of the file."""
    title, lines, first = path.stem, [], 1
    for number, line in enumerate([*text.split("\n"), ""], 1):
        heading = _heading(line.strip()) if path.suffix == ".md" else ""
        if line.strip() and not heading:
            first = first if lines else number
            lines.append(line)
            continue
        if lines:
            yield Document(title, "\n".join(lines), name, first, True)
            lines = []
        title = heading or title


def _heading(line: str) -> str:
    """Get the words of a Markdown heading, such as `## words ##`; "" where the line is none."""
    words = line.lstrip("#")
    if not 1 <= len(line) - len(words) <= 6 or not words[:1].isspace():
        return ""
    return words.strip().rstrip("#").rstrip() or words.strip()


def _cut(document: Document, words: int, overlap: int) -> Iterator[Passage]:
    found = list(re.finditer(r"\S+", document.text))
    line, before = document.line, 0
    for start in range(0, max(len(found) - overlap, 1), words - overlap):
        piece = found[start : start + words]
        line += document.text.count("\n", before, piece[0].start()) * document.many_lines
        before = piece[0].start()
        yield Passage(document.title, " ".join(word.group() for word in piece), f"{document.file}:{line}")


# The tool -----------------------------------------------------------------------------------------------


class _Index(NamedTuple):
    """Passages that a query is compared with, and the scorer that ranks them."""

    passages: Sequence[Passage]
    scorer: Any  # bm25s.BM25


def search(
    corpus: Corpus,
    *,
    top: int = 3,
    chunk_words: int = 100,
    overlap: int = 20,
    k1: float = 1.5,
    b: float = 0.75,
    name: str = "search",
) -> Tool:
    """Make the tool "search", which gives the `top` best passages.

    A passage has `chunk_words` words, of which it shares `overlap` with the one before in its document.
    """
    if top < 1 or chunk_words < 1 or not 0 <= overlap < chunk_words:
        raise BadInput(
            f"search: top is {top}, chunk_words {chunk_words} and overlap {overlap}, but top must be at least 1, and "
            "overlap at least 0 and less than chunk_words"
        )
    if not (k1 >= 0 and 0 <= b <= 1):
        raise BadInput(f"search: k1 is {k1} and b {b}, but k1 must be at least 0, and b lie between 0 and 1")
    index = _index(passages_of(corpus, chunk_words, overlap), k1, b)
    return tool(partial(find, index=index, top=top), name=name, pure=True)


def find(query: str, *, index: _Index, top: int) -> str:
    """Finds passages in a local collection of texts by keywords.

    query: the words to look for; rare and exact words find best
    """
    if len(query) > LONGEST:
        raise ToolError(f"The query has {len(query)} characters, but may have {LONGEST}.")
    known = [word for word in words_of(query) if word in index.scorer.vocab_dict]
    if not words_of(query):
        raise ToolError("The query holds no words.")
    if not known:
        return "Nothing was found: none of these words occurs in the texts. Try other words."
    scores = index.scorer.get_scores(known)
    best = np.argsort(-scores, kind="stable")[:top]
    return "\n".join(_line(rank, index.passages[number]) for rank, number in enumerate(best, 1) if scores[number] > 0)


def words_of(text: str) -> list[str]:
    """Split a text into its words, in lower case."""
    return WORD.findall(text.lower())


def _index(passages: Sequence[Passage], k1: float, b: float) -> _Index:
    bm25s = _bm25s()
    texts = [words_of(f"{passage.title} {passage.text}") for passage in passages]
    words = sorted({word for text in texts for word in text})
    if not words:
        raise BadInput("search: the corpus holds no words; give it texts")
    number = {word: i for i, word in enumerate(words)}
    scorer = bm25s.BM25(k1=k1, b=b, method="lucene", backend="numpy", csc_backend="numpy")
    ids = [[number[word] for word in text] for text in texts]
    scorer.index((ids, number), create_empty_token=False, show_progress=False)
    return _Index(passages, scorer)


def _bm25s() -> ModuleType:
    """Import the package without its module `selection`, which a stand-in loads where somebody asks for it.

    That module runs a JAX operation when it is imported, which would start JAX's backend before its flags are set.
    """
    if "bm25s" not in sys.modules:
        stand_in: Any = ModuleType("bm25s.selection")
        stand_in.__getattr__ = _selection
        sys.modules.setdefault("bm25s.selection", stand_in)
    try:
        import bm25s
    except ImportError as error:
        sys.modules.pop("bm25s.selection", None)
        raise BadInput(f"search needs the package bm25s: {pip_install('search')}") from error
    logging.getLogger("bm25s").setLevel(logging.WARNING)  # it asks for DEBUG, whatever the program's own level
    return bm25s


def _selection(name: str) -> Any:
    """Load the real `bm25s.selection`, which the stand-in replaces, and get the attribute `name` from it."""
    if name.startswith("__"):
        raise AttributeError(name)
    import bm25s

    spec = importlib.util.spec_from_file_location("bm25s.selection", Path(bm25s.__file__).with_name("selection.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def _line(rank: int, passage: Passage) -> str:
    title = f"{passage.title}: " if passage.title else ""
    return f"[{rank}] {title}{passage.text} ({passage.place})"
