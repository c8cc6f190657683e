"""Keep each answer of a tool, role or reward in a file as it comes, so that a killed run gets the same again (S1).

    journal = Journal(folder, 10)       # a run that goes on from the checkpoint of update 10
    do, reward, fired = journal.effects(do), journal.verdicts(reward), journal.deadlines()
    with journal.at("train", 11):
        rollout(...)                    # what was answered before the process was killed is not asked for again
    with journal.at("validation"):      # after the same update
        ...
    journal.forget(12)                  # all before update 12, which a checkpoint covers now

A rollout draws everything else from keys, so with the same answers it becomes the same rollout, whatever a clock, a
server or another program had to do with them. A call carries the seed of its trajectory, turn and speaker, and is
told from all others by it; verdicts are kept by group. What answers too late for its rollout is not kept, but that it
was late is.
"""

import json
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from io import FileIO
from pathlib import Path
from typing import Any
from zlib import crc32

from flowgrpo.contracts import Call, Do, Result, Reward, Scored
from flowgrpo.effects import Effect, to_json
from flowgrpo.rollout.deadlines import Fired
from flowgrpo.types import BadInput, Task


class Journal:
    """The answers of the rollouts since the last checkpoint, a file each."""

    def __init__(self, folder: str | os.PathLike, update: int = 0):
        self._folder, self._update = Path(folder), update
        self._page: _Page | None = None

    @contextmanager
    def at(self, name: str, update: int | None = None) -> Iterator[None]:
        """A rollout after an update, or after the one before: answers are kept, and those that are there are given.

        Where the block ends in a `BadInput`, such as that nothing could be judged, they are to be asked for again.
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
            if int(path.name.partition("-")[0]) < update:
                path.unlink(missing_ok=True)

    def effects(self, do: Do) -> Do:
        """`do`, whose results are kept."""
        return partial(self._do, do)

    def verdicts(self, reward: Reward) -> Reward:
        """The reward, whose verdicts are kept."""
        many = partial(self._judge, reward)
        return Reward(partial(_one, many), many)

    def deadlines(self) -> Fired:
        """Those that fired."""
        return Fired(self._find, self._note)

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


def _one(many, task: Task, output: str) -> Scored:
    return many([task], [output])[0]


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
                asked, answered, checksum = json.loads(line)
                if checksum != _checksum(asked, answered):
                    raise ValueError("it is not what was written")
                self._known.setdefault(asked, deque()).append(answered)
            except (ValueError, TypeError) as error:
                self.close()
                raise BadInput(f"{path}:{number} can't be read ({error}): remove the file, to ask anew") from None
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
