"""Law R2 and SPEC §9: nothing that a program does gets out of the sandbox, outlives its run, or harms the pool.

`test_ordinary_user.py` runs this file once more as a user without rights. Where there is no isolation, all of this
fails: a sandbox that can't hold a program is not one.
"""

import os
import secrets
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hostile import HOSTILE, PRELUDE, Hostile

from flowgrpo.sandbox import Limits, Sandbox

LIMITS = Limits(seconds=3.0, memory=256 << 20, file_bytes=8 << 20)
LATE = 3.0  # seconds past its deadline after which any run that still goes on is a failure, on a busy machine too
PROMPT, SERIES = 0.2, 5  # what one of so many series must keep: a busy machine may delay one run, but not in each
QUICK = ("fork tree", "ignored signals", "threads that never end")
SECRET = secrets.token_hex(16)


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """What there is on the host to be found: files, a secret in the environment, servers that listen, a process."""
    folder = tmp_path_factory.mktemp("host")
    for place in (folder, *folder.parents[:2]):
        if place.stat().st_uid == os.geteuid():
            place.chmod(0o755)  # so that nothing but the sandbox keeps anybody out
    canary = folder / "flowgrpo-canary.txt"
    canary.write_text("untouched")
    shared = Path("/dev/shm") / f"flowgrpo-canary-{os.getpid()}"
    shared.write_text("untouched")
    servers = [socket.create_server(("127.0.0.1", 0))]
    for address in ("\0flowgrpo-" + SECRET[:8], str(folder / "socket")):
        servers.append(socket.socket(socket.AF_UNIX))
        servers[-1].bind(address)
        servers[-1].listen()
    os.environ["FLOWGRPO_CANARY"] = SECRET
    with Sandbox(limits=LIMITS) as sandbox:
        assert sandbox.isolation.active, str(sandbox.isolation)
        known = {
            "CANARY": str(canary),
            "SHARED": shared.name,
            "SECRET": SECRET[::-1],
            "HOST_PID": os.getpid(),
            "WORKER_PID": worker(sandbox).pid,
            "PORT": servers[0].getsockname()[1],
            "ABSTRACT": "flowgrpo-" + SECRET[:8],
            "SOCKET_FILE": str(folder / "socket"),
            "REPOSITORY": str(Path(__file__).parents[2]),
            "INTERPRETER": {Path(sys.base_prefix).parts[1]},
        }
        yield sandbox, known, folder, servers
    for server in servers:
        server.close()
    shared.unlink()
    del os.environ["FLOWGRPO_CANARY"]


def worker(sandbox):
    (only,) = sandbox._idle[()]
    return only


def family(pid):
    """The processes below `pid`, as pid: (parent, state)."""
    every = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue  # it ended in the meantime
            every[int(entry.name)] = (int(parent), state)
    below = {pid}
    while more := {own for own, (parent, _) in every.items() if parent in below} - below:
        below |= more
    return {own: every[own] for own in below - {pid} if own in every}


def settled(pid):
    """The processes below a worker, once the one that is prepared for the next run is there."""
    for _ in range(100):
        if len(found := family(pid)) == 2:
            break
        time.sleep(0.01)
    return found


def with_known(program, known):
    return "".join(f"{name} = {value!r}\n" for name, value in known.items()) + PRELUDE + program


def marked(hostile: Hostile):
    """Those that last until their deadline are slow, but for a few."""
    slow = "timeout" in hostile.ended and hostile.name not in QUICK
    return pytest.param(hostile, id=hostile.name, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize("hostile", [marked(hostile) for hostile in HOSTILE])
def test_a_hostile_program_is_contained_and_the_pool_goes_on(host, hostile: Hostile):
    sandbox, known, folder, servers = host
    before = worker(sandbox).pid
    descriptors = len(os.listdir("/proc/self/fd"))

    began = time.monotonic()
    limits = replace(LIMITS, seconds=0.3) if hostile.ended == ("timeout",) else LIMITS
    ran = sandbox.run(with_known(hostile.program, known), limits=limits)
    took = time.monotonic() - began

    assert "ESCAPED" not in ran.stdout + ran.stderr, ran
    assert ran.ended in hostile.ended, ran
    assert hostile.says in ran.stdout, ran
    assert ran.stdout.count("held") >= hostile.held, ran
    assert took < limits.seconds + LATE
    assert len(ran.stdout.encode()) + len(ran.stderr.encode()) <= LIMITS.output_bytes

    assert sandbox.run("print(__import__('os').listdir('.'))").stdout == "['__main__.py']\n"
    assert worker(sandbox).pid == before, "the worker was lost"
    below = settled(before)
    assert len(below) == 2, f"besides the zygote and the child that waits there is {below}"
    assert "Z" not in {state for _, state in below.values()}, "a zombie was left"
    assert len(os.listdir("/proc/self/fd")) == descriptors, "a descriptor was left open"
    assert sorted(os.listdir(folder)) == ["flowgrpo-canary.txt", "socket"]
    assert (folder / "flowgrpo-canary.txt").read_text() == "untouched"
    assert (Path("/dev/shm") / known["SHARED"]).read_text() == "untouched"
    assert not [name for name in os.listdir("/dev/shm") if name == "flowgrpo-canary-shm"]
    for server in servers:
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_there_are_enough_of_them():
    assert len(HOSTILE) >= 40
    assert len({hostile.name for hostile in HOSTILE}) == len(HOSTILE)


def test_a_program_leaves_nothing_to_the_next_one(host):
    sandbox, known, *_ = host
    sandbox.run(with_known(next(item for item in HOSTILE if item.name == "a poisoned interpreter").program, known))
    look = (
        "import builtins, json, os\nprint(hasattr(builtins, 'owned'), hasattr(json, 'owned'), os.listdir('/scratch'))"
    )
    assert sandbox.run(look).stdout == "False False ['__main__.py']\n"


def test_memory_of_all_processes_is_bounded_together_where_the_sandbox_says_so(host):
    sandbox, *_ = host
    program = """
import os, time
for _ in range(5):
    if os.fork() == 0:
        kept = bytearray(120 << 20)
        for place in range(0, len(kept), 4096):
            kept[place] = 1
        time.sleep(0.5)
        os._exit(0)
codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(5)]
print(codes.count(0))
"""
    ran = sandbox.run(program, limits=Limits(seconds=5.0, memory=256 << 20))
    if sandbox.isolation.memory:
        assert ran.ended == "memory" or int(ran.stdout) < 5
        assert "for a run as a whole" in str(sandbox.isolation)
    else:
        assert ran.stdout == "5\n"
        assert "but not for their sum" in str(sandbox.isolation)


def test_no_kill_comes_late(host):
    """R2: 20 programs in a row that will not end, each gone at most 0.2 s past its deadline, tree and all."""
    series = []
    while not series or (max(series[-1]) >= PROMPT and len(series) < SERIES):
        series.append(lateness(*host[:2]))
    assert max(series[-1]) < PROMPT, series


def lateness(sandbox, known) -> list[float]:
    """Seconds past their deadlines after which 20 programs were gone."""
    program = next(hostile.program for hostile in HOSTILE if hostile.name == "ignored signals")
    bomb = "import os\nfor _ in range(2): os.fork()\n"
    late = []
    for number in range(20):
        began = time.monotonic()
        ran = sandbox.run((bomb if number % 2 else "") + with_known(program, known), limits=Limits(seconds=0.1))
        late.append(time.monotonic() - began - 0.1)
        assert ran.ended == "timeout"
    return late
