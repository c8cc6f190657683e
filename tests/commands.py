"""Run modules as commands, each in a process that is forked from one with the libraries imported.

A command that starts with `python -m` spends several seconds of a core on imports; a fork of `serve`, which has
imported them but started no backend, spends none. Environment, folder, output and status are those of a new process.
"""

import ast
import atexit
import gc
import json
import os
import resource
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import resolve_name
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parent.parent
LIBRARIES = ("jax", "optax", "orbax.checkpoint", "transformers", "matplotlib", "absl.app", "flowgrpo")
# Read by XLA's backend and by coverage when they start, so set in the forks only.
FORK_VARIABLES = ("XLA_FLAGS", "COVERAGE_PROCESS_CONFIG")
_LOCK = threading.Lock()
SPENT = [0.0]  # processor seconds of all commands so far
_SERVERS: list[subprocess.Popen] = []


@contextmanager
def file_size_limit(max_bytes: int) -> Iterator[None]:
    """A write beyond `max_bytes` fails in the middle of a file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def run_module(
    module: str, *arguments: str, stdin: str = "", cwd: Path = ROOT, timeout: float = 600
) -> subprocess.CompletedProcess:
    """Run `python -m MODULE ARGUMENTS` with `stdin` as its standard input -> status and output."""
    with TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("stdin", "stdout", "stderr")]
        files[0].write_text(stdin)
        job = {"module": module, "arguments": arguments, "cwd": str(cwd), "env": dict(os.environ)}
        with _LOCK:
            server = _server()
            server.stdin.write(json.dumps(job | {"files": list(map(str, files))}) + "\n")
            server.stdin.flush()
            timer = threading.Timer(timeout, os.kill, (json.loads(server.stdout.readline())["pid"], signal.SIGKILL))
            timer.start()
            try:
                ended = json.loads(server.stdout.readline())
            finally:
                timer.cancel()
            SPENT[0] += ended["seconds"]
        stdout, stderr = (path.read_text() for path in files[1:])
    return subprocess.CompletedProcess([module, *arguments], ended["status"], stdout, stderr)


def imported_modules(module: str, node: ast.ImportFrom) -> list[str]:
    """The modules that a `from` import may import: its module, and each name as a submodule."""
    source = resolve_name("." * node.level + (node.module or ""), module.rpartition(".")[0])
    return [source, *(f"{source}.{alias.name}" for alias in node.names)]


def xla_flags(level: int = 0) -> str:
    """XLA flags for a command, without the tests' device count; `level` 1 is for commands that compute much."""
    flags = " ".join(flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag)
    return flags.replace("optimization_level=0", f"optimization_level={level}")


def _server() -> subprocess.Popen:
    """The process that forks, started once for each process of the tests."""
    if not _SERVERS:
        command, pipe = [sys.executable, __file__], subprocess.PIPE
        env = {name: value for name, value in os.environ.items() if name not in FORK_VARIABLES}
        _SERVERS.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, env=env))
        atexit.register(_end)
    return _SERVERS[0]


def _end() -> None:
    with _SERVERS.pop() as server:
        server.kill()


def serve() -> dict:
    """Fork for each job, a line of standard input; returns the job in the fork."""
    answers = os.fdopen(os.dup(1), "w")
    gc.collect()
    gc.freeze()  # imported objects are shared with the forks, whose collector then neither walks nor copies them
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            answers.close()
            return job
        print(json.dumps({"pid": pid}), file=answers, flush=True)
        _, status, used = os.wait4(pid, 0)
        ended = {"status": os.waitstatus_to_exitcode(status), "seconds": used.ru_utime + used.ru_stime}
        print(json.dumps(ended), file=answers, flush=True)
    os._exit(0)


def become(job: dict) -> None:
    """Run a job as a new interpreter would."""
    os.environ.clear()
    os.environ.update(job["env"])
    os.chdir(job["cwd"])
    if "COVERAGE_PROCESS_CONFIG" in os.environ:
        __import__("coverage").process_startup(force=True)
    for number, name in enumerate(job["files"]):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), number)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.path[0] = job["cwd"]
    sys.path[1:1] = job["env"].get("PYTHONPATH", "").split(os.pathsep)
    sys.argv = [job["module"], *job["arguments"]]
    runpy.run_module(job["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    for library in LIBRARIES:
        __import__(library)
    become(serve())
