"""Code, judged by tests: a task with tests and an answer with code flow in, the share of tests passed flows out.

`task.metadata["tests"]` is a list (or one alone) of

    {"stdin": "2 3\\n", "stdout": "5\\n"}                    the program's output is compared, outside of its process
    {"call": "f(2, 3)", "equals": 5}                        or {"function": "f", "arguments": [2, 3], "keywords": {}, …}
    "assert f(2, 3) == 5"                                   Python source; `asserts.py` says what it may hold

and `task.metadata["entry_point"]`, where there is one, names the function that is tested. No process in which the
model's code runs is trusted: it holds no expected value and gives no verdict. All calls of a task share one run; each
stdin has one of its own. What the policy caused is a value with a reason; tests that are missing or can't be used, and
a sandbox that failed, are invalid.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from flowgrpo.contracts import Reward, Scored
from flowgrpo.rewards.calls import ENDINGS, BadTests, Settings, Verdict, judge_calls, lines_of, plan_of
from flowgrpo.rewards.plain import is_close
from flowgrpo.sandbox import Limits, Sandbox, SandboxFailure
from flowgrpo.types import BadInput, Task

LONGEST_CODE = 1 << 20  # characters
# Takes linear time, because no digit can be matched in two ways.
NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)


class Case(NamedTuple):
    """A program's input and the output that is expected of it."""

    stdin: str
    stdout: str


def share_passed(passed: int, tests: int) -> float:
    """Partial credit: the share of the tests that were passed."""
    return passed / tests


def all_passed(passed: int, tests: int) -> float:
    """1 where every test was passed, else 0."""
    return float(passed == tests)


def code(
    sandbox: Sandbox,
    *,
    credit: Callable[[int, int], float] = share_passed,
    tolerance: float = 1e-6,
    limits: Limits = Limits(),  # noqa: B008
    patience: int = 2,
    workers: int = 1,
) -> Reward:
    """The reward of code that passes its task's tests.

    `credit` makes a value of the number of tests passed and of all; `tolerance` is for floats in outputs and in
    `equals`, relative to the number expected, and absolute where that is 0; `limits` are those of one run; after
    `patience` runs of an answer that hung or died, its remaining tests fail unseen; `score_many` judges `workers`
    answers at once.
    """
    if not (math.isfinite(tolerance) and tolerance >= 0):
        raise BadInput(f"code: tolerance is {tolerance}, but must be 0 or more")
    if patience < 1 or workers < 1:
        raise BadInput(f"code: patience is {patience} and workers {workers}, but both must be at least 1")
    settings = Settings(sandbox, tolerance, limits, patience)
    score = partial(_score, settings, credit)
    return Reward(score, partial(_score_many, score, workers))


def _score(settings: Settings, credit: Callable[[int, int], float], task: Task, output: str) -> Scored:
    """Score one answer by its task's tests; invalid where they can't be used or the sandbox fails."""
    try:
        cases, calls = read_tests(task)
        plan = plan_of(task, calls, settings.tolerance)
        source = find_code(output)
        fault = "" if source.strip() else "there is no code in the answer"
        fault = fault or ("the code is too long" if len(source) > LONGEST_CODE else "")
        if fault:
            return Scored(0.0, fault)
        verdicts = judge_cases(source, cases, settings) + judge_calls(source, plan, settings)
    except SandboxFailure as error:
        return Scored(None, f"the sandbox failed: {error}")
    except BadTests as error:
        return Scored(None, f"task {task.id!r}: {error}")
    passed = sum(verdict.passed for verdict in verdicts)
    faults = [verdict.why for verdict in verdicts if not verdict.passed]
    reason = f"{passed} of {len(verdicts)} tests passed" + (f"; {faults[0]}" if faults else "")
    return Scored(credit(passed, len(verdicts)), reason, {"passed": float(passed), "tests": float(len(verdicts))})


def _score_many(score: Callable, workers: int, tasks: Sequence[Task], outputs: Sequence[str]) -> list[Scored]:
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(score, tasks, outputs))


# What is given ------------------------------------------------------------------------------------------


def find_code(output: str) -> str:
    """The last fenced block of Python, else the last fenced block, else the whole; the last fence may be left open."""
    blocks: list[tuple[str, list[str]]] = []
    inside = False
    for line in output.splitlines(keepends=True):
        fence = line.strip()
        if fence.startswith("```") and (not inside or fence == "```"):
            inside = not inside
            if inside:
                blocks.append((fence[3:].strip().lower(), []))
        elif inside:
            blocks[-1][1].append(line)
    python = [lines for words, lines in blocks if words.split(" ")[0] in ("python", "py", "python3")]
    chosen = python or [lines for words, lines in blocks]
    return "".join(chosen[-1]) if chosen else output


def read_tests(task: Task) -> tuple[list[Case], list[str | Mapping]]:
    """The tests by stdin, and those by calls and asserts."""
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
            cases.append(Case(given, test["stdout"]))
        else:
            raise BadTests(f"test {number} must be source with asserts, or have stdout (and stdin), or call and equals")
    if not cases and not calls:
        raise BadTests("its list of tests is empty")
    return cases, calls


# By stdin and stdout ------------------------------------------------------------------------------------


def judge_cases(source: str, cases: Sequence[Case], settings: Settings) -> list[Verdict]:
    """A run for each input; after too many that hung, the rest fail unseen."""
    verdicts, hung = [], 0
    for number, case in enumerate(cases, 1):
        if hung >= settings.patience:
            verdicts.append(Verdict(False, f"test {number} wasn't run: the program hung in {hung} others"))
            continue
        room = max(settings.limits.output_bytes, 2 * len(case.stdout.encode()) + 4096)
        ran = settings.sandbox.run(source, stdin=case.stdin, limits=replace(settings.limits, output_bytes=room))
        hung += ran.ended == "timeout"
        if ran.ended != "exited":
            verdicts.append(Verdict(False, f"test {number} {ENDINGS[ran.ended]}"))
        elif ran.code != 0:
            last = (ran.stderr.strip().splitlines() or [""])[-1][:200]
            verdicts.append(Verdict(False, f"test {number} ended with code {ran.code}: {last}"))
        else:
            same = same_output(ran.stdout, case.stdout, settings.tolerance)
            verdicts.append(Verdict(same, f"test {number} printed something else: {ran.stdout[:80]!r}"))
    return verdicts


def same_output(found: str, expected: str, tolerance: float) -> bool:
    """Line by line and word by word, without white space at the ends; a float is met within the tolerance.

    It ends at the first difference and holds one line at a time, so that what a program prints costs no more than what
    is expected.
    """
    found, expected = found.rstrip(), expected.rstrip()
    if found == expected or found.count("\n") != expected.count("\n"):
        return found == expected
    return all(map(partial(_same_line, tolerance), lines_of(found), lines_of(expected)))


def _same_line(tolerance: float, found: str, expected: str) -> bool:
    wanted = expected.split()
    words = found.split(None, len(wanted))  # one more than expected holds all the rest
    return len(words) == len(wanted) and all(map(partial(_same_word, tolerance), words, wanted))


def _same_word(tolerance: float, found: str, expected: str) -> bool:
    if found == expected:
        return True
    if not (NUMBER.fullmatch(found) and NUMBER.fullmatch(expected)) or expected.lstrip("+-").isdigit():
        return False
    return is_close(float(found), float(expected), tolerance)
