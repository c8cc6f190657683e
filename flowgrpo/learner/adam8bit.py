"""Adam with moments of 8 bits: two bytes of state per parameter instead of eight.

    x  ~  sign * 2^((code - top) / 8) * 2^exponent          one exponent for a block of 256 entries

The blocks are those of Dettmers et al. (2022, arXiv:2110.02861); the code is a logarithm, eight levels to an octave,
as the moments of one block differ by orders of magnitude. An entry keeps its relative precision down to 2^-15 of the
largest first moment, and down to 2^-31 of the largest second; a second moment is never rounded down to nothing, which
would allow a step of any size.

Rounding is stochastic, so that changes far smaller than a level accumulate: a second moment moves by a thousandth per
step, and rounded to the nearest level it would not move. The random number is a function of step and index. A rounding
to the other side makes a difference far above float tolerance, so F3 holds to 1e-4 for optimizers with float moments
only.

Codes have the shape of their parameter and may be sharded as it is; blocks lie along its last axes.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from flowgrpo.types import Params, PyTree

BLOCK = 256
OCTAVE = 8  # levels
HIGHEST = 127  # exponent, up and down


class Coded(NamedTuple):
    """An array in 8 bits per entry."""

    code: Array  # int8 with a sign, uint8 without; 0 is 0
    exponent: Array  # int8: the leading axes, then the blocks of the others


class CodedMoments(NamedTuple):
    """Optimizer state: number of steps, and both moments, with a `Coded` for every array."""

    count: Array
    mu: PyTree
    nu: PyTree


def scale_by_adam_8bit(b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> optax.GradientTransformation:
    """`optax.scale_by_adam` with moments of 8 bits."""
    return optax.GradientTransformation(_init, partial(_update, b1=b1, b2=b2, eps=eps))


def _init(params: Params) -> CodedMoments:
    mu = jax.tree.map(lambda param: _zeros(param, jnp.int8), params)
    nu = jax.tree.map(lambda param: _zeros(param, jnp.uint8), params)
    return CodedMoments(jnp.int32(0), mu, nu)


def _zeros(param: Array, dtype) -> Coded:
    lead, merged = _axes(param.shape)
    exponents = (*param.shape[:lead], -(-merged // BLOCK))
    return Coded(jnp.zeros(param.shape, dtype), jnp.zeros(exponents, jnp.int8))


def _update(updates: PyTree, state: Any, params: Params = None, *, b1, b2, eps) -> tuple[PyTree, CodedMoments]:
    del params  # unused, as in optax's own
    count = jnp.asarray(optax.safe_increment(state.count))
    grads, tree = jax.tree.flatten(updates)
    moments = zip(grads, tree.flatten_up_to(state.mu), tree.flatten_up_to(state.nu), strict=True)
    steps = [
        _step(grad, mu, nu, index=index, count=count, b1=b1, b2=b2, eps=eps)
        for index, (grad, mu, nu) in enumerate(moments)
    ]
    updates, mu, nu = (tree.unflatten([step[i] for step in steps]) for i in range(3))
    return updates, CodedMoments(count, mu, nu)


def _step(grad: Array, mu: Coded, nu: Coded, *, index: int, count: Array, b1, b2, eps) -> tuple[Array, Coded, Coded]:
    """Adam's step for one array, from moments that are exact until they are coded."""
    g, age = grad.astype(jnp.float32), count.astype(jnp.float32)
    first = b1 * dequantize(mu) + (1.0 - b1) * g
    second = b2 * dequantize(nu) + (1.0 - b2) * g * g
    root = jnp.sqrt(second / (1.0 - b2**age))
    mu_random, nu_random = _random_numbers(grad.shape, count, index)
    update = (first / (1.0 - b1**age) / (root + eps)).astype(grad.dtype)
    return update, quantize(first, jnp.int8, mu_random), quantize(second, jnp.uint8, nu_random)


# The code ---------------------------------------------------------------------------------------------


def quantize(x: Array, dtype, random: Array) -> Coded:
    """`x` in 8 bits; an entry is rounded up if its fraction between two levels is above `random`, in [0, 1)."""
    top, size = jnp.iinfo(dtype).max, jnp.abs(x)
    _, power = jnp.frexp(_largest(size))  # the levels don't change with the largest entry
    exponent = jnp.clip(power, -HIGHEST, HIGHEST).astype(jnp.int8)
    scaled = size * jnp.exp2(-_spread(exponent, x.shape).astype(jnp.float32))
    position = top + OCTAVE * jnp.log2(jnp.maximum(scaled, jnp.finfo(jnp.float32).tiny))
    below = jnp.floor(position)
    fraction = (jnp.exp2((position - below) / OCTAVE) - 1.0) / (2.0 ** (1 / OCTAVE) - 1.0)
    level = jnp.clip(below + (fraction > random).astype(jnp.float32), 1.0, top)
    if jnp.issubdtype(dtype, jnp.signedinteger):  # below the lowest level a first moment is that level, or 0
        lowest = 2.0 ** ((1 - top) / OCTAVE)
        level = jnp.where(scaled < lowest, (scaled > random * lowest).astype(jnp.float32), level) * jnp.sign(x)
    return Coded(jnp.where(size > 0, level, 0.0).astype(dtype), exponent)


def dequantize(coded: Coded) -> Array:
    """The numbers of an array in 8 bits, as float32."""
    code = coded.code.astype(jnp.float32)
    octaves = (jnp.abs(code) - jnp.iinfo(coded.code.dtype).max) / OCTAVE
    octaves += _spread(coded.exponent, code.shape).astype(jnp.float32)
    return jnp.where(code == 0, 0.0, jnp.sign(code) * jnp.exp2(octaves))


def _axes(shape: tuple[int, ...]) -> tuple[int, int]:
    """Number of leading axes whose indices have separate blocks, and number of entries of the other axes."""
    lead = max(len(shape) - 1, 0)
    while lead > 0 and math.prod(shape[lead:]) < BLOCK:
        lead -= 1
    return lead, math.prod(shape[lead:])


def _largest(x: Array) -> Array:
    """The largest entry of each block."""
    lead, merged = _axes(x.shape)
    flat = x.reshape(*x.shape[:lead], merged)
    padded = jnp.pad(flat, [(0, 0)] * lead + [(0, -merged % BLOCK)])
    return padded.reshape(*x.shape[:lead], -1, BLOCK).max(axis=-1)


def _spread(x: Array, shape: tuple[int, ...]) -> Array:
    """The value of each block, at each of its entries."""
    _, merged = _axes(shape)
    return jnp.repeat(x, BLOCK, axis=-1)[..., :merged].reshape(shape)


def _random_numbers(shape: tuple[int, ...], count: Array, array_index: int) -> tuple[Array, Array]:
    """Two numbers in [0, 1) for each entry, from a hash of step and index (the last steps of MurmurHash3).

    On a CPU it takes a sixtieth of the time of JAX's random bits, which would be a quarter of an update.
    """
    start = jnp.uint32(0x9E3779B9) * (count.astype(jnp.uint32) * jnp.uint32(1 << 12) + jnp.uint32(array_index))
    index = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        index = index * jnp.uint32(size % 2**32) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    bits = _mix(index ^ _mix(start))
    return tuple(half.astype(jnp.float32) / 2.0**16 for half in (bits >> jnp.uint32(16), bits & jnp.uint32(0xFFFF)))


def _mix(bits: Array) -> Array:
    """A hash in which every bit of the result depends on every bit of the input."""
    bits = (bits ^ (bits >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> jnp.uint32(16))
