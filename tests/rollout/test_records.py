"""Records of hosted rollouts: one line of JSON gives back the same bits; padded lengths are powers of two."""

import json
from dataclasses import fields, replace

import numpy as np
import pytest
from hosted_cases import Engine, make_env, run, tasks_of, value
from hypothesis import given
from hypothesis import strategies as st

import flowgrpo as fg
from flowgrpo.contracts import Call, Result, RewardResult
from flowgrpo.renamed import RECORD_KEYS
from flowgrpo.rollout.effects import Effect
from flowgrpo.rollout.records import (
    PartialAction,
    PartialTrajectory,
    RecordedTrajectory,
    abort,
    from_json,
    make_turn,
    partial_from_json,
    partial_to_json,
    to_json,
    to_trajectories,
)
from flowgrpo.types import Status

words, ids = st.text(max_size=8), st.integers(0, 2**31 - 1)
floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
objects = st.dictionaries(words, st.recursive(words | st.integers() | floats | st.none(), st.lists, max_leaves=3))
results = st.builds(Result, words, st.booleans(), words)
calls = st.builds(Call, st.sampled_from(["tool", "role"]), words, objects, st.lists(ids, max_size=3).map(tuple))


@st.composite
def turns(draw, paid):
    said, action = draw(st.lists(ids, max_size=4)), draw(st.lists(ids, min_size=1, max_size=4))
    logp = draw(st.lists(floats, min_size=len(action), max_size=len(action)))
    versions = draw(st.lists(st.integers(0, 3), min_size=len(said) + len(action), max_size=len(said) + len(action)))
    version = draw(st.sampled_from([versions[0], np.array(versions, np.int32)]))
    reward = draw(floats) if paid else None
    return make_turn(said, action, logp, version, reward, draw(st.integers(-(2**70), 2**70)))


@st.composite
def records(draw):
    sequence = tuple(draw(st.lists(turns(draw(st.booleans())), max_size=3)))
    reward_result = draw(
        st.none() | st.builds(RewardResult, st.none() | floats, words, st.dictionaries(words, floats, max_size=2))
    )
    task = draw(st.builds(fg.Task, words, words, st.lists(words).map(tuple), words, objects) | objects | words | ids)
    return RecordedTrajectory(
        task=task,
        key=tuple(draw(st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=4))),
        group=draw(st.integers(-5, 2**40)),
        sample=draw(st.integers(0, 9)),
        turns=sequence,
        outcome=draw(st.none() | floats),
        correct=draw(st.booleans()),
        status=draw(st.sampled_from(Status)),
        extends_context=draw(st.booleans()),
        tools=tuple(draw(words) for _ in sequence),
        errors=tuple(draw(st.booleans()) for _ in sequence),
        log=tuple(draw(st.lists(st.builds(Effect, calls, results), max_size=3))),
        effect_counts=tuple(draw(st.lists(st.integers(0, 3), max_size=4))),
        output=draw(st.none() | words),
        reward_result=reward_result,
        reason=draw(words),
        seconds=draw(floats),
    )


@given(records())
def test_A2_a_line_of_json_gives_back_the_same_trajectory(played):
    line = to_json(played)
    assert "\n" not in line
    again = from_json(line)
    assert to_json(again) == line
    for name in {item.name for item in fields(RecordedTrajectory)} - {"turns"}:
        assert getattr(again, name) == getattr(played, name)
    for mine, other in zip(again.turns, played.turns, strict=True):
        for name in ("tokens", "chosen", "logp_sampled", "version"):
            a, b = np.asarray(getattr(mine, name)), np.asarray(getattr(other, name))
            assert a.shape == b.shape
            assert a.tobytes() == b.astype(a.dtype).tobytes()
        assert (mine.reward, mine.anchor) == (other.reward, other.anchor)


@st.composite
def actions(draw):
    """An action that was cut."""
    size = draw(st.integers(1, 4))
    column = {name: st.lists(x, min_size=size, max_size=size) for name, x in {"id": ids, "float": floats}.items()}
    sampled = fg.contracts.Completion(
        draw(column["id"]),
        draw(column["float"]),
        draw(st.lists(st.integers(0, 3), min_size=size, max_size=size)),
        "budget",
        draw(st.integers(0, 9)),
    )
    return PartialAction(
        tuple(draw(st.lists(ids, min_size=1, max_size=4))), draw(st.integers(-(2**70), 2**70)), sampled
    )


@given(records(), st.none() | actions())
def test_S1_a_line_of_json_gives_back_the_same_partial_trajectory(played, begun):
    names = ("task", "key", "group", "sample", "tools", "errors", "log", "effect_counts", "seconds")
    shared = {name: getattr(played, name) for name in names}
    left = PartialTrajectory(**shared, turns=tuple(played.turns), partial_action=begun)
    line = partial_to_json(left)
    assert "\n" not in line
    again = partial_from_json(line)
    assert partial_to_json(again) == line
    assert {name: getattr(again, name) for name in names} == shared
    assert to_json(abort(again, "x")) == to_json(abort(left, "x"))  # all turns, and the action as one
    assert (again.partial_action is None) == (begun is None)
    if again.partial_action is not None and begun is not None:
        assert again.partial_action == begun
    with pytest.raises(fg.BadInput, match="is no recorded trajectory"):
        from_json(line)
    with pytest.raises(fg.BadInput, match="is no recorded trajectory"):
        partial_from_json(to_json(played))


def test_a_rollout_is_recorded_and_read_back():
    with Engine() as engine:
        got = run(
            engine, tasks_of(3, 4), reward=fg.Reward(lambda _, output: RewardResult(len(output) / 7, "", {"a": 0.1}))
        )
    again = [from_json(to_json(one)) for one in got.trajectories]
    assert [value(one) for one in again] == [value(one) for one in got.trajectories]
    one, two = (to_trajectories(played, ("echo",), turns=4) for played in (again, got.trajectories))
    np.testing.assert_array_equal(one.logp_sampled, two.logp_sampled)


def test_a_line_with_keys_of_earlier_versions_is_read():
    with Engine() as engine:
        recorded = run(engine, tasks_of(1, 1), reward=fg.Reward(lambda *_: RewardResult(0.5))).trajectories[0]
    old_keys = {new: old for old, new in RECORD_KEYS.items()}
    record = {old_keys.get(key, key): x for key, x in json.loads(to_json(recorded)).items()}
    record["turns"] = [{old_keys.get(key, key): x for key, x in turn.items()} for turn in record["turns"]]
    assert {"lens", "scored", "appends"} <= set(record)
    assert value(from_json(json.dumps(record))) == value(recorded)


def test_what_is_no_record_is_refused():
    with Engine() as engine:
        line = to_json(run(engine, tasks_of(1, 1)).trajectories[0])
    without = {name: x for name, x in json.loads(line).items() if name != "effect_counts"}
    for bad in (
        "",
        "null",
        "[1]",
        "{}",
        "{broken",
        json.dumps(without),
        line.replace("TURN_LIMIT", "X") + "x",
        "[" * 9999,
    ):
        with pytest.raises(fg.BadInput, match="is no recorded trajectory"):
            from_json(bad)


def test_a_task_that_is_no_json_is_refused():
    with Engine() as engine:
        played = run(engine, tasks_of(1, 1)).trajectories[0]
    with pytest.raises(fg.BadInput, match="can't be written as JSON"):
        to_json(replace(played, task=object()))


# Dense ------------------------------------------------------------------------------------------------


def of(*lengths: int, tools=()) -> RecordedTrajectory:
    """A trajectory of turns of these lengths."""
    sequence = tuple(make_turn([7] * (n - 1), [2], [-0.5], 0, None, 0) for n in lengths)
    own = {"tools": tuple(tools), "errors": (True,) * len(tools), "effect_counts": (), "seconds": 0.0}
    return RecordedTrajectory(sequence, 0.0 if lengths else None, 0, task="task", key=(0, 1), sample=0, **own)


def test_lengths_are_powers_of_two():
    assert to_trajectories([of(3, 5)], (), turns=6).tokens.shape == (1, 6, 8)
    assert to_trajectories([of(8)], (), turns=2).tokens.shape == (1, 2, 8)
    assert to_trajectories([of(9), of(2)], (), turns=2).tokens.shape == (2, 2, 16)
    assert to_trajectories([of(3)], (), turns=1, length=5).tokens.shape == (1, 1, 5)
    with pytest.raises(fg.BadInput, match="length=4, but the records need 5"):
        to_trajectories([of(5)], (), turns=1, length=4)


def test_tools_are_indexed_and_trajectories_without_a_turn_kept():
    played = [of(2, 2, 2, tools=("b", "", "nowhere")), of(), of(2, tools=("a",))]
    rollout = to_trajectories(played, ("a", "b"), turns=4)
    np.testing.assert_array_equal(rollout.tool, [[1, -1, -1, -1], [-1, -1, -1, -1], [0, -1, -1, -1]])
    np.testing.assert_array_equal(rollout.error[0], [True, True, True, False])
    np.testing.assert_array_equal(rollout.turns.sum(axis=1), [3, 0, 1])
    np.testing.assert_array_equal(rollout.valid, [True, False, True])
    assert not to_trajectories([of()], ("a",), turns=1).turns.any()


def test_an_aborted_partial_trajectory_does_not_count():
    whole = of(2, 2, tools=("a", "b"))
    names = ("task", "key", "group", "sample", "tools", "errors", "log", "effect_counts", "seconds")
    left = PartialTrajectory(**{name: getattr(whole, name) for name in names}, turns=tuple(whole.turns))
    played = abort(left, "its time was over")
    assert (played.status, played.outcome) == (Status.ABORTED, None)
    rollout = to_trajectories([whole, played], ("a", "b"), turns=2)
    np.testing.assert_array_equal(rollout.valid, [True, False])
    assert rollout.chosen[1].sum() == rollout.chosen[0].sum()


def test_the_ledger_counts_each_chosen_token_of_a_record():
    with Engine() as engine:
        got = run(engine, tasks_of(2, 2), env=make_env(extends_context=False))
    rollout = to_trajectories(got.trajectories, ("echo",), turns=4)
    assert rollout.chosen.sum() == engine.delivered
    assert rollout.starts_context[rollout.turns].all()
