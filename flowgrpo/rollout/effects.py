"""Record what tools, roles and rewards answered, and give the same answers again (A2, S1).

    do, log = recorded(do);   env.step(state, tokens, do);   ...        log grows with every call
    env.step(state, tokens, replayed(log));  ...                        the same results, with nothing running

A `Journal` keeps each answer in a file as it comes, so that a run that is killed gets the same again:

    journal = Journal(folder, 10)       # a run that goes on from the checkpoint of update 10
    do, reward, fired = journal.effects(do), journal.verdicts(reward), journal.deadlines()
    with journal.at("train", 11):
        rollout(...)                    # what was answered before the process was killed is not asked for again
    with journal.at("validation"):      # after the same update
        ...
    journal.forget(12)                  # all before update 12, which a checkpoint covers now

A rollout draws everything else from keys, so with the same answers it becomes the same rollout, whatever a clock, a
server or another program had to do with them. A call carries the seed of its trajectory, turn and speaker, which tells
it from all others; verdicts are kept by group. An answer that comes too late for its rollout is not kept, but the
deadline that fired is (`FiredDeadlines`), so that a rollout which begins again stops its trajectories at the same
place.
"""

import json
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from flowgrpo.contracts import Call, Do, Result, Reward, Scored
from flowgrpo.files import parse_json
from flowgrpo.types import BadInput, Task


class Effect(NamedTuple):
    """A call and what came of it."""

    call: Call
    result: Result


def recorded(do: Do) -> tuple[Do, list[Effect]]:
    """`do`, and the list to which each of its calls is added once it has returned."""
    log: list[Effect] = []

    def record(call: Call) -> Result:
        result = do(call)
        log.append(Effect(call, result))
        return result

    return record, log


def replayed(log: Sequence[Effect], do: Do | None = None) -> Do:
    """Build a `Do` that gives the results in `log`, call by call in its order; after its end it calls `do`, if given.

    A call that differs from the recorded one is `BadInput`: what asks is not what was recorded.
    """
    return partial(_replay, iter(list(log)), do)


def no_effects(call: Call) -> Result:
    """The `do` of environments that have none."""
    raise BadInput(f"{call.kind} {call.name!r} was called, but this environment was given no effects: pass `do`")


def _replay(rest: Iterator[Effect], do: Do | None, call: Call) -> Result:
    effect = next(rest, None)
    if effect is not None:
        if effect.call != call:
            raise BadInput(
                f"the record has {effect.call!r:.200} where now {call!r:.200} is called: replay it as it ran"
            )
        return effect.result
    if do is None:
        raise BadInput(f"the record ends before {call!r:.200}: it is of a shorter trajectory")
    return do(call)


# As JSON ----------------------------------------------------------------------------------------------


def to_json(effect: Effect) -> dict[str, Any]:
    """An effect as a JSON object."""
    call, result = effect
    return {
        "call": {**call._asdict(), "arguments": dict(call.arguments), "seed": list(call.seed)},
        "result": result._asdict(),
    }


def from_json(value: Mapping[str, Any]) -> Effect:
    """The effect that `to_json` wrote."""
    try:
        call = Call(**{**value["call"], "seed": tuple(value["call"]["seed"])})
        return Effect(call, Result(**value["result"]))
    except (KeyError, TypeError) as error:
        raise BadInput(f"{value!r:.120} is no recorded effect ({error}): give what to_json wrote") from error


class DeadlineStop(NamedTuple):
    """A trajectory that a deadline stopped, and where."""

    turns: int  # that it had
    phase: str  # of its member
    effects: int  # that had returned; -1 where the environment itself did not, and nothing that it had asked for
    of_group: bool  # the deadline, or else of its turn
    reason: str  # why it ended there; "" where it was given back
    dropped: int  # tokens that came too late to become a turn


class FiredDeadlines(NamedTuple):
    """Deadlines that fired in an earlier attempt, and how to note another one; `what` is of JSON's own kinds."""

    find: Callable[[Sequence[Any]], Any]  # what -> that which was noted, or None
    note: Callable[[Sequence[Any], Any], None]


def _find_nothing(_: Sequence[Any]) -> None:
    """Nothing has fired."""


def _note_nothing(_: Sequence[Any], __: Any) -> None:
    """Nobody goes on from here."""


NOTHING = FiredDeadlines(_find_nothing, _note_nothing)


def deadline_stop_of(fired: FiredDeadlines, key: Sequence[int]) -> DeadlineStop | None:
    """Look up where a deadline stopped the trajectory of this key; None where none did."""
    found = fired.find(["late", *key])
    return None if found is None else DeadlineStop(*found)


def note_deadline_stop(fired: FiredDeadlines, key: Sequence[int], late: DeadlineStop) -> None:
    """Keep where a deadline stopped the trajectory of this key."""
    fired.note(["late", *key], list(late))


def unjudged(fired: FiredDeadlines, keys: Sequence[Sequence[int]]) -> str | None:
    """Say why the trajectories of these keys had no verdict, if that was so."""
    return fired.find(["unjudged", *keys])


def note_unjudged(fired: FiredDeadlines, keys: Sequence[Sequence[int]], why: str) -> None:
    """Keep that their verdicts came too late."""
    fired.note(["unjudged", *keys], why)


class Journal:
    """The answers of the rollouts since the last checkpoint, a file each."""

    def __init__(self, folder: str | os.PathLike, update: int = 0):
        self._folder, self._update = Path(folder), update
        self._page: _Page | None = None

    @contextmanager
    def at(self, name: str, update: int | None = None) -> Iterator[None]:
        """Keep the answers of a rollout after an update, or after the one before, and give those that are there.

        If the block ends in a `BadInput`, such as that nothing could be judged, they are to be asked for again.
        """
        self._update = self._update if update is None else update
        self._page = page = _Page(self._folder / f"{self._update:06d}-{name}.jsonl")
        try:
            yield
        except BadInput:
            page.remove()
            raise
        finally:
            self._page = None
            page.close()

    def forget(self, update: int) -> None:
        """Remove what was answered before this update."""
        for path in self._folder.glob("[0-9]*-*.jsonl"):
            number = path.name.partition("-")[0]
            if number.isdecimal() and int(number) < update:
                path.unlink(missing_ok=True)

    def effects(self, do: Do) -> Do:
        """`do`, whose results are kept."""
        return lambda call: self._do(do, call)

    def verdicts(self, reward: Reward) -> Reward:
        """The reward, whose verdicts are kept."""

        def many(tasks: Sequence[Task], outputs: Sequence[str]) -> list[Scored]:
            return self._judge(reward, tasks, outputs)

        return Reward(lambda task, output: many([task], [output])[0], many)

    def deadlines(self) -> FiredDeadlines:
        """Those that fired."""
        return FiredDeadlines(self._find, self._note)

    def _find(self, what: Sequence[Any]) -> Any:
        return None if self._page is None else self._page.find(_key(what))

    def _note(self, what: Sequence[Any], found: Any) -> None:
        if self._page is not None:
            self._page.write(_key(what), found)

    def _do(self, do: Do, call: Call) -> Result:
        page = self._page
        if page is None:
            return do(call)
        asked = _key(to_json(Effect(call, Result("")))["call"])
        known = page.find(asked)
        if known is not None:
            return Result(**known)
        result = do(call)
        page.write(asked, result._asdict())
        return result

    def _judge(self, reward: Reward, tasks: Sequence[Task], outputs: Sequence[str]) -> list[Scored]:
        page = self._page
        if page is None:
            return reward.many(tasks, outputs)
        # A judge may compute a group in one batch, in which each verdict has its own last bits: all or none is kept.
        asked = _key([[task.id, output] for task, output in zip(tasks, outputs, strict=True)])
        known = page.find(asked)
        if known is not None:
            return [Scored(**one) for one in known]
        verdicts = list(reward.many(tasks, outputs))
        page.write(asked, [one._asdict() | {"parts": dict(one.parts)} for one in verdicts])
        return verdicts


class _Page:
    """The file of one rollout, and what it held when it was opened."""

    def __init__(self, path: Path):
        self._lock, self._path = threading.Lock(), path
        self._known: dict[str, deque] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            self._file: FileIO | None = path.open("r+b", buffering=0)
        except OSError as error:
            raise BadInput(f"{path} can't be written ({error.strerror}): choose another folder") from None
        whole = self._file.read().rpartition(b"\n")[0]
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                asked, answered, checksum = parse_json(line)
                if checksum != _checksum(asked, answered):
                    raise ValueError("it is not what was written")
                self._known.setdefault(asked, deque()).append(answered)
            except (ValueError, TypeError, RecursionError) as error:
                self.close()
                raise BadInput(f"{path}:{number} can't be read ({error}): remove the file, to ask again") from None
        # A line that a killed process left half-written goes.
        end = len(whole) + bool(whole)
        self._file.truncate(end)
        self._file.seek(end)

    def find(self, asked: str) -> Any:
        """Take an answer to this that the file held when it was opened, each one once; None where nothing is left."""
        with self._lock:
            answers = self._known.get(asked)
            return answers.popleft() if answers else None

    def write(self, asked: str, answered: Any) -> None:
        """Add an answer; nothing where the rollout is over."""
        data = (json.dumps([asked, answered, _checksum(asked, answered)], default=float) + "\n").encode()
        with self._lock:
            while data and self._file is not None:  # unbuffered, so that a killed process loses no line
                data = data[self._file.write(data) :]

    def remove(self) -> None:
        """Forget what was answered."""
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """The rollout is over."""
        with self._lock:
            if self._file is not None:
                self._file.close()
            self._file = None


def _checksum(asked: str, answered: Any) -> int:
    """Of a line, as JSON writes it."""
    return crc32(json.dumps([asked, answered], default=float).encode())


def _key(asked: Any) -> str:
    """Hash a question, which may be long, to the short string that stands for it."""
    return blake2b(json.dumps(asked, sort_keys=True, default=float).encode(), digest_size=16).hexdigest()
