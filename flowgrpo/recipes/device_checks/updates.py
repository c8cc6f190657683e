"""An update on the device against the host's, and against itself.

Both begin with the same state and batch, in float32 with products at highest precision. The optimizer is plain gradient
descent behind the clip of the norm, because a first step of Adam is the sign of the gradient, which says nothing of
its size and turns rounding near zero into a whole step.
"""

import os
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from flowgrpo.algorithms.policy_gradient import flow_grpo
from flowgrpo.batching.layouts import full_batch
from flowgrpo.learner.state import init_learner, make_optimizer
from flowgrpo.learner.update import make_update
from flowgrpo.models.decoder import make_policy
from flowgrpo.recipes.device_checks.attentions import GPU, largest_difference
from flowgrpo.recipes.device_checks.bench import EXACT, Bench, Device, small_shape
from flowgrpo.recipes.device_checks.figures import CheckLine, at_most, holds, skipped
from flowgrpo.recipes.device_checks.sampling import NO_HOST, small_params
from flowgrpo.types import Batch

CHANGE, METRICS = 1e-3, 1e-3
DETERMINISTIC_FLAG = "--xla_gpu_deterministic_ops"


class SmallUpdate(NamedTuple):
    """An update of a small model, what it begins with, and the program that all checks share."""

    program: Callable[..., Any]
    state: Any
    batch: Batch


@cache
def _small_update(bench: Bench) -> SmallUpdate:
    """Two epochs: in the second one ratios are not 1, and some are clipped."""
    config, sizes = small_shape(bench.sizes), bench.sizes
    optimizer = make_optimizer(learning_rate=0.1, base=optax.identity())
    batch = full_batch(config.v, sizes.rows, sizes.length, segments=3, samples=2)
    update = make_update(make_policy(config), flow_grpo(beta=0.0), optimizer, micro_rows=sizes.rows // 2, epochs=2)
    return SmallUpdate(jax.jit(update), init_learner(small_params(bench), optimizer), batch)


def _run_update(bench: Bench, device: Device) -> tuple[dict, dict]:
    """Run the update: how the parameters change on a device, and the metrics."""
    small = _small_update(bench)
    with EXACT.products():
        after, metrics = jax.device_get(small.program(*jax.device_put((small.state, small.batch), device)))
    return {name: after.params[name] - before for name, before in small.state.params.items()}, metrics


def check_update(bench: Bench) -> list[CheckLine]:
    """Compare one update on the device with the host's."""
    if bench.host is None:
        return [skipped("an update against the host", NO_HOST)]
    (change, metrics), (right, right_metrics) = (_run_update(bench, one) for one in (bench.device, bench.host))
    advice = "The device learns something else than the host: don't train here; compare the gradient array by array."
    lines = [at_most("change of the parameters", largest_difference(change, right), CHANGE, advice)]
    # A ratio at the edge of two bins of a histogram may count in either.
    told = [name for name in right_metrics if "histogram" not in name]
    off = {name: _relative(metrics[name], right_metrics[name]) for name in told}
    worst = max(off, key=lambda name: off[name])
    return [
        *lines,
        at_most("loss", off["loss"], METRICS, advice),
        at_most(f"metric that differs most: {worst}", off[worst], METRICS, advice),
    ]


def _relative(some: Any, other: Any) -> float:
    """The difference over what is compared with, or over 1 where that is smaller."""
    return float(np.max(np.abs(np.asarray(some) - other) / np.maximum(1.0, np.abs(other))))


def check_determinism(bench: Bench) -> list[CheckLine]:
    """Make the same update twice on the device, and compare all bits."""
    first, second = (jax.tree.leaves(_run_update(bench, bench.device)) for _ in range(2))
    same = all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(first, second, strict=True))
    guards = bench.device.platform not in GPU or _is_deterministic()
    advice = (
        "Sums go in another order each time, so a run that is killed does not end at the same bits: use "
        "--deterministic, which takes longer."
    )
    return [holds("two updates, the same bits", same, advice, guards=guards)]


def _is_deterministic() -> bool:
    """Say whether XLA was told to use deterministic operations only."""
    return f"{DETERMINISTIC_FLAG}=true" in os.environ.get("XLA_FLAGS", "")
