"""Replay (A2): from the record alone, without engine and tools, the same trajectory; a changed record is refused."""

from dataclasses import replace

import pytest
from hosted_cases import Engine, FakeTools, hang, make_env, run, tasks_of, value

import flowgrpo as fg
from flowgrpo.contracts import Result, RewardResult
from flowgrpo.rollout.records import from_json, to_json
from flowgrpo.rollout.replay import replay
from flowgrpo.types import Status

ENV = make_env()


def raises(_):
    raise ValueError("a bug")


@pytest.fixture(scope="module")
def played():
    """Trajectories of every ending."""
    work = tasks_of(4, 4, seed=1)
    reward = fg.Reward(
        lambda task, output: RewardResult(None, "unsure") if task.query == "3/3" else RewardResult(len(output) / 8)
    )
    with Engine() as engine:
        ill = [
            task.query for task, one in zip(work[0], run(engine, work).trajectories, strict=True) if len(one.tools) > 2
        ][:3]
        call_tool = FakeTools(dict(zip(ill, (hang, raises, lambda _: Result("", failure="gone")), strict=True)))
        got = run(engine, work, call_tool, turn_deadline=0.4, reward=reward)
    with Engine(longest=20) as engine:
        short = run(engine, work)
    with Engine() as engine:
        fails = ENV._replace(
            reset=lambda key, task, call_tool: raises(task) if task.query == "0/0" else ENV.reset(key, task, call_tool)
        )
        early = run(engine, tasks_of(1, 2), env=fails)
    return [*got.trajectories, *short.trajectories, *early.trajectories]


def test_A2_the_record_alone_gives_the_same_trajectory(played):
    assert {one.status for one in played} == set(Status) - {Status.REPETITION}
    for one in played:
        assert value(replay(ENV, one)) == value(one)
        assert value(replay(ENV, from_json(to_json(one)))) == value(one)


def test_A2_fresh_contexts_and_rewards_by_turn_replay_too():
    def step(state, tokens, call_tool):
        state, now = make_env(extends_context=False).step(state, tokens, call_tool)
        return state, now._replace(reward=len(tokens) / 3)

    env = make_env(extends_context=False)._replace(step=step)
    for by_turn in (False, True):
        with Engine() as engine:
            got = run(engine, tasks_of(2, 3), env=env, by_turn=by_turn)
        assert [value(replay(env, one)) for one in got.trajectories] == [value(one) for one in got.trajectories]


def long_one(played):
    return next(one for one in played if len(one.turns) == 4 and one.status == Status.TURN_LIMIT)


def with_turns(one, turns):
    return replace(one, turns=turns)


def action_changed(one):
    first, *rest = one.turns
    tokens = first.tokens.copy()
    tokens[-1] = 9 if tokens[-1] != 9 else 8
    return with_turns(one, (replace(first, tokens=tokens), *rest))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (action_changed, "the record has"),
        (lambda one: replace(one, log=one.log[::-1]), "the record has"),
        (lambda one: replace(one, log=one.log[:-1]), "are of no one trajectory"),
        (
            lambda one: replace(one, effect_counts=(2, 0, *one.effect_counts[2:])),
            "asked for 1 effects after turn 0, the record has 2",
        ),
        (lambda one: replace(one, effect_counts=(0, 2, *one.effect_counts[2:])), "the record ends before"),
        (lambda one: with_turns(one, one.turns[:2]), "are of no one trajectory"),
        (lambda one: replace(one, tools=("", *one.tools[1:])), "the replay's tools are"),
        (lambda one: replace(one, output="42"), "the replay's output are"),
        (lambda one: replace(one, key=(1, 2)), "the record has"),
        (lambda one: replace(one, task=replace(one.task, query="else")), "the record has"),
        (lambda one: replace(one, status=Status.FINISHED), "status"),
    ],
)
def test_a_changed_record_is_refused(played, change, said):
    with pytest.raises(fg.BadInput, match=said):
        replay(ENV, change(long_one(played)))


def test_the_record_of_another_environment_is_refused(played):
    with pytest.raises(fg.BadInput, match="other tokens before turn 1"):
        replay(make_env(extends_context=False), long_one(played))
