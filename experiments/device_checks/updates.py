"""An update on the device against the host's, and against itself.

Both start from the same state and batch, in float32 with products at highest precision. The optimizer is plain gradient
descent after clipping by the norm, because the first step of Adam is the sign of the gradient, which is independent of
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
from flowgrpo.learner.state import adamw, init_learner
from flowgrpo.learner.update import UpdateSettings, make_update
from flowgrpo.models.decoder import make_policy
from flowgrpo.types import Batch

from .attentions import GPU, largest_difference
from .bench import EXACT, Bench, Device, small_shape
from .figures import CheckLine, at_most, expect, skipped
from .sampling import NO_HOST_ADVICE, small_params

MAX_CHANGE_ERROR, MAX_METRIC_ERROR = 1e-3, 1e-3
DETERMINISTIC_FLAG = "--xla_gpu_deterministic_ops"


class SmallUpdate(NamedTuple):
    """An update of a small model: the program that all checks share, and its input."""

    program: Callable[..., Any]
    state: Any
    batch: Batch


@cache
def _small_update(bench: Bench) -> SmallUpdate:
    """Update with two epochs: in the second one ratios are not 1, and some are clipped."""
    config, sizes = small_shape(bench.sizes), bench.sizes
    optimizer = adamw(0.1, base=optax.identity())
    batch = full_batch(config.v, sizes.rows, sizes.length, segments=3, samples=2)
    update = make_update(
        make_policy(config), flow_grpo(beta=0.0), optimizer, UpdateSettings(micro_rows=sizes.rows // 2, epochs=2)
    )
    return SmallUpdate(jax.jit(update), init_learner(small_params(bench), optimizer), batch)


def _run_update(bench: Bench, device: Device) -> tuple[dict, dict]:
    """Run the update on a device -> change of the parameters, metrics."""
    small_update = _small_update(bench)
    with EXACT.products():
        new_state, metrics = jax.device_get(
            small_update.program(*jax.device_put((small_update.state, small_update.batch), device))
        )
    return {name: new_state.params[name] - initial for name, initial in small_update.state.params.items()}, metrics


def check_update(bench: Bench) -> list[CheckLine]:
    """Compare one update on the device with the host's."""
    if bench.host is None:
        return [skipped("an update against the host", NO_HOST_ADVICE)]
    (change, metrics), (host_change, host_metrics) = (
        _run_update(bench, device) for device in (bench.device, bench.host)
    )
    advice = "The device learns something else than the host: don't train here; compare the gradient array by array."
    lines = [at_most("change of the parameters", largest_difference(change, host_change), MAX_CHANGE_ERROR, advice)]
    # a ratio at the edge of two bins of a histogram may count in either
    compared = [name for name in host_metrics if "histogram" not in name]
    errors = {name: _relative(metrics[name], host_metrics[name]) for name in compared}
    worst = max(errors, key=lambda name: errors[name])
    return [
        *lines,
        at_most("loss", errors["loss"], MAX_METRIC_ERROR, advice),
        at_most(f"metric that differs most: {worst}", errors[worst], MAX_METRIC_ERROR, advice),
    ]


def _relative(array: Any, reference: Any) -> float:
    """Largest difference relative to the reference, or to 1 if that is larger."""
    return float(np.max(np.abs(np.asarray(array) - reference) / np.maximum(1.0, np.abs(reference))))


def check_determinism(bench: Bench) -> list[CheckLine]:
    """Run the same update twice on the device, and compare all bits."""
    first, second = (jax.tree.leaves(_run_update(bench, bench.device)) for _ in range(2))
    is_equal = all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(first, second, strict=True))
    guards = bench.device.platform not in GPU or _is_deterministic()
    advice = (
        "Sums go in another order each time, so a run that is killed does not end at the same bits: use "
        "--deterministic, which takes longer."
    )
    return [expect("two updates, the same bits", is_equal, advice, guards=guards)]


def _is_deterministic() -> bool:
    """Whether XLA is set to deterministic operations."""
    return f"{DETERMINISTIC_FLAG}=true" in os.environ.get("XLA_FLAGS", "")
