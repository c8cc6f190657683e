"""Checks a second and latencies of rule-based rewards; the sandbox's own; hanging checks; overlap with a busy device.

    python -m experiments.benchmarks.rewards
    python -m experiments.benchmarks.rewards --parts=hanging --checks=1000
    python -m experiments.benchmarks.rewards --parts=members --cores=1,2

`sandbox` runs one-line programs, calls a function, and measures how long after its deadline a program that ignores
SIGTERM is gone. `members` scores the same right and wrong answers with each reward. `hanging` judges code of which two
in a hundred never end, beside the same number without them. `overlap` scores answers in threads while a device
multiplies matrices on one core: 1 means that the shorter of the two cost nothing.

Expected on two cores, of one and of both: 180 and 280 programs a second, 250 and 390 calls, gone 10 ms after the
deadline at the latest; 7,000 plain answers a second, 4,400 of schools, 19 and 37 formulas, 61 and 115 answers in code.
Of 1,000 of these, 20 that hang for half a second make 14 seconds out of 10. Overlap 0.6.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

import flowgrpo as fg
from experiments import common
from experiments.benchmarks.measured import show_lines
from experiments.headings import heading
from flowgrpo.report.progress import counted
from flowgrpo.rewards.answer import answer
from flowgrpo.rewards.code import code
from flowgrpo.rewards.drawing import drawing_reward, make_drawings, oracle
from flowgrpo.rewards.school import school
from flowgrpo.rewards.symbolic import PRELOAD, mathematics
from flowgrpo.sandbox import Limits, Sandbox

PARTS = ("sandbox", "members", "hanging", "overlap")
heading("What is run")
_PARTS = flags.DEFINE_list("parts", list(PARTS), f"Any of {', '.join(PARTS)}.")
heading("Sizes")
_CHECKS = flags.DEFINE_integer("checks", 200, "Checks of each measurement.", lower_bound=20)
_HANGING = flags.DEFINE_float("hanging", 0.02, "Share of the code that never ends.", lower_bound=0.0, upper_bound=1.0)
heading("Devices and memory")
_CORES = flags.DEFINE_list("cores", ["1", "2"], "Numbers of cores, each with as many workers.")
_SECONDS = flags.DEFINE_float("seconds", 0.5, "Deadline of a check.", lower_bound=0.05)

SUM = "def total(numbers):\n    return sum(numbers)\n"
NEVER = "def total(numbers):\n    while True:\n        pass\n"
STUBBORN = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: pass"
Check = tuple[fg.Task, str]


# What is measured -------------------------------------------------------------------------------------


@contextmanager
def on_cores(count: int) -> Iterator[None]:
    """This process and those that it starts, on so many cores."""
    before = os.sched_getaffinity(0)
    if count > len(before):
        raise fg.BadInput(f"--cores has {count}, but this process may use {len(before)}")
    os.sched_setaffinity(0, sorted(before)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def latencies(work: Callable[[int], object], count: int, workers: int) -> tuple[float, np.ndarray]:
    """Seconds in all, and those of each of `count` pieces of work, done by so many threads."""

    def one(index: int) -> float:
        began = time.perf_counter()
        work(index)
        return time.perf_counter() - began

    began = time.perf_counter()
    with ThreadPoolExecutor(workers) as pool:
        each = list(pool.map(one, range(count)))
    return time.perf_counter() - began, np.array(each)


def row(name: str, cores: int, seconds: float, each: np.ndarray) -> dict:
    """A line of the table: rate and quantiles in milliseconds."""
    p50, p99 = np.quantile(each, [0.5, 0.99]) * 1e3
    return {
        "what": name,
        "cores": cores,
        "a_second": round(len(each) / seconds, 1),
        "p50_ms": round(p50, 2),
        "p99_ms": round(p99, 2),
        "max_ms": round(each.max() * 1e3, 2),
    }


def sandbox_rows(cores: int) -> list[dict]:
    """One-line programs, calls, and how late a program ends that ignores SIGTERM."""
    with on_cores(cores), Sandbox(workers=cores, preload=("json",)) as sandbox:
        print(sandbox.isolation)
        limits = Limits(seconds=_SECONDS.value)
        run = partial(sandbox.run, "print(6 * 7)")
        call = partial(sandbox.call, "json:loads", "[1, 2]")
        rows = []
        for name, work in (("run", run), ("call", call)):
            work()
            rows.append(row(name, cores, *latencies(lambda _, work=work: work(), _CHECKS.value, cores)))
        seconds, each = latencies(lambda _: sandbox.run(STUBBORN, limits=limits), 20, cores)
    return [*rows, row("past the deadline", cores, seconds, each - _SECONDS.value)]


def member_rows(cores: int) -> list[dict]:
    """Each reward over right and wrong answers."""
    with on_cores(cores), Sandbox(workers=cores) as sandbox, Sandbox(workers=cores, preload=PRELOAD) as symbolic:
        members = {
            "answer": (answer(), number_checks),
            "school": (school(), school_checks),
            "mathematics": (mathematics(symbolic.call), formula_checks),
            "code": (code(sandbox), code_checks),
            "drawing": (drawing_reward(), drawing_checks),
        }
        rows = []
        for name, (reward, make) in members.items():
            checks = [make(index) for index in range(_CHECKS.value)]
            check_values(name, [reward.score(*check) for check in checks[:4]])

            def score(index: int, reward=reward, checks=checks) -> None:
                reward.score(*checks[index])

            latencies(score, 4 * cores, cores)  # so that every worker is warm
            rows.append(row(name, cores, *latencies(score, len(checks), cores)))
    return rows


def hanging_rows(cores: int) -> list[dict]:
    """Code of which some never ends, and the same number of checks without it."""
    rows = []
    with on_cores(cores), Sandbox(workers=cores) as sandbox:
        reward = code(sandbox, limits=Limits(seconds=_SECONDS.value), patience=1)
        for share in (0.0, _HANGING.value):
            hangs = np.random.default_rng(0).permutation(_CHECKS.value) < round(share * _CHECKS.value)
            checks = [hanging_check(i) if hang else code_checks(2 * i) for i, hang in enumerate(hangs)]
            scored: list[float | None] = [None] * len(checks)

            def score(index: int, checks=checks, scored=scored) -> None:
                scored[index] = reward.score(*checks[index]).value

            seconds, each = latencies(score, len(checks), cores)
            assert scored == [float(not hang) for hang in hangs], "a check was judged wrongly"
            rows.append(row(f"{share:.0%} hanging", cores, seconds, each) | {"seconds": round(seconds, 2)})
    return rows


def overlap_rows(cores: int) -> list[dict]:
    """Rewards in threads beside matrix products of the main thread, each alone and both together."""
    multiply = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda _, y: jnp.tanh(y @ x), x))
    x = jnp.eye(768)
    multiply(x).block_until_ready()

    def device(turns: int) -> float:
        began = time.perf_counter()
        for _ in range(turns):
            multiply(x).block_until_ready()
        return time.perf_counter() - began

    with Sandbox(workers=1) as sandbox:
        reward = code(sandbox)
        checks = [code_checks(i) for i in range(_CHECKS.value)]
        reward.score(*checks[0])

        def rewards() -> float:
            return latencies(lambda i: reward.score(*checks[i]), len(checks), 1)[0]

        alone = rewards()
        turns = max(1, round(alone / device(1)))
        busy = device(turns)
        began = time.perf_counter()
        thread = threading.Thread(target=rewards)
        thread.start()
        device(turns)
        thread.join()
        both = time.perf_counter() - began
    hidden = (alone + busy - both) / min(alone, busy)
    figures = {"rewards_seconds": alone, "device_seconds": busy, "both_seconds": both, "overlap": hidden}
    return [{"cores": cores} | {name: round(value, 3) for name, value in figures.items()}]


# Checks -----------------------------------------------------------------------------------------------
# Even ones are right, odd ones wrong.


def task(index: int, gold: str, **metadata: object) -> fg.Task:
    return fg.Task(str(index), "?", (gold,) if gold else (), "any", metadata)


def number_checks(index: int) -> Check:
    """Numbers at the end of a solution."""
    steps = "First, we look at what is given. " * 20
    return task(index, f"{1000 + index}"), f"{steps}The answer is {1000 + index + index % 2:,}."


def school_checks(index: int) -> Check:
    """Lengths in another unit."""
    return task(index, f"{index + 1} km"), f"Answer: {(index + 1 + index % 2) * 1000} m"


def formula_checks(index: int) -> Check:
    """Formulas in another form, no two alike."""
    return task(index, f"(x+{index})^2"), f"\\boxed{{x^2 + {2 * index} x + {index**2 + index % 2}}}"


def code_checks(index: int) -> Check:
    """A function with three calls."""
    tests = [f"assert total([{index}, {n}]) == {index + n}" for n in range(3)]
    return task(index, "", tests=tests), f"```python\n{SUM.replace('sum', 'max') if index % 2 else SUM}```"


def hanging_check(index: int) -> Check:
    """Pair the task of `code_checks` with code that never ends."""
    return code_checks(index)[0], f"```python\n{NEVER}```"


DRAWINGS = make_drawings(0, 64)


def drawing_checks(index: int) -> Check:
    """The picture, or an empty canvas."""
    drawn = DRAWINGS[index % len(DRAWINGS)]
    return drawn, "" if index % 2 else oracle(drawn)


def check_values(name: str, scored: list[fg.Scored]) -> None:
    """Check that what is measured is real: right answers score 1, wrong ones less; else raise `AssertionError`."""
    if not all(one.value is not None and (one.value == 1.0) == (i % 2 == 0) for i, one in enumerate(scored)):
        raise AssertionError(f"{name}: the first answers are right, wrong, right, wrong, but score {scored}")


# The command ------------------------------------------------------------------------------------------


def main() -> None:
    """Measure the parts that were asked for, print tables and one JSON line."""
    unknown = sorted(set(_PARTS.value) - set(PARTS))
    if unknown:
        raise fg.BadInput(f"--parts has {unknown[0]!r}; choose from {', '.join(PARTS)}")
    if not all(number.isdecimal() and int(number) > 0 for number in _CORES.value):
        raise fg.BadInput(f"--cores={','.join(_CORES.value)} must be numbers of cores, as in 1,2")
    cores = [int(number) for number in _CORES.value]
    measures = {"sandbox": sandbox_rows, "members": member_rows, "hanging": hanging_rows, "overlap": overlap_rows}
    found: dict[str, list[dict]] = {}
    for part in counted("part", [part for part in PARTS if part in _PARTS.value]):
        counts = cores if part in ("sandbox", "members") else cores[-1:]
        found[part] = [line for count in counts for line in measures[part](count)]
        show_lines(found[part])
    print(json.dumps({"benchmark": "rewards", "checks": _CHECKS.value} | found))


if __name__ == "__main__":
    common.run(main, cpu_devices=2)  # each with one thread
