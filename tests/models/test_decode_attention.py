"""A kernel over a cache is the plain formula, whatever lies in it, and a row's bits are its own."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowgrpo.models.attention import Kernels, Sight, Slots, attend, attend_cache, visible
from flowgrpo.models.attention_kernels import flash
from flowgrpo.models.config import DecoderConfig, Rope
from flowgrpo.models.decode_attention import attend_slots
from flowgrpo.models.decoder import make_policy
from flowgrpo.models.flash_attention import flash_rows

CONFIG = DecoderConfig(v=11, d=96, h=6, k=2, e=16, f=16, windows=(None, 5), ropes=(Rope(),) * 2, attention_softcap=2.0)
ROWS, SLOTS, UNBOUNDED = 3, 160, np.iinfo(np.int32).max  # two and a half parts of four blocks of 16 slots


def cache_of(filled, seed: int = 0):
    """Queries, and a cache of two layers whose rows hold segments of random lengths, the token's own among them."""
    rng, positions, segments = np.random.default_rng(seed), *np.zeros((2, ROWS, SLOTS), np.int32)
    for row, count in enumerate(filled):
        ends = np.sort(rng.choice(np.arange(1, SLOTS), 2, replace=False))
        segments[row, :count] = 1 + np.searchsorted(ends, np.arange(count), side="right")
        positions[row, :count] = np.arange(count) - np.concatenate([[0], ends])[segments[row, :count] - 1]
    last = [max(0, count - 1) for count in filled]
    own = [jnp.asarray(x[np.arange(ROWS), last][:, None]) for x in (positions, segments)]
    q, k, v = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((ROWS, 6, 1, 16), (2, ROWS, 2, SLOTS, 16), (2, ROWS, 2, SLOTS, 16))
    )
    return q, k, v, jnp.asarray(filled, jnp.int32), own[0], jnp.asarray(positions), own[1], jnp.asarray(segments)


@cache
def compiled(name: str):
    def by_kernel(q, k, v, filled, *sight_and_window, index):
        slots = Slots(k, v, index, filled)
        return attend_slots(q, slots, Sight(*sight_and_window), CONFIG, interpret=True, block=16)

    def plain(q, k, v, _filled, *sight_and_window, index):
        return attend_cache(q, lambda _: (k[index], v[index], visible(*sight_and_window)), 1, CONFIG)

    return jax.jit({"kernel": by_kernel, "plain": plain}[name])


def outcome(name: str, held, window: int = UNBOUNDED, index: int = 1):
    return np.asarray(compiled(name)(*held, jnp.int32(window), index=jnp.int32(index)))


@pytest.mark.slow
@pytest.mark.parametrize("window", [UNBOUNDED, 5, 70])
def test_M2_a_kernel_over_a_cache_is_the_plain_formula(window):
    rng = np.random.default_rng(window)
    for seed in range(4):
        held = cache_of(rng.integers(1, SLOTS + 1, ROWS), seed)
        for index in (0, 1):
            found, expected = (outcome(name, held, window, index) for name in ("kernel", "plain"))
            np.testing.assert_allclose(found, expected, atol=3e-6, rtol=0)


@pytest.mark.slow
def test_F6_what_lies_in_slots_that_are_not_filled_does_not_leak():
    held = cache_of([130, 1, 0])
    behind = jnp.arange(SLOTS)[None] >= held[3][:, None]
    clean = outcome("kernel", held)
    for garbage in (jnp.nan, 1e30):
        with jax.debug_nans(False):
            q, k, v, *rest = held
            k, v = (jnp.where(behind[:, None, :, None], garbage, x) for x in (k, v))
            np.testing.assert_array_equal(outcome("kernel", (q, k, v, *rest)), clean)
    assert not clean[2].any()


@pytest.mark.slow
def test_E3_a_row_has_the_same_bits_alone_and_beside_any_others():
    held = cache_of([65, 160, 64])
    together = outcome("kernel", held)
    q, k, v, filled, *sight = held
    others = tuple(x[:, ::-1].at[:, 0].set(x[:, 0]) for x in (k, v))
    changed = (q, *others, filled.at[1:].set(jnp.array([3, 0])), *sight)
    np.testing.assert_array_equal(outcome("kernel", changed)[0], together[0])
    for row in range(ROWS):
        own = slice(row, row + 1)
        alone = (q[own], k[:, own], v[:, own], filled[own], *(x[own] for x in sight))
        np.testing.assert_array_equal(outcome("kernel", alone), together[own])


@pytest.mark.slow
def test_E3_a_prompt_has_the_same_bits_alone_and_however_wide_it_is_padded():
    """By the kernel for rows, over the slots of a cache of which the prompt is the last that is filled."""
    _, k, v, _, _, positions, _, segments = cache_of([50, 160, 90])
    q = jnp.asarray(np.random.default_rng(1).normal(size=(ROWS, 6, 20, 16)), jnp.float32)
    last = np.array([30, 140, 70])[:, None] + np.arange(20)
    own = [jnp.take_along_axis(x, last, axis=1) for x in (positions, segments)]

    @jax.jit
    def attended(q, k, v, position, segment, positions, segments):
        sight = Sight(position, positions, segment, segments, jnp.int32(UNBOUNDED))
        return flash_rows(q, k, v, sight, CONFIG, interpret=True, block=32)

    together = attended(q, k[1], v[1], *own, positions, segments)
    wide = [jnp.pad(x, ((0, 0), (0, 50))) for x in own]
    found = attended(jnp.pad(q, ((0, 0), (0, 0), (0, 50), (0, 0))), k[1], v[1], *wide, positions, segments)
    np.testing.assert_array_equal(found[:, :, :20], together)
    for row in range(ROWS):
        alone = (x[row : row + 1] for x in (q, k[1], v[1], *own, positions, segments))
        np.testing.assert_array_equal(attended(*alone)[0], together[row])
    assert np.abs(together).min() > 0


# In a decoder -----------------------------------------------------------------------------------------


def by_kernel(met: list) -> Kernels:
    """The plain way over whole rows, and the kernels over caches, which note what they meet."""

    def slots_way(q, slots, sight, config):
        met.append((q.shape, slots.k.shape))
        if q.shape[2] > 1:
            k, v = (x[slots.index] for x in (slots.k, slots.v))
            return flash_rows(q, k, v, sight, config, interpret=True, block=32)
        return attend_slots(q, slots, sight, config, interpret=True, block=16)

    return Kernels(attend, slots_way, takes=lambda *_: True)


def decode(policy, params):
    """States of prompts of different length, of two steps, of which a row leaves out the second, and of more prompts.

    Slots that are not filled hold garbage.
    """
    segments = jnp.asarray(np.arange(5)[None] < np.array([5, 2, 3])[:, None], jnp.int32)
    tokens = jnp.arange(15).reshape(3, 5) % CONFIG.v
    states, held = [], policy.make_cache(3, 64)
    held = held.replace(keys=jax.tree.map(lambda x: x + 1e30, held.keys))
    for part in (slice(0, 5), slice(0, 1), slice(2, 3), slice(0, 5)):
        out, held = jax.jit(policy.hidden)(params, tokens[:, part], None, segments[:, part], held)
        states.append(out)
    return jnp.concatenate(states, axis=1)


@pytest.mark.slow
@pytest.mark.parametrize("unroll", [1, True])
def test_M2_a_decoder_reads_its_cache_by_kernels(unroll):
    """Over caches of all layers and of one."""
    met = []
    ways = {"k": by_kernel(met), "p": attend}
    policies = {name: make_policy(CONFIG, unroll=unroll, attend=way) for name, way in ways.items()}
    params = policies["p"].init(jax.random.key(0))
    found, expected = (decode(policies[name], params) for name in "kp")
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert not found[1, 2:5].any()
    assert set(met) == {((3, 6, n, 16), (1 if unroll is True else 2, 3, 2, 64, 16)) for n in (1, 5)}


def test_the_kernels_are_for_prompts_and_single_tokens_of_16_bits_and_those_for_whole_blocks():
    def takes(length=1, dtype=jnp.bfloat16, slots=128, e=64):
        q, k = (jnp.zeros(shape, dtype) for shape in ((3, 6, length, e), (2, 3, 2, slots, e)))
        return flash.takes(q, k)

    assert all((takes(), takes(dtype=jnp.float16), takes(length=2), takes(length=2, slots=40)))
    assert not any((takes(dtype=jnp.float32), takes(slots=40), takes(e=80), takes(e=8)))
    assert not takes(length=2, dtype=jnp.float32)


def test_a_program_for_gpus_holds_the_kernel_and_reads_the_cache_where_it_lies():
    policy = make_policy(CONFIG, dtype=jnp.bfloat16, attend=flash)
    assert policy.make_cache is not None
    params, held = jax.eval_shape(policy.init, jax.random.key(0)), jax.eval_shape(partial(policy.make_cache, 3, 2048))
    traced = jax.jit(policy.hidden).trace(params, jnp.zeros((3, 1), jnp.int32), None, None, held)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__gpu$xla.gpu.triton") == 2
    assert "dynamic_slice" not in "".join(line for line in text.splitlines() if "2x3x2x2048x16" in line)
