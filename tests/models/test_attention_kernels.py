"""Kernels are the plain formula on any packing, forward and backward; nothing leaks from padding or other segments."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flowgrpo as fg
from flowgrpo.models.attention import MaskSpec, attend
from flowgrpo.models.attention_kernels import KERNELS, best_kernel, flash, get_kernel, splash
from flowgrpo.models.config import DecoderConfig, Rope
from flowgrpo.models.flash_attention import flash_rows
from flowgrpo.models.splash_attention import splash_rows

CONFIG = DecoderConfig(v=11, d=16, h=4, k=2, e=8, f=16, windows=(None, 5), ropes=(Rope(),) * 2, attention_softcap=2.0)
LENGTH, UNBOUNDED = 40, np.iinfo(np.int32).max
ROWS = {
    "attend": attend,
    "flash": partial(flash_rows, interpret=True, block=32),
    "splash": partial(splash_rows, interpret=True),
}


def packed(lengths, seed: int = 0):
    """One row of segments of these lengths, with padding behind them; and its queries, keys and values."""
    segments, positions = np.zeros((2, 1, LENGTH), np.int32)
    start = 0
    for number, length in enumerate(lengths, start=1):
        end = min(start + length, LENGTH)
        segments[0, start:end], positions[0, start:end] = number, np.arange(end - start)
        start = end
    rng = np.random.default_rng(seed)
    arrays = [jnp.asarray(rng.normal(size=(1, heads, LENGTH, 8)), jnp.float32) for heads in (4, 2, 2)]
    return *arrays, jnp.asarray(positions), jnp.asarray(segments)


@cache
def compiled(name: str):
    """The output of an attention function and its gradients, if only some of the queries count."""

    def run(q, k, v, positions, segments, window, counts):
        mask = MaskSpec(positions, positions, segments, segments, window)
        out, back = jax.vjp(lambda q, k, v: ROWS[name](q, k, v, mask, CONFIG), q, k, v)
        weight = jnp.cos(jnp.arange(q.size, dtype=jnp.float32)).reshape(q.shape)
        return out, *back(jnp.where(counts[:, None, :, None], weight, 0.0))

    return jax.jit(run)


def outcome(name: str, row, window: int = UNBOUNDED, counts=None):
    counts = jnp.ones((1, LENGTH), bool) if counts is None else counts
    return compiled(name)(*row, jnp.int32(window), counts)


KERNEL = pytest.mark.parametrize("name", ["flash", "splash"])


@pytest.mark.slow
@KERNEL
@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(1, 25), max_size=6), st.sampled_from([UNBOUNDED, 5]), st.integers(0, 3))
def test_M2_a_kernel_is_the_plain_formula_on_any_packing(name, lengths, window, seed):
    row = packed(lengths, seed)
    actual, expected = (outcome(kernel, row, window) for kernel in (name, "attend"))
    jax.tree.map(partial(np.testing.assert_allclose, atol=3e-6, rtol=0), actual, expected)
    for x in (actual[0], *actual[1:]):
        assert not jnp.where(row[4][:, None, :, None] > 0, 0, x).any()  # padding has no gradient


@pytest.mark.slow
@KERNEL
def test_F6_neither_padding_nor_other_segments_leak(name):
    """If only the second segment counts, NaN in padding and large numbers in other segments change no bit."""
    row = packed([11, 17, 6])
    q, k, v, positions, segments = row
    segment_2, padding = (at[:, None, :, None] for at in (segments == 2, segments == 0))

    def spoil(x, large):
        return jnp.where(segment_2, x, jnp.where(padding, jnp.nan, large))

    for window in (UNBOUNDED, 5):
        clean = outcome(name, row, window, segments == 2)
        with jax.debug_nans(False):
            spoilt = (spoil(q, 1e3), spoil(k, -1e3), spoil(v, 1e30), positions, segments)
            dirty = outcome(name, spoilt, window, segments == 2)
        for before, after in zip(clean, dirty, strict=True):
            np.testing.assert_array_equal(jnp.where(segment_2, before, 0), jnp.where(segment_2, after, 0))
        for gradient in dirty[1:]:
            assert not jnp.where(segment_2, 0, gradient).any()


@pytest.mark.parametrize(
    ("kernel", "platform", "call"), [(flash, "cuda", "triton"), (splash, "tpu", "tpu_custom_call")]
)
def test_accelerator_programs_have_the_kernel_and_no_full_mask(kernel, platform, call):
    q, k, v, positions, segments = packed([30])

    def loss(q, k, v):
        return kernel(q, k, v, MaskSpec(positions, positions, segments, segments, jnp.int32(5)), CONFIG).sum()

    of_float32 = jax.jit(loss).trace(q, k, v).lower(lowering_platforms=(platform,)).as_text()
    assert call not in of_float32  # which keeps to the plain formula
    q, k, v = (jnp.tile(x.astype(jnp.bfloat16), (1, 1, 4, 1)) for x in (q, k, v))
    positions, segments = jnp.tile(positions, (1, 4)), jnp.tile(segments, (1, 4))
    text = jax.jit(jax.grad(loss)).trace(q, k, v).lower(lowering_platforms=(platform,)).as_text()
    assert call in text
    assert "160x160x" not in text
    assert "256x256x" not in text  # with what a row is filled up


def test_best_kernel_is_that_of_the_platform():
    assert [best_kernel(name) for name in ("cpu", "tpu", "cuda", "gpu")] == [attend, splash, flash, flash]
    assert get_kernel("auto") is best_kernel(jax.default_backend())
    assert get_kernel("splash") is KERNELS["splash"] is splash
    with pytest.raises(fg.BadInput, match=r"attention is 'fast'; give one of auto, plain, splash, flash"):
        get_kernel("fast")
