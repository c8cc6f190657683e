"""The hostile programs once more, in a sandbox that an ordinary user starts.

Root runs the tests again as `nobody`, in a mount namespace where folders that only root may enter are replaced by
folders with nothing but the interpreter and the repository.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hostile_programs import HOSTILE

ROOT = Path(__file__).parents[2]
NOBODY = 65534

# Runs as root in a process of its own: make the needed folders accessible, become nobody, become pytest.
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


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="test_hostile.py itself ran as an ordinary user")
def test_R2_hostile_programs_are_contained_when_an_ordinary_user_starts_them():
    needed = ":".join(sorted({sys.base_prefix, sys.prefix, str(ROOT)}, key=len))
    start = [sys.executable, "-c", START, str(NOBODY), str(ROOT), needed]
    tests = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", "tests/sandbox/test_hostile.py"]
    with tempfile.TemporaryDirectory() as folder:  # not pytest's, which each run of pytest closes to others
        os.chmod(folder, 0o777)
        run = subprocess.run(
            [*start, *tests, f"--basetemp={folder}/tests"],
            cwd=ROOT,
            env={"PATH": os.environ["PATH"], "HOME": folder, "TMPDIR": folder, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=600,
        )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", run.stdout)[1]) >= len(HOSTILE)
    assert "skipped" not in run.stdout
