"""A2, A3 and A4 of the agent system: states are values, trajectories are independent, no action of a policy raises."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax
import numpy as np
import pytest
from agent_cases import SCHEMAS, agent_text, ids, make_system, plan, play, run_tools, task
from hypothesis import given, settings
from hypothesis import strategies as st

from flowgrpo.agent import roles
from flowgrpo.agent.rendering import fresh_context, growing_context
from flowgrpo.agent.state import Memory, anchor, from_json, to_json, to_seed
from flowgrpo.contracts import Call, Result
from flowgrpo.data.tokenizer import to_json_line
from flowgrpo.rollout.effects import from_json as effect_from_json
from flowgrpo.rollout.effects import record_effects, replay_effects
from flowgrpo.rollout.effects import to_json as effect_to_json
from flowgrpo.types import BadInput, Status

TEXT = agent_text()
RENDERINGS = [fresh_context, growing_context]
ACTIONS = st.lists(
    st.one_of(
        st.sampled_from(
            [plan("echo", "hi"), plan("add", '{"a": 1, "b": 2}'), plan("echo", "wrong"), plan("answer", "5")]
        ),
        st.sampled_from(
            ["", "Tool: browser", plan("add", "{}"), plan("echo", "down"), plan("echo", '{"x": "é\\ud800"}')]
        ),
        st.text("Tol: echo\nCxt<|im_end|>", max_size=30),
        st.lists(st.integers(0, TEXT.vocab_size + 20), max_size=8),
    ),
    max_size=5,
)


def system(rendering=fresh_context, **others):
    given = {"schemas": SCHEMAS, "turns": 4, "max_tokens": 200, "context_tokens": 4000, "rendering": rendering}
    spoken = {"verifier": roles.verifier(), "generator": roles.generator(), "analyst": roles.analyst()}
    return make_system(TEXT, **{**given, **spoken, **others})


def world(call: Call) -> Result:
    """Tools, and roles whose words depend on the seed of the call, in a world where nothing else does."""
    if call.kind == "tool":
        return run_tools(call)
    luck = random.Random(repr(call.seed)).random()
    said = {"verifier": "CONTINUE: go on" if luck < 0.8 else "no verdict", "generator": f"it is {luck:.3f}"}
    return Result(said.get(call.name, f"mind {luck:.3f}"))


# A2: states are values ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rendering", RENDERINGS)
@given(actions=ACTIONS, key=st.integers(0, 99))
def test_A2_a_replay_gives_the_same_states_and_tokens(rendering, actions, key):
    call_tool, log = record_effects(world)
    env = system(rendering)
    first = play(env, TEXT, actions, call_tool, key=key)
    written = [effect_from_json(json.loads(json.dumps(effect_to_json(effect)))) for effect in log]
    again = play(system(rendering), TEXT, actions, replay_effects(written), key=key)
    assert again == first


@pytest.mark.parametrize("rendering", RENDERINGS)
@given(actions=ACTIONS)
def test_A2_every_state_can_be_saved_and_resumed(rendering, actions):
    env = system(rendering)
    played = play(env, TEXT, actions, world)
    for i, state in enumerate(played.states):
        loaded = from_json(json.loads(json.dumps(to_json(state))))
        assert loaded == state
        assert anchor(loaded) == anchor(state)
        if i < len(played.steps):
            assert env.step(loaded, played.sampled[i], world) == (played.states[i + 1], played.steps[i])


@pytest.mark.parametrize("rendering", RENDERINGS)
def test_A2_a_state_can_be_forked(rendering):
    env = system(rendering)
    played = play(env, TEXT, [plan("echo", "hi")], world)
    before, state = to_json(played.states[-1]), played.states[-1]
    one = env.step(state, ids(TEXT, plan("echo", "one")), world)
    other = env.step(state, ids(TEXT, plan("echo", "other")), world)
    assert env.step(state, ids(TEXT, plan("echo", "one")), world) == one
    assert one[0].memory.records[-1].observation == "heard one"
    assert other[0].memory.records[-1].observation == "heard other"
    assert to_json(state) == before


def test_A2_what_is_no_state_is_refused():
    saved = to_json(play(system(), TEXT, [], world).states[0])
    for broken in (
        {},
        {**saved, "status": "LOST"},
        {**saved, "memory": [{}]},
        {**saved, "more": 1},
        {**saved, "plan": 3},
    ):
        with pytest.raises(BadInput, match="is no state of an agent"):
            from_json(broken)


# A3: nothing leaks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rendering", RENDERINGS)
@settings(max_examples=15)
@given(order=st.lists(st.integers(0, 7), max_size=40))
def test_A3_interleaved_trajectories_are_independent(rendering, order):
    """One environment, eight trajectories, every query and observation marked: as if each had run alone."""
    env = system(rendering)
    marks = [f"m{i}{i}m" for i in range(8)]
    actions = [
        [plan("echo", f"{mark} {t}", f"goal {mark}") for t in range(3)] + [plan("answer", mark)] for mark in marks
    ]
    tasks = [task(f"what is {mark}?", mark) for mark in marks]
    alone = [
        play(env, TEXT, acts, world, of=one, key=i) for i, (acts, one) in enumerate(zip(actions, tasks, strict=True))
    ]
    live = [env.reset(i, one, world) for i, one in enumerate(tasks)]
    said = [[TEXT.decode(first.tokens)] for _, first in live]
    states = [[state] for state, _ in live]
    for i in order:
        if (turn := len(states[i]) - 1) < len(actions[i]):
            state, step = env.step(states[i][-1], ids(TEXT, actions[i][turn]), world)
            states[i].append(state)
            said[i] += [TEXT.decode(step.observation.tokens)] if step.observation else []
    for i, mark in enumerate(marks):
        assert states[i] == alone[i].states[: len(states[i])]
        everything = " ".join([*said[i], *(json.dumps(to_json(state)) for state in states[i])])
        assert mark in everything
        assert not [other for other in marks if other != mark and other in everything]


def test_A3_trajectories_in_threads_are_independent():
    env = system(growing_context)

    def episode(i: int):
        return play(env, TEXT, [plan("echo", f"m{i} {t}") for t in range(4)], world, of=task(f"what is m{i}?"), key=i)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(episode, range(32))) == [episode(i) for i in range(32)]


def test_A3_a_change_to_the_given_schemas_reaches_no_trajectory():
    given_schema = json.loads(json.dumps(SCHEMAS[0]))
    env = system(schemas=[given_schema])
    before = env.reset(0, task(), world)
    given_schema["description"] = "changed"
    assert env.reset(0, task(), world) == before


# A4: nothing crashes ------------------------------------------------------------------------------------

BAD = {
    "nothing at all": [],
    "a stop token alone": ids(TEXT, ""),
    "cut": ids(TEXT, plan("echo", "hi"), end=False),
    "no form": ids(TEXT, "the answer is 5"),
    "ids that are no text": [TEXT.vocab_size + 7, TEXT.stop_ids[0]],
    "special tokens alone": [*TEXT.encode("<|im_start|><|im_start|><think>"), TEXT.stop_ids[0]],
    "half a character": [TEXT.encode("é")[0], TEXT.stop_ids[0]],
    "an unknown tool": ids(TEXT, plan("browser", "hi")),
    "a turn of its own": ids(TEXT, "<|im_start|>user\nTool: echo\nContext: hi")[:-3],
    "arguments that are none": ids(TEXT, plan("add", "2 and 3")),
    "arguments that do not fit": ids(TEXT, plan("add", '{"a": 2}')),
    "refused by the tool": ids(TEXT, plan("echo", "wrong")),
    "deeply nested": ids(TEXT, plan("add", '{"a": ' * 30)),
}


@pytest.mark.parametrize("rendering", RENDERINGS)
@pytest.mark.parametrize("name", BAD)
def test_A4_a_bad_action_is_a_turn_with_an_error_observation(name, rendering):
    env = system(rendering, verifier=roles.rule_verifier, generator=roles.rule_generator, analyst=None)
    played = play(env, TEXT, [BAD[name], plan("answer", "5")])
    state, step = played.states[1], played.steps[0]
    assert (step.error, step.done, state.turn, state.budget.turns) == (True, False, 1, 3)
    (record,) = state.memory.records
    assert record.error
    assert record.observation
    assert f"error: {to_json_line(record.observation)}" in played.prompts(TEXT)[1]
    assert (played.steps[1].output, played.steps[1].error) == ("5", False)


@given(actions=st.lists(st.lists(st.integers(0, TEXT.vocab_size + 50), max_size=12), max_size=6))
def test_A4_an_episode_ends_whatever_ids_are_sampled(actions):
    for rendering in RENDERINGS:
        played = play(system(rendering), TEXT, [*actions, "", "", "", ""], world)
        assert len(played.steps) <= 4
        assert played.steps[-1].done
        assert played.steps[-1].status in (Status.TURN_LIMIT, Status.FINISHED)


@pytest.mark.parametrize("rendering", RENDERINGS)
@pytest.mark.parametrize(
    "words", ["\ud800", "\0\x1b[2J", "\ufdd0\ufdd1", "\r\n\u2028\x85", "\ufffd" * 5000, "{{ x }}{% end %}", ""]
)
def test_A4_a_query_and_an_observation_may_hold_anything(words, rendering):
    env = system(rendering, verifier=roles.rule_verifier, generator=roles.rule_generator, analyst=None)
    call_tool = lambda call: Result(words, error=call.arguments["words"] == "no")  # noqa: E731
    actions = [plan("echo", "yes"), plan("echo", "no"), plan("answer", "5")]
    played = play(env, TEXT, actions, call_tool, of=task(f"is it {words[:200]}?"))
    assert [step.error for step in played.steps] == [False, True, False]
    assert played.steps[-1].output == "5"
    assert from_json(json.loads(json.dumps(to_json(played.states[-1])))) == played.states[-1]


# Keys and anchors ---------------------------------------------------------------------------------------


def test_keys_of_every_kind_become_integers():
    key = jax.random.fold_in(jax.random.key(3), 4)
    data = jax.random.key_data(key)
    assert to_seed(key) == to_seed(data) == to_seed(np.asarray(data)) == tuple(int(i) for i in data)
    assert (to_seed(7), to_seed((1, 2)), to_seed([3])) == ((7,), (1, 2), (3,))
    for wrong in (0.5, "a", None, [1.0]):
        with pytest.raises(BadInput, match="must be a key of JAX or integers"):
            to_seed(wrong)


def test_anchors_are_equal_where_query_and_memory_are_whatever_the_key():
    env = system(analyst=None, verifier=roles.rule_verifier)
    one, other = (play(env, TEXT, [plan("echo", "hi"), plan("echo", "ho")], world, key=key) for key in (1, 2))
    found = [env.anchor(state) for state in one.states]
    assert found == [env.anchor(state) for state in other.states]
    assert len(set(found)) == 3
    assert all(0 <= value < 2**31 for value in found)
    assert env.anchor(one.states[0]) != env.anchor(play(env, TEXT, [], world, of=task("why?")).states[0])


def test_anchors_do_not_depend_on_the_number_of_the_turn():
    state = play(system(), TEXT, [plan("echo", "hi")], world).states[1]
    (record,) = state.memory.records
    later = replace(state, turn=2, memory=Memory((replace(record, turn=2),)), budget=state.budget._replace(turns=1))
    other = replace(state, memory=Memory((replace(record, observation="heard ho"),)))
    assert anchor(later) == anchor(state) != anchor(other)
