"""Roofline bound: the least time of a compiled program on a chip, from what it computes, moves and sends.

    seconds >= max(FLOPs / rate, bytes moved / bandwidth) + bytes sent / link bandwidth

Computation and memory overlap each other, and nothing else does. Compilers of TPUs also estimate cycles, with the
overhead of every instruction; hand-written kernels have no estimate, and count by their FLOPs and bytes. See Williams,
Waterman & Patterson, 2009 (doi.org/10.1145/1498765.1498785).
"""

from typing import NamedTuple

from flowgrpo.planning.compiled_program import moved_bytes, sent_bytes, total_cycles, unestimated_bytes
from flowgrpo.planning.program_cost import ProgramCost
from flowgrpo.planning.targets import Chip


class Bound(NamedTuple):
    """Least seconds of a program, and their parts."""

    seconds: float
    computing: float
    memory: float
    links: float
    estimated: float  # by the cycles that the compiler estimates; 0 if it estimates none
    utilisation: float  # MFU at most: useful FLOPs over the rate


def roofline_bound(cost: ProgramCost, chip: Chip) -> Bound | None:
    """The roofline bound of a program; None for one that its compiler refused."""
    steps = cost.instructions
    if not steps or chip.flops == 0:
        return None
    # A loop of a kernel that ends on data is not counted: it computes no less than the formula says.
    computing, memory = max(cost.flops, cost.useful_flops) / chip.flops, moved_bytes(steps) / chip.bandwidth
    links = sent_bytes(steps) / chip.link
    seconds = max(computing, memory) + links
    estimated = 0.0
    if chip.clock:
        kernels = max(cost.kernels / chip.flops, unestimated_bytes(steps) / chip.bandwidth)
        estimated = total_cycles(steps) / (1e9 * chip.clock) + kernels + links
    return Bound(seconds, computing, memory, links, estimated, cost.useful_flops / chip.flops / max(seconds, estimated))


def ideal_seconds(cost: ProgramCost, chip: Chip) -> float:
    """Seconds of a decoding step that reads the parameters of one device and half of a full cache, nothing else."""
    return (cost.floor["parameters"] + cost.floor["cache"] / 2) / chip.bandwidth
