"""Search over a local corpus: what is found, where it stands, and what is wrong with a corpus."""

import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowgrpo.contracts import Call
from flowgrpo.tools.search import Corpus, Document, read_corpus, search, split_passages, split_words
from flowgrpo.tools.toolset import toolset
from flowgrpo.types import BadInput


def corpus_of(*texts):
    return Corpus(tuple(Document(f"t{i}", text, "file", i, False) for i, text in enumerate(texts, 1)))


def ask(tool, query):
    with toolset([tool]) as tools:
        return tools.call_tool(Call("tool", "search", {"query": query}))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a.md").write_text("# Paris\n\nParis is the capital\nof France.\n\n## Lyon ##\nLyon is a city.\n")
    (tmp_path / "b.txt").write_text("Berlin is in Germany.\n\n\n\nRome is in\nItaly.")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.jsonl").write_text(
        '{"title": "Oslo", "text": "Capital of\\nNorway", "id": 3}\n\n{"text": "nothing else"}\n'
    )
    (tmp_path / "d.bin").write_bytes(b"\xff\xfe")
    return tmp_path


# Corpora ----------------------------------------------------------------------------------------------


def test_a_folder_holds_records_and_paragraphs_with_their_places(folder):
    documents = [(d.title, d.text, d.file, d.line) for d in read_corpus(folder).documents]
    assert documents == [
        ("Paris", "Paris is the capital\nof France.", "a.md", 3),
        ("Lyon", "Lyon is a city.", "a.md", 7),
        ("b", "Berlin is in Germany.", "b.txt", 1),
        ("b", "Rome is in\nItaly.", "b.txt", 5),
        ("Oslo", "Capital of\nNorway", "sub/c.jsonl", 1),
        ("", "nothing else", "sub/c.jsonl", 3),
    ]
    assert [d.file for d in read_corpus(str(folder / "sub" / "c.jsonl")).documents] == ["c.jsonl"] * 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"text": "a"}\n{"text": }', "line 2: isn't JSON"),
        (b'{"text": "a"}\n\n[1]', "line 3: isn't a JSON object"),
        (b'{"title": "a"}', "line 1: field 'text'"),
        (b'{"text": "  "}', "line 1: field 'text'"),
        (b'{"text": 3}', "line 1: field 'text'"),
        (b'{"text": "a", "title": 3}', "line 1: field 'title'"),
        (b'{"text": "a"}\n{"text": "\xff"}', "line 2: isn't UTF-8"),
        (b"[" * 100_000, "line 1: isn't JSON"),
        (b"\n\n", "no text"),
    ],
)
def test_a_bad_line_is_named_with_its_file_and_field(tmp_path, content, words):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=words) as refusal:
        read_corpus(path)
    assert str(path) in str(refusal.value)


def test_no_file_and_no_text_are_refused(tmp_path):
    (tmp_path / "empty.txt").write_text("\n")
    for path, words in (("nowhere", "no such file"), ("empty.txt", "no text"), (".", "no text")):
        with pytest.raises(BadInput, match=words):
            read_corpus(tmp_path / path)
    (tmp_path / "empty.txt").unlink()
    with pytest.raises(BadInput, match=r"no \.txt"):
        read_corpus(tmp_path)


@pytest.mark.parametrize(
    ("file", "flows", "pieces"),
    [
        ("x.txt", True, [("a b c", "x.txt:10"), ("c d e", "x.txt:11"), ("e f g", "x.txt:11")]),
        ("x.jsonl", False, [("a b c", "x.jsonl:10"), ("c d e", "x.jsonl:10"), ("e f g", "x.jsonl:10")]),
    ],
)
def test_passages_overlap_and_know_their_line(file, flows, pieces):
    document = Document("t", "a b\nc d e\nf g", file, 10, flows)
    assert [(p.text, p.place) for p in split_passages(Corpus((document,)), 3, 1)] == pieces


@given(st.integers(1, 60), st.integers(1, 12), st.integers(0, 11))
def test_passages_cover_every_word_within_their_length(count, words, overlap):
    overlap = min(overlap, words - 1)
    text = [str(i) for i in range(count)]
    pieces = [p.text.split() for p in split_passages(corpus_of(" ".join(text)), words, overlap)]
    assert all(0 < len(piece) <= words for piece in pieces)
    assert [word for i, piece in enumerate(pieces) for word in piece[overlap if i else 0 :]] == text


# Queries ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "settings", "answer"),
    [
        ("capital of France", {}, "[1] Paris: Paris is the capital of France. (a.md:3)\n[2] Oslo: Capital of Norway"),
        ("oslo", {"top": 1}, "[1] Oslo: "),  # a title is searched
        ("nothing", {"top": 1}, "[1] nothing else (sub/c.jsonl:3)"),
        ("Madagascar", {}, "Nothing was found"),  # and that is no error
    ],
)
def test_passages_are_numbered_and_have_their_place(folder, query, settings, answer):
    result = ask(search(read_corpus(folder), **settings), query)
    assert result.text.startswith(answer)
    assert not result.error


@pytest.mark.parametrize("query", ["", " ?! ", "x" * 1001])
def test_a_query_without_words_or_too_long_is_an_error(query):
    assert ask(search(corpus_of("a")), query).error


def test_equal_scores_are_ranked_in_corpus_order():
    tool = search(corpus_of(*["words here", "words words", "here here"] * 200), top=9)
    assert [line.split(":")[0] for line in ask(tool, "words").text.split("\n")] == [
        f"[{rank}] t{3 * rank - 1}" for rank in range(1, 10)
    ]


def test_scores_are_those_of_bm25():
    texts = ["a b b c", "a a d", "b c c c c e f g", "d e"]
    k1, b, query = 1.2, 0.6, ["b", "c"]
    documents = [split_words(f"t{i} {text}") for i, text in enumerate(texts, 1)]
    mean = sum(map(len, documents)) / len(documents)

    def score(document):
        total = 0.0
        for word in query:
            holders = sum(word in other for other in documents)
            inverse = math.log(1 + (len(documents) - holders + 0.5) / (holders + 0.5))
            count = document.count(word)
            total += inverse * count / (count + k1 * (1 - b + b * len(document) / mean))
        return total

    scores = [score(document) for document in documents]
    order = [i for i in sorted(range(4), key=lambda i: -scores[i]) if scores[i] > 0]
    lines = ask(search(corpus_of(*texts), top=4, k1=k1, b=b), " ".join(query)).text.split("\n")
    assert [line.split(":")[0] for line in lines] == [f"[{rank}] t{i + 1}" for rank, i in enumerate(order, 1)]
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("text", "settings", "words"),
    [
        ("a", settings, "search: ")
        for settings in ({"top": 0}, {"chunk_words": 0}, {"overlap": 100}, {"b": 2}, {"k1": -1})
    ]
    + [("... --", {}, "no words")],
)
def test_settings_out_of_range_and_corpora_without_words_are_refused(text, settings, words):
    with pytest.raises(BadInput, match=words):
        search(Corpus((Document("", text, "file", 1, False),)), **settings)


def test_the_index_starts_no_jax_and_prints_nothing():
    program = """
import logging
logging.basicConfig(level=logging.DEBUG)
from flowgrpo.tools.search import Corpus, Document
from flowgrpo.tools.search import search
tool = search(Corpus((Document("", "a b c", "file", 1, False),)))
assert tool.call({"query": "b"}) == "[1] a b c (file:1)"
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
import bm25s
index = bm25s.BM25()
index.index([["a", "b"], ["b", "c"]], show_progress=False)
assert index.retrieve([["c"]], k=1, show_progress=False, backend_selection="numpy")[0][0][0] == 1  # still whole
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert (ran.returncode, ran.stdout) == (0, ""), ran.stderr
    assert "bm25s" not in ran.stderr


def test_a_missing_package_names_its_extra(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "bm25s"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(BadInput, match="pip install 'bm25s"):
        search(corpus_of("a"))
