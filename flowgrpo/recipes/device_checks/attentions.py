"""M2 and F6: packed rows against each sequence alone, for every attention that trains on the device.

The log-probabilities of packed sequences, and their gradient, are those of each sequence alone. They do not move when
the tokens of other sequences and of padding are others, nor when keys and values there are 1e30 in every layer, which
shows a kernel that ignores segments.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from flowgrpo.contracts import Params
from flowgrpo.generate.sampler import logprobs
from flowgrpo.models.attention import Attend, attend
from flowgrpo.models.attention_kernels import best, best_name
from flowgrpo.models.decoder import make_policy
from flowgrpo.recipes.device_checks.bench import EXACT, HALF, Bench, Form, small_shape
from flowgrpo.recipes.device_checks.figures import ERROR, CheckLine, at_most
from flowgrpo.recipes.device_checks.sampling import draw_tokens, placed, small_params
from flowgrpo.types import first_line

GARBAGE = 1e30
GPU = ("gpu", "cuda")


class AttentionCase(NamedTuple):
    """An attention that may score packed rows, and the numbers that it takes."""

    attend: Attend
    form: Form


def attentions(platform: str) -> dict[str, AttentionCase]:
    """Every attention that can train on a platform, by its name; a kernel is one more line."""
    found = {"plain": AttentionCase(attend, EXACT), "plain bfloat16": AttentionCase(attend, HALF)}
    kernel = best(platform)
    return found if kernel is attend else found | {best_name(platform): AttentionCase(kernel, HALF)}


BOUNDS = {EXACT: (1e-4, 1e-4, 1e-5), HALF: (0.15, 0.1, 1e-2)}  # of log-probabilities, of gradients, of what leaks back


class Packed(NamedTuple):
    """Sequences in rows, and the same one a row."""

    tokens: np.ndarray  # r s
    segments: np.ndarray  # r s
    alone: np.ndarray  # one sequence a row
    alone_segments: np.ndarray
    places: list[tuple[int, int, int]]  # row, start and length of each sequence


def pack_sequences(bench: Bench) -> Packed:
    """Three sequences of other lengths in each of two rows, padding after them, and rows of padding.

    There are as many rows as sequences, so that one program scores both.
    """
    shares = ((0.2, 0.45, 0.25), (0.55, 0.1, 0.2))
    rows, length = 6, bench.sizes.length
    tokens_rs, segments_rs = draw_tokens(bench, rows, length, 6), np.zeros((rows, length), np.int32)
    places, alone, alone_segments = [], [], []
    for row, own in enumerate(shares):
        start = 0
        for number, share in enumerate(own, start=1):
            count = int(share * length)
            segments_rs[row, start : start + count] = number
            places.append((row, start, count))
            alone.append(np.pad(tokens_rs[row, start : start + count], (0, length - count)))
            alone_segments.append((np.arange(length) < count).astype(np.int32))
            start += count
    return Packed(tokens_rs, segments_rs, np.stack(alone), np.stack(alone_segments), places)


def check_packing(bench: Bench) -> list[CheckLine]:
    """Check every attention of the device; one that raises does not keep the others from being checked."""
    lines, packed = [], pack_sequences(bench)
    for name, case in attentions(bench.device.platform).items():
        try:
            with case.form.products():
                lines += _check_attention(bench, packed, name, case)
        except Exception as error:  # a kernel may refuse a card, in words of its own
            advice = f"{first_line(error)[:300]}. Train with the plain attention here."
            lines.append(CheckLine(f"{name} attention", ERROR, type(error).__name__, advice=advice, guards=True))
    return lines


def _check_attention(bench: Bench, packed: Packed, name: str, case: AttentionCase) -> list[CheckLine]:
    params, most = placed(small_params(bench), bench.device, case.form), BOUNDS[case.form]
    config = small_shape(bench.sizes)
    score = _make_scored(partial(make_policy, config, dtype=case.form.dtype), case.attend)
    real_rs, real_as = packed.segments > 0, packed.alone_segments > 0
    logp_rs, slopes = score(params, packed.tokens, packed.segments, real_rs, np.zeros_like(real_rs))
    logp_as, slopes_alone = score(params, packed.alone, packed.alone_segments, real_as, np.zeros_like(real_as))
    pieces = zip(packed.places, logp_as, strict=True)
    off = max(float(np.abs(logp_rs[r, a : a + n] - own[:n]).max()) for (r, a, n), own in pieces)
    advice = f"Packed rows are not scored as their sequences are ({name}, M2): don't train with this attention here."
    return [
        at_most(f"{name}: log-probabilities, packed - alone", off, most[0], advice),
        at_most(f"{name}: gradient, packed - alone", largest_difference(slopes, slopes_alone), most[1], advice),
        *_check_leaks(packed, name, most[2], partial(score, params), logp_rs),
    ]


def _check_leaks(packed: Packed, name: str, most: float, score: Callable, logp_rs: np.ndarray) -> list[CheckLine]:
    """Change everything but the second sequence of each row, whose own scores and gradient may not move."""
    own_rs = packed.segments == 2
    nothing_rs = np.zeros_like(own_rs)  # spoilt by the same program, so that the bits can be held against each other
    _, slopes = score(packed.tokens, packed.segments, own_rs, nothing_rs)
    other_rs = np.where(own_rs, packed.tokens, np.roll(packed.tokens, 7, axis=1))
    changed = {
        "other tokens elsewhere": score(other_rs, packed.segments, own_rs, nothing_rs),
        "1e30 in keys and values elsewhere": score(packed.tokens, packed.segments, own_rs, ~own_rs),
    }
    advice = f"A sequence sees others of its row, or padding ({name}, F6): don't train with this attention here."
    lines = []
    for what, (logp, others) in changed.items():
        moved = float(np.abs(np.where(own_rs, logp - logp_rs, 0.0)).max())
        lines.append(at_most(f"{name}: {what}", moved, 0.0, advice))
        lines.append(at_most(f"{name}: gradient, {what}", largest_difference(others, slopes), most, advice))
    return lines


def _make_scored(make: Callable[..., Any], own: Attend) -> Callable[..., tuple[np.ndarray, dict]]:
    """A function that gives log-probabilities, and the gradient of the mean of those that are counted."""

    def loss(params: Params, tokens_rs, segments_rs, counted_rs, spoilt_rs) -> tuple[Array, Array]:
        policy = make(attend=_spoil(own, spoilt_rs))
        logp_rs = logprobs(policy, params, tokens_rs, segments=segments_rs, positions=_positions(segments_rs)).logp
        logp_rs = jnp.asarray(logp_rs)
        return jnp.where(counted_rs, logp_rs, 0.0).sum() / counted_rs.sum(dtype=jnp.float32), logp_rs

    program = jax.jit(jax.grad(loss, has_aux=True))

    def score(*arguments: Any) -> tuple[np.ndarray, dict]:
        slopes, logp_rs = jax.device_get(program(*arguments))
        return np.asarray(logp_rs, np.float32), slopes

    return score


def _positions(segments_rs: Array) -> Array:
    """Positions that begin anew in each segment."""
    place_rs = jnp.broadcast_to(jnp.arange(segments_rs.shape[1]), segments_rs.shape)
    begins_rs = jnp.pad(segments_rs[:, 1:] != segments_rs[:, :-1], ((0, 0), (1, 0)))
    return place_rs - jax.lax.cummax(jnp.where(begins_rs, place_rs, 0), axis=1)


def _spoil(own: Attend, spoilt_rs: Array) -> Attend:
    """An attention whose keys and values are garbage where a sequence must not look."""

    def spoilt(q: Array, k: Array, v: Array, *rest: Any) -> Array:
        k, v = (jnp.where(spoilt_rs[:, None, :, None], jnp.asarray(GARBAGE, x.dtype), x) for x in (k, v))
        return own(q, k, v, *rest)

    return spoilt


def largest_difference(some: Any, others: Any) -> float:
    """The largest difference of two trees, array by array over the largest number of the second; NaN where one is."""
    found = []
    for a, b in zip(jax.tree.leaves(some), jax.tree.leaves(others), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        scale = np.abs(b).max()
        found.append(np.abs(a - b).max() / (scale if scale > 0 else 1.0))
    return float(np.max(found))
