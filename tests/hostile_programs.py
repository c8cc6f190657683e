"""Programs that try to escape the sandbox, to exceed its limits, or to outlive their run.

Each prints ESCAPED if it succeeded, and `held` if it was refused; one that is to be killed prints nothing more. An
escape does no harm: none tries anything if the prelude finds itself on a host, and each is bounded by itself, to 200
forks, 2 GB of memory, 64 MB of files. The names in capitals (CANARY, HOST_PID, PORT, ...) are set by the test.

A program follows its heading `== name | how it may end | minimum number of "held"`.
"""

PRELUDE = """\
import ctypes, errno, fcntl, os, resource, select, signal, socket, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)

def check(held, *words):
    print("held" if held else "ESCAPED", *words)

def refused(action, *arguments):
    try:
        result = action(*arguments)
    except (Exception, SystemExit) as error:
        return print("held", type(error).__name__)
    print("ESCAPED", action, arguments, result)

def denied(numbers, *arguments):
    "The system call of these numbers (on x86_64, on aarch64) is refused."
    number = numbers if isinstance(numbers, int) else numbers[os.uname().machine != "x86_64"]
    result = libc.syscall(*(ctypes.c_long(item) if isinstance(item, int) else item for item in (number, *arguments)))
    check(result == -1, "system call", number, arguments)

if os.path.exists("/etc/passwd") or os.getuid() == 0 or os.getpid() > 1000:
    print("ESCAPED: this is not a sandbox, so nothing is tried")
    os._exit(0)
"""

PROGRAMS = r"""
# Taking too much

== fork bomb | exited | 1
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
check(born < 40, born)
== memory kept although refused | exited | 1
kept = []
try:
    while len(kept) < 2000:
        kept.append(bytearray(1 << 20))
except MemoryError:
    size = len(kept)
    kept.clear()
    check(size < 600)
== files in number and size | exited | 4
with open('sparse', 'wb') as file:
    refused(file.truncate, 1 << 40)
with open('big', 'wb', buffering=0) as file:
    refused(lambda: [file.write(bytes(1 << 20)) for _ in range(64)])
os.unlink('big')
refused(lambda: [open(f'f{number}', 'w').close() for number in range(10000)])
def flood():
    for number in range(64):
        with open(f"f{number}", "wb") as file:
            file.write(bytes(1 << 20))
refused(flood)
== output flood from a child | output | 0
os.fork()
signal.signal(signal.SIGPIPE, signal.SIG_IGN)
while True: os.write(1, b'x' * 65536)
== descriptors | exited | 2
made = [libc.eventfd(0, 0) for _ in range(2000)]
check(-1 in made)
refused(lambda: [os.open('/dev/null', 0) for _ in range(2000)])
== raised limits and priority | exited | 10
for name in ("NPROC", "FSIZE", "AS", "NOFILE", "CPU", "CORE"):
    kind = getattr(resource, "RLIMIT_" + name)
    hard = resource.getrlimit(kind)[1]
    refused(resource.setrlimit, kind, (hard + 1, hard + 1))
check(libc.mlockall(3))
denied((319, 279), b'x', 0)
refused(os.setpriority, os.PRIO_PROCESS, 0, -20)
refused(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1))

# Not ending

== ignored signals | timeout | 0
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
while True: pass
== an outliving daemon | exited | 1
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        for number in range(3):
            os.close(number)
        time.sleep(30)
    os._exit(0)
print("held")
== exit in the way | timeout | 0
os._exit = sys.exit = lambda *_: None
import atexit
atexit.register(time.sleep, 60)

# The network

== sockets | exited | 11
refused(socket.create_connection, ('127.0.0.1', PORT), 1)
refused(socket.getaddrinfo, 'example.com', 80)
denied((41, 198), 2, 1, 0)
for family, kind, number in ((10, 1, 0), (2, 2, 0), (2, 3, 1), (17, 3, 3), (16, 3, 0), (40, 1, 0)):
    refused(socket.socket, family, kind, number)  # IPv6, UDP, raw, packets, netlink, vsock
refused(socket.socket(socket.AF_UNIX).connect, '\0' + ABSTRACT)
refused(socket.socket(socket.AF_UNIX).connect, SOCKET_FILE)

# The files

== files and folders of the host | exited | 22
for path in ("/etc/passwd", "/etc/shadow", "/proc/self/environ", "/proc/1/environ", "/dev/fuse", "/sys/kernel/notes",
             "/dev/mem", "/dev/tty", "/dev/vda", CANARY):
    refused(open, path)
for path in ("/etc", "/home", "/var", "/proc", "/sys", "/work", "/mnt", "/boot", REPOSITORY, os.path.dirname(CANARY)):
    refused(os.listdir, path)
for path in ("/proc/1/root/etc/passwd", "/proc/self/fd"):
    refused(os.stat, path)
== a walk through everything, and installed packages | exited | 5
import importlib
for name in ("jax", "numpy", "flowgrpo"):
    refused(importlib.import_module, name)
names = set(os.listdir("/")) | set(os.listdir("../../../.."))
check(not names - {"scratch", "tmp", "dev", "lib", "lib64", "usr"} - INTERPRETER, names, os.listdir("/dev"))
found = []
for folder, folders, names in os.walk("/"):
    found += [os.path.join(folder, name) for name in names if "flowgrpo-canary" in name]
    if folder == "/usr/lib":
        folders.clear()  # shared libraries of the system, and much else
check(not found, found)
== writing outside, and the interpreter removed | exited | 15
for path in ("/file", "/usr/file", "/dev/file", "/lib/file", "/etc/file", os.path.dirname(os.__file__) + "/file",
             "/proc/self/exe", "/proc/sys/kernel/core_pattern", "/proc/self/oom_score_adj", os.__file__):
    refused(open, path, "w")
refused(os.unlink, sys.executable)
refused(os.unlink, os.__file__)
refused(os.chmod, os.__file__, 0o777)
refused(os.utime, os.__file__)
refused(os.rename, os.path.dirname(os.__file__), "/scratch/gone")
== shared memory of the host | exited | 2
with open("/dev/shm/flowgrpo-canary-shm", "w") as file:
    file.write("written in the sandbox")
check(os.path.exists("/scratch/flowgrpo-canary-shm"))
refused(open, "/dev/shm/" + SHARED)
== links and file handles | exited | 5
os.symlink(CANARY, 'link')
refused(open, 'link')
os.symlink('/proc/1/root', 'root')
refused(os.listdir, 'root')
refused(os.link, os.__file__, 'link')
denied((303, 264), -100, b'/', bytes(200), bytes(8), 0)
denied((304, 265), 0, bytes(200), 0)

# Other processes, and the sandbox itself

== signals to the parent | exited | 1
for number in (9, 15, 19, 2, 11, 17, 30):
    os.kill(os.getppid(), number)
time.sleep(0.1)
print('held')
== a signal to everything | exited | 1
os.fork() or time.sleep(60)
os.kill(-1, 9)
print('held')
== signals to its group | exited | 2
for number in range(1, 65):
    if number not in (9, 17, 19, 32, 33):
        signal.signal(number, signal.SIG_IGN)
        os.kill(0, number)
        os.killpg(os.getpgrp(), number)
time.sleep(0.1)
check(os.getpgrp() == os.getsid(0) == os.getpid() > 1, os.getpgrp())  # 0 is a group outside, 1 holds process 1
if os.fork() == 0:
    os.setpgid(0, 0)
    os.kill(0, 9)
os.wait()
print('held')
== its group killed | signal -9 | 1
print('held', flush=True)
os.kill(0, 9)
== its group stopped from an orphan | timeout | 0
signal.signal(signal.SIGCONT, signal.SIG_IGN)
if os.fork() == 0:
    if os.fork() == 0:
        os.kill(0, 19)
    os._exit(0)
time.sleep(60)
== its group hung up, and let go on by a thread | signal -1 | 0
signal.pthread_sigmask(signal.SIG_BLOCK, [1])
os.kill(0, 1)
def end():
    os.kill(0, 18)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [1])
    time.sleep(60)
threading.Thread(target=end).start()
== groups and sessions by their number | exited | 10
first = os.getppid()
check(os.getpgid(first) == os.getsid(first) == 1)
for number in (9, 19):
    refused(os.killpg, os.getpgid(first), number)  # that is kill(-1): all below process 1 but the one that asks
for group in (1, WORKER_PID, HOST_PID):
    refused(os.setpgid, 0, group)
seen = []
for group in range(3, 5000):
    try:
        os.killpg(group, 0)
        seen.append(group)
    except ProcessLookupError:
        pass
check(not seen, seen)
for group in (WORKER_PID, HOST_PID):
    refused(os.killpg, group, 9)
denied((129, 138), 0, 9, bytes(128))  # rt_sigqueueinfo
== a death that signals its parent | exited | 1
ready, told = os.pipe()
if os.fork() == 0:
    for number in (9, 19, 15, 1):
        if libc.syscall(ctypes.c_long((56, 220)[os.uname().machine != "x86_64"]), number, 0, 0, 0, 0) == 0:
            while os.getppid() != 1:  # until it is the child of process 1
                time.sleep(0.001)
            os._exit(0)
    os._exit(0)
os.close(told)
os.read(ready, 1)
print('held')
== signals through descriptors, priority of its group and user | exited | 9
pair = socket.socketpair()
for item in (pair[0].fileno(), os.pipe()[0]):
    for command, owner in ((fcntl.F_SETOWN, 0), (fcntl.F_SETOWN, -os.getpgrp()), (fcntl.F_SETSIG, 9)):
        refused(fcntl.fcntl, item, command, owner)
refused(pair[0].send, b"x", socket.MSG_OOB)
refused(pair[1].recv, 1, socket.MSG_OOB)
refused(pair[0].setsockopt, socket.SOL_SOCKET, socket.SO_OOBINLINE, 1)
for kind in (os.PRIO_PGRP, os.PRIO_USER):
    try:
        os.setpriority(kind, 0, 19)
    except PermissionError:
        pass
== signals to the host | exited | 3
seen = []
for pid in range(3, 5000):
    try:
        os.kill(pid, 0)
        seen.append(pid)
    except ProcessLookupError:
        pass
check(not seen, seen)
for pid in (HOST_PID, WORKER_PID):
    refused(os.kill, pid, 0)
== process 1: its memory, limits and descriptors | exited | 9
for request in (0, 16, 0x4206):
    denied((101, 117), request, 1, 0, 0)  # ptrace
vector = (ctypes.c_long * 2)(0, 8)
denied((310, 270), 1, vector, 1, vector, 1, 0)
denied((311, 271), 1, vector, 1, vector, 1, 0)
refused(resource.prlimit, 1, resource.RLIMIT_NOFILE, (0, 0))
refused(resource.prlimit, 1, resource.RLIMIT_AS, (0, 0))
denied(434, 1, 0)  # pidfd_open
denied(438, 0, 0, 0)
== a forged result on every stream | exited 7 | 0
import marshal, struct
forged = marshal.dumps({"how": "ended", "status": 0, "seconds": 0.0})
for number in range(0, 1000):
    try:
        os.write(number, struct.pack("=I", len(forged)) + forged)
        if number > 2:
            print("ESCAPED", number)
    except OSError:
        pass
sys.exit(7)
== all descriptors closed | exited 0 | 0
os.closerange(0, 256)
== frames and objects of the zygote | exited | 2
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
text = repr([item for item in gc.get_objects() if isinstance(item, (dict, list, tuple)) and len(item) < 1000])
check(SECRET[::-1] not in text)
== environment | exited | 3
names = set(os.environ) - {"PATH", "LANG", "HOME", "TMPDIR", "MALLOC_ARENA_MAX"}
check(not names and "canary" not in repr(dict(os.environ)).lower(), names)
program = "import os; print(dict(os.environ)); open('/etc/passwd')"
child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
check(child.stdout and "canary" not in child.stdout.lower(), child.stdout)
check("FileNotFoundError" in child.stderr, child.stderr)

# Other runs, and the host

== watches and leases on files that all see | exited | 8
for numbers, *arguments in (((294, 26), 0), ((253, 500), 0), ((300, 262), 0, 0)):
    denied(numbers, *arguments)  # inotify and fanotify
shared = os.open(os.path.dirname(os.__file__), os.O_RDONLY)
signal.signal(signal.SIGIO, signal.SIG_IGN)
refused(fcntl.fcntl, shared, fcntl.F_NOTIFY, fcntl.DN_ACCESS | fcntl.DN_MULTISHOT)
refused(fcntl.fcntl, os.open("__main__.py", os.O_RDONLY), fcntl.F_SETLEASE, fcntl.F_RDLCK)
shared = os.open(os.__file__, os.O_RDONLY)
os.read(shared, 1)
vector = (ctypes.c_void_p * 2)(ctypes.addressof(ctypes.create_string_buffer(8)), 8)
denied((327, 286), shared, vector, 1, 0, 0, 8)  # whether it is in the page cache
refused(os.posix_fadvise, shared, 0, 0, os.POSIX_FADV_DONTNEED)
refused(os.listxattr, os.__file__)
== locks on files that all see | exited | 5
import struct
def take():
    "Try all locks that exclude each other; say which of them nobody else has."
    files = open(os.__file__, "rb"), open("/dev/null", "r+b", buffering=0)
    free = []
    for lock, file in ((fcntl.flock, files[0]), (fcntl.flock, files[1]), (fcntl.lockf, files[1])):
        try:
            lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free.append(True)
        except OSError:
            free.append(False)
    return free, files
ready, told = os.pipe()
if os.fork() == 0:
    kept = take()
    os.write(told, b"x")
    time.sleep(60)
os.read(ready, 1)
for free in take()[0]:
    check(free)
for command in (fcntl.F_GETLK, 36):  # who has it; of descriptors
    asked = fcntl.fcntl(take()[1][1], command, struct.pack("hhqqi", fcntl.F_WRLCK, 0, 0, 0, 0))
    check(struct.unpack_from("h", asked)[0] == fcntl.F_UNLCK)
== futexes that move waiters or lend priority | exited | 11
page = ctypes.cast(libc.abs, ctypes.c_void_p)  # the text of libc, which all map
word = ctypes.c_int()
for futex in (page, ctypes.byref(word)):
    for operation in (3, 4, 5, 6, 11):
        denied((202, 98), futex, operation, 0, 0, futex, 0)
denied((202, 98), ctypes.byref(word), 128 | 6, 0, 0, 0, 0)
== quotas of the machine and of its user | exited | 7
denied((206, 0), 1000, (ctypes.c_ulong * 1)())  # io_setup
refused(select.epoll)
for command, size in ((1031, 1 << 20), (1032, 0)):
    refused(fcntl.fcntl, os.pipe()[0], command, size)  # the size of pipes
signal.pthread_sigmask(signal.SIG_BLOCK, [40])
for _ in range(1000):
    os.kill(os.getpid(), 40)
queued = 0
while signal.sigtimedwait([40], 0):
    queued += 1
check(queued < 200, queued)
refused(os.sched_setaffinity, 0, {min(os.sched_getaffinity(0))})
check(libc.prctl(67, 1, 0, 0, 0) == -1)  # to share equal pages with others
== what the kernel counts and tells | exited | 7
denied((99, 179), bytes(200))  # sysinfo
denied((332, 291), -100, b"/", 0, 0xFFF, bytes(512))  # statx, with the number of the mount
for option in (57, 71):
    refused(socket.socketpair()[0].getsockopt, socket.SOL_SOCKET, option, 8)  # cookies
refused(fcntl.ioctl, os.open("/dev/random", os.O_RDONLY), 0x80045200, bytes(4))
domain = ctypes.create_string_buffer(65)
check(libc.getdomainname(domain, 65) == 0 and domain.value == b"sandbox", domain.value)
refused(os.memfd_create, "name")
== arguments, environment and memory of the interpreter | exited | 3
libc.sbrk.restype = ctypes.c_void_p
reading, writing = os.pipe()
def page(address):
    return os.read(reading, 4096) if libc.write(writing, ctypes.c_void_p(address), 4096) == 4096 else b""
seen = {}
for start in (ctypes.c_void_p.in_dll(libc, "program_invocation_name").value, libc.sbrk(0) - 1, id(sys), id(os)):
    for step in (4096, -4096):
        address = start & -4096
        while len(seen) < 40000 and address not in seen and (found := page(address)):
            seen[address] = found
            address += step
backwards = b"".join(seen[address] for address in sorted(seen))[::-1]
print(len(seen))
for words in (SECRET, "xobdnas/oprgwolf/" + REPOSITORY[::-1], "-" + str(HOST_PID)[::-1] + "-oprgwolf"):
    check(words.encode() not in backwards)

# Rights

== mounts and namespaces | exited | 14
check(libc.mount(b"tmpfs", b"/scratch", b"tmpfs", 0, None))
check(libc.mount(None, b"/", None, 32, None))
check(libc.mount(b"proc", b"/scratch", b"proc", 0, None))
check(libc.umount2(b"/scratch", 2))
denied(428, -100, b"/", 0x4001)
denied(430, b"tmpfs", 0)
denied(442, -100, b"/", 0, bytes(32), 32)
for flag in (0x10000000, 0x20000, 0x40000000, 0x20000000):
    check(libc.unshare(flag))
denied((56, 220), 0x10000000 | 17, 0, 0, 0, 0)
denied(435, bytes(88), 88)
check(libc.setns(os.open('/', 0), 0))
== other roots, devices and users | exited | 10
os.mkdir('jail')
refused(os.chroot, 'jail')
denied((155, 41), b'.', b'.')
refused(os.mknod, 'disk', 0o600 | 0o060000, os.makedev(8, 0))
refused(os.mknod, 'mem', 0o600 | 0o020000, os.makedev(1, 1))
refused(os.setuid, 0)
refused(os.setresuid, 0, 0, 0)
refused(os.setgid, 0)
refused(os.setgroups, [0])
refused(os.chown, "__main__.py", 0, 0)
full = (ctypes.c_uint32 * 6)(*[0xFFFFFFFF] * 6)
check(libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), full))
== the clock, the name and the terminal of the machine | exited | 4
refused(time.clock_settime, time.CLOCK_REALTIME, time.time())
refused(socket.sethostname, 'owned')
check(socket.gethostname() == 'sandbox')
refused(fcntl.ioctl, 0, 0x5412, b'x')
== kernel interfaces, keys, System V memory, calls of another numbering | exited | 17
for numbers, *arguments in (((321, 280), 0, bytes(64), 64), ((298, 241), bytes(128), 0, -1, -1, 0), ((323, 282), 0),
                            (425, 8, bytes(120)), ((175, 105), bytes(8), 8, b""), ((103, 116), 3, bytes(64), 64),
                            ((169, 142), 0xfee1dead, 672274793, 0), ((163, 89), b"x"), ((135, 92), 0x40000),
                            ((248, 217), b'user', b'x', b'y', 1, -3), ((250, 219), 0, -3, 0),
                            (0x40000000 + 39,), (500,), (0x40000000 + 101, 0, 0, 0, 0)):
    denied(numbers, *arguments)
check(libc.shmget(1, 4096, 0o1666) == -1)
check(libc.semget(1, 1, 0o1666) == -1)
check(libc.msgget(1, 0o1666) == -1)
== segmentation fault | signal -11 | 0
ctypes.string_at(0)
== other programs | exited | 8
for path in ("/bin/sh", "/bin/su", "/usr/bin/env", "/usr/bin/mount", "/sbin/init"):
    refused(os.execv, path, [path])
refused(subprocess.run, ["ls"])
check(os.system("true"))
with open('own', 'w') as file:
    file.write('#!' + sys.executable + '\nprint(1)\n')
os.chmod('own', 0o4777)
refused(os.execv, '/scratch/own', ['own'])

# Games with the end

== an excepthook and a broken traceback | exited | 1
sys.excepthook = sys.unraisablehook = None
import builtins, traceback
traceback.print_exception = None
print('held', flush=True)
builtins.__dict__.clear()
raise_it
== a poisoned interpreter | exited | 1
import builtins, json
builtins.owned = json.owned = True
open('left', 'w').write('x')
print('held')
"""


def read_program(section: str) -> tuple[str, tuple[str, set[str], int]]:
    """Name of a program; and its source, how it may end ("exited", "exited 7", ...), minimum number of "held"."""
    heading, _, program = section.partition("\n")
    name, endings, min_held = heading.split(" | ")
    return name, (program, set(endings.split(", ")), int(min_held))


HOSTILE = dict(map(read_program, PROGRAMS.split("\n== ")[1:]))
