"""Tokens per second of decoding: blocks of rows alone, and the engine's continuous batching against them.

    python -m experiments.benchmarks.decode
    python -m experiments.benchmarks.decode --model=PATH --rows=16 --tokens=128 --requests=0

Blocks: `decode` alone after a prefill, as a fraction of the machine's measured bandwidth (weights and the filled part
of the cache are read once per step) and of its matrix-product rate. Engine: requests of lognormal lengths against the
same number of slots decoding without gaps, prompts and bookkeeping not included; `compiled` counts programs during
warm-up and after it. Medians of several alternating runs. No stop ids, so lengths are exact. In `benchmarks.peers`,
other systems decode the same blocks.

Measured on two shared cores with the small model, before its layers were unrolled: the engine at 0.53 of the slots
without gaps, of which 0.9 can be reached, since its last requests decode next to empty slots. 7 programs are compiled
in the first requests and none after. Three to six minutes.
"""

import statistics

from absl import flags

from ..cli import app
from ..cli.help import flag_heading
from .shapes import SHAPES

flag_heading("Run")
_MODEL = flags.DEFINE_string("model", "small", f"{', '.join(SHAPES)}, a model folder, or a hub id.")
flag_heading("Sizes")
_ROWS = flags.DEFINE_list("rows", ["64", "16"], "Rows of each block.")
_PROMPT = flags.DEFINE_integer("prompt", 32, "Tokens of every prompt.", lower_bound=2)
_TOKENS = flags.DEFINE_list("tokens", ["64", "128"], "Tokens sampled in each row, for each block.")
_REQUESTS = flags.DEFINE_integer("requests", 256, "Requests to the engine; 0 omits it.", lower_bound=0)
_SLOTS = flags.DEFINE_list("slots", ["16"], "Numbers of slots of the engine, one run each.")
_MEAN = flags.DEFINE_integer("mean", 64, "Mean tokens of a request.", lower_bound=1)
_SIGMA = flags.DEFINE_float("sigma", 0.5, "Spread of the logarithm of the requests' lengths.", lower_bound=0.0)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Number of runs; their median is reported.", lower_bound=1)

app.read_flags(__name__)

import jax
import jax.numpy as jnp
import numpy as np

from flowgrpo.contracts import Request
from flowgrpo.generate.engine import Engine, EngineSettings
from flowgrpo.generate.requests import MAX_STOPS
from flowgrpo.generate.sampler import MAX_TOP_K, decode, make_sampling, prefill, start_rows
from flowgrpo.models.hf import Model
from flowgrpo.planning.cost_model import count_parameters, forward_flops
from flowgrpo.report.progress import with_progress
from flowgrpo.report.tables import medians, seconds, show_columns, significant, timed
from flowgrpo.types import BadInput

from . import ceilings, measuring

COMPILED = "/jax/core/compile/backend_compile_duration"  # reported once for each program


class Block:
    """Rows that decode together from start to end, with caches of `length` slots."""

    def __init__(self, model: Model, rows: int, tokens: int, length: int):
        self.model, self.rows, self.tokens, self.length = model, rows, tokens, length
        self._prefill = jax.jit(prefill, static_argnums=0, donate_argnums=2)
        self._decode = jax.jit(decode, static_argnums=0, static_argnames="steps", donate_argnums=2)
        self._prompts = random_tokens(model, (rows, _PROMPT.value), seed=rows)

    def run(self) -> tuple[float, float]:
        """Seconds of the prefill, and of decoding every token."""
        policy, params = self.model.policy, self.model.params
        before, last = self._prompts[:, :-1], self._prompts[:, -1]
        assert policy.make_cache is not None
        empty = jax.block_until_ready(policy.make_cache(self.rows, self.length))
        prefilled, cache = timed(lambda: self._prefill(policy, params, empty, before, np.ones(before.shape, bool)))
        keys = jax.random.split(jax.random.key(0), self.rows)
        rows = start_rows(cache, jnp.asarray(last), keys, jnp.full(self.rows, self.tokens))
        settings, nothing = make_sampling(self.rows), np.full((self.rows, MAX_STOPS), -1, np.int32)
        return prefilled, seconds(lambda: self._decode(policy, params, rows, settings, nothing, steps=self.tokens))


def random_tokens(model: Model, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Random prompts."""
    return np.random.default_rng(seed).integers(0, model.config.v, shape, np.int32)


def measure_block(model: Model, rows: int, tokens: int, ceiling: ceilings.Ceilings) -> dict:
    """Speed of one block, and its fractions of the ceilings."""
    block, runs = Block(model, rows, tokens, _PROMPT.value + tokens), []
    for _ in range(1 + _REPEATS.value):
        prefilled, decoding = block.run()
        runs.append({"prefill": prefilled, "decoding": decoding})
    durations = medians(runs)
    context, step = _PROMPT.value + tokens / 2, durations["decoding"] / tokens
    moved = ceilings.step_bytes(model.params, model.config, rows, context)
    return {
        "rows": rows,
        "tokens": tokens,
        "tokens_per_second": round(rows / step),
        "step_ms": round(1e3 * step, 3),
        "of_bandwidth": significant(moved / ceiling.bandwidth / step),
        "of_flops": significant(forward_flops(model.config, rows, context) / ceiling.flops / step),
        "prefill_seconds": round(durations["prefill"], 4),
    }


def measure_engine(model: Model, slots: int) -> dict:
    """Tokens per second of the engine relative to its slots without gaps, its memory, and compiled programs."""
    length = _PROMPT.value + 4 * _MEAN.value
    block = Block(model, slots, _MEAN.value, length)
    block.run()
    # made first, so that everything that is compiled while the engine runs is the engine's
    first = requests(model, 2 * slots, seed=0)
    request_sets = [requests(model, _REQUESTS.value, seed) for seed in range(1, 1 + _REPEATS.value)]
    compiled = []

    def note(event: str, duration_secs: float, **_: str | int) -> None:
        compiled.extend([duration_secs] if event == COMPILED else [])

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        with Engine(model.policy, model.params, EngineSettings(slots=slots, slot_length=length)) as engine:
            engine.generate(first)
            warm_up = len(compiled)
            runs = [(measure_requests(engine, request_set), block.run()[1]) for request_set in request_sets]
            slots_bytes = engine.release()
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    speeds, gapless = zip(*runs, strict=True)
    token_count = slots * _MEAN.value
    return {
        "requests": _REQUESTS.value,
        "slots": slots,
        "slots_mib": round(slots_bytes / 2**20, 1),
        "tokens_per_second": round(statistics.median(speeds)),
        "gapless_tokens_per_second": round(token_count / statistics.median(gapless)),
        "over_gapless": significant(statistics.median(speed * duration / token_count for speed, duration in runs)),
        "compiled_in_warm_up": warm_up,
        "compiled_after": len(compiled) - warm_up,
    }


def measure_requests(engine: Engine, asked: list[Request]) -> float:
    """Sampled tokens a second of one crowd of requests."""
    took, done = timed(lambda: engine.generate(asked))
    assert [len(one.tokens) for one in done] == [request.max_tokens for request in asked]
    return sum(request.max_tokens for request in asked) / took


def requests(model: Model, number: int, seed: int) -> list[Request]:
    """Requests of lognormal lengths, cut at four times the mean; no prompt comes twice."""
    rng = np.random.default_rng(seed)
    length_n = rng.lognormal(np.log(_MEAN.value) - _SIGMA.value**2 / 2, _SIGMA.value, number)
    length_n = length_n.clip(1, 4 * _MEAN.value).astype(int).tolist()
    prompts = random_tokens(model, (number, _PROMPT.value), seed).tolist()
    keys = jax.random.split(jax.random.key(seed), number)
    return [Request(p, k, n, top_k=MAX_TOP_K) for p, k, n in zip(prompts, keys, length_n, strict=True)]


def main() -> None:
    """Measure, print the tables and one JSON line."""
    rows, tokens, slots = (measuring.whole_numbers(flag) for flag in (_ROWS, _TOKENS, _SLOTS))
    if len(rows) != len(tokens):
        raise BadInput(f"--rows has {len(rows)} entries and --tokens {len(tokens)}: give one of each a block")
    pairs = list(zip(rows, tokens, strict=True))
    model = ceilings.open_model(_MODEL.value)
    most = ceilings.measure_ceilings()
    blocks = [measure_block(model, *pair, most) for pair in with_progress("block", pairs)]
    show_columns(blocks)
    engine = [measure_engine(model, count) for count in with_progress("engine", slots if _REQUESTS.value else [])]
    show_columns(engine)
    measuring.print_result(
        "decode",
        model=_MODEL.value,
        params=count_parameters(model.config),
        gflops=round(most.flops / 1e9, 1),
        gbytes=round(most.bandwidth / 1e9, 1),
        blocks=blocks,
        engine=engine,
    )


if __name__ == "__main__":
    app.run(main)
