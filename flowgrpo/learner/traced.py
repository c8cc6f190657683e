"""Count the operations and bytes of the matrix products of a traced program, from its jaxpr.

XLA's own cost analysis meets the body of a loop once, however often it runs. Here a product within a loop counts as
often as the loop runs: a scan says how often, and of a loop that ends on a condition the caller says it, by depth.
Products alone are counted: they are nearly all operations of a decoder, and their operands nearly all bytes that no
compiler can spare. The count is of the whole program, for all devices together.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np


class Work(NamedTuple):
    """Of all matrix products of a program."""

    flops: float = 0.0
    bytes: float = 0.0  # operands read and results written, each once a product


def count_products(jaxpr: Any, trips: Sequence[int] = ()) -> Work:
    """The work of a jaxpr; `trips` says how often loops on a condition run: the outermost, those within it, and so on.

    Loops deeper than `trips` tells run once. Of the branches of a condition the one with the most work counts.
    """
    total = Work()
    for equation in jaxpr.eqns:
        own = _product(equation) if equation.primitive.name == "dot_general" else Work()
        for times, inner, left in _inside(equation, tuple(trips)):
            own = _plus(own, count_products(inner, left), times)
        total = _plus(total, own)
    return total


def _inside(equation: Any, trips: tuple[int, ...]) -> Iterator[tuple[float, Any, tuple[int, ...]]]:
    """The programs within an equation: how often each runs, and what is told of the loops in it."""
    name, params = equation.primitive.name, equation.params
    if name == "while":
        yield (trips[0] if trips else 1), params["body_jaxpr"].jaxpr, trips[1:]
    elif name == "scan":
        yield params["length"], params["jaxpr"].jaxpr, trips
    elif name == "cond":
        yield 1, max((branch.jaxpr for branch in params["branches"]), key=lambda x: count_products(x, trips)), trips
    else:
        times = params["mesh"].size if name == "shard_map" else 1  # each device runs the body on its own share
        for value in params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield times, inner, trips


def _product(equation: Any) -> Work:
    """Two operations for each pair of numbers that meet."""
    (summed, _), _ = equation.params["dimension_numbers"]
    shapes = [variable.aval for variable in (*equation.invars, *equation.outvars)]
    terms = math.prod(shapes[0].shape[axis] for axis in summed)
    moved = sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in shapes)
    return Work(2.0 * terms * math.prod(shapes[-1].shape), float(moved))


def _plus(a: Work, b: Work, times: float = 1) -> Work:
    return Work(a.flops + times * b.flops, a.bytes + times * b.bytes)
