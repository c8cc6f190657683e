"""Programs that run in the sandbox when code is judged by calls, and the encoding of values between the runs.

    run_candidate    sends the steps of a plan to a child process with the model's code; writes the value of each
    run_tests        runs the tests' own code over the candidate's values; writes a line for each verdict
    describe_blocks  parses the blocks of an answer, one of which is the model's code; runs none

Neither run has what the other must not see: the candidate's run has no expected value and gives no verdict, the tests'
run has no code of the candidate. The process with the model's code gets one step at a time, and the next one after it
answered: the arguments of a later call are often what an earlier one must return. The output of the candidate's run is
only a claim of values, so forging it gains nothing that returning the values would not. Values are of exact built-in
types or of those that `_pack` names, encoded as JSON with tags. The code of this file, without the part of the other
run, is sent into the sandbox, so it imports only a little of the standard library.
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

MAX_DEPTH = 60  # of nested containers
MAX_NODES = 200_000  # of one value
MAPPINGS = {kind.__name__: kind for kind in (dict, Counter, OrderedDict, defaultdict)}
FACTORIES = {kind.__name__: kind for kind in (bool, int, float, str, list, dict, set, tuple)}  # of a defaultdict
SEQUENCES = {kind.__name__: kind for kind in (tuple, set, frozenset, deque)}
IMPORTED = {"Decimal": "decimal", "Fraction": "fractions"}  # imported when a value of them occurs
IMPORTED |= dict.fromkeys(("date", "datetime", "time", "timedelta"), "datetime")
MAX_ENCODED = 1 << 20  # characters of one encoded value
MAX_OWN_CLASSES = 3  # classes of the candidate's own that an exception may count as


class NotPlain(ValueError):
    """A value isn't plain data, or is too large."""


# Values -------------------------------------------------------------------------------------------------


def encode_value(value, *, loose: bool = False) -> str:
    """Encode a plain value as text; raises `NotPlain` for cycles and everything else that is not plain.

    With `loose`, objects of a subclass of a plain type (named tuples, members of an IntEnum) are encoded as their data,
    and the text is tagged `alike`.
    """
    state = _PackState(MAX_NODES, loose)
    packed = _pack(value, MAX_DEPTH, state)
    text = json.dumps({"alike": packed} if state.is_alike else packed)
    if len(text) > MAX_ENCODED:
        raise NotPlain(f"a value of {len(text)} characters")
    return text


class _PackState:
    """Number of nodes that may still be encoded or decoded, and whether any object was more than its data."""

    def __init__(self, nodes_left: int, loose: bool = False):
        self.nodes_left, self.loose, self.is_alike = nodes_left, loose, False

    def count(self, depth: int) -> None:
        self.nodes_left -= 1
        if depth < 0 or self.nodes_left < 0:
            raise NotPlain("a value that is nested too deep or too large")


def _pack(value, depth: int, state: _PackState):
    """JSON of a value; a type that JSON lacks is an object with one tag."""
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
        pairs = [[_pack(item, depth - 1, state) for item in pair] for pair in value.items()]
        if kind is defaultdict:
            factory = value.default_factory
            return {kind.__name__: [factory.__name__ if factory in FACTORIES.values() else None, pairs]}
        return {kind.__name__: pairs}
    if kind in (list, *SEQUENCES.values()):
        items = [_pack(item, depth - 1, state) for item in value]
        return items if kind is list else {kind.__name__: items}
    if kind is complex:
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if kind is range:
        return {"range": [_pack(part, depth - 1, state) for part in (value.start, value.stop, value.step)]}
    if value is ... or value is NotImplemented:
        return {"constant": str(value)}
    if kind.__name__ in IMPORTED and kind is getattr(sys.modules.get(IMPORTED[kind.__name__]), kind.__name__, None):
        return _pack_import(value, kind.__name__, depth, state)
    data = _plain_data(value, kind) if state.loose else None
    if data is None:
        raise NotPlain(f"an object of type {kind.__name__}")
    state.is_alike = True
    return _pack(data, depth, state)


def _pack_import(value, name: str, depth: int, state: _PackState):
    """JSON of a number or a time of the standard library."""
    if name == "Decimal":
        return {name: str(value)}
    if name == "Fraction":
        return {name: [_pack(part, depth - 1, state) for part in (value.numerator, value.denominator)]}
    if name == "timedelta":
        return {name: [value.days, value.seconds, value.microseconds]}
    zone = getattr(value, "tzinfo", None)
    if zone is not None and type(zone).__name__ != "timezone":  # only its offset would be sent
        if not state.loose:
            raise NotPlain(f"a {name} in a time zone of type {type(zone).__name__}")
        state.is_alike = True
    return {name: value.isoformat()}


def _plain_data(value, kind: type):
    """Plain data of an object of a subclass, read without the subclass's own methods; None for other objects."""
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
    """Decode an encoded value; raises if the text is anything else."""
    return unpack(json.loads(text))


def unpack(data):
    """Decode the JSON of an encoded value."""
    return _unpack(data, MAX_DEPTH, _PackState(MAX_NODES))


def _unpack(data, depth: int, state: _PackState) -> Any:
    """Decode a value; one larger than `encode_value` would write is refused."""
    state.count(depth)
    if isinstance(data, list):
        return [_unpack(item, depth - 1, state) for item in data]
    if not isinstance(data, dict):
        if isinstance(data, float):
            raise NotPlain("a bare float")
        return data
    ((tag, body),) = data.items()
    if tag in MAPPINGS:
        mapping = MAPPINGS[tag]()
        if tag == "defaultdict":
            factory, body = body
            mapping = defaultdict(None if factory is None else FACTORIES[factory])
        for key, value in body:
            mapping[_unpack(key, depth - 1, state)] = _unpack(value, depth - 1, state)
        return mapping
    if tag in SEQUENCES:
        return SEQUENCES[tag]([_unpack(item, depth - 1, state) for item in body])
    if tag in ("range", "Fraction", "timedelta"):
        kind = range if tag == "range" else _imported(tag)
        return kind(*(_integer(_unpack(part, depth - 1, state)) for part in body))
    if tag == "complex":
        return complex(*map(float.fromhex, body))
    return READERS[tag](body)


def _integer(value) -> int:
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
    """Run the model's code in a child, then the steps of stdin; write `number = value` or `number ! exception`.

    Stdin is a list of (number or None, source, encoded inputs that the source reads by their number). It is read after
    the fork: no process with the model's code ever has it. The number is -1 for the code itself, -2 for a statement,
    after whose failure nothing more is run, and -3 if the child can't be made. This process ends as the child does.
    """
    try:
        (steps, asking), (answers, answering) = os.pipe(), os.pipe()
        pid = os.fork()
    except OSError as error:
        _write(1, f"-3 ! {json.dumps([str(error)])}")
        os._exit(1)
    if pid == 0:
        try:
            null_device = os.open(os.devnull, os.O_RDWR)
            os.dup2(null_device, 0)
            os.dup2(null_device, 1)
            os.close(asking)
            os.close(answers)
            _serve_steps(source, steps, answering)
        finally:
            os._exit(0)  # stops threads and exit handlers of the candidate, too
    os.close(steps)
    os.close(answering)
    with open(0, "rb") as file:
        steps_to_run = json.load(file)
    candidate = Candidate(pid, asking, answers)
    first_answer = candidate.answer()
    candidate.record(f"-1 {first_answer}")
    for number, step, inputs in steps_to_run if first_answer.startswith("=") else ():
        candidate.ask(json.dumps([number is not None, step, inputs]))
        answer = candidate.answer()
        if number is not None:
            candidate.record(f"{number} {answer}")
        elif answer.startswith("!"):
            candidate.record(f"-2 {answer}")
            break
    candidate.flush()
    os._exit(0)


class Candidate:
    """The process with the model's code, seen from its parent, which ends as it does."""

    def __init__(self, pid: int, asking: int, answers: int):
        self.pid, self.asking, self.answers = pid, asking, answers
        self.received = b""
        self.records: list[str] = []  # not written yet: each write wakes the host
        self.status: int | None = None  # once it has ended
        os.set_blocking(asking, False)

    def record(self, line: str) -> None:
        """Write a line for the host, buffered."""
        self.records.append(line)
        if len(self.records) >= 16:
            self.flush()

    def flush(self) -> None:
        if self.records:
            _write(1, "\n".join(self.records))
            self.records = []

    def ask(self, line: str) -> None:
        """Send one line."""
        data = line.encode() + b"\n"
        while data:
            try:
                data = data[os.write(self.asking, data) :]
            except BlockingIOError:
                self.wait(self.asking, select.POLLOUT)
            except BrokenPipeError:
                self.end()

    def answer(self) -> str:
        """Read the next line: `= value` or `! exception`; anything else is an exception, too."""
        while b"\n" not in self.received:
            if len(self.received) > 2 * MAX_ENCODED:  # longer than the value of any step
                self.flush()
                os._exit(0)
            self.wait(self.answers, select.POLLIN)
            data = os.read(self.answers, 1 << 16)
            if not data:
                self.end()
            self.received += data
        line, _, self.received = self.received.partition(b"\n")
        is_well_formed = line.isascii() and line[:2] in (b"= ", b"! ")
        return line.decode() if is_well_formed else '! ["something unreadable"]'

    def wait(self, descriptor: int, event: int) -> None:
        """Wait until a pipe can be used, or the process has ended: its children may still have the pipe open."""
        poll = select.poll()
        poll.register(descriptor, event)
        while not poll.poll(20):  # milliseconds
            self.flush()
            if self.status is not None:
                self.end()
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = status if pid else None

    def end(self) -> None:
        """End this process as the child ended."""
        self.flush()
        status = os.waitpid(self.pid, 0)[1] if self.status is None else self.status
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            if -code != signal.SIGKILL:
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(max(code, 0))


def _serve_steps(source: str, steps: int, answering: int) -> None:
    """Run the model's code, then each step that is sent, and answer before the next one comes."""
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    space = module.__dict__
    try:
        exec(compile(source, "solution.py", "exec"), space)
    except BaseException as error:
        _write(answering, f"! {_class_names(error)}")
        return
    _write(answering, "= null")
    inputs: dict[str, str] = {}
    names = {"__given__": lambda number: decode_value(inputs[str(number)])}
    space = {**space, **names}  # the tests' names are not the module's
    with open(steps, "rb") as lines:
        for line in lines:
            returns_value, step, inputs = json.loads(line)
            try:
                if returns_value:
                    text = encode_value(eval(compile(step, "step", "eval"), space), loose=True)
                else:
                    exec(compile(step, "step", "exec"), space)
                    text = "null"
                _write(answering, f"= {text}")
            except BaseException as error:
                _write(answering, f"! {_class_names(error)}")


def _class_names(error: BaseException) -> str:
    """Names of the classes of an exception, as JSON; for a value that is not plain, "NotPlain" and the reason."""
    if type(error) is NotPlain:
        return json.dumps(["NotPlain", str(error)[:200]])
    return json.dumps([kind.__name__ for kind in type(error).__mro__][:20])


# The tests' run -----------------------------------------------------------------------------------------


def run_tests(items: list, first: dict[str, int]) -> None:
    """Run the items (kind, number, source) of the tests over the candidate's values from stdin.

    Each writes `kind number` before it runs. Then a check writes `passed number` if it is true, and a `given` with a
    plain value, an input of the candidate, `plain number value`. One that raises writes its word of `FAILURE_WORDS`; a
    broken setup stops the run. `end 0` comes last. `first` is that of `ReturnedValues`.
    """
    returned = json.loads(sys.stdin.read() or "{}")
    raised = returned.get("raised", {})
    out = _take_stdout()
    values = ReturnedValues(returned.get("values", {}), raised, first)
    space = {
        "__name__": "tests",
        "agree": agree,
        "__held__": values,
        "__plain__": PlainValues(values),
        "__either__": values.either,
    }
    space["__raised__"] = lambda number, names: is_raised(raised.get(str(number), []), names)
    space |= {"__is_none__": values.is_none, "__pytest__": types.SimpleNamespace(approx=Approx)}
    result = ""  # of the last item, written with the next line because each write wakes the host
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
            if kind == "derive" and isinstance(error, NotData):
                values.hide(error.args[0])
            result = f"{FAILURE_WORDS[kind]} {number}\n"
            if kind == "setup":
                break
    _write(out, f"{result}end 0")


FAILURE_WORDS = {"setup": "broken", "derive": "derived", "given": "unplain", "check": "failed"}


def _take_stdout() -> int:
    """Descriptor of stdout for records; everything printed from now on is discarded."""
    out = os.dup(1)
    try:
        null_device = os.open(os.devnull, os.O_WRONLY)
    except OSError:
        null_device = 2
    os.dup2(null_device, 1)
    return out


class NotReturned(Exception):
    """The candidate's run returned no such value."""


class NotData(NotReturned):
    """The candidate's run returned an object that is no plain data."""


class ReturnedValues(dict):
    """Values of the candidate's run, by number; each is decoded once, and is the same object from then on.

    `first` maps the number of a name's value to that of the name's first value. A value that can't change in Python
    stays that first value, whatever the candidate's run claims after it has seen the arguments of later calls.
    """

    def __init__(self, texts: dict[str, str], raised: dict[str, list[str]], first: dict[str, int]):
        super().__init__()
        self.texts, self.raised, self.first = texts, raised, first
        self.alike: set[int] = set()  # numbers of values that are only the data of an object

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
        """Value of a name whose first value has number `first`: the later one only if it can have changed."""
        try:
            initial = json.loads(self.text(first))
        except NotData:
            if not _is_mutable(data):
                raise
            return data
        return data if _can_change_into(initial, data) else initial

    def text(self, number: int) -> str:
        if str(number) in self.texts:
            return self.texts[str(number)]
        raise NotData(number) if self.raised.get(str(number), [""])[0] == "NotPlain" else NotReturned(number)

    def hide(self, number: int) -> None:
        """Treat a value as no plain data from now on, because a method of its own may have changed it."""
        self.pop(number, None)
        self.texts.pop(str(number), None)
        self.raised[str(number)] = ["NotPlain"]

    def either(self, number: int, compute):
        """Compute on the candidate's values; if one is not plain data, use the candidate's result instead."""
        try:
            return compute()
        except NotReturned:
            return self[number]

    def is_none(self, compute) -> bool:
        """Whether the value of a step is None; an object that is no plain data is not."""
        try:
            return compute() is None
        except NotData:
            return False


class PlainValues:
    """Those of `ReturnedValues` that have the methods of plain data and no others."""

    def __init__(self, values: ReturnedValues):
        self.values = values

    def __getitem__(self, number: int):
        value = self.values[number]
        if number in self.values.alike:
            raise NotData(number)
        return value

    def __setitem__(self, number: int, value):
        self.values[number] = value


def _is_mutable(data) -> bool:
    """Whether encoded data is of an object that can change in place."""
    if not isinstance(data, dict):
        return isinstance(data, list)
    ((tag, body),) = data.items()
    return _is_mutable(body) if tag == "alike" else tag in MAPPINGS or tag in ("set", "deque", "bytearray")


def _can_change_into(before, after) -> bool:
    """Whether encoded data may be of one object, before and after a change in place."""
    if before == after:
        return True
    if not (isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys()):
        return isinstance(before, list) and isinstance(after, list)
    ((tag, old_body),), ((_, new_body),) = before.items(), after.items()
    if tag == "alike":
        return _can_change_into(old_body, new_body)
    if tag == "tuple":
        return len(old_body) == len(new_body) and all(map(_can_change_into, old_body, new_body))
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
            has_keys = isinstance(actual, dict) and actual.keys() == expected.keys()
            return has_keys and all(self.near(actual[key], expected[key]) for key in expected)
        if isinstance(expected, list | tuple | range | deque):
            is_sequence = isinstance(actual, list | tuple | range | deque) and len(actual) == len(expected)
            return is_sequence and all(map(self.near, actual, expected))
        if actual == expected:
            return True
        if isinstance(expected, bool) or not all(_is_number(value) for value in (actual, expected)):
            return False
        if expected != expected:
            return self.nan_ok and actual != actual
        size = builtins.abs(expected)
        return size != math.inf and builtins.abs(expected - actual) <= self.tolerance(size)

    def tolerance(self, size):
        """Bound on the difference, which is relative unless only an absolute one is given."""
        number = type(size) if type(size).__name__ == "Decimal" else float
        absolute = number(1e-12 if self.abs is None else self.abs)
        if self.rel is None and self.abs is not None:
            return absolute
        return max(number(1e-6 if self.rel is None else self.rel) * size, absolute)


def _is_number(value) -> bool:
    return isinstance(value, int | float | complex) or type(value).__name__ in ("Decimal", "Fraction")


def is_raised(class_names: list[str], expected: list[str]) -> bool:
    """Whether an exception with these class names is one of those expected.

    It counts as up to `MAX_OWN_CLASSES` classes of the candidate's own, and as one built-in class with its bases: an
    exception that derives from all built-in classes counts as the first only.
    """
    own_names = list(itertools.takewhile(lambda name: _builtin_exception(name) is None, class_names))
    kind = _builtin_exception(class_names[len(own_names)]) if len(own_names) < len(class_names) else None
    for name in expected:
        expected_kind = _builtin_exception(name)
        if (
            name.split(".")[-1] in own_names[:MAX_OWN_CLASSES]
            if expected_kind is None
            else kind is not None and issubclass(kind, expected_kind)
        ):
            return True
    return False


def _builtin_exception(name: str):
    """The built-in exception of a name, or None."""
    kind = getattr(builtins, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, BaseException) else None


def agree(value, expected, tolerance: float) -> bool:
    """Whether a value is what JSON expects: lists match tuples, floats match within tolerance, True is not 1."""
    if isinstance(expected, list):
        is_list = type(value) in (list, tuple) and len(value) == len(expected)
        return is_list and all(
            agree(item, expected_item, tolerance) for item, expected_item in zip(value, expected, strict=True)
        )
    if isinstance(expected, dict):
        is_mapping = type(value) in MAPPINGS.values() and value.keys() == expected.keys()
        return is_mapping and all(
            agree(value[key], expected_item, tolerance) for key, expected_item in expected.items()
        )
    if type(expected) in (int, float) and type(value) in (int, float):
        are_integers = type(expected) is int and type(value) is int
        return value == expected or (not are_integers and is_close(value, expected, tolerance))
    return type(value) is type(expected) and value == expected


def is_close(value: float, expected: float, tolerance: float) -> bool:
    """Whether a number is within the tolerance of another: relative, or absolute if 0 is expected."""
    return math.isfinite(expected) and abs(value - expected) <= tolerance * (abs(expected) or 1)


# The blocks' run ------------------------------------------------------------------------------------------


def describe_blocks() -> None:
    """Write a JSON line for each source of stdin: [names defined, names used, whether it does more], or null.

    None of the sources is run; null means that it can't be parsed.
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
                is_top_level = table is tables[0]
                uses |= {
                    symbol.get_name()
                    for symbol in table.get_symbols()
                    if symbol.is_referenced() and (is_top_level or symbol.is_global())
                }
            acts = any(not isinstance(getattr(node, "value", None), ast.Constant) for node in body)
            line = json.dumps([defines, sorted(uses - set(defines) - set(dir(builtins))), acts])
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            line = "null"
        _write(1, line)
