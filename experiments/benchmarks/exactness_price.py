"""Price of exactness: seconds of a program over those of the same without one of the means to it.

    rows padded         to a number at which each has the same bits in any company (`products.padding`)
    blocks of keys      attention over so many at a time, in sampling as in scoring (`attention.BLOCK`)
    total by product    of attention's shares, instead of a sum along an axis (`attention.total_of`)
    no fusions          of YNNPACK, of which most kinds are wrong in jaxlib 0.10.2 (`launch.NO_FLAWED_FUSION`)

Each program is compiled as it is and without each of them, and all run in turn. Below 1 it costs nothing. The figures
are in docs/scale.md.
"""

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import flowgrpo as fg
from flowgrpo import launch
from flowgrpo.batching.layouts import full_batch
from flowgrpo.envs.env import PAD
from flowgrpo.learner.state import init_learner, make_optimizer
from flowgrpo.learner.update import make_update
from flowgrpo.models import attention, kv_cache
from flowgrpo.models.decoder import make_policy
from flowgrpo.parallel.row_sharding import data_mesh, map_rows, share
from flowgrpo.report.progress import with_progress
from flowgrpo.report.tables import seconds, significant

from . import ceilings
from .racers.ours import generate_block

LARGE = 2**30  # a size that divides nothing
FUSIONS = "xla_cpu_experimental_ynn_fusion_type"
MEANS = ("rows padded", "blocks of keys", "total by product", "no products of YNNPACK", "no fusions")
# What YNNPACK fuses without a means; the second is JAX's own choice.
KINDS = {"no products of YNNPACK": ("INDIVIDUAL_DOT",), "no fusions": ("INDIVIDUAL_DOT", "REDUCE")}
# rows and tokens sampled after 32 given ones, or rows and tokens of a batch
WORKS = {
    "decode 64 x 64": (64, 64),
    "decode 16 x 256": (16, 256),
    "update 64 x 96": (64, 96),
    "update 16 x 384": (16, 384),
}


@contextmanager
def _without(means: str | None) -> Iterator[dict[str, Any]]:
    """Programs that are traced here do without one of the means; what is given are options of their compilation."""
    is_exact, blocks, total = launch.is_exact, attention.BLOCK, attention.total_of
    if means == "rows padded":
        launch.is_exact = lambda: False
    if means == "blocks of keys":
        attention.BLOCK = kv_cache.BLOCK = LARGE
    if means == "total by product":
        attention.total_of = lambda shares: shares.sum(axis=-1)
    try:
        yield {FUSIONS: ",".join(f"LIBRARY_FUSION_TYPE_{kind}" for kind in KINDS[means])} if means in KINDS else {}
    finally:
        launch.is_exact, attention.total_of = is_exact, total
        attention.BLOCK = kv_cache.BLOCK = blocks


def _program(work: str, means: str | None) -> Callable[[], Any]:
    """One of the works on the small model, compiled."""
    config, mesh = ceilings.shape_called("small"), data_mesh()
    policy = make_policy(config, unroll=True)._replace(mesh=mesh)
    params = share(jax.jit(policy.init)(jax.random.key(0)), mesh)
    rows, tokens = WORKS[work]
    if work.startswith("decode"):
        prompt_rs = jnp.asarray(np.random.default_rng(0).integers(PAD + 1, config.v, (rows, 32), np.int32))
        given = share((prompt_rs, jax.random.split(jax.random.key(0), rows)), mesh)
        one = partial(generate_block, policy, tokens)
        function, arguments = (lambda params, given: map_rows(one, mesh, params, given)), (params, given)
    else:
        optimizer = make_optimizer(learning_rate=1e-4)
        function = make_update(policy, fg.flow_grpo(beta=0.0), optimizer, banned=(PAD,), micro_rows=4)
        state = share(init_learner(params, optimizer), mesh)
        arguments = (state, share(full_batch(config.v, rows, tokens), mesh))
    with _without(means) as options:
        compiled = jax.jit(function).lower(*arguments).compile(dict(options) or None)
    return partial(compiled, *arguments)


def measure(repeats: int) -> list[dict[str, Any]]:
    """Medians and ranges of the prices of all means in all works."""
    found = []
    for work in with_progress("price", list(WORKS)):
        programs = {means: _program(work, means) for means in (None, *MEANS)}
        rounds = [{means: seconds(run) for means, run in programs.items()} for _ in range(1 + repeats)][1:]
        for means in MEANS:
            ratios = [clocks[None] / clocks[means] for clocks in rounds]
            spread = {"least": significant(min(ratios)), "most": significant(max(ratios))}
            found.append({"work": work, "means": means, "price": significant(statistics.median(ratios))} | spread)
    return found
