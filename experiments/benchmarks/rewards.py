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

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from absl import flags

from ..cli import app
from ..cli.help import flag_heading

PARTS = ("sandbox", "members", "hanging", "overlap")
flag_heading("What is run")
_PARTS = flags.DEFINE_list("parts", list(PARTS), f"Any of {', '.join(PARTS)}.")
flag_heading("Sizes")
_CHECKS = flags.DEFINE_integer("checks", 200, "Checks of each measurement.", lower_bound=20)
_HANGING = flags.DEFINE_float("hanging", 0.02, "Share of the code that never ends.", lower_bound=0.0, upper_bound=1.0)
flag_heading("Devices and memory")
_CORES = flags.DEFINE_list("cores", ["1", "2"], "Numbers of cores, each with as many workers.")
_SECONDS = flags.DEFINE_float("seconds", 0.5, "Deadline of a check.", lower_bound=0.05)

app.read_flags(__name__)

import jax
import jax.numpy as jnp
import numpy as np

import flowgrpo as fg
from flowgrpo.report.progress import with_progress
from flowgrpo.report.tables import seconds, show_lines, timed
from flowgrpo.rewards.answers.match import answer
from flowgrpo.rewards.answers.school import school
from flowgrpo.rewards.answers.symbolic import PRELOAD, mathematics
from flowgrpo.rewards.code.reward import code
from flowgrpo.rewards.vision.drawing import drawing_reward, make_drawings, oracle
from flowgrpo.sandbox import Limits, Sandbox

from .measuring import check_known, print_result, whole_numbers

SUM = "def total(numbers):\n    return sum(numbers)\n"
NEVER = "def total(numbers):\n    while True:\n        pass\n"
STUBBORN = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: pass"
Check = tuple[fg.Task, str]


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


def _latencies(work: Callable[[int], object], count: int, workers: int) -> tuple[float, np.ndarray]:
    """Seconds in all, and those of each of `count` pieces of work, done by so many threads."""
    with ThreadPoolExecutor(workers) as pool:
        return timed(lambda: np.array(list(pool.map(lambda index: seconds(lambda: work(index)), range(count)))))


def _row(name: str, cores: int, took: float, each: np.ndarray) -> dict:
    """A line of the table: rate and quantiles in milliseconds."""
    quantiles = dict(zip(("p50_ms", "p99_ms", "max_ms"), np.quantile(each, [0.5, 0.99, 1.0]) * 1e3, strict=True))
    rate = {"what": name, "cores": cores, "a_second": round(len(each) / took, 1)}
    return rate | {name: round(value, 2) for name, value in quantiles.items()}


def sandbox_rows(cores: int) -> list[dict]:
    """One-line programs, calls, and how late a program ends that ignores SIGTERM."""
    with on_cores(cores), Sandbox(workers=cores, preload=("json",)) as sandbox:
        print(sandbox.isolation)
        limits, rows = Limits(seconds=_SECONDS.value), []
        works: dict[str, Callable[[int], object]] = {
            "run": lambda _: sandbox.run("print(6 * 7)"),
            "call": lambda _: sandbox.call("json:loads", "[1, 2]"),
        }
        for name, work in works.items():
            work(0)
            rows.append(_row(name, cores, *_latencies(work, _CHECKS.value, cores)))
        took, each = _latencies(lambda _: sandbox.run(STUBBORN, limits=limits), 20, cores)
    return [*rows, _row("past the deadline", cores, took, each - _SECONDS.value)]


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
            _scores(reward, checks[: 4 * cores], cores)  # so that every worker is warm
            rows.append(_row(name, cores, *_scores(reward, checks, cores)[0]))
    return rows


def hanging_rows(cores: int) -> list[dict]:
    """Code of which some never ends, and the same number of checks without it."""
    rows = []
    with on_cores(cores), Sandbox(workers=cores) as sandbox:
        reward = code(sandbox, limits=Limits(seconds=_SECONDS.value), patience=1)
        for share in (0.0, _HANGING.value):
            hangs = np.random.default_rng(0).permutation(_CHECKS.value) < round(share * _CHECKS.value)
            checks = [hanging_check(i) if hang else code_checks(2 * i) for i, hang in enumerate(hangs)]
            (took, each), scored = _scores(reward, checks, cores)
            assert scored == [float(not hang) for hang in hangs], "a check was judged wrongly"
            rows.append(_row(f"{share:.0%} hanging", cores, took, each) | {"seconds": round(took, 2)})
    return rows


def _scores(
    reward: fg.Reward, checks: list[Check], workers: int
) -> tuple[tuple[float, np.ndarray], list[float | None]]:
    """Score checks in so many threads: what `_latencies` says of them, and their values."""
    values: list[float | None] = [None] * len(checks)

    def score(index: int) -> None:
        values[index] = reward.score(*checks[index]).value

    return _latencies(score, len(checks), workers), values


def overlap_rows(cores: int) -> list[dict]:
    """Rewards in threads beside matrix products of the main thread, each alone and both together."""
    multiply = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda _, y: jnp.tanh(y @ x), x))
    x = jnp.eye(768)
    multiply(x).block_until_ready()

    def device(turns: int) -> None:
        for _ in range(turns):
            multiply(x).block_until_ready()

    def both(turns: int) -> None:
        thread = threading.Thread(target=_scores, args=(reward, checks, 1))
        thread.start()
        device(turns)
        thread.join()

    with Sandbox(workers=1) as sandbox:
        reward, checks = code(sandbox), [code_checks(i) for i in range(_CHECKS.value)]
        reward.score(*checks[0])
        alone = seconds(lambda: _scores(reward, checks, 1))
        turns = max(1, round(alone / seconds(lambda: device(1))))
        busy, together = seconds(lambda: device(turns)), seconds(lambda: both(turns))
    hidden = (alone + busy - together) / min(alone, busy)
    figures = {"rewards_seconds": alone, "device_seconds": busy, "both_seconds": together, "overlap": hidden}
    return [{"cores": cores} | {name: round(value, 3) for name, value in figures.items()}]


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


def main() -> None:
    """Measure the parts that were asked for, print tables and one JSON line."""
    check_known(_PARTS, PARTS)
    cores = whole_numbers(_CORES)
    measures = {"sandbox": sandbox_rows, "members": member_rows, "hanging": hanging_rows, "overlap": overlap_rows}
    found: dict[str, list[dict]] = {}
    for part in with_progress("part", [part for part in PARTS if part in _PARTS.value]):
        counts = cores if part in ("sandbox", "members") else cores[-1:]
        found[part] = [line for count in counts for line in measures[part](count)]
        show_lines(found[part])
    print_result("rewards", checks=_CHECKS.value, **found)


if __name__ == "__main__":
    app.run(main, cpu_devices=2)  # each with one thread
