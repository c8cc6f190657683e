"""Products of a layer: `x W + b`, with an adapter's, and a row's bits the same in any company where that is asked for.

product     [a inputs] x [inputs outputs] in their type; of float32 on a CPU, long sums go in pieces
multiply    one projection of a layer, by its name

"""

import math
from collections.abc import Sequence
from functools import partial, reduce

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from jax.custom_derivatives import SymbolicZero

from flowgrpo.contracts import Params
from flowgrpo.models.attention import PRECISE
from flowgrpo.models.quantised import Quantised, times_quantised

PIECE, DIVIDED = 192, 4096  # terms of a sum in one piece, and of the longest sum that is divided


class Divided(struct.PyTreeNode):
    """A matrix in the pieces that `product` sums over, each in memory of its own."""

    pieces: tuple[Array, ...]  # [terms, outputs] each
    shape: tuple[int, ...] = struct.field(pytree_node=False)  # of the whole, with all its axes


def multiply(x: Array, layer: Params, name: str, *, inputs: int = 1) -> Array:
    """`x W`, with the bias where there is one; and `+ x A B`, in their dtype, where there is an adapter of that name.

    The first `inputs` axes of W are summed over: [r s inputs] -> [r s outputs]. It is done on matrices, because XLA's
    gradient of a product with more axes is twice as slow on a CPU.
    """
    w, bias = layer[name], layer.get(f"{name}_bias")
    flat = x.reshape(-1, math.prod(w.shape[:inputs]))
    out = times(flat, w).astype(x.dtype)
    if f"{name}_a" in layer:
        a, b = layer[f"{name}_a"], layer[f"{name}_b"]
        low = _matmul(flat.astype(a.dtype), a.reshape(flat.shape[1], -1))
        change = _matmul(low, b.reshape(len(b), -1))
        out = (out.astype(change.dtype) + change).astype(out.dtype)
    out = out.reshape(*x.shape[:2], *w.shape[inputs:])
    return out if bias is None else out + bias[None, None]


_matmul = partial(jnp.matmul, precision=PRECISE)


@jax.custom_jvp
def product(x_ab: Array, w_bc: Array) -> Array:
    """`x w` in their type; of float32, a row's bits are the same among any two rows or more (F7, E3).

    On a CPU a long sum goes in an order that depends on rows and threads, and a deep model enlarges the difference a
    hundredfold: it is made of pieces, within which the order never changes.
    """
    if x_ab.dtype != jnp.float32 or not PIECE < x_ab.shape[1] <= DIVIDED:
        return _whole_product(x_ab, w_bc)
    return jax.lax.platform_dependent(x_ab, w_bc, cpu=_product_by_pieces, default=_whole_product)


def _product_by_pieces(x_ab: Array, w_bc: Array) -> Array:
    return _sum_pieces(x_ab, _pieces(w_bc))


def _sum_pieces(x_ab: Array, pieces: Sequence[Array]) -> Array:
    ends = np.cumsum([0, *(len(piece) for piece in pieces)])
    terms = zip(ends, ends[1:], pieces, strict=False)
    return reduce(jnp.add, [_matmul(x_ab[:, start:end], piece) for start, end, piece in terms])


def _pieces(w_bc: Array) -> tuple[Array, ...]:
    return tuple(w_bc[start : start + PIECE] for start in range(0, len(w_bc), PIECE))


def times(x_ab: Array, w: Array | Divided | Quantised) -> Array:
    """`product`, whose second factor may lie in pieces, be quantised, or have more axes than two."""
    if isinstance(w, Quantised):
        return times_quantised(x_ab, w, product if x_ab.dtype == jnp.float32 else wide_product)
    return _sum_pieces(x_ab, w.pieces) if isinstance(w, Divided) else product(x_ab, w.reshape(x_ab.shape[1], -1))


def _whole_product(x_ab: Array, w_bc: Array) -> Array:
    return _matmul(x_ab, w_bc) if x_ab.dtype == jnp.float32 else jnp.matmul(x_ab, w_bc)


@partial(product.defjvp, symbolic_zeros=True)
def _product_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    """A gradient may be summed in any order, and is faster in one piece; what is frozen has none."""
    (x, w), (dx, dw) = primals, tangents
    out: Array = product(x, w)
    changes = [_whole_product(a, b) for a, b, d in ((dx, w, dx), (x, dw, dw)) if not isinstance(d, SymbolicZero)]
    return out, reduce(jnp.add, changes) if changes else jnp.zeros_like(out)


@jax.custom_vjp
def wide_product(x_ab: Array, w_bc: Array) -> Array:
    """`product` in float32, of factors in a narrower type, in which its gradient is computed, too."""
    return jnp.matmul(x_ab, w_bc, preferred_element_type=jnp.float32)


def _wide_product_forward(x: Array, w: Array) -> tuple[Array, tuple[Array, Array]]:
    return wide_product(x, w), (x, w)


def _wide_product_backward(factors: tuple[Array, Array], d_out: Array) -> tuple[Array, Array]:
    x, w = factors
    d_out = d_out.astype(x.dtype)
    return jnp.matmul(d_out, w.T), jnp.matmul(x.T, d_out)


wide_product.defvjp(_wide_product_forward, _wide_product_backward)


def leave_whole(w: Array, _inputs: int) -> Array:
    return w


def divide(w: Array | Quantised, inputs: int) -> Array | Divided | Quantised:
    """A matrix in pieces, where `product` sums over these; its first so many axes are summed over."""
    if isinstance(w, Quantised):
        return w
    flat = w.reshape(math.prod(w.shape[:inputs]), -1)
    return w if w.dtype != jnp.float32 or len(flat) > DIVIDED else Divided(_pieces(flat), w.shape)
