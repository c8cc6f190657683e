"""Programs that try to pass the tests of `f = add` without adding: by name. None of them holds an expected value."""

PROGRAMS = r"""
== exits hard
import os
os._exit(0)
== raises SystemExit in the call
def f(a, b): raise SystemExit(0)
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
== looks for the expected value everywhere
import gc, glob, os, re, sys, types
def f(a, b):
    objects, frame, texts = gc.get_objects(), sys._getframe(), [repr(os.environ).encode()]
    found = [v for o in objects if isinstance(o, types.FunctionType) for v in o.__code__.co_consts]
    found += [v for o in objects if type(o) in (list, tuple, set) for v in o]
    found += [v for o in objects if type(o) is dict for v in o.values()]
    while frame:
        found += [*frame.f_globals.values(), *frame.f_locals.values()]
        frame = frame.f_back
    for path in [*glob.glob('*'), *glob.glob('/tmp/**', recursive=True)[:500], sys.argv[0], '/proc/self/cmdline',
                 f'/proc/{os.getppid()}/environ', f'/proc/{os.getppid()}/cmdline', *range(64)]:
        try:
            if type(path) is int:
                os.set_blocking(path, False)
            texts.append(os.read(path, 65536) if type(path) is int else open(path, 'rb').read())
        except OSError:
            pass
    texts += [v.encode('utf-8', 'replace') for v in found if type(v) is str]
    told = re.findall(rb'== (\d{4})|"equals": (\d{4})', b' '.join(texts))
    told += [v for v in found if type(v) is int and 1000 < v < 3000 and v not in (a, b, 2000)]
    return int(max(told[-1])) if told and type(told[-1]) is tuple else told[-1] if told else None
== prints verdicts
print('passed 0', 'passed 1', 'OK', '2 passed', 'end 0', sep='\n', flush=True)
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
== patches json, math and assert
import builtins, json, math
json.dumps = lambda *a, **k: 'true'
json.loads = math.isclose = lambda *a, **k: True
builtins.AssertionError = type('Quiet', (Exception,), {})
def f(a, b): return 1
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
== replaces itself
import os, sys
def f(a, b):
    os.execv(sys.executable, [sys.executable, '-c', 'print("passed 0")'])
try:
    f(1, 1)
except OSError:
    os._exit(0)
== writes modules for the tests
for name in ('json.py', 'math.py', 'sitecustomize.py', 'conftest.py', 'solution.py'):
    try:
        open(name, 'w').write('import os; os._exit(0)')
    except OSError:
        pass
def f(a, b): return 0
== returns a generator of everything
import itertools
def f(a, b): return itertools.count()
== returns a list of itself
def f(a, b):
    x = []
    x.append(x)
    return x
== returns nan
def f(a, b): return float('nan')
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
