"""Keyword search over a local corpus: a query flows in, the best passages with their places flow out.

    search(read_corpus("wiki.jsonl")).call({"query": "capital of France"})
        [1] France: Paris is the capital of France ... (wiki.jsonl:12)

BM25 (Robertson and Zaragoza, 2009) by the package bm25s, over words in lower case as they stand, without stems or stop
words. Equal scores stand in the order of the corpus, so that equal queries give equal answers.
"""

import importlib.util
import logging
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from flowgrpo.contracts import Tool
from flowgrpo.tools.corpus import Corpus, Passage, passages_of, read_corpus
from flowgrpo.tools.schema import tool
from flowgrpo.tools.toolset import ToolError
from flowgrpo.types import BadInput

__all__ = ["Corpus", "read_corpus", "search"]

LONGEST = 1000  # characters of a query
WORD = re.compile(r"\w+")


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
    """The tool "search", which gives the `top` best passages.

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
    """The words of a text, in lower case."""
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
    """The package. Its module `selection` runs a JAX operation when it is imported, which would start JAX's backend
    before anybody could set its flags; a stand-in has that wait until somebody asks for it, which is never here."""
    if "bm25s" not in sys.modules:
        stand_in: Any = ModuleType("bm25s.selection")
        stand_in.__getattr__ = _selection
        sys.modules.setdefault("bm25s.selection", stand_in)
    try:
        import bm25s
    except ImportError as error:
        sys.modules.pop("bm25s.selection", None)
        raise BadInput("search needs the package bm25s: pip install 'flowgrpo[search]'") from error
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
