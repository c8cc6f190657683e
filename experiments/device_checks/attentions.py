"""M2 and F6: packed rows against each sequence alone, for every attention that trains on the device.

The log-probabilities of packed sequences, and their gradient, equal those of each sequence alone. They don't change if
the tokens of other sequences and of padding change, nor if keys and values there are 1e30 in every layer, which exposes
a kernel that ignores segments.
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
from flowgrpo.models.attention_kernels import best_kernel, best_kernel_name
from flowgrpo.models.decoder import make_policy
from flowgrpo.types import first_line

from .bench import EXACT, HALF, Bench, NumericForm, small_shape
from .figures import ERROR, CheckLine, at_most
from .sampling import draw_tokens, put_params, small_params

GARBAGE = 1e30
GPU = ("gpu", "cuda")


class AttentionCase(NamedTuple):
    """An attention that can score packed rows, and its numeric form."""

    attend: Attend
    form: NumericForm


def attentions(platform: str) -> dict[str, AttentionCase]:
    """Every attention that can train on a platform, by name."""
    cases = {"plain": AttentionCase(attend, EXACT), "plain bfloat16": AttentionCase(attend, HALF)}
    kernel = best_kernel(platform)
    return cases if kernel is attend else cases | {best_kernel_name(platform): AttentionCase(kernel, HALF)}


# bounds on the errors of log-probabilities, of gradients, and of gradients that leak between sequences
ATTENTION_BOUNDS = {EXACT: (1e-4, 1e-4, 1e-5), HALF: (0.15, 0.1, 1e-2)}


class PackedSequences(NamedTuple):
    """The same sequences, packed into rows and one per row."""

    tokens: np.ndarray  # r s
    segments: np.ndarray  # r s
    alone: np.ndarray  # one sequence per row
    alone_segments: np.ndarray
    spans: list[tuple[int, int, int]]  # row, start and length of each sequence


def pack_sequences(bench: Bench) -> PackedSequences:
    """Three sequences of different lengths in each of two rows, padding after them, and rows of padding.

    There are as many rows as sequences, so that one program scores both layouts.
    """
    fractions = ((0.2, 0.45, 0.25), (0.55, 0.1, 0.2))
    rows, length = 6, bench.sizes.length
    tokens_rs, segments_rs = draw_tokens(bench, rows, length, 6), np.zeros((rows, length), np.int32)
    spans, alone, alone_segments = [], [], []
    for row, row_fractions in enumerate(fractions):
        start = 0
        for number, fraction in enumerate(row_fractions, start=1):
            count = int(fraction * length)
            segments_rs[row, start : start + count] = number
            spans.append((row, start, count))
            alone.append(np.pad(tokens_rs[row, start : start + count], (0, length - count)))
            alone_segments.append((np.arange(length) < count).astype(np.int32))
            start += count
    return PackedSequences(tokens_rs, segments_rs, np.stack(alone), np.stack(alone_segments), spans)


def check_packing(bench: Bench) -> list[CheckLine]:
    """Check every attention of the device; an exception in one doesn't stop the others."""
    lines, packed = [], pack_sequences(bench)
    for name, case in attentions(bench.device.platform).items():
        try:
            with case.form.products():
                lines += _check_attention(bench, packed, name, case)
        except Exception as error:  # a kernel may reject a device with an error of its own
            advice = f"{first_line(error)[:300]}. Train with the plain attention here."
            lines.append(CheckLine(f"{name} attention", ERROR, type(error).__name__, advice=advice, guards=True))
    return lines


def _check_attention(bench: Bench, packed: PackedSequences, name: str, case: AttentionCase) -> list[CheckLine]:
    params, bounds = put_params(small_params(bench), bench.device, case.form), ATTENTION_BOUNDS[case.form]
    config = small_shape(bench.sizes)
    score = _make_score(partial(make_policy, config, dtype=case.form.dtype), case.attend)
    counted_rs, counted_as = packed.segments > 0, packed.alone_segments > 0
    logp_rs, grads = score(params, packed.tokens, packed.segments, counted_rs, np.zeros_like(counted_rs))
    logp_as, grads_alone = score(params, packed.alone, packed.alone_segments, counted_as, np.zeros_like(counted_as))
    pairs = zip(packed.spans, logp_as, strict=True)
    error = max(float(np.abs(logp_rs[r, a : a + n] - logp_s[:n]).max()) for (r, a, n), logp_s in pairs)
    advice = f"Packed rows are not scored like their sequences ({name}, M2): don't train with this attention here."
    return [
        at_most(f"{name}: log-probabilities, packed - alone", error, bounds[0], advice),
        at_most(f"{name}: gradient, packed - alone", largest_difference(grads, grads_alone), bounds[1], advice),
        *_check_leaks(packed, name, bounds[2], partial(score, params), logp_rs),
    ]


def _check_leaks(
    packed: PackedSequences, name: str, bound: float, score: Callable, logp_rs: np.ndarray
) -> list[CheckLine]:
    """Change everything but the second sequence of each row, whose scores and gradient must not change."""
    counted_rs = packed.segments == 2
    none_rs = np.zeros_like(counted_rs)  # the same program without garbage, so that bits can be compared
    _, grads = score(packed.tokens, packed.segments, counted_rs, none_rs)
    other_tokens_rs = np.where(counted_rs, packed.tokens, np.roll(packed.tokens, 7, axis=1))
    results = {
        "other tokens elsewhere": score(other_tokens_rs, packed.segments, counted_rs, none_rs),
        "1e30 in keys and values elsewhere": score(packed.tokens, packed.segments, counted_rs, ~counted_rs),
    }
    advice = f"A sequence sees others of its row, or padding ({name}, F6): don't train with this attention here."
    lines = []
    for change, (logp, changed_grads) in results.items():
        error = float(np.abs(np.where(counted_rs, logp - logp_rs, 0.0)).max())
        lines.append(at_most(f"{name}: {change}", error, 0.0, advice))
        lines.append(at_most(f"{name}: gradient, {change}", largest_difference(changed_grads, grads), bound, advice))
    return lines


def _make_score(make: Callable[..., Any], attend: Attend) -> Callable[..., tuple[np.ndarray, dict]]:
    """Make the function that returns log-probabilities, and the gradient of the mean of those that are counted."""

    def loss(params: Params, tokens_rs, segments_rs, counted_rs, garbage_rs) -> tuple[Array, Array]:
        policy = make(attend=_with_garbage(attend, garbage_rs))
        logp_rs = logprobs(policy, params, tokens_rs, segments=segments_rs, positions=_positions(segments_rs)).logp
        logp_rs = jnp.asarray(logp_rs)
        return jnp.where(counted_rs, logp_rs, 0.0).sum() / counted_rs.sum(dtype=jnp.float32), logp_rs

    program = jax.jit(jax.grad(loss, has_aux=True))

    def score(*arguments: Any) -> tuple[np.ndarray, dict]:
        grads, logp_rs = jax.device_get(program(*arguments))
        return np.asarray(logp_rs, np.float32), grads

    return score


def _positions(segments_rs: Array) -> Array:
    """Positions that start at 0 in each segment."""
    index_rs = jnp.broadcast_to(jnp.arange(segments_rs.shape[1]), segments_rs.shape)
    is_start_rs = jnp.pad(segments_rs[:, 1:] != segments_rs[:, :-1], ((0, 0), (1, 0)))
    return index_rs - jax.lax.cummax(jnp.where(is_start_rs, index_rs, 0), axis=1)


def _with_garbage(attend: Attend, garbage_rs: Array) -> Attend:
    """An attention with garbage in the keys and values that a sequence must not see."""

    def attend_garbage(q: Array, k: Array, v: Array, *arguments: Any) -> Array:
        k, v = (jnp.where(garbage_rs[:, None, :, None], jnp.asarray(GARBAGE, x.dtype), x) for x in (k, v))
        return attend(q, k, v, *arguments)

    return attend_garbage


def largest_difference(tree: Any, reference: Any) -> float:
    """Largest difference of two trees, relative to the largest number of each array of `reference`; NaN if any is."""
    differences = []
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(reference), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        scale = np.abs(b).max()
        differences.append(np.abs(a - b).max() / (scale if scale > 0 else 1.0))
    return float(np.max(differences))
