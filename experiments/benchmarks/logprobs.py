"""Tokens a second of scoring and of its gradient, and how much memory the vocabulary takes.

    python -m experiments.benchmarks.logprobs
    python -m experiments.benchmarks.logprobs --models=small --rows=16 --length=512

Speed: `logprobs` alone and with its backward pass, against the measured matrix-product rate. Counted are 2 operations
a weight and token forward and 6 with the backward pass, and attention to the tokens before; what is computed
twice to save memory is not counted. Memory: the temporary bytes of the compiled gradient at a large
vocabulary, against the formula that makes log-softmax of all [row, token, vocabulary] logits; nothing is run for it.

Measured on two shared cores: forward at 0.5 (small) to 0.64 (medium) of the matrix-product rate, with the backward
pass at 0.34 to 0.51; the memory of the vocabulary, attention by blocks included, at 1/37 of the plain formula. Three
minutes.
"""

import json
import statistics
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax import Array

from experiments import common
from experiments.benchmarks import ceilings
from experiments.benchmarks.measured import seconds, show_lines, significant
from experiments.headings import heading
from flowgrpo.contracts import Params, Policy
from flowgrpo.generate.sampler import logprobs
from flowgrpo.models.config import DecoderConfig, Rope
from flowgrpo.models.decoder import make_policy
from flowgrpo.models.hf import Model
from flowgrpo.report.progress import counted
from flowgrpo.types import BadInput

heading("What is run")
_MODELS = flags.DEFINE_list("models", list(ceilings.SHAPES), "Any of them, model folders, or hub ids.")
heading("Sizes")
_ROWS = flags.DEFINE_integer("rows", 64, "Rows that are scored together.", lower_bound=1)
_LENGTH = flags.DEFINE_integer("length", 96, "Tokens of a row.", lower_bound=2)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Runs of which the median counts.", lower_bound=1)
_VOCABULARY = flags.DEFINE_integer("vocabulary", 151_936, "Vocabulary of the memory figure.", lower_bound=2)
_MEMORY_ROWS = flags.DEFINE_integer("memory_rows", 8, "Rows of the memory figure.", lower_bound=1)
_MEMORY_LENGTH = flags.DEFINE_integer("memory_length", 1024, "Tokens of a row of the memory figure.", lower_bound=2)


# Speed ------------------------------------------------------------------------------------------------


def total(policy: Policy, params: Params, tokens: Array) -> Array:
    """The sum of all log-probabilities, by `logprobs`."""
    return jnp.sum(jnp.asarray(logprobs(policy, params, tokens).logp))


def measure_speed(name: str, model: Model, rate: float) -> list[dict]:
    """Tokens a second and share of the matrix-product rate, forward and with the backward pass."""
    shape = (_ROWS.value, _LENGTH.value)
    tokens = np.random.default_rng(0).integers(0, model.config.v, shape, np.int32)
    score = jax.jit(partial(logprobs, model.policy))
    learn = jax.jit(jax.value_and_grad(partial(total, model.policy)))
    # Half the length is what a token sees in the mean.
    flops = ceilings.forward_flops(model.params, model.config, tokens.size, _LENGTH.value / 2)
    rows = []
    for work, program, factor in (("forward", score, 1), ("forward+backward", learn, 3)):
        program(model.params, tokens)
        runs = [seconds(partial(program, model.params, tokens)) for _ in range(_REPEATS.value)]
        took = statistics.median(runs)
        rows.append(
            {
                "model": name,
                "params": ceilings.count(model.params),
                "work": work,
                "tokens_per_second": round(tokens.size / took),
                "gflops": round(factor * flops / took / 1e9, 1),
                "of_matrix_product": significant(factor * flops / took / rate),
            }
        )
    return rows


# Memory -----------------------------------------------------------------------------------------------


def plain_total(policy: Policy, params: Params, tokens: Array) -> Array:
    """Sum all log-probabilities as `total` does, but by the plain formula, which makes all logits at once."""
    logits, _ = policy.apply(params, tokens)
    logp = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)[:, :-1]
    return jnp.sum(jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1))


def measure_memory() -> dict:
    """Temporary bytes of both gradients on a model so narrow that the vocabulary is most of it."""
    config = DecoderConfig(v=_VOCABULARY.value, d=32, h=1, k=1, e=32, f=32, windows=(None,), ropes=(Rope(),), tied=True)
    policy = make_policy(config)
    ours, plain = (temporary(partial(total_of, policy), policy) for total_of in (total, plain_total))
    return {
        "vocabulary": _VOCABULARY.value,
        "rows": _MEMORY_ROWS.value,
        "length": _MEMORY_LENGTH.value,
        "temporary_mib": round(ours / 2**20, 1),
        "plain_mib": round(plain / 2**20, 1),
        "over_plain": round(ours / plain, 4),
    }


def temporary(loss: Callable[[Params, Array], Array], policy: Policy) -> int:
    """Bytes that the compiled gradient needs beside its arguments and results."""
    params = jax.eval_shape(policy.init, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((_MEMORY_ROWS.value, _MEMORY_LENGTH.value), jnp.int32)
    analysis = jax.jit(jax.grad(loss)).lower(params, tokens).compile().memory_analysis()
    if analysis is None:
        raise BadInput(f"the backend {jax.default_backend()} does not say how much memory a program takes: use cpu")
    return analysis.temp_size_in_bytes


# The command ------------------------------------------------------------------------------------------


def main() -> None:
    """Measure, print the tables and one JSON line."""
    models = {name: ceilings.open_model(name) for name in _MODELS.value}
    memory = measure_memory()
    rate = ceilings.measure().flops
    rows = [row for name, model in counted("model", models.items()) for row in measure_speed(name, model, rate)]
    if rows:
        show_lines(rows)
    show_lines([memory])
    print(json.dumps({"benchmark": "logprobs", "gflops": round(rate / 1e9, 1), "rows": rows, "memory": memory}))


if __name__ == "__main__":
    common.run(main)
