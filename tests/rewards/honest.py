"""Tests as people write them, and programs that pass them: by name, parted by a line of dashes."""

PAIRS = r"""
== an argument that stays as it is
x = [3, 1, 2]
assert f(x) == sorted(x)
assert x == [3, 1, 2]
--
def f(x): return sorted(x)
== an argument that is cut
x = [3, 1, 2]
assert f(x) == x[::-1]
assert x == [3, 1, 2]
assert x[:2] == [3, 1]
--
def f(x): return x[::-1]
== result in a name
x = [3, 1, 2]
before = x[:]
y = f(x)
assert y == sorted(x)
assert x == before
assert x is not None
--
def f(x): return sorted(x)
== properties of a result
r = f([3, 1, 2])
assert r == sorted(r)
assert len(r) == 3
assert set(r) == {1, 2, 3}
assert sum(r) == 6
--
def f(x): return sorted(x)
== copy of a result
r = f([3, 1])
s = sorted(r)
assert s == r
assert len(s) == 2
assert s[0] == 1
assert all(r[i] <= r[i + 1] for i in range(len(r) - 1))
--
def f(x): return sorted(x)
== changed in place, and changed again
x = [3, 1, 2]
order(x)
assert x == sorted(x)
assert x[0] == 1
assert x[-1] == 3 and len(x) == 3
x.append(0)
order(x)
assert x == [0, 1, 2, 3]
assert first(x) == x[0]
--
def order(x): x.sort()
def first(x): return x[0]
== in place with a count
x = [1, 1, 2]
assert unique(x) == 2 and x[:2] == [1, 2]
y = [2, 2, 2]
n = unique(y)
assert n == 1 and y[:n] == [2]
--
def unique(x):
    u = sorted(set(x))
    x[:len(u)] = u
    return len(u)
== methods that change an argument
s = Solution()
nums = [2, 0, 1]
s.sortColors(nums)
assert nums == [0, 1, 2]
other = [2, 1]
Solution().sortColors(other)
assert other == [1, 2]
m = [[1, 2], [3, 4]]
s.rotate(m)
assert m == [[3, 1], [4, 2]] and m[0][0] == 3
--
class Solution:
    def sortColors(self, nums): nums.sort()
    def rotate(self, m): m[:] = [list(r)[::-1] for r in zip(*m)]
== tests change the argument
x = [1, 2]
assert f(x) == 3
x.append(3)
assert f(x) == 6
x[0] = 10
assert f(x) == 15
x += [1]
assert f(x) == 16
assert x == [10, 2, 3, 1]
--
def f(x): return sum(x)
== a queue
q = Queue()
q.put(1)
q.put(2)
assert len(q) == 2
assert q.get() == 1
v = q.get()
assert v == 2
assert q.empty()
assert q.size == 0
assert [q.get(), q.get()] == [None, None]
assert repr(q) == 'Queue()' and str(q) == 'Queue()'
--
class Queue:
    def __init__(self): self.items = []
    def put(self, x): self.items.append(x)
    def get(self): return self.items.pop(0) if self.items else None
    def empty(self): return not self.items
    def __len__(self): return len(self.items)
    def __repr__(self): return 'Queue()'
    @property
    def size(self): return len(self.items)
== an alias of an object's data
q = Box()
items = q.items
q.put(1)
assert items == [1]
assert q.items == [1] and len(q.items) == 1
q.put(2)
assert items == [1, 2]
--
class Box:
    def __init__(self): self.items = []
    def put(self, x): self.items.append(x)
== generators
g = count(5)
assert next(g) == 0
assert next(g) == 1
assert [next(g) for _ in range(2)] == [2, 3]
assert list(g) == [4]
assert list(g) == []
assert sum(count(4)) == 6
assert max(count(3)) == 2
--
def count(n):
    yield from range(n)
== linked nodes
head = build([1, 2, 3])
assert head.val == 1
node = head.next
assert node.val == 2 and node.next.val == 3
assert node.next.next is None
assert values(reverse(head)) == [3, 2, 1]
--
class Node:
    def __init__(self, val, next=None): self.val, self.next = val, next
def build(xs):
    head = None
    for x in reversed(xs): head = Node(x, head)
    return head
def reverse(node):
    last = None
    while node: node.next, last, node = last, node, node.next
    return last
def values(node):
    out = []
    while node:
        out.append(node.val)
        node = node.next
    return out
== a list of objects
ps = make(2)
assert len(ps) == 2
assert ps[0].x == 0
assert [p.x for p in ps] == [0, 1]
first = ps[0]
assert first.x == 0
--
class P:
    def __init__(self, x): self.x = x
def make(n): return [P(i) for i in range(n)]
== a result that is changed
r = f(3)
r.append(9)
assert r == [0, 1, 2, 9]
assert r.pop() == 9
assert r == [0, 1, 2]
assert total(r) == 3
a, b, c = r
assert (a, b, c) == (0, 1, 2)
d = r[1:]
assert d == [1, 2] and total(d) == 3
--
def f(n): return list(range(n))
def total(x): return sum(x)
== a text
t = f('Hello')
assert t.upper() == 'OLLEH'
assert t == 'olleH' and t[0] == 'o' and len(t) == 5
assert t.startswith('ol')
assert 'l' in t and t.count('l') == 2
words = t.split('l')
assert words == ['o', '', 'eH']
--
def f(t): return t[::-1]
== several results
a, b = f(7, 2)
assert a == 3
assert b == 1
assert a * 2 + b == 7
q = f(9, 2)
assert q[0] == 4 and q[1] == 1
assert isinstance(q, tuple)
--
def f(a, b): return divmod(a, b)
== cases, a helper and an argument that stays
def same(a, b):
    return sorted(a) == sorted(b)
cases = [([3, 1], [1, 3]), ([], [])]
for given, want in cases:
    got = f(given)
    assert same(got, want)
    assert got == want
    assert given == sorted(given, reverse=True)
--
def f(x): return sorted(x)
== exceptions
import pytest
import json
with pytest.raises(ValueError):
    f(0)
with pytest.raises(LookupError):
    f(1)
with pytest.raises(Full):
    f(2)
with pytest.raises(Base):
    f(2)
with pytest.raises((TypeError, KeyError)):
    f(1)
with pytest.raises(json.JSONDecodeError):
    f(3)
with pytest.raises(Exception):
    f(2)
s = Stack()
with pytest.raises(IndexError):
    s.pop()
--
import json
class Base(Exception): pass
class Full(Base): pass
class Stack(list): pass
def f(x):
    if x == 0: int('x')
    if x == 1: {}[0]
    if x == 3: json.loads('{')
    raise Full('full')
== a matrix that stays as it is
import copy
m = [[1, 2], [3, 4]]
before = copy.deepcopy(m)
assert transpose(m) == [list(r) for r in zip(*m)]
assert m == before
t = transpose(m)
assert t[0] == [1, 3] and t[1][1] == m[1][1]
assert len(t) == len(m[0])
--
def transpose(m): return [list(r) for r in zip(*m)]
== a dictionary
d = {'a': 1}
out = add(d, 'b')
assert out == {'a': 1, 'b': 0}
assert out['b'] == 0 and sorted(out) == ['a', 'b']
assert d == {'a': 1}
assert list(out.items()) == [('a', 1), ('b', 0)]
assert out.get('c') is None
for key in ['a', 'b']:
    assert key in out
    assert out[key] in (0, 1)
--
def add(d, k): return {**d, k: 0}
== an index
xs = [1, 3, 5]
i = find(xs, 3)
assert xs[i] == 3
assert xs == [1, 3, 5]
assert xs[:i] == [1]
--
def find(xs, x): return xs.index(x)
== counters and queues
from collections import Counter, deque
c = count('aab')
assert c['a'] == 2
assert c.most_common(1) == [('a', 2)]
assert dict(c) == {'a': 2, 'b': 1}
assert list(turn([1, 2])) == [2, 1]
--
from collections import Counter, deque
def count(t): return Counter(t)
def turn(x):
    d = deque(x)
    d.rotate(1)
    return d
== accounts
a = Account('x')
a.deposit(5)
assert a.balance == 5
assert a.history == [5]
b = Account('y')
a.transfer(b, 2)
assert a.balance == 3 and b.balance == 2
assert a.history[-1] == -2
assert sum(a.history) == a.balance
def test_more():
    c = Account('z')
    assert c.balance == 0
    assert isinstance(c.history, list)
--
class Account:
    def __init__(self, name): self.history = []
    @property
    def balance(self): return sum(self.history)
    def deposit(self, n): self.history.append(n)
    def transfer(self, other, n):
        self.history.append(-n)
        other.history.append(n)
== a counter where a dictionary is expected
assert f([1, 1, 2]) == ({1: 2, 2: 1})
r = f([1])
assert r[1] == 1 and r.most_common(1) == [(1, 1)]
assert r[7] == 0
assert isinstance(r, dict)
--
from collections import Counter
def f(x): return Counter(x)
== an object that a function made
c = make()
c.put(1, 5)
assert c.get(1) == 5
want = 5
assert c.get(1) == want
assert len(make()) == 0
assert len([c.get(1), 2]) == 2
v = c.get(1)
assert v == 5
assert twice(v) == 10
--
class C(dict):
    def put(self, k, v): self[k] = v
def make(): return C()
def twice(x): return 2 * x
== cases that are an argument
xs = [3, 1]
assert f(xs) == [1, 3]
for x in xs:
    assert g(x) == x + 1
assert xs == [3, 1]
assert xs[0] == 3
--
def f(x): return sorted(x)
def g(x): return x + 1
== a helper of the tests makes and changes an argument
def double(x):
    return [2 * i for i in x]
def push(x, i):
    x.append(i)
x, one = [1, 2], max(0, 1)
assert f(x) == 3
assert f(double(x)) == 6
assert f(x + double(x)) == 9
assert f([sum(double([i])) for i in x]) == 6
assert f(sorted(x, key=lambda i: -sum(double([i])))) == 3
x.append(one)
assert f(x) == 4
x += double(x)
assert f(x) == 12
assert x == [1, 2, 1, 2, 4, 2]
push(x, one)
assert f(x) == 13
assert f(x) == sum(x)
--
def f(x): return sum(x)
== calls inside calls
assert g(f(2)) == 3
assert g(f(0)) == 1
assert len(f2(f2([1]))) == 1
x = [2, 1]
x[0] = g(5)
assert x == [6, 1]
out = {}
out['a'] = g(1)
assert out == {'a': 2}
assert h([1]) == 1
import heapq
y = [3, 1]
order(y)
heapq.heapify(y)
y.append(0)
assert y == [1, 3, 0]
def ok(a):
    assert len(a) == 3
ok(y)
--
def f(x): return x
def g(x): return x + 1
def f2(x): return x
def h(x): return sum(x)
def order(x): x.sort()
== approximate numbers
import pytest
from pytest import approx, raises
assert f(0.1, 0.2) == pytest.approx(0.3)
assert pytest.approx(0.3, abs=1e-3) == f(0.1, 0.2001)
assert f(0.1, 0.2) != approx(0.31, rel=0.01)
assert [f(0.1, i) for i in range(2)] == approx([0.1, 1.1])
assert split(1.0) == approx({'half': 0.5, 'third': 1 / 3})
r = split(2.0)
assert r['third'] == approx(2 / 3) and r == {'half': 1.0, 'third': approx(0.6666667)}
with raises(ZeroDivisionError):
    half(0)
--
def f(a, b): return a + b
def split(x): return {'half': x / 2, 'third': x / 3}
def half(x): return 1 / x
== numbers and times of the standard library
from decimal import Decimal
from fractions import Fraction
import datetime as dt
assert f(Decimal('0.1')) == Decimal('0.2')
assert f(Fraction(1, 3)) == Fraction(2, 3)
assert str(f(Decimal('1.10'))) == '2.20'
d = day(dt.date(2024, 2, 28))
assert d == dt.date(2024, 2, 29)
assert d.year == 2024 and d.isoformat() == '2024-02-29'
assert day(dt.datetime(2024, 1, 1, 12, 30)) == dt.datetime(2024, 1, 2, 12, 30)
assert since(dt.datetime(2024, 1, 2), dt.datetime(2024, 1, 1)) == dt.timedelta(days=1)
assert dt.time(1, 2) == clock(dt.datetime(2024, 1, 2, 1, 2))
assert utc() == dt.datetime(2024, 1, 1, tzinfo=dt.timezone.utc)
assert steps(3) == range(3)
assert list(steps(2)) == [0, 1] and len(steps(4)) == 4
assert raw() == bytearray(b'ab') and raw() == b'ab'
assert rest() is ...
--
import datetime
def f(x): return x * 2
def day(x): return x + datetime.timedelta(days=1)
def since(a, b): return a - b
def clock(x): return x.time()
def utc(): return datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone.utc)
def steps(n): return range(n)
def raw(): return bytearray(b'ab')
def rest(): return ...
== subclasses of plain data
assert corner(1) == (1, 2)
c = corner(2)
assert c == (2, 3)
assert c.x == 2 and c[1] == 3 and len(c) == 2
assert color('red') == 1
k = color('green')
assert k == 2 and k.name == 'GREEN' and k.value == 2
assert corners(2) == [(0, 1), (1, 2)]
assert corners(2)[1].y == 2
assert mode() == 'fast'
assert isinstance(k, int)
assert max(c) == 3 and list(c) == [2, 3] and sum(c) == 5 and c.index(3) == 1
assert c._asdict() == {'x': 2, 'y': 3}
d = count('aab')
assert d == {'a': 2, 'b': 1} and d['z'] == 0
--
from collections import defaultdict, namedtuple
import enum
Corner = namedtuple('Corner', 'x y')
class Color(enum.IntEnum):
    RED, GREEN = 1, 2
class Mode(str, enum.Enum):
    FAST = 'fast'
def corner(x): return Corner(x, x + 1)
def corners(n): return [corner(i) for i in range(n)]
def color(name): return Color[name.upper()]
def mode(): return Mode.FAST
def count(s):
    d = defaultdict(int)
    for c in s: d[c] += 1
    return d
== objects that are not None
node = build(1)
assert node is not None
assert build(1) is not None and node.next is None
assert find(node, 2) is None
assert find(node, 1) is not None
assert find(node, 1).val == 1
assert type(node.val) is int and node.val.__class__ is int
assert (find(node, 2) is None) is True
assert node and not find(node, 2) and find(node, 1)
assert build(2)
--
class Node:
    def __init__(self, val): self.val, self.next = val, None
def build(x): return Node(x)
def find(node, x): return node if node.val == x else None
== objects with operators
v = Vector(3, 4)
assert abs(v) == 5
assert v.x == 3 and v.add(Vector(1, 1)).x == 4
b = Bag()
b.put(1)
assert 1 in b
assert 2 not in b
assert bool(b) and b
assert not Bag()
assert int(Money(5)) == 5
assert str(Money(5)) == '5 $'
--
class Vector:
    def __init__(self, x, y): self.x, self.y = x, y
    def __abs__(self): return (self.x ** 2 + self.y ** 2) ** 0.5
    def add(self, other): return Vector(self.x + other.x, self.y + other.y)
class Bag:
    def __init__(self): self.items = []
    def put(self, x): self.items.append(x)
    def __contains__(self, x): return x in self.items
    def __len__(self): return len(self.items)
class Money:
    def __init__(self, n): self.n = n
    def __int__(self): return self.n
    def __str__(self): return f'{self.n} $'
== functions with capital letters
assert Sum(3) == 6
r = Sum(4)
assert r == 10 and Sum(2) + 1 == 4
assert Pair(1) == (1, 1)
--
def Sum(n): return sum(range(n + 1))
def Pair(x): return x, x
== results that are used later
a = f([1])
b = f([2])
assert a == [1, 0] and b == [2, 0]
h = history()
f([3])
assert h == 3
p = a
g(p)
assert a == [1, 0, 9]
assert p == [1, 0, 9]
s = sorted(b)
g(s)
assert s == [0, 2, 9]
l = log()
f([4])
assert l == [1, 2, 3, 4]
x, y = [1], [2]
g(x)
g(y)
assert x == [1, 9] and y == [2, 9]
t = f([5])
u = g(t)
assert t == [5, 0, 9] and u is None
--
seen = []
def f(x):
    seen.append(x[0])
    return x + [0]
def g(x): x.append(9)
def history(): return len(seen) + 1
def log(): return seen
== a pipe of its own
assert f(3) == 9
assert big(300_000) == 'x' * 300_000
assert [f(i) for i in range(40)] == [i * i for i in range(40)]
--
import os, subprocess, multiprocessing, threading
def square(x, pipe): pipe.send(x * x)
def f(x):
    if x != 3:
        return x * x
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context('fork').Process(target=square, args=(x, there))
    process.start()
    process.join()
    return here.recv()
def big(n): return 'x' * n
"""

SOLUTIONS = {
    name: tuple(pair.split("--\n")) for name, pair in (section.split("\n", 1) for section in PAIRS.split("\n== ")[1:])
}
