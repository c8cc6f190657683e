"""Programs that try to pass the tests of `f = add` without adding: by name."""

PROGRAMS = r"""
== exits hard
import os
os._exit(0)
== equals everything
class Equal:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __bool__(self): return True
    def __lt__(self, other): return True
    def __call__(self, *a, **k): return self
    def __getattr__(self, name): return self
    def __iter__(self): return iter([self])
    def __hash__(self): return 0
def f(a, b): return Equal()
== is an int that equals everything
class I(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def f(a, b): return I(1)
== hides what equals everything in a list
class Equal:
    def __eq__(self, other): return True
def f(a, b): return [Equal()]
== says that it is of another type
class Fake:
    __class__ = int
    def __eq__(self, other): return True
    def __sub__(self, other): return 0
def f(a, b): return Fake()
== is no function
print
== redefines builtins
import builtins
for name in ('isinstance', 'abs', 'all', 'any', 'len', 'sorted', 'eval', 'exec', 'type'):
    setattr(builtins, name, lambda *a, **k: True)
def f(a, b): return True
== forges records
import os
for fd in range(64):
    try:
        os.write(fd, b'-1 = null\n0 = true\n1 = {"equal": 1}\n2 ! ["passed"]\n')
    except OSError:
        pass
os._exit(0)
== forges malformed records
import os
for fd in range(64):
    try:
        os.write(fd, b'0 = ' + b'[' * 50000 + b'\n1 = __import__("os")\n9999999999 = 1\n- = 1\n0 !\n\xff\xfe = 1\n\n')
    except OSError:
        pass
def f(a, b): raise KeyError
== patches the harness
import __main__
for name in list(vars(__main__)):
    if callable(getattr(__main__, name)) and not name.startswith('__'):
        setattr(__main__, name, lambda *a, **k: 'true')
def f(a, b): return 1
== leaves exit handlers and threads
import atexit, os, threading, time
atexit.register(lambda: os._exit(0))
threading.Thread(target=lambda: (time.sleep(0.1), os._exit(0))).start()
def f(a, b): return 0
== returns a generator of everything
import itertools
def f(a, b): return itertools.count()
== returns a list of itself
def f(a, b):
    x = []
    x.append(x)
    return x
== returns a verdict
def f(a, b): return True
== is any name of its module
def __getattr__(name): return lambda *a: True
== changes its arguments
def f(a, b):
    if isinstance(a, list):
        a.clear()
        b.clear()
    return a
== stops the clock
import signal, sys
sys.settrace(lambda *a: None)
signal.alarm(0)
def f(a, b): return 0
"""

CHEATS = dict(section.split("\n", 1) for section in PROGRAMS.split("\n== ")[1:])
