"""Code judged by calls: `split_plan` splits a task's tests, `judge_calls` returns a verdict for each check of the plan.

    inputs -> the candidate's run: steps -> values (claims, as text) -> the tests' run: checks -> verdicts

The runs are programs of `child.py`, each in its own sandbox. The output of the candidate's run is only split into lines
here, and decoded in the tests' run, so a hostile value can at worst fail its check and later ones: if one of the tests'
own lines fails with these values, but not without them, the check fails. A step that hangs or ends the process is lost;
the steps after it are run in a new process, with the statements before them.
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
from flowgrpo.sandbox import Limits, RunResult, Sandbox, SandboxFailure
from flowgrpo.types import BadInput, Task

MAX_VALUE_BYTES = 8 << 20  # of all values that the calls of a task return
ENDINGS = {
    "timeout": "ran out of time",
    "memory": "used too much memory",
    "output": "wrote too much output",
    "signal": "was killed by a signal",
    "exited": "ended the process",
}
MAX_NAMES = 16_384  # characters of the class names of an exception
CODE, STATEMENT, NO_CHILD = -1, -2, -3  # numbers of records that are not values
INPUT_REFERENCE = re.compile(r"__given__\((\d+)\)")


class BadTests(BadInput):
    """The tests of a task can't be used, which is no fault of the answer."""


@dataclass(frozen=True)
class CodeSettings:
    """How code is judged; the fields are explained at `code`."""

    sandbox: Sandbox
    tolerance: float
    limits: Limits
    max_failed_runs: int


class CodeVerdict(NamedTuple):
    """Whether a test passed, and the reason if not."""

    passed: bool
    reason: str


class CandidateRecords(NamedTuple):
    """Output of the candidate's runs."""

    values: dict[int, str]  # number of a step -> its encoded value
    raised: dict[int, list[str]]  # number of a step -> class names of its exception
    fault: str  # why the code or a statement of the tests ended the run; "" if none did


# Plans --------------------------------------------------------------------------------------------------


def split_plan(task: Task, tests: Sequence[str | Mapping], tolerance: float) -> SplitPlan:
    """Make the plan of a task's calls and asserts; cached, so the same object for the same tests."""
    entry_point = task.metadata.get("entry_point") or ()
    names = (entry_point,) if isinstance(entry_point, str) else tuple(entry_point)  # type: ignore
    try:
        return _make_plan(json.dumps(list(tests)), names, tolerance)
    except (BadInput, TypeError, ValueError) as error:
        raise BadTests(str(error)) from error


@lru_cache(maxsize=4096)
def _make_plan(text: str, entry_points: tuple[str, ...], tolerance: float) -> SplitPlan:
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
    """Source of the expression that a test calls."""
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
    """Names that the code must define for the steps of a plan."""
    called: set[str] = set()
    defined: set[str] = set()
    for _, step in plan.steps:
        tree = ast.parse(step)
        stored = {part.id for part in ast.walk(tree) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
        imported = {part.asname or part.name.split(".")[0] for part in ast.walk(tree) if isinstance(part, ast.alias)}
        called |= free_names(tree) - stored - defined
        defined |= stored | imported
    return called - {"__given__", *dir(builtins)} | called & plan.entry_points


# Programs -----------------------------------------------------------------------------------------------


@cache
def _compiled_hex(entry: str) -> str:
    """Bytecode of `child.py` with the part of one run only, in hexadecimal; the sandbox has the same interpreter."""
    shared, *runs = re.split(r"^# The \w+'s? run -+$", Path(child.__file__).read_text(), flags=re.MULTILINE)
    text = shared + next(part for part in runs if f"def {entry}(" in part)
    return marshal.dumps(compile(text, "judging.py", "exec", dont_inherit=True, optimize=2)).hex()


def call_program(entry: str, *arguments) -> str:
    """Python source that calls a function of `child.py` with JSON arguments."""
    prelude = f"import json, marshal\nexec(marshal.loads(bytes.fromhex('{_compiled_hex(entry)}')))"
    return f"{prelude}\n{entry}(*json.loads({json.dumps(arguments)!r}))\n"


# Runs ---------------------------------------------------------------------------------------------------


def judge_calls(source: str, plan: SplitPlan, settings: CodeSettings) -> list[CodeVerdict]:
    """Judge code by the checks of a plan -> a verdict for each."""
    if not plan.checks:
        return []
    records = run_steps(source, plan, compute_inputs(plan, settings), settings)
    returned = {"values": records.values, "raised": records.raised}
    lines, fault = _run_tests(plan.items, settings, json.dumps(returned), plan.initial_values)
    if fault:
        _run_tests_alone(plan, settings)
    passed = {int(number) for word, number, *_ in lines if word == "passed"}
    reached = {int(number) for word, number, *_ in lines if word == "check"}
    reasons = [_failure_reason(plan, check, records, check in reached) for check in range(len(plan.checks))]
    return [CodeVerdict(check in passed, reason) for check, reason in enumerate(reasons)]


def compute_inputs(plan: SplitPlan, settings: CodeSettings) -> list[str]:
    """Values that the tests compute and pass to the candidate, encoded."""
    if not plan.input_count:
        return []
    lines = _run_tests_alone(plan, settings)
    values = {int(line[1]): line[2] for line in lines if line[0] == "plain"}
    for kind, number, source in plan.inputs:
        if kind == "given" and number not in values:
            raise BadTests(f"the tests pass the candidate `{source}`, which can't be computed or isn't plain data")
    return [values[number] for number in range(plan.input_count)]


def _run_tests_alone(plan: SplitPlan, settings: CodeSettings) -> list[list[str]]:
    """Run the tests' own lines without a candidate -> the lines they wrote.

    Raises `BadTests` if one fails, hangs or dies. This decides who is at fault if it fails with the candidate's values.
    """
    lines, fault = _run_tests(plan.inputs, settings)
    if fault:
        raise BadTests(fault)
    return lines


def _run_tests(
    items: Sequence, settings: CodeSettings, stdin: str = "", first: Mapping[int, int] | None = None
) -> tuple[list[list[str]], str]:
    """Run items of the tests -> the lines they wrote, and where their own lines failed, hung or died."""
    result = _run(settings, call_program("run_tests", items, first or {}), stdin)
    lines = _split_lines(result, 2 * len(items) + 1)
    broken = [number for word, number, *_ in lines if word == "broken"]
    if broken:
        return lines, f"line {broken[0]} of its tests fails by itself; fix the tests"
    if not lines or lines[-1][0] in ("setup", "given"):
        place = f"at line {lines[-1][1]}" if lines else "before they began"
        ending = f"{ENDINGS[result.ending]}: {result.stderr[-200:].strip()}"
        return lines, f"its tests, run by themselves, ended {place} ({ending})"
    return lines, ""


def describe(sources: Sequence[str], settings: CodeSettings) -> list[Block | None]:
    """Parse blocks of an answer; blocks after one that takes too long are left out."""
    result = _run(settings, call_program("describe_blocks"), json.dumps(list(sources)))
    return read_blocks(sources, result.stdout[: result.stdout.rfind("\n") + 1])


def run_steps(source: str, plan: SplitPlan, inputs: Sequence[str], settings: CodeSettings) -> CandidateRecords:
    """Collect the claimed values of the steps, in as many runs as needed, up to `max_failed_runs` failed ones."""
    records = CandidateRecords({}, {}, "")
    for _ in range(settings.max_failed_runs):
        steps = [(number, step) for number, step in plan.steps if number is None or not _is_recorded(records, number)]
        steps_with_inputs = [
            (number, step, {reference: inputs[int(reference)] for reference in INPUT_REFERENCE.findall(step)})
            for number, step in steps
        ]
        result = _run(settings, call_program("run_candidate", source), json.dumps(steps_with_inputs), processes=1)
        is_ready, fault = _parse_records(result, {number for number, _ in steps if number is not None}, records)
        missing = [number for number, _ in steps if number is not None and not _is_recorded(records, number)]
        if fault or not is_ready or not missing:
            fault = fault or ("" if is_ready else f"the code {ENDINGS[result.ending]} before any test")
            return records._replace(fault=fault)
        records.raised[missing[0]] = [ENDINGS[result.ending]]
    return records


def _is_recorded(records: CandidateRecords, number: int) -> bool:
    return number in records.values or number in records.raised


def _parse_records(result: RunResult, expected: set[int], records: CandidateRecords) -> tuple[bool, str]:
    """Add the output of a candidate's run to the records -> whether its code was loaded, the fault that ended it."""
    is_ready = False
    max_lines = len(expected) + 2  # more lines than the code and the steps write are forged
    for number, sign, *remainder in _split_lines(result, max_lines):
        index = int(number) if number.removeprefix("-").isdigit() and len(number) < 9 else None
        text = remainder[0] if remainder else ""
        if index == NO_CHILD:
            raise SandboxFailure(f"it could not make a process for the code: {_exception_names(text)[0]}")
        is_ready = is_ready or (index == CODE and sign == "=")
        if index in (CODE, STATEMENT) and sign == "!":
            source = "the code" if index == CODE else "a statement of the tests"
            return True, f"{source} raised {_exception_names(text)[0]}"
        if index in expected and not _is_recorded(records, index):
            if sign == "=":
                records.values[index] = text
            else:
                records.raised[index] = _exception_names(text)
    return is_ready, ""


def _exception_names(text: str) -> list[str]:
    """Class names in a record; a hostile record may contain anything."""
    try:
        names = json.loads(text) if len(text) <= MAX_NAMES else None
    except (ValueError, RecursionError):
        names = None
    is_valid = isinstance(names, list) and names and all(isinstance(name, str) for name in names)
    return [name[:200] for name in names] if is_valid else ["something unreadable"]  # type: ignore


def _run(settings: CodeSettings, call_program: str, stdin: str = "", processes: int = 0) -> RunResult:
    """Run a program of `child.py`, with enough output for its records and `processes` additional processes."""
    output_bytes = max(settings.limits.output_bytes, MAX_VALUE_BYTES)
    limits = replace(settings.limits, output_bytes=output_bytes, processes=settings.limits.processes + processes)
    return settings.sandbox.run(call_program, stdin=stdin, limits=limits)


def lines_of(text: str) -> Iterator[str]:
    """Yield the lines of a text, one at a time."""
    start = 0
    while (end := text.find("\n", start)) >= 0:
        yield text[start:end]
        start = end + 1
    yield text[start:]


def _split_lines(result: RunResult, count: int) -> list[list[str]]:
    """The first `count` complete lines that a run wrote, each split into two or three parts."""
    complete = lines_of(result.stdout[: result.stdout.rfind("\n") + 1])
    lines = islice(complete, count)
    return [parts for line in lines if line.isascii() and len(parts := line.split(" ", 2)) > 1]


def _failure_reason(plan: SplitPlan, check: int, records: CandidateRecords, is_reached: bool) -> str:
    """Why a check fails, if it does."""
    names = [records.raised[number] for number in plan.uses[check] if number in records.raised]
    is_missing = any(number not in records.values for number in plan.uses[check])
    fault = f"{names[0][-1] if names[0][0] == 'NotPlain' else names[0][0]}" if names else ""
    fault = fault or (records.fault or "it was not reached" if is_missing else "")
    fault = fault or ("it is not so" if is_reached else "the values before it leave the tests no time or memory")
    return f"{plan.checks[check]}: {fault}"
