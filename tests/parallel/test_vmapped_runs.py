"""Several runs at once: with any lanes and devices, runs are independent and stay in order."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowgrpo.parallel.row_sharding import map_runs, scan_updates, stack_trees
from flowgrpo.types import BadInput

MESH = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])


def step(run: dict) -> tuple[dict, dict]:
    key = jax.random.fold_in(run["key"], run["update"])
    x = run["x"] + jax.random.normal(key)
    return run | {"x": x, "update": run["update"] + 1}, {"x": x}


def start(seed: int) -> dict:
    return {"key": jax.random.key(seed), "x": jnp.float32(seed), "update": jnp.int32(0)}


@pytest.mark.slow
@pytest.mark.parametrize(("lanes", "mesh"), [(None, None), (1, MESH), (2, None), (3, MESH), (9, MESH)])
def test_map_runs_equals_single_runs(lanes, mesh):
    seeds = (3, 0, 7, 1, 5)
    whole = map_runs(partial(scan_updates, step, updates=4), lanes=lanes, mesh=mesh)
    after, figures = jax.jit(whole)(stack_trees([start(seed) for seed in seeds]))
    assert figures["x"].shape == (5, 4)
    alone = jax.jit(step)
    for place, seed in enumerate(seeds):
        run = start(seed)
        for update in range(4):
            run, expected = alone(run)
            np.testing.assert_allclose(figures["x"][place, update], expected["x"], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(after["x"][place], run["x"], rtol=1e-5, atol=1e-6)
        assert int(after["update"][place]) == 4


def test_bad_input_is_a_sentence():
    with pytest.raises(BadInput, match="lanes is 0"):
        map_runs(step, lanes=0)
    with pytest.raises(BadInput, match="there is no run"):
        stack_trees([])
