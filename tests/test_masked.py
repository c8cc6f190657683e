"""Reductions under a mask: by hand, against NumPy, and with garbage in the masked slots."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flowgrpo import masked

X = np.array([[1.0, 2.0, 6.0], [4.0, 4.0, 9.0]], np.float32)
MASK = np.array([[True, True, True], [True, True, False]])

REDUCTIONS = {
    "sum": masked.sum,
    "mean": masked.mean,
    "variance": masked.variance,
    "unbiased": lambda x, mask, axis=None: masked.variance(x, mask, axis, ddof=1),
    "whiten": masked.whiten,
}

AXES = {"row": 1, "all": None}

# Every mask of five slots, one a row.
MASKS_RS = np.array(list(itertools.product([False, True], repeat=5)))
VALUES_RS = np.random.default_rng(0).normal(size=MASKS_RS.shape).astype(np.float32)


# By hand ----------------------------------------------------------------------------------------------


def test_fill_replaces_what_is_masked():
    assert masked.fill(X, MASK).tolist() == [[1, 2, 6], [4, 4, 0]]
    assert masked.fill(X, MASK, -7.0).tolist() == [[1, 2, 6], [4, 4, -7]]


def test_count():
    assert masked.count(MASK) == 5
    assert masked.count(MASK, 0).tolist() == [2, 2, 1]
    assert masked.count(MASK, 1, keepdims=True).tolist() == [[3], [2]]


def test_sum():
    assert masked.sum(X, MASK) == 17
    assert masked.sum(X, MASK, 0).tolist() == [5, 6, 6]
    assert masked.sum(X, MASK, 1, keepdims=True).tolist() == [[9], [8]]


def test_mean():
    assert masked.mean(X, MASK) == pytest.approx(3.4)  # 17 / 5
    assert masked.mean(X, MASK, 0).tolist() == [2.5, 3, 6]
    assert masked.mean(X, MASK, 1, keepdims=True).tolist() == [[3], [4]]


def test_variance():
    # The first row deviates from its mean by -2, -1 and 3, so its squares sum to 14.
    np.testing.assert_allclose(masked.variance(X, MASK, 1), [14 / 3, 0], rtol=1e-6)
    np.testing.assert_allclose(masked.variance(X, MASK, 1, ddof=1), [7, 0], rtol=1e-6)
    np.testing.assert_allclose(masked.variance(X, MASK, 1, keepdims=True), [[14 / 3], [0]], rtol=1e-6)
    # From 3.4, all deviate by -2.4, -1.4, 2.6, 0.6 and 0.6.
    assert masked.variance(X, MASK) == pytest.approx((5.76 + 1.96 + 6.76 + 0.36 + 0.36) / 5)


def test_varies():
    assert masked.varies(X, MASK)
    assert masked.varies(X, MASK, 1).tolist() == [True, False]
    assert masked.varies(X, MASK, 0, keepdims=True).tolist() == [[True, True, False]]


def test_whiten():
    expected_rs = [[-2 / 7**0.5, -1 / 7**0.5, 3 / 7**0.5], [0, 0, 0]]
    np.testing.assert_allclose(masked.whiten(X, MASK, 1), expected_rs, rtol=1e-5)
    over_all_rs = np.where(MASK, (X - 3.4) / 3.8**0.5, 0)
    np.testing.assert_allclose(masked.whiten(X, MASK), over_all_rs, rtol=1e-5)


def test_whiten_divides_by_deviation_plus_eps():
    np.testing.assert_allclose(masked.whiten(X[:1], MASK[:1], eps=7**0.5), [[-1 / 7**0.5, -0.5 / 7**0.5, 1.5 / 7**0.5]])


# Against NumPy ----------------------------------------------------------------------------------------


@st.composite
def arrays_under_masks(draw):
    """A matrix with a mask of its shape, both drawn; the sides stay small, as each shape compiles once."""
    shape = draw(st.tuples(st.sampled_from([1, 3]), st.sampled_from([1, 5])))
    x_rs = draw(hnp.arrays(np.float32, shape, elements=st.floats(-8, 8, width=16)))
    return x_rs, draw(hnp.arrays(bool, shape))


@jax.jit
def reduced_rows(x_rs, mask_rs):
    """Every reduction over each row, and over all rows."""
    return {
        scope: {name: reduce(x_rs, mask_rs, axis) for name, reduce in REDUCTIONS.items()}
        | {"count": masked.count(mask_rs, axis), "varies": masked.varies(x_rs, mask_rs, axis)}
        for scope, axis in AXES.items()
    }


def numpy_reductions(x) -> dict:
    """What NumPy gives for the unmasked entries alone, in double precision; 0 where that has no meaning."""
    x = x.astype(np.float64)
    unbiased = x.var(ddof=1) if len(x) > 1 else 0.0
    return {
        "sum": x.sum(),
        "mean": x.mean() if len(x) else 0.0,
        "variance": x.var() if len(x) else 0.0,
        "unbiased": unbiased,
        "count": len(x),
        "varies": len(set(x)) > 1,
        "whiten": (x - x.mean()) / (np.sqrt(unbiased) + 1e-6) if len(set(x)) > 1 else np.zeros(len(x)),
    }


def assert_as_numpy(found: dict, x, mask):
    for name, expected in numpy_reductions(x[mask]).items():
        value = np.asarray(found[name])[mask] if name == "whiten" else found[name]
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-3 if name == "whiten" else 1e-5, err_msg=name)


@given(arrays_under_masks())
def test_reductions_equal_numpy_on_the_unmasked_entries(drawn):
    x_rs, mask_rs = drawn
    found = reduced_rows(x_rs, mask_rs)
    assert_as_numpy(found["all"], x_rs, mask_rs)
    for r in range(len(x_rs)):
        assert_as_numpy({name: value[r] for name, value in found["row"].items()}, x_rs[r], mask_rs[r])
    for scope in AXES:
        assert not found[scope]["whiten"][~mask_rs].any(), "masked slots of a whitened array are 0"


def test_reductions_on_the_host_equal_reductions_under_jit():
    found = reduced_rows(VALUES_RS, MASKS_RS)
    for (scope, axis), name in itertools.product(AXES.items(), REDUCTIONS):
        expected = REDUCTIONS[name](VALUES_RS, MASKS_RS, axis)
        np.testing.assert_allclose(found[scope][name], expected, rtol=1e-5, atol=1e-5, err_msg=name)


# Empty masks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_an_empty_mask_gives_0(name, axis):
    assert not np.any(REDUCTIONS[name](X, np.zeros_like(MASK), axis))
    assert not np.any(masked.count(np.zeros_like(MASK), axis))
    assert not np.any(masked.varies(X, np.zeros_like(MASK), axis))


@pytest.mark.parametrize("ddof", [0, 1, 2])
def test_variance_is_0_where_there_are_not_more_entries_than_ddof(ddof):
    mask_rs = np.arange(3) < np.arange(4)[:, None]  # rows of 0, 1, 2 and 3 entries
    x_rs = np.tile(X[:1], (4, 1))
    positive_r = masked.variance(x_rs, mask_rs, 1, ddof=ddof) > 0
    assert positive_r.tolist() == [entries > max(ddof, 1) for entries in range(4)]


# Garbage in masked slots ------------------------------------------------------------------------------


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 1e30, -1e30])
@pytest.mark.parametrize("axis", [None, 1])
@pytest.mark.parametrize("place", [np.asarray, jnp.asarray])
@pytest.mark.usefixtures("nan_allowed")
def test_F6_garbage_in_masked_slots_changes_no_value(garbage, axis, place):
    dirty_rs = place(np.where(MASKS_RS, VALUES_RS, np.float32(garbage)))
    for name, reduce in REDUCTIONS.items():
        expected = reduce(VALUES_RS, MASKS_RS, axis)
        np.testing.assert_array_equal(reduce(dirty_rs, MASKS_RS, axis), expected, err_msg=name)
    varies = masked.varies(dirty_rs, MASKS_RS, axis)
    np.testing.assert_array_equal(varies, masked.varies(VALUES_RS, MASKS_RS, axis))


def random_weights(shape) -> np.ndarray:
    return np.random.default_rng(1).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("axis", [None, 1])
@pytest.mark.usefixtures("nan_allowed")
def test_F6_garbage_in_masked_slots_changes_no_gradient_and_gets_none(name, axis):
    def loss(x_rs):
        found = REDUCTIONS[name](x_rs, MASKS_RS, axis)
        return (found * random_weights(found.shape)).sum()  # unequal, so nothing cancels

    gradient = jax.jit(jax.grad(loss))
    expected_rs = gradient(VALUES_RS)
    assert np.isfinite(expected_rs).all()
    assert (np.abs(expected_rs[-1]) > 1e-5).all(), "the row without masked slots has a gradient everywhere"
    for garbage in (np.nan, np.inf, -np.inf, 1e30, -1e30):
        found_rs = gradient(np.where(MASKS_RS, VALUES_RS, np.float32(garbage)))
        np.testing.assert_array_equal(found_rs, expected_rs)
        assert not found_rs[~MASKS_RS].any()


def test_F6_garbage_on_the_host_never_reaches_a_device():
    # A NaN in the output of any eager operation raises here. The shape is one that no test with `nan_allowed`
    # uses: what was compiled while NaN was allowed is cached by shape, and stays unchecked.
    mask_rs = MASKS_RS[1:, :4]
    dirty_rs = np.where(mask_rs, VALUES_RS[1:, :4], np.nan).astype(np.float32)
    for name, reduce in REDUCTIONS.items():
        assert np.isfinite(reduce(dirty_rs, mask_rs, 1)).all(), name


@pytest.mark.usefixtures("nan_allowed")
def test_an_unmasked_nan_is_not_hidden():
    x_rs = np.array([[1.0, np.nan, 1.0]], np.float32)
    mask_rs = np.ones((1, 3), bool)
    assert np.isnan(masked.sum(x_rs, mask_rs))
    assert np.isnan(masked.mean(x_rs, mask_rs))
    assert masked.varies(x_rs, mask_rs)


# Narrow inputs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("place", [np.asarray, jnp.asarray])
def test_narrow_inputs_give_float32(dtype, place):
    x_rs = place(X.astype(dtype))
    assert masked.fill(x_rs, MASK).dtype == masked.count(MASK).dtype == jnp.float32
    for name, reduce in REDUCTIONS.items():
        found = reduce(x_rs, MASK, 1)
        assert found.dtype == jnp.float32, name
        np.testing.assert_allclose(found, reduce(X, MASK, 1), rtol=1e-6, err_msg=name)  # X is exact in all of them


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_inputs_are_added_in_float32(dtype):
    ones_s = jnp.ones(5000, dtype)  # bfloat16 can't count past 256, nor float16 past 2048
    assert masked.sum(ones_s, jnp.ones(5000, bool)) == 5000
    assert masked.mean(ones_s, jnp.ones(5000, bool)) == 1


# Constant and varying ---------------------------------------------------------------------------------

UP_TO_40 = np.arange(40) < np.arange(1, 41)[:, None]  # masks of one, two, ..., 40 entries


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_F4_equal_entries_are_constant_though_their_mean_rounds(dtype):
    x_rs, mask_rs = np.where(UP_TO_40, 0.91, 5.0).astype(dtype), UP_TO_40
    assert not masked.varies(x_rs, mask_rs, 1).any()
    assert not masked.whiten(x_rs, mask_rs, 1).any()
    assert not masked.whiten(x_rs, mask_rs, 1, eps=0.0).any()
    gradient_rs = jax.grad(lambda x_rs: (masked.whiten(x_rs, mask_rs, 1) * x_rs.astype(jnp.float32)).sum())
    assert not gradient_rs(jnp.asarray(x_rs)).any()


def test_F4_the_test_above_would_catch_a_decision_by_deviation():
    assert masked.variance(np.full((40, 40), 0.91, np.float32), UP_TO_40, 1).max() > 0


def test_F4_the_smallest_difference_varies():
    x_s = np.array([0.91, 0.91, np.nextafter(np.float32(0.91), np.float32(1))], np.float32)
    assert masked.varies(x_s, np.ones(3, bool))
    assert not masked.varies(x_s, np.array([True, True, False]))


def test_one_entry_is_constant():
    assert not masked.varies(X, np.eye(2, 3, dtype=bool), 1).any()
    assert not masked.whiten(X, np.eye(2, 3, dtype=bool), 1).any()


# Whitened ---------------------------------------------------------------------------------------------

jitted_whiten = jax.jit(masked.whiten)


@given(st.integers(0, 2**31), st.floats(0.1, 100), st.floats(-5, 5), st.integers(2, 24))
def test_whitened_entries_have_mean_0_and_unbiased_deviation_1(seed, scale, shift, entries):
    rng = np.random.default_rng(seed)
    mask_s = rng.permutation(24) < entries
    x_s = (scale * (shift + rng.choice([-1, 1], 24) * rng.uniform(0.5, 2, 24))).astype(np.float32)
    x_s[mask_s.argmax()] = scale * (shift + 3)  # so that two entries differ by more than rounding
    found_s = np.asarray(jitted_whiten(x_s, mask_s))
    assert abs(found_s[mask_s].mean()) < 1e-4
    assert found_s[mask_s].std(ddof=1) == pytest.approx(1, abs=1e-4)
    assert not found_s[~mask_s].any()
