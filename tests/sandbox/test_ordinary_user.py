"""The hostile programs once more, with a sandbox that is started by a user without rights.

Root starts the tests again as `nobody`, in a mount namespace where folders that only root may enter are replaced by
ones that show nothing but the interpreter and the repository. Whoever is not root has run them as an ordinary user
already.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from flowgrpo.sandbox import Sandbox

ROOT = Path(__file__).parents[2]
NOBODY = 65534

# Runs as root in a process of its own: open the way to what is needed, become nobody, become pytest.
START = """
import os, sys
from flowgrpo.sandbox import syscalls
user, root, needed, command = int(sys.argv[1]), sys.argv[2], sys.argv[3].split(":"), sys.argv[4:]
syscalls.unshare(syscalls.CLONE_NEWNS)
syscalls.mount("", "/", flags=syscalls.MS_REC | syscalls.MS_PRIVATE)

def top(path):
    "The first folder on the way to `path` that others can't enter, or None."
    parts = path.split("/")
    ways = ["/".join(parts[:n]) for n in range(2, len(parts) + 1)]
    return next((way for way in ways if not os.stat(way).st_mode & 1), None)

shut = {top(path) for path in needed} - {None}
for way in sorted(shut):
    inside = [path for path in needed if path.startswith(way + "/")]
    opened = {path: os.open(path, os.O_PATH) for path in inside}
    syscalls.mount("tmpfs", way, "tmpfs", 0, "mode=755")
    for path, descriptor in opened.items():
        if not os.path.exists(path):
            os.makedirs(path)
            syscalls.mount(f"/proc/self/fd/{descriptor}", path, flags=syscalls.MS_BIND | syscalls.MS_REC)
os.setgroups([])
os.setresgid(user, user, user)
os.setresuid(user, user, user)
os.chdir(root)
os.execv(command[0], command)
"""


@pytest.fixture
def open_folder():
    """A folder for everybody. It is none of pytest's own, which each run of pytest shuts to others."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder).resolve()
        path.chmod(0o777)
        yield path


def as_nobody(open_folder, *command):
    """Run the command as nobody."""
    needed = ":".join(sorted({sys.base_prefix, sys.prefix, str(ROOT)}, key=len))
    return subprocess.run(
        [sys.executable, "-c", START, str(NOBODY), str(ROOT), needed, *command],
        cwd=ROOT,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(open_folder),
            "TMPDIR": str(open_folder),
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_without_being_root_there_is_the_same_isolation(open_folder):
    look = """
from flowgrpo.sandbox import Sandbox
with Sandbox() as sandbox:
    print(sandbox.run("import os; print(os.getuid())"))
print(sandbox.isolation)
"""
    if os.geteuid() == 0:
        found = as_nobody(open_folder, sys.executable, "-c", look)
        assert found.returncode == 0, found.stderr
        text = found.stdout
        assert "stdout='65534\\n'" in text
        assert "user 65534 of the host" in text
    else:
        with Sandbox() as sandbox:
            text = str(sandbox.isolation)
            assert f"user {os.geteuid()} of the host" in text
    assert "isolated by namespaces" in text


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="test_hostile.py itself ran as an ordinary user")
def test_hostile_programs_are_contained_when_an_ordinary_user_starts_them(open_folder):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "0",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--basetemp={open_folder}/tests",
    ]
    found = as_nobody(open_folder, *command, "-m", "not oracle", "tests/sandbox/test_hostile.py")
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-2000:]
    passed = int(re.search(r"(\d+) passed", found.stdout)[1])
    assert passed >= 40
    assert "skipped" not in found.stdout
