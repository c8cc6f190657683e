"""A kernel over a cache is the plain formula, whatever unfilled slots contain, and rows are independent."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowgrpo.models.attention import AttentionKernels, LayerCache, MaskSpec, attend, attend_cache, visible
from flowgrpo.models.attention_kernels import flash
from flowgrpo.models.config import DecoderConfig, Rope
from flowgrpo.models.decode_attention import flash_decode
from flowgrpo.models.decoder import make_policy
from flowgrpo.models.flash_attention import flash_rows

CONFIG = DecoderConfig(v=11, d=96, h=6, k=2, e=16, f=16, windows=(None, 5), ropes=(Rope(),) * 2, attention_softcap=2.0)
ROWS, SLOTS, UNBOUNDED = 3, 160, np.iinfo(np.int32).max  # two and a half parts of four blocks of 16 slots


def cache_of(filled, seed: int = 0):
    """Queries, and a cache of two layers whose rows have segments of random lengths; the query is in the last one."""
    rng, positions, segments = np.random.default_rng(seed), *np.zeros((2, ROWS, SLOTS), np.int32)
    for row, count in enumerate(filled):
        ends = np.sort(rng.choice(np.arange(1, SLOTS), 2, replace=False))
        segments[row, :count] = 1 + np.searchsorted(ends, np.arange(count), side="right")
        positions[row, :count] = np.arange(count) - np.concatenate([[0], ends])[segments[row, :count] - 1]
    last = [max(0, count - 1) for count in filled]
    of_query = [jnp.asarray(x[np.arange(ROWS), last][:, None]) for x in (positions, segments)]
    q, k, v = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((ROWS, 6, 1, 16), (2, ROWS, 2, SLOTS, 16), (2, ROWS, 2, SLOTS, 16))
    )
    return (
        q,
        k,
        v,
        jnp.asarray(filled, jnp.int32),
        of_query[0],
        jnp.asarray(positions),
        of_query[1],
        jnp.asarray(segments),
    )


@cache
def compiled(name: str):
    def by_kernel(q, k, v, filled, *mask, index):
        layer_cache = LayerCache(k, v, index, filled)
        return flash_decode(q, layer_cache, MaskSpec(*mask), CONFIG, interpret=True, block=16)

    def plain(q, k, v, _filled, *mask, index):
        return attend_cache(q, lambda _: (k[index], v[index], visible(*mask)), 1, CONFIG)

    return jax.jit({"kernel": by_kernel, "plain": plain}[name])


def outcome(name: str, inputs, window: int = UNBOUNDED, index: int = 1):
    return np.asarray(compiled(name)(*inputs, jnp.int32(window), index=jnp.int32(index)))


@pytest.mark.slow
@pytest.mark.parametrize("window", [UNBOUNDED, 5, 70])
def test_M2_a_kernel_over_a_cache_is_the_plain_formula(window):
    rng = np.random.default_rng(window)
    for seed in range(4):
        inputs = cache_of(rng.integers(1, SLOTS + 1, ROWS), seed)
        for index in (0, 1):
            actual, expected = (outcome(name, inputs, window, index) for name in ("kernel", "plain"))
            np.testing.assert_allclose(actual, expected, atol=3e-6, rtol=0)


@pytest.mark.slow
def test_F6_garbage_in_slots_that_are_not_filled_does_not_leak():
    inputs = cache_of([130, 1, 0])
    behind = jnp.arange(SLOTS)[None] >= inputs[3][:, None]
    clean = outcome("kernel", inputs)
    for garbage in (jnp.nan, 1e30):
        with jax.debug_nans(False):
            q, k, v, *others = inputs
            k, v = (jnp.where(behind[:, None, :, None], garbage, x) for x in (k, v))
            np.testing.assert_array_equal(outcome("kernel", (q, k, v, *others)), clean)
    assert not clean[2].any()


@pytest.mark.slow
def test_E3_a_rows_bits_do_not_depend_on_other_rows():
    inputs = cache_of([65, 160, 64])
    together = outcome("kernel", inputs)
    q, k, v, filled, *mask = inputs
    others = tuple(x[:, ::-1].at[:, 0].set(x[:, 0]) for x in (k, v))
    changed = (q, *others, filled.at[1:].set(jnp.array([3, 0])), *mask)
    np.testing.assert_array_equal(outcome("kernel", changed)[0], together[0])
    for row in range(ROWS):
        at = slice(row, row + 1)
        alone = (q[at], k[:, at], v[:, at], filled[at], *(x[at] for x in mask))
        np.testing.assert_array_equal(outcome("kernel", alone), together[at])


@pytest.mark.slow
def test_E3_a_prompts_bits_do_not_depend_on_batch_or_padding():
    """By the kernel for rows, over a cache whose last filled slots are the prompt."""
    _, k, v, _, _, positions, _, segments = cache_of([50, 160, 90])
    q = jnp.asarray(np.random.default_rng(1).normal(size=(ROWS, 6, 20, 16)), jnp.float32)
    last = np.array([30, 140, 70])[:, None] + np.arange(20)
    of_prompt = [jnp.take_along_axis(x, last, axis=1) for x in (positions, segments)]

    @jax.jit
    def attended(q, k, v, position, segment, positions, segments):
        mask = MaskSpec(position, positions, segment, segments, jnp.int32(UNBOUNDED))
        return flash_rows(q, k, v, mask, CONFIG, interpret=True, block=32)

    together = attended(q, k[1], v[1], *of_prompt, positions, segments)
    padded = [jnp.pad(x, ((0, 0), (0, 50))) for x in of_prompt]
    actual = attended(jnp.pad(q, ((0, 0), (0, 0), (0, 50), (0, 0))), k[1], v[1], *padded, positions, segments)
    np.testing.assert_array_equal(actual[:, :, :20], together)
    for row in range(ROWS):
        alone = (x[row : row + 1] for x in (q, k[1], v[1], *of_prompt, positions, segments))
        np.testing.assert_array_equal(attended(*alone)[0], together[row])
    assert np.abs(together).min() > 0


# In a decoder -----------------------------------------------------------------------------------------


def by_kernel(calls: list) -> AttentionKernels:
    """The plain formula over whole rows, and kernels over caches, which record the shapes of their calls."""

    def attend_cached(q, cache, mask, config):
        calls.append((q.shape, cache.k.shape))
        if q.shape[2] > 1:
            k, v = (x[cache.index] for x in (cache.k, cache.v))
            return flash_rows(q, k, v, mask, config, interpret=True, block=32)
        return flash_decode(q, cache, mask, config, interpret=True, block=16)

    return AttentionKernels(attend, attend_cached, supports=lambda *_: True)


def decode(policy, params):
    """Hidden states of prompts of different lengths, of two steps (one row skips the second), and of more prompts.

    Slots that are not filled hold garbage.
    """
    segments = jnp.asarray(np.arange(5)[None] < np.array([5, 2, 3])[:, None], jnp.int32)
    tokens = jnp.arange(15).reshape(3, 5) % CONFIG.v
    states, cache = [], policy.make_cache(3, 64)
    cache = cache.replace(keys=jax.tree.map(lambda x: x + 1e30, cache.keys))
    for part in (slice(0, 5), slice(0, 1), slice(2, 3), slice(0, 5)):
        out, cache = jax.jit(policy.hidden)(params, tokens[:, part], None, segments[:, part], cache)
        states.append(out)
    return jnp.concatenate(states, axis=1)


@pytest.mark.slow
@pytest.mark.parametrize("unroll", [1, True])
def test_M2_a_decoder_with_cache_kernels_equals_the_plain_one(unroll):
    """Over caches of all layers and of one."""
    calls = []
    kernels = {"k": by_kernel(calls), "p": attend}
    policies = {name: make_policy(CONFIG, unroll=unroll, attend=kernel) for name, kernel in kernels.items()}
    params = policies["p"].init(jax.random.key(0))
    actual, expected = (decode(policies[name], params) for name in "kp")
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    assert not actual[1, 2:5].any()
    assert set(calls) == {((3, 6, n, 16), (1 if unroll is True else 2, 3, 2, 64, 16)) for n in (1, 5)}


def test_which_shapes_and_dtypes_the_cache_kernels_support():
    def takes(length=1, dtype=jnp.bfloat16, slots=128, e=64):
        q, k = (jnp.zeros(shape, dtype) for shape in ((3, 6, length, e), (2, 3, 2, slots, e)))
        return flash.supports(q, k)

    assert all((takes(), takes(dtype=jnp.float16), takes(length=2), takes(length=2, slots=40)))
    assert not any((takes(dtype=jnp.float32), takes(slots=40), takes(e=80), takes(e=8)))
    assert not takes(length=2, dtype=jnp.float32)


def test_gpu_program_has_the_kernel_and_does_not_copy_the_cache():
    policy = make_policy(CONFIG, dtype=jnp.bfloat16, attend=flash)
    assert policy.make_cache is not None
    params, cache = jax.eval_shape(policy.init, jax.random.key(0)), jax.eval_shape(partial(policy.make_cache, 3, 2048))
    traced = jax.jit(policy.hidden).trace(params, jnp.zeros((3, 1), jnp.int32), None, None, cache)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__gpu$xla.gpu.triton") == 2
    assert "dynamic_slice" not in "".join(line for line in text.splitlines() if "2x3x2x2048x16" in line)
