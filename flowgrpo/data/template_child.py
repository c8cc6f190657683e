"""The process in which chat templates are rendered: `flowgrpo.data.templates` starts it.

It reads requests from standard input and writes replies, each a length and as much JSON. A request renders some
prefixes of some chats. If one exceeds its processor time, the kernel kills the process in the middle of whatever it
does: a multiplication in C code can't be interrupted otherwise. Memory is limited by the kernel too, as an error inside
the template.
"""

import json
import resource
import signal
import struct
import sys
from typing import Any, BinaryIO

LENGTH = struct.Struct("=Q")
TOO_LARGE = "it needs more memory than a template may have"
TOO_MANY = "it writes more characters than a template may"


def main() -> None:
    """Answer requests until there are no more."""
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    seconds, (memory, characters) = float(sys.argv[1]), map(int, sys.argv[2:])
    sys.stdout = sys.stderr  # whatever is printed must not get into the replies
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent process
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which kills the process, whatever it inherited
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    from transformers.utils.chat_template_utils import render_jinja_template

    _limit_memory(memory)
    _write(replies, {"ready": True})
    while (request := _read(requests)) is not None:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        reply = [_render(render_jinja_template, request, chat, end, characters) for chat, end in request["wanted"]]
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(replies, reply)


def _limit_memory(more: int) -> None:
    """Limit this process to `more` bytes above its present use, on Linux."""
    if sys.platform != "linux":
        return
    with open("/proc/self/status") as status:
        used = next(int(line.split()[1]) for line in status if line.startswith("VmData")) * 1024
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used + more, hard))


def _render(render: Any, request: dict[str, Any], chat: int, end: int | None, characters: int) -> list[str]:
    """[rendered text, ""], or ["", reason of the failure]."""
    try:
        ((text,), _) = render([request["chats"][chat][:end]], **request["options"])
        if len(text) > characters:
            return ["", TOO_MANY]
        return [text, ""]
    except MemoryError:
        return ["", TOO_LARGE]
    except Exception as error:  # a template is foreign code that can raise anything
        return ["", str(error).strip()[:2000] or type(error).__name__]


def _read(stream: BinaryIO) -> Any:
    head = stream.read(LENGTH.size)
    return json.loads(stream.read(LENGTH.unpack(head)[0])) if head else None


def _write(stream: BinaryIO, value: Any) -> None:
    data = json.dumps(value).encode()
    stream.write(LENGTH.pack(len(data)) + data)
    stream.flush()


if __name__ == "__main__":
    main()
