"""Keyword search over a local corpus: `read_corpus` reads text files, `search` makes a tool that searches them.

    search(read_corpus("wiki.jsonl")).call({"query": "capital of France"})
        [1] France: Paris is the capital of France ... (wiki.jsonl:12)

BM25 (Robertson and Zaragoza, 2009) by the package bm25s, over lower-case words, without stemming or stop words. Equal
scores are ranked in the order of the corpus, so that equal queries give equal observations.
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
from flowgrpo.data.task_files import read_json_lines
from flowgrpo.files import pip_install
from flowgrpo.tools.schema import tool
from flowgrpo.tools.toolset import ToolError
from flowgrpo.types import BadInput

__all__ = ["Corpus", "read_corpus", "search"]

TEXTS = (".txt", ".md")
MAX_CHARS = 1000  # characters of a query
WORD = re.compile(r"\w+")


# The corpus ---------------------------------------------------------------------------------------------


class Document(NamedTuple):
    """A text with its title and where it starts. In a text file it has lines of its own, in JSONL it is on one."""

    title: str
    text: str
    file: str
    line: int
    many_lines: bool


class Corpus(NamedTuple):
    """Documents to search."""

    documents: tuple[Document, ...]


class Passage(NamedTuple):
    """A piece of a document, with its place in a file."""

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
        documents = [document for file in files for document in _read(file, file.relative_to(path).as_posix())]
    elif path.is_file():
        documents = list(_read(path, path.name))
    else:
        raise BadInput(f"{path}: there is no such file or folder")
    if not documents:
        raise BadInput(f"{path}: it has no text; give it at least one record or paragraph")
    return Corpus(tuple(documents))


def split_passages(corpus: Corpus, words: int, overlap: int) -> list[Passage]:
    """Split the documents into passages of at most `words` words; consecutive ones share `overlap` words."""
    passages = []
    for document in corpus.documents:
        matches = list(re.finditer(r"\S+", document.text))
        line, previous = document.line, 0
        for start in range(0, max(len(matches) - overlap, 1), words - overlap):
            part = matches[start : start + words]
            line += document.text.count("\n", previous, part[0].start()) * document.many_lines
            previous = part[0].start()
            passages.append(Passage(document.title, " ".join(word.group() for word in part), f"{document.file}:{line}"))
    return passages


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
    """One document for each line of JSONL."""
    for place, record, number in read_json_lines(path, 'write {"title": ..., "text": ...}'):
        if isinstance(record, str):
            raise BadInput(f"{place}: {record}")
        title = record.get("title") or ""
        if not isinstance(title, str):
            raise BadInput(f"{place}: field 'title' must be a text; fix it, or leave it out")
        if not isinstance(record.get("text"), str) or not record["text"].strip():
            raise BadInput(f"{place}: field 'text' must be a text that isn't empty; fill it, or take the line out")
        yield Document(" ".join(title.split()), record["text"], name, number, False)


def _paragraphs(path: Path, name: str, text: str) -> Iterator[Document]:
    """One document for each paragraph; its title is the heading above it (Markdown), or the name of the file."""
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
    """Text of a Markdown heading, such as `## words ##`; "" if the line is none."""
    words = line.lstrip("#")
    if not 1 <= len(line) - len(words) <= 6 or not words[:1].isspace():
        return ""
    return words.strip().rstrip("#").rstrip() or words.strip()


# The tool -----------------------------------------------------------------------------------------------


class _Index(NamedTuple):
    """Passages and the scorer that ranks them."""

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
    """The tool "search", which returns the best passages of a corpus.

    Args:
        corpus: the documents.
        top: number of passages that are returned.
        chunk_words: words of a passage.
        overlap: words that a passage shares with the one before it in the document.
        k1: saturation of a word's count in BM25.
        b: normalisation by length in BM25, from 0 to 1.
        name: of the tool.
    """
    if top < 1 or chunk_words < 1 or not 0 <= overlap < chunk_words:
        raise BadInput(
            f"search: top is {top}, chunk_words {chunk_words} and overlap {overlap}, but top must be at least 1, and "
            "overlap at least 0 and less than chunk_words"
        )
    if not (k1 >= 0 and 0 <= b <= 1):
        raise BadInput(f"search: k1 is {k1} and b {b}, but k1 must be at least 0, and b between 0 and 1")
    bm25s = _import_bm25s()
    passages = split_passages(corpus, chunk_words, overlap)
    texts = [split_words(f"{passage.title} {passage.text}") for passage in passages]
    vocabulary = sorted({word for text in texts for word in text})
    if not vocabulary:
        raise BadInput("search: the corpus has no words; give it texts")
    id_of = {word: i for i, word in enumerate(vocabulary)}
    scorer = bm25s.BM25(k1=k1, b=b, method="lucene", backend="numpy", csc_backend="numpy")
    ids = [[id_of[word] for word in text] for text in texts]
    scorer.index((ids, id_of), create_empty_token=False, show_progress=False)
    index = _Index(passages, scorer)
    return tool(partial(find, index=index, top=top), name=name, pure=True)


def find(query: str, *, index: _Index, top: int) -> str:
    """Finds passages in a local collection of texts by keywords.

    query: the words to look for; rare and exact words find best
    """
    if len(query) > MAX_CHARS:
        raise ToolError(f"The query has {len(query)} characters, but may have {MAX_CHARS}.")
    indexed = [word for word in split_words(query) if word in index.scorer.vocab_dict]
    if not split_words(query):
        raise ToolError("The query holds no words.")
    if not indexed:
        return "Nothing was found: none of these words occurs in the texts. Try other words."
    scores = index.scorer.get_scores(indexed)
    best = np.argsort(-scores, kind="stable")[:top]
    lines = []
    for rank, number in enumerate(best, 1):
        if scores[number] > 0:
            passage = index.passages[number]
            title = f"{passage.title}: " if passage.title else ""
            lines.append(f"[{rank}] {title}{passage.text} ({passage.place})")
    return "\n".join(lines)


def split_words(text: str) -> list[str]:
    """The words of a text, in lower case."""
    return WORD.findall(text.lower())


def _import_bm25s() -> ModuleType:
    """The package bm25s without its module `selection`, which a stand-in loads when it is used.

    That module runs a JAX operation when it is imported, which would start JAX's backend before its flags are set.
    """
    if "bm25s" not in sys.modules:
        stand_in: Any = ModuleType("bm25s.selection")
        stand_in.__getattr__ = _get_from_selection
        sys.modules.setdefault("bm25s.selection", stand_in)
    try:
        import bm25s
    except ImportError as error:
        sys.modules.pop("bm25s.selection", None)
        raise BadInput(f"search needs the package bm25s: {pip_install('search')}") from error
    logging.getLogger("bm25s").setLevel(logging.WARNING)  # it asks for DEBUG, whatever the program's own level
    return bm25s


def _get_from_selection(name: str) -> Any:
    """The attribute `name` of the real `bm25s.selection`, which the stand-in replaces."""
    if name.startswith("__"):
        raise AttributeError(name)
    import bm25s

    spec = importlib.util.spec_from_file_location("bm25s.selection", Path(bm25s.__file__).with_name("selection.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)
