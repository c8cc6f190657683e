"""The processes that a fork of the zygote becomes: the first process of a run, and below it that of the program.

    zygote -> first process (process 1 of a pid namespace) -> program -> whatever it starts

The first process waits, already isolated, until a request comes; it makes the scratch folder, forks the program, reaps
orphans, and reports how the program ended. When it ends, the kernel ends everything in its namespace. A program can't
signal it (the kernel ignores signals to process 1 from inside), trace it, or send messages in its name. It leads a
session of its own, and so does the program: a process group may span several pid namespaces, and a signal to the group
reaches them all.

The program's process sets its limits, gives up capabilities, installs the system call filter, closes every descriptor
but its three streams, and only then executes the first line of the program. If one of these steps fails, nothing is
run. From that line on the process belongs to the program: tricks with Python objects that the zygote left in memory
are of no use in a process that has no rights.

Standard library only.
"""

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import marshal
import os
import resource
import signal
import socket
import sys
import threading
import traceback
import types
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from flowgrpo.sandbox import channel, isolation, seccomp, syscalls

OUT_OF_MEMORY = signal.SIGUSR2  # by which a program's process reports that MemoryError ended it
OPEN_FILES = 256
MAX_DESCRIPTORS = 4096  # far above any descriptor of the zygote
_MAX_ERROR = 2000  # characters
_hidden: list[types.ModuleType] = []  # freeing them would cost time: their memory is shared with the zygote


def first_process(zygote: socket.socket, proc: int | None, program_filter: seccomp.Filter | None) -> NoReturn:
    """Wait for one request and carry it out. Without isolation (`proc` is None), become the program's process."""
    try:
        os.setsid()  # first of all: kill(0) in a process of the zygote's group would end the zygote
        if proc is not None:
            syscalls.unshare(syscalls.CLONE_NEWNS)
            syscalls.request_short_slices()
            _prefer_for_oom_kill(proc)
            os.close(proc)
        request, files = channel.receive(zygote)
        with open(files.pop(0), "rb") as stored:
            request |= marshal.loads(stored.read())
        if proc is None:
            os.chdir(request["scratch"])
            _write_files(request)
            _program(request, files, None, lambda text: channel.send(zygote, {"how": "failed", "text": text}))
        _make_scratch(request)
        channel.send(zygote, _run_isolated(request, files, program_filter))
    except channel.Closed:
        pass  # the zygote is gone, or does not need this process any more
    except Exception as error:
        with contextlib.suppress(channel.Closed):  # nobody is left to receive it
            channel.send(zygote, {"how": "failed", "text": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(0)


def _run_isolated(request: Mapping[str, Any], files: list[int], program_filter) -> dict[str, Any]:
    """Fork the program and reap every child -> how the program ended."""
    ready, report = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(ready)
            os.setsid()
            _program(request, files, program_filter, lambda text: os.write(report, text.encode()))
        finally:
            os._exit(1)
    for file in [*files, report]:
        os.close(file)
    with open(ready, "rb") as errors:
        text = errors.read().decode(errors="replace")
    if text:
        return {"how": "failed", "text": text}
    while True:
        pid, status = os.wait()
        if pid == child:
            return {"how": "ended", "status": status}


def _program(request, files: list[int], program_filter, report: Callable[[str], Any]) -> NoReturn:
    """Become the process of the program: give up every right, then run it."""
    try:
        num_streams = _take_streams(request, files)
        _reset_signals()
        os.umask(0o022)
        _limit(request)
        os.environ["HOME"] = os.environ["TMPDIR"] = os.getcwd()
        if program_filter is not None:
            syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
            syscalls.drop_capabilities()
            seccomp.install(program_filter)
    except BaseException as error:
        report(f"{type(error).__name__}: {error}"[:_MAX_ERROR])
        os._exit(1)
    os.closerange(num_streams, MAX_DESCRIPTORS)
    gc.enable()
    if "function" in request:
        _call(request["function"], request["arguments"], 3)
    _run(request["program"], os.path.join(os.getcwd(), "__main__.py"))


def _take_streams(request, files: list[int]) -> int:
    """Move (stdin, stdout, stderr) to 0, 1, 2, and for a call the result to 3 -> number of streams."""
    null = os.open(os.devnull, os.O_RDWR)
    streams = [null, null, null, files[1]] if "function" in request else files
    # First away from 0 to 3, so that none is overwritten before it is moved.
    parked = [fcntl.fcntl(file, fcntl.F_DUPFD, 10) for file in streams]
    for number, file in enumerate(parked):
        os.dup2(file, number)
    return len(parked)


def _reset_signals() -> None:
    """Reset signal handlers to those of a fresh interpreter."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _limit(request: Mapping[str, Any]) -> None:
    """Set resource limits, soft and hard, for this process and every descendant."""
    limits = {
        "AS": request["address_space"],
        "CPU": request["cpu_seconds"],
        "FSIZE": request["file_bytes"],
        "NPROC": request["processes"],
        "NOFILE": OPEN_FILES,
        "CORE": 0,
        "MEMLOCK": 0,
        "MSGQUEUE": 0,
        "SIGPENDING": 128,
        "RTPRIO": 0,
    }
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}", None)
        if kind is not None and value is not None:
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))


# The first process ------------------------------------------------------------------------------------


def _prefer_for_oom_kill(proc: int) -> None:
    """Have the kernel kill this run rather than the zygote if memory runs out."""
    score = os.open("self/oom_score_adj", os.O_WRONLY, dir_fd=proc)
    os.write(score, b"1000")
    os.close(score)


def _make_scratch(request: Mapping[str, Any]) -> None:
    """Mount a folder in memory, of the size of the request's files plus the limit on files, and write the files."""
    file_bytes = sum(-len(content) // 4096 * -4096 for content in request["files"].values())
    options = f"size={request['file_bytes'] + file_bytes},nr_inodes=4096,mode=700"
    flags = syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC
    syscalls.mount("tmpfs", isolation.SCRATCH, "tmpfs", flags, options)
    os.chdir(isolation.SCRATCH)
    _write_files(request)


def _write_files(request: Mapping[str, Any]) -> None:
    for name, content in request["files"].items():
        if os.path.dirname(name):
            os.makedirs(os.path.dirname(name), exist_ok=True)
        with open(name, "wb") as file:
            file.write(content)


# The program ------------------------------------------------------------------------------------------


def _run(source: bytes, path: str, exit_process: Callable[[int], NoReturn] = os._exit) -> NoReturn:
    """Run the source as `python __main__.py` would, and exit with its code."""
    code = 1
    try:
        _fresh_main(path)
        try:
            exec(compile(source, path, "exec", dont_inherit=True), sys.modules["__main__"].__dict__)
            code = 0
        except SystemExit as error:
            code = _exit_code(error)
        except BaseException as error:
            _show(error)
            code = -OUT_OF_MEMORY if isinstance(error, MemoryError) else 1
        _finish()
    finally:
        if code == -OUT_OF_MEMORY:
            signal.signal(OUT_OF_MEMORY, signal.SIG_DFL)
            os.kill(os.getpid(), OUT_OF_MEMORY)
        exit_process(code & 0xFF)


def _fresh_main(path: str) -> None:
    """Make an empty `__main__` and new streams, and hide the modules of the zygote."""
    for name in [name for name in sys.modules if name.split(".")[0] == "flowgrpo"]:
        _hidden.append(sys.modules.pop(name))
    module = types.ModuleType("__main__")
    module.__file__ = path
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    sys.argv = [path]
    sys.orig_argv = [sys.executable, path]
    sys.path.insert(0, os.getcwd())
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115


def _exit_code(error: SystemExit) -> int:
    """Exit code as in the interpreter: None is 0, a number is itself, anything else is printed and is 1."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    with contextlib.suppress(Exception):  # its text may be anything, and so may stderr
        print(error.code, file=sys.stderr)
    return 1


def _show(error: BaseException) -> None:
    """Print the traceback, from the first line of the program on."""
    with contextlib.suppress(BaseException):  # the program may have broken what is needed to show it
        trace = error.__traceback__.tb_next if error.__traceback__ else None
        traceback.print_exception(type(error), error, trace)


def _finish() -> None:
    """Wait for threads, call the functions registered with atexit, and flush, as the interpreter does at exit."""
    join_threads = getattr(threading, "_shutdown")  # noqa: B009 - no public name
    for step in (join_threads, atexit._run_exitfuncs, sys.stdout.flush, sys.stderr.flush):
        with contextlib.suppress(Exception):  # a closed stream, or a failing handler: the exit code stays
            step()


def _call(function: str, arguments: str, result: int) -> NoReturn:
    """Call the trusted function, and write its value or exception as JSON."""
    try:
        try:
            module, name = function.split(":")
            value = getattr(importlib.import_module(module), name)(*json.loads(arguments))
            answer = json.dumps({"value": value})
        except BaseException as error:
            answer = json.dumps({"error": [type(error).__name__, _message(error)]})
        with open(result, "w", encoding="utf-8") as file:
            file.write(answer)
    finally:
        os._exit(0)


def _message(error: BaseException) -> str:
    try:
        return str(error)[:_MAX_ERROR] or "no message"
    except Exception:  # an exception of foreign code may fail even here
        return "its message can't be shown"
