"""The system call filter, by a small interpreter of its program, on both architectures."""

import ctypes
import os
import struct
from errno import ENOPROTOOPT, ENOSYS, ENOTSUP, ENOTTY, EOPNOTSUPP, EPERM
from types import SimpleNamespace

import pytest

from flowgrpo.sandbox import seccomp, syscalls

ALLOWED, KILLED = "allowed", "killed"
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def interpret(code, data):
    """Run a BPF program (code, jump if true, jump if false, value) as the kernel does."""
    position, word = 0, 0
    while True:
        kind, yes, no, value = code[position]
        if kind == 0x20:
            (word,) = struct.unpack_from("=I", data, value)
            position += 1
        elif kind == 0x06:
            return {0x7FFF0000: ALLOWED, 0x80000000: KILLED}.get(value, value & 0xFFFF)
        else:
            holds = {0x15: word == value, 0x35: word >= value, 0x45: bool(word & value)}[kind]
            position += 1 + (yes if holds else no)


# Calls that leave the sandbox, reveal others, or use the host's resources; numbers on x86_64 and on aarch64.
REFUSED = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
    "setns": (308, 268), "reboot": (169, 142), "sethostname": (170, 161), "init_module": (175, 105), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "keyctl": (250, 219), "add_key": (248, 217),
    "open_by_handle_at": (304, 265), "clock_settime": (227, 112), "adjtimex": (159, 171), "syslog": (103, 116),
    "inotify_init1": (294, 26), "inotify_add_watch": (254, 27), "fanotify_init": (300, 262), "io_setup": (206, 0),
    "io_submit": (209, 2), "epoll_create1": (291, 20), "memfd_create": (319, 279), "shmget": (29, 194),
    "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180), "mincore": (27, 232), "fadvise64": (221, 223),
    "readahead": (187, 213), "sysinfo": (99, 179), "timer_create": (222, 107), "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119), "membarrier": (324, 283), "personality": (135, 92), "seccomp": (317, 277),
    "vmsplice": (278, 75), "setxattr": (188, 5), "syncfs": (306, 267), "setuid": (105, 146), "mlock": (149, 228),
}  # fmt: skip
ORDINARY = ((0, 63), (59, 221), (231, 94), (257, 56), (436, 436))  # read, execve, exit_group, openat
SUCCEEDS = ((73, 32), (74, 82), (75, 83), (162, 81), (26, 227))  # flock, fsync, fdatasync, sync, msync
ABSENT = (327, 286), (328, 287), (332, 291)  # preadv2, pwritev2, statx
RECENT = (*range(424, 436), 437, 438, *range(440, 452), *range(453, 600), 0x40000000, 0x40000000 + 39, 0xFFFFFFFF)

# Call: position of the argument, its allowed values, its refused values, and the error.
FILTERED = {
    (41, 198): (0, [1], [0, 2, 10, 16, 17, 38, 40], EPERM),  # socket: AF_UNIX
    (53, 199): (0, [1], [0, 2, 16], EPERM),
    (56, 220): (0, [0x1200011, 0x3D0F00], [17 | 1 << bit for bit in (12, 13, 15, 17, *range(25, 31))], EPERM),  # clone
    (302, 261): (0, [0], [1, 2], EPERM),  # prlimit64: of itself
    (9, 222): (3, [0x22, 0x2, 0x1], [0x40022, 0x84040022], EPERM),  # mmap: MAP_HUGETLB
    (28, 233): (2, [0, 4, 8], [9, 12, 20, 21, 100], EPERM),  # madvise: MADV_MERGEABLE, MADV_PAGEOUT
    (72, 25): (
        1,
        [0, 1, 2, 3, 4, 5, 36, 1030],
        [8, 10, 1024, 1025, 1026, 1031, 1032, 1033, 0xFFFFFFFF],
        EPERM,
    ),  # fcntl
    (16, 29): (1, [0x541B, 0x5421], [0x5401, 0x5412, 0x80045200, 0x5760], ENOTTY),  # ioctl
    (55, 209): (2, [3, 4, 17, 38], [0, 10, 26, 31, 57, 71, 76, 77], ENOPROTOOPT),  # getsockopt
    (202, 98): (1, [0, 1, 9, 265, 128, 129, 131, 133, 393], [2, 3, 4, 5, 6, 11, 12, 13, 134, 139, 141, 256], ENOSYS),
    (44, 206): (3, [0, 2, 0x4040], [1, 0x41], EOPNOTSUPP),  # sendto, recvfrom, sendmsg, recvmsg: MSG_OOB
    (45, 207): (3, [0, 2, 0x100], [1, 3], EOPNOTSUPP),
    (46, 211): (2, [0, 0x4000], [1, 0x4001], EOPNOTSUPP),
    (47, 212): (2, [0, 0x40000000], [1, 0x40000001], EOPNOTSUPP),
    (157, 167): (0, [1, 15, 38], [22, 28, 35, 67, 0x53564D41], EPERM),  # prctl
}


@pytest.mark.parametrize("machine", MACHINES)
def test_the_filter_allows_what_python_needs_and_refuses_everything_else(machine, monkeypatch):
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine=machine))
    filter_ = seccomp.make_filter()
    address = ctypes.cast(ctypes.addressof(filter_) + seccomp.Filter.program.offset, ctypes.POINTER(ctypes.c_void_p))[0]
    code = list(struct.iter_unpack("=HBBI", ctypes.string_at(address, 8 * filter_.length)))
    column = list(MACHINES).index(machine)

    def answer(call, position=0, value=0, architecture=MACHINES[machine]):
        number = call if isinstance(call, int) else call[column]
        return interpret(
            code, struct.pack("=IIQ6Q", number, architecture, 0, *[value if i == position else 0 for i in range(6)])
        )

    assert {name: answer(numbers) for name, numbers in REFUSED.items()} == dict.fromkeys(REFUSED, EPERM)
    assert {answer(numbers) for numbers in ORDINARY} == {ALLOWED}
    assert {answer(numbers) for numbers in SUCCEEDS} == {0}
    assert {answer(numbers) for numbers in ABSENT} == {answer(number) for number in RECENT} == {ENOSYS}
    assert answer((191, 8)) == ENOTSUP  # getxattr
    for call, (position, allowed, refused, error) in FILTERED.items():
        assert {answer(call, position, value) for value in allowed} == {ALLOWED}, call
        assert {answer(call, position, value) for value in refused} == {error}, call
        assert answer(call, position, allowed[0] + (1 << 40)) == ALLOWED, "these arguments have 32 bits"
    assert {answer((72, 25), 1, command) for command in (6, 7, 37, 38)} == {0}  # locks
    answers = [answer(number) for number in range(1000)]
    assert answers.count(ALLOWED) < 200
    assert answer(0, architecture=0x40000003) == KILLED  # calls of 32 bits have other numbers


def test_an_unknown_machine_has_no_filter_and_a_refused_call_is_named(monkeypatch):
    with pytest.raises(OSError, match="setns"):
        syscalls.enter(-1)
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine="riscv64"))
    with pytest.raises(OSError, match="riscv64"):
        seccomp.make_filter()
