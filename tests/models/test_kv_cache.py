"""Calls for some rows of a cache read and write only these rows, in place (M2)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import CONFIG, tiny_params

from flowgrpo.models import kv_cache
from flowgrpo.models.decoder import make_policy

SLOTS = 40


@pytest.mark.parametrize("unroll", [1, True])
def test_M2_a_call_for_some_rows_equals_the_full_forward(unroll, monkeypatch):
    """One call with two pieces of one row, one of another, and one for a row that doesn't exist."""
    monkeypatch.setattr(kv_cache, "BLOCK", 16)
    policy, params = make_policy(CONFIG, unroll=unroll), tiny_params()
    assert policy.make_cache is not None
    cache = jax.tree.map(lambda x: x + 7, policy.make_cache(4, SLOTS))  # other rows must stay unchanged
    cache = cache.replace(segments=cache.segments.at[jnp.array([2, 0])].set(0))
    rng = np.random.default_rng(0)
    long, short = rng.integers(1, CONFIG.v, 16), rng.integers(1, CONFIG.v, 5)
    tokens_pc, real_pc = np.zeros((2, 4, 8), np.int32)
    for row, part in enumerate((long[:8], long[8:], short)):
        tokens_pc[row, : len(part)], real_pc[row, : len(part)] = part, 1
    some = cache.replace(rows=jnp.array([2, 2, 0, 4]), next=jnp.array([0, 8, 0, 0]))
    states, after = jax.jit(policy.hidden)(params, tokens_pc, None, real_pc, some)
    for tokens, actual in ((long, states[:2].reshape(16, -1)), (short, states[2, :5])):
        np.testing.assert_allclose(actual, policy.hidden(params, tokens[None])[0][0], atol=1e-5)
    assert after.next.tolist() == [8, 16, 5, 0]

    def others(cache) -> list:
        return [x[:, 1::2] if x.ndim == 5 else x[1::2] for x in jax.tree.leaves((cache.keys, cache.values))]

    jax.tree.map(np.testing.assert_array_equal, others(after), others(cache))
    np.testing.assert_array_equal(after.segments[1::2], cache.segments[1::2])


@pytest.mark.parametrize("index", [(), (1,)])
def test_writing_row_by_row_equals_a_scatter(index):
    """The way of a TPU, with a row that is named twice and one that isn't there."""
    rng = np.random.default_rng(1)
    cache_array = jnp.asarray(rng.normal(size=(2, 4, 2, SLOTS, 8) if index else (4, 2, SLOTS, 8)), jnp.float32)
    x = jnp.asarray(rng.normal(size=(4, 3, 2, 8)), jnp.float32)
    slots = jnp.array([[0, 1, 2], [3, 4, SLOTS], [30, 31, 32], [SLOTS] * 3])
    for rows in (None, jnp.array([2, 2, 0, 4])):
        write = {"index": index, "rows": rows}
        actual, expected = (f(cache_array, x, slots, **write) for f in (kv_cache._write_row_by_row, kv_cache._scatter))
        np.testing.assert_array_equal(actual, expected)
