"""The system calls that a sandboxed process may make: a BPF filter that refuses every other.

It is a list of what CPython, its standard library and libc need. Every other call is answered EPERM; a call that is
newer than Linux 5.1 is answered ENOSYS, as an older kernel would, and libc and Python then do without it. So no call
is left by which runs could see each other or the host (watches and leases on files, System V objects, keys,
the state of the page cache, counters of the kernel), use up quotas of a user or of the machine
(aio, epoll, huge pages, the size of pipes), or attack it (bpf, io_uring, ptrace, new namespaces, mounts).

If a call does many things, one argument decides: `_ARGUMENTS`. Some calls are answered with success and have no
effect: those that flush a file, because the scratch folder is memory and no other file can be written; and those that
lock a file, because locks on files that all runs see would be visible to all of them, while a run has its scratch
folder to itself. Processes of one run exclude each other by `multiprocessing.Lock`, not by locks on files.

Standard library only: this runs in the zygote.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Mapping

from flowgrpo.sandbox import syscalls

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_COLUMNS = ("x86_64", "aarch64")
FIRST_SHARED = 424  # from here on (Linux 5.1) all architectures have the same numbers

# Name, number on x86_64, number on aarch64; -1 if there is none.
_ALLOWED = """
read 0 63, write 1 64, open 2 -1, close 3 57, stat 4 -1, fstat 5 80, lstat 6 -1, newfstatat 262 79, poll 7 -1,
ppoll 271 73, select 23 -1, pselect6 270 72, lseek 8 62, pread64 17 67, pwrite64 18 68, readv 19 65, writev 20 66,
preadv 295 69, pwritev 296 70, access 21 -1, faccessat 269 48, faccessat2 439 439, dup 32 23, dup2 33 -1, dup3 292 24,
pipe 22 -1, pipe2 293 59, sendfile 40 71, copy_file_range 326 285, eventfd2 290 19, timerfd_create 283 85,
timerfd_settime 286 86, timerfd_gettime 287 87, getcwd 79 17, chdir 80 49, fchdir 81 50, mkdir 83 -1, mkdirat 258 34,
rmdir 84 -1, rename 82 -1, renameat 264 38, renameat2 316 276, link 86 -1, linkat 265 37, symlink 88 -1,
symlinkat 266 36, unlink 87 -1, unlinkat 263 35, readlink 89 -1, readlinkat 267 78, openat 257 56, mknod 133 -1,
mknodat 259 33, chmod 90 -1, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, chown 92 -1, fchown 93 55, lchown 94 -1,
fchownat 260 54, umask 95 166, utimensat 280 88,
statfs 137 43, fstatfs 138 44, truncate 76 45, ftruncate 77 46, fallocate 285 47, getdents64 217 61,
close_range 436 436, mprotect 10 226,
munmap 11 215, brk 12 214, mremap 25 216, rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139,
rt_sigpending 127 136, rt_sigtimedwait 128 137, rt_sigsuspend 130 133, sigaltstack 131 132, restart_syscall 219 128,
kill 62 129, tkill 200 130, tgkill 234 131, alarm 37 -1, pause 34 -1, getitimer 36 102, setitimer 38 103, fork 57 -1,
vfork 58 -1, execve 59 221, execveat 322 281, exit 60 93, exit_group 231 94, wait4 61 260, waitid 247 95,
set_tid_address 218 96, set_robust_list 273 99, rseq 334 293, arch_prctl 158 -1, getpid 39 172, gettid 186 178,
getppid 110 173, getpgrp 111 -1, getpgid 121 155, setpgid 109 154, getsid 124 156, setsid 112 157, getuid 102 174,
geteuid 107 175, getgid 104 176, getegid 108 177, getresuid 118 148, getresgid 120 150, getgroups 115 158,
getrlimit 97 163, setrlimit 160 164, getrusage 98 165, getpriority 140 141, setpriority 141 140, times 100 153,
uname 63 160, getrandom 318 278, time 201 -1, gettimeofday 96 169, clock_gettime 228 113, clock_getres 229 114,
nanosleep 35 101, clock_nanosleep 230 115, sched_yield 24 124, sched_getaffinity 204 123, sched_getparam 143 121,
sched_getscheduler 145 120, sched_get_priority_max 146 125, sched_get_priority_min 147 126,
sched_rr_get_interval 148 127, connect 42 203, bind 49 200, listen 50 201, accept 43 202, accept4 288 242,
getsockname 51 204, getpeername 52 205, shutdown 48 210
"""
_NO_EFFECT = "flock 73 32, fsync 74 82, fdatasync 75 83, sync 162 81, msync 26 227"  # answered with success
_ABSENT = "preadv2 327 286, pwritev2 328 287, statx 332 291"  # libc has another way
_NO_ATTRIBUTES = (
    "getxattr 191 8, lgetxattr 192 9, fgetxattr 193 10, listxattr 194 11, llistxattr 195 12, flistxattr 196 13"
)
_FILTERED = """
mmap 9 222, madvise 28 233, fcntl 72 25, ioctl 16 29, socket 41 198, socketpair 53 199, getsockopt 55 209,
setsockopt 54 208, clone 56 220, prctl 157 167, prlimit64 302 261, futex 202 98, sendto 44 206, recvfrom 45 207,
sendmsg 46 211, recvmsg 47 212
"""

# BPF: load a word, jump, return; and offsets of the call, the machine and the arguments in `struct seccomp_data`.
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _MACHINE, _FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_REFUSE = _ERROR | errno.EPERM
_SUCCEED = _ERROR | 0
Line = tuple[int, int, int, int]


class Filter(ctypes.Structure):
    """`struct sock_fprog`: a length and a program."""

    _fields_ = (("length", ctypes.c_ushort), ("program", ctypes.c_char_p))


def make_filter() -> Filter:
    """The filter for this machine; `OSError` if its system calls are not listed here."""
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"seccomp: the system calls of {machine} are not listed")
    column = _COLUMNS.index(machine)
    answers = dict.fromkeys(range(FIRST_SHARED), _REFUSE)
    for calls, answer in (
        (_ALLOWED, _ALLOW),
        (_NO_EFFECT, _SUCCEED),
        (_ABSENT, _ERROR | errno.ENOSYS),
        (_NO_ATTRIBUTES, _ERROR | errno.ENOTSUP),
    ):
        answers |= dict.fromkeys(_numbers(calls, column).values(), answer)
    program = [
        (_LOAD, 0, 0, _MACHINE),
        (_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),  # another instruction set has other numbers
        (_LOAD, 0, 0, _NUMBER),
    ]
    for name, number in _numbers(_FILTERED, column).items():
        position, decision = _ARGUMENTS[name]
        body = [(_LOAD, 0, 0, _FIRST_ARGUMENT + 8 * position), *decision]  # the low word: none uses the other
        program += [(_EQUAL, 0, len(body), number), *body]
    program += _decide(answers, _ERROR | errno.ENOSYS)  # the calls of x32 are beyond all of them
    return Filter(len(program), b"".join(struct.pack("=HBBI", *line) for line in program))


def install(program: Filter) -> None:
    """Bind this process and all that it starts to the filter, irrevocably."""
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    syscalls.prctl(syscalls.PR_SET_SECCOMP, 2, ctypes.addressof(program))


def _numbers(calls: str, column: int) -> dict[str, int]:
    """Numbers of the listed calls that this architecture has, by name."""
    rows = [call.split() for call in calls.split(",")]
    return {name: int(numbers[column]) for name, *numbers in rows if int(numbers[column]) >= 0}


def _decide(answers: Mapping[int, int], otherwise: int) -> list[Line]:
    """Program that returns the answer to the loaded word, by binary search over intervals with equal answers."""
    intervals = [(0, answers.get(0, otherwise))]
    for value in sorted({edge for key in answers for edge in (key, key + 1)}):
        answer = answers.get(value, otherwise)
        if answer != intervals[-1][1]:
            intervals.append((value, answer))
    return _halve(intervals)


def _halve(intervals: list[tuple[int, int]]) -> list[Line]:
    if len(intervals) == 1:
        return [(_RETURN, 0, 0, intervals[0][1])]
    middle = len(intervals) // 2
    lower, upper = _halve(intervals[:middle]), _halve(intervals[middle:])
    return [(_AT_LEAST, len(lower), 0, intervals[middle][0]), *lower, *upper]


def _only(*values: int, error: int = errno.EPERM) -> list[Line]:
    return _decide(dict.fromkeys(values, _ALLOW), _ERROR | error)


def _without(bits: int, error: int = errno.EPERM) -> list[Line]:
    return [(_ANY_BIT, 0, 1, bits), (_RETURN, 0, 0, _ERROR | error), (_RETURN, 0, 0, _ALLOW)]


_AF_UNIX = 1
_MAP_HUGETLB = 0x40000  # pages that the host has set aside
_ADVICE = (*range(5), 8, *range(14, 20))  # not to share equal pages (KSM), nor to drop those of files
_CONTROLS = (*range(6), 36, 1030)  # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_GETLK, F_OFD_GETLK, F_DUPFD_CLOEXEC
_LOCK = (6, 7, 37, 38)  # F_SETLK, F_SETLKW, F_OFD_SETLK, F_OFD_SETLKW
_DESCRIPTORS = (0x541B, 0x5421, 0x5450, 0x5451, 0x40049409)  # FIONREAD, FIONBIO, FIONCLEX, FIOCLEX, FICLONE
# Of sockets: no data out of band, filters, cookies (which count sockets of the host) or pidfds.
_OPTIONS = (*range(1, 10), *range(11, 26), 30, 38, 39)
_MSG_OOB = 1
_PROCESS = (1, 2, 3, 4, 15, 16, 23, 38, 39)  # of prctl: signal on the parent's death, dumpable, name, rights
# Of futexes: to wait and to wake, in one process (128) to requeue, too, and by the real-time clock (256). No priority
# is inherited. Those that processes share can't be refused: the semaphores of multiprocessing and pthread_join are
# made of them, and libc aborts if they fail. The package's docstring says what two runs can do with them.
_FUTEXES = (0, 1, 9, 10, 9 | 256, *(128 | operation for operation in (0, 1, 3, 4, 5, 9, 10, 9 | 256)))
# New namespaces; to trace, to be the child of another, and a pidfd, whose number counts processes of the host.
_TRACE, _PARENT, _PIDFD = 0x2000, 0x8000, 0x1000
_FORBIDDEN_CLONES = syscalls.NAMESPACES | syscalls.CLONE_NEWCGROUP | _TRACE | _PARENT | _PIDFD

# Position of the argument that decides, and the decision.
_ARGUMENTS = {
    "mmap": (3, _without(_MAP_HUGETLB)),
    "madvise": (2, _only(*_ADVICE)),
    "fcntl": (1, _decide(dict.fromkeys(_CONTROLS, _ALLOW) | dict.fromkeys(_LOCK, _SUCCEED), _REFUSE)),
    "ioctl": (1, _only(*_DESCRIPTORS, error=errno.ENOTTY)),
    "socket": (0, _only(_AF_UNIX)),
    "socketpair": (0, _only(_AF_UNIX)),
    "getsockopt": (2, _only(*_OPTIONS, error=errno.ENOPROTOOPT)),
    "setsockopt": (2, _only(*_OPTIONS, error=errno.ENOPROTOOPT)),
    "clone": (0, _without(_FORBIDDEN_CLONES)),
    "prctl": (0, _only(*_PROCESS)),
    "prlimit64": (0, _only(0)),  # of itself
    "futex": (1, _only(*_FUTEXES, error=errno.ENOSYS)),
    "sendto": (3, _without(_MSG_OOB, errno.EOPNOTSUPP)),
    "recvfrom": (3, _without(_MSG_OOB, errno.EOPNOTSUPP)),
    "sendmsg": (2, _without(_MSG_OOB, errno.EOPNOTSUPP)),
    "recvmsg": (2, _without(_MSG_OOB, errno.EOPNOTSUPP)),
}
