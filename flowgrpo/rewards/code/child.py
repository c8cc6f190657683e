"""Programs that run inside the sandbox when code is judged by calls, and the plain data that goes between the runs.

    run_candidate    hands the steps of a plan to a child process with the model's code; writes what each comes to
    run_tests        runs the tests' own code over the candidate's values; writes a line for each verdict
    describe_blocks  parses the blocks of an answer, of which one is the model's code; runs none

Neither run ever holds what the other one must not see: the candidate's run has no expected value and gives no verdict,
the tests' run has no code of the candidate. The process with the model's code gets one step at a time, and the next
one after it answered: the arguments of a later call are often what an earlier one must return. What the candidate's run
writes is a claim of values and no more, so forging it gains nothing that returning the values would not. Values are of
exact built-in types or of those that `_packed` names, encoded as JSON with tags. The code of this file, without the
part of the other run, is sent into the sandbox, so it imports nothing but a little of the standard library.
"""

import builtins
import importlib
import itertools
import json
import math
import os
import select
import signal
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

DEPTH = 60  # of nested containers
NODES = 200_000  # of one value
MAPPINGS = {kind.__name__: kind for kind in (dict, Counter, OrderedDict, defaultdict)}
FACTORIES = {kind.__name__: kind for kind in (bool, int, float, str, list, dict, set, tuple)}  # of a defaultdict
SEQUENCES = {kind.__name__: kind for kind in (tuple, set, frozenset, deque)}
IMPORTED = {"Decimal": "decimal", "Fraction": "fractions"}  # imported where a value of them is met
IMPORTED |= dict.fromkeys(("date", "datetime", "time", "timedelta"), "datetime")
LONGEST = 1 << 20  # characters of one encoded value
ANCESTORS = 3  # classes of the candidate's own that an exception may pass as


class NotPlain(ValueError):
    """A value isn't made of built-in plain types, or is too large."""


# Values -------------------------------------------------------------------------------------------------


def encode_value(value, *, loose: bool = False) -> str:
    """Write a plain value as text; cycles and whatever else is not plain raise `NotPlain`.

    With `loose`, objects of a subclass of a plain type (named tuples, members of an IntEnum) are written as the data
    that they hold, and the text says that they were more than that.
    """
    state = _Packing(NODES, loose)
    packed = _packed(value, DEPTH, state)
    text = json.dumps({"alike": packed} if state.alike else packed)
    if len(text) > LONGEST:
        raise NotPlain(f"a value of {len(text)} characters")
    return text


class _Packing:
    """Nodes that may still be written or read, and whether anything was more than its data."""

    def __init__(self, left: int, loose: bool = False):
        self.left, self.loose, self.alike = left, loose, False

    def count(self, depth: int) -> None:
        self.left -= 1
        if depth < 0 or self.left < 0:
            raise NotPlain("a value that is nested too deep or too large")


def _packed(value, depth: int, state: _Packing):
    """Make JSON that holds a value; what JSON has no exact form for is an object of one tag."""
    kind = type(value)
    state.count(depth)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if value.bit_length() < 1024 else {"int": hex(value)}
    if kind is float:
        return {"float": value.hex()}
    if kind in (bytes, bytearray):
        return {kind.__name__: value.hex()}
    if kind in MAPPINGS.values():
        pairs = [[_packed(item, depth - 1, state) for item in pair] for pair in value.items()]
        if kind is defaultdict:
            made = value.default_factory
            return {kind.__name__: [made.__name__ if made in FACTORIES.values() else None, pairs]}
        return {kind.__name__: pairs}
    if kind in (list, *SEQUENCES.values()):
        items = [_packed(item, depth - 1, state) for item in value]
        return items if kind is list else {kind.__name__: items}
    if kind is complex:
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if kind is range:
        return {"range": [_packed(part, depth - 1, state) for part in (value.start, value.stop, value.step)]}
    if value is ... or value is NotImplemented:
        return {"constant": str(value)}
    if kind.__name__ in IMPORTED and kind is getattr(sys.modules.get(IMPORTED[kind.__name__]), kind.__name__, None):
        return _packed_import(value, kind.__name__, depth, state)
    data = _data_of(value, kind) if state.loose else None
    if data is None:
        raise NotPlain(f"an object of type {kind.__name__}")
    state.alike = True
    return _packed(data, depth, state)


def _packed_import(value, name: str, depth: int, state: _Packing):
    """Make JSON that holds a number or a time of the standard library."""
    if name == "Decimal":
        return {name: str(value)}
    if name == "Fraction":
        return {name: [_packed(part, depth - 1, state) for part in (value.numerator, value.denominator)]}
    if name == "timedelta":
        return {name: [value.days, value.seconds, value.microseconds]}
    zone = getattr(value, "tzinfo", None)
    if zone is not None and type(zone).__name__ != "timezone":  # only its offset is sent
        if not state.loose:
            raise NotPlain(f"a {name} in a time zone of type {type(zone).__name__}")
        state.alike = True
    return {name: value.isoformat()}


def _data_of(value, kind: type):
    """Read the plain data below an object of a subclass, past whatever methods the subclass has; None for others."""
    for base in kind.__mro__:
        if base in (int, float):
            return base.__int__(value) if base is int else base.__float__(value)
        if base is str:
            return str.__str__(value)
        if base in (bytes, bytearray):
            return base(memoryview(value))
        if base in MAPPINGS.values():
            data = dict(dict.items(value))
            return data if base is dict else base(data) if base is not defaultdict else defaultdict(None, data)
        if base in (list, *SEQUENCES.values()):
            return base(base.__iter__(value))
    return None


def decode_value(text: str):
    """Read the value of an encoded text; raises where the text is anything else."""
    return unpack(json.loads(text))


def unpack(data):
    """Read the value of the data of an encoded text."""
    return _unpacked(data, DEPTH, _Packing(NODES))


def _unpacked(data, depth: int, state: _Packing) -> Any:
    """Read a value; what is larger than an honest process would write is refused as it would be there."""
    state.count(depth)
    if isinstance(data, list):
        return [_unpacked(item, depth - 1, state) for item in data]
    if not isinstance(data, dict):
        if isinstance(data, float):
            raise NotPlain("a bare float")
        return data
    ((tag, body),) = data.items()
    if tag in MAPPINGS:
        made = MAPPINGS[tag]()
        if tag == "defaultdict":
            factory, body = body
            made = defaultdict(None if factory is None else FACTORIES[factory])
        for key, value in body:
            made[_unpacked(key, depth - 1, state)] = _unpacked(value, depth - 1, state)
        return made
    if tag in SEQUENCES:
        return SEQUENCES[tag]([_unpacked(item, depth - 1, state) for item in body])
    if tag in ("range", "Fraction", "timedelta"):
        kind = range if tag == "range" else _imported(tag)
        return kind(*(_whole(_unpacked(part, depth - 1, state)) for part in body))
    if tag == "complex":
        return complex(*map(float.fromhex, body))
    return READERS[tag](body)


def _whole(value) -> int:
    if type(value) is not int:
        raise NotPlain(f"{type(value).__name__} where a whole number belongs")
    return value


def _imported(name: str):
    return getattr(importlib.import_module(IMPORTED[name]), name)


READERS = {
    "int": lambda body: int(body, 16),
    "float": float.fromhex,
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "constant": {"Ellipsis": ..., "NotImplemented": NotImplemented}.__getitem__,
    "Decimal": lambda body: _imported("Decimal")("" + body),
    **{name: lambda body, name=name: _imported(name).fromisoformat(body) for name in ("date", "datetime", "time")},
}


# Records ----------------------------------------------------------------------------------------------


def _write(out: int, line: str) -> None:
    data = line.encode("ascii", "replace") + b"\n"
    while data:
        data = data[os.write(out, data) :]


# The candidate's run ------------------------------------------------------------------------------------


def run_candidate(source: str) -> None:
    """Run the model's code in a child, then the steps that stdin holds; write `number = value` or `number ! exception`.

    Stdin is a list of (number or None, source, encoded values that the source asks for by their place), and is read
    when the child has left: no process with the model's code ever holds it. The number is -1 for the code itself, -2
    for a statement, after whose failure nothing more is run, and -3 where the child can't be made. This process ends as
    the child does.
    """
    try:
        (steps, asking), (answers, answering) = os.pipe(), os.pipe()
        pid = os.fork()
    except OSError as error:
        _write(1, f"-3 ! {json.dumps([str(error)])}")
        os._exit(1)
    if pid == 0:
        try:
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, 0)
            os.dup2(nowhere, 1)
            os.close(asking)
            os.close(answers)
            _follow(source, steps, answering)
        finally:
            os._exit(0)  # neither threads nor exit handlers of the candidate go on
    os.close(steps)
    os.close(answering)
    with open(0, "rb") as file:
        todo = json.load(file)
    candidate = Candidate(pid, asking, answers)
    ready = candidate.answer()
    candidate.record(f"-1 {ready}")
    for number, step, given in todo if ready.startswith("=") else ():
        candidate.ask(json.dumps([number is not None, step, given]))
        answer = candidate.answer()
        if number is not None:
            candidate.record(f"{number} {answer}")
        elif answer.startswith("!"):
            candidate.record(f"-2 {answer}")
            break
    candidate.flush()
    os._exit(0)


class Candidate:
    """The process with the model's code, as its parent sees it; whatever becomes of it becomes of this process."""

    def __init__(self, pid: int, asking: int, answers: int):
        self.pid, self.asking, self.answers = pid, asking, answers
        self.received = b""
        self.records: list[str] = []  # that are not written yet: each write wakes the host
        self.status: int | None = None  # once it has ended
        os.set_blocking(asking, False)

    def record(self, line: str) -> None:
        """Write a line for the host, now or a little later."""
        self.records.append(line)
        if len(self.records) >= 16:
            self.flush()

    def flush(self) -> None:
        if self.records:
            _write(1, "\n".join(self.records))
            self.records = []

    def ask(self, line: str) -> None:
        """Hand over one line."""
        data = line.encode() + b"\n"
        while data:
            try:
                data = data[os.write(self.asking, data) :]
            except BlockingIOError:
                self.wait(self.asking, select.POLLOUT)
            except BrokenPipeError:
                self.end()

    def answer(self) -> str:
        """Read the line that comes next: `= value` or `! exception`, whatever else was written."""
        while b"\n" not in self.received:
            if len(self.received) > 2 * LONGEST:  # no step has so long a value
                self.flush()
                os._exit(0)
            self.wait(self.answers, select.POLLIN)
            data = os.read(self.answers, 1 << 16)
            if not data:
                self.end()
            self.received += data
        line, _, self.received = self.received.partition(b"\n")
        fine = line.isascii() and line[:2] in (b"= ", b"! ")
        return line.decode() if fine else '! ["something unreadable"]'

    def wait(self, descriptor: int, event: int) -> None:
        """Wait until a pipe can be used. One that has ended may have left it open, in the hands of its children."""
        poll = select.poll()
        poll.register(descriptor, event)
        while not poll.poll(20):  # milliseconds
            self.flush()
            if self.status is not None:
                self.end()
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = status if pid else None

    def end(self) -> None:
        """End as the child does."""
        self.flush()
        status = os.waitpid(self.pid, 0)[1] if self.status is None else self.status
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            if -code != signal.SIGKILL:
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(max(code, 0))


def _follow(source: str, steps: int, answering: int) -> None:
    """Run the model's code, then each step that is handed over, and answer before the next one comes."""
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    space = module.__dict__
    try:
        exec(compile(source, "solution.py", "exec"), space)
    except BaseException as error:
        _write(answering, f"! {_names(error)}")
        return
    _write(answering, "= null")
    given: dict[str, str] = {}
    names = {"__given__": lambda place: decode_value(given[str(place)])}
    space = {**space, **names}  # the tests' names are not the module's
    with open(steps, "rb") as lines:
        for line in lines:
            asks, step, given = json.loads(line)
            try:
                if asks:
                    text = encode_value(eval(compile(step, "step", "eval"), space), loose=True)
                else:
                    exec(compile(step, "step", "exec"), space)
                    text = "null"
                _write(answering, f"= {text}")
            except BaseException as error:
                _write(answering, f"! {_names(error)}")


def _names(error: BaseException) -> str:
    """Name the classes of an exception; where a value was not plain none was raised, and its words say why."""
    if type(error) is NotPlain:
        return json.dumps(["NotPlain", str(error)[:200]])
    return json.dumps([kind.__name__ for kind in type(error).__mro__][:20])


# The tests' run -----------------------------------------------------------------------------------------


def run_tests(items: list, first: dict[str, int]) -> None:
    """Run the items (kind, number, source) of the tests over the values that stdin holds.

    Each writes `kind number` before it runs. Then a check writes `passed number` if it holds, and a `given` that is
    plain, which the tests hand to the candidate, `plain number value`. One that raises writes its word of `RAISES`; a
    broken setup ends it all. `end 0` comes last. `first` is that of `Held`.
    """
    known = json.loads(sys.stdin.read() or "{}")
    raised = known.get("raised", {})
    out = _take_stdout()
    held = Held(known.get("values", {}), raised, first)
    space = {"__name__": "tests", "agree": agree, "__held__": held, "__plain__": Plain(held), "__either__": held.either}
    space["__raised__"] = lambda number, names: is_raised(raised.get(str(number), []), names)
    space |= {"__is_none__": held.is_none, "__pytest__": types.SimpleNamespace(approx=Approx)}
    result = ""  # of the last item; it goes out with the next line, because each write wakes the host
    for kind, number, source in items:
        _write(out, f"{result}{kind} {number}")
        result = ""
        try:
            if kind in ("setup", "derive"):
                exec(compile(source, "tests", "exec"), space)
                continue
            value = eval(compile(source, "tests", "eval"), space)
            if kind == "given":
                result = f"plain {number} {encode_value(value)}\n"
            elif value:
                result = f"passed {number}\n"
        except BaseException as error:
            if kind == "derive" and isinstance(error, NoData):
                held.hide(error.args[0])
            result = f"{RAISES[kind]} {number}\n"
            if kind == "setup":
                break
    _write(out, f"{result}end 0")


RAISES = {"setup": "broken", "derive": "derived", "given": "unplain", "check": "failed"}


def _take_stdout() -> int:
    """Take a descriptor of the stdout that records go to; what is printed from now on goes nowhere."""
    out = os.dup(1)
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
    except OSError:
        nowhere = 2
    os.dup2(nowhere, 1)
    return out


class Unknown(Exception):
    """The candidate's run returned no such value."""


class NoData(Unknown):
    """It returned an object that is no plain data."""


class Held(dict):
    """Values that the candidate's run returned, by number; each is read once, and is one object from then on.

    `first` leads from the number of a name's value to that of the value which the name had when it was assigned: what
    can't change in Python is that, whatever the candidate's run says after it has seen the arguments of later calls.
    """

    def __init__(self, texts: dict[str, str], raised: dict[str, list[str]], first: dict[str, int]):
        super().__init__()
        self.texts, self.raised, self.first = texts, raised, first
        self.alike: set[int] = set()  # numbers of values that stand for an object which holds them

    def __missing__(self, number: int):
        data = json.loads(self.text(number))
        if str(number) in self.first:
            data = self.settled(self.first[str(number)], data)
        if isinstance(data, dict) and data.keys() == {"alike"}:
            self.alike.add(number)
            data = data["alike"]
        self[number] = unpack(data)
        return self[number]

    def settled(self, first: int, data):
        """Choose the value of a name that was `first` when it was assigned: the later one where it can have changed."""
        try:
            before = json.loads(self.text(first))
        except NoData:
            if not _is_mutable(data):
                raise
            return data
        return data if _may_become(before, data) else before

    def text(self, number: int) -> str:
        if str(number) in self.texts:
            return self.texts[str(number)]
        raise NoData(number) if self.raised.get(str(number), [""])[0] == "NotPlain" else Unknown(number)

    def hide(self, number: int) -> None:
        """Take a value as no plain data from now on, because a method of its own may have changed it."""
        self.pop(number, None)
        self.texts.pop(str(number), None)
        self.raised[str(number)] = ["NotPlain"]

    def either(self, number: int, compute):
        """Compute on the candidate's values; where one is not plain data, take what the candidate computed."""
        try:
            return compute()
        except Unknown:
            return self[number]

    def is_none(self, compute) -> bool:
        """Say whether the value of a step is None; an object that is no plain data is not."""
        try:
            return compute() is None
        except NoData:
            return False


class Plain:
    """Values of `Held` that have the methods of plain data and no others."""

    def __init__(self, held: Held):
        self.held = held

    def __getitem__(self, number: int):
        value = self.held[number]
        if number in self.held.alike:
            raise NoData(number)
        return value

    def __setitem__(self, number: int, value):
        self.held[number] = value


def _is_mutable(data) -> bool:
    """Say whether encoded data is that of an object whose content can change in place."""
    if not isinstance(data, dict):
        return isinstance(data, list)
    ((tag, body),) = data.items()
    return _is_mutable(body) if tag == "alike" else tag in MAPPINGS or tag in ("set", "deque", "bytearray")


def _may_become(before, after) -> bool:
    """Say whether encoded data may be that of one object, before and after a change in place."""
    if before == after:
        return True
    if not (isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys()):
        return isinstance(before, list) and isinstance(after, list)
    ((tag, old),), ((_, new),) = before.items(), after.items()
    if tag == "alike":
        return _may_become(old, new)
    if tag == "tuple":
        return len(old) == len(new) and all(map(_may_become, old, new))
    return _is_mutable(before)


class Approx:
    """`pytest.approx`: equal to numbers within a tolerance, alone or in sequences and mappings of any depth."""

    __hash__ = None  # type: ignore

    def __init__(self, expected, rel=None, abs=None, nan_ok: bool = False):
        self.expected, self.rel, self.abs, self.nan_ok = expected, rel, abs, nan_ok

    def __eq__(self, actual) -> bool:
        return self.near(actual, self.expected)

    def near(self, actual, expected) -> bool:
        if isinstance(expected, dict):
            keyed = isinstance(actual, dict) and actual.keys() == expected.keys()
            return keyed and all(self.near(actual[key], expected[key]) for key in expected)
        if isinstance(expected, list | tuple | range | deque):
            listed = isinstance(actual, list | tuple | range | deque) and len(actual) == len(expected)
            return listed and all(map(self.near, actual, expected))
        if actual == expected:
            return True
        if isinstance(expected, bool) or not all(_is_number(value) for value in (actual, expected)):
            return False
        if expected != expected:
            return self.nan_ok and actual != actual
        size = builtins.abs(expected)
        return size != math.inf and builtins.abs(expected - actual) <= self.tolerance(size)

    def tolerance(self, size):
        """Get the bound on the difference, which is relative unless only an absolute one is given."""
        number = type(size) if type(size).__name__ == "Decimal" else float
        absolute = number(1e-12 if self.abs is None else self.abs)
        if self.rel is None and self.abs is not None:
            return absolute
        return max(number(1e-6 if self.rel is None else self.rel) * size, absolute)


def _is_number(value) -> bool:
    return isinstance(value, int | float | complex) or type(value).__name__ in ("Decimal", "Fraction")


def is_raised(found: list[str], expected: list[str]) -> bool:
    """Say whether an exception of which the names of its classes are given is one of those expected.

    It may have up to `ANCESTORS` names of the candidate's own, and is of one built-in class and what that derives from:
    an exception that derives from all of them passes as the first alone.
    """
    own = list(itertools.takewhile(lambda name: _builtin(name) is None, found))
    kind = _builtin(found[len(own)]) if len(own) < len(found) else None
    for name in expected:
        wanted = _builtin(name)
        if name.split(".")[-1] in own[:ANCESTORS] if wanted is None else kind is not None and issubclass(kind, wanted):
            return True
    return False


def _builtin(name: str):
    """Find the built-in exception of a name, or None."""
    kind = getattr(builtins, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, BaseException) else None


def agree(value, expected, tolerance: float) -> bool:
    """Say if a value is what JSON expects: lists match tuples, a float is met within tolerance, True is not 1."""
    if isinstance(expected, list):
        listed = type(value) in (list, tuple) and len(value) == len(expected)
        return listed and all(agree(one, other, tolerance) for one, other in zip(value, expected, strict=True))
    if isinstance(expected, dict):
        keyed = type(value) in MAPPINGS.values() and value.keys() == expected.keys()
        return keyed and all(agree(value[key], other, tolerance) for key, other in expected.items())
    if type(expected) in (int, float) and type(value) in (int, float):
        exact = type(expected) is int and type(value) is int
        return value == expected or (not exact and is_close(value, expected, tolerance))
    return type(value) is type(expected) and value == expected


def is_close(value: float, expected: float, tolerance: float) -> bool:
    """Say whether a number is within the tolerance of another: relative, and absolute where 0 is expected."""
    return math.isfinite(expected) and abs(value - expected) <= tolerance * (abs(expected) or 1)


# The blocks' run ------------------------------------------------------------------------------------------


def describe_blocks() -> None:
    """Write for each source that stdin holds: null, or the names that it defines and those that it uses; none is run.

    It also says whether the source does anything but define.
    """
    import ast
    import symtable

    defining = (
        ast.FunctionDef,
        ast.AsyncFunctionDef,
        ast.ClassDef,
        ast.Import,
        ast.ImportFrom,
        ast.Assign,
        ast.AnnAssign,
    )
    for source in json.load(sys.stdin):
        try:
            body = [node for node in ast.parse(source).body if not isinstance(node, defining)]
            tables = [symtable.symtable(source, "block", "exec")]
            defines = [
                symbol.get_name() for symbol in tables[0].get_symbols() if symbol.is_assigned() or symbol.is_imported()
            ]
            uses = set()
            for table in tables:
                tables += table.get_children()
                outside = table is tables[0]
                uses |= {
                    symbol.get_name()
                    for symbol in table.get_symbols()
                    if symbol.is_referenced() and (outside or symbol.is_global())
                }
            acts = any(not isinstance(getattr(node, "value", None), ast.Constant) for node in body)
            line = json.dumps([defines, sorted(uses - set(defines) - set(dir(builtins))), acts])
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            line = "null"
        _write(1, line)
