"""Exactness of log-probabilities: every path against float64, the ratio (F7), requests at other widths (E3), the price.

    python -m experiments.benchmarks.exactness --models=smollm2,gemma3
    python -m experiments.benchmarks.exactness --models=x.gguf --lengths=60,300 --modes=fast
    python -m experiments.benchmarks.exactness --parts=ratio,widths --models=small --tokens=2000 --requests=16
    python -m experiments.benchmarks.exactness --parts=price --cpu_devices=2

`paths` (`exactness_paths`): log-probabilities of real weights that are sampled (after fresh prompts, copied and
appended caches), scored as rows, and echoed by a gateway, against a forward pass in NumPy and float64 (`float64`), by
position; in both modes, each in a new process: `fast`, and `exact` with `launch.configure(exact=True)`. Errors above
2e-5 are counted.

F7: requests through the engine at temperature 0.7; then `logprobs` scores every sampled token again in padded rows, as
a trainer does, in other shapes than the engine's. `max`, `p999` and `mean` are of |log rho|, the difference between the
two; `entropy` is the mean of the distributions in nats. The bound is 1e-5 in float32; for bfloat16, with fewer tokens,
there is none.

E3: the same requests at several widths of the engine. At one width, alone, together and shuffled, all bits must be
equal. Compared with the widest, log-probabilities must agree within 1e-5 up to the first different token, and that must
be a near-tie, with a margin below 1e-4; each is listed.

`price` (`exactness_price`): seconds of decoding and of an update relative to those without each of its safeguards.

`ratio` and `widths` accept random models, too: `small` has 4.07 M parameters and a vocabulary of 512, its init scale
raised from 0.02 to 0.14 so that its probabilities are as sharp as a trained model's, and its layers unrolled; `tiny`
has every feature on and stacked layers, and tests decode with it.

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
# The user's environment: `launch.configure` adds variables for this process's mode only.
ENVIRONMENT = dict(os.environ)

flag_heading("Run")
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
from flowgrpo.generate.engine import Engine, EngineSettings
from flowgrpo.generate.sampler import draw_margin, logprobs
from flowgrpo.models.decoder import make_policy
from flowgrpo.models.hf import Model, init_model, load_model
from flowgrpo.report.progress import with_progress
from flowgrpo.report.tables import show_lines, significant
from flowgrpo.types import BadInput

from . import ceilings, exactness_paths, exactness_price, shapes
from .measuring import check_known, in_new_process, print_result, whole_numbers

SCALE, TEMPERATURE, BANNED = 0.14, 0.7, (0,)
BAR, NEAR = 1e-5, 1e-4  # of log-probabilities, and of the margin of a near-tie
PROMPT, ANSWER = 48, 64  # most tokens of a prompt and of an answer
ROWS, LENGTH, SLOTS = 24, 160, 16  # of the scored rows, and of the engine: deliberately different shapes


def _open_model(name: str, dtype: str) -> Model:
    """One of the random models, or a checkpoint."""
    if name == "tiny":
        policy = make_policy(ceilings.TINY, dtype=jnp.dtype(dtype))
        return Model(policy, policy.init(jax.random.key(0)), None, ceilings.TINY, {})
    if name in shapes.SHAPES:
        model = init_model(shapes.SHAPES[name] | {"initializer_range": SCALE}, jax.random.key(0), dtype=dtype)
        return model._replace(policy=make_policy(model.config, dtype=jnp.dtype(dtype), unroll=True))
    return load_model(name, dtype=dtype, tokenizer=False)


def _make_requests(model: Model, number: int, *, seed: int) -> list[Request]:
    """Requests with prompts of different lengths, all with completions of full length."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(1, model.config.v, rng.integers(2, PROMPT + 1)).tolist() for _ in range(number)]
    keys = jax.random.split(jax.random.key(seed), number)
    return [Request(p, k, ANSWER, temperature=TEMPERATURE) for p, k in zip(prompts, keys, strict=True)]


def _start_engine(model: Model, slots: int) -> Engine:
    """An engine with slots for any of the requests."""
    return Engine(model.policy, model.params, EngineSettings(slots=slots, slot_length=PROMPT + ANSWER, banned=BANNED))


def _measure_ratio(model: Model, tokens: int) -> dict:
    """|log rho| over at least `tokens` sampled tokens."""
    requests = _make_requests(model, -(-tokens // ANSWER), seed=1)
    with _start_engine(model, SLOTS) as engine:
        completions = engine.generate(requests)
    score = jax.jit(partial(logprobs, model.policy, temperature=TEMPERATURE, banned=BANNED))
    log_rho, entropy = [], []
    for start in range(0, len(requests), ROWS):
        group = list(zip(requests[start : start + ROWS], completions[start : start + ROWS], strict=True))
        tokens_rs, segments_rs, sampled_rs, logp_rs = _to_rows(group)
        scores = score(model.params, tokens_rs, segments=segments_rs)
        log_rho.append((np.asarray(scores.logp) - logp_rs)[sampled_rs])
        entropy.append(np.asarray(scores.entropy)[sampled_rs])
    errors = np.abs(np.concatenate(log_rho).astype(np.float64))
    return {
        "tokens": len(errors),
        "entropy": round(float(np.concatenate(entropy).mean()), 2),
        "max": significant(errors.max()),
        "p999": significant(np.quantile(errors, 0.999)),
        "mean": significant(errors.mean()),
        "over_bar": int((errors > BAR).sum()),
    }


def _to_rows(group: Sequence[tuple[Request, Completion]]) -> tuple:
    """Tokens, segments, masks of sampled tokens and their log-probabilities, in rows of one length."""
    tokens_rs, segments_rs = np.zeros((2, ROWS, LENGTH), np.int32)
    sampled_rs, logp_rs = np.zeros(tokens_rs.shape, bool), np.zeros(tokens_rs.shape, np.float32)
    for row, (request, completion) in enumerate(group):
        start, end = len(request.tokens), len(request.tokens) + len(completion.tokens)
        tokens_rs[row, :end] = [*request.tokens, *completion.tokens]
        segments_rs[row, :end] = 1
        sampled_rs[row, start:end] = True
        logp_rs[row, start:end] = completion.logp_sampled
    return tokens_rs, segments_rs, sampled_rs, logp_rs


def _measure_widths(model: Model) -> tuple[list[dict], list[dict]]:
    """For each width, whether bits depend on other requests, and the distance from the widest; and the near-ties."""
    requests = _make_requests(model, _REQUESTS.value, seed=2)
    order = np.random.default_rng(0).permutation(len(requests)).tolist()
    rows, ties, widest = [], [], None
    for width in sorted(_WIDTHS.value, reverse=True):
        with _start_engine(model, width) as engine:
            completions = engine.generate(requests)
            shuffled = engine.generate([requests[i] for i in order])
            single = [engine.generate([request])[0] for request in requests]
        widest = completions if widest is None else widest
        is_equal = [_bits(single) == _bits(completions), _bits(shuffled) == _bits([completions[i] for i in order])]
        pairs = [_compare(model, *case) for case in zip(requests, widest, completions, strict=True)]
        differing = [{"width": width, "request": i} | tie for i, (_, tie) in enumerate(pairs) if tie]
        ties += differing
        row = {
            "width": width,
            "requests": len(requests),
            "tokens": sum(len(completion.tokens) for completion in completions),
        }
        row |= {"alone_equal": is_equal[0], "shuffled_equal": is_equal[1], "max_off": max(error for error, _ in pairs)}
        rows.append(row | {"parted": len(differing), "not_near": sum(tie["margin"] >= NEAR for tie in differing)})
    return rows, ties


def _bits(completions: Sequence[Completion]) -> list[tuple]:
    """Tokens and log-probabilities of completions, to be compared bit by bit."""
    return [(list(completion.tokens), list(completion.logp_sampled)) for completion in completions]


def _compare(model: Model, request: Request, first: Completion, second: Completion) -> tuple[float, dict]:
    """Largest difference of log-probabilities up to the first different token, and that token if there is one."""
    length = min(len(first.tokens), len(second.tokens))
    difference_at = next((i for i in range(length) if first.tokens[i] != second.tokens[i]), length)
    errors = np.abs(
        np.array(first.logp_sampled[:difference_at], np.float64)
        - np.array(second.logp_sampled[:difference_at], np.float64)
    )
    largest = significant(errors.max(initial=0.0))
    if difference_at == length:
        return largest, {}
    tokens = np.array([*request.tokens, *first.tokens[: difference_at + 1]], np.int32)
    sampled: dict[str, Any] = {"temperature": TEMPERATURE, "banned": BANNED}
    margin = float(draw_margin(model.policy, model.params, tokens, request.key, difference_at, **sampled))
    pair = [int(completion.tokens[difference_at]) for completion in (first, second)]
    return largest, {"position": difference_at, "tokens": pair, "margin": significant(margin)}


def main() -> None:
    """Measure, print the tables and one JSON line."""
    check_known(_PARTS, PARTS)
    check_known(_MODES, MODES)
    parts, lengths, paths = _PARTS.value, whole_numbers(_LENGTHS), []
    for name in _MODELS.value if "paths" in parts else []:
        if name in RANDOM:
            raise BadInput(f"--models={name} has random weights: give real ones, or --parts=ratio,widths")
        for mode in with_progress("paths", _MODES.value):
            arguments = (name, mode == "exact", lengths)
            scored = in_new_process(exactness_paths.measure_paths, *arguments, environment=ENVIRONMENT)
            compared = in_new_process(exactness_paths.compare_paths, name, scored)
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
        for lines, new_lines in zip((widths, ties), _measure_widths(models[name, "float32"]), strict=True):
            lines += [{"model": name} | line for line in new_lines]
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
