"""Log of a cluster's events in the order in which the master received them, one JSON object a line (S2)."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from flowgrpo.files import parse_json
from flowgrpo.types import JSON, BadInput

OLD_EVENT_FIELDS = {"room": "capacity"}  # names in the logs of earlier versions, which are still read


class EventLog:
    """An append-only file; a line that a killed process left incomplete is terminated."""

    def __init__(self, path: Path):
        self._path = path

    def __enter__(self) -> "EventLog":
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            raise BadInput(f"{self._path} can't be written ({error.strerror}): choose another folder") from None
        if self._file.tell() and not self._path.read_bytes().endswith(b"\n"):
            self._file.write(b"\n")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, kind: str, **fields: JSON) -> None:
        """Append a line, with the time."""
        self._file.write((json.dumps({"what": kind, **fields, "at": round(time.time(), 3)}) + "\n").encode())


def read_events(path: str | os.PathLike) -> Iterator[dict[str, JSON]]:
    """The complete lines of a log, in order."""
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise BadInput(f"{path} can't be read ({error.strerror}): give the events.jsonl of a cluster's run") from None
    for number, line in enumerate(lines, 1):
        try:
            entry = parse_json(line)
        except ValueError:
            if number != len(lines) and not line.startswith(b'{"what"'):
                raise BadInput(f"{path}:{number} is no event: give the events.jsonl of a cluster's run") from None
            continue
        if isinstance(entry, dict) and "event" in entry:
            entry["event"] = {OLD_EVENT_FIELDS.get(name, name): value for name, value in entry["event"].items()}
        yield entry
