"""Record the results of tools, roles and rewards, and return the same results again (A2, S1).

    call_tool, log = record_effects(call_tool);   env.step(state, tokens, call_tool);   ...    log grows with each call
    env.step(state, tokens, replay_effects(log));  ...                     the same results, with nothing running

An `EffectLog` keeps each result in a file as it comes, so that a run that is killed gets the same results again:

    effect_log = EffectLog(folder, 10)       # of a run that resumes from the checkpoint of update 10
    call_tool, reward = effect_log.wrap_tools(call_tool), effect_log.wrap_reward(reward)
    with effect_log.recording("train", 11):
        rollout(...)                         # calls that returned before the process was killed are not repeated
    with effect_log.recording("validation"): # after the same update
        ...
    effect_log.delete_before(12)             # of all updates before 12, which a checkpoint covers now

A rollout draws everything else from keys, so with the same results it is the same rollout, whatever a clock, a server
or another program had to do with them. A call is identified by the seed of its trajectory, turn and speaker; reward
results are kept by group. A result that comes too late for its rollout is not kept, but the deadline that expired is
(`ExpiredDeadlines`), so that a repeated rollout stops its trajectories at the same point.
"""

import json
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from io import FileIO
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from flowgrpo.contracts import Call, Result, Reward, RewardResult, ToolRunner
from flowgrpo.files import parse_json
from flowgrpo.types import JSON, BadInput, Task


class Effect(NamedTuple):
    """A call and its result."""

    call: Call
    result: Result


def record_effects(call_tool: ToolRunner) -> tuple[ToolRunner, list[Effect]]:
    """`call_tool`, and the list to which each of its calls is added once it has returned."""
    log: list[Effect] = []

    def record(call: Call) -> Result:
        result = call_tool(call)
        log.append(Effect(call, result))
        return result

    return record, log


def replay_effects(log: Sequence[Effect], call_tool: ToolRunner | None = None) -> ToolRunner:
    """A `ToolRunner` that returns the results of `log` in order, and then those of `call_tool`, if given.

    Raises `BadInput` for a call that differs from the recorded one.
    """
    remaining = iter(list(log))

    def replay(call: Call) -> Result:
        effect = next(remaining, None)
        if effect is not None:
            if effect.call != call:
                raise BadInput(
                    f"the record has {effect.call!r:.200} where now {call!r:.200} is called: replay it as it ran"
                )
            return effect.result
        if call_tool is None:
            raise BadInput(f"the record ends before {call!r:.200}: it is of a shorter trajectory")
        return call_tool(call)

    return replay


def no_effects(call: Call) -> Result:
    """The `call_tool` of environments that have no effects."""
    raise BadInput(f"{call.kind} {call.name!r} was called, but this environment was given no effects: pass call_tool")


# As JSON ----------------------------------------------------------------------------------------------


def to_json(effect: Effect) -> dict[str, JSON]:
    """The effect as a JSON object."""
    call, result = effect
    return {
        "call": {**call._asdict(), "arguments": dict(call.arguments), "seed": list(call.seed)},
        "result": result._asdict(),
    }


def from_json(value: Mapping[str, JSON]) -> Effect:
    """The effect that `to_json` wrote."""
    try:
        call = Call(**{**value["call"], "seed": tuple(value["call"]["seed"])})
        return Effect(call, Result(**value["result"]))
    except (KeyError, TypeError) as error:
        raise BadInput(f"{value!r:.120} is no recorded effect ({error}): give what to_json wrote") from error


# Deadlines --------------------------------------------------------------------------------------------


class DeadlineStop(NamedTuple):
    """The point at which a deadline stopped a trajectory."""

    turns: int  # number of its turns
    phase: str  # of its worker
    effects: int  # number of effects that had returned; -1 if the environment itself did not return, outside of effects
    of_group: bool  # the group's deadline, else that of the turn
    reason: str  # why it ended there; "" if it is unfinished
    dropped: int  # tokens that came too late to become a turn


class ExpiredDeadlines(NamedTuple):
    """Deadlines that expired in an earlier attempt at the rollout, and a way to add those that expire now.

    Keys are the integers of trajectory keys; a group is identified by those of the trajectories to be judged.
    """

    find: Callable[[JSON], JSON]  # what was added for this key, or None
    add: Callable[[JSON, JSON], None]

    def find_stop(self, key: Sequence[int]) -> DeadlineStop | None:
        """Where a deadline stopped the trajectory of this key; None if none did."""
        stop = self.find(["late", *key])
        return None if stop is None else DeadlineStop(*stop)

    def add_stop(self, key: Sequence[int], stop: DeadlineStop) -> None:
        """Keep where a deadline stopped the trajectory of this key."""
        self.add(["late", *key], list(stop))

    def find_unjudged(self, keys: Sequence[Sequence[int]]) -> str | None:
        """Why the group had no rewards; None if it had."""
        return self.find(["unjudged", *keys])

    def add_unjudged(self, keys: Sequence[Sequence[int]], reason: str) -> None:
        """Keep that the group's rewards came too late."""
        self.add(["unjudged", *keys], reason)


NO_DEADLINES = ExpiredDeadlines(lambda _: None, lambda _key, _value: None)


# The log ----------------------------------------------------------------------------------------------


class EffectLog:
    """The results of all rollouts since the last checkpoint, one file for each rollout."""

    def __init__(self, folder: str | os.PathLike, update: int = 0):
        self._folder, self._update = Path(folder), update
        self._file: _LogFile | None = None

    @contextmanager
    def recording(self, name: str, update: int | None = None) -> Iterator[None]:
        """Keep the results of a rollout after an update (by default the last one), and return those in the file.

        If the block raises `BadInput`, such as that nothing could be judged, the file is removed: calls are repeated.
        """
        self._update = self._update if update is None else update
        self._file = file = _LogFile(self._folder / f"{self._update:06d}-{name}.jsonl")
        try:
            yield
        except BadInput:
            file.remove()
            raise
        finally:
            self._file = None
            file.close()

    def delete_before(self, update: int) -> None:
        """Delete the files of all updates before this one."""
        for path in self._folder.glob("[0-9]*-*.jsonl"):
            number = path.name.partition("-")[0]
            if number.isdecimal() and int(number) < update:
                path.unlink(missing_ok=True)

    def wrap_tools(self, call_tool: ToolRunner) -> ToolRunner:
        """`call_tool`, with its results kept."""

        def call_kept(call: Call) -> Result:
            file = self._file
            if file is None:
                return call_tool(call)
            key = _hash(to_json(Effect(call, Result("")))["call"])
            value = file.find(key)
            if value is not None:
                return Result(**value)
            result = call_tool(call)
            file.write(key, result._asdict())
            return result

        return call_kept

    def wrap_reward(self, reward: Reward) -> Reward:
        """The reward, with its results kept by group."""

        def score_all(tasks: Sequence[Task], outputs: Sequence[str]) -> list[RewardResult]:
            file = self._file
            if file is None:
                return reward.score_all(tasks, outputs)
            # A reward may compute a group in one batch, which decides the last bits of each result: keep all or none.
            key = _hash([[task.id, output] for task, output in zip(tasks, outputs, strict=True)])
            values = file.find(key)
            if values is not None:
                return [RewardResult(**value) for value in values]
            results = list(reward.score_all(tasks, outputs))
            file.write(key, [result._asdict() | {"parts": dict(result.parts)} for result in results])
            return results

        return Reward(lambda task, output: score_all([task], [output])[0], score_all)

    def expired_deadlines(self) -> ExpiredDeadlines:
        """The deadlines that expired in the rollout that is recorded."""

        def find(key: JSON) -> JSON:
            return None if self._file is None else self._file.find(_hash(key))

        def add(key: JSON, value: JSON) -> None:
            if self._file is not None:
                self._file.write(_hash(key), value)

        return ExpiredDeadlines(find, add)


class _LogFile:
    """The file of one rollout: lines of `[key, value, checksum]`, of which those from earlier attempts are read."""

    def __init__(self, path: Path):
        self._lock, self._path = threading.Lock(), path
        self._values: dict[str, deque] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            self._file: FileIO | None = path.open("r+b", buffering=0)
        except OSError as error:
            raise BadInput(f"{path} can't be written ({error.strerror}): choose another folder") from None
        complete = self._file.read().rpartition(b"\n")[0]
        for number, line in enumerate(complete.splitlines(), 1):
            try:
                key, value, checksum = parse_json(line)
                if checksum != _checksum(key, value):
                    raise ValueError("it is not what was written")
                self._values.setdefault(key, deque()).append(value)
            except (ValueError, TypeError, RecursionError) as error:
                self.close()
                raise BadInput(f"{path}:{number} can't be read ({error}): remove the file, to ask again") from None
        # Drop a line that a killed process left half-written.
        end = len(complete) + bool(complete)
        self._file.truncate(end)
        self._file.seek(end)

    def find(self, key: str) -> JSON:
        """Take the next value of an earlier attempt for this key; None if there is none left."""
        with self._lock:
            values = self._values.get(key)
            return values.popleft() if values else None

    def write(self, key: str, value: JSON) -> None:
        """Add a value; no effect once the rollout is over."""
        data = (json.dumps([key, value, _checksum(key, value)], default=float) + "\n").encode()
        with self._lock:
            while data and self._file is not None:  # unbuffered, so that a killed process loses no line
                data = data[self._file.write(data) :]

    def remove(self) -> None:
        """Delete the file."""
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """End the rollout: nothing is written any more."""
        with self._lock:
            if self._file is not None:
                self._file.close()
            self._file = None


def _checksum(key: str, value: JSON) -> int:
    """Checksum of a line, of its JSON text."""
    return crc32(json.dumps([key, value], default=float).encode())


def _hash(question: JSON) -> str:
    """A short hash of a question, which may be long."""
    return blake2b(json.dumps(question, sort_keys=True, default=float).encode(), digest_size=16).hexdigest()
