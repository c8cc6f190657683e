"""Programs that try to get out, to take more than they may, or to outlive their run.

Each says ESCAPED where it got what it wanted, and `held` where it was refused; one that is to be killed says no more.
An escape does no harm: none tries anything where the prelude finds itself on a host, and each is bounded in itself, to
200 forks, 2 GB of memory, 64 MB of files. The names in capitals (CANARY, HOST_PID, PORT, ...) are set by the test.
"""

from typing import NamedTuple

PRELUDE = """
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


class Hostile(NamedTuple):
    """A program, how it may end, and what it must have said by then."""

    name: str
    program: str
    ended: tuple[str, ...] = ("exited",)
    says: str = "held"
    held: int = 1  # how often, at least


ANY_END = ("exited", "signal", "memory", "timeout", "output")

HOSTILE = [
    # Taking too much
    Hostile(
        "fork bomb",
        """
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
""",
    ),
    Hostile(
        "fork tree",
        """
for depth in range(7):
    try:
        os.fork()
    except OSError:
        pass
time.sleep(3)
""",
        ("timeout",),
        "",
        0,
    ),
    Hostile(
        "thread bomb",
        """
stop, started = threading.Event(), 0
for _ in range(200):
    try:
        threading.Thread(target=stop.wait, daemon=True).start()
    except RuntimeError:
        break
    started += 1
stop.set()
print("held" if started < 40 else f"ESCAPED {started} threads")
""",
    ),
    Hostile("memory flood", "kept = [bytearray(1 << 24) for _ in range(128)]\nprint('ESCAPED')", ("memory",), "", 0),
    Hostile("memory at once", "bytearray(1 << 40)\nprint('ESCAPED')", ("memory",), "", 0),
    Hostile("a huge power", "10 ** 10 ** 10", ("timeout", "memory"), "", 0),
    Hostile(
        "memory kept although refused",
        """
kept = []
try:
    while len(kept) < 2000:
        kept.append(bytearray(1 << 20))
except MemoryError:
    size = len(kept)
    kept.clear()
    print("held" if size < 600 else "ESCAPED")
""",
    ),
    Hostile(
        "disk flood",
        """
def flood():
    for number in range(64):
        with open(f"file{number}", "wb") as file:
            file.write(bytes(1 << 20))
refused(flood)
""",
    ),
    Hostile(
        "one huge file",
        "file = os.open('big', os.O_CREAT | os.O_WRONLY)\n"
        "refused(lambda: [os.write(file, bytes(1 << 20)) for _ in range(64)])",
    ),
    Hostile("a sparse file", "file = open('sparse', 'wb')\nrefused(file.truncate, 1 << 40)"),
    Hostile("many empty files", "refused(lambda: [open(f'f{number}', 'w').close() for number in range(10000)])"),
    Hostile("output flood", "while True: print('x' * 4096)", ("output",), "x", 0),
    Hostile("output flood on stderr", "while True: print('x' * 4096, file=sys.stderr)", ("output",), "", 0),
    Hostile(
        "output flood from a child",
        "os.fork()\nsignal.signal(signal.SIGPIPE, signal.SIG_IGN)\nwhile True: os.write(1, b'x' * 65536)",
        ("output",),
        "x",
        0,
    ),
    Hostile("descriptors", "refused(lambda: [os.open('/dev/null', 0) for _ in range(2000)])"),
    Hostile(
        "inotify flood",
        "made = [libc.inotify_init() for _ in range(2000)]\nprint('held' if -1 in made else 'ESCAPED')",
    ),
    Hostile(
        "zombies",
        """
for _ in range(200):
    try:
        if os.fork() == 0:
            os._exit(0)
    except OSError:
        print("held")
        break
""",
    ),
    Hostile("deep recursion", "sys.setrecursionlimit(10**8)\ndef f(): f()\nf()", ANY_END, "", 0),
    Hostile(
        "deep recursion in C",
        "import json\nsys.setrecursionlimit(10**8)\nx = []\nfor _ in range(10**6): x = [x]\nrepr(x)",
        ANY_END,
        "",
        0,
    ),
    Hostile("deep source", "eval('(' * 10**5 + ')' * 10**5)", ANY_END, "", 0),
    Hostile(
        "huge argv", "refused(os.execv, sys.executable, [sys.executable, '-c', 'print(\"ESCAPED\")', 'x' * (1 << 22)])"
    ),
    Hostile(
        "raised limits",
        """
for name in ("NPROC", "FSIZE", "AS", "NOFILE", "CPU", "CORE"):
    kind = getattr(resource, "RLIMIT_" + name)
    hard = resource.getrlimit(kind)[1]
    refused(resource.setrlimit, kind, (hard + 1, hard + 1))
""",
        held=6,
    ),
    Hostile("locked memory", "result = libc.mlockall(3)\nprint('held' if result else 'ESCAPED')"),
    Hostile("memory outside the limits", "denied(319 if X86 else 279, b'x', 0)"),
    Hostile(
        "priority",
        "refused(os.setpriority, os.PRIO_PROCESS, 0, -20)\n"
        "refused(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1))",
        held=2,
    ),
    # Not ending
    Hostile("endless loop", "while True: pass", ("timeout",), "", 0),
    Hostile("sleep", "time.sleep(60)", ("timeout",), "", 0),
    Hostile(
        "ignored signals",
        """
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
while True: pass
""",
        ("timeout",),
        "",
        0,
    ),
    Hostile(
        "threads that never end",
        "[threading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start() for _ in range(4)]",
        ("timeout",),
        "",
        0,
    ),
    Hostile("a stopped process", "os.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(60)", ("timeout",), "", 0),
    Hostile("a regular expression", "import re\nre.match('(a+)+$', 'a' * 60 + 'b')", ("timeout",), "", 0),
    Hostile(
        "an outliving daemon",
        """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        for number in range(3):
            os.close(number)
        time.sleep(30)
    os._exit(0)
print("held")
""",
    ),
    Hostile(
        "a daemon that keeps the output open", "if os.fork() == 0:\n    os.setsid()\n    time.sleep(30)\nprint('held')"
    ),
    Hostile("a new session for itself", "os.fork() or os.setsid()\nwhile True: pass", ("timeout",), "", 0),
    Hostile(
        "exit in the way",
        "os._exit = sys.exit = lambda *_: None\nimport atexit\natexit.register(time.sleep, 60)",
        ("timeout",),
        "",
        0,
    ),
    # The network
    Hostile("tcp", "refused(socket.create_connection, ('127.0.0.1', PORT), 1)"),
    Hostile("tcp by number", "denied(41 if X86 else 198, 2, 1, 0)"),
    Hostile("tcp over ipv6", "refused(socket.socket, socket.AF_INET6)"),
    Hostile("udp", "refused(socket.socket, socket.AF_INET, socket.SOCK_DGRAM)"),
    Hostile("dns", "refused(socket.getaddrinfo, 'example.com', 80)"),
    Hostile("raw socket", "refused(socket.socket, socket.AF_INET, socket.SOCK_RAW, 1)"),
    Hostile("packet socket", "refused(socket.socket, 17, socket.SOCK_RAW, 3)"),
    Hostile("netlink", "refused(socket.socket, 16, socket.SOCK_RAW, 0)"),
    Hostile("vsock", "refused(socket.socket, 40, socket.SOCK_STREAM)"),
    Hostile(
        "a listening abstract socket of the host", "refused(socket.socket(socket.AF_UNIX).connect, '\\0' + ABSTRACT)"
    ),
    Hostile("a listening socket file of the host", "refused(socket.socket(socket.AF_UNIX).connect, SOCKET_FILE)"),
    # The files
    Hostile(
        "files of the host",
        """
for path in ("/etc/passwd", "/etc/shadow", "/etc/hostname", "/proc/self/environ", "/proc/1/environ", "/dev/fuse",
             "/sys/kernel/notes", "/root/.bash_history", "/var/log/syslog", "/dev/mem", "/dev/kmsg", "/dev/tty",
             "/dev/vda", CANARY):
    refused(open, path)
""",
        held=14,
    ),
    Hostile(
        "folders of the host",
        """
for path in ("/etc", "/home", "/var", "/proc", "/sys", "/work", "/mnt", "/boot", REPOSITORY, os.path.dirname(CANARY)):
    refused(os.listdir, path)
""",
        held=10,
    ),
    Hostile(
        "the root",
        """
names = set(os.listdir("/")) | set(os.listdir("/..")) | set(os.listdir("../../../.."))
extra = names - {"scratch", "tmp", "dev", "lib", "lib64", "usr"} - INTERPRETER
print("ESCAPED" if extra else "held", extra, os.listdir("/dev"))
""",
    ),
    Hostile(
        "a walk through everything",
        """
found = []
for folder, folders, names in os.walk("/"):
    found += [os.path.join(folder, name) for name in names if "flowgrpo-canary" in name]
    if folder == "/usr/lib":
        folders.clear()  # shared libraries of the system, and much else
print("ESCAPED" if found else "held", found)
""",
    ),
    Hostile(
        "installed packages",
        """
import importlib
for name in ("jax", "numpy", "pytest", "flowgrpo", "pip"):
    refused(importlib.import_module, name)
""",
        held=5,
    ),
    Hostile(
        "symbolic link",
        "os.symlink(CANARY, 'link')\nrefused(open, 'link')\n"
        "os.symlink('/proc/1/root', 'root')\nrefused(os.listdir, 'root')",
        held=2,
    ),
    Hostile("hard link", "refused(os.link, os.__file__, 'link')"),
    Hostile(
        "the interpreter removed",
        """
refused(os.unlink, sys.executable)
refused(os.unlink, os.__file__)
refused(open, os.__file__, "a")
refused(os.chmod, os.__file__, 0o777)
refused(os.utime, os.__file__)
refused(os.rename, os.path.dirname(os.__file__), "/scratch/gone")
""",
        held=6,
    ),
    Hostile(
        "writing outside",
        """
for path in ("/file", "/usr/file", "/dev/file", "/lib/file", "/etc/file", os.path.dirname(os.__file__) + "/file"):
    refused(open, path, "w")
""",
        held=6,
    ),
    Hostile(
        "/proc",
        """
for path in ("/proc/1/root/etc/passwd", "/proc/self/root", "/proc/self/cwd", "/proc/self/fd", "/proc/self/mem",
             "/proc/kcore"):
    refused(os.stat, path)
for path in ("/proc/self/exe", "/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/self/oom_score_adj"):
    refused(open, path, "w")
""",
        held=10,
    ),
    Hostile(
        "shared memory of the host",
        """
with open("/dev/shm/flowgrpo-canary-shm", "w") as file:
    file.write("written in the sandbox")
print("held" if os.path.exists("/scratch/flowgrpo-canary-shm") else "ESCAPED")
refused(open, "/dev/shm/" + SHARED)
""",
        held=2,
    ),
    Hostile(
        "file handles",
        "denied(303 if X86 else 264, -100, b'/', bytes(200), bytes(8), 0)\n"
        "denied(304 if X86 else 265, 0, bytes(200), 0)",
        held=2,
    ),
    # Other processes, and the sandbox itself
    Hostile(
        "signals to the parent",
        "for number in (9, 15, 19, 2, 11, 17, 30):\n    os.kill(os.getppid(), number)\ntime.sleep(0.1)\nprint('held')",
    ),
    Hostile("a signal to everything", "os.fork() or time.sleep(60)\nos.kill(-1, 9)\nprint('held')"),
    Hostile("signals to the host", "for pid in (HOST_PID, WORKER_PID):\n    refused(os.kill, pid, 0)", held=2),
    Hostile(
        "signals to any number",
        """
seen = []
for pid in range(3, 5000):
    try:
        os.kill(pid, 0)
        seen.append(pid)
    except ProcessLookupError:
        pass
print("ESCAPED" if seen else "held", seen)
""",
    ),
    Hostile(
        "ptrace",
        "number = 101 if X86 else 117\nfor request in (0, 16, 0x4206):\n    denied(number, request, 1, 0, 0)",
        held=3,
    ),
    Hostile(
        "memory of process 1",
        """
vector = (ctypes.c_long * 2)(0, 8)
denied(310 if X86 else 270, 1, vector, 1, vector, 1, 0)
denied(311 if X86 else 271, 1, vector, 1, vector, 1, 0)
""",
        held=2,
    ),
    Hostile(
        "limits of process 1",
        "refused(resource.prlimit, 1, resource.RLIMIT_NOFILE, (0, 0))\n"
        "refused(resource.prlimit, 1, resource.RLIMIT_AS, (0, 0))",
        held=2,
    ),
    Hostile(
        "descriptors of process 1",
        """
handle = os.pidfd_open(1) if hasattr(os, "pidfd_open") else -1
for number in range(20):
    denied(438, handle, number, 0)
""",
        held=20,
    ),
    Hostile(
        "inherited descriptors",
        """
for number in range(3, 1000):
    try:
        os.write(number, b'{"how": "ended", "status": 0}')
        print("ESCAPED", number)
    except OSError:
        pass
print("held")
""",
    ),
    Hostile(
        "a forged result on every stream",
        """
import marshal, struct
forged = marshal.dumps({"how": "ended", "status": 0, "seconds": 0.0})
for number in range(0, 256):
    try:
        os.write(number, struct.pack("=I", len(forged)) + forged)
    except OSError:
        pass
sys.exit(7)
""",
        says="ended",
        held=0,
    ),
    Hostile("all descriptors closed", "os.closerange(0, 256)", says="", held=0),
    Hostile(
        "frames and objects of the zygote",
        """
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
""",
    ),
    Hostile(
        "environment",
        """
libc.environ = ctypes.c_char_p.in_dll(libc, "environ")
names = set(os.environ) - {"PATH", "LANG", "HOME", "TMPDIR"}
print("ESCAPED" if names or "canary" in repr(dict(os.environ)).lower() else "held", names)
""",
    ),
    Hostile(
        "environment of a child",
        """
program = "import os; print(dict(os.environ))"
text = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout
print("ESCAPED" if "canary" in text.lower() or not text else "held", text)
""",
    ),
    Hostile(
        "secrets in memory",
        """
import gc
text = repr([item for item in gc.get_objects() if isinstance(item, (dict, list, tuple)) and len(item) < 1000])
print("ESCAPED" if SECRET[::-1] in text else "held")
""",
    ),
    # Rights
    Hostile(
        "mount",
        """
for arguments in ((b"tmpfs", b"/scratch", b"tmpfs", 0, None), (None, b"/", None, 32, None),
                  (b"proc", b"/scratch", b"proc", 0, None)):
    print("held" if libc.mount(*arguments) else "ESCAPED")
print("held" if libc.umount2(b"/scratch", 2) else "ESCAPED")
denied(428, -100, b"/", 0x4001)
denied(430, b"tmpfs", 0)
denied(442, -100, b"/", 0, bytes(32), 32)
""",
        held=7,
    ),
    Hostile(
        "unshare",
        "for flag in (0x10000000, 0x20000, 0x40000000, 0x20000000):\n"
        "    print('held' if libc.unshare(flag) else 'ESCAPED')",
        held=4,
    ),
    Hostile(
        "clone with namespaces",
        "denied(56 if X86 else 220, 0x10000000 | 17, 0, 0, 0, 0)\ndenied(435, bytes(88), 88)",
        held=2,
    ),
    Hostile("setns", "print('held' if libc.setns(os.open('/', 0), 0) else 'ESCAPED')"),
    Hostile("chroot", "os.mkdir('jail')\nrefused(os.chroot, 'jail')\ndenied(155 if X86 else 41, b'.', b'.')", held=2),
    Hostile(
        "device files",
        "refused(os.mknod, 'disk', 0o600 | 0o060000, os.makedev(8, 0))\n"
        "refused(os.mknod, 'mem', 0o600 | 0o020000, os.makedev(1, 1))",
        held=2,
    ),
    Hostile(
        "other users",
        """
refused(os.setuid, 0)
refused(os.setresuid, 0, 0, 0)
refused(os.setgid, 0)
refused(os.setgroups, [0])
refused(os.chown, "__main__.py", 0, 0)
""",
        held=5,
    ),
    Hostile(
        "capabilities",
        """
full = (ctypes.c_uint32 * 6)(*[0xFFFFFFFF] * 6)
print("held" if libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), full) else "ESCAPED")
""",
    ),
    Hostile("the clock", "refused(time.clock_settime, time.CLOCK_REALTIME, time.time())"),
    Hostile(
        "the name of the machine",
        "refused(socket.sethostname, 'owned')\nprint('held' if socket.gethostname() == 'sandbox' else 'ESCAPED')",
        held=2,
    ),
    Hostile(
        "kernel interfaces",
        """
for x86, other, arguments in ((321, 280, (0, bytes(64), 64)), (298, 241, (bytes(128), 0, -1, -1, 0)), (323, 282, (0,)),
                              (425, 425, (8, bytes(120))), (175, 105, (bytes(8), 8, b"")),
                              (169, 142, (0xfee1dead, 672274793, 0)),
                              (103, 116, (3, bytes(64), 64)), (163, 89, (b"x",)), (135, 92, (0x40000,))):
    denied(x86 if X86 else other, *arguments)
""",
        held=9,
    ),
    Hostile(
        "keys", "denied(248 if X86 else 217, b'user', b'x', b'y', 1, -3)\ndenied(250 if X86 else 219, 0, -3, 0)", held=2
    ),
    Hostile(
        "system v shared memory",
        "print('held' if libc.shmget(1, 4096, 0o1666) == -1 else 'ESCAPED')\n"
        "print('held' if libc.semget(1, 1, 0o1666) == -1 else 'ESCAPED')\n"
        "print('held' if libc.msgget(1, 0o1666) == -1 else 'ESCAPED')",
        held=3,
    ),
    Hostile(
        "calls of another numbering",
        "denied(0x40000000 + 39)\ndenied(500)\ndenied(0x40000000 + 101, 0, 0, 0, 0)",
        held=3,
    ),
    Hostile("a terminal", "import fcntl\nrefused(fcntl.ioctl, 0, 0x5412, b'x')"),
    Hostile("core dump", "os.abort()", ("signal",), "", 0),
    Hostile("segmentation fault", "ctypes.string_at(0)", ("signal",), "", 0),
    # Other programs
    Hostile(
        "other programs",
        """
for path in ("/bin/sh", "/bin/su", "/usr/bin/env", "/usr/bin/mount", "/sbin/init"):
    refused(os.execv, path, [path])
refused(subprocess.run, ["ls"])
print("held" if os.system("true") else "ESCAPED")
""",
        held=7,
    ),
    Hostile(
        "a program of its own",
        "with open('own', 'w') as file:\n    file.write('#!' + sys.executable + '\\nprint(1)\\n')\n"
        "os.chmod('own', 0o4777)\nrefused(os.execv, '/scratch/own', ['own'])",
    ),
    Hostile(
        "a second interpreter",
        """
text = subprocess.run([sys.executable, "-c", f"open({CANARY!r})"], capture_output=True, text=True).stderr
print("held" if "FileNotFoundError" in text else f"ESCAPED {text}")
""",
    ),
    # Games with the end
    Hostile(
        "an exit code that fights back",
        "class Code:\n    def __str__(self):\n        raise MemoryError\nsys.exit(Code())",
        says="",
        held=0,
    ),
    Hostile(
        "an excepthook and a broken traceback",
        "sys.excepthook = sys.unraisablehook = None\nimport traceback\ntraceback.print_exception = None\n"
        "import builtins\nprint('held', flush=True)\nbuiltins.__dict__.clear()\nraise_it",
    ),
    Hostile("stdout replaced", "print('held', flush=True)\nsys.stdout = sys.stderr = sys.stdin = None"),
    Hostile(
        "exit by an alarm",
        "signal.alarm(1)\nsignal.setitimer(signal.ITIMER_REAL, 0.05)\ntime.sleep(10)",
        ("signal",),
        "",
        0,
    ),
    Hostile(
        "a poisoned interpreter",
        "import builtins, json\nbuiltins.owned = json.owned = True\nopen('left', 'w').write('x')\nprint('held')",
    ),
]
