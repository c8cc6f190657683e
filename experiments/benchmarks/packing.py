"""Seconds and fill rate of `pack`, by the number of trajectories.

    python -m experiments.benchmarks.packing

Trajectories of 3 turns with lognormal lengths, rows of 4 x the mean length, ragged records in, median of
several runs. Expected on two cores: 100,000 trajectories (5 million tokens) in under 2 s, fill >= 0.97.
"""

import statistics

from absl import flags

from ..cli import app
from ..cli.help import flag_heading

flag_heading("Sizes")
_SIZES = flags.DEFINE_list("sizes", ["1000", "10000", "100000"], "Numbers of trajectories.")
_MEAN = flags.DEFINE_integer("mean", 48, "Mean tokens of a trajectory.", lower_bound=6)
_SIGMA = flags.DEFINE_float("sigma", 0.5, "Spread of the logarithm of the lengths.", lower_bound=0.0)
_RANKS = flags.DEFINE_integer("ranks", 1, "Data-parallel ranks.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Runs of which the median counts.", lower_bound=1)

app.read_flags(__name__)

import numpy as np

from flowgrpo.batching.packing import fill_rate, pack
from flowgrpo.report.progress import with_progress
from flowgrpo.report.tables import show_lines, timed
from flowgrpo.types import Batch, Trajectory, Turn

from .measuring import print_result, whole_numbers


def lognormal_records(count: int, mean: int, sigma: float, seed: int = 0) -> list[Trajectory]:
    """Records of 3 turns whose lengths are lognormal, clipped to a row of 4 x the mean."""
    rng = np.random.default_rng(seed)
    length_n = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count).clip(3, 4 * mean).astype(int)
    record_turns = [np.diff(np.linspace(0, length, 4).astype(int)) for length in length_n]
    return [
        Trajectory([_make_turn(size) for size in sizes], float(i % 2), i // 8) for i, sizes in enumerate(record_turns)
    ]


def _make_turn(size: int) -> Turn:
    """A turn whose first half is context."""
    return Turn(np.arange(size, dtype=np.int32), np.arange(size) >= size // 2, np.zeros(size, np.float32))


def _measure(count: int) -> dict:
    """Median seconds and fill rate for `count` trajectories."""
    records = lognormal_records(count, _MEAN.value, _SIGMA.value)
    ones_nt = np.ones((count, 3), np.float32)

    def lay_out() -> Batch:
        return pack(records, ones_nt, ones_nt, row_length=4 * _MEAN.value, ranks=_RANKS.value)

    runs = [timed(lay_out) for _ in range(_REPEATS.value)]
    batch, seconds = runs[-1][1], statistics.median(duration for duration, _ in runs)
    tokens, fill = int((batch.segments > 0).sum()), fill_rate(batch)
    return {"trajectories": count, "tokens": tokens, "seconds": round(seconds, 4), "fill": round(fill, 4)}


def main() -> None:
    """Measure every size, print the table and one JSON line."""
    rows = [_measure(size) for size in with_progress("size", whole_numbers(_SIZES))]
    show_lines(rows)
    print_result("packing", ranks=_RANKS.value, rows=rows)


if __name__ == "__main__":
    app.run(main)
