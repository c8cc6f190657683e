"""What a hosted rollout leaves of each trajectory: ids, effects and verdict, as a value and as one line of JSON.

A `Played` holds all that its environment was told and asked for, so that `replay` can go through it again without an
engine and without tools (A2). Tokens are ids as they were sampled; nothing is recovered from text (A5).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from flowgrpo import effects
from flowgrpo.contracts import Scored
from flowgrpo.effects import Effect
from flowgrpo.ragged import collate
from flowgrpo.rollout.compiled import Rollout
from flowgrpo.types import COUNTS, BadInput, Fate, Ledger, Status, Task, Trajectory, Turn


@dataclass(frozen=True, eq=False)
class Played:
    """A trajectory that has ended.

    `lens` says how many effects belong to the reset and to each step that returned. Where the last one did not, `lens`
    is one shorter than that, and what `log` holds beyond it is what that step had asked for.
    """

    task: Any
    key: tuple[int, ...]
    group: int
    sample: int  # which of its group
    trajectory: Trajectory
    tools: tuple[str, ...]  # by turn; "" where none was called
    errors: tuple[bool, ...]  # by turn
    log: tuple[Effect, ...]
    lens: tuple[int, ...]
    output: str | None  # what the system answered in the end; None where it came to none
    scored: Scored | None  # what the reward said; None where none was asked
    reason: str  # why it ended as it did, where the policy or the environment did not simply end it
    seconds: float  # from its start to its end, the verdict not included


@dataclass(frozen=True, eq=False)
class Unfinished:
    """A trajectory that can be resumed: whole turns, and the effects of the reset and of each step."""

    task: Any
    key: tuple[int, ...]
    group: int
    sample: int
    turns: tuple[Turn, ...]
    tools: tuple[str, ...]
    errors: tuple[bool, ...]
    log: tuple[Effect, ...]
    lens: tuple[int, ...]
    seconds: float


class Hosted(NamedTuple):
    """What a rollout gave: first what was resumed, then the new trajectories, each in the order given."""

    played: tuple[Played, ...]
    unfinished: tuple[Unfinished, ...]  # which a later rollout can resume
    ledger: Ledger  # of tokens that were delivered and are in neither of the two
    left_out: int  # of those played: had no turn, so that nothing can be learned from them
    seconds: Mapping[str, float]  # rollout; playing, until the last had ended; judging, summed over groups


def given_up(unfinished: Sequence[Unfinished]) -> Ledger:
    """What becomes of the tokens of trajectories that nobody will resume (A6)."""
    count = sum(int(np.sum(turn.chosen)) for one in unfinished for turn in one.turns)
    return Ledger(count, {Fate.DROPPED_CANCELLED: count})


def rollout_of(
    played: Sequence[Played], tools: Sequence[str], *, turns: int | None = None, length: int | None = None
) -> Rollout:
    """The trajectories, dense and in NumPy, those without a turn too; `tools` are the environment's, which number its
    calls.

    `length` is by default the longest turn, rounded up to a power of two, so that compiled programs are met again.
    """
    needed = max((len(turn.tokens) for one in played for turn in one.trajectory.turns), default=1)
    size = 1 << (needed - 1).bit_length() if length is None else length
    trajectories = collate([_with_a_turn(one.trajectory) for one in played], turns=turns, length=size)
    acted_n = np.array([bool(one.trajectory.turns) for one in played])
    trajectories = trajectories.replace(turns=trajectories.turns & acted_n[:, None])
    number = {name: index for index, name in enumerate(tools)}
    tool_nt = np.full(trajectories.turns.shape, -1, np.int32)
    error_nt = np.zeros(trajectories.turns.shape, bool)
    for n, one in enumerate(played):
        tool_nt[n, : len(one.tools)] = [number.get(tool, -1) for tool in one.tools]
        error_nt[n, : len(one.errors)] = one.errors
    return Rollout(trajectories, tool_nt, error_nt)


def _with_a_turn(trajectory: Trajectory) -> Trajectory:
    """What `collate` takes: one that has no turn, and so no outcome, gets an empty one, which is masked afterwards."""
    if trajectory.turns:
        return trajectory
    status = Status.ABORTED if COUNTS[trajectory.status] else trajectory.status
    return replace(trajectory, turns=[make_turn([0], [], [], 0, None, 0)], outcome=None, status=status)


def aborted(unfinished: Unfinished, reason: str) -> Played:
    """A trajectory that nobody will resume: it takes part in nothing, and its tokens are accounted for."""
    record = {item.name: getattr(unfinished, item.name) for item in fields(unfinished) if item.name != "turns"}
    trajectory = Trajectory(unfinished.turns, None, unfinished.group, status=Status.ABORTED)
    return Played(**record, trajectory=trajectory, output=None, scored=None, reason=reason)


def unfinished_of(played: Played) -> Unfinished:
    """What `aborted` was made of."""
    record = {item.name: getattr(played, item.name) for item in fields(Unfinished) if item.name != "turns"}
    return Unfinished(**record, turns=tuple(played.trajectory.turns))


def awaits_verdict(played: Played) -> bool:
    """Whether a reward is to judge it: it has a turn, and ended in a way that counts."""
    return bool(played.trajectory.turns) and COUNTS[played.trajectory.status]


def with_verdict(played: Played, scored: Scored, solved: Callable[[Scored], bool]) -> Played:
    """The trajectory with what a reward said of it afterwards, as if it had been judged where it was rolled out."""
    if scored.value is None:
        ending: dict[str, Any] = {"outcome": None, "correct": False, "status": Status.VERIFIER_FAILURE}
        reason = scored.reason
    else:
        ending, reason = {"outcome": float(scored.value), "correct": bool(solved(scored))}, played.reason
    trajectory = replace(played.trajectory, **ending)
    return replace(played, trajectory=trajectory, scored=scored, reason=reason)


# As JSON ----------------------------------------------------------------------------------------------


def to_json(played: Played) -> str:
    """One line of JSON, from which `from_json` makes the same again; the task must be a `Task`, or JSON itself."""
    trajectory = played.trajectory
    record = {item.name: getattr(played, item.name) for item in fields(played) if item.name != "trajectory"}
    record |= {item.name: getattr(trajectory, item.name) for item in fields(trajectory) if item.name != "group"}
    task = {"Task": _fields(played.task)} if isinstance(played.task, Task) else {"value": played.task}
    record |= {
        "task": task,
        "turns": [_turn_to_json(turn) for turn in trajectory.turns],
        "status": trajectory.status.name,
        "log": [effects.to_json(effect) for effect in played.log],
        "scored": None if played.scored is None else played.scored._asdict() | {"parts": dict(played.scored.parts)},
    }
    try:
        return json.dumps(record)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadInput(
            f"the trajectory of {played.task!r:.120} can't be written as JSON ({error}): make its task and effects of "
            "JSON's own kinds"
        ) from None


def from_json(line: str | bytes) -> Played:
    """The trajectory that `to_json` wrote."""
    try:
        record = json.loads(line)
        task, status = record.pop("task"), Status[record.pop("status")]
        turns = tuple(_turn_from_json(turn) for turn in record.pop("turns"))
        own = {name: record.pop(name) for name in ("outcome", "correct", "appends")}
        scored = record.pop("scored")
        record |= {name: tuple(record[name]) for name in ("key", "tools", "errors", "lens")}
        return Played(
            **record
            | {
                "task": _task_from_json(task),
                "trajectory": Trajectory(turns, group=record["group"], status=status, **own),
                "log": tuple(effects.from_json(effect) for effect in record["log"]),
                "scored": None if scored is None else Scored(**scored),
            }
        )
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise BadInput(f"{line!r:.120} is no recorded trajectory ({error!r:.200}): give what to_json wrote") from None


def _fields(task: Task) -> dict[str, Any]:
    return {item.name: getattr(task, item.name) for item in fields(task)} | {"metadata": dict(task.metadata)}


def _task_from_json(value: Mapping[str, Any]) -> Any:
    if "Task" not in value:
        return value["value"]
    task = Task(**value["Task"])
    return replace(task, answers=tuple(task.answers))


def _turn_to_json(turn: Turn) -> dict[str, Any]:
    """Context and action apart; the version as one number where it is one."""
    said = int(np.argmax(turn.chosen)) if np.any(turn.chosen) else len(turn.tokens)
    if not np.all(turn.chosen[said:]):
        raise BadInput(
            "a turn holds context after its action, which no hosted rollout records: write it in another way"
        )
    tokens = np.asarray(turn.tokens).tolist()
    return {
        "said": tokens[:said],
        "action": tokens[said:],
        "logp": np.asarray(turn.logp_sampled)[said:].astype(np.float64).tolist(),  # exact, as JSON's numbers are
        "version": np.asarray(turn.version).tolist(),
        "reward": turn.reward,
        "anchor": turn.anchor,
    }


def _turn_from_json(value: Mapping[str, Any]) -> Turn:
    version = value["version"]
    version = np.array(version, np.int32) if isinstance(version, list) else version
    return make_turn(value["said"], value["action"], value["logp"], version, value["reward"], value["anchor"])


def make_turn(
    said: Sequence[int],
    action: Sequence[int],
    logp: Sequence[float],
    version: np.ndarray | int,
    reward: float | None,
    anchor: int,
) -> Turn:
    """A turn: what was said, then what the policy chose."""
    if len(action) != len(logp):
        raise BadInput(f"an action of {len(action)} tokens has {len(logp)} log-probabilities: give one a token")
    nothing = np.zeros(len(said), np.float32)
    return Turn(
        tokens=np.array([*said, *action], np.int32),
        chosen=np.arange(len(said) + len(action)) >= len(said),
        logp_sampled=np.concatenate([nothing, np.array(logp, np.float32)]),
        version=version,
        reward=reward,
        anchor=anchor,
    )
