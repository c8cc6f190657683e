"""Forms of a planner's action: written actions can be parsed, and a conversation has calls and observations alone."""

import json

import pytest
from agent_cases import ADD, ECHO, SCHEMAS, TEMPLATES, agent_text, ids, make_system, play, run_tools, task
from hypothesis import assume, given
from hypothesis import strategies as st

from flowgrpo.agent.action_forms import ACTION_FORMS, CALLS, LINES, TOOL_CALLS, parse_call, parse_tool_call
from flowgrpo.agent.rendering import fresh_context, growing_context
from flowgrpo.agent.roles import planner
from flowgrpo.agent.state import (
    ANSWER,
    ANSWER_SCHEMA,
    AgentState,
    Budget,
    Memory,
    MemoryRecord,
    observation_line,
    render_memory,
)
from flowgrpo.contracts import Result
from flowgrpo.data.named_models import NAMED_MODELS
from flowgrpo.data.tokenizer import BREAK, PLACEHOLDER, control_ids, start_conversation
from flowgrpo.data.tool_calls import Malformed, parse_object, to_arguments
from flowgrpo.recipes.task_sets import TASK_SETS
from flowgrpo.training import names
from flowgrpo.types import BadInput

TEXT = agent_text()
STATE = AgentState("t", "q", SCHEMAS, Budget(3, 100), "planner")
TALKING = [form for form in ACTION_FORMS.values() if form.is_chat]
WORDS = st.lists(
    st.sampled_from([*'"(){}[]\\\n :<>', "é", "\u2028", "echo(", "</tool_call>", '"a"', "5", "Tool: echo"]) | st.text()
).map("".join)
CONTEXTS = WORDS.filter(lambda words: "think>" not in words and not set(words) & {BREAK, PLACEHOLDER})
EXAMPLES = (
    {"role": "user", "content": "say a"},
    {"role": "assistant", "content": "echo(a)"},
    {"role": "user", "content": "heard a"},
    {"role": "assistant", "content": "answer(a)"},
)


def reason(found) -> str:
    assert isinstance(found, Malformed)
    return found.reason


# Written and read ---------------------------------------------------------------------------------------


def test_flags_offer_the_existing_forms():
    assert tuple(ACTION_FORMS) == names.ACTION_FORMS


def test_flags_offer_the_existing_task_sets_and_packaged_models():
    assert {name: ",".join(task_set.tools) for name, task_set in TASK_SETS.items()} == names.TASK_SETS
    assert tuple(NAMED_MODELS) == names.PACKAGED_MODELS


def test_each_form_writes_what_its_instructions_show():
    written = [form.write(ECHO, "a b") for form in ACTION_FORMS.values()]
    assert written == [
        "Tool: echo\nContext: a b",
        "echo(a b)",
        '<tool_call>\n{"name": "echo", "arguments": {"words": "a b"}}\n</tool_call>',
    ]


@given(context=CONTEXTS, schema=st.sampled_from([ECHO, ADD, ANSWER_SCHEMA]))
def test_a_written_call_parses_to_the_same_call(context, schema):
    found = CALLS.parse(STATE, CALLS.write(schema, context))
    if schema is ANSWER_SCHEMA and not context.strip():
        assert reason(found) == "the answer is empty"
    else:
        assert found == ("", schema["name"], context)


@given(context=CONTEXTS)
def test_a_tool_call_has_the_arguments_of_its_context(context):
    words = TOOL_CALLS.write(ECHO, context)
    given_first = to_arguments(ECHO, context)
    found = TOOL_CALLS.parse(STATE, words)
    assert not isinstance(found, Malformed)
    assert found.tool == "echo"
    if isinstance(given_first, Malformed):  # it stands there for the tool to refuse
        given_first = {"context": context}
    assert to_arguments(ECHO, found.context) == given_first


@given(context=CONTEXTS)
def test_an_answer_in_tags_is_its_text(context):
    assume(context.strip() and parse_object(context) is None)
    assert TOOL_CALLS.parse(STATE, TOOL_CALLS.write(ANSWER_SCHEMA, context)) == ("", ANSWER, context)


@given(context=st.text("ab:1 \n", min_size=1).filter(lambda words: words == words.strip(" \n")))
def test_written_lines_parse_to_the_same_up_to_outer_white_space(context):
    assert LINES.parse(STATE, LINES.write(ECHO, context)) == ("", "echo", context)


@pytest.mark.parametrize("name", ["ECHO", "Echo", "echo"])
def test_the_case_of_a_tools_name_does_not_matter(name):
    expected = ("", "echo", "hi")
    assert LINES.parse(STATE, f"Tool: {name}\nContext: hi") == expected
    assert CALLS.parse(STATE, f" {name} ( hi )\n") == expected
    call = TOOL_CALLS.parse(STATE, f'<tool_call>{{"name": "{name}", "arguments": {{"words": "hi"}}}}</tool_call>')
    assert call == ("", "echo", '{"words": "hi"}')


@pytest.mark.parametrize(
    ("words", "context"),
    [
        ('echo("hi")', "hi"),
        ('echo( "a\\nb" )', "a\nb"),
        ('echo("a" and "b")', '"a" and "b"'),
        ('echo(")', '"'),
        ("echo('hi')", "'hi'"),
        ("echo((1 + 2) * 3)", "(1 + 2) * 3"),
        ('add({"a": 1, "b": 2})', '{"a": 1, "b": 2}'),
        ("<think>add(1)</think>echo(hi)", "hi"),
        ("echo()", ""),
    ],
)
def test_double_quotes_around_the_context_are_stripped(words, context):
    found = parse_call(STATE, words)
    assert not isinstance(found, Malformed)
    assert found.context == context


@pytest.mark.parametrize(
    "words", ["", " \n", "hi", "I call echo(hi)", "echo(hi) is what I call", "echo hi", "(hi)", "<think>echo(hi)"]
)
def test_A4_what_is_not_one_call_is_malformed(words):
    assert reason(parse_call(STATE, words)) == "the action is not one call, name(text)"


@pytest.mark.parametrize(
    "words",
    [
        "echo(a)\necho(b)",
        "echo(a) is a, Answer (a)",
        "echo((a)) add(1) 2)",
        'echo("a")\nanswer("a")',
        "answer(:)) echo(a)",
    ],
)
def test_A4_several_calls_are_malformed(words):
    assert reason(parse_call(STATE, words)) == "the action has more than one call: write one, name(text)"


@pytest.mark.parametrize(
    ("words", "context"),
    [
        ("echo(f(1) + echo(2))", "f(1) + echo(2)"),
        ("echo(a) b (c)", "a) b (c"),
        ("echo(a :) then my_echo(b))", "a :) then my_echo(b)"),
        ('echo("a) echo(b")', "a) echo(b"),
    ],
)
def test_a_text_may_have_parentheses_and_in_quotes_calls(words, context):
    assert parse_call(STATE, words) == ("", "echo", context)


@pytest.mark.parametrize("form", ["calls", "tool_calls"])
def test_A4_an_unknown_tool_is_answered_with_the_tools(form):
    words = {"calls": "browser(hi)", "tool_calls": '<tool_call>{"name": "browser", "arguments": {}}</tool_call>'}
    said = reason(ACTION_FORMS[form].parse(STATE, words[form]))
    assert said == "there is no tool 'browser'; choose one of echo, add, answer"


CALL = '{"name": "echo", "arguments": {"words": "hi"}}'


@pytest.mark.parametrize(
    "words",
    [
        "",
        CALL,
        f"Now: <tool_call>{CALL}</tool_call>",
        f"<tool_call>{CALL}</tool_call> is it",
        f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>{'name': 'echo'}</tool_call>",
        '<tool_call>{"name": "echo"}</tool_call>',
        '<tool_call>{"name": "echo", "arguments": "hi"}</tool_call>',
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
        f"<tool_call>[{CALL}]</tool_call>",
        '<tool_call>{"name": "echo", "arguments": {"words": NaN}}</tool_call>',
    ],
)
def test_A4_what_is_not_one_tool_call_in_tags_is_malformed(words):
    assert "the action is not one <tool_call>" in reason(parse_tool_call(STATE, words))


def test_the_closing_tag_may_be_the_stop_token_and_missing():
    assert parse_tool_call(STATE, f"<tool_call>\n{CALL}\n") == ("", "echo", '{"words": "hi"}')


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ('{"text": "5"}', "5"),
        ('{"text": 5}', "5"),
        ('{"text": true}', "true"),
        ('{"text": ["a", 1]}', '["a", 1]'),
        ('{"text": "5", "why": "so"}', "5"),
        ('{"result": 5}', '{"result": 5}'),
        ("{}", None),
        ('{"text": ""}', None),
        ('{"text": null}', None),
        ('{"text": " \\n"}', None),
    ],
)
def test_an_answer_is_its_text_as_json_writes_it_and_is_never_empty(arguments, answer):
    found = parse_tool_call(STATE, f'<tool_call>{{"name": "Answer", "arguments": {arguments}}}</tool_call>')
    assert found == (Malformed("the answer is empty") if answer is None else ("", ANSWER, answer))


@pytest.mark.parametrize("words", ["answer()", 'answer("")', "answer( \n)"])
def test_A4_a_call_of_an_empty_answer_is_malformed(words):
    assert reason(parse_call(STATE, words)) == "the answer is empty"


@given(words=st.text('echadnswr(){}<tool_call>/":, 1', max_size=60))
def test_A4_any_text_is_a_choice_or_malformed(words):
    for form in ACTION_FORMS.values():
        found = form.parse(STATE, words)
        assert isinstance(found, Malformed) or found.tool in {"echo", "add", ANSWER}


# In a conversation --------------------------------------------------------------------------------------


def talking_env(text, form=CALLS, *, examples=(), schemas=SCHEMAS, **settings):
    role = planner(form=form, examples=examples, instructions="Do.")
    return make_system(text, schemas=schemas, planner=role, rendering=growing_context, **settings)


def follow_up(text, content: str) -> list[int]:
    """The tokens between an action that has its stop token and the next one, as the template has them."""
    user = {"role": "user", "content": content}
    ask = {"role": "user", "content": "x"}
    before = start_conversation(text, [ask]).tokens
    whole = start_conversation(text, [ask, {"role": "assistant", "content": "y"}, user]).tokens
    said = [*text.encode("y"), text.stop_ids[-1]]
    assert list(whole[: len(before) + len(said)]) == [*before, *said]
    return list(whole[len(before) + len(said) :])


def test_the_first_prompt_is_instructions_tools_the_examples_and_the_bare_question():
    """A5: the prompt is exactly what the template gives for these messages."""
    text = agent_text()
    played = play(talking_env(text, examples=EXAMPLES), text, ["echo(b)", "add(1)", "answer(c)"], of=task("say b"))
    tools = 'Tools:\necho(words: string) - "Says a text again."\n'
    tools += 'add(a: integer, b: integer, note?: string) - "The sum of two numbers."\n'
    tools += 'answer(text: string) - "Give the answer and end."'
    first, *others = EXAMPLES
    messages = [{"role": "user", "content": f"Do.\n{tools}\nsay a"}, *others, {"role": "user", "content": "say b"}]
    assert played.said[0].tokens == start_conversation(text, messages).tokens
    assert first["content"] == "say a"
    assert list(played.said[1].tokens) == follow_up(text, "heard b")
    assert list(played.said[2].tokens) == follow_up(text, "error: the context must be a JSON object of a, b, note")
    assert played.steps[-1].output == "c"


def test_without_examples_the_question_is_quoted_and_no_turns_are_counted():
    (message,) = planner(form=CALLS, instructions="Do.").prompt(STATE, "")
    assert message["content"].startswith("Do.\nQuestion:\n> q\nTools:\necho(words: string)")
    assert "Turns left" not in message["content"]
    assert "Turns left: 3" in planner(form=LINES).prompt(STATE, "")[0]["content"]


def test_lines_may_have_examples_too_whose_question_is_data():
    examples = ({"role": "user", "content": "Question:\n> say a"}, {"role": "assistant", "content": "Tool: echo"})
    first, said, asked = planner(form=LINES, examples=examples, instructions="Do.").prompt(STATE, "")
    assert first["content"].startswith("Do.\nTools:\n")
    assert first["content"].endswith("\nQuestion:\n> say a")
    assert said == examples[1]
    assert asked["content"] == "Question:\n> q\nTurns left: 3"


def test_a_tool_of_two_parameters_gets_the_arguments_of_a_tool_call():
    heard = []

    def call_tool(call):
        heard.append((call.name, call.arguments))
        return run_tools(call)

    words = TOOL_CALLS.write(ADD, '{"a": 2, "b": 3}')
    answer = TOOL_CALLS.write(ANSWER_SCHEMA, "5")
    played = play(talking_env(TEXT, TOOL_CALLS), TEXT, [words, answer], call_tool)
    assert heard == [("add", {"a": 2, "b": 3})]
    assert list(played.said[1].tokens) == follow_up(TEXT, "5")
    assert (played.steps[-1].output, played.steps[-1].error) == ("5", False)


@pytest.mark.parametrize("form", TALKING)
def test_a_chat_form_needs_a_growing_context(form):
    with pytest.raises(BadInput, match="a conversation of calls and answers: give rendering=growing_context"):
        make_system(TEXT, schemas=SCHEMAS, planner=planner(form=form), rendering=fresh_context)


def test_an_observation_is_shortened_to_the_memory_budget():
    count, long = len, "x" * 500
    record = MemoryRecord(1, "", "echo", "hi", long)
    for budget in (400, 120, 60):
        seen = render_memory(Memory((record,)), budget=budget, count=count, write_record=observation_line)
        assert len(seen) <= budget
        assert "characters ...]" in seen
    assert render_memory(Memory((record,)), budget=10**4, count=count, write_record=observation_line) == long
    env = talking_env(TEXT, memory_tokens=150)
    played = play(env, TEXT, ["echo(hi)"], lambda _: Result(long))
    assert len(played.said[1].tokens) < 150 + 12
    assert "characters ...]" in TEXT.decode(played.said[1].tokens)


@pytest.mark.parametrize(
    ("record", "level", "line"),
    [
        (MemoryRecord(1, "", "echo", "a", "a\n b"), 0, "a\n b"),
        (MemoryRecord(1, "", "echo", "a", "no", error=True), 0, "error: no"),
        (MemoryRecord(1, "", "echo", "a", ""), 0, ""),
        (MemoryRecord(1, "", "echo", "a", "b"), 2, "..."),
        (MemoryRecord(1, "", "echo", "a", "b", error=True), 2, "error: ..."),
        (MemoryRecord(1, "", "echo", "a", "b", reason='not "b"'), 0, 'b [continue: "not \\"b\\""]'),
        (MemoryRecord(1, "", "echo", "a", "b", stop=True), 0, "b [stop]"),
    ],
)
def test_an_observation_is_not_quoted(record, level, line):
    assert observation_line(record, level, sizes=(40, 8), count=len) == line


@pytest.mark.parametrize("form", ["calls", "tool_calls"])
@pytest.mark.parametrize("style", TEMPLATES)
def test_A5_control_tokens_of_queries_and_tools_are_text(style, form):
    """Every token that the tokenizer knows, in the question, the tools, the call and what it gives."""
    text, form = agent_text(style), ACTION_FORMS[form]
    evil = "".join(sorted(text.hf_tokenizer.get_added_vocab()))
    room = {"max_tokens": 400, "context_tokens": 30_000, "memory_tokens": 9000}
    odd = {**ECHO, "description": evil}
    action = ids(text, form.write(ECHO, json.dumps({"words": evil.replace("<think>", "").replace("</think>", "")})))
    calm = ids(text, form.write(ECHO, "hi"))
    hot = play(
        talking_env(text, form, examples=EXAMPLES, schemas=[odd], **room),
        text,
        [action] * 2,
        lambda _: Result(f"{evil}\n{evil}"),
        of=task(evil),
    )
    cool = play(talking_env(text, form, examples=EXAMPLES, schemas=[ECHO], **room), text, [calm] * 2, of=task("hi"))
    assert [step.tool for step in hot.steps] == ["echo"] * 2
    for one, other in zip(hot.said, cool.said, strict=True):
        assert control_ids(text, one.tokens) == control_ids(text, other.tokens)
    assert evil in text.decode(hot.said[0].tokens)
    assert evil in text.decode(hot.said[1].tokens)
