"""Programs that run inside the sandbox when code is judged by calls, and the plain data that goes between the runs.

    run_candidate   runs the model's code and the steps of a plan; writes a line for each value or exception
    run_tests       runs the tests' own code over the candidate's values; writes a line for each verdict

Neither run ever holds what the other one must not see: the candidate's run has no expected value and gives no verdict,
the tests' run has no code of the candidate. What the candidate's run writes is a claim of values and no more, so
forging it gains nothing that returning the values would not. Values are of exact built-in types or of those of
`collections`, encoded as JSON with tags. The text of this file, without the part of the other run, is sent into the
sandbox, so it imports nothing but a little of the standard library.
"""

import builtins
import itertools
import json
import math
import os
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque

DEPTH = 60  # of nested containers
NODES = 200_000  # of one value
MAPPINGS = {kind.__name__: kind for kind in (dict, Counter, OrderedDict, defaultdict)}  # a default is not sent
SEQUENCES = {kind.__name__: kind for kind in (tuple, set, frozenset, deque)}
LONGEST = 1 << 20  # characters of one encoded value
ANCESTORS = 3  # classes of the candidate's own that an exception may pass as


class NotPlain(ValueError):
    """A value isn't made of built-in plain types, or is too large."""


# Values -------------------------------------------------------------------------------------------------


def encode_value(value) -> str:
    """Write a plain value as text; subclasses, cycles and whatever else is not plain raise `NotPlain`."""
    text = json.dumps(_packed(value, DEPTH, [NODES]))
    if len(text) > LONGEST:
        raise NotPlain(f"a value of {len(text)} characters")
    return text


def _packed(value, depth: int, left: list[int]):
    """Make JSON that holds a value; what JSON has no exact form for is an object of one tag."""
    kind = type(value)
    left[0] -= 1
    if depth < 0 or left[0] < 0:
        raise NotPlain("a value that is nested too deep or too large")
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if value.bit_length() < 1024 else {"int": hex(value)}
    if kind is float:
        return {"float": value.hex()}
    if kind is complex:
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if kind is bytes:
        return {"bytes": value.hex()}
    if kind in MAPPINGS.values():
        return {kind.__name__: [[_packed(item, depth - 1, left) for item in pair] for pair in value.items()]}
    if kind in (list, *SEQUENCES.values()):
        items = [_packed(item, depth - 1, left) for item in value]
        return items if kind is list else {kind.__name__: items}
    raise NotPlain(f"an object of type {kind.__name__}")


def decode_value(text: str):
    """Read the value of an encoded text; raises where the text is anything else."""
    return _unpacked(json.loads(text))


def _unpacked(data):
    if isinstance(data, list):
        return [_unpacked(item) for item in data]
    if not isinstance(data, dict):
        if isinstance(data, float):
            raise NotPlain("a bare float")
        return data
    ((tag, body),) = data.items()
    if tag in MAPPINGS:
        made = MAPPINGS[tag]()
        for key, value in body:
            made[_unpacked(key)] = _unpacked(value)
        return made
    if tag in SEQUENCES:
        return SEQUENCES[tag]([_unpacked(item) for item in body])
    if tag == "complex":
        return complex(*map(float.fromhex, body))
    return {"int": lambda body: int(body, 16), "float": float.fromhex, "bytes": bytes.fromhex}[tag](body)


# Records ----------------------------------------------------------------------------------------------


def _take_stdout() -> int:
    """Take a descriptor of the stdout that records go to; what is printed from now on goes nowhere."""
    out = os.dup(1)
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
    except OSError:
        nowhere = 2
    os.dup2(nowhere, 1)
    return out


def _write(out: int, line: str) -> None:
    data = line.encode("ascii", "replace") + b"\n"
    while data:
        data = data[os.write(out, data) :]


# The candidate's run ------------------------------------------------------------------------------------


def run_candidate(source: str, steps: list, given: list[str]) -> None:
    """Run the model's code, then the steps (number or None, source); write `number = value` or `number ! exception`.

    The number is -1 for the code itself, and -2 for a statement, after whose failure nothing more is run.
    """
    out = _take_stdout()
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    space = module.__dict__
    number = -1
    try:
        exec(compile(source, "solution.py", "exec"), space)
        _write(out, "-1 = null")
        space = {
            **space,
            "__given__": lambda place: decode_value(given[place]),
        }  # the tests' names are not the module's
        for number, step in steps:
            if number is None:
                number = -2
                exec(compile(step, "step", "exec"), space)
            else:
                _evaluate(out, number, step, space)
    except BaseException as error:
        _write(out, f"{number} ! {_names(error)}")
    os._exit(0)  # neither threads nor exit handlers of the candidate go on


def _evaluate(out: int, number: int, step: str, space: dict) -> None:
    try:
        _write(out, f"{number} = {encode_value(eval(compile(step, 'step', 'eval'), space))}")
    except BaseException as error:
        _write(out, f"{number} ! {_names(error)}")


def _names(error: BaseException) -> str:
    """Name the classes of an exception; where a value was not plain none was raised, and its words say why."""
    if type(error) is NotPlain:
        return json.dumps(["NotPlain", str(error)[:200]])
    return json.dumps([kind.__name__ for kind in type(error).__mro__][:20])


# The tests' run -----------------------------------------------------------------------------------------


def run_tests(items: list) -> None:
    """Run the items (kind, number, source) of the tests over the values that stdin holds.

    Each writes `kind number` before it runs. Then a check writes `passed number` if it holds, and a `given` that is
    plain, which the tests hand to the candidate, `plain number value`. One that raises writes its word of `RAISES`:
    a broken setup is the tests' own fault, as nothing is that comes from the candidate's values. `end 0` comes last.
    """
    known = json.loads(sys.stdin.read() or "{}")
    raised = known.get("raised", {})
    out = _take_stdout()
    held = Held(known.get("values", {}))
    space = {"__name__": "tests", "agree": agree, "__held__": held, "__either__": held.either}
    space["__raised__"] = lambda number, names: is_raised(raised.get(str(number), []), names)
    for kind, number, source in items:
        _write(out, f"{kind} {number}")
        try:
            if kind in ("setup", "derive"):
                exec(compile(source, "tests", "exec"), space)
                continue
            value = eval(compile(source, "tests", "eval"), space)
            if kind == "given":
                _write(out, f"plain {number} {encode_value(value)}")
            elif value:
                _write(out, f"passed {number}")
        except BaseException:
            _write(out, f"{RAISES[kind]} {number}")
    _write(out, "end 0")


RAISES = {"setup": "broken", "derive": "derived", "given": "unplain", "check": "failed"}


class Unknown(Exception):
    """The candidate's run returned no such value."""


class Held(dict):
    """Values that the candidate's run returned, by number; each is read once, and is one object from then on."""

    def __init__(self, texts: dict[str, str]):
        super().__init__()
        self.texts = texts

    def __missing__(self, number: int):
        if str(number) not in self.texts:
            raise Unknown(number)
        self[number] = decode_value(self.texts[str(number)])
        return self[number]

    def either(self, number: int, compute):
        """Compute on the candidate's values; where one is not plain data, take what the candidate computed."""
        try:
            return compute()
        except Unknown:
            return self[number]


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
