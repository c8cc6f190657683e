"""How exact log-probabilities are: every path against float64, the ratio (F7), a request at other widths (E3), a price.

    python -m experiments.benchmarks.exactness --models=smollm2,gemma3
    python -m experiments.benchmarks.exactness --models=x.gguf --lengths=60,300 --modes=fast
    python -m experiments.benchmarks.exactness --parts=ratio,widths --models=small --tokens=2000 --requests=16
    python -m experiments.benchmarks.exactness --parts=price --cpu_devices=2

`paths` (`exactness_paths`): log-probabilities of real weights that are sampled (after fresh prompts, copied and
appended caches), scored as rows, and echoed by a gateway, against a forward pass in NumPy and float64 (`float64`), by
position; in both modes, each in a process of its own: `fast`, and `exact` as `launch.configure(exact=True)` makes it.
The bar is 2e-5; what is above it is counted.

F7: requests through the engine at temperature 0.7; then `logprobs` scores every sampled token again in padded rows, as
a trainer does, in other shapes than the engine's. `max`, `p999` and `mean` are of |log rho|, the difference between the
two; `entropy` is the mean of the distributions in nats. The bar is 1e-5 in float32; for bfloat16, with fewer tokens,
the figure is given as it is.

E3: the same requests at several widths of the engine. At one width, alone, together and shuffled, all bits must be
equal. Against the widest, log-probabilities must agree within 1e-5 up to the first other token, and that must be a
near-tie, of a margin below 1e-4; each is listed.

`price` (`exactness_price`): seconds of decoding and of an update over those without each of the means to it, in turn.

`ratio` and `widths` take random models, too: `small` has 4.07 M parameters and a vocabulary of 512, its init scale
raised from 0.02 to 0.14 so that it is as sure of its tokens as a trained model is, and its layers unrolled; `tiny` has
every feature on, its layers are stacked, and the tests decode with it.

Measured with those on a CPU with AVX2: F7 in float32 over 10,048 tokens 1e-6 with both models, the rounding of the
log-probability itself; in bfloat16, where sums go in other orders, 0.03 to 0.06. E3: all bits equal, at every width and
between widths. A single sum in another order would show as 1e-5 and more, since `small` enlarges such an error a
hundredfold.
"""

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

from absl import flags

from ..cli import app
from ..cli.help import flag_heading

PARTS = ("paths", "ratio", "widths", "price")
MODES = ("fast", "exact")
RANDOM = ("small", "tiny")
# Of the user: `launch.configure` adds what suits this process's mode, and not that of others.
ENVIRONMENT = dict(os.environ)

flag_heading("What is run")
_PARTS = flags.DEFINE_list("parts", ["paths"], f"Any of {', '.join(PARTS)}.")
_MODELS = flags.DEFINE_list("models", ["smollm2"], f"Folders, GGUF files, names; {', '.join(RANDOM)} but in `paths`.")
_MODES = flags.DEFINE_list("modes", list(MODES), f"Of `paths`: any of {', '.join(MODES)}.")
flag_heading("Sizes")
_LENGTHS = flags.DEFINE_list("lengths", ["60", "250", "700", "1500"], "Tokens of the contexts of `paths`.")
_TOKENS = flags.DEFINE_integer("tokens", 10_240, "Tokens sampled for each float32 figure of F7.", lower_bound=1)
_HALF_TOKENS = flags.DEFINE_integer("half_tokens", 2048, "Tokens for each bfloat16 figure.", lower_bound=0)
_REQUESTS = flags.DEFINE_integer("requests", 64, "Requests of E3.", lower_bound=1)
_WIDTHS = flags.DEFINE_multi_integer("widths", [1, 2, 4, 8, 16], "Widths of the engine.", lower_bound=1)

_REPEATS = flags.DEFINE_integer("repeats", 9, "Rounds of `price`.", lower_bound=1)

app.read_flags(__name__)

import jax
import jax.numpy as jnp
import numpy as np

from flowgrpo.contracts import Completion, Request
from flowgrpo.generate.engine import Engine
from flowgrpo.generate.sampler import logprobs, margin
from flowgrpo.models.decoder import make_policy
from flowgrpo.models.hf import Model, init_model, load_model
from flowgrpo.report.progress import with_progress
from flowgrpo.report.tables import show_lines, significant
from flowgrpo.types import BadInput

from . import ceilings, exactness_paths, exactness_price, shapes
from .measuring import apart, check_known, print_result, whole_numbers

SCALE, TEMPERATURE, BANNED = 0.14, 0.7, (0,)
BAR, NEAR = 1e-5, 1e-4  # of log-probabilities, and of the margin of a near-tie
PROMPT, ANSWER = 48, 64  # most tokens of a prompt and of an answer
ROWS, LENGTH, SLOTS = 24, 160, 16  # of the rows that are scored, and of the engine: deliberately not the same shapes


def _open_model(name: str, dtype: str) -> Model:
    """One of the two random models, or a checkpoint."""
    if name == "tiny":
        policy = make_policy(ceilings.TINY, dtype=jnp.dtype(dtype))
        return Model(policy, policy.init(jax.random.key(0)), None, ceilings.TINY, {})
    if name in shapes.SHAPES:
        model = init_model(shapes.SHAPES[name] | {"initializer_range": SCALE}, jax.random.key(0), dtype=dtype)
        return model._replace(policy=make_policy(model.config, dtype=jnp.dtype(dtype), unroll=True))
    return load_model(name, dtype=dtype, text=False)


def _make_requests(model: Model, number: int, *, seed: int) -> list[Request]:
    """Requests with prompts of several lengths, all answered at full length."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(1, model.config.v, rng.integers(2, PROMPT + 1)).tolist() for _ in range(number)]
    keys = jax.random.split(jax.random.key(seed), number)
    return [Request(p, k, ANSWER, temperature=TEMPERATURE) for p, k in zip(prompts, keys, strict=True)]


def _start_engine(model: Model, slots: int) -> Engine:
    """An engine whose slots hold any of the requests."""
    return Engine(model.policy, model.params, slots=slots, slot_length=PROMPT + ANSWER, banned=BANNED)


def _measure_ratio(model: Model, tokens: int) -> dict:
    """|log rho| over at least so many sampled tokens."""
    requests = _make_requests(model, -(-tokens // ANSWER), seed=1)
    with _start_engine(model, SLOTS) as engine:
        done = engine.generate(requests)
    score = jax.jit(partial(logprobs, model.policy, temperature=TEMPERATURE, banned=BANNED))
    log_rho, entropy = [], []
    for start in range(0, len(requests), ROWS):
        group = list(zip(requests[start : start + ROWS], done[start : start + ROWS], strict=True))
        tokens_rs, segments_rs, sampled_rs, logp_rs = _padded(group)
        scores = score(model.params, tokens_rs, segments=segments_rs)
        log_rho.append((np.asarray(scores.logp) - logp_rs)[sampled_rs])
        entropy.append(np.asarray(scores.entropy)[sampled_rs])
    off = np.abs(np.concatenate(log_rho).astype(np.float64))
    return {
        "tokens": len(off),
        "entropy": round(float(np.concatenate(entropy).mean()), 2),
        "max": significant(off.max()),
        "p999": significant(np.quantile(off, 0.999)),
        "mean": significant(off.mean()),
        "over_bar": int((off > BAR).sum()),
    }


def _padded(group: Sequence[tuple[Request, Completion]]) -> tuple:
    """Tokens, segments, which were sampled with what log-probability, in rows of one length."""
    tokens_rs, segments_rs = np.zeros((2, ROWS, LENGTH), np.int32)
    sampled_rs, logp_rs = np.zeros(tokens_rs.shape, bool), np.zeros(tokens_rs.shape, np.float32)
    for row, (request, done) in enumerate(group):
        begin, end = len(request.tokens), len(request.tokens) + len(done.tokens)
        tokens_rs[row, :end] = [*request.tokens, *done.tokens]
        segments_rs[row, :end] = 1
        sampled_rs[row, begin:end] = True
        logp_rs[row, begin:end] = done.logp_sampled
    return tokens_rs, segments_rs, sampled_rs, logp_rs


def _measure_widths(model: Model) -> tuple[list[dict], list[dict]]:
    """For each width, whether bits depend on the company and how far it is from the widest; and the near-ties."""
    requests = _make_requests(model, _REQUESTS.value, seed=2)
    order = np.random.default_rng(0).permutation(len(requests)).tolist()
    rows, ties, widest = [], [], None
    for width in sorted(_WIDTHS.value, reverse=True):
        with _start_engine(model, width) as engine:
            together = engine.generate(requests)
            shuffled = engine.generate([requests[i] for i in order])
            alone = [engine.generate([request])[0] for request in requests]
        widest = together if widest is None else widest
        same = [_bits(alone) == _bits(together), _bits(shuffled) == _bits([together[i] for i in order])]
        pairs = [_compare(model, *each) for each in zip(requests, widest, together, strict=True)]
        parted = [{"width": width, "request": i} | tie for i, (_, tie) in enumerate(pairs) if tie]
        ties += parted
        row = {"width": width, "requests": len(requests), "tokens": sum(len(done.tokens) for done in together)}
        row |= {"alone_equal": same[0], "shuffled_equal": same[1], "max_off": max(off for off, _ in pairs)}
        rows.append(row | {"parted": len(parted), "not_near": sum(tie["margin"] >= NEAR for tie in parted)})
    return rows, ties


def _bits(completions: Sequence[Completion]) -> list[tuple]:
    """Extract the tokens and log-probabilities of completions, which must be equal to the bit."""
    return [(list(done.tokens), list(done.logp_sampled)) for done in completions]


def _compare(model: Model, request: Request, one: Completion, other: Completion) -> tuple[float, dict]:
    """The largest difference of log-probabilities up to the first other token, and that token where there is one."""
    length = min(len(one.tokens), len(other.tokens))
    parted = next((at for at in range(length) if one.tokens[at] != other.tokens[at]), length)
    off = np.abs(np.array(one.logp_sampled[:parted], np.float64) - np.array(other.logp_sampled[:parted], np.float64))
    most = significant(off.max(initial=0.0))
    if parted == length:
        return most, {}
    tokens = np.array([*request.tokens, *one.tokens[: parted + 1]], np.int32)
    sampled: dict[str, Any] = {"temperature": TEMPERATURE, "banned": BANNED}
    near = float(margin(model.policy, model.params, tokens, request.key, parted, **sampled))
    pair = [int(done.tokens[parted]) for done in (one, other)]
    return most, {"position": parted, "tokens": pair, "margin": significant(near)}


def main() -> None:
    """Measure, print the tables and one JSON line."""
    check_known(_PARTS, PARTS)
    check_known(_MODES, MODES)
    parts, lengths, paths = _PARTS.value, whole_numbers(_LENGTHS), []
    for name in _MODELS.value if "paths" in parts else []:
        if name in RANDOM:
            raise BadInput(f"--models={name} has random weights: give real ones, or --parts=ratio,widths")
        for mode in with_progress("paths", _MODES.value):
            asked = (name, mode == "exact", lengths)
            scored = apart(exactness_paths.measure_paths, *asked, environment=ENVIRONMENT)
            compared = apart(exactness_paths.compare_paths, name, scored)
            paths += [{"model": name, "mode": mode} | line for line in compared]
    show_lines(paths)
    ratios, widths, ties = [], [], []
    counts = {"float32": _TOKENS.value, "bfloat16": _HALF_TOKENS.value}
    cases = [(name, dtype) for name in _MODELS.value for dtype in counts if counts[dtype]]
    models = {case: _open_model(*case) for case in cases} if {"ratio", "widths"} & set(parts) else {}
    for name, dtype in with_progress("ratio", cases if "ratio" in parts else []):
        ratios.append({"model": name, "dtype": dtype} | _measure_ratio(models[name, dtype], counts[dtype]))
    show_lines(ratios)
    for name in with_progress("widths", _MODELS.value if "widths" in parts else []):
        for lines, found in zip((widths, ties), _measure_widths(models[name, "float32"]), strict=True):
            lines += [{"model": name} | line for line in found]
    show_lines(widths)
    show_lines(ties)
    prices = exactness_price.measure(_REPEATS.value) if "price" in parts else []
    show_lines(prices)
    print_result(
        "exactness",
        bar=BAR,
        float64_bar=exactness_paths.BAR,
        paths=paths,
        ratio=ratios,
        widths=widths,
        near_ties=ties,
        price=prices,
    )


if __name__ == "__main__":
    app.run(main, exact=True)
