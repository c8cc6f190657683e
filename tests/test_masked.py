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
GARBAGE = [np.nan, np.inf, -np.inf, 1e30, -1e30]

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
    """What NumPy gives for these entries in double precision; 0 where that has no meaning."""
    x = np.asarray(x, np.float64)
    variances = {
        name: x.var(ddof=ddof) if len(x) > ddof else 0.0 for ddof, name in enumerate(("variance", "unbiased", "third"))
    }
    mean = x.mean() if len(x) else 0.0
    return variances | {"sum": x.sum(), "mean": mean, "varies": len(set(x)) > 1, "count": len(x)}


def whitened(x, eps=1e-6):
    return (x - x.mean()) / (x.std(ddof=1) + eps) if len(set(x)) > 1 else 0.0


# By hand, and against NumPy ---------------------------------------------------------------------------


def test_by_hand():
    """The first row deviates from its mean by -2, -1 and 3, so its squares sum to 14; the second is 4 and 4."""
    x_rs, mask_rs = np.array([[1, 2, 6], [4, 4, 9]], np.float32), np.array([[1, 1, 1], [1, 1, 0]], bool)
    assert masked.fill(x_rs, mask_rs).tolist() == [[1, 2, 6], [4, 4, 0]]
    assert masked.fill(x_rs, mask_rs, -7.0).tolist() == [[1, 2, 6], [4, 4, -7]]
    expected = {
        "sum": [9, 8], "mean": [3, 4], "variance": [14 / 3, 0], "unbiased": [7, 0], "third": [14, 0],
        "varies": [True, False], "count": [3, 2],
    }  # fmt: skip
    found = compiled(x_rs, mask_rs, 1)
    for name, expected_r in expected.items():
        np.testing.assert_allclose(found["gone"][name], expected_r, rtol=1e-6, err_msg=name)
    root = 7**0.5
    np.testing.assert_allclose(found["whiten"], [[-2 / root, -1 / root, 3 / root], [0, 0, 0]], rtol=1e-5)
    halved_rs = masked.whiten(x_rs, mask_rs, 1, eps=root)
    np.testing.assert_allclose(halved_rs, [[-1 / root, -0.5 / root, 1.5 / root], [0, 0, 0]], rtol=1e-5)


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_reductions_equal_numpy_on_the_unmasked_entries(axis):
    """Rows of every mask, columns, and all; an empty mask and too few entries give 0."""
    found = compiled(VALUES_RS, MASKS_RS, axis)
    lanes = {None: [...], 0: [(slice(None), s) for s in range(5)], 1: list(range(32))}[axis]
    expected = [of_entries(VALUES_RS[lane][MASKS_RS[lane]]) for lane in lanes]
    for name in REDUCTIONS:
        values = np.array([entries[name] for entries in expected])
        np.testing.assert_allclose(found["gone"][name], values if axis is not None else values[0], 1e-5, 1e-5, name)
        shape = {None: (1, 1), 0: (1, 5), 1: (32, 1)}[axis]
        np.testing.assert_allclose(found["kept"][name], values.reshape(shape), 1e-5, 1e-5, err_msg=name)
    for lane in lanes:
        own, white = MASKS_RS[lane], np.asarray(found["whiten"])[lane]
        np.testing.assert_allclose(white[own], whitened(VALUES_RS[lane][own].astype(np.float64)), 1e-4, 1e-5)
        assert not white[~own].any()


def test_reductions_on_the_host_equal_reductions_under_jit():
    jax.tree.map(
        lambda found, expected: np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6),
        reduce_all(VALUES_RS, MASKS_RS, 1),
        compiled(VALUES_RS, MASKS_RS, 1),
    )


# Garbage in masked slots ------------------------------------------------------------------------------


@pytest.mark.usefixtures("nan_allowed")
@pytest.mark.parametrize("axis", [None, 1])
def test_F6_garbage_in_masked_slots_changes_no_value_and_no_gradient(axis):
    def smooth(x_rs):
        found = reduce_all(x_rs, MASKS_RS, axis)
        return [*(found["gone"][name] for name in ("sum", "mean", "variance", "unbiased")), found["whiten"]]

    @jax.jit
    def run(x_rs):
        outputs, pull = jax.vjp(smooth, x_rs)
        weights = [jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape) for y in outputs]  # nothing cancels
        one_at_a_time = [[w if i == j else 0 * w for j, w in enumerate(weights)] for i in range(len(weights))]
        return reduce_all(x_rs, MASKS_RS, axis), [pull(weights)[0] for weights in one_at_a_time]

    expected, gradients = run(VALUES_RS)
    for gradient_rs in gradients:
        assert np.isfinite(gradient_rs).all()
        assert (np.abs(gradient_rs[-1]) > 1e-6).all(), "the row without masked slots has a gradient everywhere"
        assert not np.asarray(gradient_rs)[~MASKS_RS].any()
    for garbage in GARBAGE:
        found = run(np.where(MASKS_RS, VALUES_RS, np.float32(garbage)))
        jax.tree.map(np.testing.assert_array_equal, found, (expected, gradients))


def test_F6_garbage_on_the_host_never_reaches_a_device():
    """A NaN in the output of any eager operation raises here; what was compiled while NaN was allowed does not."""
    mask_s = np.array([True, False, True, False, False, True, True])
    assert masked.fill(np.where(mask_s, 1.0, np.nan), mask_s).tolist() == mask_s.astype(float).tolist()
    assert masked.mean(np.where(mask_s, 1.0, np.nan), mask_s) == 1.0


@pytest.mark.usefixtures("nan_allowed")
def test_an_unmasked_nan_is_not_hidden():
    x_rs = VALUES_RS.copy()
    x_rs[-1, 0] = np.nan
    found = compiled(x_rs, MASKS_RS, None)["gone"]
    assert np.isnan(found["sum"])
    assert np.isnan(found["mean"])
    assert found["varies"]


# Narrow inputs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_narrow_inputs_give_float32_and_are_added_in_it(dtype):
    found = jax.eval_shape(partial(reduce_all, axis=1), jnp.zeros((2, 3), dtype), jnp.ones((2, 3), bool))
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype(jnp.float32), jnp.dtype(bool)}
    ones_s = np.ones(5000, dtype)  # bfloat16 can't count past 256, nor float16 past 2048
    assert masked.sum(ones_s, np.ones(5000, bool)) == 5000
    assert masked.fill(ones_s, np.ones(5000, bool)).dtype == jnp.float32


# Constant and varying ---------------------------------------------------------------------------------

UP_TO_40 = np.arange(40) < np.arange(1, 41)[:, None]  # masks of one, two, ..., 40 entries


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_F4_equal_entries_are_constant_though_their_mean_rounds(dtype):
    @jax.jit
    def run(x_rs):
        def white(x_rs):
            return (masked.whiten(x_rs, UP_TO_40, 1, eps=0.0) * x_rs.astype(jnp.float32)).sum()

        return (
            masked.varies(x_rs, UP_TO_40, 1),
            masked.whiten(x_rs, UP_TO_40, 1),
            masked.whiten(x_rs, UP_TO_40, 1, eps=0.0),
            jax.grad(white)(x_rs),
            masked.variance(x_rs, UP_TO_40, 1),
        )

    *zero, variance_r = run(np.where(UP_TO_40, 0.91, 5.0).astype(dtype))
    assert not any(np.asarray(x).any() for x in zero)
    assert variance_r.max() > 0, "so that a decision by deviation would be caught"


def test_F4_the_smallest_difference_varies():
    x_rs = np.full((2, 3), 0.91, np.float32)
    x_rs[0, 2] = np.nextafter(np.float32(0.91), np.float32(1))
    found = compiled(x_rs, np.array([[1, 1, 1], [1, 1, 0]], bool), 1)
    assert found["gone"]["varies"].tolist() == [True, False]
    assert not compiled(x_rs, np.array([[1, 1, 0], [0, 0, 1]], bool), 1)["gone"]["varies"].any()
