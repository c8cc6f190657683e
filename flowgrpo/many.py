"""Several runs at once, seeds or settings: a stack of runs flows in, a stack flows out. Pure, to be jitted.

    runs = stack([start(seed) for seed in range(16)])
    after, figures = jax.jit(over_runs(partial(many_updates, step, updates=10), mesh=data_mesh()))(runs)

Runs are dealt over the devices of a mesh, and on each device `lanes` of them are vmapped, one such batch after the
other. Where one run fills a device, as on a CPU, few lanes are faster; where it doesn't, all at once are. What a run
becomes depends on neither, but for rounding (E3).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from flowgrpo.spread import Spread, map_rows
from flowgrpo.types import BadInput


def stack(runs: Sequence[Any]) -> Any:
    """Trees of the same shape as one, every array with a first axis more."""
    if not runs:
        raise BadInput("stack: there is no run to stack")
    return jax.tree.map(lambda *x: jnp.stack(x), *runs)


def over_runs(function: Callable, *, lanes: int | None = None, mesh: Spread = None) -> Callable:
    """`function` of one run as a function of a stack of them; `lanes` are vmapped on a device, all by default."""
    if lanes is not None and lanes < 1:
        raise BadInput(f"over_runs: lanes is {lanes}, but must be at least 1")
    return partial(map_rows, partial(_in_lanes, function=function, lanes=lanes), mesh, ())


def _in_lanes(_shared: tuple, runs: Any, *, function: Callable, lanes: int | None) -> Any:
    count = len(jax.tree.leaves(runs)[0])
    if lanes == 1:
        return jax.lax.map(function, runs)
    return (
        jax.vmap(function)(runs) if lanes is None or lanes >= count else jax.lax.map(function, runs, batch_size=lanes)
    )


def many_updates(step: Callable, run: Any, *, updates: int) -> tuple[Any, Any]:
    """So many times `step(run) -> (run, figures)` as one scan; the figures of all, by update."""
    return jax.lax.scan(lambda run, _: step(run), run, length=updates)
