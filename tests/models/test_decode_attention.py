"""A kernel over a cache is the plain formula, whatever lies in it, and a row's bits are its own."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowgrpo.models.attention import Sight, Slots, attend_cache, visible
from flowgrpo.models.config import DecoderConfig, Rope
from flowgrpo.models.decode_attention import attend_slots

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


@pytest.mark.parametrize("window", [UNBOUNDED, 5, 70])
def test_M2_a_kernel_over_a_cache_is_the_plain_formula(window):
    rng = np.random.default_rng(window)
    for seed in range(4):
        held = cache_of(rng.integers(1, SLOTS + 1, ROWS), seed)
        for index in (0, 1):
            found, expected = (outcome(name, held, window, index) for name in ("kernel", "plain"))
            np.testing.assert_allclose(found, expected, atol=3e-6, rtol=0)


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
