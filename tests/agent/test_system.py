"""The agent system: which role acts when, how an episode ends, and which errors are counted."""

import pytest
from agent_cases import ADD, ECHO, SCHEMAS, agent_text, ids, make_system, plan, play, run_tools, task

from flowgrpo.agent import roles
from flowgrpo.agent.rendering import fresh_context, growing_context
from flowgrpo.contracts import Call, Result
from flowgrpo.data.tool_calls import signature
from flowgrpo.rollout.effects import record_effects
from flowgrpo.types import BadInput, Status

TEXT = agent_text()


def system(**settings):
    return make_system(TEXT, **{"schemas": SCHEMAS, "max_tokens": 400, "context_tokens": 6000, **settings})


def speaking(**words):
    """Tools, and roles that say `words`: a text, a `Result`, or a list of them, one after the other."""
    said = {name: iter(value) if isinstance(value, list) else None for name, value in words.items()}

    def call_tool(call: Call) -> Result:
        if call.kind == "tool":
            return run_tools(call)
        one = next(said[call.name]) if said[call.name] else words[call.name]
        return one if isinstance(one, Result) else Result(one)

    return call_tool


@pytest.mark.parametrize("rendering", [fresh_context, growing_context])
def test_a_tool_is_called_and_the_answer_ends_the_episode(rendering):
    env = system(rendering=rendering)
    played = play(env, TEXT, [plan("echo", "hi"), plan("add", '{"a": 2, "b": 3}', "the sum"), plan("answer", "5")])
    assert [(step.tool, step.error, step.done) for step in played.steps] == [
        ("echo", False, False),
        ("add", False, False),
        ("", False, True),
    ]
    last = played.steps[-1]
    assert (last.output, last.status, last.observation) == ("5", Status.FINISHED, None)
    prompts = played.prompts(TEXT)
    assert '1. echo("hi") -> "heard hi"\n' in prompts[1]
    assert '2. "the sum": add({"a": 2, "b": 3}) -> "5"\n' in prompts[2]
    assert ("1. echo" in prompts[2]) == (rendering is fresh_context)
    assert [f"Turns left: {3 - i}" in prompt for i, prompt in enumerate(prompts)] == [True] * 3
    assert [prompt.count("what is 2 + 3?") for prompt in prompts] == (
        [1, 1, 1] if rendering is fresh_context else [1, 0, 0]
    )
    assert [said.extends_context for said in played.said] == [rendering is growing_context] * 3


def test_at_the_turn_limit_the_generator_still_answers():
    generator = roles.generator()
    env = system(turns=2, generator=generator)
    assert env.max_turns == 2
    played = play(env, TEXT, [plan("echo", "hi"), plan("echo", "ho")], speaking(generator="it is 5"))
    assert (played.steps[-1].output, played.steps[-1].status) == ("it is 5", Status.TURN_LIMIT)
    bare = play(system(turns=1), TEXT, ["nonsense"])
    assert (bare.steps[-1].output, bare.steps[-1].status, bare.steps[-1].error) == ("", Status.TURN_LIMIT, True)


def test_the_verifier_stops_and_its_reason_is_remembered():
    call_tool = speaking(verifier=["CONTINUE: not yet", "STOP: enough"], generator="done")
    env = system(verifier=roles.verifier(), generator=roles.generator())
    played = play(env, TEXT, [plan("echo", "hi"), plan("echo", "ho"), plan("echo", "no more")], call_tool)
    assert len(played.steps) == 2
    assert '-> "heard hi" [continue: "not yet"]' in played.prompts(TEXT)[1]
    verdicts = [(record.stop, record.reason) for record in played.states[-1].memory.records]
    assert verdicts == [(False, "not yet"), (True, "enough")]
    assert (played.steps[-1].output, played.steps[-1].status) == ("done", Status.FINISHED)


def test_a_stop_in_the_last_turn_is_no_turn_limit():
    played = play(
        system(turns=1, verifier=roles.verifier()), TEXT, [plan("echo", "hi")], speaking(verifier="STOP: enough")
    )
    assert (played.steps[-1].status, played.steps[-1].output) == (Status.FINISHED, "")


def test_prompts_of_frozen_roles_have_what_they_need():
    call_tool, log = record_effects(
        speaking(analyst="look closely", executor='{"words": "hi"}', verifier="CONTINUE", generator="5!")
    )
    spoken = {name: getattr(roles, name)() for name in ("analyst", "executor", "verifier", "generator")}
    played = play(system(**spoken), TEXT, [plan("echo", "greet", "be kind"), plan("answer", "five")], call_tool)
    asked = {effect.call.name: effect.call for effect in log}
    assert list(asked) == ["analyst", "executor", "echo", "verifier", "generator"]
    content = {name: call.arguments["messages"][0]["content"] for name, call in asked.items() if call.kind == "role"}
    assert all("what is 2 + 3?" in words for words in content.values())
    assert 'echo(words: string) - "Says a text again."' in content["analyst"]
    fields = ("Sub-goal:\n> be kind", "Context:\n> greet", '"required": ["words"]')
    assert all(words in content["executor"] for words in fields)
    assert '1. "be kind": echo("hi") -> "heard hi"' in content["verifier"]
    assert "Proposed answer:\n> five" in content["generator"]
    assert all("Analysis:\n> look closely" in prompt for prompt in played.prompts(TEXT))
    assert (played.steps[-1].output, played.states[-1].lapses) == ("5!", ())
    assert len({effect.call.seed for effect in log}) == len(log)


def test_malformed_text_of_frozen_roles_is_a_counted_lapse():
    call_tool = speaking(
        analyst=" ", executor=["no idea", '{"words": "hi"}'], verifier="perhaps", generator="<think>hm"
    )
    spoken = {name: getattr(roles, name)() for name in ("analyst", "executor", "verifier", "generator")}
    played = play(system(turns=2, **spoken), TEXT, [plan("echo", "a"), plan("echo", "b")], call_tool)
    state = played.states[-1]
    assert [(step.tool, step.error) for step in played.steps] == [("", True), ("echo", False)]
    assert [record.observation for record in state.memory.records] == ["the arguments are no JSON object", "heard hi"]
    assert (state.memory.records[1].stop, state.memory.records[1].reason) == (False, "")
    assert (state.output, state.status, state.analysis) == ("", Status.TURN_LIMIT, "")
    assert [lapse.role for lapse in state.lapses] == ["analyst", "executor", "verifier", "generator"]


def test_an_error_of_a_frozen_role_is_a_lapse():
    call_tool = speaking(verifier=Result("the prompt is too long", error=True))
    played = play(system(verifier=roles.verifier()), TEXT, [plan("echo", "hi"), plan("answer", "5")], call_tool)
    assert [step.error for step in played.steps] == [False, False]
    assert played.states[-1].lapses == (("verifier", "the prompt is too long"),)


def test_a_failure_outside_ends_the_trajectory_and_does_not_count():
    played = play(system(), TEXT, [plan("echo", "hi"), plan("echo", "down")])
    last = played.steps[-1]
    assert (last.done, last.status, last.output, last.tool, last.error) == (
        True,
        Status.TOOL_FAILURE,
        None,
        "echo",
        False,
    )
    assert played.states[-1].reason == "echo: the server is down"
    call_tool = speaking(verifier=Result("", failure="no answer within 60 s"))
    failed = play(system(verifier=roles.verifier()), TEXT, [plan("echo", "hi")], call_tool)
    assert failed.steps[-1].status == Status.TOOL_FAILURE
    assert failed.states[-1].reason == "verifier: no answer within 60 s"


@pytest.mark.parametrize("rendering", [fresh_context, growing_context])
def test_an_episode_over_before_the_policy_acts_ends_with_any_action(rendering):
    """`reset` has no way to end an episode: it gives the prompt that would have come, and any step ends the episode."""
    env = system(analyst=roles.analyst(), rendering=rendering)
    played = play(env, TEXT, [plan("echo", "down")], speaking(analyst=Result("", failure="down")))
    assert played.prompts(TEXT)[0] == play(system(), TEXT, []).prompts(TEXT)[0]
    assert played.states[0].reason == "analyst: down"
    assert (played.steps[0].done, played.steps[0].status, played.steps[0].tool) == (True, Status.TOOL_FAILURE, "")
    state, again = system().step(played.states[-1], ids(TEXT, plan("echo", "hi")), run_tools)
    assert (state, again) == (played.states[-1], played.steps[0])


def test_a_verifier_whose_planner_answers_at_once_is_shown_the_answer():
    env = system(trained=("verifier",), verifier=roles.verifier())
    played = play(env, TEXT, ["CONTINUE"], speaking(planner=plan("answer", "5")))
    assert "Proposed answer:\n> 5\nSTOP or CONTINUE?" in played.prompts(TEXT)[0]
    assert (played.steps[0].output, played.steps[0].status) == ("5", Status.FINISHED)


def test_any_role_can_be_trained():
    call_tool = speaking(planner=[plan("echo", "a"), "nonsense", plan("echo", "b")], generator="5")
    env = system(
        trained=("executor", "verifier"),
        executor=roles.executor(),
        verifier=roles.verifier(),
        generator=roles.generator(),
    )
    assert env.max_turns == 6
    words = ['{"words": "hi"}', "CONTINUE", '{"words": "ho"}', "STOP"]
    played = play(env, TEXT, words, call_tool)
    assert [(step.tool, step.error) for step in played.steps] == [
        ("echo", False),
        ("", True),
        ("echo", False),
        ("", False),
    ]
    assert played.states[-1].actors == (("executor", 1), ("verifier", 1), ("executor", 3), ("verifier", 3))
    assert [record.turn for record in played.states[-1].memory.records] == [1, 2, 3]
    assert (played.steps[-1].output, played.steps[-1].status) == ("5", Status.FINISHED)
    assert [lapse.role for lapse in played.states[-1].lapses] == ["planner"]


@pytest.mark.parametrize("rendering", [fresh_context, growing_context])
@pytest.mark.parametrize("name", ["analyst", "planner", "executor", "verifier", "generator"])
def test_each_role_can_be_the_only_one_that_is_trained(name, rendering):
    words = {
        "analyst": "look closely",
        "planner": plan("echo", "hi"),
        "executor": '{"words": "hi"}',
        "verifier": "CONTINUE",
        "generator": "5",
    }
    spoken = {role: getattr(roles, role)() for role in words}
    env = system(trained=(name,), rendering=rendering, **spoken)
    played = play(env, TEXT, [words[name]] * 3, speaking(**words))
    assert len(played.steps) == env.max_turns == (1 if name in ("analyst", "generator") else 3)
    assert (played.steps[-1].output, played.steps[-1].status) == ("5", Status.TURN_LIMIT)
    assert played.states[-1].lapses == ()
    assert not any(step.error for step in played.steps)


def test_a_cut_answer_of_a_trained_generator_is_scored():
    env = system(trained=("planner", "generator"), generator=roles.generator())
    assert env.max_turns == 4
    played = play(env, TEXT, [plan("answer", "5"), ids(TEXT, "the sum is", end=False)])
    last = played.steps[-1]
    assert (last.output, last.status, last.error, last.done) == ("the sum is", Status.TOKEN_LIMIT, True, True)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"trained": ()}, "at least one of analyst, planner"),
        ({"trained": "planner"}, "must be a list"),
        ({"trained": ("critic",)}, "'critic' can't be trained"),
        ({"trained": ("verifier",)}, "fill it with a Role"),
        (
            {"trained": ("planner", "verifier"), "verifier": roles.verifier(), "rendering": growing_context},
            "give rendering=fresh_context",
        ),
        ({"verifier": roles.generator()}, "a Role or a ScriptedRole of that name"),
        ({"executor": run_tools}, "a Role or a ScriptedRole of that name"),
        ({"turns": 0}, "turns=0"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"context_tokens": 400}, "context_tokens above max_tokens"),
        ({"schemas": [ECHO, {**ADD, "name": "Echo"}]}, "two tools have the name"),
        ({"schemas": [{"description": "no name"}]}, "JSON objects with a name"),
        ({"schemas": [{"name": "x", "default": {1, 2}}]}, "JSON objects with a name"),
        ({"schemas": [{**ECHO, "name": "Answer"}]}, "other than 'answer'"),
        ({"schemas": [{**ECHO, "name": "a\nb"}]}, "give it one of up to 128 letters"),
        ({"schemas": [{**ECHO, "name": 'echo("5") ->'}]}, "give it one of up to 128 letters"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, words):
    with pytest.raises(BadInput, match=words):
        system(**settings)


def test_the_planners_instructions_can_be_replaced():
    env = system(planner=roles.planner(instructions="Plan.", describe=signature))
    played = play(env, TEXT, [], of=task("2 + 3?"))
    assert played.prompts(TEXT)[0].endswith(
        "user\nPlan.\nQuestion:\n> 2 + 3?\nTools:\necho(words)\nadd(a, b, note?)\nanswer(text)\nTurns left: 3"
        "<|im_end|>\n<|im_start|>assistant\n"
    )
