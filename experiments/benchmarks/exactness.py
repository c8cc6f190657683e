"""How exact sampling is: the ratio of an unchanged policy (F7), and what a request gets at other widths (E3).

    python -m experiments.benchmarks.exactness
    python -m experiments.benchmarks.exactness --models=PATH --tokens=2000 --requests=16

F7: requests through the engine at temperature 0.7, with full support, and with top-k 20 and top-p 0.9 over the recorded
sets; then `logprobs` scores every sampled token again in padded rows, as a trainer does, in other shapes than the
engine's. `max`, `p999` and `mean` are of |log rho|, the difference between the two; `entropy` is the mean of the
distributions in nats. The bar is 1e-5 in float32; for bfloat16, with fewer tokens, the figure is given as it is.

E3: the same requests at several widths of the engine. At one width, alone, together and shuffled, all bits must be
equal. Against the widest, log-probabilities must agree within 1e-5 up to the first other token, and that must be a
near-tie, of a margin below 1e-4; each is listed.

Models are random: `small` has 4.07 M parameters and a vocabulary of 512, its init scale raised from 0.02 to 0.14 so
that it is as sure of its tokens as a trained model is; `tiny` has every feature on, and the tests decode with it.

Measured on a CPU with AVX2: F7 in float32 over 10,048 tokens 1e-6 with both models and both supports, which is the
rounding of the log-probability itself, since sampling and scoring sum in one order; in bfloat16, where they don't, 0.04
to 0.06 with `small` and 0.03 with `tiny`. E3: all bits equal, at every width and between widths. `small` enlarges a
rounding error at its embeddings a hundredfold, so that a single sum in another order would show as 1e-5 and more.
"""

import json
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments import common
from experiments.benchmarks import ceilings
from experiments.benchmarks.measured import show_lines
from experiments.headings import heading
from flowgrpo.contracts import Completion, Params, Policy, Request
from flowgrpo.generate.engine import Engine
from flowgrpo.generate.sampler import logprobs
from flowgrpo.models.decoder import make_policy
from flowgrpo.models.hf import init_model, load_model
from flowgrpo.report.progress import counted

heading("What is run")
_MODELS = flags.DEFINE_list("models", ["small", "tiny"], "small, tiny, model folders, or hub ids.")
heading("Sizes")
_TOKENS = flags.DEFINE_integer("tokens", 10_240, "Tokens sampled for each float32 figure of F7.", lower_bound=1)
_HALF_TOKENS = flags.DEFINE_integer("half_tokens", 2048, "Tokens for each bfloat16 figure.", lower_bound=0)
_REQUESTS = flags.DEFINE_integer("requests", 64, "Requests of E3.", lower_bound=1)
_WIDTHS = flags.DEFINE_multi_integer("widths", [1, 2, 4, 8, 16], "Widths of the engine.", lower_bound=1)

SCALE, TEMPERATURE, BANNED = 0.14, 0.7, (0,)
BAR, NEAR = 1e-5, 1e-4  # of log-probabilities, and of the margin of a near-tie
PROMPT, ANSWER = 48, 64  # most tokens of a prompt and of an answer
ROWS, LENGTH, SLOTS = 24, 160, 16  # of the rows that are scored, and of the engine: deliberately not the same shapes
SUPPORTS: dict[str, dict[str, Any]] = {"full": {}, "top-k 20, top-p 0.9": {"top_k": 20, "top_p": 0.9}}


class Subject(NamedTuple):
    """A model that is measured."""

    name: str
    dtype: str
    policy: Policy
    params: Params
    vocabulary: int


def open_subject(name: str, dtype: str) -> Subject:
    """One of the two random models, or a checkpoint."""
    if name == "tiny":
        policy = make_policy(ceilings.TINY, dtype=jnp.dtype(dtype))
        return Subject(name, dtype, policy, policy.init(jax.random.key(0)), ceilings.TINY.v)
    if name in ceilings.SHAPES:
        model = init_model(ceilings.SHAPES[name] | {"initializer_range": SCALE}, jax.random.key(0), dtype=dtype)
    else:
        model = load_model(name, dtype=dtype, text=False)
    return Subject(name, dtype, model.policy, model.params, model.config.v)


def make_requests(subject: Subject, number: int, *, seed: int, **settings) -> list[Request]:
    """Requests with prompts of several lengths, all answered at full length."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(1, subject.vocabulary, rng.integers(2, PROMPT + 1)).tolist() for _ in range(number)]
    keys = jax.random.split(jax.random.key(seed), number)
    return [Request(p, k, ANSWER, temperature=TEMPERATURE, **settings) for p, k in zip(prompts, keys, strict=True)]


def start_engine(subject: Subject, slots: int, kept: int = 0) -> Engine:
    """An engine whose slots hold any of the requests."""
    length = PROMPT + ANSWER
    return Engine(subject.policy, subject.params, slots=slots, slot_length=length, banned=BANNED, kept=kept)


# F7 ---------------------------------------------------------------------------------------------------


def measure_ratio(subject: Subject, tokens: int, support: str) -> dict:
    """|log rho| over at least so many sampled tokens."""
    settings = SUPPORTS[support]
    requests = make_requests(subject, -(-tokens // ANSWER), seed=1, **settings)
    with start_engine(subject, SLOTS, settings.get("top_k", 0)) as engine:
        done = engine.generate(requests)
    score = jax.jit(partial(logprobs, subject.policy, temperature=TEMPERATURE, banned=BANNED))
    log_rho, entropy = [], []
    for start in range(0, len(requests), ROWS):
        group = list(zip(requests[start : start + ROWS], done[start : start + ROWS], strict=True))
        tokens_rs, segments_rs, sampled_rs, logp_rs, kept = padded(group)
        scores = score(subject.params, tokens_rs, segments=segments_rs, kept=kept)
        log_rho.append((np.asarray(scores.logp) - logp_rs)[sampled_rs])
        entropy.append(np.asarray(scores.entropy)[sampled_rs])
    off = np.abs(np.concatenate(log_rho).astype(np.float64))
    return {
        "model": subject.name,
        "dtype": subject.dtype,
        "support": support,
        "tokens": len(off),
        "entropy": round(float(np.concatenate(entropy).mean()), 2),
        "max": float(f"{off.max():.3g}"),
        "p999": float(f"{np.quantile(off, 0.999):.3g}"),
        "mean": float(f"{off.mean():.3g}"),
        "over_bar": int((off > BAR).sum()),
    }


def padded(group: Sequence[tuple[Request, Completion]]) -> tuple:
    """Tokens, segments, which were sampled with what log-probability, and recorded sets, in rows of one length."""
    tokens_rs, segments_rs = np.zeros((2, ROWS, LENGTH), np.int32)
    sampled_rs, logp_rs, kept = np.zeros(tokens_rs.shape, bool), np.zeros(tokens_rs.shape, np.float32), None
    for row, (request, done) in enumerate(group):
        begin, end = len(request.tokens), len(request.tokens) + len(done.tokens)
        tokens_rs[row, :end] = [*request.tokens, *done.tokens]
        segments_rs[row, :end] = 1
        sampled_rs[row, begin:end] = True
        logp_rs[row, begin:end] = done.logp
        if done.kept is not None:
            kept = np.full((*tokens_rs.shape, done.kept.shape[1]), -1, np.int32) if kept is None else kept
            kept[row, begin:end] = done.kept
    return tokens_rs, segments_rs, sampled_rs, logp_rs, kept


# E3 ---------------------------------------------------------------------------------------------------


def measure_widths(subject: Subject) -> tuple[list[dict], list[dict]]:
    """For each width, whether bits depend on the company and how far it is from the widest; and the near-ties."""
    requests = make_requests(subject, _REQUESTS.value, seed=2)
    order = np.random.default_rng(0).permutation(len(requests)).tolist()
    rows, ties, widest = [], [], None
    for width in sorted(_WIDTHS.value, reverse=True):
        with start_engine(subject, width) as engine:
            together = engine.generate(requests)
            shuffled = engine.generate([requests[i] for i in order])
            alone = [engine.generate([request])[0] for request in requests]
        widest = together if widest is None else widest
        same = [bits(alone) == bits(together), bits(shuffled) == bits([together[i] for i in order])]
        pairs = [compare(one, other) for one, other in zip(widest, together, strict=True)]
        parted = [{"width": width, "request": i} | tie for i, (_, tie) in enumerate(pairs) if tie]
        ties += parted
        row = {"model": subject.name, "width": width, "requests": len(requests)}
        row |= {"tokens": sum(len(done.tokens) for done in together)}
        row |= {"alone_equal": same[0], "shuffled_equal": same[1], "max_off": max(off for off, _ in pairs)}
        rows.append(row | {"parted": len(parted), "not_near": sum(tie["margin"] >= NEAR for tie in parted)})
    return rows, ties


def bits(completions: Sequence[Completion]) -> list[tuple]:
    """Extract the tokens and log-probabilities of completions, which must be equal to the bit."""
    return [(list(done.tokens), list(done.logp)) for done in completions]


def compare(one: Completion, other: Completion) -> tuple[float, dict]:
    """The largest difference of log-probabilities up to the first other token, and that token where there is one."""
    length = min(len(one.tokens), len(other.tokens))
    parted = next((at for at in range(length) if one.tokens[at] != other.tokens[at]), length)
    off = np.abs(np.array(one.logp[:parted], np.float64) - np.array(other.logp[:parted], np.float64))
    most = float(f"{off.max(initial=0.0):.3g}")
    if parted == length:
        return most, {}
    margin = min(one.margin[parted], other.margin[parted])
    pair = [int(done.tokens[parted]) for done in (one, other)]
    return most, {"position": parted, "tokens": pair, "margin": float(f"{margin:.3g}")}


# The command ------------------------------------------------------------------------------------------


def main() -> None:
    """Measure, print the tables and one JSON line."""
    ratios, widths, ties = [], [], []
    counts = {"float32": _TOKENS.value, "bfloat16": _HALF_TOKENS.value}
    subjects = [open_subject(name, dtype) for name in _MODELS.value for dtype in counts if counts[dtype]]
    for subject, support in counted("ratio", list(product(subjects, SUPPORTS))):
        ratios.append(measure_ratio(subject, counts[subject.dtype], support))
    show_lines(ratios)
    for subject in counted("widths", [one for one in subjects if one.dtype == "float32"]):
        found, parted = measure_widths(subject)
        widths, ties = widths + found, ties + [{"model": subject.name} | tie for tie in parted]
    show_lines(widths)
    show_lines(ties)
    print(json.dumps({"benchmark": "exactness", "bar": BAR, "ratio": ratios, "widths": widths, "near_ties": ties}))


if __name__ == "__main__":
    common.run(main)
