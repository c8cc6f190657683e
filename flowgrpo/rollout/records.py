"""Recorded trajectories of host environments: token ids, effects and reward, as values and as lines of JSON.

    line = to_json(recorded);  recorded = from_json(line)         one JSON object a line, the same bits
    trajectories = to_trajectories(recorded, env.tools)           ragged records -> padded arrays, for advantages

A `RecordedTrajectory` has every observation, action and effect, so `replay` can run it again without an engine and
without tools (A2). Tokens are ids as they were sampled; nothing is recovered from text (A5).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from flowgrpo.batching.collate import collate
from flowgrpo.contracts import Completion, RewardResult
from flowgrpo.renamed import RECORD_KEYS
from flowgrpo.rollout import effects
from flowgrpo.rollout.effects import Effect
from flowgrpo.types import COUNTS, JSON, BadInput, Ledger, Status, Task, Trajectories, Trajectory, Turn


@dataclass(frozen=True, eq=False, kw_only=True)
class RecordedTrajectory(Trajectory):
    """A trajectory that has ended, with everything its environment observed, did and called.

    `effect_counts` has the number of effects of the reset and of each step that returned. If the last step did not
    return, it has one entry less, and the remaining effects of `log` belong to that step.
    """

    task: Any
    key: tuple[int, ...]
    sample: int  # index within the group
    tools: tuple[str, ...]  # by turn; "" for no call
    errors: tuple[bool, ...]  # by turn
    log: tuple[Effect, ...] = ()
    effect_counts: tuple[int, ...]
    output: str | None = None  # the final answer; None if there is none
    reward_result: RewardResult | None = None  # of a reward function, or of an environment whose reward stands
    reason: str = ""  # why it ended, unless the policy or the environment simply ended it
    seconds: float | None = None  # until its end, without the reward; None if it was not timed on its own


class PartialAction(NamedTuple):
    """The part of an action that was sampled before the token budget was used up, with its context tokens."""

    context: tuple[int, ...]
    anchor: int
    completion: Completion

    @property
    def turn(self) -> Turn:
        """The partial action as a turn, for a trajectory that is never resumed."""
        return to_turn(self.context, self.completion, self.anchor)


@dataclass(frozen=True, eq=False)
class PartialTrajectory:
    """A trajectory that can be resumed: complete turns, the effects of the reset and of each step, a partial action."""

    task: Any
    key: tuple[int, ...]
    group: int
    sample: int
    turns: tuple[Turn, ...]
    tools: tuple[str, ...]
    errors: tuple[bool, ...]
    log: tuple[Effect, ...]
    effect_counts: tuple[int, ...]
    seconds: float
    partial_action: PartialAction | None = None  # if the budget was used up within an action

    @property
    def all_turns(self) -> tuple[Turn, ...]:
        """The complete turns, and the partial action as one more."""
        return self.turns if self.partial_action is None else (*self.turns, self.partial_action.turn)


class RolloutResult(NamedTuple):
    """Result of a hosted rollout: first the resumed trajectories, then the new ones, each in the order given."""

    trajectories: tuple[RecordedTrajectory, ...]
    unfinished: tuple[PartialTrajectory, ...]  # a later rollout can resume these
    ledger: Ledger  # of tokens that were sampled and are in neither of the two
    num_without_turns: int  # trajectories without a turn, from which nothing can be learned
    seconds: Mapping[str, float]  # rollout; playing, until the last trajectory ended; judging, summed over groups


def to_trajectories(
    recorded: Sequence[RecordedTrajectory],
    tools: Sequence[str],
    *,
    turns: int | None = None,
    length: int | None = None,
) -> Trajectories:
    """Padded NumPy arrays of recorded trajectories, including those without a turn.

    Args:
        recorded: the trajectories, in the order of axis n.
        tools: names of the environment's tools; `Trajectories.tool` holds their indices.
        turns: size of axis t; by default the most turns of a trajectory.
        length: size of axis l; by default the longest turn, rounded up to a power of two to compile few programs.
    """
    longest = max((len(turn.tokens) for trajectory in recorded for turn in trajectory.turns), default=1)
    size = 1 << (longest - 1).bit_length() if length is None else length
    has_turn_n = np.array([bool(trajectory.turns) for trajectory in recorded])
    # `collate` needs a turn: a trajectory without one, and so without an outcome, gets an empty one, masked below.
    empty = [make_turn([0], [], [], 0, None, 0)]
    padded = [
        trajectory
        if trajectory.turns
        else replace(
            trajectory,
            turns=empty,
            outcome=None,
            status=Status.ABORTED if COUNTS[trajectory.status] else trajectory.status,
        )
        for trajectory in recorded
    ]
    trajectories = collate(padded, turns=turns, length=size)
    trajectories = trajectories.replace(turns=trajectories.turns & has_turn_n[:, None])
    index_of = {name: index for index, name in enumerate(tools)}
    tool_nt = np.full(trajectories.turns.shape, -1, np.int32)
    error_nt = np.zeros(trajectories.turns.shape, bool)
    for n, trajectory in enumerate(recorded):
        tool_nt[n, : len(trajectory.tools)] = [index_of.get(tool, -1) for tool in trajectory.tools]
        error_nt[n, : len(trajectory.errors)] = trajectory.errors
    return trajectories.replace(tool=tool_nt, error=error_nt)


def abort(partial: PartialTrajectory, reason: str) -> RecordedTrajectory:
    """An aborted trajectory for a partial one that is never resumed: excluded from the loss, but in the ledger."""
    excluded = ("turns", "partial_action")
    record = {field.name: getattr(partial, field.name) for field in fields(partial) if field.name not in excluded}
    if partial.partial_action is not None:  # recorded like a turn whose step did not return
        record |= {"tools": (*partial.tools, ""), "errors": (*partial.errors, True)}
    return RecordedTrajectory(**record, turns=partial.all_turns, outcome=None, status=Status.ABORTED, reason=reason)


def awaits_reward(trajectory: RecordedTrajectory) -> bool:
    """Whether a reward function is to be called: there is a turn, no result yet, and the status counts (F5)."""
    return bool(trajectory.turns) and trajectory.reward_result is None and COUNTS[trajectory.status]


def with_reward_result(
    trajectory: RecordedTrajectory, result: RewardResult, is_solved: Callable[[RewardResult], bool]
) -> RecordedTrajectory:
    """The trajectory with its outcome from a reward function; VERIFIER_FAILURE if that has no value."""
    if result.value is None:
        failed: dict[str, Any] = {"outcome": None, "correct": False, "status": Status.VERIFIER_FAILURE}
        return replace(trajectory, **failed, reward_result=result, reason=result.reason)
    return replace(trajectory, outcome=float(result.value), correct=bool(is_solved(result)), reward_result=result)


def make_turn(
    context: Sequence[int],
    action: Sequence[int],
    logp: Sequence[float],
    version: np.ndarray | int,
    reward: float | None,
    anchor: int,
) -> Turn:
    """A turn of context tokens and then the chosen ones."""
    if len(action) != len(logp):
        raise BadInput(f"an action of {len(action)} tokens has {len(logp)} log-probabilities: give one a token")
    zeros = np.zeros(len(context), np.float32)
    return Turn(
        tokens=np.array([*context, *action], np.int32),
        chosen=np.arange(len(context) + len(action)) >= len(context),
        logp_sampled=np.concatenate([zeros, np.array(logp, np.float32)]),
        version=version,
        reward=reward,
        anchor=anchor,
    )


def to_turn(context: Sequence[int], completion: Completion, anchor: int) -> Turn:
    """A turn of context tokens and a completion; the context has the weight version of the first sampled token."""
    version = completion.version
    is_uniform = len(set(version)) == 1
    versions = int(version[0]) if is_uniform else np.array([version[0]] * len(context) + list(version), np.int32)
    return make_turn(context, completion.tokens, completion.logp_sampled, versions, None, anchor)


# As JSON ----------------------------------------------------------------------------------------------

COMPLETION_KEYS = ("tokens", "logp", "version", "finish_reason", "reused")  # JSON keys of a Completion's fields


def to_json(trajectory: RecordedTrajectory) -> str:
    """One line of JSON for `from_json`; the task must be a `Task`, or JSON itself."""
    inherited = [field.name for field in fields(Trajectory)]  # written last
    names = [*(field.name for field in fields(trajectory) if field.name not in inherited), *inherited]
    result = trajectory.reward_result
    record = {name: getattr(trajectory, name) for name in names} | {
        "status": trajectory.status.name,
        "reward_result": None if result is None else result._asdict() | {"parts": dict(result.parts)},
    }
    return _write(record)


def from_json(line: str | bytes) -> RecordedTrajectory:
    """The trajectory that `to_json` wrote."""

    def parse(record: dict[str, Any]) -> RecordedTrajectory:
        result = record["reward_result"]
        result = None if result is None else RewardResult(**result)
        return RecordedTrajectory(**record | {"status": Status[record["status"]], "reward_result": result})

    return _read(line, parse)


def partial_to_json(partial: PartialTrajectory) -> str:
    """One line of JSON for `partial_from_json`; the task must be a `Task`, or JSON itself."""
    record: dict[str, Any] = {field.name: getattr(partial, field.name) for field in fields(partial)}
    action = partial.partial_action
    if action is not None:
        dtypes = (np.int64, np.float64, np.int64)
        columns = [np.asarray(x, dtype).tolist() for x, dtype in zip(action.completion[:3], dtypes, strict=True)]
        completion = dict(zip(COMPLETION_KEYS, (*columns, *action.completion[3:]), strict=True))
        record["partial_action"] = action._asdict() | {"completion": completion}
    return _write(record)


def partial_from_json(line: str | bytes) -> PartialTrajectory:
    """The partial trajectory that `partial_to_json` wrote."""

    def parse(record: dict[str, Any]) -> PartialTrajectory:
        action = record.pop("partial_action")
        if action is not None:
            action = _with_new_keys(action)
            completion = Completion(logp_sampled=action["completion"].pop("logp"), **action["completion"])
            action = PartialAction(tuple(action["context"]), action["anchor"], completion)
        return PartialTrajectory(**record, partial_action=action)

    return _read(line, parse)


def _write(record: dict[str, Any]) -> str:
    """A record as a line of JSON, with the fields that both kinds of records have converted."""
    task = record["task"]
    common = {
        "task": {"Task": _task_to_json(task)} if isinstance(task, Task) else {"value": task},
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


def _read(line: str | bytes, parse: Callable[[dict[str, Any]], Any]) -> Any:
    """Parse a line of JSON, with the fields that both kinds of records have converted before `parse` is called."""
    try:
        record = _with_new_keys(json.loads(line))
        common = {
            "task": _task_from_json(record["task"]),
            "turns": tuple(_turn_from_json(turn) for turn in record["turns"]),
            "log": tuple(effects.from_json(effect) for effect in record["log"]),
        }
        common |= {name: tuple(record[name]) for name in ("key", "tools", "errors", "effect_counts")}
        return parse(record | common)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise BadInput(f"{line!r:.120} is no recorded trajectory ({error!r:.200}): give what to_json wrote") from None


def _with_new_keys(value: Mapping[str, JSON]) -> dict[str, JSON]:
    """The JSON object with keys of earlier versions renamed."""
    return {RECORD_KEYS.get(key, key): x for key, x in value.items()}


def _task_to_json(task: Task) -> dict[str, JSON]:
    return {field.name: getattr(task, field.name) for field in fields(task)} | {"metadata": dict(task.metadata)}


def _task_from_json(value: Mapping[str, JSON]) -> Any:
    if "Task" not in value:
        return value["value"]
    task = Task(**value["Task"])
    return replace(task, answers=tuple(task.answers))


def _turn_to_json(turn: Turn) -> dict[str, JSON]:
    """Context and action apart; the version as one number if all tokens have the same."""
    size = int(np.argmax(turn.chosen)) if np.any(turn.chosen) else len(turn.tokens)  # of the context
    if not np.all(turn.chosen[size:]):
        raise BadInput("a turn has context after its action, which no hosted rollout records: write it in another way")
    tokens = np.asarray(turn.tokens).tolist()
    return {
        "context": tokens[:size],
        "action": tokens[size:],
        "logp": np.asarray(turn.logp_sampled)[size:].astype(np.float64).tolist(),  # exact, as JSON's numbers are
        "version": np.asarray(turn.version).tolist(),
        "reward": turn.reward,
        "anchor": turn.anchor,
    } | ({"starts_context": True} if turn.starts_context else {})


def _turn_from_json(value: Mapping[str, JSON]) -> Turn:
    value = _with_new_keys(value)
    version = value["version"]
    version = np.array(version, np.int32) if isinstance(version, list) else version
    turn = make_turn(value["context"], value["action"], value["logp"], version, value["reward"], value["anchor"])
    return replace(turn, starts_context=True) if value.get("starts_context") else turn
