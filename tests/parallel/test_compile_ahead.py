"""Programs that are compiled before they are called: nothing is compiled again, on one device and on several."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import counted_compilations

from flowgrpo.parallel.compile_ahead import compile_ahead, jit_quickly, on_host
from flowgrpo.parallel.row_sharding import DEALT, data_mesh, replicated, share


@pytest.mark.parametrize("several", [False, True])
def test_a_call_finds_what_was_compiled_ahead(several):
    """A chain of two programs, of which the second is given results of the first and what was on the host between."""
    mesh = data_mesh() if several else None

    def double(x):
        rows = x * jnp.float32(2)
        return rows if mesh is None else jax.shard_map(lambda x: x, mesh=mesh, in_specs=DEALT, out_specs=DEALT)(rows)

    first, second = jax.jit(double), jax.jit(lambda x, y: (x + y).sum())
    x = share(jnp.arange(16, dtype=jnp.float32), mesh)
    with counted_compilations() as compiled:
        doubled = compile_ahead(first, x)
        total = compile_ahead(second, doubled, on_host(doubled))
        ahead = dict(compiled)
        found = first(x)
        assert float(second(found, np.asarray(found))) == 2 * 2 * sum(range(16))
    assert set(ahead) >= {"jit(double)"}
    assert compiled == ahead
    assert (doubled.shape, total.shape) == ((16,), ())
    assert (doubled.sharding is not None) == several


def test_what_is_compiled_quickly_computes_the_same():
    mesh, key = data_mesh(), jax.random.key(0)

    def draw(key):
        return jax.random.randint(key, (16,), 0, 1000)

    found = jit_quickly(draw, out_shardings=replicated(mesh))(key)
    np.testing.assert_array_equal(found, draw(key))
    assert found.sharding.is_fully_replicated
