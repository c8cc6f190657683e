"""Programs that run inside the sandbox when code is judged by calls, and the plain data that goes between the runs.

    run_candidate   the model's code and the steps of a plan flow in; a line for each value or exception flows out
    run_tests       the tests' own code and the candidate's values flow in; a line for each verdict flows out

Neither run ever holds what the other one must not see: the candidate's run has no expected value and gives no verdict,
the tests' run has no code of the candidate. What the candidate's run writes is a claim of values and no more, so
forging it gains nothing that returning the values would not. Values are of exact built-in types, encoded as JSON with
tags. The text of this file is sent into the sandbox, so it imports nothing but a little of the standard library.
"""

import json
import math
import os
import sys
import types

DEPTH = 60  # of nested containers
NODES = 200_000  # of one value
LONGEST = 1 << 20  # characters of one encoded value


class NotPlain(ValueError):
    """A value isn't made of built-in plain types, or is too large."""


# Values -------------------------------------------------------------------------------------------------


def encode(value) -> str:
    """The text of a plain value; subclasses, cycles and whatever else is not plain raise `NotPlain`."""
    text = json.dumps(_packed(value, DEPTH, [NODES]))
    if len(text) > LONGEST:
        raise NotPlain(f"a value of {len(text)} characters")
    return text


def _packed(value, depth: int, left: list[int]):
    """JSON that holds a value; what JSON has no exact form for is an object of one tag."""
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
    if kind is dict:
        return {"dict": [[_packed(item, depth - 1, left) for item in pair] for pair in value.items()]}
    if kind in (list, tuple, set, frozenset):
        items = [_packed(item, depth - 1, left) for item in value]
        return items if kind is list else {kind.__name__: items}
    raise NotPlain(f"an object of type {kind.__name__}")


def decode(text: str):
    """The value of an encoded text; raises where the text is anything else."""
    return _unpacked(json.loads(text))


def _unpacked(data):
    if isinstance(data, list):
        return [_unpacked(item) for item in data]
    if not isinstance(data, dict):
        if isinstance(data, float):
            raise NotPlain("a bare float")
        return data
    ((tag, body),) = data.items()
    if tag == "dict":
        return {_unpacked(key): _unpacked(value) for key, value in body}
    if tag in ("tuple", "set", "frozenset"):
        return {"tuple": tuple, "set": set, "frozenset": frozenset}[tag]([_unpacked(item) for item in body])
    if tag == "complex":
        return complex(*map(float.fromhex, body))
    return {"int": lambda body: int(body, 16), "float": float.fromhex, "bytes": bytes.fromhex}[tag](body)


def agree(value, expected, tolerance: float) -> bool:
    """Whether a value is what JSON expects: lists match tuples, a float is met within the tolerance, True is not 1."""
    if isinstance(expected, list):
        listed = type(value) in (list, tuple) and len(value) == len(expected)
        return listed and all(agree(one, other, tolerance) for one, other in zip(value, expected, strict=True))
    if isinstance(expected, dict):
        keyed = type(value) is dict and value.keys() == expected.keys()
        return keyed and all(agree(value[key], other, tolerance) for key, other in expected.items())
    if type(expected) in (int, float) and type(value) in (int, float):
        exact = type(expected) is int and type(value) is int
        return value == expected or (not exact and math.isclose(value, expected, rel_tol=tolerance, abs_tol=tolerance))
    return type(value) is type(expected) and value == expected


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
        space = {**space, "__given__": lambda place: decode(given[place])}  # the tests' names are not the module's
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
        _write(out, f"{number} = {encode(eval(compile(step, 'step', 'eval'), space))}")
    except BaseException as error:
        _write(out, f"{number} ! {_names(error)}")


def _names(error: BaseException) -> str:
    """The names of the classes of an exception; with its words where a value was not plain."""
    names = [kind.__name__ for kind in type(error).__mro__][:20]
    return json.dumps([*names, str(error)[:200]] if type(error) is NotPlain else names)


def _take_stdout() -> int:
    """A descriptor of the stdout that records go to; what is printed from now on goes nowhere."""
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


# The tests' run -----------------------------------------------------------------------------------------


def run_tests(items: list) -> None:
    """Run the items (kind, number, source) of the tests over the values that stdin holds.

    Each writes `kind number` before it runs. A setup that raises writes `broken number`: the tests' own fault. A check
    writes `passed number` or `failed number`; `given` writes `plain number value`, which the tests hand to the
    candidate, or `unplain number`; and `end 0` comes last.
    """
    held = json.loads(sys.stdin.read() or "{}")
    values, raised = held.get("values", {}), held.get("raised", {})
    out = _take_stdout()
    space = {"__name__": "tests", "agree": agree}
    space["__value__"] = lambda number: decode(values[str(number)])
    space["__raised__"] = lambda number, names: any(name in raised.get(str(number), ()) for name in names)
    for kind, number, source in items:
        _write(out, f"{kind} {number}")
        try:
            if kind in ("setup", "derive"):
                exec(compile(source, "tests", "exec"), space)
                continue
            value = eval(compile(source, "tests", "eval"), space)
            _write(out, f"plain {number} {encode(value)}" if kind == "given" else f"{_verdict(value)} {number}")
        except BaseException as error:
            _write(out, f"failed {number}" if kind == "check" else f"{_blame(kind)} {number} {_names(error)}")
    _write(out, "end 0")


def _verdict(value) -> str:
    return "passed" if value else "failed"


def _blame(kind: str) -> str:
    """Name the record of an exception: the tests' fault, but for "derived", which comes from the candidate's values."""
    return {"derive": "derived", "given": "unplain"}.get(kind, "broken")
