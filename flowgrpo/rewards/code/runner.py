"""Code judged by calls: `split_plan` splits a task's tests, `judge_calls` gives a verdict for each check of the plan.

    given values -> the candidate's run: steps -> values (claims, as text) -> the tests' run: checks -> verdicts

The runs are programs of `child.py`, each in a sandbox of its own; what the candidate's run wrote is only cut into lines
here, and read in the tests' run, so a hostile value can at worst fail its check and those after it: where a line of the
tests' own fails beside such values, but not without them, it is the candidate's loss. A step that hangs or ends the
process is lost, and the steps after it go on in a new run, with the statements before them.
"""

import ast
import builtins
import json
import marshal
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from flowgrpo.rewards.code import child
from flowgrpo.rewards.code.blocks import Block, read_blocks
from flowgrpo.rewards.code.split_scope import SplitPlan, free_names
from flowgrpo.rewards.code.split_tests import split_sources
from flowgrpo.sandbox import Limits, Ran, Sandbox, SandboxFailure
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
CODE, STATEMENT, NO_CHILD = -1, -2, -3  # numbers of records that are no values
GIVEN = re.compile(r"__given__\((\d+)\)")


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


def names_called(plan: SplitPlan) -> set[str]:
    """List the names that the code must define for the steps of a plan."""
    wanted: set[str] = set()
    defined: set[str] = set()
    for _, step in plan.steps:
        tree = ast.parse(step)
        stored = {part.id for part in ast.walk(tree) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
        imported = {part.asname or part.name.split(".")[0] for part in ast.walk(tree) if isinstance(part, ast.alias)}
        wanted |= free_names(tree) - stored - defined
        defined |= stored | imported
    return wanted - {"__given__", *dir(builtins)} | wanted & plan.entry_points


# Programs -----------------------------------------------------------------------------------------------


@cache
def _compiled(entry: str) -> str:
    """Compile `child.py` with the part of one run alone, in hexadecimal; the sandbox has the same interpreter."""
    shared, *runs = re.split(r"^# The \w+'s? run -+$", Path(child.__file__).read_text(), flags=re.MULTILINE)
    text = shared + next(part for part in runs if f"def {entry}(" in part)
    return marshal.dumps(compile(text, "judging.py", "exec", dont_inherit=True, optimize=2)).hex()


def program(entry: str, *arguments) -> str:
    """Write Python source that calls a function of `child.py` with arguments that JSON can hold."""
    load = f"import json, marshal\nexec(marshal.loads(bytes.fromhex('{_compiled(entry)}')))"
    return f"{load}\n{entry}(*json.loads({json.dumps(arguments)!r}))\n"


# Runs ---------------------------------------------------------------------------------------------------


def judge_calls(source: str, plan: SplitPlan, settings: CodeSettings) -> list[CodeVerdict]:
    """Judge code by the checks of a plan -> a verdict for each."""
    if not plan.checks:
        return []
    records = run_steps(source, plan, hand_over(plan, settings), settings)
    known = {"values": records.values, "raised": records.raised}
    lines, fault = _run_tests(plan.items, settings, json.dumps(known), plan.first)
    if fault:
        _check_alone(plan, settings)
    passed = {int(number) for word, number, *_ in lines if word == "passed"}
    reached = {int(number) for word, number, *_ in lines if word == "check"}
    whys = [_why(plan, check, records, check in reached) for check in range(len(plan.checks))]
    return [CodeVerdict(check in passed, why) for check, why in enumerate(whys)]


def hand_over(plan: SplitPlan, settings: CodeSettings) -> list[str]:
    """Compute the values that the tests hand to the candidate and that don't stand in their source."""
    if not plan.handed:
        return []
    lines = _check_alone(plan, settings)
    found = {int(line[1]): line[2] for line in lines if line[0] == "plain"}
    for kind, number, source in plan.given:
        if kind == "given" and number not in found:
            raise BadTests(f"the tests hand the candidate `{source}`, which can't be computed or isn't plain data")
    return [found[number] for number in range(plan.handed)]


def _check_alone(plan: SplitPlan, settings: CodeSettings) -> list[list[str]]:
    """Run the tests' own lines without a candidate -> the lines they wrote; `BadTests` where one fails, hangs or dies.

    Who wrote a line that fails beside the candidate's values is told by this.
    """
    lines, fault = _run_tests(plan.given, settings)
    if fault:
        raise BadTests(fault)
    return lines


def _run_tests(
    items: Sequence, settings: CodeSettings, stdin: str = "", first: Mapping[int, int] | None = None
) -> tuple[list[list[str]], str]:
    """Run items of the tests -> the lines they wrote, and where one of their own lines failed, hung or died."""
    ran = _run(settings, program("run_tests", items, first or {}), stdin)
    lines = _lines(ran, 2 * len(items) + 1)
    broken = [number for word, number, *_ in lines if word == "broken"]
    if broken:
        return lines, f"line {broken[0]} of its tests fails by itself; fix the tests"
    if not lines or lines[-1][0] in ("setup", "given"):
        where = f"at line {lines[-1][1]}" if lines else "before they began"
        ending = f"{ENDINGS[ran.ended]}: {ran.stderr[-200:].strip()}"
        return lines, f"its tests, run by themselves, ended {where} ({ending})"
    return lines, ""


def describe(sources: Sequence[str], settings: CodeSettings) -> list[Block | None]:
    """Parse blocks of an answer; what comes after one that takes too long is left out."""
    ran = _run(settings, program("describe_blocks"), json.dumps(list(sources)))
    return read_blocks(sources, ran.stdout[: ran.stdout.rfind("\n") + 1])


def run_steps(source: str, plan: SplitPlan, given: Sequence[str], settings: CodeSettings) -> Records:
    """Collect the values that the steps claim, in as many runs as it takes, up to the patience."""
    records = Records({}, {}, "")
    for _ in range(settings.patience):
        todo = [(number, step) for number, step in plan.steps if number is None or not _settled(records, number)]
        handed = [(number, step, {place: given[int(place)] for place in GIVEN.findall(step)}) for number, step in todo]
        ran = _run(settings, program("run_candidate", source), json.dumps(handed), processes=1)
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
        if at == NO_CHILD:
            raise SandboxFailure(f"it could not make a process for the code: {_exception(text)[0]}")
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


def _run(settings: CodeSettings, program: str, stdin: str = "", processes: int = 0) -> Ran:
    """Run a program of `child.py`, with room for its records and for processes of its own."""
    room = max(settings.limits.output_bytes, VALUE_BYTES)
    limits = replace(settings.limits, output_bytes=room, processes=settings.limits.processes + processes)
    return settings.sandbox.run(program, stdin=stdin, limits=limits)


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


def _why(plan: SplitPlan, check: int, records: Records, reached: bool) -> str:
    """Say why a check fails, if it does."""
    names = [records.raised[number] for number in plan.uses[check] if number in records.raised]
    unknown = any(number not in records.values for number in plan.uses[check])
    fault = f"{names[0][-1] if names[0][0] == 'NotPlain' else names[0][0]}" if names else ""
    fault = fault or (records.fault or "it was not reached" if unknown else "")
    fault = fault or ("it is not so" if reached else "the values before it leave the tests no time or memory")
    return f"{plan.checks[check]}: {fault}"
