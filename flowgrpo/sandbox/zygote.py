"""The warm interpreter that runs are forked from: one thread, the standard library, and the modules to preload.

    pool -> starter -> (isolated) zygote -> a waiting child -> {program, limits} + files -> how it ended -> pool

The starter is a fresh interpreter that isolates itself and then executes the zygote inside: another fresh interpreter,
which gets its code and settings through a pipe. So neither its first stack (arguments, environment) nor its memory ever
held a path, a setting or a secret of the host that a program could find there. The zygote is process 1 of a pid
namespace of its own, so that everything below it ends with it; it ends when the pool closes its channel or dies. A
child is always prepared ahead. Deadlines are enforced here, out of reach of any program.

Standard library only.
"""

import contextlib
import functools
import gc
import importlib
import marshal
import os
import select
import selectors
import signal
import socket
import sys
import time
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

from flowgrpo.sandbox import channel, child, isolation, seccomp, syscalls

# Imported once here rather than in every program: modules that programs often use, and that make forks hardly slower.
COMMON = "bisect collections copy functools heapq itertools json math random re string typing"

_CODE = ("channel", "syscalls", "seccomp", "isolation", "child", "zygote")  # each after what it imports
_INSIDE = """
import marshal, sys, types
with open(int(sys.argv[1]), "rb") as pipe:
    code, settings = marshal.load(pipe)
for name in ("flowgrpo", "flowgrpo.sandbox"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = settings["packages"].get(name, [])
for name in code:
    module = sys.modules["flowgrpo.sandbox." + name] = types.ModuleType("flowgrpo.sandbox." + name)
    setattr(sys.modules["flowgrpo.sandbox"], name, module)
    exec(code[name], module.__dict__)
module.start(module.socket.socket(fileno=settings["control"]), settings["proc"], settings)
"""


class Child(NamedTuple):
    """A forked process that waits for its request."""

    pid: int
    channel: socket.socket


def main(control_number: int) -> NoReturn:
    """Receive the settings; with isolation start a zygote inside, else become the zygote."""
    control = socket.socket(fileno=os.dup(control_number))  # dup: the lowest number that is free
    os.close(control_number)
    settings, _ = channel.receive(control)
    try:
        if settings["cgroup"]:
            with open(os.path.join(settings["cgroup"], "cgroup.procs"), "w") as members:
                members.write(str(os.getpid()))
        if settings["isolate"]:
            if sys.platform != "linux":
                raise OSError(f"namespaces are a feature of Linux, and this is {sys.platform}")
            proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
            code = _own_code()
            _isolate(settings, proc)
            _execute_inside(control, proc, code, settings)
    except Exception as error:
        _report_and_exit(control, error)
    start(control, None, settings)


def start(control: socket.socket, proc: int | None, settings: Mapping[str, Any]) -> NoReturn:
    """Import what runs share, and serve until the channel closes."""
    # Process 1 of a namespace gets only signals that it handles; and signals that the host ignores (nohup) would be
    # ignored by programs, too.
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ}:
        signal.signal(number, signal.SIG_DFL)
    program_filter = None
    try:
        if proc is not None:
            syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
            program_filter = seccomp.make_filter()
            selectors.DefaultSelector = selectors.PollSelector  # the filter refuses epoll
            syscalls.request_short_slices()
        _preload(settings)
    except Exception as error:
        _report_and_exit(control, error)
    channel.send(control, {"address_space": _address_space(proc)})
    prepare = functools.partial(_prepare, proc, program_filter, control)
    _serve(control, prepare, _kill_group if proc is None else _kill)


def _isolate(settings: Mapping[str, Any], proc: int) -> None:
    """Isolate this process. Only workers with preloaded modules see installed packages: calls may import more."""
    paths = isolation.interpreter_paths()
    if settings["preload"]:
        isolation.isolate([*paths, *settings["path"]], [], proc)
    else:
        isolation.isolate(paths, isolation.package_folders(paths), proc)


def _report_and_exit(control: socket.socket, error: Exception) -> NoReturn:
    channel.send(control, {"error": f"{type(error).__name__}: {error}", "module": getattr(error, "module", "")})
    os._exit(1)


def _own_code() -> dict[str, types.CodeType]:
    """Compile the modules of the zygote, under file names that do not reveal where they are installed."""
    code = {}
    for name in _CODE:
        with open(os.path.join(os.path.dirname(__file__), f"{name}.py"), "rb") as source:
            code[name] = compile(source.read(), f"{name}.py", "exec")
    return code


def _execute_inside(control: socket.socket, proc: int, code: dict[str, types.CodeType], settings) -> NoReturn:
    """Execute the zygote as process 1 of the new pid namespace. This process only waits, and passes SIGTERM on."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        syscalls.keep_sys_admin()
        for number in (reader, proc, control.fileno()):
            os.set_inheritable(number, True)
        os.execve(sys.executable, [sys.executable, *isolation.FLAGS, "-c", _INSIDE, str(reader)], _environment())
    os.close(reader)
    inside: dict[str, Any] = {name: settings[name] for name in ("isolate", "preload", "path", "environment")}
    packages = {name: list(sys.modules[name].__path__) for name in ("flowgrpo", "flowgrpo.sandbox")}
    inside |= {"packages": packages if settings["preload"] else {}, "control": control.fileno(), "proc": proc}
    message: Any = (code, inside)
    with contextlib.suppress(BrokenPipeError), open(writer, "wb") as pipe:  # it failed to start, and has reported why
        pipe.write(marshal.dumps(message))
    control.close()
    signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGKILL))
    os.waitpid(pid, 0)
    os._exit(0)


def _environment() -> dict[str, str]:
    """Environment variables of the zygote, with library paths that are visible inside."""
    libraries = [path for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if path and os.path.isdir(path)]
    visible = {"LD_LIBRARY_PATH": ":".join(libraries)} if libraries else {}
    return {name: text for name, text in os.environ.items() if name != "LD_LIBRARY_PATH"} | visible


class _NotImported(Exception):
    def __init__(self, module: str, error: BaseException):
        super().__init__(f"{type(error).__name__}: {error}")
        self.module = module


def _preload(settings: Mapping[str, Any]) -> None:
    """Import what runs share."""
    sys.path.extend(path for path in settings["path"] if path not in sys.path)
    for module in settings["preload"]:
        _stub_packages(module)
        try:
            importlib.import_module(module)
        except BaseException as error:
            raise _NotImported(module, error) from error
    for module in COMMON.split():
        importlib.import_module(module)
    if settings["isolate"]:
        syscalls.preload_symbols()
    os.environ.clear()
    os.environ.update(settings["environment"])
    gc.collect()
    gc.freeze()  # memory stays shared with the children
    gc.disable()  # until a program starts


def _stub_packages(module: str) -> None:
    """Replace the packages of flowgrpo above a module by empty modules, since their `__init__.py` imports JAX."""
    package, *folders = module.split(".")[:-1] or [module]
    for folder in folders if package == "flowgrpo" else ():
        path = [f"{parent}/{folder}" for parent in sys.modules[package].__path__]
        package = f"{package}.{folder}"
        if package not in sys.modules:
            sys.modules[package] = types.ModuleType(package)
            sys.modules[package].__path__ = path


def _address_space(proc: int | None) -> int:
    """Bytes of address space in use before any program runs; 0 if this system does not say."""
    with (
        contextlib.suppress(OSError),
        open(os.open("self/statm" if proc else "/proc/self/statm", 0, dir_fd=proc)) as file,
    ):
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    return 0


# Serving ----------------------------------------------------------------------------------------------


def _serve(control: socket.socket, prepare: Callable[[], Child], kill: Callable[[int], None]) -> NoReturn:
    """Serve one request at a time until the pool is gone; then end this process and everything that it started."""
    ended, wake = socket.socketpair()
    ended.setblocking(False)
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    with contextlib.suppress(channel.Closed):
        while True:
            waiting = None
            with contextlib.suppress(OSError):  # out of some resource: tried again when a request comes
                waiting = prepare()
            request, files = channel.receive(control)
            while request["do"] != "run":  # a kill whose run had ended already
                request, files = channel.receive(control)
            start_time = time.monotonic()
            try:
                running = _hand_over(waiting, prepare, request, files)
            except OSError as error:
                channel.send(control, {"how": "failed", "text": f"{type(error).__name__}: {error}"})
                continue
            finally:
                for file in files:
                    os.close(file)
            reason, status = _watch(running.pid, start_time + request["seconds"], ended, control, kill)
            seconds = time.monotonic() - start_time
            channel.send(control, _report(running.channel, reason, status) | {"seconds": seconds})
    os.kill(0, signal.SIGCONT)  # the starter reaps this process and exits, unless it is stopped
    os._exit(0)


def _hand_over(
    waiting: Child | None, prepare: Callable[[], Child], request: Mapping[str, Any], files: list[int]
) -> Child:
    """Send the request to the waiting child, or to another one if it is gone; then no program has started yet."""
    if waiting is not None:
        try:
            channel.send(waiting.channel, request, files)
        except channel.Closed:  # the kernel kills it first if the machine runs out of memory
            waiting.channel.close()
            os.waitpid(waiting.pid, 0)
        else:
            return waiting
    other = prepare()
    with contextlib.suppress(channel.Closed):  # it has reported why it can't
        channel.send(other.channel, request, files)
    return other


def _watch(pid: int, deadline: float, ended: socket.socket, control: socket.socket, kill) -> tuple[str, int]:
    """Wait until the child and all below it are gone -> (why it was killed, "" if it was not; its wait status)."""
    reason = ""
    while True:
        done, status = os.waitpid(pid, 0 if reason else os.WNOHANG)
        if done:
            kill(pid)  # without namespaces, something of its process group may be left
            return reason, status
        left = deadline - time.monotonic()
        ready = select.select([ended, control], [], [], max(0.0, left))[0]
        if ended in ready:
            ended.recv(4096)
        if control in ready:
            try:
                channel.receive(control)  # the only message of a pool during a run is: kill
            except channel.Closed:
                kill(pid)  # without namespaces, it would outlive this process
                raise
            reason = "killed"
        elif left <= 0:
            reason = "timeout"
        if reason:
            kill(pid)


def _report(child_channel: socket.socket, reason: str, status: int) -> dict[str, Any]:
    """The report to the pool: why the child was killed, or its last message, or else its wait status."""
    with child_channel:
        if reason:
            return {"how": reason}
        with contextlib.suppress(channel.Closed):
            return channel.receive(child_channel)[0]
        return {"how": "ended", "status": status}


def _prepare(proc: int | None, program_filter: seccomp.Filter | None, control: socket.socket) -> Child:
    """Fork a child that isolates itself and waits; with namespaces it is process 1 of a new pid namespace."""
    zygote_end, child_end = socket.socketpair()
    if proc is not None:
        syscalls.unshare(syscalls.CLONE_NEWPID)
    try:
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            zygote_end.close()
            control.close()
            child.first_process(child_end, proc, program_filter)
    finally:
        child_end.close()
        if proc is not None:
            namespace = os.open("self/ns/pid", os.O_RDONLY, dir_fd=proc)
            syscalls.enter(namespace)  # so that a new one can be made for the next child
            os.close(namespace)
    return Child(pid, zygote_end)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS raises the latter for an empty group
        os.killpg(pid, signal.SIGKILL)
