"""Products of a layer: `x W + b`, with an adapter's, and a row's bits the same in any company where that is asked for.

    product     [a inputs] x [inputs outputs]; `product_transposed` by a matrix that lies the other way, as an embedding
    multiply    one projection of a layer, by its name; `multiply_each` several of the same input

Laid out for decoding (`lay_out`), matrices of the same input lie beside each other and are multiplied as one: a step of
few rows is bound by reading weights, and by starting kernels.

On a CPU a product whose output has 512, 1,024 or the like columns runs at a third to a half of the rate: rows of the
output begin in the same sets of a cache. Such matrices have some columns more (`is_crowded`), which are cut off again:
with 2,048 outputs of 640 inputs 90 in place of 40 GFLOP/s on one core, with 262,144 outputs 91 in place of 28.

On a CPU kernels take rows in tiles, and sum what is left over, or few rows, in another order; a deep model enlarges the
difference a hundredfold. In exact mode (`launch.is_exact`) rows are padded to a number at which each has the same bits
in any company: multiples of 12, at least as many as `padding` finds by trying. Where no number does, a long sum is made
of pieces, within which the order never changes, at half the rate.
"""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from jax.custom_derivatives import SymbolicZero

from flowgrpo import launch
from flowgrpo.contracts import Params
from flowgrpo.models.attention import PRECISE
from flowgrpo.models.quantised import Quantised, times_quantised

PIECE, DIVIDED = 192, 4096  # terms of a sum in one piece, and of the longest sum that is divided
TILE = 12  # rows: a multiple of every kernel's tile (6 with AVX2, 12 or 24 with AVX-512)
TRIED = (12, 24, 36, 48, 60, 96, 144, 192, 264, 312, 384, 516, 576, 1032)  # rows that a shape is tried with
TURNED_TILE = 48  # rows, where the matrix comes first
TRIED_TURNED = tuple(TURNED_TILE * count for count in (1, 2, 3, 4, 5, 6, 8, 12, 21))
FEW, SMALL_WORK = 192, 5e7  # rows that any product may be padded to; multiplications that one of more may have
TRIED_OUTPUTS = 1024  # columns at most: the order of a sum doesn't depend on more of them
SET_BYTES, ADDED = 2048, 80  # a row's bytes are a multiple of them where it is crowded; columns that are added then
SPREAD_ROWS = 48  # rows from which on adding them pays in the program that multiplies
TRIED_WORK = 2e9  # multiplications of a trial, above which only the first few are made


class LaidOut(struct.PyTreeNode):
    """A matrix as a CPU multiplies by it: in pieces that are summed over, with columns added where it is crowded."""

    pieces: tuple[Array, ...]  # [terms, outputs and columns that are added] each, in memory of its own
    shape: tuple[int, ...] = struct.field(pytree_node=False)  # of the whole, with all its axes
    outputs: int = struct.field(pytree_node=False)


class Fused(struct.PyTreeNode):
    """Matrices of the same inputs beside each other: [inputs, outputs of all]."""

    whole: Array | LaidOut
    shapes: tuple[tuple[int, ...], ...] = struct.field(pytree_node=False)  # the axes of each one's outputs


# A projection -----------------------------------------------------------------------------------------


def multiply(x: Array, layer: Params, name: str, *, inputs: int = 1) -> Array:
    """`x W`, with the bias where there is one; and `+ x A B`, in their dtype, where there is an adapter of that name.

    The first `inputs` axes of W are summed over: [r s inputs] -> [r s outputs]. It is done on matrices, because XLA's
    gradient of a product with more axes is twice as slow on a CPU.
    """
    w = layer[name]
    flat = x.reshape(-1, math.prod(w.shape[:inputs]))
    return _complete(times(flat, w).astype(x.dtype), flat, layer, name, (*x.shape[:2], *w.shape[inputs:]))


def multiply_each(x: Array, layer: Params, names: Sequence[str]) -> tuple[Array, ...]:
    """`multiply` by each of these names; in one product where their matrices lie beside each other."""
    fused: Any = layer.get(fused_name(names))
    if fused is None:
        return tuple(multiply(x, layer, name) for name in names)
    flat = x.reshape(-1, x.shape[-1])
    edges = np.cumsum([math.prod(shape) for shape in fused.shapes])[:-1]
    outs = jnp.split(times(flat, fused.whole).astype(x.dtype), edges, axis=1)
    parts = zip(outs, names, fused.shapes, strict=True)
    return tuple(_complete(out, flat, layer, name, (*x.shape[:2], *shape)) for out, name, shape in parts)


def fused_name(names: Sequence[str]) -> str:
    """Name of the `Fused` of these matrices in a layer."""
    return "+".join(names)


def _complete(out: Array, flat: Array, layer: Params, name: str, shape: tuple[int, ...]) -> Array:
    """What a product [a outputs] is together with adapter and bias, in its shape."""
    if f"{name}_a" in layer:
        a, b = layer[f"{name}_a"], layer[f"{name}_b"]
        low = product(flat.astype(a.dtype), a.reshape(flat.shape[1], -1))
        change = product(low, b.reshape(len(b), -1))
        out = (out.astype(change.dtype) + change).astype(out.dtype)
    bias = layer.get(f"{name}_bias")
    out = out.reshape(shape)
    return out if bias is None else out + bias[None, None]


# A product --------------------------------------------------------------------------------------------


_matmul = partial(jnp.matmul, precision=PRECISE)


@jax.custom_jvp
def product(x_ab: Array, w_bc: Array) -> Array:
    """`x w` in their type; in exact mode a row's bits are the same in any company (F7, E3)."""
    on_cpu = _cpu_product
    if launch.is_exact():
        on_cpu = lambda x, w: _exact_product(x, w).astype(x.dtype)  # noqa: E731
    elif x_ab.dtype != jnp.float32:
        return _whole_product(x_ab, w_bc)
    return jax.lax.platform_dependent(x_ab, w_bc, cpu=on_cpu, default=_whole_product)


def _exact_product(x_ab: Array, w_bc: Array) -> Array:
    """In float32, whatever the factors: of its kernels the tiles are known."""
    x_ab, w_bc = x_ab.astype(jnp.float32), w_bc.astype(jnp.float32)
    least = padding(*w_bc.shape)
    if least is None:
        return _sum_pieces(x_ab, _pieces(w_bc) if _divides(w_bc) else [w_bc])
    return _cpu_product(_pad_rows(x_ab, least), w_bc)[: len(x_ab)]


def _cpu_product(x_ab: Array, w_bc: Array) -> Array:
    """`x w` of float32, with columns added while it is made, where there are rows enough to pay for that."""
    outputs = w_bc.shape[1]
    if len(x_ab) < SPREAD_ROWS or not is_crowded(outputs):
        return _matmul(x_ab, w_bc)
    return _matmul(x_ab, _spread(w_bc))[:, :outputs]


def is_crowded(outputs: int) -> bool:
    """Whether rows of so many numbers of float32 begin in the same few sets of a processor's caches."""
    return outputs * 4 % SET_BYTES == 0


def _spread(w_bc: Array) -> Array:
    return jnp.pad(w_bc, ((0, 0), (0, ADDED))) if is_crowded(w_bc.shape[1]) else w_bc


def _pad_rows(x_ab: Array, least: int, tile: int = TILE) -> Array:
    """More rows, of zeros, up to a multiple of a tile and to at least so many."""
    short = max(least, -(-len(x_ab) // tile) * tile) - len(x_ab)
    return jnp.pad(x_ab, ((0, short), (0, 0))) if short else x_ab


def _divides(w_bc: Array) -> bool:
    """Whether sums over the rows of this matrix go in pieces, where padding doesn't do."""
    return PIECE < len(w_bc) <= DIVIDED


def _sum_pieces(x_ab: Array, pieces: Sequence[Array]) -> Array:
    ends = np.cumsum([0, *(len(piece) for piece in pieces)])
    terms = zip(ends, ends[1:], pieces, strict=False)
    padded_ab = _pad_rows(x_ab, TILE)
    return reduce(jnp.add, [_cpu_product(padded_ab[:, start:end], piece) for start, end, piece in terms])[: len(x_ab)]


def _pieces(w_bc: Array) -> tuple[Array, ...]:
    return tuple(w_bc[start : start + PIECE] for start in range(0, len(w_bc), PIECE))


@jax.custom_jvp
def product_transposed(x_ab: Array, w_cb: Array) -> Array:
    """`x w^T` of float32, of a matrix whose rows are many, such as an embedding; exact as `product` is.

    On a CPU it is made as `(w x^T)^T`, at three times the rate, and without a copy of the matrix.
    """
    on_cpu = _exact_turned if launch.is_exact() else _turned
    return jax.lax.platform_dependent(x_ab, w_cb, cpu=on_cpu, default=lambda x, w: _whole_product(x, w.T))


def _exact_turned(x_ab: Array, w_cb: Array) -> Array:
    if not _turns_exactly(x_ab.shape[1], len(w_cb)):
        return _exact_product(x_ab, w_cb.T)
    return _turned(_pad_rows(x_ab, TURNED_TILE, TURNED_TILE), w_cb)[: len(x_ab)]


def _turned(x_ab: Array, w_cb: Array) -> Array:
    # Without the barrier XLA makes `x w^T` of it again.
    return jax.lax.optimization_barrier(_matmul(w_cb, x_ab.T)).T


def _turns_exactly(inputs: int, outputs: int) -> bool:
    """Whether a row has the same bits among any multiple of `TURNED_TILE` rows."""
    return jax.default_backend() != "cpu" or _first_alike(inputs, min(outputs, TRIED_OUTPUTS), True) == TURNED_TILE


def padding(inputs: int, outputs: int) -> int | None:
    """Fewest rows to which a product of this shape is padded in exact mode; None where no number will do.

    Found by trying, once in a process: from this number on every multiple of `TILE` that was tried gave each row the
    bits that it has among the most.
    """
    if jax.default_backend() != "cpu":
        return TILE
    least = _first_alike(inputs, min(outputs, TRIED_OUTPUTS), False)
    return least if least <= FEW or least * inputs * outputs <= SMALL_WORK else None


@cache
def _first_alike(inputs: int, outputs: int, is_turned: bool) -> int:
    with ThreadPoolExecutor(1) as thread:  # of its own, where nothing is being traced
        return thread.submit(_try_rows, inputs, outputs, is_turned).result()


def _try_rows(inputs: int, outputs: int, is_turned: bool = False) -> int:
    """The first of the numbers that are tried from which on a row has the bits that it has among the most."""
    tried = TRIED_TURNED if is_turned else TRIED
    counts = [rows for rows in tried if rows <= tried[4] or rows * inputs * outputs <= TRIED_WORK]
    rng = np.random.default_rng(0)
    x_ab, w_bc = rng.standard_normal((counts[-1], inputs), np.float32), rng.standard_normal(outputs * 61, np.float32)
    w = np.resize(w_bc, (outputs, inputs) if is_turned else (inputs, outputs))
    multiply = _turned if is_turned else _cpu_product
    # Each has arrays of its own, so that none is a part of another.
    parts = [x_ab[:rows] for rows in counts]
    outs = jax.jit(lambda parts, w: [multiply(part, w) for part in parts])(parts, w)
    most_ac = np.asarray(outs[-1])
    first = counts[-1]
    for rows, out in zip(reversed(counts), reversed(outs), strict=True):
        if not np.array_equal(np.asarray(out), most_ac[:rows]):
            break
        first = rows
    return first


def times(x_ab: Array, w: Array | LaidOut | Quantised) -> Array:
    """`product`, whose second factor may be laid out, be quantised, or have more axes than two."""
    if isinstance(w, Quantised):
        return times_quantised(x_ab, w, product if x_ab.dtype == jnp.float32 else wide_product)
    if isinstance(w, LaidOut):
        out = product(x_ab, w.pieces[0]) if len(w.pieces) == 1 else _sum_pieces(x_ab, w.pieces)
        return out[:, : w.outputs]
    return product(x_ab, w.reshape(x_ab.shape[1], -1))


def _whole_product(x_ab: Array, w_bc: Array) -> Array:
    return _matmul(x_ab, w_bc) if x_ab.dtype == jnp.float32 else jnp.matmul(x_ab, w_bc)


@partial(product.defjvp, symbolic_zeros=True)
def _product_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    """A gradient may be summed in any order, and is faster in one piece; what is frozen has none.

    What is transposed to a gradient has columns added where that is crowded: `g w^T` by its rows, `x^T g` by its own.
    """
    (x, w), (dx, dw) = primals, tangents
    out: Array = product(x, w)
    spreads = x.dtype == jnp.float32 and len(x) >= SPREAD_ROWS and jax.default_backend() == "cpu"
    changes = []
    if not isinstance(dx, SymbolicZero):
        added = ADDED if spreads and is_crowded(len(w)) else 0
        changes.append(_whole_product(jnp.pad(dx, ((0, 0), (0, added))), jnp.pad(w, ((0, added), (0, 0)))))
    if not isinstance(dw, SymbolicZero):
        changes.append(_whole_product(x, _spread(dw))[:, : w.shape[1]] if spreads else _whole_product(x, dw))
    return out, reduce(jnp.add, changes) if changes else jnp.zeros_like(out)


@partial(product_transposed.defjvp, symbolic_zeros=True)
def _product_transposed_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    (x, w), (dx, dw) = primals, tangents
    out: Array = product_transposed(x, w)
    changes = [_whole_product(a, b.T) for a, b, d in ((dx, w, dx), (x, dw, dw)) if not isinstance(d, SymbolicZero)]
    return out, reduce(jnp.add, changes) if changes else jnp.zeros_like(out)


@jax.custom_vjp
def wide_product(x_ab: Array, w_bc: Array) -> Array:
    """`product` in float32, of factors in a narrower type, in which its gradient is computed, too."""
    if not launch.is_exact():
        return _widened_product(x_ab, w_bc)
    return jax.lax.platform_dependent(x_ab, w_bc, cpu=_exact_product, default=_widened_product)


def _widened_product(x_ab: Array, w_bc: Array) -> Array:
    return jnp.matmul(x_ab, w_bc, preferred_element_type=jnp.float32)


def _wide_product_forward(x: Array, w: Array) -> tuple[Array, tuple[Array, Array]]:
    return wide_product(x, w), (x, w)


def _wide_product_backward(factors: tuple[Array, Array], d_out: Array) -> tuple[Array, Array]:
    x, w = factors
    d_out = d_out.astype(x.dtype)
    return jnp.matmul(d_out, w.T), jnp.matmul(x.T, d_out)


wide_product.defvjp(_wide_product_forward, _wide_product_backward)


# Layout -----------------------------------------------------------------------------------------------


def lay_out(layer: Mapping[str, Any], inputs: Mapping[str, int], together: Sequence[Sequence[str]]) -> dict[str, Any]:
    """The parameters of one layer as a step of few rows reads them fastest: matrices `together` beside each other.

    `inputs` says of each matrix how many of its axes are summed over. What is quantised stays as it is.
    """
    laid = dict(layer)
    for names in together:
        matrices = [layer[name] for name in names]
        if any(isinstance(w, Quantised) for w in matrices) or len({w.dtype for w in matrices}) > 1:
            continue
        beside = jnp.concatenate([w.reshape(len(w), -1) for w in matrices], axis=1)
        laid[fused_name(names)] = Fused(lay_out_matrix(beside, 1), tuple(w.shape[1:] for w in matrices))
        for name in names:
            del laid[name]
    return laid | {name: lay_out_matrix(laid[name], count) for name, count in inputs.items() if name in laid}


def lay_out_matrix(w: Any, inputs: int) -> Any:
    """A matrix as `times` reads it on a CPU; its first so many axes are summed over."""
    if isinstance(w, Quantised) or w.dtype != jnp.float32 or jax.default_backend() != "cpu":
        return w
    flat = w.reshape(math.prod(w.shape[:inputs]), -1)
    in_pieces = launch.is_exact() and _divides(flat) and padding(*flat.shape) is None
    if not in_pieces and not is_crowded(flat.shape[1]):
        return w
    pieces = _pieces(flat) if in_pieces else (flat,)
    return LaidOut(tuple(_spread(piece) for piece in pieces), w.shape, flat.shape[1])
