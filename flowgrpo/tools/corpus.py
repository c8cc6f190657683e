"""A local corpus: JSONL, text or a folder of texts flows in, documents that know their file and line flow out."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from flowgrpo.types import BadInput

TEXTS = (".txt", ".md")


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
    """The documents of a .jsonl file ({"title"?, "text"} a line), of a .txt or .md file (its paragraphs), or of all
    such files in a folder and below it, in the order of their names."""
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
    """The documents in pieces of at most `words` words; each piece begins with the last `overlap` of the one before."""
    return [passage for document in corpus.documents for passage in _cut(document, words, overlap)]


def _read(path: Path, name: str) -> Iterator[Document]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise BadInput(f"{path}, line {line}: this is not UTF-8; convert the file") from error
    except OSError as error:
        raise BadInput(f"{path}: it can't be read ({error.strerror}); mend its permissions") from error
    return _records(path, name, text) if path.suffix == ".jsonl" else _paragraphs(path, name, text)


def _records(path: Path, name: str, text: str) -> Iterator[Document]:
    """A document for each line of JSONL."""
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadInput(f"{place}: this is no JSON ({error}); write one object a line") from error
        if not isinstance(record, dict):
            raise BadInput(f'{place}: this is no object; write {{"title": ..., "text": ...}}')
        title = record.get("title") or ""
        if not isinstance(title, str):
            raise BadInput(f"{place}: field 'title' must be a text; mend it, or leave it out")
        if not isinstance(record.get("text"), str) or not record["text"].strip():
            raise BadInput(f"{place}: field 'text' must be a text that isn't empty; fill it, or take the line out")
        yield Document(" ".join(title.split()), record["text"], name, number, False)


def _paragraphs(path: Path, name: str, text: str) -> Iterator[Document]:
    """A document for each paragraph; its title is the heading above it (Markdown), or the name of the file."""
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
    """The words of a Markdown heading, such as `## words ##`; "" where the line is none."""
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
