"""An array that is brought to its devices piece by piece: a reader of pieces flows in, a placed array flows out.

    fill(shape, dtype, place, axis=.., read=(start, stop) -> NumPy array) -> jax.Array

The host holds one piece at a time, however large the array is and however many devices share it; every piece is read
once. What the devices hold is written in place. A piece is about `STAGED` bytes, or one entry along the axis where that
has more.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

STAGED = 2**24  # bytes; so many that starting a transfer takes no time beside the transfer

Read = Callable[[int, int], np.ndarray]


class Part(NamedTuple):
    """Part of an array that one device holds."""

    device: Any  # None: the default one, to which the array is not bound
    index: tuple[slice, ...]  # with start and stop, one an axis
    value: jax.Array | None  # None until the first piece is there


def fill(shape: tuple[int, ...], dtype, place: jax.sharding.Sharding | None, *, axis: int, read: Read) -> jax.Array:
    """The array, read in pieces along `axis`."""
    parts = _parts(shape, place)
    entry = int(np.prod(shape)) // shape[axis] * np.dtype(dtype).itemsize
    step = max(1, STAGED // entry)
    for start in range(0, shape[axis], step):
        piece = read(start, min(start + step, shape[axis]))
        parts = [part._replace(value=_take_in(part, piece, start, axis)) for part in parts]
    values = [part.value for part in parts if part.value is not None]
    return values[0] if place is None else jax.make_array_from_single_device_arrays(shape, place, values)


def _parts(shape: tuple[int, ...], place: jax.sharding.Sharding | None) -> list[Part]:
    whole = tuple(slice(0, size) for size in shape)
    if place is None:
        return [Part(None, whole, None)]
    found = []
    for device, index in place.addressable_devices_indices_map(shape).items():
        bounds = zip(index or whole, shape, strict=True)
        found.append(Part(device, tuple(slice(*one.indices(size)[:2]) for one, size in bounds), None))
    return found


def _take_in(part: Part, piece: np.ndarray, start: int, axis: int) -> jax.Array | None:
    """The part's value with what it holds of a piece that begins at `start`."""
    own = part.index[axis]
    first, last = max(own.start, start), min(own.stop, start + piece.shape[axis])
    if first >= last:
        return part.value
    along = slice(first - start, last - start)
    new = piece[tuple(along if i == axis else index for i, index in enumerate(part.index))]
    moved = jax.device_put(new, part.device)
    if (first, last) == (own.start, own.stop):
        return jax.block_until_ready(moved)
    shape = [index.stop - index.start for index in part.index]
    value = jnp.zeros(shape, piece.dtype, device=part.device) if part.value is None else part.value
    # Waiting keeps the host from reading on while pieces are still on their way.
    return jax.block_until_ready(_write(value, moved, first - own.start, axis=axis))


@partial(jax.jit, static_argnames="axis", donate_argnums=0)
def _write(value: jax.Array, piece: jax.Array, start, *, axis: int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(value, piece, start, axis)
