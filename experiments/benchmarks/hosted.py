"""Seconds of hosted rollouts against their lower bounds: decoding alone, and waiting for tools.

    python -m experiments.benchmarks.hosted
    python -m experiments.benchmarks.hosted --trajectories=256 --latency=0 --slots=128 --steps=8
    python -m experiments.benchmarks.hosted --appends --slots=64 --width=64

Every trajectory has the same number of turns, and each turn calls a tool that takes `--latency` seconds. Contexts are
random tokens, rendered afresh each turn, or, with `--appends`, a growing conversation. Decoding alone sends the same
requests with the same keys, each from the callback of the previous one, without threads, tools and environment;
`over_larger` is the rollout relative to the larger of that and latency x turns. Medians of several alternating runs.

Measured on two busy cores: 64 trajectories with a latency of 0.5 s take 1.18 to 1.25 of the larger with 16 slots (the
aim is 1.3), 1.26 to 1.36 with 32; 256 without latency 2.0 s, 5,800 sampled tokens per second. Appending contexts beyond
the number of slots wait for others: 128 of them, 64 at a time over 64 slots, take 1.2 s.
"""

import time
from concurrent.futures import Future
from itertools import product
from threading import Event
from typing import Any

from absl import flags

from ..cli import app
from ..cli.help import flag_heading

flag_heading("Run")
_APPENDS = flags.DEFINE_bool("appends", False, "Append each context to the previous one.")
flag_heading("Sizes")
_TRAJECTORIES = flags.DEFINE_list("trajectories", ["16", "64", "256"], "Numbers of trajectories.")
_TURNS = flags.DEFINE_integer("turns", 3, "Turns of every trajectory.", lower_bound=1)
_PROMPT = flags.DEFINE_integer("prompt", 100, "Tokens of the first context, and of each that is rendered afresh.", 1)
_SAID = flags.DEFINE_integer("said", 20, "Tokens of an observation, with --appends.", lower_bound=1)
_TOKENS = flags.DEFINE_integer("tokens", 15, "Tokens of an action.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Runs of which the median counts.", lower_bound=1)
flag_heading("Costs")
_LATENCY = flags.DEFINE_list("latency", ["0", "0.5"], "Seconds that a tool takes.")
flag_heading("Devices and memory")
_WIDTH = flags.DEFINE_integer("width", 256, "Concurrent trajectories.", lower_bound=1)
_SLOTS = flags.DEFINE_integer("slots", 16, "Slots of the engine.", lower_bound=1)
_CHUNK = flags.DEFINE_integer("chunk", 128, "Largest piece of a prefill.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 16, "Decode steps per program call.", lower_bound=1)

app.read_flags(__name__)

import jax
import numpy as np

from flowgrpo.contracts import Call, Completion, HostEnv, HostObservation, HostStep, Request, Result
from flowgrpo.generate.engine import Engine, EngineSettings
from flowgrpo.models.decoder import make_policy
from flowgrpo.report.progress import with_progress
from flowgrpo.report.tables import show_lines, significant
from flowgrpo.rollout.hosted import hosted
from flowgrpo.types import BadInput

from .ceilings import TINY
from .measuring import medians_in_turn, print_result, whole_numbers


def _make_env() -> HostEnv:
    """Environment whose state is the index of the trajectory and its turn; every action has its full length."""
    sizes: dict[str, Any] = {"max_turns": _TURNS.value, "max_tokens": _TOKENS.value, "stop_ids": ()}
    return HostEnv("waiting", ("wait",), reset=lambda _key, task, _do: ((task, 0), _say(task, 0)), step=_step, **sizes)


def _step(state: tuple[int, int], tokens, call_tool) -> tuple[tuple[int, int], HostStep]:
    """Call the tool; the observation doesn't depend on its result."""
    task, turn = state
    result = call_tool(Call("tool", "wait", {"tokens": list(tokens)}))
    return (task, turn + 1), HostStep(_say(task, turn + 1), False, tool="wait", error=result.error)


def _say(task: int, turn: int) -> HostObservation:
    size = _SAID.value if _APPENDS.value and turn else _PROMPT.value
    return HostObservation(np.random.default_rng((task, turn)).integers(1, TINY.v, size).tolist(), _APPENDS.value)


class Chains:
    """The requests of each trajectory, sent one after another from the engine's own thread."""

    def __init__(self, engine: Engine, chains: list[list[Request]]):
        self.engine, self.chains, self.done = engine, chains, Event()

    def run(self) -> None:
        """Send all requests, with the concurrency of the rollout, and wait for the last response."""
        self.waiting, self.unfinished = self.chains[_WIDTH.value :], len(self.chains)
        self.done.clear()
        for chain in self.chains[: _WIDTH.value]:
            self._send(chain)
        self.done.wait()

    def _send(self, chain: list[Request]) -> None:
        self.engine.submit(chain[0]).add_done_callback(lambda future: self._next(chain[1:], future))

    def _next(self, chain: list[Request], future: "Future[Completion]") -> None:
        """In the engine's thread: send the chain's next request, or start another chain if there is none."""
        assert len(future.result().tokens) == _TOKENS.value
        self.unfinished -= not chain
        if chain or self.waiting:
            self._send(chain or self.waiting.pop())
        elif not self.unfinished:
            self.done.set()


def _measure(engine: Engine, count: int, latency: float) -> dict:
    """Seconds of a rollout of `count` trajectories, and its lower bounds."""
    requests: list[Request] = []

    def submit(request: Request) -> "Future[Completion]":
        requests.append(request)
        return engine.submit(request)

    def wait(_: Call) -> Result:
        time.sleep(latency)
        return Result("done")

    arguments = {"tasks": range(count), "keys": jax.random.split(jax.random.key(count), count), "groups": range(count)}
    rollout = hosted(_make_env(), engine.submit, call_tool=wait, concurrency=_WIDTH.value)
    trajectories = hosted(_make_env(), submit, call_tool=lambda _: Result("done"), concurrency=1)(
        **arguments
    ).trajectories
    assert [len(trajectory.turns) for trajectory in trajectories] == [_TURNS.value] * count
    chains = Chains(engine, [requests[n * _TURNS.value : (n + 1) * _TURNS.value] for n in range(count)])
    functions = {"decoding": chains.run, "rollout": lambda: len(rollout(**arguments).trajectories)}
    median = medians_in_turn(functions, _REPEATS.value)
    tools = latency * _TURNS.value
    return {
        "trajectories": count,
        "latency": latency,
        "rollout_seconds": round(median["rollout"], 3),
        "decoding_seconds": round(median["decoding"], 3),
        "tool_seconds": round(tools, 3),
        "over_larger": significant(median["rollout"] / max(median["decoding"], tools)),
        "tokens_per_second": round(count * _TURNS.value * _TOKENS.value / median["rollout"]),
    }


def _latencies() -> list[float]:
    """Values of `--latency`."""
    try:
        latencies = [float(value) for value in _LATENCY.value]
    except ValueError:
        latencies = [-1.0]
    if min(latencies, default=-1.0) < 0:
        raise BadInput(f"--latency={','.join(_LATENCY.value)} must be comma-separated numbers of at least 0")
    return latencies


def main() -> None:
    """Measure every number of trajectories at every latency, print the table and one JSON line."""
    cases = list(product(_latencies(), whole_numbers(_TRAJECTORIES)))
    policy, slot_length = make_policy(TINY), _PROMPT.value + _TURNS.value * (_TOKENS.value + _SAID.value)
    sizes: dict[str, Any] = {"slots": _SLOTS.value, "chunk": _CHUNK.value, "steps": _STEPS.value}
    with Engine(policy, policy.init(jax.random.key(0)), EngineSettings(slot_length=slot_length, **sizes)) as engine:
        rows = [_measure(engine, count, latency) for latency, count in with_progress("rollout", cases)]
    show_lines(rows)
    print_result("hosted", appends=_APPENDS.value, **sizes, rows=rows)


if __name__ == "__main__":
    app.run(main, exact=True)
