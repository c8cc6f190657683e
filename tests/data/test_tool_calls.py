"""Tool calls in a model's text, in three formats; malformed ones stay in the content (A4)."""

import json

import pytest

from flowgrpo.data.tool_calls import ToolCall, parse_tool_calls, to_openai, tool_call_format

CALL = {"name": "add", "arguments": {"x": 1}}


@pytest.mark.parametrize(
    ("template", "call_format"),
    [
        (None, None),
        ("{{ messages }}", None),
        ("{% if tools %}<tool_call>{% endif %}", "tags"),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", "bracket"),
        ('{% if tools %}{"name": name, "parameters": values}{% endif %}', "object"),
        ("{{ tools | tojson }}", "tags"),
    ],
)
def test_the_format_is_that_of_the_template(template, call_format):
    assert tool_call_format(template) == call_format


@pytest.mark.parametrize(
    ("words", "call_format", "content"),
    [
        (f"I add.\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>", "tags", "I add."),
        (f"<tool_call>{json.dumps(CALL)}", "tags", ""),
        (f"I add. [TOOL_CALLS] [{json.dumps(CALL)}]", "bracket", "I add."),
        ('{"name": "add", "parameters": {"x": 1}}', "object", ""),
        ('<|python_tag|>{"name": "add", "parameters": {"x": 1}}', "object", ""),
        ('<tool_call>{"name": "add", "arguments": "{\\"x\\": 1}"}</tool_call>', "tags", ""),
    ],
)
def test_a_call_is_parsed_and_other_text_is_content(words, call_format, content):
    assert parse_tool_calls(words, call_format) == (content, (ToolCall("add", {"x": 1}),), False)


def test_several_calls_keep_their_order():
    words = "".join(f"<tool_call>{json.dumps(CALL | {'name': name})}</tool_call>\n" for name in "abc")
    assert [call.name for call in parse_tool_calls(words, "tags").calls] == list("abc")
    listed = parse_tool_calls(f"[TOOL_CALLS] [{json.dumps(CALL)}, {json.dumps(CALL)}]", "bracket")
    assert len(listed.calls) == 2


DEEP = '{"name": "f", "arguments": ' + '{"a": ' * 70 + "1" + "}" * 71  # no request could send it back


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
def test_A4_a_malformed_call_is_content_and_an_error(inside):
    words = f"so <tool_call>{inside}</tool_call>"
    assert parse_tool_calls(words, "tags") == (words, (), True)


@pytest.mark.parametrize("call_format", ["tags", "bracket", "object"])
def test_words_without_a_call_are_content(call_format):
    assert parse_tool_calls(" 3 < 4 {so} ", call_format) == (" 3 < 4 {so} ", (), False)


def test_a_call_has_the_form_of_the_openai_api():
    value = to_openai(ToolCall("add", {"x": "é"}), "call00100")
    assert value == {"id": "call00100", "type": "function", "function": {"name": "add", "arguments": '{"x": "é"}'}}
