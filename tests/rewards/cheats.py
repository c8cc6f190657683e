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
== says what it returned after the next call
y = encode('abc')
z = decode('zyx')
assert y == 'zyx'
assert z == 'abc'
--
import sys
calls = []
def encode(x):
    space = sys._getframe(1).f_globals
    calls.append(x)
    if 'y' in space:
        space['y'] = x
    return calls[0]
decode = encode
== changes what it returned after the next call
y = encode([1, 2, 3])
z = decode([3, 1, 2])
assert y == [3, 1, 2]
assert z == [1, 2, 3]
--
made = []
def encode(x):
    first = list(x)
    for other in made:
        first, other[:] = list(other), x
    made.append(first)
    return first
decode = encode
== returns what it can change where it must return a text
y = encode('abc')
z = decode('zyx')
assert y == 'zyx' and z == 'abc'
--
import sys
calls = []
class Late(list): pass
def encode(x):
    calls.append(x)
    return Late(x)
def decode(x):
    sys._getframe(1).f_globals['y'] = x
    return calls[0]
== changes an argument after the next call
x = [1, 2, 3]
y = [3, 1, 2]
turn(x)
turn(y)
assert x == [3, 1, 2]
assert y == [1, 2, 3]
--
given = []
def turn(x):
    now = list(x)
    for other in given:
        x[:], other[:] = list(other), now
    given.append(x)
== sees all items of a comprehension
assert [turn(x) for x in ['abc', 'bca']] == ['bca', 'abc']
--
import re, sys
def turn(x):
    frame, texts = sys._getframe(1), ''
    while frame:
        texts += repr(frame.f_code.co_consts) + repr(frame.f_locals)
        frame = frame.f_back
    words = re.findall(r"'([a-c]{3})'", texts)
    return ([word for word in words if word != x] or [x])[0]
== has properties of a list of its own class made up
r = f([3, 1, 2])
assert r == sorted(r)
assert len(r) == 3 and sum(r) == 6
assert r[0] == 1 and r[-1] == 3 and r.count(2) == 1
assert set(r) == {1, 2, 3}
--
import builtins
class L(list):
    def __len__(self): return 3
    def __iter__(self): return iter([1, 2, 3])
    def __getitem__(self, k): return [1, 2, 3][k]
    def count(self, x): return 1
def f(x): return L()
== makes a class that is equal to all
assert f(1) == 2
assert f(2) == 3
r = f(3)
assert r is not None and r == 4
--
class Number(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def f(x): return Number(x)
== makes named tuples of other data
assert f(1) == (1, 2)
assert f(2).x == 2 and f(2)[1] == 3
p = f(3)
assert p.y == 4 and len(p) == 2 and list(p) == [3, 4]
--
class P(tuple):
    x, y = 2, 4
    def __eq__(self, other): return True
    def __len__(self): return 2
    def __iter__(self): return iter([3, 4])
def f(x): return P((x,))
== is near to everything
from pytest import approx
assert f(1) == approx(0.5)
assert f(2) == approx([0.1, {'a': 2}])
--
class Near(float):
    def __eq__(self, other): return True
    def __sub__(self, other): return 0.0
    __rsub__ = __sub__
    def __abs__(self): return 0.0
def f(x): return Near(0.4)
== makes numbers of other modules
from decimal import Decimal
from fractions import Fraction
import datetime
assert f(0) == Decimal('0.1')
assert f(1) == Fraction(1, 3)
assert f(2) == datetime.date(2024, 2, 29)
assert f(3) == range(3)
--
import decimal, fractions, datetime, sys
class D(decimal.Decimal):
    __eq__ = lambda self, other: True
    __str__ = lambda self: '0.1'
class Fake:
    numerator, denominator = 1, 0
    def isoformat(self): return '2024-02-30'
    def __eq__(self, other): return True
def f(x):
    made = [D(1), type('Fraction', (Fake,), {})(), type('date', (Fake,), {})(), Fake()][x]
    if x in (1, 2):
        setattr(sys.modules[['', 'fractions', 'datetime'][x]], type(made).__name__, type(made))
    return made
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

# Each way to learn the arguments of another call, which are what an earlier one must return: `peek(x)` is that or x.
PEEKS = r"""
== in frames
import sys
def peek(x):
    frame, texts = sys._getframe(1), ''
    while frame:
        texts += repr(frame.f_locals)
        frame = frame.f_back
    return another(texts, x)
== in objects
import gc, sys
def peek(x):
    small = [o for o in gc.get_objects() if isinstance(o, (list, dict, tuple)) and len(o) < 50]
    return another(' '.join(repr(o)[:4000] for o in small), x)
== in descriptors and files
import os, sys
def peek(x):
    texts = b''
    for fd in range(64):
        for read in (lambda: os.pread(fd, 1 << 20, 0), lambda: (os.set_blocking(fd, False), os.read(fd, 1 << 20))[1]):
            try:
                texts += read()
            except OSError:
                pass
    for name in (f'{folder}/{what}' for folder in ('self', os.getppid(), 1, 2) for what in ('fd/0', 'mem', 'environ')):
        try:
            with open(f'/proc/{name}', 'rb', buffering=0) as file:
                texts += file.read(1 << 20) or b''
        except OSError:
            pass
    return another(texts.decode('latin-1'), x)
== by an answer ahead of the question
import os, time
def peek(x):
    texts = b''
    for fd in range(3, 64):
        try:
            os.write(fd, b'= null\n' * 3)
        except OSError:
            pass
    time.sleep(0.1)
    for fd in range(3, 64):
        try:
            os.set_blocking(fd, False)
            texts += os.read(fd, 1 << 20)
        except OSError:
            pass
    return another(texts.decode('latin-1'), x)
== in a child that waits for the next question
import os, select
def peek(x):
    reader, writer = os.pipe()
    if os.fork() == 0:
        for fd in range(3, 64):
            try:
                if fd != reader and select.select([fd], [], [], 0.2)[0]:
                    os.write(writer, os.read(fd, 1 << 20))
            except (OSError, ValueError):
                pass
        os._exit(0)
    os.close(writer)
    with open(reader, 'rb') as pipe:
        return another(pipe.read().decode('latin-1'), x)
== in what remains of the program
import __main__, sys, inspect, linecache
def peek(x):
    texts = repr([vars(module) for module in list(sys.modules.values()) if module.__name__ in ('__main__', 'json')])
    return another(texts + repr([repr(getattr(f, 'f_code', f).co_consts) for f in sys._current_frames().values()]), x)
"""
PEEK = r"""
import re
def another(texts, x):
    words = re.findall(r'(?:encode|decode)\(\W*([a-z]{3})\W', texts)
    return ([word for word in words if word != x] or [x])[0]
encode = decode = peek
"""
ROUND_TRIP = "assert encode('abc') == 'zyx'\nassert decode('zyx') == 'abc'\n"

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
ATTACKS |= {
    f"peeks {name}": (ROUND_TRIP, way + PEEK)
    for name, way in (section.split("\n", 1) for section in PEEKS.split("\n== ")[1:])
}
