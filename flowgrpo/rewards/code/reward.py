"""Code judged by tests: `code` makes the reward, the fraction of a task's tests that the code in an answer passes.

`task.metadata["tests"]` is a list (or a single one) of

    {"stdin": "2 3\\n", "stdout": "5\\n"}                    the program's output is compared, outside its process
    {"call": "f(2, 3)", "equals": 5}                        or {"function": "f", "arguments": [2, 3], "keywords": {}, …}
    "assert f(2, 3) == 5"                                   Python source; `split_tests` says what is supported

and `task.metadata["entry_point"]`, if present, names the tested function. No process in which the model's code runs is
trusted: it has no expected value and gives no verdict. All calls of a task share one run; each stdin has its own. A
failure that the policy caused is a value with a reason; missing or unusable tests and a failed sandbox are invalid.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from flowgrpo.contracts import Reward, RewardResult
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

MAX_CODE = 1 << 20  # characters
# Linear time, because no digit can be matched in two ways.
NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)


class _StdinTest(NamedTuple):
    """A program's input and expected output."""

    stdin: str
    stdout: str


def fraction_passed(passed: int, tests: int) -> float:
    """Fraction of the tests that were passed."""
    return passed / tests


def code(
    sandbox: Sandbox,
    *,
    value_of: Callable[[int, int], float] = fraction_passed,
    tolerance: float = 1e-6,
    limits: Limits = Limits(),  # noqa: B008
    max_failed_runs: int = 2,
    workers: int = 1,
) -> Reward:
    """Make the reward of code that passes its task's tests.

    Args:
        sandbox: Where the code and the tests run.
        value_of: Maps (number of tests passed, number of tests) to the reward's value.
        tolerance: For floats in outputs and in `equals`: relative to the expected number, absolute if that is 0.
        limits: Of one run.
        max_failed_runs: Once this many runs of an answer hung or died, its remaining tests fail without being run.
        workers: Answers that `score_many` judges concurrently.
    """
    if not (math.isfinite(tolerance) and tolerance >= 0):
        raise BadInput(f"code: tolerance is {tolerance}, but must be 0 or more")
    if max_failed_runs < 1 or workers < 1:
        raise BadInput(f"code: max_failed_runs is {max_failed_runs} and workers {workers}, but both must be at least 1")
    settings = CodeSettings(sandbox, tolerance, limits, max_failed_runs)

    def score(task: Task, output: str) -> RewardResult:
        try:
            verdicts = _judge(task, output, settings)
        except SandboxFailure as error:
            return RewardResult(None, f"the sandbox failed: {error}")
        except BadTests as error:
            return RewardResult(None, f"task {task.id!r}: {error}")
        if isinstance(verdicts, str):
            return RewardResult(0.0, verdicts)
        passed = sum(verdict.passed for verdict in verdicts)
        failures = [verdict.reason for verdict in verdicts if not verdict.passed]
        reason = f"{passed} of {len(verdicts)} tests passed" + (f"; {failures[0]}" if failures else "")
        parts = {"passed": float(passed), "tests": float(len(verdicts))}
        return RewardResult(value_of(passed, len(verdicts)), reason, parts)

    return threaded(score, workers)


def _judge(task: Task, output: str, settings: CodeSettings) -> list[CodeVerdict] | str:
    """Judge the code in an answer by a task's tests -> a verdict for each, or why there is nothing to run."""
    cases, calls = read_tests(task)
    plan = split_plan(task, calls, settings.tolerance)
    source = find_code(output, lambda: names_called(plan), lambda sources: describe(sources, settings))
    if not source.strip():
        return "there is no code in the answer"
    if len(source) > MAX_CODE:
        return "the code is too long"
    return judge_stdin_tests(source, cases, settings) + judge_calls(source, plan, settings)


# Tests ---------------------------------------------------------------------------------------------------


def read_tests(task: Task) -> tuple[list[_StdinTest], list[str | Mapping]]:
    """A task's tests -> those by stdin, those by calls and asserts."""
    tests = task.metadata.get("tests")
    if tests is None:
        raise BadTests("it has no tests; give it a field `tests`")
    cases, calls = [], []
    for number, test in enumerate([tests] if isinstance(tests, str | Mapping) else tests, 1):  # type: ignore
        if isinstance(test, str) or (isinstance(test, Mapping) and (test.get("call") or test.get("function"))):
            calls.append(test)
        elif isinstance(test, Mapping) and isinstance(test.get("stdout"), str):
            stdin = test.get("stdin") or ""
            if not isinstance(stdin, str):
                raise BadTests(f"stdin of test {number} must be a text")
            cases.append(_StdinTest(stdin, test["stdout"]))
        else:
            raise BadTests(f"test {number} must be source with asserts, or have stdout (and stdin), or call and equals")
    if not cases and not calls:
        raise BadTests("its list of tests is empty")
    return cases, calls


# By stdin and stdout ------------------------------------------------------------------------------------


def judge_stdin_tests(source: str, cases: Sequence[_StdinTest], settings: CodeSettings) -> list[CodeVerdict]:
    """Run the code on each input; after `max_failed_runs` that hung, the others fail without being run."""
    verdicts, hung_count = [], 0
    for number, case in enumerate(cases, 1):
        if hung_count >= settings.max_failed_runs:
            verdicts.append(CodeVerdict(False, f"test {number} wasn't run: the program hung in {hung_count} others"))
            continue
        max_output = max(settings.limits.output_bytes, 2 * len(case.stdout.encode()) + 4096)
        result = settings.sandbox.run(
            source, stdin=case.stdin, limits=replace(settings.limits, output_bytes=max_output)
        )
        hung_count += result.ending == "timeout"
        if result.ending != "exited":
            verdicts.append(CodeVerdict(False, f"test {number} {ENDINGS[result.ending]}"))
        elif result.code != 0:
            last_line = (result.stderr.strip().splitlines() or [""])[-1][:200]
            verdicts.append(CodeVerdict(False, f"test {number} ended with code {result.code}: {last_line}"))
        else:
            is_same = same_output(result.stdout, case.stdout, settings.tolerance)
            verdicts.append(CodeVerdict(is_same, f"test {number} printed something else: {result.stdout[:80]!r}"))
    return verdicts


def same_output(output: str, expected: str, tolerance: float) -> bool:
    """Compare line by line and word by word, without white space at the ends; floats may differ by the tolerance.

    It stops at the first difference and has one line in memory at a time, so the cost is bounded by the expected output
    and not by what a program prints.
    """
    output, expected = output.rstrip(), expected.rstrip()
    if output == expected or output.count("\n") != expected.count("\n"):
        return output == expected
    pairs = zip(lines_of(output), lines_of(expected), strict=True)
    return all(_same_line(line, expected_line, tolerance) for line, expected_line in pairs)


def _same_line(line: str, expected: str, tolerance: float) -> bool:
    expected_words = expected.split()
    words = line.split(None, len(expected_words))  # a word too many has everything after the expected ones
    pairs = zip(words, expected_words, strict=False)
    return len(words) == len(expected_words) and all(
        _same_word(word, expected_word, tolerance) for word, expected_word in pairs
    )


def _same_word(word: str, expected: str, tolerance: float) -> bool:
    if word == expected:
        return True
    if not (NUMBER.fullmatch(word) and NUMBER.fullmatch(expected)) or expected.lstrip("+-").isdigit():
        return False
    return is_close(float(word), float(expected), tolerance)
