"""Reductions under a mask: by hand, against NumPy, and with garbage in the masked slots."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowgrpo import masked

REDUCTIONS = {
    "sum": masked.sum,
    "mean": masked.mean,
    "variance": masked.variance,
    "unbiased": partial(masked.variance, ddof=1),
    "third": partial(masked.variance, ddof=2),
    "varies": masked.varies,
    "count": lambda _, *mask, **keepdims: masked.count(*mask, **keepdims),
}

# Every mask of five slots, one a row, and numbers of which some are equal.
MASKS_RS = np.array(list(itertools.product([False, True], repeat=5)))
VALUES_RS = np.random.default_rng(0).choice(np.float32([0.91, -1.25, 3.5]), MASKS_RS.shape)


def reduce_all(x_rs, mask_rs, axis):
    """Every reduction over an axis, with that axis kept and without, and what whitening gives."""
    kept = {name: reduce(x_rs, mask_rs, axis, keepdims=True) for name, reduce in REDUCTIONS.items()}
    gone = {name: reduce(x_rs, mask_rs, axis) for name, reduce in REDUCTIONS.items()}
    return {"kept": kept, "gone": gone, "whiten": masked.whiten(x_rs, mask_rs, axis)}


compiled = jax.jit(reduce_all, static_argnums=2)


def of_entries(x) -> dict:
    """Compute the reductions of these entries with NumPy in double precision; 0 where one has no meaning."""
    kinds = enumerate(("variance", "unbiased", "third"))
    found = {name: x.var(ddof=ddof) if len(x) > ddof else 0.0 for ddof, name in kinds}
    mean = x.mean() if len(x) else 0.0
    return found | {"sum": x.sum(), "mean": mean, "varies": len(set(x)) > 1, "count": len(x)}


def test_whitening_and_filling_by_hand():
    """The first row deviates from its mean by -2, -1 and 3, so its squares sum to 14; the second is constant."""
    x_rs, mask_rs, root = np.array([[1, 2, 6], [4, 4, 9]], np.float32), np.array([[1, 1, 1], [1, 1, 0]], bool), 7**0.5
    assert masked.fill(x_rs, mask_rs).tolist() == [[1, 2, 6], [4, 4, 0]]
    assert masked.fill(x_rs, mask_rs, -7.0).tolist() == [[1, 2, 6], [4, 4, -7]]
    for eps, scale in ((1e-6, root), (root, 2 * root)):
        expected = [[-2 / scale, -1 / scale, 3 / scale], [0, 0, 0]]
        np.testing.assert_allclose(masked.whiten(x_rs, mask_rs, 1, eps=eps), expected, rtol=1e-5)


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_reductions_equal_numpy_on_the_unmasked_entries(axis):
    """Rows of every mask, columns, and all; an empty mask and too few entries give 0."""
    found = compiled(VALUES_RS, MASKS_RS, axis)
    lanes = {None: [...], 0: [(slice(None), s) for s in range(5)], 1: list(range(32))}[axis]
    entries = [VALUES_RS[lane][MASKS_RS[lane]].astype(np.float64) for lane in lanes]
    expected = list(map(of_entries, entries))
    for name in REDUCTIONS:
        values = np.array([one[name] for one in expected])
        np.testing.assert_allclose(found["gone"][name], values if axis is not None else values[0], 1e-5, 1e-5, name)
        shape = {None: (1, 1), 0: (1, 5), 1: (32, 1)}[axis]
        np.testing.assert_allclose(found["kept"][name], values.reshape(shape), 1e-5, 1e-5, err_msg=name)
    for lane, x in zip(lanes, entries, strict=True):
        own, white = MASKS_RS[lane], np.asarray(found["whiten"])[lane]
        scaled = (x - x.mean()) / (x.std(ddof=1) + 1e-6) if len(set(x)) > 1 else 0.0
        np.testing.assert_allclose(white[own], scaled, 1e-4, 1e-5)
        assert not white[~own].any()


@pytest.mark.usefixtures("nan_allowed")
def test_F6_garbage_in_masked_slots_changes_no_value_and_no_gradient():
    names = ("sum", "mean", "variance", "unbiased", "whiten")

    @jax.jit
    def run(x_rs):
        def smooth(x_rs):
            found = reduce_all(x_rs, MASKS_RS, 1)
            return [(found["gone"] | found)[name] for name in names]

        outputs, pull = jax.vjp(smooth, x_rs)
        weights = [jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape) for y in outputs]  # nothing cancels
        one_at_a_time = [[w if i == j else 0 * w for j, w in enumerate(weights)] for i in range(len(weights))]
        return reduce_all(x_rs, MASKS_RS, 1), [pull(weights)[0] for weights in one_at_a_time]

    expected, gradients = run(VALUES_RS)
    for gradient_rs in gradients:
        assert np.isfinite(gradient_rs).all()
        assert (np.abs(gradient_rs[-1]) > 1e-6).all(), "the row without masked slots has a gradient everywhere"
        assert not np.asarray(gradient_rs)[~MASKS_RS].any()
    for garbage in (np.nan, np.inf, -np.inf, 1e30):
        found = run(np.where(MASKS_RS, VALUES_RS, np.float32(garbage)))
        jax.tree.map(np.testing.assert_array_equal, found, (expected, gradients))


def test_F6_garbage_on_the_host_never_reaches_a_device():
    """A NaN in the output of any eager operation raises here; what was compiled while NaN was allowed does not."""
    mask_s = np.array([True, False, True, False, False, True, True])
    assert masked.fill(np.where(mask_s, 1.0, np.nan), mask_s).tolist() == mask_s.astype(float).tolist()
    assert masked.mean(np.where(mask_s, 1.0, np.nan), mask_s) == 1.0


@pytest.mark.usefixtures("nan_allowed")
def test_an_unmasked_nan_is_not_hidden():
    found = compiled(np.where(np.arange(5) == 3, np.float32(np.nan), VALUES_RS), MASKS_RS, None)["gone"]
    assert np.isnan(found["sum"])
    assert np.isnan(found["mean"])
    assert found["varies"]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_inputs_are_summed_in_float32(dtype):
    found = jax.eval_shape(partial(reduce_all, axis=1), jnp.zeros((2, 3), dtype), jnp.ones((2, 3), bool))
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype(jnp.float32), jnp.dtype(bool)}
    assert masked.sum(np.ones(5000, dtype), np.ones(5000, bool)) == 5000  # bfloat16 can't count past 256, float16 2048


def test_F4_varies_is_exact_despite_rounding():
    """Lanes of one, two, ..., 40 entries of 0.91; then the float beside it, seen and masked."""
    mask_rs = np.arange(40) < np.arange(1, 41)[:, None]
    x_rs = np.where(mask_rs, np.float32(0.91), np.float32(5.0))
    white = jax.jit(lambda x_rs: masked.whiten(x_rs, mask_rs, 1, eps=0.0))
    assert not masked.varies(x_rs, mask_rs, 1).any()
    assert not white(x_rs).any()
    assert not jax.jit(jax.grad(lambda x_rs: (white(x_rs) * x_rs).sum()))(x_rs).any()
    assert masked.variance(x_rs, mask_rs, 1).max() > 0, "so that a decision by deviation would be caught"
    near_s = np.float32([0.91, 0.91, np.nextafter(np.float32(0.91), np.float32(1))])
    assert masked.varies(near_s, np.ones(3, bool))
    assert not masked.varies(near_s, np.array([True, True, False]))
