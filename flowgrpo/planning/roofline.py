"""Bounds of speed: how fast a compiled program can be on a chip at most, from what it computes, moves and sends.

    seconds >= max(operations / rate, bytes moved / bandwidth) + bytes sent / links

Nothing is hidden behind anything else but operations and memory behind each other. Compilers of TPUs estimate cycles of
their own, in which every instruction has its overhead; kernels that were written by hand have none, and count by
their operations and bytes. See Williams, Waterman & Patterson, 2009 (doi.org/10.1145/1498765.1498785).
"""

from typing import NamedTuple

from flowgrpo.planning.compiled_program import moved_bytes, sent_bytes, silent_bytes, total_cycles
from flowgrpo.planning.program_cost import ProgramCost
from flowgrpo.planning.targets import Chip


class Bound(NamedTuple):
    """Seconds of a program at least, and what they are made of."""

    seconds: float
    computing: float
    memory: float
    links: float
    estimated: float  # by the compiler's cycles; 0 where it estimates none
    utilisation: float  # of the rate, by useful operations: at most


def bound(cost: ProgramCost, chip: Chip) -> Bound | None:
    """The bound of a program; None of one that its compiler refused."""
    steps = cost.instructions
    if not steps or chip.flops == 0:
        return None
    # What a kernel computes in a loop that ends on data is not counted: it is no less than the formula has.
    computing, memory = max(cost.flops, cost.useful) / chip.flops, moved_bytes(steps) / chip.bandwidth
    links = sent_bytes(steps) / chip.link
    seconds = max(computing, memory) + links
    estimated = 0.0
    if chip.clock:
        kernels = max(cost.kernels / chip.flops, silent_bytes(steps) / chip.bandwidth)
        estimated = total_cycles(steps) / (1e9 * chip.clock) + kernels + links
    return Bound(seconds, computing, memory, links, estimated, cost.useful / chip.flops / max(seconds, estimated))


def ideal_seconds(cost: ProgramCost, chip: Chip) -> float:
    """Seconds of a decoding step that reads one device's parameters and half of its full cache, and nothing else."""
    return (cost.floor["parameters"] + cost.floor["cache"] / 2) / chip.bandwidth
