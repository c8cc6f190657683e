"""Chat templates, rendered by a process of their own: they are foreign code, which may loop or grow for ever.

    render(template, [messages], [(0, None)], options) -> [("<|im_start|>user...", "")]

Jinja's sandbox isolates a template from the world, but does not bound time and memory: `{% for %}` in `{% for %}`, or
`'x' * 10**10` in one operation, which nothing within a process can interrupt. So one process renders all templates; it
may take `SECONDS` of processor time and `MEMORY` bytes, and if it doesn't reply it is killed and another one started.
A request costs some 0.05 ms more than in this process, and 1 ms with 40 kB of messages.
"""

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from flowgrpo.data.template_child import LENGTH, TOO_LARGE, TOO_MANY

SECONDS = 5  # of processor time, for all that one request renders
WALL_SECONDS = 120.0  # until a process that gets no processor time is given up
MEMORY = 1 << 30  # bytes above what the process uses at its start
CHARACTERS = 1 << 26  # of a rendered text
CHILD = Path(__file__).with_name("template_child.py")
TOO_LONG = f"it takes more than {SECONDS} s of processor time"
ENDLESS = frozenset((TOO_LONG, TOO_LARGE, TOO_MANY))  # failures that don't depend on the messages

Rendered = tuple[str, str]  # (text, ""), or ("", reason of the failure)


def render(
    template: str,
    chats: Sequence[Sequence[Mapping[str, Any]]],
    wanted: Sequence[tuple[int, int | None]],
    options: Mapping[str, Any],
) -> list[Rendered]:
    """Render prefixes of chats as transformers does; `wanted` are (chat, number of its messages; None: all)."""
    options = {**options, "chat_template": template}
    request = {"chats": chats, "wanted": wanted, "options": options}
    return _PROCESS.ask(json.dumps(request, default=_plain).encode(), len(wanted))


def start() -> None:
    """Start the process, unless it runs; `render` waits until it is ready."""
    _PROCESS.start()


def _plain(value: Any) -> Any:
    """A value that JSON has no form for, as templates get it: of media, only a mark."""
    if isinstance(value, Mapping):
        return dict(value)
    return value.item() if hasattr(value, "item") and not getattr(value, "ndim", 0) else f"<{type(value).__name__}>"


class _Process:
    """The process, which is started when it is needed, and again after it was killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False

    def start(self) -> None:
        with self._lock:
            self._start()

    def ask(self, request: bytes, count: int) -> list[Rendered]:
        """The replies to a request, one request at a time; a process that dies is a failure of all of them."""
        with self._lock:
            process = self._start()
            try:
                if not self._ready:
                    self._receive(process)
                    self._ready = True
                assert process.stdin is not None
                process.stdin.write(LENGTH.pack(len(request)) + request)
                process.stdin.flush()
                return [(text, why) for text, why in self._receive(process)]
            except EOFError as end:
                self._end()
                return [("", str(end))] * count
            except BrokenPipeError:
                self._end()
                return [("", "the process that renders templates ended")] * count
            except BaseException:  # an interrupt: a later reply would be taken for that of another request
                self._end()
                raise

    def close(self) -> None:
        """Kill the process; another one starts when it is needed again."""
        with self._lock:
            self._end()

    def _start(self) -> "subprocess.Popen[bytes]":
        if self._process is not None and self._process.poll() is not None:  # it was killed meanwhile
            self._end()
        if self._process is None:
            limits = (SECONDS, MEMORY, CHARACTERS)
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(CHILD), *map(str, limits)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), **_FEW_THREADS},
            )
            self._ready = False
        return self._process

    def _receive(self, process: "subprocess.Popen[bytes]") -> Any:
        """The next reply; `EOFError` with the reason if there will be none."""
        (length,) = LENGTH.unpack(_read(process, LENGTH.size))
        return json.loads(_read(process, length))

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with suppress(BrokenPipeError), process:  # closes both pipes and waits
                pass


def _read(process: "subprocess.Popen[bytes]", size: int) -> bytes:
    """Exactly `size` bytes of a process's output, past any buffer of Python's."""
    assert process.stdout is not None
    file, data = process.stdout.fileno(), bytearray()
    poll = select.poll()
    poll.register(file, select.POLLIN)
    while len(data) < size:
        if not poll.poll(WALL_SECONDS * 1000):
            raise EOFError(f"it came to no end within {WALL_SECONDS:g} s")
        part = os.read(file, size - len(data))
        if not part:
            code = process.wait(WALL_SECONDS)
            raise EOFError(TOO_LONG if code == -signal.SIGPROF else f"its process ended with code {code}")
        data += part
    return bytes(data)


_FEW_THREADS = {"OPENBLAS_NUM_THREADS": "1", "USE_TORCH": "0", "TRANSFORMERS_VERBOSITY": "error"}
_PROCESS = _Process()
atexit.register(lambda: _PROCESS.close())
os.register_at_fork(after_in_child=lambda: globals().update(_PROCESS=_Process()))
