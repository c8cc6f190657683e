"""Programs that are compiled before they are called: nothing is compiled again, on one device and on several."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import counted_compilations

from flowgrpo.parallel.compile_ahead import compile_ahead, host_shapes, jit_quickly
from flowgrpo.parallel.row_sharding import SHARDED_ROWS, data_mesh, replicate, replicated_sharding


@pytest.mark.parametrize("several", [False, True])
def test_a_call_finds_what_was_compiled_ahead(several):
    """A chain of two programs: the second gets results of the first, some of them through the host."""
    mesh = data_mesh() if several else None

    def double(x):
        rows = x * jnp.float32(2)
        return (
            rows
            if mesh is None
            else jax.shard_map(lambda x: x, mesh=mesh, in_specs=SHARDED_ROWS, out_specs=SHARDED_ROWS)(rows)
        )

    first, second = jax.jit(double), jax.jit(lambda x, y: (x + y).sum())
    x = replicate(jnp.arange(16, dtype=jnp.float32), mesh)
    with counted_compilations() as compiled:
        doubled = compile_ahead(first, x)
        total = compile_ahead(second, doubled, host_shapes(doubled))
        ahead = dict(compiled)
        actual = first(x)
        assert float(second(actual, np.asarray(actual))) == 2 * 2 * sum(range(16))
    assert set(ahead) >= {"jit(double)"}
    assert compiled == ahead
    assert (doubled.shape, total.shape) == ((16,), ())
    assert (doubled.sharding is not None) == several


def test_jit_quickly_computes_the_same():
    mesh, key = data_mesh(), jax.random.key(0)

    def draw(key):
        return jax.random.randint(key, (16,), 0, 1000)

    actual = jit_quickly(draw, out_shardings=replicated_sharding(mesh))(key)
    np.testing.assert_array_equal(actual, draw(key))
    assert actual.sharding.is_fully_replicated
