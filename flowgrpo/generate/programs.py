"""The engine's compiled programs: the state of decoding and fixed shapes flow in, the state flows out.

Four programs. `extend` compiles once for each width of a piece, the others once, whatever requests come, because a
slot is an index and not a shape. Engines of one policy and one shape share what was compiled.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flowgrpo.contracts import Cache, Policy
from flowgrpo.generate.sampler import Rows, decode, prefill, start_rows


class Turn(NamedTuple):
    """State from which a request's row goes on decoding."""

    token: int  # its last token, which is not in the cache
    key: Any
    count: int  # tokens sampled so far
    budget: int  # tokens that may still be sampled


class Programs(NamedTuple):
    """Pure functions of fixed shape; the state of decoding is donated from call to call."""

    start: Any  # (slots, slot_length) -> rows
    extend: Any  # (params, rows, source, target, held, tokens [c], size, turn) -> rows
    force: Any  # (params, rows, slot, tokens [c], size) -> rows
    decode: Any  # (params, rows, going_r, settings, stop_ids, leave) -> (rows, sampled)


def make_programs(policy: Policy, *, steps: int, banned: tuple[int, ...], width: int) -> Programs:
    """The programs for a policy."""
    return Programs(
        start=partial(_start, policy),
        extend=partial(_extend, policy),
        force=partial(_force, policy),
        decode=partial(_decode, policy, steps=steps, banned=banned, width=width),
    )


@partial(jax.jit, static_argnums=(0, 1, 2))
def _start(policy, slots: int, slot_length: int) -> Rows:
    """Empty slots, none of which decodes."""
    nothing_r, keys = jnp.zeros(slots, jnp.int32), jax.random.split(jax.random.key(0), slots)
    return start_rows(policy.make_cache(slots, slot_length), nothing_r, keys, nothing_r)


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def _extend(policy, params, rows: Rows, source, target, held, tokens, size, turn: Turn) -> Rows:
    """The first `held` tokens of one slot, and `size` of these after them, in another, whose row decodes from there.

    The tokens are given ones, computed as a batch of one whichever slot it is; without any, this is a copy. Source and
    target may be the same.
    """
    one = Cache(*(_row(x, source, axis) for x, axis in zip(_parts(rows.cache), _AXES, strict=True)))
    kept_c = jnp.arange(one.segments.shape[1]) < held
    one = one.replace(segments=jnp.where(kept_c[None], one.segments, 0), next=jnp.full_like(one.next, held))
    if len(tokens):
        one = prefill(policy, params, one, tokens[None], (jnp.arange(len(tokens)) < size)[None])
    parts = zip(_parts(rows.cache), _parts(one), _AXES, strict=True)
    return Rows(
        cache=Cache(*(_put(x, new, target, axis) for x, new, axis in parts)),
        token=rows.token.at[target].set(turn.token),
        key=rows.key.at[target].set(turn.key),
        count=rows.count.at[target].set(turn.count),
        budget=rows.budget.at[target].set(turn.budget),
        active=rows.active.at[target].set(turn.budget > 0),
    )


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def _force(policy, params, rows: Rows, slot, tokens, size) -> Rows:
    """The first `size` tokens, which were sampled before, fed to a slot again in decode steps of full width."""
    own_r = jnp.arange(len(rows.token)) == slot

    def step(i, cache):
        return prefill(policy, params, cache, jnp.where(own_r, tokens[i], 0)[:, None], own_r[:, None])

    return rows.replace(cache=jax.lax.fori_loop(0, size, step, rows.cache))


@partial(jax.jit, static_argnums=0, static_argnames=("steps", "banned", "width"), donate_argnums=2)
def _decode(policy, params, rows: Rows, going_r, settings, stop_ids, leave, *, steps, banned, width):
    """A stretch of decoding in the rows that are still wanted."""
    rows = rows.replace(active=rows.active & going_r)
    return decode(policy, params, rows, settings, stop_ids, steps=steps, leave=leave, banned=banned, width=width)


_AXES = (1, 1, 0, 0, 0)  # where the slots are in each part of a cache


def _parts(cache: Cache) -> tuple:
    return cache.keys, cache.values, cache.positions, cache.segments, cache.next


def _row(x, slot, axis):
    return jax.lax.dynamic_slice_in_dim(x, slot, 1, axis)


def _put(x, row, slot, axis):
    return jax.lax.dynamic_update_slice_in_dim(x, row, slot, axis)
