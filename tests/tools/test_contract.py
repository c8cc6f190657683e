"""The contract of the family: every member's schema is one, no call raises, and pure ones repeat themselves."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowgrpo.contracts import Call, Result, Tool
from flowgrpo.sandbox import Limits, Sandbox
from flowgrpo.tools.calculator import calculator
from flowgrpo.tools.llm import llm
from flowgrpo.tools.python import python
from flowgrpo.tools.schema import check_arguments, tool
from flowgrpo.tools.search import Corpus, Document, search
from flowgrpo.tools.toolset import toolset


def lookup(key: str, table: dict[str, int], deep: list[list[int]] | None = None) -> int:
    """Looks a key up.

    key: what to look up
    """
    return table[key] + len(deep or [])


CORPUS = Corpus((Document("Oslo", "the capital of Norway", "file", 1, False),))
MEMBERS = {
    "calculator": ({"expression": "6 * 7"}, "42"),
    "python": ({"code": "print(6 * 7)"}, "42"),
    "search": ({"query": "capital"}, "[1] Oslo: the capital of Norway (file:1)"),
    "llm": ({"question": "Why?"}, "Because: Why?"),
    "lookup": ({"key": "a", "table": {"a": 3}}, "3"),
}


@pytest.fixture(scope="module")
def tools():
    with Sandbox(workers=2, unsafe=True) as box:
        members = [
            calculator(),
            python(box, limits=Limits(seconds=60), pure=True),
            search(CORPUS),
            llm(lambda prompt: f"Because: {prompt}", pure=True),
            tool(lookup, pure=True),
        ]
        with toolset(members, timeout=60.0) as made:
            yield made


def of(tools, name) -> Tool:
    return next(tool for tool in tools.tools if tool.name == name)


@pytest.mark.parametrize("name", MEMBERS)
def test_the_schema_is_json_schema_of_the_arguments(tools, name):
    schema, (arguments, _) = of(tools, name).schema, MEMBERS[name]
    assert set(schema) == {"name", "description", "parameters"}
    assert schema["name"] == name
    assert len(schema["description"]) > 5
    assert set(schema["parameters"]["required"]) <= set(schema["parameters"]["properties"])
    assert json.loads(json.dumps(schema)) == schema
    assert check_arguments(schema, arguments) == ""
    validator = pytest.importorskip("jsonschema").Draft202012Validator
    validator.check_schema(schema["parameters"])
    assert validator(schema["parameters"]).is_valid(arguments)


@pytest.mark.parametrize("name", MEMBERS)
def test_equal_calls_give_equal_observations(tools, name):
    arguments, text = MEMBERS[name]
    for seed in ((), (1, 2)):
        assert tools.call_tool(Call("tool", name, json.loads(json.dumps(arguments)), seed=seed)) == Result(text)
    assert of(tools, name).pure
    assert str(of(tools, name).call(arguments)) == text


HOSTILE = [
    None,
    {1: 2},
    {"code": ["print(1)"]},
    {"code": "\ud800" * 10},
    {"code": "x" * 10**7},
    {"question": b"bytes"},
    {"question": "\x1b[2J\0"},
    {"key": "b", "table": {"a": 1}},
    {"key": "a", "table": {"a": 1}, "deep": [[True]]},
    {"expression": "(" * 10**6},
    {"query": "\u202e" * 10**6},
]


@pytest.mark.parametrize("name", MEMBERS)
@pytest.mark.parametrize("arguments", HOSTILE, ids=lambda value: repr(value)[:30])
def test_hostile_arguments_never_raise(tools, name, arguments):
    result = tools.call_tool(Call("tool", name, arguments))
    assert isinstance(result, Result)
    assert not result.failure
    assert len(result.text) <= 4000
    result.text.encode()  # no lone surrogates


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.sampled_from([name for name in MEMBERS if name != "python"]),
    VALUES | st.dictionaries(st.sampled_from(["expression", "query", "question", "key", "table", "deep"]), VALUES),
)
def test_no_arguments_raise_and_pure_tools_repeat_themselves(tools, name, arguments):
    first = tools.call_tool(Call("tool", name, arguments))
    assert first == tools.call_tool(Call("tool", name, arguments))
    assert not first.failure
    assert len(first.text) <= 4000
    first.text.encode()
