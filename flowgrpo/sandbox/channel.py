"""Messages between the pool, the zygote and its children: a dictionary in `marshal`, with open files.

Both ends are the same interpreter and trusted; no process that runs a program has an end of any channel.
Standard library only: this runs in the zygote.
"""

import marshal
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

_LENGTH = struct.Struct("=I")
_MAX_FILES = 8


class Closed(Exception):
    """The other end is gone."""


def send(channel: socket.socket, message: Mapping[str, Any], files: Sequence[int] = ()) -> None:
    """Send one message, and the open files with its first byte."""
    data = marshal.dumps(dict(message))
    try:
        first = socket.send_fds(channel, [_LENGTH.pack(len(data))], files) if files else 0
        channel.sendall(_LENGTH.pack(len(data))[first:] + data)
    except OSError as error:
        raise Closed(f"the other end is gone: {error}") from error


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Receive the next message and its files; raises `Closed` if there will be none."""
    files: list[int] = []
    try:
        (length,) = _LENGTH.unpack(_exactly(channel, _LENGTH.size, files))
        return marshal.loads(_exactly(channel, length, files)), files
    except (OSError, Closed) as error:
        for file in files:
            os.close(file)
        raise Closed(f"the other end is gone: {error}") from error


def _exactly(channel: socket.socket, size: int, files: list[int]) -> bytes:
    data = bytearray()
    while len(data) < size:
        received, received_files, _, _ = socket.recv_fds(channel, size - len(data), _MAX_FILES)
        files += received_files
        if not received:
            raise Closed("end of stream")
        data += received
    return bytes(data)
