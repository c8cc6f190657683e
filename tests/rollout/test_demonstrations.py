"""Demonstrations in exact tokens: of an expert's actions, and of recorded actions."""

from concurrent.futures import Future
from dataclasses import replace

import jax
import numpy as np
import pytest
from agent_cases import SCHEMAS, agent_text, make_system, run_tools, task

import flowgrpo as fg
from flowgrpo.agent import roles
from flowgrpo.agent.action_forms import CALLS
from flowgrpo.agent.rendering import growing_context
from flowgrpo.contracts import Completion, Result
from flowgrpo.learner.imitation import packed_imitation
from flowgrpo.rollout.demonstrations import action_texts, demonstrate, imitate_recorded, play_actions
from flowgrpo.rollout.records import from_json, to_json
from flowgrpo.types import BadInput, Status

TEXT, OTHER = agent_text(), agent_text("gemma")
SCRIPT = ("echo(the answer is é世)", 'add({"a": 2, "b": 3})', "answer(5)")
EXAMPLES = (
    {"role": "user", "content": "say a"},
    {"role": "assistant", "content": "echo(a)"},
    {"role": "user", "content": "heard a"},
    {"role": "assistant", "content": "answer(a)"},
)


def make_env(text=TEXT, *, examples=(), **settings):
    """An agent system whose verifier is spoken by `call_tool`, so that its calls are random, too."""
    planner = roles.planner(form=CALLS, instructions="Do.", examples=examples)
    room = {"max_tokens": 64, "context_tokens": 4096, "turns": 4, **settings}
    return make_system(
        text, schemas=SCHEMAS, planner=planner, verifier=roles.verifier(), rendering=growing_context, **room
    )


def call_tool(call):
    return run_tools(call) if call.kind == "tool" else Result("CONTINUE: not yet")


def odd(text, words: str) -> list[int]:
    """Ids of an action that its words would not be encoded as."""
    return [*(i for letter in words for i in text.encode(letter)), text.stop_ids[-1]]


def actions_of(trajectory) -> list[list[int]]:
    return [turn.tokens[turn.chosen].tolist() for turn in trajectory.turns]


def sampled(env, actions, call_tool, seed: int = 3):
    """The recorded trajectory of a hosted rollout whose engine says these ids."""
    rest = iter(actions)

    def submit(_request) -> Future:
        tokens, future = list(next(rest)), Future()
        future.set_result(Completion(tokens, [-0.5] * len(tokens), [7] * len(tokens), "stop"))
        return future

    reward = fg.Reward(lambda task, output: fg.RewardResult(float(output == task.answers[0])))
    rollout = fg.hosted(env, submit, call_tool=call_tool, reward=reward)
    (played,) = rollout([task()], jax.random.split(jax.random.key(seed), 1), np.zeros(1, int)).trajectories
    return from_json(to_json(played))  # as it is read from a file


# Of an expert -------------------------------------------------------------------------------------------


def test_A5_a_demonstration_has_the_environments_prompts_and_the_experts_actions():
    env, tasks = make_env(), [task("one?", "a"), task("two?", "b")]
    found = fg.rollout.demonstrate(
        env, tasks, lambda task: SCRIPT[task.id == "b" :], tokenizer=TEXT, call_tool=call_tool
    )
    assert [(one.group, one.outcome, one.status, one.extends_context) for one in found] == [
        (group, 1.0, Status.FINISHED, True) for group in (0, 1)
    ]
    for number, (one, asked) in enumerate(zip(found, tasks, strict=True)):
        state, said = env.reset(jax.random.key(number), asked, call_tool)
        for turn, words in zip(one.turns, SCRIPT[number:], strict=True):
            ids = [*TEXT.encode(words), TEXT.stop_ids[0]]
            assert turn.tokens.tolist() == [*said.tokens, *ids]
            assert turn.chosen.tolist() == [False] * len(said.tokens) + [True] * len(ids)
            assert not turn.logp_sampled.any()
            state, step = env.step(state, ids, call_tool)
            said = step.observation
        assert step.done
        again = TEXT.decode(i for turn in one.turns for i in turn.tokens)
        assert TEXT.encode(again) == [i for turn in one.turns for i in turn.tokens.tolist()]


def test_a_demonstration_depends_on_its_task_and_index_alone():
    tasks = [task(f"{n}?", str(n)) for n in range(5)]
    one, other = (
        demonstrate(make_env(), tasks, lambda _: SCRIPT, tokenizer=TEXT, call_tool=call_tool, concurrency=n)
        for n in (1, 5)
    )
    for a, b in zip(one, other, strict=True):
        assert [turn.tokens.tolist() for turn in a.turns] == [turn.tokens.tolist() for turn in b.turns]


def test_ids_of_an_expert_are_kept():
    said = [odd(TEXT, words) for words in SCRIPT]
    assert TEXT.encode(SCRIPT[0]) != said[0][:-1]
    (found,) = demonstrate(make_env(), [task()], lambda _: said, tokenizer=TEXT, call_tool=call_tool)
    assert actions_of(found) == said


def test_an_expert_is_cut_at_the_end_of_the_episode_and_may_stop_before():
    for turns, script, played, status in (
        (2, ["echo(a)"] * 5, 2, Status.TURN_LIMIT),
        (4, ["answer(5)", "echo(a)"], 1, Status.FINISHED),
        (4, ["echo(a)"], 1, Status.FINISHED),
        (4, ["echo(down)", "echo(a)"], 1, Status.TOOL_FAILURE),
    ):
        found = play_actions(make_env(turns=turns), TEXT, call_tool, task(), script)
        assert (len(found.turns), found.status) == (played, status)


def test_a_malformed_action_is_demonstrated_too():
    """A script may slip, and what is said to it then is in the demonstration."""
    found = play_actions(make_env(), TEXT, call_tool, task(), ["nonsense", "answer(5)"])
    assert "error: the action is not one call, name(text)" in TEXT.decode(found.turns[1].tokens)


def test_no_task_is_refused():
    with pytest.raises(BadInput, match="there is no task to demonstrate on: give at least one"):
        demonstrate(make_env(), [], lambda _: SCRIPT, tokenizer=TEXT, call_tool=call_tool)


def test_demonstrations_become_rows_in_which_the_actions_are_live():
    found = demonstrate(make_env(), [task(), task("what?", "u")], lambda _: SCRIPT, tokenizer=TEXT, call_tool=call_tool)
    rows = packed_imitation(found, row_length=1024)
    chosen = sum(int(turn.chosen.sum()) for one in found for turn in one.turns)
    assert int(np.sum(rows.loss_mask)) == chosen


# Of what was sampled ------------------------------------------------------------------------------------


def test_a_record_is_imitated_without_examples_and_without_tools():
    said = [odd(TEXT, words) for words in SCRIPT]
    played = sampled(make_env(examples=EXAMPLES), said, call_tool)
    assert (played.correct, played.errors, len(played.log)) == (True, (False,) * 3, 4)  # two tools, two verdicts
    found = imitate_recorded(make_env(), TEXT, played, actions_of(played), group=4)  # with no `call_tool` to call
    assert actions_of(found) == said
    assert (found.group, found.outcome, found.status) == (4, 1.0, Status.FINISHED)
    assert "say a" in TEXT.decode(played.turns[0].tokens)
    assert "say a" not in TEXT.decode(found.turns[0].tokens)
    for one, other in zip(found.turns[1:], played.turns[1:], strict=True):  # what came between is the same
        np.testing.assert_array_equal(one.tokens, other.tokens)


def test_the_seeds_of_calls_are_those_of_the_record():
    """Each call is compared with the recorded one, its seed included, which follows from the key."""
    played = sampled(make_env(), [odd(TEXT, words) for words in SCRIPT], call_tool)
    assert len({effect.call.seed for effect in played.log}) == len(played.log)
    other = replace(played, key=tuple(word + 1 for word in played.key))
    with pytest.raises(BadInput, match=r"the record has .* where now .* is called"):
        imitate_recorded(make_env(), TEXT, other, actions_of(played), group=0)


def test_another_models_actions_are_in_the_imitators_tokens():
    played = sampled(make_env(OTHER, examples=EXAMPLES), [odd(OTHER, words) for words in SCRIPT], call_tool)
    words = action_texts(played, OTHER, TEXT)
    assert words == list(SCRIPT)
    found = imitate_recorded(make_env(), TEXT, played, words, group=0)
    assert actions_of(found) == [[*TEXT.encode(words), TEXT.stop_ids[0]] for words in SCRIPT]


def test_another_models_action_that_was_cut_is_cut_again():
    """With a stop token it would call what was not called."""
    said = [odd(OTHER, "echo(a)")[:-1], odd(OTHER, "answer(5)")]
    played = sampled(make_env(OTHER), said, call_tool)
    assert played.errors == (True, False)
    actions = action_texts(played, OTHER, TEXT)
    assert actions == [TEXT.encode("echo(a)"), "answer(5)"]
    found = imitate_recorded(make_env(), TEXT, played, actions, group=0)
    assert "error: the action was cut before its end" in TEXT.decode(found.turns[1].tokens)


def test_actions_with_calls_that_are_not_recorded_are_refused():
    played = sampled(make_env(), [odd(TEXT, words) for words in ("echo(a)", "answer(5)")], call_tool)
    with pytest.raises(BadInput, match=r"the record ends before .*: it is of a shorter trajectory"):
        imitate_recorded(make_env(), TEXT, played, ["echo(a)", "echo(b)", "answer(5)"], group=0)
