"""Price of exactness: seconds of a program relative to the same program without one of its safeguards.

    rows padded         to a number at which the bits of a row don't depend on the others (`products.exact_padding`)
    blocks of keys      attention over fixed blocks of keys, in sampling as in scoring (`attention.BLOCK`)
    total by product    sum of attention weights by a product, instead of along an axis (`attention.sum_keys`)
    no fusions          by YNNPACK, most of which are wrong in jaxlib 0.10.2 (`launch.NO_FLAWED_FUSION`)

Each program is compiled as it is and without each of them, and all run in turn. A price below 1 means that it costs
nothing. The figures are in docs/scale.md.
"""

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flowgrpo import launch
from flowgrpo.algorithms.policy_gradient import flow_grpo
from flowgrpo.batching.layouts import full_batch
from flowgrpo.envs.env import PAD
from flowgrpo.learner.state import adamw, init_learner
from flowgrpo.learner.update import UpdateSettings, make_update
from flowgrpo.models import attention, kv_cache
from flowgrpo.models.decoder import make_policy
from flowgrpo.parallel.row_sharding import data_mesh, map_rows, replicate
from flowgrpo.report.progress import with_progress
from flowgrpo.report.tables import seconds, significant

from . import ceilings
from .racers.ours import generate_block

LARGE = 2**30  # a size that divides nothing
FUSIONS = "xla_cpu_experimental_ynn_fusion_type"
SAFEGUARDS = ("rows padded", "blocks of keys", "total by product", "no products of YNNPACK", "no fusions")
# What YNNPACK fuses without a safeguard; the second is JAX's default.
KINDS = {"no products of YNNPACK": ("INDIVIDUAL_DOT",), "no fusions": ("INDIVIDUAL_DOT", "REDUCE")}
# rows and sampled tokens after 32 prompt tokens, or rows and tokens of a batch
PROGRAMS = {
    "decode 64 x 64": (64, 64),
    "decode 16 x 256": (16, 256),
    "update 64 x 96": (64, 96),
    "update 16 x 384": (16, 384),
}


@contextmanager
def _without(safeguard: str | None) -> Iterator[dict[str, Any]]:
    """Trace programs without one of the safeguards; yields options for their compilation."""
    is_exact, blocks, total = launch.is_exact, attention.BLOCK, attention.sum_keys
    if safeguard == "rows padded":
        launch.is_exact = lambda: False
    if safeguard == "blocks of keys":
        attention.BLOCK = kv_cache.BLOCK = LARGE
    if safeguard == "total by product":
        attention.sum_keys = lambda shares: shares.sum(axis=-1)
    try:
        yield (
            {FUSIONS: ",".join(f"LIBRARY_FUSION_TYPE_{kind}" for kind in KINDS[safeguard])}
            if safeguard in KINDS
            else {}
        )
    finally:
        launch.is_exact, attention.sum_keys = is_exact, total
        attention.BLOCK = kv_cache.BLOCK = blocks


def _program(name: str, safeguard: str | None) -> Callable[[], Any]:
    """One of `PROGRAMS` on the small model, compiled."""
    config, mesh = ceilings.shape_called("small"), data_mesh()
    policy = make_policy(config, unroll=True)._replace(mesh=mesh)
    params = replicate(jax.jit(policy.init)(jax.random.key(0)), mesh)
    rows, tokens = PROGRAMS[name]
    if name.startswith("decode"):
        prompt_rs = jnp.asarray(np.random.default_rng(0).integers(PAD + 1, config.v, (rows, 32), np.int32))
        inputs = replicate((prompt_rs, jax.random.split(jax.random.key(0), rows)), mesh)
        generate = partial(generate_block, policy, tokens)
        function, arguments = (lambda params, inputs: map_rows(generate, mesh, params, inputs)), (params, inputs)
    else:
        optimizer = adamw(1e-4)
        function = make_update(policy, flow_grpo(beta=0.0), optimizer, UpdateSettings(banned=(PAD,), micro_rows=4))
        state = replicate(init_learner(params, optimizer), mesh)
        arguments = (state, replicate(full_batch(config.v, rows, tokens), mesh))
    with _without(safeguard) as options:
        compiled = jax.jit(function).lower(*arguments).compile(dict(options) or None)
    return partial(compiled, *arguments)


def measure(repeats: int) -> list[dict[str, Any]]:
    """Medians and ranges of the prices of all safeguards in all programs."""
    rows = []
    for name in with_progress("price", list(PROGRAMS)):
        programs = {safeguard: _program(name, safeguard) for safeguard in (None, *SAFEGUARDS)}
        rounds = [{safeguard: seconds(run) for safeguard, run in programs.items()} for _ in range(1 + repeats)][1:]
        for safeguard in SAFEGUARDS:
            ratios = [durations[None] / durations[safeguard] for durations in rounds]
            spread = {"least": significant(min(ratios)), "most": significant(max(ratios))}
            rows.append({"work": name, "means": safeguard, "price": significant(statistics.median(ratios))} | spread)
    return rows
