"""Replay a recorded trajectory (A2): actions come from the record, effects from its log.

    replay(env, recorded)         the same trajectory; nothing runs but the environment's own code
    last_state(env, recorded)     the environment's state at its end

Observations must be those of the record: for a record of another environment, or one that was changed, `BadInput` names
the first turn that differs.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jax import Array

from flowgrpo.contracts import HostEnv
from flowgrpo.rollout.effects import Effect, record_effects, replay_effects
from flowgrpo.rollout.records import RecordedTrajectory, with_reward_result
from flowgrpo.rollout.trajectory_builder import TrajectoryBuilder, call_reset, call_step, derive_keys, to_key
from flowgrpo.types import BadInput, Turn


def replay(env: HostEnv, recorded: RecordedTrajectory) -> RecordedTrajectory:
    """The trajectory that the environment gives for the record's actions and effects; raises where the two differ."""
    builder = _retrace_record(env, recorded)
    turns = recorded.turns
    if len(turns) > len(builder.turns):  # the last step did not return
        _add_recorded_action(builder, turns[-1])
    builder.log.extend(recorded.log[len(builder.log) :])
    if builder.status is None:
        builder.end_in_call(recorded.status, recorded.reason, recorded.tools[-1] if recorded.tools else "")
    by_turn = bool(turns) and turns[0].reward is not None
    replayed = builder.finish(by_turn=by_turn, seconds=recorded.seconds)
    if recorded.reward_result is not None:
        replayed = with_reward_result(replayed, recorded.reward_result, lambda _: recorded.correct)
    for name in ("tools", "errors", "output", "reason", "status", "outcome", "correct"):
        _check_same(name, getattr(replayed, name), getattr(recorded, name))
    _check_same("rewards", [turn.reward for turn in replayed.turns], [turn.reward for turn in recorded.turns])
    _check_same("anchors", [turn.anchor for turn in replayed.turns], [turn.anchor for turn in recorded.turns])
    return replayed


def _check_same(name: str, replayed: Any, recorded: Any) -> None:
    if replayed != recorded:
        raise BadInput(f"the replay's {name} are {replayed!r:.120}, but the record's {recorded!r:.120}")


def last_state(env: HostEnv, recorded: RecordedTrajectory) -> Any:
    """The environment's state after its last call that returned."""
    return _retrace_record(env, recorded).state


def _retrace_record(env: HostEnv, recorded: RecordedTrajectory) -> TrajectoryBuilder:
    builder = TrajectoryBuilder(env, recorded.task, recorded.key, recorded.group, recorded.sample)
    reset_key = to_key(derive_keys([recorded.key], env.max_turns)[0, 0])
    retrace(builder, reset_key, recorded.turns, recorded.log, recorded.effect_counts)
    return builder


def retrace(
    builder: TrajectoryBuilder,
    reset_key: Array,
    turns: Sequence[Turn],
    log: Sequence[Effect],
    effect_counts: Sequence[int],
) -> None:
    """Bring a fresh builder to the end of `effect_counts`: the reset, and the step of each turn that returned."""
    if len(effect_counts) not in (len(turns), len(turns) + 1) or sum(effect_counts) > len(log):
        raise BadInput(
            f"{len(turns)} turns, {len(log)} effects and effect_counts {tuple(effect_counts)} are of no one trajectory"
        )
    env = builder.env
    for number, count in enumerate(effect_counts):
        start = len(builder.log)
        effects = log[start : start + count]
        call_tool, called = record_effects(replay_effects(effects))
        if number == 0:
            checked = call_reset(env, reset_key, builder.task, call_tool)
        else:
            checked = call_step(env, builder.state, _add_recorded_action(builder, turns[number - 1]), call_tool)
        if len(called) != count:
            raise BadInput(f"{env.name} asked for {len(called)} effects after turn {number}, the record has {count}")
        builder.log.extend(effects)
        builder.add_observation(checked)


def _add_recorded_action(builder: TrajectoryBuilder, turn: Turn) -> list[int]:
    """Add the recorded turn, whose context must be the environment's last observation."""
    number = len(builder.turns)
    if builder.status is not None or builder.last_step is None:
        raise BadInput(f"{builder.env.name} ends before turn {number} of the record: replay it with what recorded it")
    if turn.tokens[~turn.chosen].tolist() != list(builder.last_step.tokens):
        raise BadInput(f"{builder.env.name} observed other tokens before turn {number} than the record has")
    return builder.add_action(replace(turn, reward=None, anchor=builder.last_step.anchor))
