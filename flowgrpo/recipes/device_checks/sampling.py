"""Logits against the host's; F7 and E3 by a prefill, decode steps and scores.

A small decoder begins with the same parameters everywhere. Its logits on the device are held against the host's in
float32. F7: rows are sampled by `decode` and scored by `logprobs`. E3: at one width, the bits of a row are the same in
any order of the rows, and where the others are not active.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from flowgrpo.contracts import Params, Policy
from flowgrpo.generate.sampler import Sampled, decode, logprobs, prefill, sampling, start_rows
from flowgrpo.models.attention_kernels import best
from flowgrpo.models.decoder import make_policy
from flowgrpo.recipes.device_checks.bench import EXACT, HALF, Bench, Device, Form, small_shape
from flowgrpo.recipes.device_checks.figures import CheckLine, at_most, holds, skipped, tell
from flowgrpo.types import AnyArray

LOGITS, RATIO = 1e-4, 1e-4  # of float32 with products at highest precision
TEMPERATURE = 0.7
NO_HOST = "JAX was told of no CPU: unset JAX_PLATFORMS, or name cpu in it after the accelerator"


def small_params(bench: Bench) -> Params:
    """Parameters that are the same bits on every machine: drawn by NumPy, in float32."""
    rng, policy = np.random.default_rng(0), make_policy(small_shape(bench.sizes))
    shapes = jax.eval_shape(policy.init, jax.random.key(0))
    drawn = {name: rng.normal(0.0, 0.05, x.shape).astype(np.float32) for name, x in sorted(shapes.items())}
    return {name: 1.0 + x if name.endswith("norm") else x for name, x in drawn.items()}


def placed(tree: Params, device: Device, form: Form = EXACT) -> Params:
    """Lay parameters on a device, in a form's type."""
    return jax.device_put({name: x.astype(form.dtype) for name, x in tree.items()}, device)


def draw_tokens(bench: Bench, rows: int, length: int, seed: int) -> np.ndarray:
    """Tokens of no meaning [rows length]; 0 is not among them."""
    return np.random.default_rng(seed).integers(1, bench.sizes.v, (rows, length), np.int32)


def check_logits(bench: Bench) -> list[CheckLine]:
    """Compare logits on the device, form by form, with those of the host in float32."""
    if bench.host is None:
        return [skipped("logits against the host", NO_HOST)]
    tokens, params = draw_tokens(bench, bench.sizes.rows, bench.sizes.length, 1), small_params(bench)
    right = _logits(bench, params, tokens, EXACT, bench.host)
    lines = [tell("largest logit", float(np.abs(right).max()))]
    for form in bench.forms:
        off = float(np.abs(_logits(bench, params, tokens, form, bench.device) - right).max())
        name = f"largest error, {form.name}"
        advice = "The device's products or reductions are wrong: look for flags in XLA_FLAGS, then another jaxlib."
        lines.append(at_most(name, off, LOGITS, advice) if form is EXACT else tell(name, off))
    return lines


@cache
def _policy(bench: Bench, form: Form) -> Policy:
    return make_policy(small_shape(bench.sizes), dtype=form.dtype, attend=best(bench.device.platform))


@cache
def _logits_program(policy: Policy) -> Callable[[Params, Array], Array]:
    def run(params: Params, tokens: Array) -> Array:
        return policy.unembed(params, policy.hidden(params, tokens, None, None, None)[0])

    return jax.jit(run)


def _logits(bench: Bench, params: Params, tokens: np.ndarray, form: Form, device: Device) -> np.ndarray:
    program = _logits_program(_policy(bench, form))
    with form.products():
        return np.asarray(program(placed(params, device, form), jax.device_put(tokens, device)), np.float32)


# Sampling ---------------------------------------------------------------------------------------------

ROWS = 4  # times the rows of the small batches
Sample = Callable[
    [Params, AnyArray, AnyArray, Array, AnyArray], Sampled
]  # (params, prompts, their lengths, keys, active)


@cache  # F7 and E3 share it
def make_sample(policy: Policy, steps: int) -> Sample:
    """Build a function that prefills prompts, padding only after them, and samples so many tokens in active rows."""

    def sample(params: Params, tokens_ru: Array, length_r: Array, key_r: Array, active_r: Array) -> Sampled:
        rows, length = tokens_ru.shape
        assert policy.make_cache is not None
        before_ru = (jnp.arange(length)[None, :] < length_r[:, None] - 1) & active_r[:, None]
        cache = prefill(policy, params, policy.make_cache(rows, length + steps), tokens_ru, before_ru)
        last_r = jnp.take_along_axis(tokens_ru, length_r[:, None] - 1, axis=1)[:, 0]
        begun = start_rows(cache, last_r, key_r, jnp.where(active_r, steps, 0))
        settings, no_stops = sampling(rows, temperature=TEMPERATURE), jnp.full((rows, 1), -1)
        return decode(policy, params, begun, settings, no_stops, steps=steps)[1]

    return jax.jit(sample)


def _prompts(bench: Bench, rows: int) -> tuple[np.ndarray, np.ndarray, Array]:
    """Prompts of several lengths, half as long as a row at most, and a key for each."""
    most = bench.sizes.length // 2
    length_r = np.random.default_rng(2).integers(2, most + 1, rows, np.int32)
    return draw_tokens(bench, rows, most, 3), length_r, jax.random.split(jax.random.key(4), rows)


def check_ratio(bench: Bench) -> list[CheckLine]:
    """F7: compare log-probabilities of what is sampled with those that `logprobs` gives it."""
    rows, steps = ROWS * bench.sizes.rows, bench.sizes.length // 2
    tokens_ru, length_r, key_r = _prompts(bench, rows)
    lines, entropy = [], 0.0
    for form in bench.forms:
        policy = _policy(bench, form)
        params, active_r = placed(small_params(bench), bench.device, form), np.ones(rows, bool)
        with form.products():
            sampled = make_sample(policy, steps)(params, tokens_ru, length_r, key_r, active_r)
            off, entropy = _score_again(policy, params, tokens_ru, length_r, jax.device_get(sampled))
        name = f"log-ratio, {form.name}"
        advice = (
            "Sampling and scoring are not one distribution (F7), so importance ratios of an unchanged policy are not "
            "1: sample and score in float32 with jax_default_matmul_precision=highest, or correct the ratios."
        )
        most = float(off.max())
        lines += [at_most(f"{name}: largest", most, RATIO, advice) if form is EXACT else tell(f"{name}: largest", most)]
        lines += [tell(f"{name}: mean", float(off.mean()))]
    return [*lines, tell("entropy", entropy, "nats"), tell("tokens", float(off.size))]


def _score_again(
    policy: Policy, params: Params, tokens_ru: np.ndarray, length_r: np.ndarray, sampled: Sampled
) -> tuple[np.ndarray, float]:
    """Absolute log-ratios of all sampled tokens, and the mean entropy of where they come from."""
    token_ur, logp_ur = np.asarray(sampled.token), np.asarray(sampled.logp_sampled)
    steps, rows = token_ur.shape
    place_ru = length_r[:, None] + np.arange(steps)[None, :]
    whole_rs = np.zeros((rows, tokens_ru.shape[1] + steps), np.int32)
    whole_rs[:, : tokens_ru.shape[1]] = tokens_ru
    np.put_along_axis(whole_rs, place_ru, token_ur.T, axis=1)
    segments_rs = (np.arange(whole_rs.shape[1])[None, :] < length_r[:, None] + steps).astype(np.int32)
    score = jax.jit(partial(logprobs, policy, temperature=TEMPERATURE))
    scores = jax.device_get(score(params, whole_rs, segments=segments_rs))
    logp_ru, entropy_ru = (np.take_along_axis(x, place_ru, axis=1) for x in (scores.logp, scores.entropy))
    return np.abs(logp_ru.astype(np.float64) - logp_ur.T), float(entropy_ru.mean())


def check_widths(bench: Bench) -> list[CheckLine]:
    """E3 at one width: compare a row's bits in other company."""
    rows, steps = ROWS * bench.sizes.rows, bench.sizes.length // 2
    tokens_ru, length_r, key_r = _prompts(bench, rows)
    order = np.random.default_rng(5).permutation(rows)
    lines = []
    for form in (EXACT, HALF):
        params, sample = placed(small_params(bench), bench.device, form), make_sample(_policy(bench, form), steps)
        with form.products():
            run = partial(_run_bits, sample, params)
            together = run(tokens_ru, length_r, key_r, np.ones(rows, bool))
            shuffled = run(tokens_ru[order], length_r[order], key_r[order], np.ones(rows, bool))
            alone = [run(tokens_ru, length_r, key_r, np.arange(rows) == row)[row] for row in range(rows)]
        advice = (
            "Bits of a row depend on its company (E3), so a run that is killed need not end at the same bits: "
            "use --deterministic (on a CPU --exact), and report the device."
        )
        same = [together[row] == shuffled[at] for at, row in enumerate(order)]
        lines.append(holds(f"the same bits in any order, {form.name}", all(same), advice))
        lines.append(holds(f"the same bits alone, {form.name}", alone == together, advice))
    return lines


def _run_bits(sample: Sample, params: Params, *rows: Any) -> list[bytes]:
    """Tokens and log-probabilities of each row as bytes."""
    found = jax.device_get(sample(params, *rows))
    token_ru, logp_ru = np.asarray(found.token).T, np.asarray(found.logp_sampled).T
    return [token.tobytes() + logp.tobytes() for token, logp in zip(token_ru, logp_ru, strict=True)]
