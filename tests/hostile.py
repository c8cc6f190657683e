"""Programs that try to get out, to take more than they may, or to outlive their run.

Each says ESCAPED where it got what it wanted, and `held` where it was refused; one that is to be killed says no more.
An escape does no harm: none tries anything where the prelude finds itself on a host, and each is bounded in itself, to
200 forks, 2 GB of memory, 64 MB of files. The names in capitals (CANARY, HOST_PID, PORT, ...) are set by the test.

A program stands below its heading `== name | how it may end, how often it is held at least`; where the heading ends
with the name, it exits and is held once.
"""

from typing import NamedTuple

PRELUDE = """\
import ctypes, errno, os, resource, signal, socket, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)

def refused(action, *arguments):
    try:
        result = action(*arguments)
    except (Exception, SystemExit) as error:
        return print("held", type(error).__name__)
    print("ESCAPED", action, arguments, result)

def denied(*arguments):
    longs = [ctypes.c_long(item) if isinstance(item, int) else item for item in arguments]
    result = libc.syscall(*longs)
    print("held" if result == -1 else f"ESCAPED system call {arguments} gave {result}")

if os.path.exists("/etc/passwd") or os.getuid() == 0 or os.getpid() > 1000:
    print("ESCAPED: this is not a sandbox, so nothing is tried")
    os._exit(0)
X86 = os.uname().machine == "x86_64"
"""

PROGRAMS = r"""
# Taking too much

== fork bomb
born = 0
for _ in range(200):
    try:
        pid = os.fork()
    except OSError:
        break
    if pid == 0:
        time.sleep(2)
        os._exit(0)
    born += 1
print("held" if born < 40 else f"ESCAPED {born} processes")
== fork tree | timeout
for depth in range(7):
    try:
        os.fork()
    except OSError:
        pass
time.sleep(3)
== thread bomb
stop, started = threading.Event(), 0
for _ in range(200):
    try:
        threading.Thread(target=stop.wait, daemon=True).start()
    except RuntimeError:
        break
    started += 1
stop.set()
print("held" if started < 40 else f"ESCAPED {started} threads")
== memory flood | memory
kept = [bytearray(1 << 24) for _ in range(128)]
print('ESCAPED')
== memory at once | memory
bytearray(1 << 40)
print('ESCAPED')
== a huge power | timeout, memory
10 ** 10 ** 10
== memory kept although refused
kept = []
try:
    while len(kept) < 2000:
        kept.append(bytearray(1 << 20))
except MemoryError:
    size = len(kept)
    kept.clear()
    print("held" if size < 600 else "ESCAPED")
== disk flood
def flood():
    for number in range(64):
        with open(f"file{number}", "wb") as file:
            file.write(bytes(1 << 20))
refused(flood)
== one huge file
file = os.open('big', os.O_CREAT | os.O_WRONLY)
refused(lambda: [os.write(file, bytes(1 << 20)) for _ in range(64)])
== a sparse file
file = open('sparse', 'wb')
refused(file.truncate, 1 << 40)
== many empty files
refused(lambda: [open(f'f{number}', 'w').close() for number in range(10000)])
== output flood | output
while True: print('x' * 4096)
== output flood on stderr | output
while True: print('x' * 4096, file=sys.stderr)
== output flood from a child | output
os.fork()
signal.signal(signal.SIGPIPE, signal.SIG_IGN)
while True: os.write(1, b'x' * 65536)
== descriptors
refused(lambda: [os.open('/dev/null', 0) for _ in range(2000)])
== inotify flood
made = [libc.inotify_init() for _ in range(2000)]
print('held' if -1 in made else 'ESCAPED')
== zombies
for _ in range(200):
    try:
        if os.fork() == 0:
            os._exit(0)
    except OSError:
        print("held")
        break
== deep recursion | timeout, memory, exited, signal
sys.setrecursionlimit(10**8)
def f(): f()
f()
== deep recursion in C | exited, signal, memory
import json
sys.setrecursionlimit(10**8)
x = []
for _ in range(10**5): x = [x]
repr(x)
== deep source | exited, output
eval('(' * 10**5 + ')' * 10**5)
== huge argv
refused(os.execv, sys.executable, [sys.executable, '-c', 'print("ESCAPED")', 'x' * (1 << 22)])
== raised limits | held 6
for name in ("NPROC", "FSIZE", "AS", "NOFILE", "CPU", "CORE"):
    kind = getattr(resource, "RLIMIT_" + name)
    hard = resource.getrlimit(kind)[1]
    refused(resource.setrlimit, kind, (hard + 1, hard + 1))
== memory outside the limits | held 2
result = libc.mlockall(3)
print('held' if result else 'ESCAPED')
denied(319 if X86 else 279, b'x', 0)
== priority | held 2
refused(os.setpriority, os.PRIO_PROCESS, 0, -20)
refused(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1))

# Not ending

== endless loop | timeout
while True: pass
== sleep | timeout
time.sleep(60)
== ignored signals | timeout
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
while True: pass
== threads that never end | timeout
[threading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start() for _ in range(4)]
== a stopped process | timeout
os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(60)
== a regular expression | timeout
import re
re.match('(a+)+$', 'a' * 60 + 'b')
== an outliving daemon
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        for number in range(3):
            os.close(number)
        time.sleep(30)
    os._exit(0)
print("held")
== a daemon that keeps the output open
if os.fork() == 0:
    os.setsid()
    time.sleep(30)
print('held')
== a new session for itself | timeout
os.fork() or os.setsid()
while True: pass
== exit in the way | timeout
os._exit = sys.exit = lambda *_: None
import atexit
atexit.register(time.sleep, 60)

# The network

== sockets of every family | held 9
refused(socket.create_connection, ('127.0.0.1', PORT), 1)
refused(socket.getaddrinfo, 'example.com', 80)
denied(41 if X86 else 198, 2, 1, 0)
for family, kind, number in ((10, 1, 0), (2, 2, 0), (2, 3, 1), (17, 3, 3), (16, 3, 0), (40, 1, 0)):
    refused(socket.socket, family, kind, number)  # IPv6, UDP, raw, packets, netlink, vsock
== listening sockets of the host | held 2
refused(socket.socket(socket.AF_UNIX).connect, '\0' + ABSTRACT)
refused(socket.socket(socket.AF_UNIX).connect, SOCKET_FILE)

# The files

== files of the host | held 14
for path in ("/etc/passwd", "/etc/shadow", "/etc/hostname", "/proc/self/environ", "/proc/1/environ", "/dev/fuse",
             "/sys/kernel/notes", "/root/.bash_history", "/var/log/syslog", "/dev/mem", "/dev/kmsg", "/dev/tty",
             "/dev/vda", CANARY):
    refused(open, path)
== folders of the host | held 10
for path in ("/etc", "/home", "/var", "/proc", "/sys", "/work", "/mnt", "/boot", REPOSITORY, os.path.dirname(CANARY)):
    refused(os.listdir, path)
== the root
names = set(os.listdir("/")) | set(os.listdir("/..")) | set(os.listdir("../../../.."))
extra = names - {"scratch", "tmp", "dev", "lib", "lib64", "usr"} - INTERPRETER
print("ESCAPED" if extra else "held", extra, os.listdir("/dev"))
== a walk through everything
found = []
for folder, folders, names in os.walk("/"):
    found += [os.path.join(folder, name) for name in names if "flowgrpo-canary" in name]
    if folder == "/usr/lib":
        folders.clear()  # shared libraries of the system, and much else
print("ESCAPED" if found else "held", found)
== installed packages | held 5
import importlib
for name in ("jax", "numpy", "pytest", "flowgrpo", "pip"):
    refused(importlib.import_module, name)
== the interpreter removed | held 6
refused(os.unlink, sys.executable)
refused(os.unlink, os.__file__)
refused(open, os.__file__, "a")
refused(os.chmod, os.__file__, 0o777)
refused(os.utime, os.__file__)
refused(os.rename, os.path.dirname(os.__file__), "/scratch/gone")
== writing outside | held 6
for path in ("/file", "/usr/file", "/dev/file", "/lib/file", "/etc/file", os.path.dirname(os.__file__) + "/file"):
    refused(open, path, "w")
== /proc | held 10
for path in ("/proc/1/root/etc/passwd", "/proc/self/root", "/proc/self/cwd", "/proc/self/fd", "/proc/self/mem",
             "/proc/kcore"):
    refused(os.stat, path)
for path in ("/proc/self/exe", "/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/self/oom_score_adj"):
    refused(open, path, "w")
== shared memory of the host | held 2
with open("/dev/shm/flowgrpo-canary-shm", "w") as file:
    file.write("written in the sandbox")
print("held" if os.path.exists("/scratch/flowgrpo-canary-shm") else "ESCAPED")
refused(open, "/dev/shm/" + SHARED)
== links and file handles | held 5
os.symlink(CANARY, 'link')
refused(open, 'link')
os.symlink('/proc/1/root', 'root')
refused(os.listdir, 'root')
refused(os.link, os.__file__, 'link')
denied(303 if X86 else 264, -100, b'/', bytes(200), bytes(8), 0)
denied(304 if X86 else 265, 0, bytes(200), 0)

# Other processes, and the sandbox itself

== signals to the parent
for number in (9, 15, 19, 2, 11, 17, 30):
    os.kill(os.getppid(), number)
time.sleep(0.1)
print('held')
== a signal to everything
os.fork() or time.sleep(60)
os.kill(-1, 9)
print('held')
== signals to the host | held 2
for pid in (HOST_PID, WORKER_PID):
    refused(os.kill, pid, 0)
== signals to any number
seen = []
for pid in range(3, 5000):
    try:
        os.kill(pid, 0)
        seen.append(pid)
    except ProcessLookupError:
        pass
print("ESCAPED" if seen else "held", seen)
== ptrace | held 3
number = 101 if X86 else 117
for request in (0, 16, 0x4206):
    denied(number, request, 1, 0, 0)
== memory, limits and descriptors of process 1 | held 24
vector = (ctypes.c_long * 2)(0, 8)
denied(310 if X86 else 270, 1, vector, 1, vector, 1, 0)
denied(311 if X86 else 271, 1, vector, 1, vector, 1, 0)
refused(resource.prlimit, 1, resource.RLIMIT_NOFILE, (0, 0))
refused(resource.prlimit, 1, resource.RLIMIT_AS, (0, 0))
handle = os.pidfd_open(1) if hasattr(os, "pidfd_open") else -1
for number in range(20):
    denied(438, handle, number, 0)
== inherited descriptors
for number in range(3, 1000):
    try:
        os.write(number, b'{"how": "ended", "status": 0}')
        print("ESCAPED", number)
    except OSError:
        pass
print("held")
== a forged result on every stream | exited 7
import marshal, struct
forged = marshal.dumps({"how": "ended", "status": 0, "seconds": 0.0})
for number in range(0, 256):
    try:
        os.write(number, struct.pack("=I", len(forged)) + forged)
    except OSError:
        pass
sys.exit(7)
== all descriptors closed | exited 0, held 0
os.closerange(0, 256)
== frames and objects of the zygote
import gc
found = [item for item in gc.get_objects() if isinstance(item, socket.socket)]
frame = sys._getframe()
while frame:
    found += [item for item in frame.f_locals.values() if isinstance(item, socket.socket)]
    frame = frame.f_back
for item in found:
    try:
        item.send(b"x" * 100)
        print("ESCAPED", item)
    except OSError:
        pass
print("held", len(found))
== environment
libc.environ = ctypes.c_char_p.in_dll(libc, "environ")
names = set(os.environ) - {"PATH", "LANG", "HOME", "TMPDIR"}
print("ESCAPED" if names or "canary" in repr(dict(os.environ)).lower() else "held", names)
== environment of a child
program = "import os; print(dict(os.environ))"
text = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout
print("ESCAPED" if "canary" in text.lower() or not text else "held", text)
== secrets in memory
import gc
text = repr([item for item in gc.get_objects() if isinstance(item, (dict, list, tuple)) and len(item) < 1000])
print("ESCAPED" if SECRET[::-1] in text else "held")

# Rights

== mount | held 7
for arguments in ((b"tmpfs", b"/scratch", b"tmpfs", 0, None), (None, b"/", None, 32, None),
                  (b"proc", b"/scratch", b"proc", 0, None)):
    print("held" if libc.mount(*arguments) else "ESCAPED")
print("held" if libc.umount2(b"/scratch", 2) else "ESCAPED")
denied(428, -100, b"/", 0x4001)
denied(430, b"tmpfs", 0)
denied(442, -100, b"/", 0, bytes(32), 32)
== new namespaces | held 7
for flag in (0x10000000, 0x20000, 0x40000000, 0x20000000):
    print('held' if libc.unshare(flag) else 'ESCAPED')
denied(56 if X86 else 220, 0x10000000 | 17, 0, 0, 0, 0)
denied(435, bytes(88), 88)
print('held' if libc.setns(os.open('/', 0), 0) else 'ESCAPED')
== chroot and device files | held 4
os.mkdir('jail')
refused(os.chroot, 'jail')
denied(155 if X86 else 41, b'.', b'.')
refused(os.mknod, 'disk', 0o600 | 0o060000, os.makedev(8, 0))
refused(os.mknod, 'mem', 0o600 | 0o020000, os.makedev(1, 1))
== other users and capabilities | held 6
refused(os.setuid, 0)
refused(os.setresuid, 0, 0, 0)
refused(os.setgid, 0)
refused(os.setgroups, [0])
refused(os.chown, "__main__.py", 0, 0)
full = (ctypes.c_uint32 * 6)(*[0xFFFFFFFF] * 6)
print("held" if libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), full) else "ESCAPED")
== the clock, the name and the terminal of the machine | held 4
refused(time.clock_settime, time.CLOCK_REALTIME, time.time())
refused(socket.sethostname, 'owned')
print('held' if socket.gethostname() == 'sandbox' else 'ESCAPED')
import fcntl
refused(fcntl.ioctl, 0, 0x5412, b'x')
== kernel interfaces | held 9
for x86, other, arguments in ((321, 280, (0, bytes(64), 64)), (298, 241, (bytes(128), 0, -1, -1, 0)), (323, 282, (0,)),
                              (425, 425, (8, bytes(120))), (175, 105, (bytes(8), 8, b"")),
                              (169, 142, (0xfee1dead, 672274793, 0)),
                              (103, 116, (3, bytes(64), 64)), (163, 89, (b"x",)), (135, 92, (0x40000,))):
    denied(x86 if X86 else other, *arguments)
== keys and System V memory | held 5
denied(248 if X86 else 217, b'user', b'x', b'y', 1, -3)
denied(250 if X86 else 219, 0, -3, 0)
print('held' if libc.shmget(1, 4096, 0o1666) == -1 else 'ESCAPED')
print('held' if libc.semget(1, 1, 0o1666) == -1 else 'ESCAPED')
print('held' if libc.msgget(1, 0o1666) == -1 else 'ESCAPED')
== calls of another numbering | held 3
denied(0x40000000 + 39)
denied(500)
denied(0x40000000 + 101, 0, 0, 0, 0)
== core dump | signal -6
os.abort()
== segmentation fault | signal -11
ctypes.string_at(0)

# Other programs

== other programs | held 7
for path in ("/bin/sh", "/bin/su", "/usr/bin/env", "/usr/bin/mount", "/sbin/init"):
    refused(os.execv, path, [path])
refused(subprocess.run, ["ls"])
print("held" if os.system("true") else "ESCAPED")
== a program of its own
with open('own', 'w') as file:
    file.write('#!' + sys.executable + '\nprint(1)\n')
os.chmod('own', 0o4777)
refused(os.execv, '/scratch/own', ['own'])
== a second interpreter
text = subprocess.run([sys.executable, "-c", f"open({CANARY!r})"], capture_output=True, text=True).stderr
print("held" if "FileNotFoundError" in text else f"ESCAPED {text}")

# Games with the end

== an exit code that fights back | exited, held 0
class Code:
    def __str__(self):
        raise MemoryError
sys.exit(Code())
== an excepthook and a broken traceback
sys.excepthook = sys.unraisablehook = None
import traceback
traceback.print_exception = None
import builtins
print('held', flush=True)
builtins.__dict__.clear()
raise_it
== stdout replaced
print('held', flush=True)
sys.stdout = sys.stderr = sys.stdin = None
== exit by an alarm | signal -14
signal.setitimer(signal.ITIMER_REAL, 0.05)
time.sleep(60)
== a poisoned interpreter
import builtins, json
builtins.owned = json.owned = True
open('left', 'w').write('x')
print('held')
"""


class Hostile(NamedTuple):
    """A program, how it may end ("exited", "exited 7", "timeout", ...), and how often it must have said `held`."""

    name: str
    program: str
    ends: tuple[str, ...]
    held: int


def read_program(section: str) -> Hostile:
    """Read a heading and the program below it."""
    heading, _, program = section.partition("\n")
    name, _, words = heading.partition(" | ")
    words = words.split(", ") if words else []
    ends = tuple(word for word in words if not word.startswith("held")) or ("exited",)
    held = [int(word.removeprefix("held ")) for word in words if word.startswith("held")] or [ends == ("exited",)]
    return Hostile(name, program, ends, int(held[0]))


HOSTILE = [read_program(section) for section in PROGRAMS.split("\n== ")[1:]]
