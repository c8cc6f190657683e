"""Linux system calls that the sandbox needs, most of which Python has no name for, through libc.

Every function but `request_short_slices` raises `OSError`, with the name of the call, if the kernel refuses.
Standard library only: this runs in the zygote, which never imports the rest of the package.
"""

import contextlib
import ctypes
import functools
import os
import struct

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
CLONE_NEWCGROUP = 0x2000000
NAMESPACES = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET

MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2
READ_ONLY, NO_SUID, NO_DEVICES, NO_EXEC = 1, 2, 4, 8  # of mount_setattr

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_SYS_ADMIN = 47, 2, 21

# Calls that libc has no wrapper for. The second number is that of every architecture but x86.
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
MOUNT_SETATTR = 442

_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_RESET_ON_FORK = 1
_CAPABILITIES_3 = 0x20080522


def unshare(flags: int) -> None:
    """Leave the namespaces of `flags` for new ones; a new pid namespace starts with the next child."""
    _check("unshare", _libc().unshare(flags))


def enter(namespace: int) -> None:
    """Enter the namespace of a descriptor; for a pid namespace, with the next child."""
    _check("setns", _libc().setns(namespace, 0))


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Mount `source` at `target`."""
    arguments = [os.fsencode(text) or None for text in (source, target, kind)]
    _check(f"mount at {target}", _libc().mount(*arguments, ctypes.c_ulong(flags), os.fsencode(options) or None))


def unmount(target: str) -> None:
    """Detach the mount at `target` and all below it, even while it is in use."""
    _check(f"umount of {target}", _libc().umount2(os.fsencode(target), MNT_DETACH))


def pivot_root(new: str, old: str) -> None:
    """Make the mount at `new` the root of this mount namespace; the former one appears at `old`."""
    _syscall("pivot_root", PIVOT_ROOT[os.uname().machine], os.fsencode(new), os.fsencode(old))


def restrict_mount(target: str, attributes: int) -> None:
    """Add attributes to the mount at `target` and all below it; none is ever removed (Linux 5.12 or newer)."""
    attr = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    _syscall("mount_setattr", MOUNT_SETATTR, _AT_FDCWD, os.fsencode(target), _AT_RECURSIVE, attr, 32)


def name_machine(name: str) -> None:
    """Set the host name and the domain name (NIS) of this uts namespace."""
    _check("sethostname", _libc().sethostname(name.encode(), len(name)))
    _check("setdomainname", _libc().setdomainname(name.encode(), len(name)))


def prctl(option: int, value, extra=0) -> None:
    """Change a property of this process; `value` is a number or a structure."""
    numbers = [item if not isinstance(item, int) else ctypes.c_ulong(item) for item in (value, extra, 0, 0)]
    _check(f"prctl {option}", _libc().prctl(option, *numbers))


def request_short_slices() -> None:
    """Request short time slices, so that this process runs soon after it wakes; children don't inherit that."""
    with contextlib.suppress(OSError):  # an older kernel can't, or schedules in another way
        attr = struct.pack("=IIQiIQQQ", 48, 0, _RESET_ON_FORK, os.getpriority(os.PRIO_PROCESS, 0), 0, 100_000, 0, 0)
        _syscall("sched_setattr", SCHED_SETATTR[os.uname().machine], 0, attr, 0)


def keep_sys_admin() -> None:
    """Keep CAP_SYS_ADMIN of this user namespace, and no other capability, when another program is executed."""
    sys_admin_only = struct.pack("=6I", *[1 << CAP_SYS_ADMIN] * 3, 0, 0, 0)  # effective, permitted and inheritable
    _check("capset", _libc().capset(struct.pack("=II", _CAPABILITIES_3, 0), sys_admin_only))
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_SYS_ADMIN)


def drop_capabilities() -> None:
    """Give up every capability of this process, irrevocably once no_new_privs is set."""
    _check("capset", _libc().capset(struct.pack("=II", _CAPABILITIES_3, 0), bytes(24)))


def preload_symbols() -> None:
    """Resolve the libc functions that every run calls, once for all of them."""
    for name in ("capset", "prctl", "mount", "unshare", "setns", "syscall"):
        getattr(_libc(), name)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _syscall(name: str, number: int, *arguments) -> None:
    longs = [ctypes.c_long(item) if isinstance(item, int) else item for item in arguments]
    _check(name, _libc().syscall(ctypes.c_long(number), *longs))


def _check(name: str, result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
