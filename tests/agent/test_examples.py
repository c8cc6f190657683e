"""Worked examples: the messages of tasks that are solved with the real tools, or an error that names what is wrong."""

import json
from dataclasses import replace

import pytest
from agent_cases import ECHO, SCHEMAS, agent_text, make_system, play, run_tools

from flowgrpo.agent.action_forms import ACTION_FORMS, CALLS, LINES, TOOL_CALLS
from flowgrpo.agent.examples import scripted_actions, worked_examples
from flowgrpo.agent.rendering import growing_context
from flowgrpo.agent.roles import planner
from flowgrpo.contracts import Result
from flowgrpo.tools.calculator import calculator
from flowgrpo.tools.toolset import toolset
from flowgrpo.types import BadInput, Task

TEXT = agent_text()


def solved(steps, final="155", answers=("155",), query="120 pens and 35 more?") -> Task:
    return Task("pens", query, answers, "answer", {"steps": steps, "final": final})


ONE = solved([["calculator", "120 + 35"]])
TWO = replace(
    solved([("calculator", "2 + 1"), ("calculator", "3 * 4")], 12, ("12", "twelve"), "2 and 1, 4 times?"), id="two"
)


def says(*words: str) -> tuple[dict[str, str], ...]:
    """Messages of a user and an assistant in turn."""
    return tuple({"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(words))


def worked(tasks, form=CALLS, call_tool=run_tools, schemas=SCHEMAS, memory_tokens=200):
    return worked_examples(TEXT, form, tasks, call_tool, schemas=schemas, memory_tokens=memory_tokens)


def calculated(form, tasks=(ONE, TWO)):
    with toolset([calculator()]) as tools:
        return worked(tasks, form, tools.call_tool, tools.schemas)


def test_two_tasks_as_a_conversation_of_calls_with_the_real_calculator():
    assert calculated(CALLS) == says(
        "120 pens and 35 more?",
        "calculator(120 + 35)",
        "155",
        "answer(155)",
        "2 and 1, 4 times?",
        "calculator(2 + 1)",
        "3",
        "calculator(3 * 4)",
        "12",
        "answer(12)",
    )


def test_a_task_in_the_tags_of_chat_templates():
    assert calculated(TOOL_CALLS, [ONE]) == says(
        "120 pens and 35 more?",
        '<tool_call>\n{"name": "calculator", "arguments": {"expression": "120 + 35"}}\n</tool_call>',
        "155",
        '<tool_call>\n{"name": "answer", "arguments": {"text": "155"}}\n</tool_call>',
    )


def test_a_task_in_lines_shows_records_and_the_turns_that_are_left():
    assert calculated(LINES, [ONE]) == says(
        "Question:\n> 120 pens and 35 more?\nTurns left: 2",
        "Tool: calculator\nContext: 120 + 35",
        '1. calculator("120 + 35") -> "155"\nTurns left: 1',
        "Tool: answer\nContext: 155",
    )


@pytest.mark.parametrize("form", ACTION_FORMS.values())
def test_an_example_is_what_a_turn_of_the_planner_looks_like(form):
    """The messages of an example are those that a run shows around the same actions."""
    with toolset([calculator()]) as tools:
        messages = worked([ONE], form, tools.call_tool, tools.schemas)
        env = make_system(
            TEXT,
            schemas=tools.schemas,
            planner=planner(form=form, instructions="Do.", examples=messages),
            rendering=growing_context,
            turns=2,
        )
        played = play(env, TEXT, [messages[1]["content"], messages[3]["content"]], tools.call_tool, of=ONE)
    shown = TEXT.decode([*played.said[0].tokens, *played.sampled[0], *played.said[1].tokens, *played.sampled[1]])
    assert messages[2]["content"] in TEXT.decode(played.said[1].tokens)
    assert shown.count(messages[0]["content"]) == shown.count(messages[3]["content"]) == 2
    assert played.steps[-1].output == "155"


def test_no_tasks_are_no_messages():
    assert worked([]) == ()


def test_a_long_observation_is_shortened_as_in_a_run():
    task = solved([["echo", "hi"]], "5", ("5",))
    _, _, seen, _ = worked([task], call_tool=lambda _: Result("x" * 900), memory_tokens=200)
    assert len(TEXT.encode(seen["content"])) <= 200
    assert "characters ...]" in seen["content"]


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({}, "doesn't say how it is solved: give it the fields steps, a list of [tool, text], and final, the answer"),
        ({"final": "5"}, "doesn't say how it is solved"),
        ({"steps": []}, "doesn't say how it is solved"),
        ({"steps": "echo", "final": "5"}, "doesn't say how it is solved"),
        (
            {"steps": [["browser", "5"]], "final": "5"},
            "the step ['browser', '5']: give [tool, text], with a tool of echo",
        ),
        (
            {"steps": [["echo"]], "final": "5"},
            "has the step ['echo']: give [tool, text], with a tool of echo, add, answer",
        ),
        ({"steps": ["ab"], "final": "5"}, "has the step 'ab'"),
        ({"steps": [3], "final": "5"}, "has the step 3"),
        ({"steps": [None], "final": "5"}, "has the step None"),
        ({"steps": [[["echo"], "a"]], "final": "5"}, "has the step [['echo'], 'a']"),
        ({"steps": [{"tool": "echo", "text": "a"}], "final": "5"}, "has the step {'tool': 'echo', 'text': 'a'}"),
    ],
)
def test_a_task_that_does_not_say_how_it_is_solved_is_refused(metadata, said):
    task = Task("pens", "?", ("5",), "answer", metadata)
    with pytest.raises(BadInput) as refused:
        scripted_actions(task, CALLS, SCHEMAS)
    assert str(refused.value).startswith("task 'pens' ")
    assert said in str(refused.value)


def test_a_step_may_give_a_tool_several_arguments_and_a_task_no_steps():
    task = solved([["add", {"a": 2, "b": 3}]], 5, ("5",))
    assert scripted_actions(task, CALLS, SCHEMAS) == ['add({"a": 2, "b": 3})', "answer(5)"]
    assert scripted_actions(solved([]), CALLS, SCHEMAS) == ["answer(155)"]
    tagged = scripted_actions(task, TOOL_CALLS, SCHEMAS)[0].splitlines()[1]
    assert json.loads(tagged) == {"name": "add", "arguments": {"a": 2, "b": 3}}
    assert worked([task])[2]["content"] == "5"


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (
            solved([["add", "2 and 3"]]),
            "the example 'pens' is refused at 'add(2 and 3)': the context must be a JSON object of a, b, note",
        ),
        (solved([["add", '{"a": 1}']]), "is refused at 'add({\"a\": 1})': bad arguments: KeyError('b')"),
        (solved([["echo", "wrong"]]), "is refused at 'echo(wrong)': refused"),
        (solved([["echo", "hi"]], " "), "is refused at 'answer(\" \")': the answer is empty"),
        (solved([["echo", "down"], ["echo", "hi"]]), "ends at 'echo(down)': echo: the server is down"),
        (solved([["echo", "down"]], answers=()), "ends at 'echo(down)': echo: the server is down"),
        (solved([["answer", "155"], ["echo", "hi"]]), "ends at 'answer(155)': it answers before its last step"),
        (
            solved([["echo", "hi"]], "154"),
            "the example 'pens' answers '154', but its answer is '155': correct final or answers",
        ),
    ],
)
def test_an_example_that_goes_wrong_is_refused_with_its_step(task, said):
    with pytest.raises(BadInput) as refused:
        worked([task])
    assert said in str(refused.value)


def test_a_task_without_gold_answers_may_be_an_example():
    assert worked([solved([["echo", "hi"]], "any", ())])[-1]["content"] == "answer(any)"


def test_a_step_is_of_a_tool_that_the_agent_has():
    with pytest.raises(BadInput, match=r"give .tool, text., with a tool of echo, answer$"):
        worked([solved([["add", "{}"]])], schemas=(ECHO,))
