"""Frozen matrices in 8 or 4 bits an entry: the base of an adapter, or a sampler's weights.

    int8    w ~ values * scale             a scale for each output: its largest entry / 127
    nf4     w ~ LEVELS[values] * scale     a scale for each block of 64 inputs of an output: its largest entry

The levels of nf4 are those of Dettmers et al. (2023, arXiv:2305.14314): quantiles of a normal distribution, including
0. Only weights are quantised, not activations, sums or scales. A product reads the values directly: with int8 the scale
is applied to its outputs; with nf4 one layer's matrix is decoded when it is used, and again in the backward pass, so
that at most one decoded matrix exists. Quantised weights are frozen and have no gradient.

`quantise_layers` takes a decoder's parameters and `decoder.matrices(config)`; `dequantise_layers` is its inverse up to
rounding. NumPy arrays stay on the host, so that a model can be quantised while it is read.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from statistics import NormalDist
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from flowgrpo.types import AnyArray, BadInput

INT8, NF4 = KINDS = ("int8", "nf4")
BLOCK = 64  # inputs that share a scale in nf4; if it doesn't divide an axis, the largest power of two that does
INT8_MAX = 127

# Name of a matrix -> its input axes, which a product sums over, and its output axes (`decoder.matrices`).
Matrices = Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
Product = Callable[[Array, Array], Array]


def _normal_levels() -> np.ndarray:
    """Eight positive quantiles, seven negative ones and 0, divided by the largest."""
    edge = (1 / 32 + 1 / 30) / 2  # probability beyond the outermost quantile, which is finite then
    above = [NormalDist().inv_cdf(p) for p in np.linspace(1 - edge, 0.5, 9)[:-1]]
    below = [-NormalDist().inv_cdf(p) for p in np.linspace(1 - edge, 0.5, 8)[:-1]]
    return (np.sort([*above, 0.0, *below]) / max(above)).astype(np.float32)


LEVELS = _normal_levels()


class Quantised(struct.PyTreeNode):
    """A quantised matrix, or a stack of them; both arrays have the axes of the parameter, in its order."""

    values: AnyArray  # int8; for nf4 uint8 with two entries each, from the two halves of a block along `axis`
    scales: AnyArray  # size 1 along the input axes; for nf4 the number of blocks along `axis`
    kind: str = struct.field(pytree_node=False)  # int8 or nf4
    axis: int = struct.field(pytree_node=False)  # the last input axis, counted from the end

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the original parameter."""
        sizes = list(self.values.shape)
        sizes[self.axis] *= 2 if self.kind == NF4 else 1
        return tuple(sizes)

    def __iter__(self) -> Iterator["Quantised"]:
        """The matrix of each layer of a stack."""
        return (jax.tree.map(lambda x, index=index: x[index], self) for index in range(len(self.values)))


# Trees ------------------------------------------------------------------------------------------------


def quantise_layers(params: Mapping[str, Any], matrices: Matrices, *, kind: str) -> dict[str, Any]:
    """The parameters with all `matrices` quantised to int8 or nf4; embeddings, norms and biases stay as they are."""
    return {
        name: quantise_matrix(x, matrices[name][0], kind=kind) if name in matrices else x for name, x in params.items()
    }


def dequantise_layers(params: Mapping[str, Any], *, dtype: Any) -> dict[str, Any]:
    """The parameters with all quantised matrices decoded to this dtype; the others stay as they are."""
    return {name: dequantise_matrix(x, dtype) if isinstance(x, Quantised) else x for name, x in params.items()}


def check_kind(kind: str) -> str:
    """Return the kind, or raise `BadInput` if there is no such kind of quantisation."""
    if kind not in KINDS:
        raise BadInput(f"weights can't be quantised as {kind!r}; choose one of {', '.join(KINDS)}")
    return kind


# One matrix -------------------------------------------------------------------------------------------


def quantise_matrix(w: AnyArray, summed: tuple[int, ...], *, kind: str) -> Quantised:
    """Round a matrix with the input axes `summed` to the nearest levels; on the host if it is a NumPy array."""
    xp: Any = jnp if isinstance(w, jax.Array) else np
    axis = max(summed) - w.ndim
    encode = {INT8: _to_int8, NF4: _to_nf4}[check_kind(kind)]
    values, scales = encode(xp.asarray(w).astype(np.float32), summed, axis, xp)
    return Quantised(values, scales, kind, axis)


def _to_int8(w: Any, summed: tuple[int, ...], _axis: int, xp: Any) -> tuple:
    scales = _nonzero(xp.abs(w).max(axis=summed, keepdims=True), xp) / np.float32(INT8_MAX)
    return xp.clip(xp.round(w / scales), -INT8_MAX, INT8_MAX).astype(np.int8), scales


def _to_nf4(w: Any, _summed: tuple[int, ...], axis: int, xp: Any) -> tuple:
    size = math.gcd(w.shape[axis], BLOCK)
    if size == 1:
        raise BadInput(
            f"a matrix of shape {list(w.shape)} has {w.shape[axis]} inputs: nf4 needs an even number of them"
        )
    blocks = _split_blocks(w, axis, w.shape[axis] // size)
    largest = _nonzero(xp.abs(blocks).max(axis=axis, keepdims=True), xp)
    scales = largest.astype(jnp.bfloat16)  # 1 / 512 of a scale is far below what rounding to 16 levels does
    middles = ((LEVELS[1:] + LEVELS[:-1]) / 2).astype(np.float32)
    codes = xp.searchsorted(middles, blocks / scales.astype(np.float32)).astype(np.uint8)
    low, high = xp.split(codes, 2, axis=axis)
    return _join_blocks(low | (high << 4), axis), _join_blocks(scales, axis)


def dequantise_matrix(matrix: Quantised, dtype: Any) -> Array:
    """The decoded matrix."""
    values, scales = jnp.asarray(matrix.values), jnp.asarray(matrix.scales).astype(jnp.float32)
    if matrix.kind == INT8:
        return (values.astype(jnp.float32) * scales).astype(dtype)
    count = scales.shape[matrix.axis]
    pairs = _split_blocks(values, matrix.axis, count)
    codes = jnp.concatenate([pairs & 15, pairs >> 4], axis=matrix.axis)
    return _join_blocks(_decode_levels(codes) * _split_blocks(scales, matrix.axis, count), matrix.axis).astype(dtype)


def times_quantised(x_ab: Array, matrix: Quantised, product: Product) -> Array:
    """`product(x, W)` in float32, with a matrix of all its axes: [a inputs] -> [a outputs]."""
    # The decoded matrix must not be a residual of the gradient: a scan would keep those of all layers.
    return jax.checkpoint(partial(_times, product=product), prevent_cse=False)(x_ab, matrix)


def _times(x_ab: Array, matrix: Quantised, *, product: Product) -> Array:
    matrix = jax.lax.stop_gradient(matrix)
    if matrix.kind == NF4:
        return product(x_ab, dequantise_matrix(matrix, x_ab.dtype).reshape(x_ab.shape[1], -1))
    # int8 is exact in bfloat16, and the scale is applied to the outputs alone.
    out = product(x_ab, jnp.asarray(matrix.values).astype(x_ab.dtype).reshape(x_ab.shape[1], -1))
    return out * matrix.scales.astype(jnp.float32).reshape(1, -1)


def _decode_levels(codes: Array) -> Array:
    """The level of each code, selected bit by bit: TPUs look up a table entry by entry, but select in parallel."""
    levels: list[Any] = list(LEVELS)
    for bit in range(4):
        odd = (codes >> bit) & 1 == 1
        levels = [jnp.where(odd, high, low) for low, high in zip(levels[::2], levels[1::2], strict=True)]
    return levels[0]


def _nonzero(largest: Any, xp: Any) -> Any:
    """The largest entries, or 1 where all entries are 0, so that one can divide by them."""
    return xp.where(largest > 0, largest, xp.ones_like(largest))


def _split_blocks(x: Any, axis: int, count: int) -> Any:
    """Split an axis into two: `count` blocks, and the entries of each."""
    at = x.ndim + axis
    return x.reshape(*x.shape[:at], count, x.shape[at] // count, *x.shape[at + 1 :])


def _join_blocks(x: Any, axis: int) -> Any:
    """The inverse of `_split_blocks`."""
    at = x.ndim + axis - 1
    return x.reshape(*x.shape[:at], x.shape[at] * x.shape[at + 1], *x.shape[at + 2 :])
