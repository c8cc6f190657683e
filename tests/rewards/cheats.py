"""Programs that try to pass tests without doing what is asked: those of `f = add`, and pairs of tests and program."""

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

# Tests and, after a line of dashes, a program that must not pass them all.
PAIRS = r"""
== empties an argument that is cut backwards
x = [3, 1, 2]
y = f(x)
assert y == x[::-1]
--
def f(x):
    x.clear()
    return []
== makes an argument what it returns
x = [3, 1, 2]
assert f(x) == x[::-1]
assert x[:2] == [3, 1]
--
def f(x):
    x[:] = [3, 1, 3]
    return x
== empties an argument, and fills it again later
x = [3, 1, 2]
assert f(x) == sorted(x)
assert g(x) == 0
assert x == [3, 1, 2]
--
def f(x):
    x.clear()
    return []
def g(x):
    x[:] = [3, 1, 2]
    return 0
== empties an argument that was changed as it should be
x = [3, 1, 2]
order(x)
assert x == [1, 2, 3]
assert f(x) == sorted(x, reverse=True)
--
def order(x): x.sort()
def f(x):
    x.clear()
    return []
== puts an object in the place of an argument
x = [3, 1, 2]
order(x)
assert len(x) == 3 and sum(x) == 6 and x[0] <= x[1] <= x[2]
--
import builtins, sys
class L(list):
    def __getitem__(self, k): return 0
def order(x): sys._getframe(1).f_globals['x'] = L(x)
builtins.len, builtins.sum = (lambda _: 3), (lambda _: 6)
== patches what an argument of a method is compared by
s = Stack()
x = [1, 2]
s.push(x)
assert s.pop() == sorted(x)
assert x == [1, 2]
--
import builtins
builtins.sorted = lambda x: 0
class Stack:
    def push(self, x): pass
    def pop(self): return 0
== has properties of its result made up
r = f([3, 1, 2])
assert r == sorted(r)
assert len(r) == 3 and sum(r) == 6
--
import builtins
builtins.sorted, builtins.len, builtins.sum = (lambda r: []), (lambda r: 3), (lambda r: 6)
def f(x): return []
== has a copy of its result made up
r = f([3, 1])
s = sorted(r)
assert s == r
assert len(s) == 2 and s[0] == 1
--
import builtins
builtins.sorted, builtins.len = (lambda r: [1]), (lambda r: 2)
def f(x): return [1]
== returns a list that lies about itself
r = f([3, 1, 2])
assert r == [1, 2, 3]
assert r.count(2) == 1
assert len(r) == 3 and all(r[i] <= r[i + 1] for i in range(2))
--
class L(list):
    def __len__(self): return 3
    def __iter__(self): return iter([1, 2, 3])
    def __eq__(self, other): return True
    def __getitem__(self, k): return k
    def count(self, x): return 1
def f(x): return L()
== raises one exception that is all of them
import pytest
with pytest.raises(ValueError):
    f(0)
with pytest.raises(TypeError):
    f(1)
with pytest.raises(KeyError):
    f(2)
with pytest.raises(Full):
    f(3)
--
class Full(ValueError, TypeError, KeyError): pass
def f(x): raise Full
== raises one whose ancestors are named like all of them
import pytest
with pytest.raises(ValueError):
    f(0)
with pytest.raises(TypeError):
    f(1)
with pytest.raises(Full):
    f(3)
--
Full = Exception
for name in ('ValueError', 'TypeError', 'Full'):
    Full = type(name, (Full,), {})
def f(x): raise Full
== raises one whose class answers for itself
import pytest
with pytest.raises(ValueError):
    f(0)
with pytest.raises(TypeError):
    f(1)
--
class M(type):
    def __instancecheck__(c, o): return True
    def __subclasscheck__(c, o): return True
    __mro__ = property(lambda c: (ValueError, TypeError, KeyError))
class Full(Exception, metaclass=M): pass
def f(x): raise Full
== forges exceptions
import pytest
with pytest.raises(ValueError):
    f(0)
with pytest.raises(TypeError):
    f(1)
--
import os
def f(x):
    for fd in range(64):
        try:
            os.write(fd, b'0 ! ["E", "ValueError", "TypeError"]\n1 ! ["E", "ValueError", "TypeError"]\n')
        except OSError:
            pass
    os._exit(0)
== returns an object where it must raise
import pytest
with pytest.raises(ValueError):
    f(0)
--
def f(x): return object()
== writes numbers with two signs
assert f(1) == 1
--
import os
for fd in range(64):
    try:
        os.write(fd, b'--1 = null\n--1 ! []\n')
    except OSError:
        pass
def f(x): return 0
"""

ATTACKS = {
    name: tuple(pair.split("--\n")) for name, pair in (section.split("\n", 1) for section in PAIRS.split("\n== ")[1:])
}
# Expected values that are computed of an argument: by each function that a candidate can put in the place of a builtin.
KEPT = "x = [3, 1, 2]\nassert f(x) == {}\nassert x == [3, 1, 2]"
PATCHED = "import builtins\nbuiltins.{} = lambda *a, **k: 0\ndef f(x): return 0"
ATTACKS |= {
    f"patches {name}": (KEPT.format(f"{name}(x)"), PATCHED.format(name))
    for name in ("sorted", "sum", "max", "min", "len", "tuple", "repr", "set")
}
