"""The sandbox as its users see it: what programs and calls give back, and what happens when things go wrong."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from flowgrpo.sandbox import CallFailed, Isolation, Limits, Sandbox, SandboxFailure, pool, worker
from flowgrpo.types import BadInput


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(limits=Limits(seconds=10.0), preload=["called"]) as made:
        yield made


@pytest.fixture
def open_sandbox(monkeypatch):
    """One on a host without namespaces, where the user insists."""

    def refuse(*, isolate, preload):
        if isolate:
            raise SandboxFailure("unshare: Operation not permitted")
        return worker.Worker(isolate=False, preload=preload)

    monkeypatch.setattr(pool, "Worker", refuse)
    with Sandbox(unsafe=True, limits=Limits(seconds=10.0), preload=["called"]) as made:
        yield made


def idle(sandbox, kind=()):
    (only,) = sandbox._idle[kind]
    return only


def end_zygote(sandbox, kind=()):
    """Kill the process that serves: the child of the one that was started."""
    pid = idle(sandbox, kind).pid
    (serving,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    os.kill(int(serving), signal.SIGKILL)


def ended(pid):
    """Whether a process is gone, or has nobody yet who buries it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


# Programs ---------------------------------------------------------------------------------------------


def test_a_program_reads_its_input_and_writes_its_output(sandbox):
    ran = sandbox.run("import sys\nprint(input() * 2)\nprint('é', file=sys.stderr)", stdin="hé\n")
    assert ran[:4] == ("exited", 0, "héhé\n", "é\n")
    assert 0 < ran.seconds < 10


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("", 0),
        ("raise SystemExit", 0),
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit(-1)", 255),
        ("import sys; sys.exit('no')", 1),
        ("1 / 0", 1),
        ("def", 1),
        ("\0", 1),
        ("\udc80", 1),
        ("import os; os._exit(7)", 7),
        ("import atexit, os; atexit.register(os._exit, 5)", 5),
    ],
)
def test_exit_codes_are_those_of_the_interpreter(sandbox, program, code):
    ran = sandbox.run(program)
    assert (ran.ended, ran.code) == ("exited", code), ran


def test_a_traceback_shows_the_program_and_nothing_of_the_sandbox(sandbox):
    ran = sandbox.run("def f():\n    return 1 / 0\nf()")
    assert "in f\n    return 1 / 0" in ran.stderr
    assert "ZeroDivisionError" in ran.stderr
    assert "sandbox" not in ran.stderr


def test_it_runs_as_main_with_files_beside_it(sandbox):
    program = """
if __name__ == "__main__":
    import helper, sys
    print(helper.value, open("data/numbers.bin", "rb").read(), sys.argv, __file__)
"""
    ran = sandbox.run(program, files={"helper.py": "value = 4", "data/numbers.bin": b"\0\1"})
    assert ran.stdout == "4 b'\\x00\\x01' ['/scratch/__main__.py'] /scratch/__main__.py\n", ran


def test_threads_and_exit_handlers_end_as_in_an_interpreter(sandbox):
    program = """
import atexit, threading, time
atexit.register(print, "last")
threading.Thread(target=lambda: (time.sleep(0.05), print("thread"))).start()
print("main")
"""
    assert sandbox.run(program).stdout == "main\nthread\nlast\n"


def test_the_standard_library_works_inside(sandbox):
    program = """
import asyncio, multiprocessing, subprocess, sys, tempfile, sqlite3, hashlib
def double(x): return 2 * x
async def wait(): await asyncio.sleep(0); return "waited"
print(asyncio.run(wait()))
with multiprocessing.Pool(2) as pool: print(pool.map(double, [1, 2]))
print(subprocess.run([sys.executable, "-c", "print('child')"], capture_output=True, text=True).stdout)
with tempfile.NamedTemporaryFile() as file: print(file.name[:9])
print(sqlite3.connect(":memory:").execute("select 1").fetchone(), hashlib.sha256(b"").hexdigest()[:4])
"""
    ran = sandbox.run(program)
    assert ran.stdout.split() == ["waited", "[2,", "4]", "child", "/scratch/", "(1,)", "e3b0"], ran


def test_random_numbers_differ_between_runs(sandbox):
    program = "import random, os, uuid, tempfile\nprint(random.random(), os.urandom(4), tempfile.mktemp())"
    assert sandbox.run(program).stdout != sandbox.run(program).stdout


def test_large_input_and_output_pass_without_standing_still(sandbox):
    ran = sandbox.run(
        "import sys\nsys.stdout.write(sys.stdin.read())", stdin="x" * 5_000_000, limits=Limits(output_bytes=6_000_000)
    )
    assert (ran.ended, len(ran.stdout)) == ("exited", 5_000_000)


def test_the_bound_on_output_counts_both_streams_and_keeps_what_came_before(sandbox):
    program = "import sys, time\nprint('a' * 600, flush=True)\n"
    program += "time.sleep(0.1)\nprint('b' * 600, file=sys.stderr)\ntime.sleep(60)"
    ran = sandbox.run(program, limits=Limits(output_bytes=1000))
    assert (ran.ended, ran.code, len(ran.stdout), len(ran.stderr)) == ("output", None, 601, 399)


@pytest.mark.parametrize("settings", [{"seconds": 0}, {"memory": -1}, {"seconds": float("nan")}, {"output_bytes": 0}])
def test_limits_that_are_no_limits_are_refused(settings):
    with pytest.raises(BadInput, match=next(iter(settings))):
        Limits(**settings)


@pytest.mark.parametrize("name", ["/etc/passwd", "../out", "a/../../b", "", ".", "a/", "__main__.py", "a\0b"])
def test_files_can_only_be_named_inside_the_folder(sandbox, name):
    with pytest.raises(BadInput, match="relative paths"):
        sandbox.run("", files={name: "x"})


def test_files_that_contradict_each_other_are_refused(sandbox):
    with pytest.raises(BadInput, match="as a folder"):
        sandbox.run("", files={"a": "x", "a/b": "x"})


# Calls ------------------------------------------------------------------------------------------------


def test_a_call_returns_what_the_function_returns(sandbox):
    assert sandbox.call("called:add", 2, 3) == 5
    assert sandbox.call("called:add", ["é", None], [{"a": 1.5}]) == ["é", None, {"a": 1.5}]
    assert sandbox.call("called:add", "\ud800", "") == "\ud800"


@pytest.mark.parametrize("function", ["called:hang", "called:spin"])
def test_a_call_ends_at_its_deadline(sandbox, function):
    sandbox.call("called:add", 0, 0)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"0\.2 s"):
        sandbox.call(function, *([60] if function.endswith("hang") else []), seconds=0.2)
    assert time.monotonic() - began < 3.0
    assert sandbox.call("called:add", 1, 1) == 2


@pytest.mark.parametrize(
    ("function", "arguments", "kind"),
    [
        ("fail", ["broken"], "ValueError"),
        ("leave", [], "SystemExit"),
        ("die", [], "ProcessDied"),
        ("fill", [4 << 30], "MemoryError"),
        ("unwritable", [], "TypeError"),
        ("long", [20 << 20], "OverflowError"),
        ("missing", [], "AttributeError"),
        ("connect", [80], "PermissionError"),
        ("read", ["/etc/passwd"], "FileNotFoundError"),
    ],
)
def test_a_call_that_fails_says_what_happened(sandbox, function, arguments, kind):
    with pytest.raises(CallFailed) as failure:
        sandbox.call(f"called:{function}", *arguments)
    assert failure.value.kind == kind, failure.value
    assert failure.value.message


def test_what_a_called_function_prints_is_not_its_result(sandbox):
    assert sandbox.call("called:talk") == "said"


def test_a_called_function_sees_neither_the_environment_nor_jax(sandbox):
    environment, jax = sandbox.call("called:environment")
    assert set(environment) == {"PATH", "LANG", "HOME", "TMPDIR"}
    assert not jax


def test_only_preloaded_functions_can_be_called(sandbox):
    for function in ("os:system", "called", ":add", "called:"):
        with pytest.raises(BadInput, match="preload: called"):
            sandbox.call(function)
    with pytest.raises(BadInput, match="JSON"):
        sandbox.call("called:add", object(), 1)
    with Sandbox(preload=["no_such_module"]) as other, pytest.raises(BadInput, match="no_such_module"):
        other.call("no_such_module:f")
    with pytest.raises(BadInput, match="sequence"):
        Sandbox(preload="called")


# When things go wrong -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["run", "call"])
def test_a_worker_that_dies_fails_only_the_request_that_it_had(kind):
    with Sandbox(preload=["called"]) as sandbox:
        key = ("called",) if kind == "call" else ()
        short = (lambda: sandbox.call("called:add", 1, 1)) if kind == "call" else (lambda: sandbox.run("print(2)"))
        long = (
            (lambda: sandbox.call("called:hang", 30)) if kind == "call" else (lambda: sandbox.run("while True: pass"))
        )
        first = short()
        pid = idle(sandbox, key).pid
        (serving,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        threading.Timer(0.2, os.kill, (int(serving), signal.SIGKILL)).start()
        with pytest.raises(SandboxFailure, match="ended while"):
            long()
        assert short()[:4] == first[:4] if kind == "run" else short() == first
        end_zygote(sandbox, key)
        time.sleep(0.1)
        assert short()[:4] == first[:4] if kind == "run" else short() == first


def test_as_many_run_at_once_as_there_are_workers_and_the_others_wait():
    with Sandbox(workers=3) as sandbox:
        ran = []

        def sleep():
            ran.append(sandbox.run("import time; time.sleep(1)").code)

        for _ in range(2):  # the second time, all workers have started
            threads, began = [threading.Thread(target=sleep) for _ in range(6)], time.monotonic()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            took = time.monotonic() - began
            assert took > 1.9
        assert ran == [0] * 12
        assert took < 5.5, "six programs of a second ran one after the other, with three workers"
        assert len(sandbox._idle[()]) == 3


def test_closing_ends_every_process_and_a_closed_sandbox_says_so():
    descriptors = len(os.listdir("/proc/self/fd"))
    with Sandbox(workers=2, preload=["called"]) as sandbox:
        sandbox.run("")
        sandbox.call("called:add", 1, 1)
        pids = [idle(sandbox).pid, idle(sandbox, ("called",)).pid]
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    assert len(os.listdir("/proc/self/fd")) == descriptors
    with pytest.raises(BadInput, match="closed"):
        sandbox.run("")
    with pytest.raises(BadInput, match="workers"):
        Sandbox(workers=0)


def test_a_sandbox_that_is_forgotten_leaves_no_process():
    sandbox = Sandbox()
    sandbox.run("")
    pid = idle(sandbox).pid
    del sandbox
    gc.collect()
    assert not os.path.exists(f"/proc/{pid}")


@pytest.mark.slow
def test_when_the_host_process_is_killed_nothing_goes_on():
    program = """
import threading
from flowgrpo.sandbox import Limits, Sandbox
sandbox = Sandbox(limits=Limits(seconds=60))
sandbox.run("")
print(sandbox._idle[()][0].pid, flush=True)
sandbox.run("import os; os.fork(); [os.setsid() for _ in range(1) if os.getpid() > 2]; [None for _ in iter(int, 1)]")
"""
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=root) as process:
        pid = int(process.stdout.readline())
        time.sleep(0.2)
        process.kill()
    for _ in range(100):
        if ended(pid):
            break
        time.sleep(0.01)
    assert ended(pid), "the worker, which waits for all below it, is still there"


@pytest.mark.slow
def test_a_zygote_that_is_stuck_is_ended_and_the_run_counts_as_late(sandbox):
    sandbox.run("")
    pid = idle(sandbox).pid
    (serving,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    os.kill(int(serving), signal.SIGSTOP)
    ran = sandbox.run("print(1)", limits=Limits(seconds=0.1))
    assert ran.ended == "timeout"
    assert not os.path.exists(f"/proc/{serving}")
    assert sandbox.run("print(1)").stdout == "1\n"


# Without isolation --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("open_sandbox")
def test_without_isolation_programs_are_refused_and_calls_still_work():
    with Sandbox(preload=["called"]) as sandbox:
        with pytest.raises(BadInput, match=r"no isolation: unshare: Operation not permitted.*unsafe=True"):
            sandbox.run("print(1)")
        assert sandbox.call("called:add", 1, 2) == 3
        with pytest.raises(TimeoutError):
            sandbox.call("called:spin", seconds=0.1)
        assert not sandbox.isolation.active


def test_unsafe_programs_still_have_limits_and_a_folder_of_their_own(open_sandbox):
    ran = open_sandbox.run("import os\nprint(sorted(os.listdir('.')), sorted(os.environ))", files={"a/b": "x"})
    assert ran.stdout == "['__main__.py', 'a'] ['HOME', 'LANG', 'PATH', 'TMPDIR']\n", ran
    assert open_sandbox.run("bytearray(1 << 40)").ended == "memory"
    assert open_sandbox.run("while True: print('x' * 1000)").ended == "output"
    began = time.monotonic()
    ran = open_sandbox.run("import os\nos.fork()\nwhile True: pass", limits=Limits(seconds=0.2))
    assert ran.ended == "timeout"
    assert time.monotonic() - began < 3.0
    folder = open_sandbox.run("import os; print(os.getcwd())").stdout.strip()
    assert folder
    assert not os.path.exists(folder)


def test_isolation_that_once_worked_is_never_given_up_silently(monkeypatch):
    with Sandbox() as sandbox:
        assert sandbox.isolation.active
        idle(sandbox).close()

        def refuse(**_):
            raise SandboxFailure("unshare: No space left on device")

        monkeypatch.setattr(pool, "Worker", refuse)
        with pytest.raises(SandboxFailure, match="No space left"):
            sandbox.run("print(1)")


def test_isolation_says_plainly_what_there_is():
    assert str(Isolation(active=False, reason="unshare: Operation not permitted")) == (
        "no isolation: unshare: Operation not permitted"
    )
    text = str(Isolation(active=True, user="user 65534 (nobody)", memory=""))
    for word in ("namespaces", "read-only root", "65534", "system call filter", "not for their sum"):
        assert word in text
