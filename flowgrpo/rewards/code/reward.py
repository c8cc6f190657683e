"""Code judged by tests: `code` makes the reward, the share of a task's tests that the code in an answer passes.

`task.metadata["tests"]` is a list (or one alone) of

    {"stdin": "2 3\\n", "stdout": "5\\n"}                    the program's output is compared, outside of its process
    {"call": "f(2, 3)", "equals": 5}                        or {"function": "f", "arguments": [2, 3], "keywords": {}, …}
    "assert f(2, 3) == 5"                                   Python source; `split_tests` says what it may hold

and `task.metadata["entry_point"]`, where there is one, names the function that is tested. No process in which the
model's code runs is trusted: it holds no expected value and gives no verdict. All calls of a task share one run; each
stdin has one of its own. What the policy caused is a value with a reason; tests that are missing or can't be used, and
a sandbox that failed, are invalid.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from flowgrpo.contracts import Reward, Scored
from flowgrpo.rewards.code.blocks import find_code
from flowgrpo.rewards.code.child import is_close
from flowgrpo.rewards.code.runner import (
    ENDINGS,
    BadTests,
    CodeSettings,
    CodeVerdict,
    describe,
    judge_calls,
    lines_of,
    names_called,
    split_plan,
)
from flowgrpo.rewards.combine import threaded
from flowgrpo.sandbox import Limits, Sandbox, SandboxFailure
from flowgrpo.types import BadInput, Task

LONGEST_CODE = 1 << 20  # characters
# Takes linear time, because no digit can be matched in two ways.
NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)


class _Case(NamedTuple):
    """A program's input and the output that is expected of it."""

    stdin: str
    stdout: str


def share_passed(passed: int, tests: int) -> float:
    """Give partial credit: the share of the tests that were passed."""
    return passed / tests


def code(
    sandbox: Sandbox,
    *,
    credit: Callable[[int, int], float] = share_passed,
    tolerance: float = 1e-6,
    limits: Limits = Limits(),  # noqa: B008
    patience: int = 2,
    workers: int = 1,
) -> Reward:
    """Make the reward of code that passes its task's tests.

    `credit` makes a value of the number of tests passed and of all; `tolerance` is for floats in outputs and in
    `equals`, relative to the number expected, and absolute where that is 0; `limits` are those of one run; after
    `patience` runs of an answer that hung or died, its remaining tests fail unseen; `score_many` judges `workers`
    answers at once.
    """
    if not (math.isfinite(tolerance) and tolerance >= 0):
        raise BadInput(f"code: tolerance is {tolerance}, but must be 0 or more")
    if patience < 1 or workers < 1:
        raise BadInput(f"code: patience is {patience} and workers {workers}, but both must be at least 1")
    settings = CodeSettings(sandbox, tolerance, limits, patience)

    def score(task: Task, output: str) -> Scored:
        try:
            verdicts = _judge(task, output, settings)
        except SandboxFailure as error:
            return Scored(None, f"the sandbox failed: {error}")
        except BadTests as error:
            return Scored(None, f"task {task.id!r}: {error}")
        if isinstance(verdicts, str):
            return Scored(0.0, verdicts)
        passed = sum(verdict.passed for verdict in verdicts)
        faults = [verdict.why for verdict in verdicts if not verdict.passed]
        reason = f"{passed} of {len(verdicts)} tests passed" + (f"; {faults[0]}" if faults else "")
        parts = {"passed": float(passed), "tests": float(len(verdicts))}
        return Scored(credit(passed, len(verdicts)), reason, parts)

    return threaded(score, workers)


def _judge(task: Task, output: str, settings: CodeSettings) -> list[CodeVerdict] | str:
    """Judge the code in an answer by a task's tests -> a verdict for each, or why there is nothing to run."""
    cases, calls = read_tests(task)
    plan = split_plan(task, calls, settings.tolerance)
    source = find_code(output, lambda: names_called(plan), lambda sources: describe(sources, settings))
    if not source.strip():
        return "there is no code in the answer"
    if len(source) > LONGEST_CODE:
        return "the code is too long"
    return judge_cases(source, cases, settings) + judge_calls(source, plan, settings)


# Tests ---------------------------------------------------------------------------------------------------


def read_tests(task: Task) -> tuple[list[_Case], list[str | Mapping]]:
    """Read a task's tests -> those by stdin, and those by calls and asserts."""
    tests = task.metadata.get("tests")
    if tests is None:
        raise BadTests("it has no tests; give it a field `tests`")
    cases, calls = [], []
    for number, test in enumerate([tests] if isinstance(tests, str | Mapping) else tests, 1):  # type: ignore
        if isinstance(test, str) or (isinstance(test, Mapping) and (test.get("call") or test.get("function"))):
            calls.append(test)
        elif isinstance(test, Mapping) and isinstance(test.get("stdout"), str):
            given = test.get("stdin") or ""
            if not isinstance(given, str):
                raise BadTests(f"stdin of test {number} must be a text")
            cases.append(_Case(given, test["stdout"]))
        else:
            raise BadTests(f"test {number} must be source with asserts, or have stdout (and stdin), or call and equals")
    if not cases and not calls:
        raise BadTests("its list of tests is empty")
    return cases, calls


# By stdin and stdout ------------------------------------------------------------------------------------


def judge_cases(source: str, cases: Sequence[_Case], settings: CodeSettings) -> list[CodeVerdict]:
    """Run the code on each input; after too many that hung, the rest fail unseen."""
    verdicts, hung = [], 0
    for number, case in enumerate(cases, 1):
        if hung >= settings.patience:
            verdicts.append(CodeVerdict(False, f"test {number} wasn't run: the program hung in {hung} others"))
            continue
        room = max(settings.limits.output_bytes, 2 * len(case.stdout.encode()) + 4096)
        ran = settings.sandbox.run(source, stdin=case.stdin, limits=replace(settings.limits, output_bytes=room))
        hung += ran.ended == "timeout"
        if ran.ended != "exited":
            verdicts.append(CodeVerdict(False, f"test {number} {ENDINGS[ran.ended]}"))
        elif ran.code != 0:
            last = (ran.stderr.strip().splitlines() or [""])[-1][:200]
            verdicts.append(CodeVerdict(False, f"test {number} ended with code {ran.code}: {last}"))
        else:
            same = same_output(ran.stdout, case.stdout, settings.tolerance)
            verdicts.append(CodeVerdict(same, f"test {number} printed something else: {ran.stdout[:80]!r}"))
    return verdicts


def same_output(found: str, expected: str, tolerance: float) -> bool:
    """Compare line by line and word by word, without white space at the ends; floats may differ by the tolerance.

    It ends at the first difference and holds one line at a time, so that what a program prints costs no more than what
    is expected.
    """
    found, expected = found.rstrip(), expected.rstrip()
    if found == expected or found.count("\n") != expected.count("\n"):
        return found == expected
    pairs = zip(lines_of(found), lines_of(expected), strict=True)
    return all(_same_line(given, wanted, tolerance) for given, wanted in pairs)


def _same_line(found: str, expected: str, tolerance: float) -> bool:
    wanted = expected.split()
    words = found.split(None, len(wanted))  # one more than expected holds all the rest
    pairs = zip(words, wanted, strict=False)
    return len(words) == len(wanted) and all(_same_word(word, other, tolerance) for word, other in pairs)


def _same_word(found: str, expected: str, tolerance: float) -> bool:
    if found == expected:
        return True
    if not (NUMBER.fullmatch(found) and NUMBER.fullmatch(expected)) or expected.lstrip("+-").isdigit():
        return False
    return is_close(float(found), float(expected), tolerance)
