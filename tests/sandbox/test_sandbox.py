"""The sandbox as its users see it: what programs and calls give back, and what happens when things go wrong."""

import gc
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from sandbox.processes import ended, family, wait_until, zygote

from flowgrpo.sandbox import CallFailed, Isolation, Limits, Sandbox, SandboxFailure, pool, worker
from flowgrpo.types import BadInput

LIMITS = Limits(seconds=60.0)  # for a busy machine


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(limits=LIMITS, preload=["called"]) as made:
        yield made


@pytest.fixture
def refused(monkeypatch):
    """A host without namespaces."""

    def refuse(*, isolate, preload):
        if isolate:
            raise SandboxFailure("unshare: Operation not permitted")
        return worker.Worker(isolate=False, preload=preload)

    monkeypatch.setattr(pool, "Worker", refuse)


def idle(sandbox, kind=()):
    (only,) = sandbox._idle[kind]
    return only


# Programs ---------------------------------------------------------------------------------------------


def test_a_program_reads_its_input_and_writes_its_output(sandbox):
    ran = sandbox.run("import sys\nprint(input() * 2)\nprint('é', file=sys.stderr)", stdin="hé\n")
    assert ran[:4] == ("exited", 0, "héhé\n", "é\n")
    assert 0 < ran.seconds < LIMITS.seconds


CODES = {
    "": 0,
    "raise SystemExit": 0,
    "import sys; sys.exit(3)": 3,
    "import sys; sys.exit(-1)": 255,
    "import sys; sys.exit('no')": 1,
    "1 / 0": 1,
    "def": 1,
    "\0": 1,
    "\udc80": 1,
    "import os; os._exit(7)": 7,
    "import atexit, os; atexit.register(os._exit, 5)": 5,
}


def test_exit_codes_are_those_of_the_interpreter(sandbox):
    found = {program: sandbox.run(program)[:2] for program in CODES}
    assert found == {program: ("exited", code) for program, code in CODES.items()}


def test_a_traceback_shows_the_program_and_nothing_of_the_sandbox(sandbox):
    ran = sandbox.run("def f():\n    return 1 / 0\nf()")
    assert "in f\n    return 1 / 0" in ran.stderr
    assert "ZeroDivisionError" in ran.stderr
    assert "sandbox" not in ran.stderr


def test_it_runs_as_main_with_files_beside_it_and_ends_as_in_an_interpreter(sandbox):
    program = """
import atexit, threading
atexit.register(print, "last")
threading.Thread(target=lambda: (threading.main_thread().join(), print("thread"))).start()
if __name__ == "__main__":
    import helper, sys
    print(helper.value, open("data/numbers.bin", "rb").read(), sys.argv, __file__)
"""
    ran = sandbox.run(program, files={"helper.py": "value = 4", "data/numbers.bin": b"\0\1"})
    assert ran.stdout == "4 b'\\x00\\x01' ['/scratch/__main__.py'] /scratch/__main__.py\nthread\nlast\n", ran


def test_the_standard_library_works_inside_and_random_numbers_differ_between_runs(sandbox):
    program = """
import asyncio, hashlib, multiprocessing, os, random, sqlite3, subprocess, sys, tempfile
def double(x): return 2 * x
async def wait(): await asyncio.sleep(0); return "waited"
print(asyncio.run(wait()))
with multiprocessing.Pool(2) as pool: print(pool.map(double, [1, 2]))
print(subprocess.run([sys.executable, "-c", "print('child')"], capture_output=True, text=True).stdout)
with tempfile.NamedTemporaryFile() as file: print(file.name[:9])
print(sqlite3.connect(":memory:").execute("select 1").fetchone(), hashlib.sha256(b"").hexdigest()[:4])
print(random.random(), os.urandom(4).hex(), tempfile.mktemp())
"""
    ran, again = (sandbox.run(program) for _ in range(2))
    *words, one, two, three = ran.stdout.split()
    assert words == ["waited", "[2,", "4]", "child", "/scratch/", "(1,)", "e3b0"], ran
    assert not {one, two, three} & set(again.stdout.split())


def test_large_input_and_output_pass_without_standing_still(sandbox):
    program = "import sys\nsys.stdout.write(sys.stdin.read())"
    ran = sandbox.run(program, stdin="x" * 5_000_000, limits=replace(LIMITS, output_bytes=6_000_000))
    assert (ran.ended, len(ran.stdout)) == ("exited", 5_000_000)


def test_the_bound_on_output_counts_both_streams_and_keeps_what_came_before(sandbox):
    program = "import sys, time\nprint('a' * 600, flush=True)\nprint('b' * 600, file=sys.stderr)\ntime.sleep(600)"
    ran = sandbox.run(program, limits=replace(LIMITS, output_bytes=1000))
    assert (ran.ended, ran.code, len(ran.stdout) + len(ran.stderr)) == ("output", None, 1000)
    assert min(len(ran.stdout), len(ran.stderr)) == 399


def test_what_can_not_be_run_is_refused(sandbox):
    for name in ("/etc/passwd", "../out", "a/../../b", "", ".", "a/", "__main__.py", "a\0b"):
        with pytest.raises(BadInput, match="relative paths"):
            sandbox.run("", files={name: "x"})
    with pytest.raises(BadInput, match="as a folder"):
        sandbox.run("", files={"a": "x", "a/b": "x"})
    for settings in ({"seconds": 0}, {"memory": -1}, {"seconds": float("nan")}, {"output_bytes": 0}):
        with pytest.raises(BadInput, match=next(iter(settings))):
            Limits(**settings)


# Calls ------------------------------------------------------------------------------------------------


def test_a_call_returns_what_the_function_returns(sandbox):
    assert sandbox.call("called:add", 2, 3) == 5
    assert sandbox.call("called:add", ["é", None], [{"a": 1.5}]) == ["é", None, {"a": 1.5}]
    assert sandbox.call("called:add", "\ud800", "") == "\ud800"
    assert sandbox.call("called:talk") == "said"  # and nothing of what it prints
    environment, jax = sandbox.call("called:environment")
    assert set(environment) == {"PATH", "LANG", "HOME", "TMPDIR"}
    assert not jax


def test_R2_a_call_ends_at_its_deadline(sandbox):
    with pytest.raises(TimeoutError, match=r"0\.1 s"):
        sandbox.call("called:spin", seconds=0.1)
    assert sandbox.call("called:add", 1, 1, seconds=60.0) == 2


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
        sandbox.call(f"called:{function}", *arguments, seconds=60.0)
    assert failure.value.kind == kind, failure.value
    assert failure.value.message


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

KINDS = {  # a request that ends, its answer, and one that doesn't
    "run": (lambda box: box.run("print(2)").stdout, "2\n", lambda box: box.run("while True: pass")),
    "call": (lambda box: box.call("called:add", 1, 1), 2, lambda box: box.call("called:spin", seconds=60.0)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_that_dies_fails_only_the_request_that_it_had(sandbox, kind):
    (short, answer, endless), key = KINDS[kind], ("called",) if kind == "call" else ()
    submit = worker.Worker._submit

    def submit_and_die(self, *arguments):
        submit(self, *arguments)
        os.kill(zygote(self.pid), signal.SIGKILL)

    assert short(sandbox) == answer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker.Worker, "_submit", submit_and_die)
        with pytest.raises(SandboxFailure, match="ended while"):
            endless(sandbox)
    assert short(sandbox) == answer
    os.kill(zygote(idle(sandbox, key).pid), signal.SIGKILL)
    wait_until(lambda: not idle(sandbox, key).alive())
    assert short(sandbox) == answer


def test_as_many_run_at_once_as_there_are_workers_and_the_others_wait(monkeypatch):
    meeting, busy = threading.Barrier(3), []

    class Meets:
        """A worker whose runs end when three of them go on at once."""

        lost, memory_bound = False, ""

        def __init__(self, **_):
            pass

        def exchange(self, request, **_):
            if request["program"]:
                busy.append(self)
                assert len(busy) <= 3
                meeting.wait(60)
                busy.remove(self)
                meeting.wait(60)
            return worker.Answer("ended", 0, (b"", b""), 0.0)

        def alive(self):
            return True

        def close(self):
            pass

    monkeypatch.setattr(pool, "Worker", Meets)
    with Sandbox(workers=3) as three, ThreadPoolExecutor(9) as threads:
        assert [ran.code for ran in threads.map(three.run, ["x"] * 9)] == [0] * 9
        assert len(three._idle[()]) == 3


def test_closing_or_forgetting_a_sandbox_ends_every_process_and_a_closed_one_says_so():
    descriptors = len(os.listdir("/proc/self/fd"))
    with Sandbox(preload=["called"]) as closed:
        closed.run("")
        closed.call("called:add", 1, 1)
        pids = [idle(closed).pid, idle(closed, ("called",)).pid]
    with pytest.raises(BadInput, match="closed"):
        closed.run("")
    forgotten = Sandbox()
    forgotten.run("")
    pids.append(idle(forgotten).pid)
    del forgotten
    gc.collect()
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    assert len(os.listdir("/proc/self/fd")) == descriptors
    with pytest.raises(BadInput, match="workers"):
        Sandbox(workers=0)


@pytest.mark.slow
def test_when_the_host_process_is_killed_nothing_goes_on():
    program = """
from flowgrpo.sandbox import Limits, Sandbox
sandbox = Sandbox(limits=Limits(seconds=600))
sandbox.run("")
print(sandbox._idle[()][0].pid, flush=True)
sandbox.run("import os; os.fork() or os.setsid(); [None for _ in iter(int, 1)]")
"""
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=root) as process:
        pid = int(process.stdout.readline())
        wait_until(lambda: len(family(pid)) == 4)  # the zygote, process 1 of the run, and the program twice
        below = [pid, *family(pid)]
        process.kill()
    wait_until(lambda: all(map(ended, below)))


def test_R2_a_zygote_that_is_stuck_is_ended_and_the_run_counts_as_late(sandbox, monkeypatch):
    monkeypatch.setattr(worker, "GRACE", 0.2)
    sandbox.run("")
    serving = zygote(idle(sandbox).pid)
    os.kill(serving, signal.SIGSTOP)
    assert sandbox.run("print(1)", limits=Limits(seconds=0.1)).ended == "timeout"
    wait_until(lambda: ended(serving))
    assert sandbox.run("print(1)").stdout == "1\n"


# Without isolation --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("refused")
def test_without_isolation_programs_are_refused_and_calls_still_work():
    with Sandbox(preload=["called"]) as sandbox:
        with pytest.raises(BadInput, match=r"no isolation: unshare: Operation not permitted.*unsafe=True"):
            sandbox.run("print(1)")
        assert sandbox.call("called:add", 1, 2) == 3
        with pytest.raises(TimeoutError):
            sandbox.call("called:spin", seconds=0.1)
        assert not sandbox.isolation.active


@pytest.mark.usefixtures("refused")
def test_unsafe_programs_still_have_limits_and_a_folder_of_their_own():
    with Sandbox(unsafe=True, limits=LIMITS) as sandbox:
        look = "import os\nprint(sorted(os.listdir('.')), sorted(os.environ), os.getcwd())"
        ran = sandbox.run(look, files={"a/b": "x"})
        assert ran.stdout.startswith("['__main__.py', 'a'] ['HOME', 'LANG', 'PATH', 'TMPDIR'] /"), ran
        assert not os.path.exists(ran.stdout.split()[-1])
        assert sandbox.run("bytearray(1 << 40)").ended == "memory"
        assert sandbox.run("while True: print('x' * 1000)").ended == "output"
        leaves = (
            "import os, time\nread, write = os.pipe()\nif os.fork():\n    os.read(read, 1)\nelse:\n    os.setsid()\n"
        )
        leaves += "    os.write(write, b'x')\n    time.sleep(2)"  # with the output open, where nothing can kill it
        assert sandbox.run(leaves).ended == "exited"
        forks = "import os\nos.fork()\nwhile True: pass"
        assert sandbox.run(forks, limits=Limits(seconds=0.2)).ended == "timeout"
        wait_until(lambda: len(family(idle(sandbox).pid)) == 1)  # the child that waits for the next run


def test_isolation_that_once_worked_is_never_given_up_silently(monkeypatch):
    with Sandbox() as sandbox:
        assert sandbox.isolation.active
        idle(sandbox).close()

        def refuse(**_):
            raise SandboxFailure("unshare: No space left on device")

        monkeypatch.setattr(pool, "Worker", refuse)
        with pytest.raises(SandboxFailure, match="No space left"):
            sandbox.run("print(1)")


def test_isolation_says_where_memory_is_bounded_for_each_process_only():
    assert "for each process, but not for their sum" in str(Isolation(active=True, user="nobody", memory=""))
