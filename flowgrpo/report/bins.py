"""The fixed bins of the histograms in `metrics.jsonl`: what writes the counts and what draws them share these edges.

    "ratio_histogram":      [0, 0, ..., 812, 790, ..., 0]     live tokens, by rho = pi_theta / pi_old
    "advantage_histogram":  [0, ..., 13, 0, 250, ...]         live tokens, by their advantage

Bins never depend on what is counted, so histograms of updates, devices and runs can be added and compared. Those of rho
are even in asinh(log rho / 1e-4): fine around 1, coarse far away, the same on both sides, with 1 as an edge. Those of
advantages are a quarter wide, the middle one around 0; the outermost hold all that lies beyond.
"""

import math

NEAR = 1e-4  # a log-ratio up to which bins are of about even width
RATIO_SIDE, RATIO_STEP = 16, 0.8  # bins on either side of rho = 1, and their width in asinh(log rho / NEAR)
ADVANTAGE_SIDE, ADVANTAGE_STEP = 16, 0.25  # bins on either side of the middle one, and their width

RATIO, ADVANTAGE = "ratio_histogram", "advantage_histogram"


def ratio_edges() -> list[float]:
    """The edges of the bins of rho, in order: one more than there are bins."""
    every = range(-RATIO_SIDE, RATIO_SIDE + 1)
    return [math.exp(math.sinh(place * RATIO_STEP) * NEAR) for place in every]


def ratio_place(ratio: float) -> float:
    """Convert a ratio to its place on the axis of bins: in bins from rho = 1 on, negative below it."""
    return math.asinh(math.log(ratio) / NEAR) / RATIO_STEP


def advantage_edges() -> list[float]:
    """The edges of the bins of advantages, in order; the outermost bins are drawn as wide as the others."""
    return [(place - 0.5) * ADVANTAGE_STEP for place in range(-ADVANTAGE_SIDE, ADVANTAGE_SIDE + 2)]


EDGES = {RATIO: ratio_edges, ADVANTAGE: advantage_edges}  # of each histogram that metrics may hold
