"""The hostile programs once more, with a sandbox that is started by a user without rights.

Root starts the tests again as `nobody`, in a mount namespace where folders that only root may enter are replaced by
ones that show nothing but the interpreter and the repository. Whoever is not root has run them as an ordinary user
already.
"""

import os
import re
import subprocess
import sys
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


def as_nobody(tmp_path, *command):
    """Run the command as nobody."""
    tmp_path.chmod(0o777)
    for parent in tmp_path.parents[:2]:
        parent.chmod(0o755)
    needed = ":".join(sorted({sys.base_prefix, sys.prefix, str(ROOT)}, key=len))
    return subprocess.run(
        [sys.executable, "-c", START, str(NOBODY), str(ROOT), needed, *command],
        cwd=ROOT,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "TMPDIR": str(tmp_path),
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_without_being_root_there_is_the_same_isolation(tmp_path):
    look = """
from flowgrpo.sandbox import Sandbox
with Sandbox() as sandbox:
    print(sandbox.run("import os; print(os.getuid())"))
print(sandbox.isolation)
"""
    if os.geteuid() == 0:
        found = as_nobody(tmp_path, sys.executable, "-c", look)
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
def test_hostile_programs_are_contained_when_an_ordinary_user_starts_them(tmp_path):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "0",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--basetemp={tmp_path}/tests",
    ]
    found = as_nobody(tmp_path, *command, "-m", "not oracle", "tests/sandbox/test_hostile.py")
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-2000:]
    passed = int(re.search(r"(\d+) passed", found.stdout)[1])
    assert passed >= 40
    assert "skipped" not in found.stdout
