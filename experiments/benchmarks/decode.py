"""Tokens a second of decoding: blocks of rows alone, and the engine's continuous batching against them.

    python -m experiments.benchmarks.decode
    python -m experiments.benchmarks.decode --torch          (needs the extra [oracle])
    python -m experiments.benchmarks.decode --model=PATH --rows=16 --tokens=128 --requests=0

Blocks: `decode` alone after a prefill, as a share of the machine's measured bandwidth (weights and the filled part of
the cache are read once a step) and of its matrix-product rate; `--torch` runs transformers' `generate`
on the same shape in turn, prompts included on both sides. Engine: requests of lognormal lengths against as many slots
decoding without a gap, prompts and bookkeeping not included; `compiled` counts programs during warm-up and after it.
Medians of several runs, which alternate. No stop ids, so lengths are exact.

Measured on two shared cores with the small model: 64 x 64 at 1.3 of PyTorch and 16 x 128 at 1.75; the engine at 0.53 of
the slots without gaps, of which 0.9 can be reached, since its last requests decode among empty slots. Of its time a
fifth goes into prompts, 7 ms each; a step takes 7.3 ms and not 4.9, because some rows are longer than the mean, and
each 128 tokens more of the longest row cost every row. 7 programs are compiled in the first requests and none after.
Three to six minutes.
"""

import json
import os
import statistics
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments import common
from experiments.benchmarks import ceilings
from experiments.benchmarks.measured import seconds, show_columns, significant
from experiments.headings import heading
from flowgrpo.contracts import Request
from flowgrpo.generate.engine import Engine
from flowgrpo.generate.jobs import MAX_STOPS
from flowgrpo.generate.sampler import MAX_KEPT, decode, prefill, sampling, start_rows
from flowgrpo.models.hf import Model
from flowgrpo.report.progress import counted
from flowgrpo.types import BadInput

heading("What is run")
_MODEL = flags.DEFINE_string("model", "small", f"{', '.join(ceilings.SHAPES)}, a model folder, or a hub id.")
_TORCH = flags.DEFINE_bool("torch", False, "Run transformers' generate in PyTorch too.")
heading("Sizes")
_ROWS = flags.DEFINE_list("rows", ["64", "16"], "Rows of each block.")
_PROMPT = flags.DEFINE_integer("prompt", 32, "Tokens of every prompt.", lower_bound=2)
_TOKENS = flags.DEFINE_list("tokens", ["64", "128"], "Tokens sampled in each row, for each block.")
_REQUESTS = flags.DEFINE_integer("requests", 256, "Requests to the engine; 0 leaves it out.", lower_bound=0)
_SLOTS = flags.DEFINE_integer("slots", 16, "Slots of the engine.", lower_bound=1)
_MEAN = flags.DEFINE_integer("mean", 64, "Mean tokens of a request.", lower_bound=1)
_SIGMA = flags.DEFINE_float("sigma", 0.5, "Spread of the logarithm of the requests' lengths.", lower_bound=0.0)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Runs of which the median counts.", lower_bound=1)

COMPILED = "/jax/core/compile/backend_compile_duration"  # reported once for each program


# Blocks -----------------------------------------------------------------------------------------------


class Block:
    """Rows that decode together from start to end, with caches of `length` slots."""

    def __init__(self, model: Model, rows: int, tokens: int, length: int):
        self.model, self.rows, self.tokens, self.length = model, rows, tokens, length
        self._prefill = jax.jit(partial(prefill, model.policy), donate_argnums=1)
        self._decode = jax.jit(partial(decode, model.policy, steps=tokens), donate_argnums=1)
        self._prompts = random_tokens(model, (rows, _PROMPT.value), seed=rows)

    def run(self) -> tuple[float, float]:
        """Seconds of the prefill, and of decoding every token."""
        before, last = self._prompts[:, :-1], self._prompts[:, -1]
        make_cache = self.model.policy.make_cache
        assert make_cache is not None
        cache = jax.block_until_ready(make_cache(self.rows, self.length))
        filled = []
        work = partial(self._prefill, self.model.params, cache, before, np.ones(before.shape, bool))
        prefilled = seconds(lambda: filled.append(work()) or filled)
        keys = jax.random.split(jax.random.key(0), self.rows)
        rows = start_rows(filled.pop(), jnp.asarray(last), keys, jnp.full(self.rows, self.tokens))
        nothing = np.full((self.rows, MAX_STOPS), -1, np.int32)
        work = partial(self._decode, self.model.params, rows, sampling(self.rows), nothing)
        return prefilled, seconds(work)


def random_tokens(model: Model, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Prompts of no meaning."""
    return np.random.default_rng(seed).integers(0, model.config.v, shape, np.int32)


def measure_block(model: Model, rows: int, tokens: int, most: ceilings.Ceilings, peer: Callable | None) -> dict:
    """Speed of one block, its shares of the ceilings, and the ratio to the peer where there is one."""
    block = Block(model, rows, tokens, _PROMPT.value + tokens)
    generate = peer(rows, tokens) if peer else None
    runs = []
    for _ in range(1 + _REPEATS.value):  # the first compiles
        runs.append((*block.run(), generate() if generate else 0.0))
    prefilled, decoding, peers = (statistics.median(column) for column in zip(*runs[1:], strict=True))
    seen, step = _PROMPT.value + tokens / 2, decoding / tokens
    moved = ceilings.step_bytes(model.params, model.config, rows, seen)
    flops = ceilings.forward_flops(model.params, model.config, rows, seen)
    result = {
        "rows": rows,
        "tokens": tokens,
        "tokens_per_second": round(rows / step),
        "step_ms": round(1e3 * step, 3),
        "of_bandwidth": significant(moved / most.bandwidth / step),
        "of_flops": significant(flops / most.flops / step),
        "prefill_seconds": round(prefilled, 4),
    }
    if generate:
        result["torch_tokens_per_second"] = round(rows * tokens / peers)
        result["over_torch"] = significant(peers / (prefilled + decoding))
    return result


# The engine -------------------------------------------------------------------------------------------


def measure_engine(model: Model) -> dict:
    """Real tokens a second of the engine over those of its slots without a gap, and what was compiled when."""
    compiled = []
    length = _PROMPT.value + 4 * _MEAN.value
    block = Block(model, _SLOTS.value, _MEAN.value, length)
    block.run()
    # Made beforehand, so that all that is compiled while the engine runs is the engine's.
    first = requests(model, 2 * _SLOTS.value, seed=0)
    crowds = [requests(model, _REQUESTS.value, seed) for seed in range(1, 1 + _REPEATS.value)]
    listen = partial(_note, compiled)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        with Engine(model.policy, model.params, slots=_SLOTS.value, slot_length=length) as engine:
            engine.generate(first)
            warm_up = len(compiled)
            runs = [(measure_requests(engine, crowd), block.run()[1]) for crowd in crowds]
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    speeds, gapless = zip(*runs, strict=True)
    whole = _SLOTS.value * _MEAN.value
    return {
        "requests": _REQUESTS.value,
        "slots": _SLOTS.value,
        "tokens_per_second": round(statistics.median(speeds)),
        "gapless_tokens_per_second": round(whole / statistics.median(gapless)),
        "over_gapless": significant(statistics.median(speed * took / whole for speed, took in runs)),
        "compiled_in_warm_up": warm_up,
        "compiled_after": len(compiled) - warm_up,
    }


def measure_requests(engine: Engine, asked: list[Request]) -> float:
    """Sampled tokens a second of one crowd of requests."""
    got = []
    took = seconds(lambda: got.extend(engine.generate(asked)))
    assert [len(done.tokens) for done in got] == [request.max_tokens for request in asked]
    return sum(request.max_tokens for request in asked) / took


def requests(model: Model, number: int, seed: int) -> list[Request]:
    """Requests of lognormal lengths, cut at four times the mean; no prompt comes twice."""
    rng = np.random.default_rng(seed)
    length_n = rng.lognormal(np.log(_MEAN.value) - _SIGMA.value**2 / 2, _SIGMA.value, number)
    length_n = length_n.clip(1, 4 * _MEAN.value).astype(int).tolist()
    prompts = random_tokens(model, (number, _PROMPT.value), seed).tolist()
    keys = jax.random.split(jax.random.key(seed), number)
    return [Request(p, k, n, top_k=MAX_KEPT) for p, k, n in zip(prompts, keys, length_n, strict=True)]


def _note(compiled: list[float], event: str, duration_secs: float, **_: str | int) -> None:
    if event == COMPILED:
        compiled.append(duration_secs)


# The peer ---------------------------------------------------------------------------------------------


def open_peer(model: Model) -> Callable:
    """transformers' model of the same shape: (rows, tokens) -> a function that generates and returns its seconds."""
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        raise BadInput(f"--torch needs {' and '.join(missing)}: python -m pip install '.[oracle]', or leave it out")
    import torch
    import transformers

    path = _MODEL.value
    if path in ceilings.SHAPES:
        config = transformers.AutoConfig.for_model(**ceilings.SHAPES[path])
        peer = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    else:
        peer = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert peer.num_parameters() == ceilings.count(model.params)
    return partial(_peer_block, peer.eval(), model)


def _peer_block(peer, model: Model, rows: int, tokens: int) -> Callable[[], float]:
    import torch

    prompts = torch.from_numpy(random_tokens(model, (rows, _PROMPT.value), seed=rows)).long()
    sampled = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0, "pad_token_id": 0}
    lengths = {"min_new_tokens": tokens, "max_new_tokens": tokens, "eos_token_id": None}
    seen = torch.ones_like(prompts)

    def generate() -> float:
        with torch.inference_mode():
            return seconds(lambda: len(peer.generate(prompts, attention_mask=seen, **sampled, **lengths)))

    return generate


# The command ------------------------------------------------------------------------------------------


def blocks() -> list[tuple[int, int]]:
    """(rows, tokens) of each block, as the flags say."""
    pairs = []
    for name, values in (("rows", _ROWS.value), ("tokens", _TOKENS.value)):
        if not all(value.isdecimal() and int(value) > 0 for value in values):
            raise BadInput(f"--{name}={','.join(values)} must be a comma-separated list of positive integers")
        pairs.append([int(value) for value in values])
    if len(pairs[0]) != len(pairs[1]):
        raise BadInput(f"--rows has {len(pairs[0])} entries and --tokens {len(pairs[1])}: give one of each a block")
    return list(zip(*pairs, strict=True))


def main() -> None:
    """Measure, print the tables and one JSON line."""
    # PyTorch's threads spin while they wait, which on shared cores makes it ten times slower. It must be said before
    # anything imports it, as opening a model may.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    pairs = blocks()
    model = ceilings.open_model(_MODEL.value)
    peer = open_peer(model) if _TORCH.value else None
    most = ceilings.measure()
    measured = [measure_block(model, rows, tokens, most, peer) for rows, tokens in counted("block", pairs)]
    show_columns(measured)
    engine = [measure_engine(model) for _ in counted("engine", [model] if _REQUESTS.value else [])]
    show_columns(engine)
    result = {"benchmark": "decode", "model": _MODEL.value, "params": ceilings.count(model.params)}
    result |= {"gflops": round(most.flops / 1e9, 1), "gbytes": round(most.bandwidth / 1e9, 1)}
    print(json.dumps(result | {"blocks": measured, "engine": engine[0] if engine else None}))


if __name__ == "__main__":
    common.run(main)
