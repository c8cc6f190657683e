"""TensorBoard event files, in the format that TensorBoard has read since 2015.

    with EventFile(folder, purge_step=13) as events:  # purges steps from 13 on in earlier files
        events.write(13, {"success": 0.54}, {"ratio": (edges, counts)})

A file is a sequence of records, each framed by its length and checksums; a record is a protocol buffer of few fields,
which is encoded here. So nothing has to be installed, no thread is started, and every record is in the file when
`write` returns.

    record = length (8 bytes), checksum of it, data, checksum of it;    checksum = masked CRC-32C, 4 bytes
    Event  = 1 wall_time, 2 step, 3 file_version | 5 summary | 7 session_log
"""

import os
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

Histogram = tuple[Sequence[float], Sequence[float]]  # edges, and the counts between them
VERSION = b"brain.Event:2"
START = b"\x08\x01"  # SessionLog.status = START: purges all steps from the event's step on in earlier files


class EventFile:
    """A new event file in a folder, numbered after the existing ones."""

    def __init__(
        self, folder: str | os.PathLike, *, purge_step: int | None = None, clock: Callable[[], float] = time.time
    ):
        self._clock = clock
        Path(folder).mkdir(parents=True, exist_ok=True)
        number = len(list(Path(folder).glob("events.out.tfevents.*")))
        self._file = (Path(folder) / f"events.out.tfevents.{number:010d}.flowgrpo").open("xb", buffering=0)
        self._append(0, _bytes(3, VERSION))
        if purge_step is not None:
            self._append(purge_step, _bytes(7, START))

    def __enter__(self) -> "EventFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Histogram] = {}) -> None:
        """Write an event with the scalars and histograms of a step, by tag."""
        values = [_bytes(1, _scalar(tag, value)) for tag, value in scalars.items()]
        values += [_bytes(1, _histogram(tag, *histogram)) for tag, histogram in histograms.items()]
        self._append(step, _bytes(5, b"".join(values)))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, step: int, payload: bytes) -> None:
        data = _double(1, self._clock()) + _number(2, step) + payload
        size = struct.pack("<Q", len(data))
        frame = size + struct.pack("<I", masked_crc(size)) + data + struct.pack("<I", masked_crc(data))
        while frame:  # unbuffered, so a write may be partial
            frame = frame[self._file.write(frame) or 0 :]


def _scalar(tag: str, value: float) -> bytes:
    return _bytes(1, tag.encode()) + b"\x15" + struct.pack("<f", value)  # field 2, simple_value


def _histogram(tag: str, edges: Sequence[float], counts: Sequence[float]) -> bytes:
    """Each count is at the middle of its bin; an empty first bin bounds the first one with counts."""
    middles = [(low + high) / 2 for low, high in pairwise(edges)]
    total = sum(count * x for count, x in zip(counts, middles, strict=True))
    squares = sum(count * x * x for count, x in zip(counts, middles, strict=True))
    moments = (edges[0], edges[-1], float(sum(counts)), total, squares)
    body = b"".join(_double(field, value) for field, value in enumerate(moments, 1))
    body += _bytes(6, struct.pack(f"<{len(edges)}d", *edges))
    body += _bytes(7, struct.pack(f"<{len(edges)}d", 0.0, *map(float, counts)))
    return _bytes(1, tag.encode()) + _bytes(5, body)


# Protocol buffers ---------------------------------------------------------------------------------------


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


# Checksums ----------------------------------------------------------------------------------------------


def masked_crc(data: Iterable[int]) -> int:
    """CRC-32C, rotated and shifted as in these files."""
    table, crc = _table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@cache
def _table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return tuple(table)
