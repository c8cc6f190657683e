"""Records of hosted rollouts: each trajectory's ids, effects and verdict, as a value and as one line of JSON.

A `Played` holds all that its environment was told and asked for, so that `replay` can go through it again without an
engine and without tools (A2). Tokens are ids as they were sampled; nothing is recovered from text (A5).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from flowgrpo.batching.collate import collate
from flowgrpo.contracts import Completion, Scored
from flowgrpo.rollout import effects
from flowgrpo.rollout.effects import Effect
from flowgrpo.types import COUNTS, BadInput, Ledger, Status, Task, Trajectories, Trajectory, Turn


@dataclass(frozen=True, eq=False, kw_only=True)
class Played(Trajectory):
    """A trajectory that has ended, with all that its environment was told and asked for.

    `lens` says how many effects belong to the reset and to each step that returned. Where the last one did not, `lens`
    is one shorter than that, and what `log` holds beyond it is what that step had asked for.
    """

    task: Any
    key: tuple[int, ...]
    sample: int  # which of its group
    tools: tuple[str, ...]  # by turn; "" where none was called
    errors: tuple[bool, ...]  # by turn
    log: tuple[Effect, ...] = ()
    lens: tuple[int, ...]
    output: str | None = None  # what the system answered in the end; None where it came to none
    scored: Scored | None = None  # what the reward said; None where none was asked
    reason: str = ""  # why it ended as it did, where the policy or the environment did not simply end it
    seconds: float | None = None  # to its end, the verdict not included; None where no clock ran for it alone


class CutAction(NamedTuple):
    """An action that was cut: what the environment had said before it, and what was sampled of it so far."""

    said: tuple[int, ...]
    anchor: int
    sampled: Completion

    @property
    def turn(self) -> Turn:
        """The turn that it has become if nobody goes on with it."""
        return acted(self.said, self.sampled, self.anchor)


@dataclass(frozen=True, eq=False)
class Unfinished:
    """A trajectory that can be resumed: whole turns, the effects of the reset and of each step, and a cut action."""

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
    begun: CutAction | None = None  # where the last stretch ended within an action

    @property
    def spoken(self) -> tuple[Turn, ...]:
        """All that the policy chose: its turns, and the action that was cut as one more."""
        return self.turns if self.begun is None else (*self.turns, self.begun.turn)


class Hosted(NamedTuple):
    """Result of a rollout: first what was resumed, then the new trajectories, each in the order given."""

    played: tuple[Played, ...]
    unfinished: tuple[Unfinished, ...]  # which a later rollout can resume
    ledger: Ledger  # of tokens that were delivered and are in neither of the two
    left_out: int  # of those played: had no turn, so that nothing can be learned from them
    seconds: Mapping[str, float]  # rollout; playing, until the last had ended; judging, summed over groups


def rollout_of(
    played: Sequence[Played], tools: Sequence[str], *, turns: int | None = None, length: int | None = None
) -> Trajectories:
    """The trajectories, dense and in NumPy, those without a turn too; `tools` are the environment's, which number its
    calls.

    `length` is by default the longest turn, rounded up to a power of two, so that compiled programs are met again.
    """
    needed = max((len(turn.tokens) for one in played for turn in one.turns), default=1)
    size = 1 << (needed - 1).bit_length() if length is None else length
    trajectories = collate([_with_a_turn(one) for one in played], turns=turns, length=size)
    acted_n = np.array([bool(one.turns) for one in played])
    trajectories = trajectories.replace(turns=trajectories.turns & acted_n[:, None])
    number = {name: index for index, name in enumerate(tools)}
    tool_nt = np.full(trajectories.turns.shape, -1, np.int32)
    error_nt = np.zeros(trajectories.turns.shape, bool)
    for n, one in enumerate(played):
        tool_nt[n, : len(one.tools)] = [number.get(tool, -1) for tool in one.tools]
        error_nt[n, : len(one.errors)] = one.errors
    return trajectories.replace(tool=tool_nt, error=error_nt)


def _with_a_turn(trajectory: Trajectory) -> Trajectory:
    """Give a trajectory without a turn, and so without outcome, an empty one for `collate`; it is masked afterwards."""
    if trajectory.turns:
        return trajectory
    status = Status.ABORTED if COUNTS[trajectory.status] else trajectory.status
    return replace(trajectory, turns=[make_turn([0], [], [], 0, None, 0)], outcome=None, status=status)


def aborted(unfinished: Unfinished, reason: str) -> Played:
    """A trajectory that nobody will resume: it takes part in nothing, and its tokens are accounted for."""
    own = ("turns", "begun")
    record = {item.name: getattr(unfinished, item.name) for item in fields(unfinished) if item.name not in own}
    if unfinished.begun is not None:  # a turn like any whose step gave nothing
        record |= {"tools": (*unfinished.tools, ""), "errors": (*unfinished.errors, True)}
    return Played(**record, turns=unfinished.spoken, outcome=None, status=Status.ABORTED, reason=reason)


def awaits_verdict(played: Played) -> bool:
    """Say whether a reward is to judge it: it has a turn, and ended in a way that counts."""
    return bool(played.turns) and COUNTS[played.status]


def with_verdict(played: Played, scored: Scored, solved: Callable[[Scored], bool]) -> Played:
    """The trajectory with what a reward said of it afterwards, as if it had been judged where it was rolled out."""
    if scored.value is None:
        ending: dict[str, Any] = {"outcome": None, "correct": False, "status": Status.VERIFIER_FAILURE}
        return replace(played, **ending, scored=scored, reason=scored.reason)
    return replace(played, outcome=float(scored.value), correct=bool(solved(scored)), scored=scored)


# As JSON ----------------------------------------------------------------------------------------------

SAMPLED = ("tokens", "logp", "version", "finish_reason", "reused")  # what the fields of a Completion are written as


def to_json(played: Played) -> str:
    """One line of JSON, from which `from_json` makes the same again; the task must be a `Task`, or JSON itself."""
    inherited = [item.name for item in fields(Trajectory)]  # written last, as ever
    names = [*(item.name for item in fields(played) if item.name not in inherited), *inherited]
    scored = None if played.scored is None else played.scored._asdict() | {"parts": dict(played.scored.parts)}
    record = {name: getattr(played, name) for name in names}
    return _write(record | {"status": played.status.name, "scored": scored})


def from_json(line: str | bytes) -> Played:
    """The trajectory that `to_json` wrote."""
    return _read(line, _played_from_json)


def unfinished_to_json(unfinished: Unfinished) -> str:
    """Write an unfinished trajectory as one line of JSON for `unfinished_from_json`; its task as `to_json` needs it."""
    record = {item.name: getattr(unfinished, item.name) for item in fields(unfinished)}
    begun = unfinished.begun
    return _write(record | {"begun": None if begun is None else _begun_to_json(begun)})


def unfinished_from_json(line: str | bytes) -> Unfinished:
    """The trajectory that `unfinished_to_json` wrote."""
    return _read(line, _unfinished_from_json)


def _write(record: dict[str, Any]) -> str:
    """The line of a record, with what all records hold made JSON."""
    task = record["task"]
    common = {
        "task": {"Task": _fields(task)} if isinstance(task, Task) else {"value": task},
        "turns": [_turn_to_json(turn) for turn in record["turns"]],
        "log": [effects.to_json(effect) for effect in record["log"]],
    }
    first = {name: record[name] for name in ("task", "key", "group")}
    try:
        return json.dumps(first | record | common)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadInput(
            f"the trajectory of {task!r:.120} can't be written as JSON ({error}): make its task and effects of "
            "JSON's own kinds"
        ) from None


def _read(line: str | bytes, make: Callable[[dict[str, Any]], Any]) -> Any:
    """Parse a line of JSON and have `make` build the value, once the fields that all records have are restored."""
    try:
        record = json.loads(line)
        common = {
            "task": _task_from_json(record["task"]),
            "turns": tuple(_turn_from_json(turn) for turn in record["turns"]),
            "log": tuple(effects.from_json(effect) for effect in record["log"]),
        }
        common |= {name: tuple(record[name]) for name in ("key", "tools", "errors", "lens")}
        return make(record | common)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise BadInput(f"{line!r:.120} is no recorded trajectory ({error!r:.200}): give what to_json wrote") from None


def _played_from_json(record: dict[str, Any]) -> Played:
    scored = record["scored"]
    scored = None if scored is None else Scored(**scored)
    return Played(**record | {"status": Status[record["status"]], "scored": scored})


def _unfinished_from_json(record: dict[str, Any]) -> Unfinished:
    begun = record.pop("begun")
    return Unfinished(**record, begun=None if begun is None else _begun_from_json(begun))


def _begun_to_json(begun: CutAction) -> dict[str, Any]:
    kinds = (np.int64, np.float64, np.int64)
    columns = [np.asarray(x, kind).tolist() for x, kind in zip(begun.sampled[:3], kinds, strict=True)]
    sampled = dict(zip(SAMPLED, (*columns, *begun.sampled[3:]), strict=True))
    return {"said": begun.said, "anchor": begun.anchor, "sampled": sampled}


def _begun_from_json(value: Mapping[str, Any]) -> CutAction:
    sampled = dict(value["sampled"])
    return CutAction(tuple(value["said"]), value["anchor"], Completion(logp_sampled=sampled.pop("logp"), **sampled))


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
    } | ({"begins": True} if turn.begins else {})


def _turn_from_json(value: Mapping[str, Any]) -> Turn:
    version = value["version"]
    version = np.array(version, np.int32) if isinstance(version, list) else version
    turn = make_turn(value["said"], value["action"], value["logp"], version, value["reward"], value["anchor"])
    return replace(turn, begins=True) if value.get("begins") else turn


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


def acted(said: Sequence[int], sampled: Completion, anchor: int) -> Turn:
    """The turn of what was sampled; the tokens before it count as of the weights that chose its first."""
    version = sampled.version
    uniform = len(set(version)) == 1
    versions = int(version[0]) if uniform else np.array([version[0]] * len(said) + list(version), np.int32)
    return make_turn(said, sampled.tokens, sampled.logp_sampled, versions, None, anchor)
