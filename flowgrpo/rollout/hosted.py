"""Roll out host environments: `hosted` makes a function from tasks and keys to judged trajectories.

    a thread for each trajectory:   reset -> engine -> step -> engine -> ... -> ended       one engine decodes for all
    the caller's thread:            starts them, keeps deadlines, has each group judged as soon as its members ended

While one trajectory waits for a tool the others decode, and groups that have ended are judged (R1). What a trajectory
gets depends on its own key alone (E3), in the way of the compiled rollout, so that a pure environment gives the same
trajectories either way (E2).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from flowgrpo.contracts import HostEnv
from flowgrpo.rollout.hosted_run import HostedRun, HostedSettings
from flowgrpo.rollout.records import Hosted, Unfinished
from flowgrpo.rollout.trajectory_builder import OpenTrajectory, derive, key_words
from flowgrpo.rollout.trajectory_thread import Member, Submit
from flowgrpo.types import BadInput


def hosted(env: HostEnv, submit: Submit, **settings: Any) -> Callable[..., Hosted]:
    """`rollout(tasks, keys, groups, *, unfinished=(), on_done=None, ...) -> Hosted`; `submit` is that of an engine.

    `HostedSettings` says what else can be set. Where contexts append, the engine should have `width` slots: of more
    conversations only so many are served at a time, and one whose cache was evicted is computed again token by token.
    """
    return partial(_rollout, HostedSettings(env, submit, **settings))


def _rollout(
    settings: HostedSettings,
    tasks: Sequence[Any],
    keys,
    groups: Sequence[int],
    *,
    unfinished: Sequence[Unfinished] = (),
    on_start: Callable[[Callable[[], list[str]]], None] | None = None,
    **told: Any,
) -> Hosted:
    """Play all; whoever wants to be told is told in the caller's thread, and should be quick.

    With a `budget` each trajectory is given back unfinished where its policy has chosen so many tokens, those before
    this rollout not counted, be it in the middle of an action: a later rollout goes on with that very action, under the
    same keys, perhaps with newer weights. `submit` must then be that of an engine that can cut actions.

    `on_done` is told of each trajectory when its outcome is known. `on_played` is told once when all turns are there
    and verdicts may still be awaited: the outcomes of those that are not judged yet mean nothing. `on_start` is given a
    function that says what is under way, for a watchdog.
    """
    run = HostedRun(settings, _members(settings.env, tasks, keys, groups, unfinished), **told)
    if on_start is not None:
        on_start(run.pending)
    try:
        return run.finish()
    finally:
        run.abandon()


def _members(env: HostEnv, tasks, keys, groups, unfinished: Sequence[Unfinished]) -> list[Member]:
    """The resumed and the new, each with all keys that it draws from."""
    words = key_words(keys)
    groups = [int(group) for group in groups]
    if not len(tasks) == len(words) == len(groups):
        raise BadInput(f"{len(tasks)} tasks, {len(words)} keys and {len(groups)} groups: give one of each a trajectory")
    courses = [OpenTrajectory(env, one.task, one.key, one.group, one.sample) for one in unfinished]
    count: dict[int, int] = {}
    for task, key, group in zip(tasks, words, groups, strict=True):
        courses.append(OpenTrajectory(env, task, key, group, count.get(group, 0)))
        count[group] = count.get(group, 0) + 1
    keys_of = derive([course.key for course in courses], env.turns)
    members = [Member(index, course, keys_of[index]) for index, course in enumerate(courses)]
    for member, given in zip(members, unfinished, strict=False):
        member.given, member.seconds = given, given.seconds
    return members
