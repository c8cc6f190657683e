"""Throughput and latency of rule-based rewards and of the sandbox; hanging checks; overlap with a busy device.

    python -m experiments.benchmarks.rewards
    python -m experiments.benchmarks.rewards --parts=hanging --checks=1000
    python -m experiments.benchmarks.rewards --parts=members --cores=1,2

`sandbox` runs one-line programs, calls a function, and measures how long after its deadline a program that ignores
SIGTERM is killed. `members` scores the same right and wrong answers with each reward. `hanging` judges code of which
two in a hundred never end, and the same number without them. `overlap` scores answers in threads while a device
multiplies matrices on one core: 1 means that the shorter of the two was free.

Expected on two cores, with one and with both: 180 and 280 programs per second, 250 and 390 calls, killed at most 10 ms
after the deadline; 7,000 plain answers per second, 4,400 school answers, 19 and 37 formulas, 61 and 115 answers in
code. Of 1,000 of these, 20 that hang for half a second turn 10 seconds into 14. Overlap 0.6.
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
flag_heading("Run")
_PARTS = flags.DEFINE_list("parts", list(PARTS), f"Any of {', '.join(PARTS)}.")
flag_heading("Sizes")
_CHECKS = flags.DEFINE_integer("checks", 200, "Checks of each measurement.", lower_bound=20)
_HANGING = flags.DEFINE_float(
    "hanging", 0.02, "Fraction of the code that never ends.", lower_bound=0.0, upper_bound=1.0
)
flag_heading("Devices and memory")
_CORES = flags.DEFINE_list("cores", ["1", "2"], "Numbers of cores; each run has one worker per core.")
_SECONDS = flags.DEFINE_float("seconds", 0.5, "Deadline of a check, in seconds.", lower_bound=0.05)

app.read_flags(__name__)

import jax
import jax.numpy as jnp
import numpy as np

from flowgrpo.contracts import Reward, RewardResult
from flowgrpo.report.progress import with_progress
from flowgrpo.report.tables import seconds, show_lines, timed
from flowgrpo.rewards.answers.match import answer
from flowgrpo.rewards.answers.school import school
from flowgrpo.rewards.answers.symbolic import PRELOAD, mathematics
from flowgrpo.rewards.code.reward import code
from flowgrpo.rewards.vision.drawing import drawing_reward, gold_commands, make_drawings
from flowgrpo.sandbox import Limits, Sandbox
from flowgrpo.types import BadInput, Task

from .measuring import check_known, print_result, whole_numbers

SUM = "def total(numbers):\n    return sum(numbers)\n"
NEVER = "def total(numbers):\n    while True:\n        pass\n"
STUBBORN = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: pass"
Check = tuple[Task, str]


@contextmanager
def on_cores(count: int) -> Iterator[None]:
    """Restrict this process and its children to `count` cores."""
    available = os.sched_getaffinity(0)
    if count > len(available):
        raise BadInput(f"--cores has {count}, but this process may use {len(available)}")
    os.sched_setaffinity(0, sorted(available)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, available)


def _latencies(function: Callable[[int], object], count: int, workers: int) -> tuple[float, np.ndarray]:
    """Total seconds of `count` calls in `workers` threads, and seconds of each call."""
    with ThreadPoolExecutor(workers) as pool:
        return timed(lambda: np.array(list(pool.map(lambda index: seconds(lambda: function(index)), range(count)))))


def _row(name: str, cores: int, total: float, latencies: np.ndarray) -> dict:
    """Row of the table: rate, and quantiles in milliseconds."""
    quantiles = dict(zip(("p50_ms", "p99_ms", "max_ms"), np.quantile(latencies, [0.5, 0.99, 1.0]) * 1e3, strict=True))
    rate = {"what": name, "cores": cores, "a_second": round(len(latencies) / total, 1)}
    return rate | {name: round(value, 2) for name, value in quantiles.items()}


def sandbox_rows(cores: int) -> list[dict]:
    """One-line programs, calls, and how late a program that ignores SIGTERM is killed."""
    with on_cores(cores), Sandbox(workers=cores, preload=("json",)) as sandbox:
        print(sandbox.isolation)
        limits, rows = Limits(seconds=_SECONDS.value), []
        programs: dict[str, Callable[[int], object]] = {
            "run": lambda _: sandbox.run("print(6 * 7)"),
            "call": lambda _: sandbox.call("json:loads", "[1, 2]"),
        }
        for name, program in programs.items():
            program(0)
            rows.append(_row(name, cores, *_latencies(program, _CHECKS.value, cores)))
        total, latencies = _latencies(lambda _: sandbox.run(STUBBORN, limits=limits), 20, cores)
    return [*rows, _row("past the deadline", cores, total, latencies - _SECONDS.value)]


def member_rows(cores: int) -> list[dict]:
    """Each reward on right and wrong answers."""
    with on_cores(cores), Sandbox(workers=cores) as sandbox, Sandbox(workers=cores, preload=PRELOAD) as symbolic:
        rewards = {
            "answer": (answer(), number_checks),
            "school": (school(), school_checks),
            "mathematics": (mathematics(symbolic.call), formula_checks),
            "code": (code(sandbox), code_checks),
            "drawing": (drawing_reward(), drawing_checks),
        }
        rows = []
        for name, (reward, make_check) in rewards.items():
            checks = [make_check(index) for index in range(_CHECKS.value)]
            check_values(name, [reward.score(*check) for check in checks[:4]])
            _scores(reward, checks[: 4 * cores], cores)  # so that every worker is warm
            rows.append(_row(name, cores, *_scores(reward, checks, cores)[0]))
    return rows


def hanging_rows(cores: int) -> list[dict]:
    """Checks of code of which a fraction never ends, and the same number of checks without it."""
    rows = []
    with on_cores(cores), Sandbox(workers=cores) as sandbox:
        reward = code(sandbox, limits=Limits(seconds=_SECONDS.value), max_failed_runs=1)
        for fraction in (0.0, _HANGING.value):
            hangs = np.random.default_rng(0).permutation(_CHECKS.value) < round(fraction * _CHECKS.value)
            checks = [hanging_check(i) if hang else code_checks(2 * i) for i, hang in enumerate(hangs)]
            (total, latencies), scored = _scores(reward, checks, cores)
            assert scored == [float(not hang) for hang in hangs], "a check was judged wrongly"
            rows.append(_row(f"{fraction:.0%} hanging", cores, total, latencies) | {"seconds": round(total, 2)})
    return rows


def _scores(reward: Reward, checks: list[Check], workers: int) -> tuple[tuple[float, np.ndarray], list[float | None]]:
    """Score checks in `workers` threads -> the result of `_latencies`, the values."""
    values: list[float | None] = [None] * len(checks)

    def score(index: int) -> None:
        values[index] = reward.score(*checks[index]).value

    return _latencies(score, len(checks), workers), values


def overlap_rows(cores: int) -> list[dict]:
    """Rewards in threads and matrix products in the main thread, each alone and both together."""
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
        rewards_seconds = seconds(lambda: _scores(reward, checks, 1))
        turns = max(1, round(rewards_seconds / seconds(lambda: device(1))))
        device_seconds, both_seconds = seconds(lambda: device(turns)), seconds(lambda: both(turns))
    overlap = (rewards_seconds + device_seconds - both_seconds) / min(rewards_seconds, device_seconds)
    figures = {
        "rewards_seconds": rewards_seconds,
        "device_seconds": device_seconds,
        "both_seconds": both_seconds,
        "overlap": overlap,
    }
    return [{"cores": cores} | {name: round(value, 3) for name, value in figures.items()}]


def task(index: int, gold: str, **metadata: object) -> Task:
    return Task(str(index), "?", (gold,) if gold else (), "any", metadata)


def number_checks(index: int) -> Check:
    """Numbers at the end of a solution."""
    steps = "First, we look at what is given. " * 20
    return task(index, f"{1000 + index}"), f"{steps}The answer is {1000 + index + index % 2:,}."


def school_checks(index: int) -> Check:
    """Lengths in another unit."""
    return task(index, f"{index + 1} km"), f"Answer: {(index + 1 + index % 2) * 1000} m"


def formula_checks(index: int) -> Check:
    """Formulas in another form, all different."""
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
    """The right picture, or an empty canvas."""
    drawing = DRAWINGS[index % len(DRAWINGS)]
    return drawing, "" if index % 2 else gold_commands(drawing)


def check_values(name: str, results: list[RewardResult]) -> None:
    """Raise `AssertionError` unless right answers score 1 and wrong ones less."""
    if not all(result.value is not None and (result.value == 1.0) == (i % 2 == 0) for i, result in enumerate(results)):
        raise AssertionError(f"{name}: the first answers are right, wrong, right, wrong, but score {results}")


def main() -> None:
    """Measure the chosen parts, print tables and one JSON line."""
    check_known(_PARTS, PARTS)
    cores = whole_numbers(_CORES)
    measures = {"sandbox": sandbox_rows, "members": member_rows, "hanging": hanging_rows, "overlap": overlap_rows}
    rows: dict[str, list[dict]] = {}
    for part in with_progress("part", [part for part in PARTS if part in _PARTS.value]):
        counts = cores if part in ("sandbox", "members") else cores[-1:]
        rows[part] = [line for count in counts for line in measures[part](count)]
        show_lines(rows[part])
    print_result("rewards", checks=_CHECKS.value, **rows)


if __name__ == "__main__":
    app.run(main, cpu_devices=2)  # each with one thread
