"""Rollouts of host environments: tasks and keys flow in, trajectories with their outcomes flow out.

    a thread for each trajectory:   reset -> engine -> step -> engine -> ... -> ended       one engine decodes for all
    the caller's thread:            starts them, keeps deadlines, has each group judged as soon as its members ended

While one trajectory waits for a tool the others decode, and groups that have ended are judged (R1). What a trajectory
gets depends on its own key alone (E3), in the way of the compiled rollout, so that a pure environment gives the same
trajectories either way (E2).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from flowgrpo.contracts import Do, HostEnv, Reward, Scored
from flowgrpo.effects import no_effects
from flowgrpo.rollout.course import Course
from flowgrpo.rollout.deadlines import NOTHING, Fired
from flowgrpo.rollout.judging import is_solved
from flowgrpo.rollout.keys import derive, words_of
from flowgrpo.rollout.member import Member, Submit
from flowgrpo.rollout.records import Hosted, Played, Unfinished
from flowgrpo.rollout.running import Run
from flowgrpo.rollout.settings import Settings, Told
from flowgrpo.rollout.width import Width
from flowgrpo.types import BadInput


def hosted(
    env: HostEnv,
    submit: Submit,
    *,
    do: Do = no_effects,
    reward: Reward | None = None,
    solved: Callable[[Scored], bool] = is_solved,
    by_turn: bool = False,
    temperature: float = 1.0,
    width: int | Width = 64,
    deadline: float | None = None,
    turn_deadline: float | None = None,
    judges: int = 2,
    judge_deadline: float = 600.0,
    repeats: int | None = None,
    fired: Fired = NOTHING,
) -> Callable[..., Hosted]:
    """`rollout(tasks, keys, groups, *, unfinished=(), on_done=None, ...) -> Hosted`; `submit` is that of an engine.

    At most `width` trajectories are under way at a time; rollouts that run at once over one engine share a `Width`.
    `deadline` is a group's, in seconds from the start of its
    first member: members that wait for an effect then end as TIMEOUT, those that wait for the engine are given back
    unfinished. `turn_deadline` is that of what follows one action, and of the reset. Without a `reward` the outcome
    is the sum of what the environment paid; with `by_turn` that is paid turn by turn. Groups are judged in at most
    `judges` threads, each group within `judge_deadline` seconds. Where contexts append, the engine should have `width`
    slots: a conversation whose cache was evicted is computed again token by token. A trajectory whose last `repeats`
    actions are the same ends as REPETITION. Deadlines that fire are noted in `fired`, and those that it knows from an
    earlier attempt stop the same trajectories at the same place.
    """
    return partial(
        _rollout,
        Settings(
            env=env,
            submit=submit,
            do=do,
            reward=reward,
            solved=solved,
            by_turn=by_turn,
            temperature=temperature,
            width=width,
            deadline=deadline,
            turn_deadline=turn_deadline,
            judges=judges,
            judge_deadline=judge_deadline,
            repeats=repeats,
            fired=fired,
        ),
    )


def _rollout(
    settings: Settings,
    tasks: Sequence[Any],
    keys,
    groups: Sequence[int],
    *,
    unfinished: Sequence[Unfinished] = (),
    budget: int | None = None,
    on_done: Callable[[Played], None] | None = None,
    on_played: Callable[[Hosted], None] | None = None,
    on_start: Callable[[Callable[[], list[str]]], None] | None = None,
) -> Hosted:
    """Play all; whoever wants to be told is told in the caller's thread, and should be quick.

    With a `budget` each trajectory is given back unfinished where its policy has chosen so many tokens, those before
    this rollout not counted, be it in the middle of an action: a later rollout goes on with that very action, under the
    same keys, perhaps with newer weights. `submit` must then be that of an engine that can cut actions.

    `on_done` is told of each trajectory when its outcome is known. `on_played` is told once when all turns are there
    and verdicts may still be awaited: the outcomes of those that are not judged yet mean nothing. `on_start` is given a
    function that says what is under way, for a watchdog.
    """
    if budget is not None and budget < 1:
        raise BadInput(f"budget={budget}, but a stretch has at least one token")
    run = Run(settings, _members(settings.env, tasks, keys, groups, unfinished), Told(on_done, on_played), budget)
    if on_start is not None:
        on_start(run.pending)
    try:
        return run.finish()
    finally:
        run.abandon()


def _members(env: HostEnv, tasks, keys, groups, unfinished: Sequence[Unfinished]) -> list[Member]:
    """The resumed and the new, each with all keys that it draws from."""
    words = words_of(keys)
    groups = [int(group) for group in groups]
    if not len(tasks) == len(words) == len(groups):
        raise BadInput(f"{len(tasks)} tasks, {len(words)} keys and {len(groups)} groups: give one of each a trajectory")
    courses = [Course(env, one.task, one.key, one.group, one.sample) for one in unfinished]
    count: dict[int, int] = {}
    for task, key, group in zip(tasks, words, groups, strict=True):
        courses.append(Course(env, task, key, group, count.get(group, 0)))
        count[group] = count.get(group, 0) + 1
    keys_of = derive([course.key for course in courses], env.turns)
    members = [Member(index, course, keys_of[index]) for index, course in enumerate(courses)]
    for member, given in zip(members, unfinished, strict=False):
        member.given, member.seconds = given, given.seconds
    return members
