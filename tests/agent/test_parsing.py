"""Parsing of roles' words: lenient in case and spaces, strict in substance; malformed text has a reason (A4)."""

import pytest
from agent_cases import ADD, ECHO, SCHEMAS
from hypothesis import given
from hypothesis import strategies as st

from flowgrpo.agent.action_forms import parse_lines
from flowgrpo.agent.roles import parse_arguments, parse_text, parse_verdict
from flowgrpo.agent.state import AgentState, Budget, PlannerChoice, Verdict
from flowgrpo.data.tool_calls import Malformed, parse_object, strip_thoughts, to_arguments, to_command

STATE = AgentState("t", "q", SCHEMAS, Budget(3, 100), "planner")
DEEP = '{"a": ' * 30_000 + "1" + "}" * 30_000


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("Tool: echo\nContext: hi", PlannerChoice("", "echo", "hi")),
        ("Sub-goal: say it \nTool: echo\nContext: hi", PlannerChoice("say it", "echo", "hi")),
        ("  sub goal :say it\n\tTOOL:  Echo  \n context :hi  ", PlannerChoice("say it", "echo", "hi")),
        ("Tool: add\nContext: \n  a = 1\n\n  b = 2\n\n", PlannerChoice("", "add", "  a = 1\n\n  b = 2")),
        ("Tool: echo\r\nContext: one\r\ntwo", PlannerChoice("", "echo", "one\ntwo")),
        ("Tool: echo\nContext: Tool: add\nSub-goal: x", PlannerChoice("", "echo", "Tool: add\nSub-goal: x")),
        ("I think so.\nTool: echo\nSub-goal: g\nContext: hi", PlannerChoice("g", "echo", "hi")),
        ("<think>Tool: add</think>\nTool: echo\nContext: hi", PlannerChoice("", "echo", "hi")),
        ("thoughts that a template began</think>Tool: echo\nContext: hi", PlannerChoice("", "echo", "hi")),
        ("Tool: echo", PlannerChoice("", "echo", "")),
        ("Tool: ANSWER\nContext: 5", PlannerChoice("", "answer", "5")),
    ],
)
def test_a_plan_is_parsed(words, found):
    assert parse_lines(STATE, words) == found


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("", "empty"),
        (" \n\t ", "empty"),
        ("<think>on and on\nTool: echo", "empty"),
        ("echo(hi)", 'no line "Tool: name"'),
        ("Tool:\nContext: hi", 'no line "Tool: name"'),
        ("Context: hi\nTool: echo", 'no line "Tool: name"'),
        ("Tools: echo", 'no line "Tool: name"'),
        ("Tool: echo\nTool: add\nContext: 1", "twice"),
        ("Tool: browser\nContext: hi", "there is no tool 'browser'; choose one of echo, add, answer"),
        ("Tool: echo(hi)", "there is no tool"),
        ("Tool: echo, add", "there is no tool"),
        ("Tool: answer\nContext: \n ", "the answer is empty"),
    ],
)
def test_A4_a_malformed_plan_has_a_reason(words, reason):
    found = parse_lines(STATE, words)
    assert isinstance(found, Malformed)
    assert reason in found.reason


@given(st.text("toolcnexsubga:\n -<think>/{}\"'", max_size=80))
def test_A4_any_text_is_a_value_or_malformed(words):
    assert isinstance(parse_lines(STATE, words), PlannerChoice | Malformed)
    assert isinstance(parse_arguments(STATE, words), dict | Malformed)
    assert isinstance(parse_verdict(STATE, words), Verdict | Malformed)
    assert isinstance(parse_text(STATE, words), str | Malformed)


def test_a_long_unknown_name_is_not_repeated_in_full():
    found = parse_lines(STATE, "Tool: " + "x" * 10_000)
    assert isinstance(found, Malformed)
    assert len(found.reason) < 150


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ('{"a": 1}', {"a": 1}),
        ('```json\n{"a": 1}\n```', {"a": 1}),
        ('In {braces}:\n```JSON\n{\n"a": 1\n}\n```', {"a": 1}),
        ('Here they are:\n{"a": {"b": "}"}}\nDone.', {"a": {"b": "}"}}),
        ('<think>{"a": 2}</think>{"a": 1}', {"a": 1}),
        ("{}", {}),
    ],
)
def test_arguments_are_parsed(words, found):
    assert parse_arguments(STATE, words) == found


@pytest.mark.parametrize(
    "words", ["", "a=1", "[1]", '"a"', "{a: 1}", '{"a": NaN}', '{"a": 1e999}', '{"a": ' + "9" * 5000 + "}", DEEP]
)
def test_A4_arguments_that_are_no_json_object_are_malformed(words):
    assert isinstance(parse_arguments(STATE, words), Malformed)
    assert parse_object(words) is None


def test_arguments_hold_valid_unicode_only():
    assert parse_object('{"a\\ud800": ["\\udfff", "é\\ufdd0"]}') == {"a?": ["?", "é"]}


@pytest.mark.parametrize(
    ("schema", "context", "found"),
    [
        (ECHO, "say hi", {"words": "say hi"}),
        (ECHO, '{"words": "hi"}', {"words": "hi"}),
        (ECHO, "[1, 2]", {"words": "[1, 2]"}),
        (ADD, '{"a": 1, "b": 2}', {"a": 1, "b": 2}),
        ({"name": "now"}, "", {}),
        ({"name": "now", "parameters": {"type": "object", "properties": {"zone": True}}}, " ", {}),
        ({"name": "f", "parameters": {"properties": {"x": {"type": ["string", "null"]}}}}, "hi", {"x": "hi"}),
    ],
)
def test_the_context_is_a_json_object_or_the_only_text(schema, context, found):
    assert to_arguments(schema, context) == found


@pytest.mark.parametrize(
    ("schema", "context", "reason"),
    [
        (ADD, "1 and 2", "a JSON object of a, b, note"),
        (ADD, "", "a JSON object of a, b, note"),
        (ECHO, " \n", "the context is empty; words is needed"),
        ({"name": "now"}, "please", "a JSON object of no arguments"),
        ({"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}}, "7", "a JSON object of x"),
    ],
)
def test_A4_a_context_that_fits_no_argument_says_what_is_needed(schema, context, reason):
    found = to_arguments(schema, context)
    assert isinstance(found, Malformed)
    assert reason in found.reason


def test_a_command_is_the_only_text_or_a_copy():
    some = {"a": [1], "é": "x\ud800"}
    for arguments, command in [({"words": "2*3"}, "2*3"), (some, {"a": [1], "é": "x?"}), ({}, {})]:
        assert to_command(arguments) == command
    assert to_command(some)["a"] is not some["a"]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("STOP", Verdict(True)),
        ("STOP: it is known", Verdict(True, "it is known")),
        ("continue - something\n is missing", Verdict(False, "something is missing")),
        ("All is there.\n**Conclusion:** STOP", Verdict(True, "All is there.")),
        ("verdict: Continue\nOne fact is missing.", Verdict(False, "One fact is missing.")),
        ("<think>STOP</think>CONTINUE", Verdict(False)),
        ("We can't stop here.\nCONTINUE", Verdict(False, "We can't stop here.")),
    ],
)
def test_a_verdict_is_parsed(words, found):
    assert parse_verdict(STATE, words) == found


@pytest.mark.parametrize(
    "words",
    ["", "yes", "I would stop", "STOPPED", "STOP\nCONTINUE", "<think>STOP", "x" + "\n" * 100_000 + "y"],
    ids=lambda words: repr(words[:16]),
)
def test_a_text_without_a_verdict_is_malformed(words):
    assert isinstance(parse_verdict(STATE, words), Malformed)


def test_thoughts_are_stripped():
    assert strip_thoughts("<think>a</think>b") == "b"
    assert strip_thoughts("a</think>b</think>c") == "c"
    assert strip_thoughts("<think>a</think>b<think>c") == ""
    assert parse_text(STATE, "<think>a</think>\n b \n") == "b"
    assert isinstance(parse_text(STATE, "<think>a</think>\n"), Malformed)
