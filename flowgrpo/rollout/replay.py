"""A recorded trajectory gone through again (A2): actions come from the record, effects from its log.

    replay(env, played)     the same Played, with nothing running but the environment's own code

An environment's words must be what the record holds; a record of another environment, or one that was changed, is
`BadInput` that names the first turn at which the two differ.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jax import Array

from flowgrpo.contracts import HostEnv
from flowgrpo.rollout.effects import Effect, recorded, replayed
from flowgrpo.rollout.records import Played, with_verdict
from flowgrpo.rollout.trajectory_builder import OpenTrajectory, call_reset, call_step, derive, key_of
from flowgrpo.types import BadInput, Turn


def replay(env: HostEnv, played: Played) -> Played:
    """The trajectory that the record leads to: `played` itself, in everything but its seconds."""
    course = OpenTrajectory(env, played.task, played.key, played.group, played.sample)
    turns = played.turns
    retrace(course, key_of(derive([played.key], env.turns)[0, 0]), turns, played.log, played.lens)
    if len(turns) > len(course.turns):  # its step returned nothing
        _act(course, turns[-1])
    course.log.extend(played.log[len(course.log) :])
    if course.status is None:
        tool = played.tools[-1] if played.tools else ""
        course.cut(played.status, played.reason, tool)
    by_turn = bool(turns) and turns[0].reward is not None
    again = course.played(by_turn=by_turn, seconds=played.seconds)
    if played.scored is not None:
        again = with_verdict(again, played.scored, lambda _: played.correct)
    _compare(again, played)
    return again


def last_state(env: HostEnv, played: Played) -> Any:
    """The environment's state after the last call of it that returned."""
    course = OpenTrajectory(env, played.task, played.key, played.group, played.sample)
    retrace(course, key_of(derive([played.key], env.turns)[0, 0]), played.turns, played.log, played.lens)
    return course.state


def retrace(
    course: OpenTrajectory, key: Array, turns: Sequence[Turn], log: Sequence[Effect], lens: Sequence[int]
) -> None:
    """Bring a fresh course to where `lens` ends: the reset, and the step of each turn that returned."""
    if len(lens) not in (len(turns), len(turns) + 1) or sum(lens) > len(log):
        raise BadInput(f"{len(turns)} turns, {len(log)} effects and lens {tuple(lens)} are of no one trajectory")
    for index, size in enumerate(lens):
        start = len(course.log)
        own = log[start : start + size]
        do, asked = recorded(replayed(own))
        if index == 0:
            following = call_reset(course.env, key, course.task, do)
        else:
            following = call_step(course.env, course.state, _act(course, turns[index - 1]), do)
        if len(asked) != size:
            raise BadInput(
                f"{course.env.name} asked for {len(asked)} effects after turn {index}, the record has {size}"
            )
        course.log.extend(own)
        course.heard(following)


def _act(course: OpenTrajectory, turn: Turn) -> list[int]:
    """The recorded action, where the environment says what the record says was said before it."""
    number = len(course.turns)
    if course.status is not None or course.following is None:
        raise BadInput(f"{course.env.name} ends before turn {number} of the record: replay it with what recorded it")
    if turn.tokens[~turn.chosen].tolist() != list(course.following.said):
        raise BadInput(f"{course.env.name} says other tokens before turn {number} than the record has")
    return course.acted(replace(turn, reward=None, anchor=course.following.anchor))


def _compare(again: Played, played: Played) -> None:
    """Raise `BadInput` where the environment judged otherwise than the record says."""
    pairs = {
        "tools": (again.tools, played.tools),
        "errors": (again.errors, played.errors),
        "output": (again.output, played.output),
        "reason": (again.reason, played.reason),
        "status": (again.status, played.status),
        "outcome": (again.outcome, played.outcome),
        "correct": (again.correct, played.correct),
        "rewards": ([turn.reward for turn in again.turns], [turn.reward for turn in played.turns]),
        "anchors": ([turn.anchor for turn in again.turns], [turn.anchor for turn in played.turns]),
    }
    for name, (mine, recorded_one) in pairs.items():
        if mine != recorded_one:
            raise BadInput(f"the replay's {name} are {mine!r:.120}, but the record's {recorded_one!r:.120}")
