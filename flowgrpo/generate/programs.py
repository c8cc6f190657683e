"""The engine's compiled programs: a cache and fixed shapes flow in, the cache flows out.

Six programs, each compiled once whatever requests come, because a request's tokens are cut into pieces
of one size and a slot is an index, not a shape.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flowgrpo.contracts import Cache, Policy
from flowgrpo.generate.sampler import Rows, decode, prefill


class Programs(NamedTuple):
    """Pure functions of fixed shape; each compiles once."""

    prefill: Any  # (params, cache, slot, tokens [chunk], real [chunk]) -> cache
    force: Any  # (params, cache, slot, tokens [chunk], real [chunk]) -> cache, one decode step a token
    copy: Any  # (cache, source, target, length) -> cache
    enter: Any  # (rows, slot, token, key, budget) -> rows
    leave: Any  # (rows, slot) -> rows
    decode: Any  # (params, rows, settings, stop_ids, leave) -> (rows, sampled)


def make_programs(policy: Policy, *, steps: int, banned: tuple[int, ...], width: int) -> Programs:
    """The programs for a policy; the cache is donated from call to call."""
    return Programs(
        prefill=jax.jit(partial(_prefill, policy), donate_argnums=1),
        force=jax.jit(partial(_force, policy), donate_argnums=1),
        copy=jax.jit(_copy, donate_argnums=0),
        enter=jax.jit(_enter, donate_argnums=0),
        leave=jax.jit(_leave, donate_argnums=0),
        decode=jax.jit(partial(decode, policy, steps=steps, banned=banned, width=width), donate_argnums=1),
    )


def _prefill(policy, params, cache: Cache, slot, tokens, real) -> Cache:
    """Given tokens of one slot, computed as a batch of one whichever slot it is."""
    one = Cache(*(_row(x, slot, axis) for x, axis in zip(_parts(cache), _AXES, strict=True)))
    one = prefill(policy, params, one, tokens[None], real[None])
    return Cache(*(_put(x, new, slot, axis) for x, new, axis in zip(_parts(cache), _parts(one), _AXES, strict=True)))


def _force(policy, params, cache: Cache, slot, tokens, real) -> Cache:
    """Tokens that were sampled before, fed again in decode steps of full width."""
    own_r = jnp.arange(len(cache.next)) == slot

    def step(cache, now):
        token, is_real = now
        token_r = jnp.where(own_r, token, 0)
        return prefill(policy, params, cache, token_r[:, None], (own_r & is_real)[:, None]), None

    return jax.lax.scan(step, cache, (tokens, real))[0]


def _copy(cache: Cache, source, target, length) -> Cache:
    """The first `length` tokens of one slot in another; with source = target the rest is forgotten."""
    moved = Cache(*(_put(x, _row(x, source, axis), target, axis) for x, axis in zip(_parts(cache), _AXES, strict=True)))
    kept_c = jnp.arange(cache.segments.shape[1]) < length
    segments = moved.segments.at[target].set(jnp.where(kept_c, moved.segments[target], 0))
    return moved.replace(segments=segments, next=moved.next.at[target].set(length))


def _enter(rows: Rows, slot, token, key, budget) -> Rows:
    """A request begins to decode in a slot."""
    return rows.replace(
        token=rows.token.at[slot].set(token),
        key=rows.key.at[slot].set(key),
        count=rows.count.at[slot].set(0),
        budget=rows.budget.at[slot].set(budget),
        active=rows.active.at[slot].set(True),
    )


def _leave(rows: Rows, slot) -> Rows:
    """A slot decodes no more."""
    return rows.replace(active=rows.active.at[slot].set(False))


_AXES = (1, 1, 0, 0, 0)  # where the slots are in each part of a cache


def _parts(cache: Cache) -> tuple:
    return cache.keys, cache.values, cache.positions, cache.segments, cache.next


def _row(x, slot, axis):
    return jax.lax.dynamic_slice_in_dim(x, slot, 1, axis)


def _put(x, row, slot, axis):
    return jax.lax.dynamic_update_slice_in_dim(x, row, slot, axis)
