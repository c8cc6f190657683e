"""Tool calls in what a model wrote, in three forms; what can't be read stays what it is (A4)."""

import json

import pytest

from flowgrpo.gateway.tool_calls import ToolCall, as_openai, form_of, parse_calls

CALL = {"name": "add", "arguments": {"x": 1}}


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (None, None),
        ("{{ messages }}", None),
        ("{% if tools %}<tool_call>{% endif %}", "tags"),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", "bracket"),
        ('{% if tools %}{"name": name, "parameters": values}{% endif %}', "object"),
        ("{{ tools | tojson }}", "tags"),
    ],
)
def test_the_form_is_that_of_the_template(template, form):
    assert form_of(template) == form


@pytest.mark.parametrize(
    ("words", "form", "content"),
    [
        (f"I add.\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>", "tags", "I add."),
        (f"<tool_call>{json.dumps(CALL)}", "tags", ""),
        (f"I add. [TOOL_CALLS] [{json.dumps(CALL)}]", "bracket", "I add."),
        ('{"name": "add", "parameters": {"x": 1}}', "object", ""),
        ('<|python_tag|>{"name": "add", "parameters": {"x": 1}}', "object", ""),
        ('<tool_call>{"name": "add", "arguments": "{\\"x\\": 1}"}</tool_call>', "tags", ""),
    ],
)
def test_a_call_is_read_and_what_is_said_beside_it_stays(words, form, content):
    assert parse_calls(words, form) == (content, (ToolCall("add", {"x": 1}),), False)


def test_several_calls_come_in_their_order():
    words = "".join(f"<tool_call>{json.dumps(CALL | {'name': name})}</tool_call>\n" for name in "abc")
    assert [call.name for call in parse_calls(words, "tags").calls] == list("abc")
    listed = parse_calls(f"[TOOL_CALLS] [{json.dumps(CALL)}, {json.dumps(CALL)}]", "bracket")
    assert len(listed.calls) == 2


DEEP = '{"name": "f", "arguments": ' + '{"a": ' * 70 + "1" + "}" * 71  # no request could hand it back


@pytest.mark.parametrize(
    "inside",
    [
        "{",
        "[]x",
        "null",
        "3",
        '{"name": 3}',
        '{"name": ""}',
        '{"name": "f", "arguments": [1]}',
        "[" * 5000,
        "NaN",
        DEEP,
    ],
)
def test_A4_a_call_that_cannot_be_read_is_content_and_broken(inside):
    words = f"so <tool_call>{inside}</tool_call>"
    assert parse_calls(words, "tags") == (words, (), True)


@pytest.mark.parametrize("form", ["tags", "bracket", "object"])
def test_words_without_a_call_are_content(form):
    assert parse_calls(" 3 < 4 {so} ", form) == (" 3 < 4 {so} ", (), False)


def test_a_call_reads_for_clients_as_theirs_do():
    found = as_openai(ToolCall("add", {"x": "é"}), "call00100")
    assert found == {"id": "call00100", "type": "function", "function": {"name": "add", "arguments": '{"x": "é"}'}}
