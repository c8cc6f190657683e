"""Tokens a second of many agents behind a gateway, against the engine alone, and how long their requests take.

    python -m experiments.benchmarks.gateway
    python -m experiments.benchmarks.gateway --sessions=64 --latency=0

Every session asks the same number of times, and its tool takes `--latency` seconds after each answer. The agents are
coroutines in a process of their own. The engine alone is given the requests that they made, all at once, so that it
waits for no tool. Medians of several runs, which alternate; latencies are those that the agents see.

Measured on two cores with AVX-512, agents and all, a model of 0.4 M parameters, three rounds: 200 sessions of 3 turns
and 32 tokens with a latency of 0.5 s come to 3,231 tokens a second, 0.57 (0.56 to 0.60) of the engine alone; half of
the requests take 1.1 s, one in a hundred 1.6. All sessions begin at once, so that they wait for their tools together:
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
_SESSIONS = flags.DEFINE_integer("sessions", 200, "Agents at work at a time.", lower_bound=1)
_TURNS = flags.DEFINE_integer("turns", 3, "Requests of each.", lower_bound=1)
_TOKENS = flags.DEFINE_integer("tokens", 32, "Tokens of an answer at most.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Runs of which the median counts.", lower_bound=1)
flag_heading("Costs")
_LATENCY = flags.DEFINE_float("latency", 0.5, "Seconds that a tool takes.", lower_bound=0.0)
flag_heading("Devices and memory")
_SLOTS = flags.DEFINE_integer(
    "slots",
    None,
    "Slots of the engine, by default one a session; with fewer, sessions wait for others to end.",
    lower_bound=2,
)

app.read_flags(__name__)

import jax
import numpy as np

from flowgrpo.contracts import Completion, Request
from flowgrpo.gateway.agent_env import agent_env
from flowgrpo.gateway.agents import AgentHost
from flowgrpo.gateway.server import Gateway
from flowgrpo.generate.engine import Engine
from flowgrpo.models.hf import Model, load_model
from flowgrpo.recipes.hosted import narrowest_rows
from flowgrpo.recipes.offline_start import write_model
from flowgrpo.report.progress import with_progress
from flowgrpo.report.tables import show_lines
from flowgrpo.rollout.hosted import hosted
from flowgrpo.types import BadInput, Status, Task

from .measuring import print_result

CONTEXT = 256
WORDS = ["the tool says: go on", "count the words of this query and say how many there are"]


def small_model() -> Model:
    """Make a model of the shape of the offline run, with random weights."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder) / "model", WORDS, seed=0)
        return load_model(Path(folder) / "model")


def play(model: Model, host: AgentHost, submit: Callable[[Request], "Future[Completion]"]) -> tuple[int, list[float]]:
    """Roll out all sessions; return the tokens that were sampled, and the seconds of each request."""
    env = agent_env(model.text, turns=_TURNS.value, max_tokens=_TOKENS.value, context_tokens=CONTEXT)
    count = _SESSIONS.value
    tasks = [Task(str(n), f"count the words of query {n}", (), "") for n in range(count)]
    rollout = hosted(env, host.submit_to(submit), do=host.do, width=count)
    played = rollout(tasks, jax.random.split(jax.random.key(0), count), range(count)).played
    if failed := [one.reason for one in played if one.status != Status.FINISHED]:
        raise BadInput(f"{len(failed)} sessions failed, the first one: {failed[0]}")
    sampled = sum(int(turn.chosen.sum()) for one in played for turn in one.turns)
    return sampled, [seconds for one in played for seconds in json.loads(one.output or "[]")]


def main() -> None:
    """Measure, print the table and one JSON line."""
    model = small_model()
    os.environ |= {"WAITING_SECONDS": str(_LATENCY.value), "WAITING_TURNS": str(_TURNS.value)}
    os.environ["WAITING_TOKENS"] = str(_TOKENS.value)
    asked: list[Request] = []
    rates: dict[str, list[float]] = {"gateway": [], "engine": []}
    waits: list[float] = []
    with (
        Engine(
            model.policy,
            model.params,
            slots=_SLOTS.value or _SESSIONS.value,
            slot_length=CONTEXT,
            chunk=32,
            steps=8,
            narrowest=narrowest_rows(),
            banned=model.banned,
        ) as engine,
        Gateway(model="planner", spell=model.text.decode) as gateway,
        AgentHost(f"{__package__}.waiting:waiting_agent", gateway) as host,
    ):

        def recorded(request: Request) -> "Future[Completion]":
            asked.append(request._replace(chosen=None))  # alone, a context is given, and not computed as it was sampled
            return engine.submit(request)

        host.check()
        play(model, host, recorded)  # which compiles, and says what the engine is asked
        for _ in with_progress("measure", range(_REPEATS.value)):
            began = time.perf_counter()
            sampled, seconds = play(model, host, engine.submit)
            rates["gateway"].append(sampled / (time.perf_counter() - began))
            waits += seconds
            engine.release()
            began = time.perf_counter()
            sampled = sum(len(completion.tokens) for completion in engine.generate(asked))
            rates["engine"].append(sampled / (time.perf_counter() - began))
            engine.release()
    ratios = [one / other for one, other in zip(rates["gateway"], rates["engine"], strict=True)]
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
