"""Isolate a process: namespaces, a private read-only root, a user without rights. Runs in the zygote.

    root:  mount namespace -> private root -> a new user -> user, pid, network, ipc, uts namespaces and mounts again
    user:  user, pid, network, ipc, uts and mount namespaces -> private root

The order matters. Root must give up being root before any limit is set, because the limit of processes does not bind
root; but only root can read an interpreter below /root, so the root of the sandbox is built first. From then on both
are the same: inside, the user is 65534, and outside an unprivileged user whose rights end at these namespaces.
Root gives each worker a user of its own, so that workers share none of the kernel's user quotas (pages of pipes,
descriptors on their way through sockets); an ordinary user can't.

The private root is a tmpfs with read-only binds of the `visible` paths, five device files that reveal nothing
(null, zero, full, random, urandom), and the mount point of the scratch folder. There is no /proc, no /sys and no /etc:
Python needs none of them, and each reveals something about the host. The old root is unmounted, not hidden.

Standard library only.
"""

import glob
import os
import stat
import sys

from flowgrpo.sandbox import syscalls

FLAGS = ("-I", "-S", "-X", "utf8")  # of an interpreter that reads nothing from its environment
SCRATCH = "/scratch"
NOBODY = 65534
FIRST_USER = 7 << 28  # no system assigns user ids from here to 2**31
DEVICES = ("null", "zero", "full", "random", "urandom")
LINKS = {"/tmp": SCRATCH, "/dev/shm": SCRATCH}  # programs and the C library know these names


def interpreter_paths() -> list[str]:
    """Paths of this interpreter, its standard library, its shared libraries and those of the system."""
    libraries = ["/lib", "/lib64", "/usr/lib", "/usr/lib64"]
    base = [os.path.join(sys.base_prefix, name) for name in ("lib", "lib64")]
    standard = [path for path in sys.path if os.path.isdir(path)]
    paths = [path for path in [*libraries, *base, *standard, sys.executable] if os.path.exists(path)]
    return paths + _loaded_elsewhere([os.path.realpath(path) + "/" for path in paths])


def _loaded_elsewhere(folders: list[str]) -> list[str]:
    """Shared libraries that this process has loaded from outside `folders`, by every name in their folder."""
    with open("/proc/self/maps") as maps:
        loaded = {line.split(maxsplit=5)[-1].rstrip() for line in maps if ".so" in line}
    loaded = {path for path in loaded if path.startswith("/") and not path.startswith(tuple(folders))}
    parents = {os.path.dirname(path) for path in loaded}
    siblings = [os.path.join(parent, name) for parent in sorted(parents) for name in os.listdir(parent)]
    return [path for path in siblings if os.path.realpath(path) in loaded]


def package_folders(paths: list[str]) -> list[str]:
    """Folders of installed packages below `paths`, which are no part of the interpreter."""
    names = ("site-packages", "dist-packages")
    versioned = {folder for path in paths for name in names for folder in glob.glob(f"{path}/python*/{name}")}
    return sorted(versioned | {folder for path in paths for name in names for folder in glob.glob(f"{path}/{name}")})


def isolate(visible: list[str], hidden: list[str], proc: int) -> None:
    """Isolate this process; its next child is the first one of a new pid namespace.

    `proc` is a descriptor of /proc, which can't be opened by name afterwards.
    """
    if os.geteuid() == 0:
        syscalls.unshare(syscalls.CLONE_NEWNS)
        _build_root(visible, hidden)
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        _become_own_user()
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)  # else its own /proc/self would belong to root
        _new_namespaces(proc)
    else:
        _new_namespaces(proc)
        _build_root(visible, hidden)
    os.umask(0o077)


def _become_own_user() -> None:
    """Become one of 2**28 users, drawn for this worker; nobody if none of them is mapped (a rootless container)."""
    user = FIRST_USER + int.from_bytes(os.urandom(4)) % (1 << 28)
    try:
        os.setresuid(user, user, user)
    except OSError:
        os.setresuid(NOBODY, NOBODY, NOBODY)


def _new_namespaces(proc: int) -> None:
    """Enter new namespaces, in which this user is called 65534."""
    user, group = os.geteuid(), os.getegid()
    syscalls.unshare(syscalls.NAMESPACES)
    _write_at(proc, "self/setgroups", "deny")
    _write_at(proc, "self/uid_map", f"{NOBODY} {user} 1")
    _write_at(proc, "self/gid_map", f"{NOBODY} {group} 1")
    syscalls.name_machine("sandbox")


def _build_root(visible: list[str], hidden: list[str]) -> None:
    """Replace the root of this mount namespace by one that has only the visible paths."""
    real = [(path, os.path.realpath(path)) for path in dict.fromkeys(visible)]
    syscalls.mount("", "/", flags=syscalls.MS_REC | syscalls.MS_PRIVATE)
    syscalls.mount("tmpfs", "/tmp", "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "size=1m,mode=755")
    os.chdir("/tmp")
    os.mkdir("old")
    syscalls.pivot_root(".", "old")
    os.chdir("/")
    for path in sorted({target for _, target in real}):
        if not os.path.lexists(path):
            _bind(path, syscalls.READ_ONLY | syscalls.NO_SUID | syscalls.NO_DEVICES)
    for path in [os.path.realpath(path) for path in hidden if os.path.isdir(path)]:
        syscalls.mount("tmpfs", path, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "size=4k,mode=555")
        syscalls.restrict_mount(path, syscalls.READ_ONLY)
    for name in DEVICES:
        _bind(f"/dev/{name}", syscalls.READ_ONLY | syscalls.NO_SUID | syscalls.NO_EXEC)
    for path, target in [*real, *LINKS.items()]:
        if path != target and not os.path.lexists(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.symlink(target, path)
    os.mkdir(SCRATCH)
    syscalls.unmount("/old")
    os.rmdir("/old")
    syscalls.restrict_mount("/", syscalls.READ_ONLY)


def _bind(path: str, attributes: int) -> None:
    """Bind `path` of the old root to the same path of the new one."""
    source = "/old" + path
    if stat.S_ISDIR(os.stat(source).st_mode):
        os.makedirs(path)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o444))
    syscalls.mount(source, path, flags=syscalls.MS_BIND | syscalls.MS_REC)
    syscalls.restrict_mount(path, attributes)


def _write_at(folder: int, name: str, text: str) -> None:
    descriptor = os.open(name, os.O_WRONLY, dir_fd=folder)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
