"""The sandbox as its users see it: results of programs and calls, and failures."""

import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from sandbox.processes import ended, family, wait_until, zygote

from flowgrpo.sandbox import CallFailed, Isolation, Limits, Sandbox, SandboxFailure, isolation, pool, worker
from flowgrpo.types import BadInput

LIMITS = Limits(seconds=60.0)  # for a busy machine


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(limits=LIMITS, preload=["sandbox_calls"]) as shared:
        yield shared


@pytest.fixture
def no_namespaces(monkeypatch):
    def refuse(*, isolate, preload):
        if isolate:
            raise SandboxFailure("unshare: Operation not permitted")
        return worker.Worker(isolate=False, preload=preload)

    monkeypatch.setattr(pool, "Worker", refuse)


def idle(sandbox, kind=()):
    (idle_worker,) = sandbox._idle[kind]
    return idle_worker


def call(sandbox, program, *arguments, seconds=60.0):
    return sandbox.call("sandbox_calls:run", program, *arguments, seconds=seconds)


CODES = {
    "": 0,
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
    results = {program: sandbox.run(program)[:2] for program in CODES}
    assert results == {program: ("exited", code) for program, code in CODES.items()}


def test_a_program_runs_as_main_beside_its_files_and_exits_as_usual(sandbox):
    program = """
import atexit, threading
atexit.register(print, "last")
threading.Thread(target=lambda: (threading.main_thread().join(), print("thread"))).start()
if __name__ == "__main__":
    import helper, sys
    print(input() * helper.value, open("data/numbers.bin", "rb").read(), sys.argv, __file__)
    1 / 0
"""
    ran = sandbox.run(program, stdin="hé\n", files={"helper.py": "value = 2", "data/numbers.bin": b"\0\1"})
    assert ran.stdout == "héhé b'\\x00\\x01' ['/scratch/__main__.py'] /scratch/__main__.py\nthread\nlast\n", ran
    assert "in <module>\n    1 / 0" in ran.stderr
    assert "sandbox" not in ran.stderr  # a traceback shows none of its frames
    assert 0 < ran.seconds < LIMITS.seconds


def test_the_standard_library_works_and_random_numbers_differ_between_runs(sandbox):
    program = """
import asyncio, concurrent.futures, fcntl, mmap, multiprocessing, os, random, shelve, shutil, sqlite3, subprocess, sys
import tempfile, threading
with multiprocessing.Pool(2) as pool: print(pool.map(abs, [1, -2]), asyncio.run(asyncio.sleep(0)))
print(subprocess.run([sys.executable, "-c", "print('child')"], capture_output=True, text=True).stdout)
base = sqlite3.connect("base")
for text in ("pragma journal_mode=wal", "create table kept(x)", "insert into kept values (6)"): base.execute(text)
base.commit()
with shelve.open("shelf") as shelf, tempfile.NamedTemporaryFile() as file:
    shelf["number"] = sqlite3.connect("base").execute("select sum(x) + 1 from kept").fetchone()[0]
    print(shelf["number"], multiprocessing.Value("i", 8).value)
    fcntl.flock(file, fcntl.LOCK_EX)
    file.write(bytes(mmap.PAGESIZE))
    file.flush()
    os.fsync(file.fileno())
    shutil.copy2(file.name, "copy")
    with mmap.mmap(file.fileno(), mmap.PAGESIZE) as memory: memory.flush()
meeting = threading.Barrier(31)  # with the first thread as many as the limit of processes
with concurrent.futures.ThreadPoolExecutor(31) as threads: list(threads.map(lambda _: meeting.wait(60), range(31)))
print(random.random(), os.urandom(4).hex(), tempfile.mktemp())
"""
    ran, again = (sandbox.run(program) for _ in range(2))
    *words, one, two, three = ran.stdout.split()
    assert words == ["[1,", "2]", "None", "child", "7", "8"], ran
    assert not {one, two, three} & set(again.stdout.split())


def test_the_bound_of_output_counts_both_streams_and_keeps_what_fits(sandbox):
    echo, limits = "import sys\nsys.stdout.write(sys.stdin.read())", replace(LIMITS, output_bytes=6_000_000)
    ran = sandbox.run(echo, stdin="x" * 5_000_000, limits=limits)
    assert (ran.ending, len(ran.stdout)) == ("exited", 5_000_000)
    flood = "import sys, time\nprint('a' * 600, flush=True)\nprint('b' * 600, file=sys.stderr)\ntime.sleep(600)"
    ran = sandbox.run(flood, limits=replace(LIMITS, output_bytes=1000))
    assert (ran.ending, ran.code, len(ran.stdout) + len(ran.stderr)) == ("output", None, 1000)
    assert min(len(ran.stdout), len(ran.stderr)) == 399


def test_bad_file_names_and_limits_are_refused(sandbox):
    for name in ("/etc/passwd", "../out", "a/../../b", "", ".", "a/", "__main__.py", "a\0b"):
        with pytest.raises(BadInput, match="relative paths"):
            sandbox.run("", files={name: "x"})
    with pytest.raises(BadInput, match="as a folder"):
        sandbox.run("", files={"a": "x", "a/b": "x"})
    for settings in ({"seconds": 0}, {"memory": -1}, {"seconds": float("nan")}, {"output_bytes": 0}):
        with pytest.raises(BadInput, match=next(iter(settings))):
            Limits(**settings)


def test_a_call_returns_the_value_and_not_what_is_printed(sandbox):
    for value in ("é", [None, {"a": 1.5}], "\ud800"):
        assert call(sandbox, "value, = arguments\nprint(value is None)\nimport os; os.write(1, b'{}')", value) == value
    environment, jax = call(sandbox, "import os, sys\nvalue = dict(os.environ), 'jax' in sys.modules")
    assert set(environment) == {"PATH", "LANG", "HOME", "TMPDIR", "MALLOC_ARENA_MAX"}
    assert not jax


def test_R2_a_call_ends_at_its_deadline(sandbox):
    with pytest.raises(TimeoutError, match=r"0\.1 s"):
        call(sandbox, "while True: pass", seconds=0.1)
    assert call(sandbox, "value = 2") == 2


FAILING = {
    "raise ValueError('broken')": "ValueError",
    "import sys; sys.exit('gone')": "SystemExit",
    "import os; os.kill(os.getpid(), 9)": "ProcessDied",
    "bytearray(4 << 30)": "MemoryError",
    "value = {1}": "TypeError",
    "value = 'x' * (20 << 20)": "OverflowError",
    "import socket; socket.create_connection(('127.0.0.1', 80), 1)": "PermissionError",
    "open('/etc/passwd')": "FileNotFoundError",
}


def test_a_failed_call_says_what_happened(sandbox):
    for program, kind in FAILING.items():
        with pytest.raises(CallFailed) as failure:
            call(sandbox, program)
        assert failure.value.kind == kind, failure.value
        assert failure.value.message
    with pytest.raises(CallFailed, match="missing"):
        sandbox.call("sandbox_calls:missing", seconds=60.0)


def test_only_preloaded_functions_can_be_called(sandbox):
    for function in ("os:system", "sandbox_calls", ":run", "sandbox_calls:"):
        with pytest.raises(BadInput, match="preload: sandbox_calls"):
            sandbox.call(function)
    with pytest.raises(BadInput, match="JSON"):
        call(sandbox, object())
    with Sandbox(preload=["no_such_module"]) as other, pytest.raises(BadInput, match="no_such_module"):
        other.call("no_such_module:f")
    with pytest.raises(BadInput, match="sequence"):
        Sandbox(preload="sandbox_calls")


@pytest.mark.parametrize("kind", [(), ("sandbox_calls",)], ids=["run", "call"])
def test_a_lost_worker_is_blamed_on_the_request_or_on_the_host(sandbox, kind):
    submit = worker.Worker._submit

    def carry_out(program):
        return call(sandbox, program) if kind else sandbox.run(program)[:2]

    def lose(program, ill):
        """Carry out a program on a host whose workers die of it, or of every program."""

        def submit_and_die(self, request, *arguments):
            submit(self, request, *arguments)
            if ill or request.get("program") != b"":
                os.kill(zygote(self.pid), signal.SIGKILL)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(worker.Worker, "_submit", submit_and_die)
            return carry_out(program)

    fine = 0 if kind else ("exited", 0)
    assert carry_out("value = 0") == fine
    if kind:
        with pytest.raises(CallFailed, match="ProcessDied"):
            lose("while True: pass", ill=False)
    else:
        assert lose("while True: pass", ill=False) == ("signal", -signal.SIGKILL)
    with pytest.raises(SandboxFailure, match=r"ended while.*no other runs"):
        lose("while True: pass", ill=True)
    assert carry_out("value = 0") == fine

    serving = zygote(idle(sandbox, kind).pid)
    wait_until(lambda: [*family(serving).values()] == ["S"])
    (waiting,) = family(serving)
    os.kill(waiting, signal.SIGKILL)  # as the kernel does when memory runs out: another takes its place
    wait_until(lambda: ended(waiting))
    before = idle(sandbox, kind).pid
    assert carry_out("value = 0") == fine
    assert idle(sandbox, kind).pid == before

    os.kill(zygote(before), signal.SIGKILL)
    wait_until(lambda: not idle(sandbox, kind).is_alive())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker.Worker, "is_alive", lambda _: True)
        with pytest.raises(SandboxFailure, match="before it took this request"):
            carry_out("value = 0")
    assert carry_out("value = 0") == fine


def test_a_zygote_that_can_not_fork_says_so_and_continues(monkeypatch):
    spoilt = """
from flowgrpo.sandbox import zygote
code, source = zygote._own_code(), open(zygote.__file__).read()
fork = " " * 8 + "pid = os.fork()"
source = source.replace(fork, " " * 8 + "if next(turns, 0): raise OSError(12, 'no memory')\\n" + fork)
code["zygote"] = compile("turns = iter([0, 0, 1, 1])\\n" + source, "zygote.py", "exec")
zygote._own_code = lambda: code
from flowgrpo.sandbox.zygote import main
"""
    monkeypatch.setattr(worker, "_BOOT", worker._BOOT.replace("from flowgrpo.sandbox.zygote import main", spoilt))
    with Sandbox(limits=LIMITS) as sandbox:
        assert sandbox.run("print(1)").stdout == "1\n"
        before = idle(sandbox).pid
        with pytest.raises(SandboxFailure, match="no memory"):
            sandbox.run("print(2)")
        assert sandbox.run("print(3)").stdout == "3\n"
        assert idle(sandbox).pid == before


def test_as_many_programs_as_workers_run_at_once(monkeypatch):
    meeting, busy = threading.Barrier(3), []

    def meet(self, request, **_):
        """A run ends once three of them are under way."""
        if request["program"]:
            busy.append(self)
            assert len(busy) <= 3
            meeting.wait(60)
            busy.remove(self)
            meeting.wait(60)
        return worker.RequestEnd("ended", 0, (b"", b""), 0.0)

    monkeypatch.setattr(worker.Worker, "exchange", meet)
    with Sandbox(workers=3) as three, ThreadPoolExecutor(9) as threads:
        assert [ran.code for ran in threads.map(three.run, ["x"] * 9)] == [0] * 9
        assert len(three._idle[()]) == 3


def test_closing_or_forgetting_a_sandbox_ends_every_process(monkeypatch):
    monkeypatch.setattr(worker, "GRACE_SECONDS", 60.0)
    descriptors = len(os.listdir("/proc/self/fd"))
    with Sandbox(preload=["sandbox_calls"]) as closed:
        closed.run("")
        call(closed, "value = 1")
        pids = [idle(closed).pid, idle(closed, ("sandbox_calls",)).pid]
        os.kill(pids[0], signal.SIGSTOP)  # stopped processes end at once, too: starter, zygote
        os.kill(zygote(pids[1]), signal.SIGSTOP)
        start = time.monotonic()
    assert time.monotonic() - start < worker.GRACE_SECONDS
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


def test_when_the_host_process_is_killed_nothing_continues():
    program = """
import threading
from flowgrpo.sandbox import Limits, Sandbox
sandboxes = [Sandbox(limits=Limits(seconds=600)) for _ in range(3)]
for sandbox in sandboxes: sandbox.run("")
print(*[sandbox._idle[()][0].pid for sandbox in sandboxes], flush=True)
forever = "import os; os.fork() or os.setsid(); [None for _ in iter(int, 1)]"
for sandbox in sandboxes: threading.Thread(target=sandbox.run, args=[forever]).start()
"""
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=root) as process:
        pids = [int(word) for word in process.stdout.readline().split()]
        below = [*pids]
        for number, pid in enumerate(pids):
            wait_until(lambda pid=pid: len(family(pid)) == 4)  # the zygote, process 1 of the run, the program twice
            below += family(pid)
            for stopped in (pid, zygote(pid))[:number]:  # of the second the starter, of the third the zygote, too
                os.kill(stopped, signal.SIGSTOP)
        process.kill()
    wait_until(lambda: all(map(ended, below)))


def test_R2_a_stuck_zygote_is_killed_and_its_run_is_a_timeout(sandbox, monkeypatch):
    monkeypatch.setattr(worker, "GRACE_SECONDS", 0.2)
    sandbox.run("")
    serving = zygote(idle(sandbox).pid)
    os.kill(serving, signal.SIGSTOP)
    assert sandbox.run("print(1)", limits=Limits(seconds=0.1)).ending == "timeout"
    wait_until(lambda: ended(serving))
    assert sandbox.run("print(1)").stdout == "1\n"


def test_libraries_loaded_from_elsewhere_are_visible_and_files_beside_them_are_not(tmp_path, monkeypatch):
    (loaded,) = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libm" in line}
    shutil.copy(loaded, tmp_path / "real.so")
    (tmp_path / "libm.so.6").symlink_to("real.so")
    (tmp_path / "beside").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path}:{os.environ.get('LD_LIBRARY_PATH', '')}")
    with Sandbox(limits=LIMITS) as sandbox:
        ran = sandbox.run(f"import os\nprint(sorted(os.listdir({str(tmp_path)!r})))")
    assert ran.stdout == "['libm.so.6', 'real.so']\n", ran


def test_a_worker_is_nobody_if_the_host_maps_no_other_user(monkeypatch):
    calls = []

    def become(*users):
        calls.append(users)
        if users[0] > 65535:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "setresuid", become)
    isolation._become_own_user()
    assert len(set(calls[0])) == 1
    assert isolation.FIRST_USER <= calls[0][0] < 1 << 31
    assert calls[1:] == [(65534, 65534, 65534)]


@pytest.mark.usefixtures("no_namespaces")
def test_without_isolation_programs_are_refused_and_calls_still_work():
    with Sandbox(preload=["sandbox_calls"]) as sandbox:
        with pytest.raises(BadInput, match=r"no isolation: unshare: Operation not permitted.*unsafe=True"):
            sandbox.run("print(1)")
        assert call(sandbox, "value = sum(arguments)", 1, 2) == 3
        assert not sandbox.isolation.active


@pytest.mark.usefixtures("no_namespaces")
def test_unsafe_programs_still_have_limits_and_a_folder_of_their_own():
    leaving = """
import os, time
read, write = os.pipe()
if os.fork():
    os.read(read, 1)
else:
    os.setsid()
    os.write(write, b'x')
    time.sleep(2)  # with the output open, out of reach of any kill
"""
    with Sandbox(unsafe=True, limits=LIMITS) as sandbox:
        look = "import os\nprint(sorted(os.listdir('.')), sorted(os.environ), os.getcwd())"
        ran = sandbox.run(look, files={"a/b": "x"})
        assert ran.stdout.startswith("['__main__.py', 'a'] ['HOME', 'LANG', 'MALLOC_ARENA_MAX', 'PATH', 'TMPDIR'] /"), (
            ran
        )
        assert not os.path.exists(ran.stdout.split()[-1])
        programs = ("bytearray(1 << 40)", "while True: print('x' * 1000)", leaving)
        assert [sandbox.run(program).ending for program in programs] == ["memory", "output", "exited"]
        assert sandbox.run("import os\nos.fork()\nwhile True: pass", limits=Limits(seconds=0.2)).ending == "timeout"
        wait_until(lambda: len(family(idle(sandbox).pid)) == 1)  # the child that waits for the next run

        below = family(idle(sandbox).pid)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(worker.Streams, "wait", lambda *_: signal.raise_signal(signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                sandbox.run("while True: pass")
        wait_until(lambda: all(map(ended, below)))


def test_isolation_that_has_worked_is_never_given_up_silently(monkeypatch):
    with Sandbox() as sandbox:
        assert sandbox.isolation.active
        idle(sandbox).close()

        def refuse(**_):
            raise SandboxFailure("unshare: No space left on device")

        monkeypatch.setattr(pool, "Worker", refuse)
        with pytest.raises(SandboxFailure, match="No space left"):
            sandbox.run("print(1)")
    assert "for each process, but not for their sum" in str(Isolation(active=True, user="nobody", memory=""))
