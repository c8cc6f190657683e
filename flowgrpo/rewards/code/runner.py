"""Code judged by calls: `split_plan` splits a task's tests, `judge_calls` gives a verdict for each check of the plan.

    given values -> the candidate's run: steps -> values (claims, as text) -> the tests' run: checks -> verdicts

The runs are programs of `child.py`, each in a sandbox of its own; what the candidate's run wrote is only cut into lines
here, and read in the tests' run, so a hostile value can at worst fail its check. A step that hangs or ends the process
is lost, and the steps after it go on in a new run, with the statements before them.
"""

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from flowgrpo.rewards.code import child
from flowgrpo.rewards.code.split_scope import SplitPlan
from flowgrpo.rewards.code.split_tests import split_sources
from flowgrpo.sandbox import Limits, Ran, Sandbox
from flowgrpo.types import BadInput, Task

VALUE_BYTES = 8 << 20  # of all that the calls of a task return
ENDINGS = {
    "timeout": "ran out of time",
    "memory": "used too much memory",
    "output": "wrote too much output",
    "signal": "was killed by a signal",
    "exited": "ended the process",
}
LONGEST_NAMES = 16_384  # characters of a record of an exception
CODE, STATEMENT = -1, -2  # numbers of records that are no values


class BadTests(BadInput):
    """The tests of a task can't be used; no fault of the answer."""


@dataclass(frozen=True)
class CodeSettings:
    """Settings of how code is judged."""

    sandbox: Sandbox
    tolerance: float
    limits: Limits
    patience: int


class CodeVerdict(NamedTuple):
    """Verdict of a test: passed or not, and in words why not."""

    passed: bool
    why: str


class Records(NamedTuple):
    """Output of the candidate's runs: encoded values, names of exceptions, and what became of the rest."""

    values: dict[int, str]
    raised: dict[int, list[str]]
    fault: str  # why the code or a statement of the tests ended it all; "" where none did


# Plans --------------------------------------------------------------------------------------------------


def split_plan(task: Task, tests: Sequence[str | Mapping], tolerance: float) -> SplitPlan:
    """Make the plan of a task's calls and asserts; the same object for the same tests."""
    points = task.metadata.get("entry_point") or ()
    names = (points,) if isinstance(points, str) else tuple(points)  # type: ignore
    try:
        return _plan(json.dumps(list(tests)), names, tolerance)
    except (BadInput, TypeError, ValueError) as error:
        raise BadTests(str(error)) from error


@lru_cache(maxsize=4096)
def _plan(text: str, entry_points: tuple[str, ...], tolerance: float) -> SplitPlan:
    tests = json.loads(text)
    plan = split_sources([test for test in tests if isinstance(test, str)], entry_points)
    if tests and any(isinstance(test, str) for test in tests) and not plan.checks:
        raise BadTests("its tests hold no assert about the candidate")
    for test in tests:
        if not isinstance(test, str):
            source = _call_source(test)
            number = plan.value(source)
            plan.check(f"agree(__held__[{number}], {test['equals']!r}, {tolerance!r})", source[:80], [number])
    return plan


def _call_source(test: Mapping) -> str:
    """Write the expression that a test calls."""
    if "equals" not in test:
        raise BadTests(f"the test {dict(test)} has no `equals`; give the value that the call must return")
    if test.get("call"):
        source = test["call"]
    else:
        parts = [repr(value) for value in test.get("arguments") or []]
        parts += [f"{name}={value!r}" for name, value in (test.get("keywords") or {}).items()]
        source = f"{test['function']}({', '.join(parts)})"
    try:
        ast.parse(source.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError, AttributeError) as error:
        raise BadTests(f"the call {source!r} of a test can't be parsed ({error}); fix it") from error
    return source.strip()


# Programs -----------------------------------------------------------------------------------------------


@cache
def _text(entry: str) -> str:
    """Read the text of `child.py`, with the part of one run alone: it is compiled in each."""
    shared, *runs = re.split(r"^# The \w+'s? run -+$", Path(child.__file__).read_text(), flags=re.MULTILINE)
    return shared + next(part for part in runs if f"def {entry}(" in part)


def program(entry: str, *arguments) -> str:
    """Write Python source that calls a function of `child.py` with arguments that JSON can hold."""
    return f"{_text(entry)}\n\n{entry}(*json.loads({json.dumps(arguments)!r}))\n"


# Runs ---------------------------------------------------------------------------------------------------


def judge_calls(source: str, plan: SplitPlan, settings: CodeSettings) -> list[CodeVerdict]:
    """Judge code by the checks of a plan -> a verdict for each."""
    if not plan.checks:
        return []
    records = run_steps(source, plan, hand_over(plan, settings), settings)
    known = {"values": records.values, "raised": records.raised}
    lines = _run_tests(plan.items, settings, json.dumps(known))
    passed = {int(number) for word, number, *_ in lines if word == "passed"}
    return [CodeVerdict(check in passed, _why(plan, check, records)) for check in range(len(plan.checks))]


def hand_over(plan: SplitPlan, settings: CodeSettings) -> list[str]:
    """Compute the values that the tests hand to the candidate and that don't stand in their source."""
    if not plan.handed:
        return []
    lines = _run_tests(plan.given, settings)
    found = {int(line[1]): line[2] for line in lines if line[0] == "plain"}
    for kind, number, source in plan.given:
        if kind == "given" and number not in found:
            raise BadTests(f"the tests hand the candidate `{source}`, which can't be computed or isn't plain data")
    return [found[number] for number in range(plan.handed)]


def _run_tests(items: Sequence, settings: CodeSettings, stdin: str = "") -> list[list[str]]:
    """Run items of the tests -> the lines they wrote; `BadTests` where what they set up fails, hangs or dies."""
    ran = _run(settings, program("run_tests", items), stdin)
    lines = _lines(ran, 2 * len(items) + 1)
    for word, number, *_ in lines:
        if word == "broken":
            raise BadTests(f"line {number} of its tests fails by itself; fix the tests")
    if not lines or lines[-1][0] in ("setup", "given"):
        where = f"at line {lines[-1][1]}" if lines else "before they began"
        said = f"{ENDINGS[ran.ended]}: {ran.stderr[-200:].strip()}"
        raise BadTests(f"its tests, run by themselves, ended {where} ({said})")
    return lines


def run_steps(source: str, plan: SplitPlan, given: Sequence[str], settings: CodeSettings) -> Records:
    """Collect the values that the steps claim, in as many runs as it takes, up to the patience."""
    records = Records({}, {}, "")
    for _ in range(settings.patience):
        todo = [(number, step) for number, step in plan.steps if number is None or not _settled(records, number)]
        ran = _run(settings, program("run_candidate", source, todo, list(given)))
        ready, fault = _record(ran, {number for number, _ in todo if number is not None}, records)
        left = [number for number, _ in todo if number is not None and not _settled(records, number)]
        if fault or not ready or not left:
            fault = fault or ("" if ready else f"the code {ENDINGS[ran.ended]} before any test")
            return records._replace(fault=fault)
        records.raised[left[0]] = [ENDINGS[ran.ended]]
    return records


def _settled(records: Records, number: int) -> bool:
    return number in records.values or number in records.raised


def _record(ran: Ran, todo: set[int], records: Records) -> tuple[bool, str]:
    """Record what a candidate's run wrote; whether its code got ready, and the fault that ended it."""
    ready = False
    for number, sign, *rest in _lines(ran, len(todo) + 2):  # more than the code and the steps have to say is forged
        at = int(number) if number.removeprefix("-").isdigit() and len(number) < 9 else None
        text = rest[0] if rest else ""
        ready = ready or (at == CODE and sign == "=")
        if at in (CODE, STATEMENT) and sign == "!":
            return True, f"{'the code' if at == CODE else 'a statement of the tests'} raised {_exception(text)[0]}"
        if at in todo and not _settled(records, at):
            if sign == "=":
                records.values[at] = text
            else:
                records.raised[at] = _exception(text)
    return ready, ""


def _exception(text: str) -> list[str]:
    """Read the names that a record holds; a hostile one may hold anything."""
    try:
        names = json.loads(text) if len(text) <= LONGEST_NAMES else None
    except (ValueError, RecursionError):
        names = None
    fine = isinstance(names, list) and names and all(isinstance(name, str) for name in names)
    return [name[:200] for name in names] if fine else ["something unreadable"]  # type: ignore


def _run(settings: CodeSettings, program: str, stdin: str = "") -> Ran:
    room = max(settings.limits.output_bytes, VALUE_BYTES)
    return settings.sandbox.run(program, stdin=stdin, limits=replace(settings.limits, output_bytes=room))


def lines_of(text: str) -> Iterator[str]:
    """Yield the lines of a text, one at a time."""
    start = 0
    while (end := text.find("\n", start)) >= 0:
        yield text[start:end]
        start = end + 1
    yield text[start:]


def _lines(ran: Ran, most: int) -> list[list[str]]:
    """Split the first complete lines that a run wrote, into two or three parts each."""
    complete = lines_of(ran.stdout[: ran.stdout.rfind("\n") + 1])
    lines = islice(complete, most)
    return [parts for line in lines if line.isascii() and len(parts := line.split(" ", 2)) > 1]


def _why(plan: SplitPlan, check: int, records: Records) -> str:
    """Say why a check fails, if it does."""
    names = [records.raised[number] for number in plan.uses[check] if number in records.raised]
    unknown = any(number not in records.values for number in plan.uses[check])
    fault = f"{names[0][-1] if names[0][0] == 'NotPlain' else names[0][0]}" if names else ""
    fault = fault or (records.fault or "it was not reached" if unknown else "it is not so")
    return f"{plan.checks[check]}: {fault}"
