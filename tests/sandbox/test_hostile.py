"""Law R2 and SPEC §9: nothing that a program does gets out of the sandbox, outlives its run, or harms the pool.

`test_ordinary_user.py` runs this file once more as a user without rights. Without isolation all of these tests fail:
a sandbox that can't contain a program is none.
"""

import os
import secrets
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from hostile_programs import HOSTILE, PRELUDE
from sandbox.processes import family, stat, wait_until

from flowgrpo.sandbox import Limits, Sandbox
from flowgrpo.sandbox import worker as workers

LIMITS = Limits(seconds=60.0, memory=256 << 20, file_bytes=8 << 20)  # the time is for a busy machine
SHORT = replace(LIMITS, seconds=0.2)  # for what is to run into its deadline
SECRET = secrets.token_hex(16)


class Host(NamedTuple):
    """A sandbox, and what a program could find on its host."""

    sandbox: Sandbox
    known: dict
    folder: Path
    servers: list[socket.socket]

    def is_intact(self):
        """Whether the worker is the same, with its zygote and a waiting child below it, none stopped or dead."""
        (worker,) = self.sandbox._idle[()]
        assert worker.pid == self.known["WORKER_PID"], "the worker was lost"
        wait_until(lambda: len(family(worker.pid)) == 2)
        return not {"Z", "T"} & {stat(worker.pid)[0], *family(worker.pid).values()}

    def run(self, program, limits=LIMITS):
        """Run a program after the prelude, with the names that it knows."""
        names = "".join(f"{name} = {value!r}\n" for name, value in self.known.items())
        return self.sandbox.run(names + PRELUDE + program, limits=limits)


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """Files, a secret in the environment, servers that listen, and a process."""
    folder = tmp_path_factory.mktemp("host")
    for path in (folder, *folder.parents[:2]):
        if path.stat().st_uid == os.geteuid():
            path.chmod(0o755)  # so that only the sandbox prevents access
    shared = Path("/dev/shm") / f"flowgrpo-canary-{os.getpid()}"
    for canary in (folder / "flowgrpo-canary.txt", shared):
        canary.write_text("untouched")
    servers = [socket.create_server(("127.0.0.1", 0))]
    for address in ("\0flowgrpo-" + SECRET[:8], str(folder / "socket")):
        servers.append(socket.socket(socket.AF_UNIX))
        servers[-1].bind(address)
        servers[-1].listen()
    with pytest.MonkeyPatch.context() as patch, Sandbox(limits=LIMITS) as sandbox:
        patch.setenv("FLOWGRPO_CANARY", SECRET)
        patch.setenv("LD_LIBRARY_PATH", f"{os.environ.get('LD_LIBRARY_PATH', '')}:{folder}/{SECRET}")
        patch.setattr(workers, "GRACE_SECONDS", 30.0)  # a zygote on a busy machine isn't stuck
        assert sandbox.isolation.active, str(sandbox.isolation)
        known = {
            "CANARY": str(folder / "flowgrpo-canary.txt"),
            "SHARED": shared.name,
            "SECRET": SECRET[::-1],
            "HOST_PID": os.getpid(),
            "PORT": servers[0].getsockname()[1],
            "ABSTRACT": "flowgrpo-" + SECRET[:8],
            "SOCKET_FILE": str(folder / "socket"),
            "REPOSITORY": str(Path(__file__).parents[2]),
            "INTERPRETER": {Path(sys.base_prefix).parts[1]},
        }
        (worker,) = sandbox._idle[()]
        known["WORKER_PID"] = worker.pid
        yield Host(sandbox, known, folder, servers)
    for server in servers:
        server.close()
    shared.unlink()


@pytest.mark.parametrize("name", HOSTILE)
def test_R2_a_hostile_program_is_contained_and_the_pool_survives(host, name):
    program, ends, held = HOSTILE[name]
    descriptors = len(os.listdir("/proc/self/fd"))
    ran = host.run(program, SHORT if "timeout" in ends else LIMITS)
    assert "ESCAPED" not in ran.stdout + ran.stderr, ran
    assert {ran.ending, f"{ran.ending} {ran.code}"} & ends, ran
    assert ran.stdout.count("held") >= held, ran
    written = len(ran.stdout.encode()) + len(ran.stderr.encode())
    assert written == LIMITS.output_bytes if ran.ending == "output" else written <= LIMITS.output_bytes

    look = (
        "import builtins, json, os\nprint(hasattr(builtins, 'owned'), hasattr(json, 'owned'), os.nice(0), os.listdir())"
    )
    assert host.sandbox.run(look).stdout == "False False 0 ['__main__.py']\n", "something was left to the next program"
    assert host.is_intact(), "a process is dead or stopped"
    assert len(os.listdir("/proc/self/fd")) == descriptors, "a descriptor was left open"
    assert sorted(os.listdir(host.folder)) == ["flowgrpo-canary.txt", "socket"]
    for canary in (host.folder / "flowgrpo-canary.txt", Path("/dev/shm") / host.known["SHARED"]):
        assert canary.read_text() == "untouched"
    assert "flowgrpo-canary-shm" not in os.listdir("/dev/shm")
    for server in host.servers:
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


def swap_limits(group):
    """Swap limits of a control group; empty if the kernel has no swap."""
    files = (group / "memory.swap.max", group / "memory.swappiness")
    return {file.read_text().strip() for file in files if file.exists()}


def test_memory_of_all_processes_is_bounded_if_isolation_says_so(host):
    program = """
import os
for depth in range(5):  # each holds 40 MB until all below it have ended
    kept = bytearray(b"x") * (40 << 20)
    if child := os.fork():
        code = os.waitstatus_to_exitcode(os.wait()[1])
        if depth:
            os._exit(code != 0)
        print("all held it" if code == 0 else "one was ended")
        break
    kept = None
"""
    ran = host.sandbox.run(program, limits=replace(LIMITS, memory=64 << 20))
    if host.sandbox.isolation.memory:
        assert ran.ending == "memory" or ran.stdout == "one was ended\n"
        (worker,) = host.sandbox._idle[()]
        assert swap_limits(worker._group.path) <= {"0"}, "on a host with swap the rest would go there"
    else:
        assert ran.stdout == "all held it\n"


def test_R2_every_program_of_a_series_is_killed_at_its_deadline(host):
    """Half of them fork first; the zygote itself enforces each deadline, else its worker would count as lost."""
    for number in range(6):
        bomb = "import os\nfor _ in range(2): os.fork()\n" * (number % 2)
        assert host.run(bomb + HOSTILE["ignored signals"][0], replace(LIMITS, seconds=0.05)).ending == "timeout"
        assert host.is_intact()


def test_the_description_of_the_isolation(host):
    text = str(host.sandbox.isolation)
    root, host_user = os.geteuid() == 0, f"user {os.geteuid()} of the host, called 65534 inside"
    user = "a user of its own for each worker, called 65534 inside" if root else host_user
    memory = "for a run as a whole" if host.sandbox.isolation.memory else "but not for their sum"
    for words in ("isolated by namespaces", "network", "read-only root", "system call filter", user, memory):
        assert words in text
    assert host.sandbox.run("import os\nprint(os.getuid(), os.getgid())").stdout == "65534 65534\n"
    with Sandbox() as other:  # root gives each worker a user, and so quotas, of its own
        assert other.isolation.active
        users = {os.stat(f"/proc/{sandbox._idle[()][0].pid}").st_uid for sandbox in (host.sandbox, other)}
    assert len(users) == (2 if root else 1)
