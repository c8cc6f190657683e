"""Runs untrusted code: programs that a model wrote, and trusted functions over hostile input.

    with Sandbox(workers=2, preload=["math_verify"]) as sandbox:
        result = sandbox.run("print(input())", stdin="hello")     # RunResult("exited", 0, "hello\n", "", 0.01)
        sandbox.call("math_verify:parse", "$x$", seconds=3)       # JSON in, JSON out; killed at its deadline

    pool.py -> worker.py (host) -> zygote.py, twice (it isolates itself, and is executed again inside)
            -> child.py (process 1 of a namespace, and the program below it)

Guaranteed if `sandbox.isolation.active`, and tested with programs that try to break out (tests/hostile_programs.py),
whether root or an ordinary user started it:

  * Files: the interpreter, its standard library and the system's shared libraries (/lib, /usr/lib), read-only; a
    scratch folder in memory, empty at the start and gone at the end; five device files. No /proc, /sys, /etc or home,
    no installed packages, no repository. A *called* function, which is trusted and may import more while it runs, also
    sees the folders of `sys.path`, read-only.
  * No network: a network namespace without a device, and no socket but AF_UNIX.
  * No environment, argument, descriptor, path or setting of the host process, in memory or anywhere: runs are forked
    from an interpreter that was executed inside and gets what it needs through a pipe.
  * No rights: an unprivileged user without capabilities, which can gain none (no_new_privs), and only the system calls
    that Python and its standard library need (seccomp.py): none that watches files, reads caches or counters of the
    kernel, or uses up resources that all processes share (aio, epoll, huge pages).
  * No view of other processes; none but descendants can be signalled, by number, group or session. No run sees another
    that does not cooperate with it: locks on files are granted without effect, because all runs would see them. So
    `sqlite3` and `shelve` work on files, but processes of one run exclude each other only by `multiprocessing.Lock`.
  * Started by root, each worker is a user of its own, and shares none of the quotas that the kernel has for a user.
  * Wall clock, processes and threads, output, files and memory are bounded (`Limits`). The whole process tree is killed
    at the end or at the deadline, before `run` returns. A run can fail or kill only itself: if its worker goes down
    with it, the run has ended by signal 9, unless an empty program fails, too.

Not guaranteed:

  * Protection from bugs in the kernel: this is no virtual machine.
  * That a program learns nothing: system calls reveal the kernel's version, the clock and the processors; files reveal
    the path of the interpreter, what is installed below /usr/lib, when the host last read it and whether it locks it,
    and the free space of that disk; numbers of pipes and sockets reveal how many the machine has made.
  * That two cooperating programs, in two runs at one time, can't communicate. Locks of `multiprocessing` need futexes
    that processes share, and of those a page of any file that both runs map, libc's own text included, makes one for
    both: waking returns how many wait. A futex that nobody waits for reveals nothing. And durations reveal how busy
    processors, caches and the page cache are.
  * Separate user quotas if an ordinary user starts the sandbox: its runs and its other processes count as one for the
    pages of pipes and for descriptors on their way through sockets. The same holds for root in a container that maps
    only 65,536 users: all workers are then nobody.
  * A bound on the CPU time of all processes of a run together: each may use as much as the wall clock allows, and a
    second more.
  * A bound on the memory of all processes of a run together, unless `str(isolation)` names a control group; else each
    process has its own bound, and so has the scratch folder, but not the kernel's memory for pipes and sockets.
  * That a program is honest. How and when it ended is observed from outside; what it wrote is its own claim. A program
    may end itself by SIGUSR2, which counts as "memory".
  * Anything at all with `unsafe=True` on a host without namespaces: only deadlines, limits of a process and an empty
    environment remain, and a process that leaves its group outlives its run.

Modules:

    cgroups    A control group that bounds the memory of a worker and everything below it
    channel    Messages between the pool, the zygote and its children
    child      The processes that a fork of the zygote becomes
    isolation  Namespaces, a private root and an unprivileged user for a process
    limits     Limits, result and isolation of a run: the values that the sandbox takes and returns
    pool       `Sandbox`: run programs and calls from any thread, each within its deadline
    seccomp    The system calls that a sandboxed process may make: a BPF filter that refuses every other
    syscalls   Linux system calls that the sandbox needs, most of which Python has no name for, through libc
    worker     One zygote as the pool sees it: start it, send it a request, read the output within bounds, end it
    zygote     The warm interpreter that runs are forked from
"""

from flowgrpo.sandbox.limits import CallFailed, Isolation, Limits, RunResult, SandboxFailure
from flowgrpo.sandbox.pool import Sandbox

__all__ = ["CallFailed", "Isolation", "Limits", "RunResult", "Sandbox", "SandboxFailure"]
