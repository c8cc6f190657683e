"""Logits against the host's; F7 and E3 by a prefill, decode steps and scores.

A small decoder has the same parameters everywhere. Its logits on the device are compared with the host's in float32.
F7: rows are sampled by `decode` and scored by `logprobs`. E3: at one width, the bits of a row are the same in any order
of the rows, and if the other rows are not active.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from flowgrpo.contracts import Params, Policy
from flowgrpo.generate.sampler import SampledTokens, decode, logprobs, make_sampling, prefill, start_rows
from flowgrpo.models.attention_kernels import best_kernel
from flowgrpo.models.decoder import make_policy
from flowgrpo.types import AnyArray

from .bench import EXACT, HALF, Bench, Device, NumericForm, small_shape
from .figures import CheckLine, at_most, expect, measured, skipped

MAX_LOGIT_ERROR, MAX_LOG_RATIO = 1e-4, 1e-4  # bounds for float32 with products at highest precision
TEMPERATURE = 0.7
NO_HOST_ADVICE = "JAX has no CPU device: unset JAX_PLATFORMS, or add cpu to it after the accelerator"


def small_params(bench: Bench) -> Params:
    """Parameters with the same bits on every machine: drawn by NumPy, in float32."""
    rng, policy = np.random.default_rng(0), make_policy(small_shape(bench.sizes))
    shapes = jax.eval_shape(policy.init, jax.random.key(0))
    drawn = {name: rng.normal(0.0, 0.05, x.shape).astype(np.float32) for name, x in sorted(shapes.items())}
    return {name: 1.0 + x if name.endswith("norm") else x for name, x in drawn.items()}


def put_params(tree: Params, device: Device, form: NumericForm = EXACT) -> Params:
    """Put parameters on a device, in the data type of a form."""
    return jax.device_put({name: x.astype(form.dtype) for name, x in tree.items()}, device)


def draw_tokens(bench: Bench, rows: int, length: int, seed: int) -> np.ndarray:
    """Random tokens [rows length] other than 0."""
    return np.random.default_rng(seed).integers(1, bench.sizes.v, (rows, length), np.int32)


def check_logits(bench: Bench) -> list[CheckLine]:
    """Compare logits on the device, in each form, with those of the host in float32."""
    if bench.host is None:
        return [skipped("logits against the host", NO_HOST_ADVICE)]
    tokens, params = draw_tokens(bench, bench.sizes.rows, bench.sizes.length, 1), small_params(bench)
    host_logits = _logits(bench, params, tokens, EXACT, bench.host)
    lines = [measured("largest logit", float(np.abs(host_logits).max()))]
    for form in bench.forms:
        error = float(np.abs(_logits(bench, params, tokens, form, bench.device) - host_logits).max())
        name = f"largest error, {form.name}"
        advice = "The device's products or reductions are wrong: look for flags in XLA_FLAGS, then another jaxlib."
        lines.append(at_most(name, error, MAX_LOGIT_ERROR, advice) if form is EXACT else measured(name, error))
    return lines


@cache
def _policy(bench: Bench, form: NumericForm) -> Policy:
    return make_policy(small_shape(bench.sizes), dtype=form.dtype, attend=best_kernel(bench.device.platform))


@cache
def _logits_program(policy: Policy) -> Callable[[Params, Array], Array]:
    def run(params: Params, tokens: Array) -> Array:
        return policy.unembed(params, policy.hidden(params, tokens, None, None, None)[0])

    return jax.jit(run)


def _logits(bench: Bench, params: Params, tokens: np.ndarray, form: NumericForm, device: Device) -> np.ndarray:
    program = _logits_program(_policy(bench, form))
    with form.products():
        return np.asarray(program(put_params(params, device, form), jax.device_put(tokens, device)), np.float32)


# Sampling ---------------------------------------------------------------------------------------------

ROWS_FACTOR = 4  # multiple of the rows of the small batches
# (params, prompts, their lengths, keys, active) -> tokens
Sample = Callable[[Params, AnyArray, AnyArray, Array, AnyArray], SampledTokens]


@cache  # shared by F7 and E3
def make_sample(policy: Policy, steps: int) -> Sample:
    """Make the function that prefills prompts (padded at the end) and samples `steps` tokens in active rows."""

    def sample(params: Params, tokens_ru: Array, length_r: Array, key_r: Array, active_r: Array) -> SampledTokens:
        rows, length = tokens_ru.shape
        assert policy.make_cache is not None
        prefix_ru = (jnp.arange(length)[None, :] < length_r[:, None] - 1) & active_r[:, None]
        cache = prefill(policy, params, policy.make_cache(rows, length + steps), tokens_ru, prefix_ru)
        last_r = jnp.take_along_axis(tokens_ru, length_r[:, None] - 1, axis=1)[:, 0]
        state = start_rows(cache, last_r, key_r, jnp.where(active_r, steps, 0))
        settings, no_stops = make_sampling(rows, temperature=TEMPERATURE), jnp.full((rows, 1), -1)
        return decode(policy, params, state, settings, no_stops, steps=steps)[1]

    return jax.jit(sample)


def _prompts(bench: Bench, rows: int) -> tuple[np.ndarray, np.ndarray, Array]:
    """Prompts of different lengths, at most half a row, and a key for each."""
    max_length = bench.sizes.length // 2
    length_r = np.random.default_rng(2).integers(2, max_length + 1, rows, np.int32)
    return draw_tokens(bench, rows, max_length, 3), length_r, jax.random.split(jax.random.key(4), rows)


def check_ratio(bench: Bench) -> list[CheckLine]:
    """F7: compare the log-probabilities of sampled tokens with those that `logprobs` computes."""
    rows, steps = ROWS_FACTOR * bench.sizes.rows, bench.sizes.length // 2
    tokens_ru, length_r, key_r = _prompts(bench, rows)
    lines, entropy = [], 0.0
    for form in bench.forms:
        policy = _policy(bench, form)
        params, active_r = put_params(small_params(bench), bench.device, form), np.ones(rows, bool)
        with form.products():
            sampled = make_sample(policy, steps)(params, tokens_ru, length_r, key_r, active_r)
            log_ratio, entropy = _score_again(policy, params, tokens_ru, length_r, jax.device_get(sampled))
        name = f"log-ratio, {form.name}"
        advice = (
            "Sampling and scoring are not one distribution (F7), so importance ratios of an unchanged policy are not "
            "1: sample and score in float32 with jax_default_matmul_precision=highest, or correct the ratios."
        )
        largest = float(log_ratio.max())
        lines += [
            at_most(f"{name}: largest", largest, MAX_LOG_RATIO, advice)
            if form is EXACT
            else measured(f"{name}: largest", largest)
        ]
        lines += [measured(f"{name}: mean", float(log_ratio.mean()))]
    return [*lines, measured("entropy", entropy, "nats"), measured("tokens", float(log_ratio.size))]


def _score_again(
    policy: Policy, params: Params, tokens_ru: np.ndarray, length_r: np.ndarray, sampled: SampledTokens
) -> tuple[np.ndarray, float]:
    """Absolute log-ratios of all sampled tokens, and the mean entropy of their distributions."""
    token_ur, logp_ur = np.asarray(sampled.token), np.asarray(sampled.logp_sampled)
    steps, rows = token_ur.shape
    position_ru = length_r[:, None] + np.arange(steps)[None, :]
    sequence_rs = np.zeros((rows, tokens_ru.shape[1] + steps), np.int32)
    sequence_rs[:, : tokens_ru.shape[1]] = tokens_ru
    np.put_along_axis(sequence_rs, position_ru, token_ur.T, axis=1)
    segments_rs = (np.arange(sequence_rs.shape[1])[None, :] < length_r[:, None] + steps).astype(np.int32)
    score = jax.jit(partial(logprobs, policy, temperature=TEMPERATURE))
    scores = jax.device_get(score(params, sequence_rs, segments=segments_rs))
    logp_ru, entropy_ru = (np.take_along_axis(x, position_ru, axis=1) for x in (scores.logp, scores.entropy))
    return np.abs(logp_ru.astype(np.float64) - logp_ur.T), float(entropy_ru.mean())


def check_widths(bench: Bench) -> list[CheckLine]:
    """E3 at one width: compare a row's bits next to different rows."""
    rows, steps = ROWS_FACTOR * bench.sizes.rows, bench.sizes.length // 2
    tokens_ru, length_r, key_r = _prompts(bench, rows)
    order = np.random.default_rng(5).permutation(rows)
    lines = []
    for form in (EXACT, HALF):
        params, sample = put_params(small_params(bench), bench.device, form), make_sample(_policy(bench, form), steps)
        with form.products():
            run = partial(_run_bits, sample, params)
            bits = run(tokens_ru, length_r, key_r, np.ones(rows, bool))
            shuffled_bits = run(tokens_ru[order], length_r[order], key_r[order], np.ones(rows, bool))
            single_bits = [run(tokens_ru, length_r, key_r, np.arange(rows) == row)[row] for row in range(rows)]
        advice = (
            "Bits of a row depend on its company (E3), so a run that is killed need not end at the same bits: "
            "use --deterministic (on a CPU --exact), and report the device."
        )
        is_same = [bits[row] == shuffled_bits[index] for index, row in enumerate(order)]
        lines.append(expect(f"the same bits in any order, {form.name}", all(is_same), advice))
        lines.append(expect(f"the same bits alone, {form.name}", single_bits == bits, advice))
    return lines


def _run_bits(sample: Sample, params: Params, *rows: Any) -> list[bytes]:
    """Tokens and log-probabilities of each row as bytes."""
    sampled = jax.device_get(sample(params, *rows))
    token_ru, logp_ru = np.asarray(sampled.token).T, np.asarray(sampled.logp_sampled).T
    return [token.tobytes() + logp.tobytes() for token, logp in zip(token_ru, logp_ru, strict=True)]
