"""Matrix products of a layer: `x W + b`, plus a LoRA adapter's, with results independent of the batch in exact mode.

    product      [a inputs] x [inputs outputs]; `product_transposed` by a transposed matrix, such as an embedding
    project      one projection of a layer, by its name; `project_each`: several with the same input

In the layout for decoding (`to_decode_layout`) matrices with the same input are fused into one product: a step of few
rows is bound by reading weights, and by launching kernels.

On a CPU a product with 512, 1,024 or a similar number of output columns runs at a third to a half of the rate, since
rows of the output start in the same sets of the cache. Such matrices are padded with some columns (`is_crowded`), which
are cut off again: 90 in place of 40 GFLOP/s on one core with 2,048 outputs of 640 inputs, 91 in place of 28 with
262,144 outputs.

CPU kernels process rows in tiles, and sum the remaining rows, or few rows, in another order; a deep model magnifies the
difference a hundredfold. In exact mode (`launch.is_exact`) rows are padded to a number at which a row's bits do not
depend on the other rows: a multiple of 12, and at least `exact_padding`, which is found by trial. If no number does, a
long sum is split into pieces, within which the order never changes, at half the rate.
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
from flowgrpo.models.attention import PRECISE
from flowgrpo.models.quantised import Quantised, times_quantised
from flowgrpo.types import Params

PIECE_TERMS, MAX_SPLIT_TERMS = 192, 4096  # terms of a sum in one piece; of the longest sum that is split
TILE = 12  # rows: a multiple of every kernel's tile (6 with AVX2, 12 or 24 with AVX-512)
TRIED_ROWS = (12, 24, 36, 48, 60, 96, 144, 192, 264, 312, 384, 516, 576, 1032)  # numbers of rows that are tried
TRANSPOSED_TILE = 48  # rows, if the matrix is the first factor
TRIED_ROWS_TRANSPOSED = tuple(TRANSPOSED_TILE * count for count in (1, 2, 3, 4, 5, 6, 8, 12, 21))
MAX_PADDED_ROWS = 192  # that any product may be padded to
MAX_PADDED_WORK = 5e7  # multiplications of a product that may be padded to more rows
MAX_TRIED_OUTPUTS = 1024  # columns of a trial: the order of a sum doesn't depend on more
CACHE_SET_BYTES = 2048  # an output is crowded if the bytes of its rows are a multiple of this
EXTRA_COLUMNS = 80  # that a crowded output is padded with
MIN_SPREAD_ROWS = 48  # from which padding columns pays in the program that multiplies
MAX_TRIED_WORK = 2e9  # multiplications of a trial, above which only the first five numbers of rows are tried


class SplitLinear(struct.PyTreeNode):
    """A matrix in the layout of a CPU: split along its inputs into pieces, and padded with columns if it is crowded."""

    pieces: tuple[Array, ...]  # [terms, outputs and extra columns] each, as separate arrays
    shape: tuple[int, ...] = struct.field(pytree_node=False)  # of the original parameter, with all its axes
    outputs: int = struct.field(pytree_node=False)


class Fused(struct.PyTreeNode):
    """Matrices with the same inputs as one: [inputs, outputs of all]."""

    matrix: Array | SplitLinear
    shapes: tuple[tuple[int, ...], ...] = struct.field(pytree_node=False)  # of the outputs of each


# A projection -----------------------------------------------------------------------------------------


def project(x: Array, layer: Params, name: str, *, inputs: int = 1) -> Array:
    """`x W (+ x A B) (+ bias)`, with an adapter and a bias if the layer has them: [r s inputs] -> [r s outputs].

    The first `inputs` axes of W are summed over. Axes are flattened first, because XLA's gradient of a product with
    more axes is twice as slow on a CPU. The adapter's product is computed in its own dtype.
    """
    w = layer[name]
    x_ab = x.reshape(-1, math.prod(w.shape[:inputs]))
    out = apply_linear(x_ab, w).astype(x.dtype)
    return _add_adapter_and_bias(out, x_ab, layer, name, (*x.shape[:2], *w.shape[inputs:]))


def project_each(x: Array, layer: Params, names: Sequence[str]) -> tuple[Array, ...]:
    """`project` by each of these names; in one product if their matrices are fused."""
    fused: Any = layer.get(fused_name(names))
    if fused is None:
        return tuple(project(x, layer, name) for name in names)
    x_ab = x.reshape(-1, x.shape[-1])
    edges = np.cumsum([math.prod(shape) for shape in fused.shapes])[:-1]
    outs = jnp.split(apply_linear(x_ab, fused.matrix).astype(x.dtype), edges, axis=1)
    return tuple(
        _add_adapter_and_bias(out, x_ab, layer, name, (*x.shape[:2], *shape))
        for out, name, shape in zip(outs, names, fused.shapes, strict=True)
    )


def fused_name(names: Sequence[str]) -> str:
    """Name of the `Fused` parameter of these matrices."""
    return "+".join(names)


def _add_adapter_and_bias(out: Array, x_ab: Array, layer: Params, name: str, shape: tuple[int, ...]) -> Array:
    """A product [a outputs] plus those of the adapter and the bias, in its final shape."""
    if f"{name}_a" in layer:
        a, b = layer[f"{name}_a"], layer[f"{name}_b"]
        low_rank = product(x_ab.astype(a.dtype), a.reshape(x_ab.shape[1], -1))
        change = product(low_rank, b.reshape(len(b), -1))
        out = (out.astype(change.dtype) + change).astype(out.dtype)
    bias = layer.get(f"{name}_bias")
    out = out.reshape(shape)
    return out if bias is None else out + bias[None, None]


# A product --------------------------------------------------------------------------------------------


_matmul = partial(jnp.matmul, precision=PRECISE)


@jax.custom_jvp
def product(x_ab: Array, w_bc: Array) -> Array:
    """`x w` in their dtype; in exact mode the bits of a row do not depend on the other rows (F7, E3)."""
    on_cpu = _cpu_product
    if launch.is_exact():
        on_cpu = lambda x, w: _exact_product(x, w).astype(x.dtype)  # noqa: E731
    elif x_ab.dtype != jnp.float32:
        return _whole_product(x_ab, w_bc)
    return jax.lax.platform_dependent(x_ab, w_bc, cpu=on_cpu, default=_whole_product)


def _exact_product(x_ab: Array, w_bc: Array) -> Array:
    """`x w` in float32, whatever the dtypes: the tiles of its kernels are known."""
    x_ab, w_bc = x_ab.astype(jnp.float32), w_bc.astype(jnp.float32)
    min_rows = exact_padding(*w_bc.shape)
    if min_rows is None:
        return _sum_pieces(x_ab, _split_terms(w_bc) if _can_split(w_bc) else [w_bc])
    return _cpu_product(_pad_rows(x_ab, min_rows), w_bc)[: len(x_ab)]


def _cpu_product(x_ab: Array, w_bc: Array) -> Array:
    """`x w` of float32, with crowded columns padded if there are enough rows to pay for that."""
    outputs = w_bc.shape[1]
    if len(x_ab) < MIN_SPREAD_ROWS or not is_crowded(outputs):
        return _matmul(x_ab, w_bc)
    return _matmul(x_ab, _pad_crowded_columns(w_bc))[:, :outputs]


def is_crowded(outputs: int) -> bool:
    """Whether rows of this many float32 numbers start in the same few sets of a processor's cache."""
    return outputs * 4 % CACHE_SET_BYTES == 0


def _pad_crowded_columns(w_bc: Array) -> Array:
    return jnp.pad(w_bc, ((0, 0), (0, EXTRA_COLUMNS))) if is_crowded(w_bc.shape[1]) else w_bc


def _pad_rows(x_ab: Array, min_rows: int, tile: int = TILE) -> Array:
    """Pad with rows of zeros to a multiple of `tile`, and to `min_rows` at least."""
    short = max(min_rows, -(-len(x_ab) // tile) * tile) - len(x_ab)
    return jnp.pad(x_ab, ((0, short), (0, 0))) if short else x_ab


def _can_split(w_bc: Array) -> bool:
    """Whether sums over the rows of this matrix may be split into pieces, if no padding makes them exact."""
    return PIECE_TERMS < len(w_bc) <= MAX_SPLIT_TERMS


def _sum_pieces(x_ab: Array, pieces: Sequence[Array]) -> Array:
    edges = np.cumsum([0, *(len(piece) for piece in pieces)])
    padded_ab = _pad_rows(x_ab, TILE)
    terms = [
        _cpu_product(padded_ab[:, start:end], piece)
        for start, end, piece in zip(edges, edges[1:], pieces, strict=False)
    ]
    return reduce(jnp.add, terms)[: len(x_ab)]


def _split_terms(w_bc: Array) -> tuple[Array, ...]:
    return tuple(w_bc[start : start + PIECE_TERMS] for start in range(0, len(w_bc), PIECE_TERMS))


@jax.custom_jvp
def product_transposed(x_ab: Array, w_cb: Array) -> Array:
    """`x w^T` of float32, for a matrix with many rows, such as an embedding; exact as `product` is.

    On a CPU it is computed as `(w x^T)^T`, at three times the rate, and without a copy of the matrix.
    """
    on_cpu = _exact_transposed_product if launch.is_exact() else _transposed_product
    return jax.lax.platform_dependent(x_ab, w_cb, cpu=on_cpu, default=lambda x, w: _whole_product(x, w.T))


def _exact_transposed_product(x_ab: Array, w_cb: Array) -> Array:
    if not _is_transposed_exact(x_ab.shape[1], len(w_cb)):
        return _exact_product(x_ab, w_cb.T)
    return _transposed_product(_pad_rows(x_ab, TRANSPOSED_TILE, TRANSPOSED_TILE), w_cb)[: len(x_ab)]


def _transposed_product(x_ab: Array, w_cb: Array) -> Array:
    # Without the barrier XLA rewrites it as `x w^T`.
    return jax.lax.optimization_barrier(_matmul(w_cb, x_ab.T)).T


def _is_transposed_exact(inputs: int, outputs: int) -> bool:
    """Whether the bits of a row are the same in any multiple of `TRANSPOSED_TILE` rows."""
    return (
        jax.default_backend() != "cpu"
        or _find_padding(inputs, min(outputs, MAX_TRIED_OUTPUTS), True) == TRANSPOSED_TILE
    )


def exact_padding(inputs: int, outputs: int) -> int | None:
    """Fewest rows that a product of this shape is padded to in exact mode; None if no number makes it exact.

    Found by trial, once a process: from this number on, all tried multiples of `TILE` gave a row the same bits as the
    largest one did.
    """
    if jax.default_backend() != "cpu":
        return TILE
    min_rows = _find_padding(inputs, min(outputs, MAX_TRIED_OUTPUTS), False)
    return min_rows if min_rows <= MAX_PADDED_ROWS or min_rows * inputs * outputs <= MAX_PADDED_WORK else None


@cache
def _find_padding(inputs: int, outputs: int, is_transposed: bool) -> int:
    with ThreadPoolExecutor(1) as thread:  # another thread, in which nothing is being traced
        return thread.submit(_try_paddings, inputs, outputs, is_transposed).result()


def _try_paddings(inputs: int, outputs: int, is_transposed: bool = False) -> int:
    """The first of the tried numbers of rows from which on a row has the same bits as among the most rows."""
    tried = TRIED_ROWS_TRANSPOSED if is_transposed else TRIED_ROWS
    counts = [rows for rows in tried if rows <= tried[4] or rows * inputs * outputs <= MAX_TRIED_WORK]
    rng = np.random.default_rng(0)
    x_ab, w_bc = rng.standard_normal((counts[-1], inputs), np.float32), rng.standard_normal(outputs * 61, np.float32)
    w = np.resize(w_bc, (outputs, inputs) if is_transposed else (inputs, outputs))
    multiply = _transposed_product if is_transposed else _cpu_product
    parts = [x_ab[:rows] for rows in counts]  # separate arrays, so that none is computed as a part of another
    outs = jax.jit(lambda parts, w: [multiply(part, w) for part in parts])(parts, w)
    most_ac = np.asarray(outs[-1])
    first = counts[-1]
    for rows, out in zip(reversed(counts), reversed(outs), strict=True):
        if not np.array_equal(np.asarray(out), most_ac[:rows]):
            break
        first = rows
    return first


def apply_linear(x_ab: Array, w: Array | SplitLinear | Quantised) -> Array:
    """`product` with a matrix that may be quantised, split, or have more than two axes."""
    if isinstance(w, Quantised):
        return times_quantised(x_ab, w, product if x_ab.dtype == jnp.float32 else wide_product)
    if isinstance(w, SplitLinear):
        out = product(x_ab, w.pieces[0]) if len(w.pieces) == 1 else _sum_pieces(x_ab, w.pieces)
        return out[:, : w.outputs]
    return product(x_ab, w.reshape(x_ab.shape[1], -1))


def _whole_product(x_ab: Array, w_bc: Array) -> Array:
    return _matmul(x_ab, w_bc) if x_ab.dtype == jnp.float32 else jnp.matmul(x_ab, w_bc)


@partial(product.defjvp, symbolic_zeros=True)
def _product_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    """The tangent is one whole product: a gradient may be summed in any order. Frozen factors have none.

    Its transposes, the gradients, avoid crowded columns too: `g w^T` by padding rows of w, `x^T g` by padding columns.
    """
    (x, w), (dx, dw) = primals, tangents
    out: Array = product(x, w)
    pads = x.dtype == jnp.float32 and len(x) >= MIN_SPREAD_ROWS and jax.default_backend() == "cpu"
    changes = []
    if not isinstance(dx, SymbolicZero):
        extra = EXTRA_COLUMNS if pads and is_crowded(len(w)) else 0
        changes.append(_whole_product(jnp.pad(dx, ((0, 0), (0, extra))), jnp.pad(w, ((0, extra), (0, 0)))))
    if not isinstance(dw, SymbolicZero):
        changes.append(_whole_product(x, _pad_crowded_columns(dw))[:, : w.shape[1]] if pads else _whole_product(x, dw))
    return out, reduce(jnp.add, changes) if changes else jnp.zeros_like(out)


@partial(product_transposed.defjvp, symbolic_zeros=True)
def _product_transposed_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    (x, w), (dx, dw) = primals, tangents
    out: Array = product_transposed(x, w)
    changes = [_whole_product(a, b.T) for a, b, d in ((dx, w, dx), (x, dw, dw)) if not isinstance(d, SymbolicZero)]
    return out, reduce(jnp.add, changes) if changes else jnp.zeros_like(out)


@jax.custom_vjp
def wide_product(x_ab: Array, w_bc: Array) -> Array:
    """`product` in float32 of factors in a narrower dtype, in which the gradient is computed."""
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


def to_decode_layout(
    layer: Mapping[str, Any], num_inputs: Mapping[str, int], fused_groups: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """The parameters of one layer in the layout of small steps: the matrices of each of `fused_groups` as one.

    `num_inputs` is the number of axes of each matrix that are summed over. Quantised matrices stay as they are.
    """
    params = dict(layer)
    for names in fused_groups:
        matrices = [layer[name] for name in names]
        if any(isinstance(w, Quantised) for w in matrices) or len({w.dtype for w in matrices}) > 1:
            continue
        joined = jnp.concatenate([w.reshape(len(w), -1) for w in matrices], axis=1)
        params[fused_name(names)] = Fused(to_cpu_layout(joined, 1), tuple(w.shape[1:] for w in matrices))
        for name in names:
            del params[name]
    return params | {name: to_cpu_layout(params[name], count) for name, count in num_inputs.items() if name in params}


def to_cpu_layout(w: Any, num_inputs: int) -> Any:
    """A matrix as `apply_linear` reads it fastest on a CPU; its first `num_inputs` axes are summed over."""
    if isinstance(w, Quantised) or w.dtype != jnp.float32 or jax.default_backend() != "cpu":
        return w
    w_bc = w.reshape(math.prod(w.shape[:num_inputs]), -1)
    splits = launch.is_exact() and _can_split(w_bc) and exact_padding(*w_bc.shape) is None
    if not splits and not is_crowded(w_bc.shape[1]):
        return w
    pieces = _split_terms(w_bc) if splits else (w_bc,)
    return SplitLinear(tuple(_pad_crowded_columns(piece) for piece in pieces), w.shape, w_bc.shape[1])
