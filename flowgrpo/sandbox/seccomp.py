"""The system calls that a sandboxed process may not make: a BPF filter that answers them with EPERM.

It is a list of what is denied, so it is the second wall, not the first: namespaces, the private root and the loss of
all capabilities hold without it. It takes away what would attack the kernel (bpf, io_uring, perf, userfaultfd,
keyrings, new namespaces, mounts), other processes (ptrace, process_vm_*, limits of another process), the clock, sockets
of any family but AF_UNIX, and memory that no limit counts (memfd, System V objects, message queues). A call that is
newer than those known here is answered ENOSYS, as an older kernel would, and so is clone3, whose flags a filter can't
read: libc then takes clone.

Standard library only: this runs in the zygote.
"""

import ctypes
import errno
import os
import struct

from flowgrpo.sandbox import syscalls

# Numbers that every architecture shares.
_SHARED = {
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "pidfd_getfd": 438,
    "process_madvise": 440,
    "mount_setattr": 442,
    "quotactl_fd": 443,
    "memfd_secret": 447,
}
CLONE3 = 435
FIRST_UNKNOWN = 457  # statmount, of Linux 6.8: what comes from here on is not known to this filter

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_COLUMNS = ("x86_64", "aarch64")

# name: (x86_64, aarch64); -1 where there is none.
_DENIED = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "iopl": (172, -1),
    "ioperm": (173, -1),
    "modify_ldt": (154, -1),
    "init_module": (175, 105),
    "delete_module": (176, 106),
    "finit_module": (313, 273),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "unshare": (272, 97),
    "setns": (308, 268),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "quotactl": (179, 60),
    "acct": (163, 89),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "lookup_dcookie": (212, 18),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    "personality": (135, 92),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "memfd_create": (319, 279),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
}
_SOCKETS = {"socket": (41, 198), "socketpair": (53, 199)}  # all families but AF_UNIX
_CLONE = (56, 220)  # with new namespaces
_PRLIMIT = (302, 261)  # of another process

_AF_UNIX = 1
_NEW_NAMESPACES = (
    syscalls.CLONE_NEWNS
    | syscalls.CLONE_NEWCGROUP
    | syscalls.CLONE_NEWUTS
    | syscalls.CLONE_NEWIPC
    | syscalls.CLONE_NEWUSER
    | syscalls.CLONE_NEWPID
    | syscalls.CLONE_NEWNET
)

# BPF: load a word, jump, return; and where `struct seccomp_data` keeps the call, the machine and the first argument.
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _MACHINE, _FIRST_LOW = 0, 4, 16
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000


class Filter(ctypes.Structure):
    """`struct sock_fprog`: a length and a program."""

    _fields_ = (("length", ctypes.c_ushort), ("program", ctypes.c_char_p))


def make_filter() -> Filter:
    """The filter for this machine; `OSError` where its system calls are not known here."""
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"seccomp: the system calls of {machine} are not listed")
    column = _COLUMNS.index(machine)
    program = [
        (_LOAD, 0, 0, _MACHINE),
        (_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),  # another instruction set has other numbers
        (_LOAD, 0, 0, _NUMBER),
        *_when(_AT_LEAST, FIRST_UNKNOWN, errno.ENOSYS),  # the calls of x32 lie beyond, too
        *_when(_EQUAL, CLONE3, errno.ENOSYS),
    ]
    denied = [numbers[column] for numbers in _DENIED.values()] + list(_SHARED.values())
    for number in sorted(denied):
        if number >= 0:
            program += _when(_EQUAL, number, errno.EPERM)
    for name in _SOCKETS:
        program += _argument(_SOCKETS[name][column], [(_EQUAL, 1, 0, _AF_UNIX), (_RETURN, 0, 0, _ERROR | errno.EPERM)])
    program += _argument(_CLONE[column], _when(_ANY_BIT, _NEW_NAMESPACES, errno.EPERM))
    other = [(_EQUAL, 1, 0, 0), (_RETURN, 0, 0, _ERROR | errno.EPERM)]
    program += _argument(_PRLIMIT[column], other)
    program.append((_RETURN, 0, 0, _ALLOW))
    return Filter(len(program), b"".join(struct.pack("=HBBI", *line) for line in program))


def install(program: Filter) -> None:
    """Bind this process and all that it starts to the filter, for good."""
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    syscalls.prctl(syscalls.PR_SET_SECCOMP, 2, ctypes.addressof(program))


def _when(test: int, value: int, error: int) -> list[tuple[int, int, int, int]]:
    """Answer `error` where the loaded word passes the test."""
    return [(test, 0, 1, value), (_RETURN, 0, 0, _ERROR | error)]


def _argument(number: int, lines: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
    """Of the call `number`, look at the low word of the first argument; what passes `lines` is allowed."""
    body = [(_LOAD, 0, 0, _FIRST_LOW), *lines, (_RETURN, 0, 0, _ALLOW)]
    return [(_EQUAL, 0, len(body), number), *body]
