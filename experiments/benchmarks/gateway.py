"""Tokens per second of many agents behind a gateway, relative to the engine alone, and latencies of their requests.

    python -m experiments.benchmarks.gateway
    python -m experiments.benchmarks.gateway --sessions=64 --latency=0

Every session makes the same number of requests, and its tool takes `--latency` seconds after each response. The agents
are coroutines in their own process. The engine alone gets the same requests, all at once, so that it never waits for a
tool. Medians of several alternating runs; latencies are those that the agents see.

Measured on two cores with AVX-512, agents included, a model of 0.4 M parameters, three rounds: 200 sessions of 3 turns
and 32 tokens with a latency of 0.5 s reach 3,231 tokens per second, 0.57 (0.56 to 0.60) of the engine alone; half of
the requests take 1.1 s, one in a hundred 1.6. All sessions start at once, so they wait for their tools together:
without a latency it is 0.72 (0.65 to 0.75). A minute.
"""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from absl import flags

from ..cli import app
from ..cli.help import flag_heading

flag_heading("Sizes")
_SESSIONS = flags.DEFINE_integer("sessions", 200, "Concurrent agents.", lower_bound=1)
_TURNS = flags.DEFINE_integer("turns", 3, "Requests of each agent.", lower_bound=1)
_TOKENS = flags.DEFINE_integer("tokens", 32, "Most tokens of a response.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Number of runs; their median is reported.", lower_bound=1)
flag_heading("Costs")
_LATENCY = flags.DEFINE_float("latency", 0.5, "Seconds that a tool takes.", lower_bound=0.0)
flag_heading("Devices and memory")
_SLOTS = flags.DEFINE_integer(
    "slots",
    None,
    "Slots of the engine, by default one per session; with fewer, sessions wait for others to end.",
    lower_bound=2,
)

app.read_flags(__name__)

import jax
import numpy as np

from flowgrpo.contracts import Completion, Request
from flowgrpo.gateway.agent_env import agent_env
from flowgrpo.gateway.agents import AgentHost
from flowgrpo.gateway.server import Gateway
from flowgrpo.generate.engine import Engine, EngineSettings
from flowgrpo.models.hf import Model, load_model
from flowgrpo.recipes.offline_start import write_model
from flowgrpo.report.progress import with_progress
from flowgrpo.report.tables import show_lines
from flowgrpo.rollout.hosted import hosted
from flowgrpo.training.language_model import default_min_decode_batch
from flowgrpo.types import BadInput, Status, Task

from .measuring import print_result

CONTEXT = 256
WORDS = ["the tool says: go on", "count the words of this query and say how many there are"]


def small_model() -> Model:
    """A model of the shape of the offline run, with random weights."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder) / "model", WORDS, seed=0)
        return load_model(Path(folder) / "model")


def play(model: Model, host: AgentHost, submit: Callable[[Request], "Future[Completion]"]) -> tuple[int, list[float]]:
    """Roll out all sessions -> number of sampled tokens, seconds of each request."""
    env = agent_env(model.tokenizer, turns=_TURNS.value, max_tokens=_TOKENS.value, context_tokens=CONTEXT)
    count = _SESSIONS.value
    tasks = [Task(str(n), f"count the words of query {n}", (), "") for n in range(count)]
    rollout = hosted(env, host.submit_to(submit), call_tool=host.call_tool, concurrency=count)
    trajectories = rollout(tasks, jax.random.split(jax.random.key(0), count), range(count)).trajectories
    if failed := [trajectory.reason for trajectory in trajectories if trajectory.status != Status.FINISHED]:
        raise BadInput(f"{len(failed)} sessions failed, the first one: {failed[0]}")
    sampled = sum(int(turn.chosen.sum()) for trajectory in trajectories for turn in trajectory.turns)
    return sampled, [seconds for trajectory in trajectories for seconds in json.loads(trajectory.output or "[]")]


def main() -> None:
    """Measure, print the table and one JSON line."""
    model = small_model()
    os.environ |= {"WAITING_SECONDS": str(_LATENCY.value), "WAITING_TURNS": str(_TURNS.value)}
    os.environ["WAITING_TOKENS"] = str(_TOKENS.value)
    requests: list[Request] = []
    rates: dict[str, list[float]] = {"gateway": [], "engine": []}
    waits: list[float] = []
    with (
        Engine(
            model.policy,
            model.params,
            EngineSettings(
                slots=_SLOTS.value or _SESSIONS.value,
                slot_length=CONTEXT,
                chunk=32,
                steps=8,
                min_decode_batch=default_min_decode_batch(),
                banned=model.banned,
            ),
        ) as engine,
        Gateway(model="planner", decode=model.tokenizer.decode) as gateway,
        AgentHost(f"{__package__}.waiting:waiting_agent", gateway) as host,
    ):

        def submit_recorded(request: Request) -> "Future[Completion]":
            requests.append(request._replace(chosen=None))  # the engine alone gets whole contexts as prompts
            return engine.submit(request)

        host.check()
        play(model, host, submit_recorded)  # compiles, and records the requests
        for _ in with_progress("measure", range(_REPEATS.value)):
            start = time.perf_counter()
            sampled, seconds = play(model, host, engine.submit)
            rates["gateway"].append(sampled / (time.perf_counter() - start))
            waits += seconds
            engine.release()
            start = time.perf_counter()
            sampled = sum(len(completion.tokens) for completion in engine.generate(requests))
            rates["engine"].append(sampled / (time.perf_counter() - start))
            engine.release()
    ratios = [rate / engine_rate for rate, engine_rate in zip(rates["gateway"], rates["engine"], strict=True)]
    figures = {
        "sessions": _SESSIONS.value,
        "latency": _LATENCY.value,
        "tokens_per_second": round(statistics.median(rates["gateway"])),
        "engine_tokens_per_second": round(statistics.median(rates["engine"])),
        "over_engine": round(statistics.median(ratios), 3),
        "over_engine_low": round(min(ratios), 3),
        "over_engine_high": round(max(ratios), 3),
        "request_p50": round(float(np.quantile(waits, 0.5)), 3),
        "request_p99": round(float(np.quantile(waits, 0.99)), 3),
    }
    show_lines([figures])
    print_result("gateway", **figures)


if __name__ == "__main__":
    app.run(main, exact=True)
