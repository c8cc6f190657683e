"""Seconds of hosted rollouts against what they can't be shorter than: their decoding alone, or their tools' waiting.

    python -m experiments.benchmarks.hosted
    python -m experiments.benchmarks.hosted --trajectories=256 --latency=0 --slots=128 --steps=8
    python -m experiments.benchmarks.hosted --appends --slots=64 --width=64

Every trajectory has the same number of turns, and each turn calls a tool that takes `--latency` seconds. Contexts are
random tokens, rendered afresh each turn, or, with `--appends`, a conversation that grows. Decoding alone is the same
requests under the same keys, each sent from the callback of the one before it, without threads, tools and environment;
`over_larger` is the rollout over the larger of that and latency x turns. Medians of several runs, which alternate.

Measured on two busy cores: 64 trajectories with a latency of 0.5 s take 1.18 to 1.25 of the larger with 16 slots (the
bar is 1.3), 1.26 to 1.36 with 32; 256 without latency 2.0 s, 5,800 sampled tokens a second. Contexts that append
wait for each other beyond as many as slots: 128 of them, 64 at a time over 64 slots, take 1.2 s.
"""

import time
from concurrent.futures import Future
from itertools import product
from threading import Event
from typing import Any

from absl import flags

from ..cli import app
from ..cli.help import flag_heading

flag_heading("What is run")
_APPENDS = flags.DEFINE_bool("appends", False, "Let each context append to the one before.")
flag_heading("Sizes")
_TRAJECTORIES = flags.DEFINE_list("trajectories", ["16", "64", "256"], "Numbers of trajectories.")
_TURNS = flags.DEFINE_integer("turns", 3, "Turns of every trajectory.", lower_bound=1)
_PROMPT = flags.DEFINE_integer("prompt", 100, "Tokens of the first context, and of each that is rendered afresh.", 1)
_SAID = flags.DEFINE_integer("said", 20, "Tokens of an observation, where contexts append.", lower_bound=1)
_TOKENS = flags.DEFINE_integer("tokens", 15, "Tokens of an action.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Runs of which the median counts.", lower_bound=1)
flag_heading("Costs")
_LATENCY = flags.DEFINE_list("latency", ["0", "0.5"], "Seconds that a tool takes.")
flag_heading("Devices and memory")
_WIDTH = flags.DEFINE_integer("width", 256, "Trajectories under way at a time.", lower_bound=1)
_SLOTS = flags.DEFINE_integer("slots", 16, "Slots of the engine.", lower_bound=1)
_CHUNK = flags.DEFINE_integer("chunk", 128, "Largest piece of a prefill.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 16, "Decode steps of a stretch.", lower_bound=1)

app.read_flags(__name__)

import jax
import numpy as np

from flowgrpo.contracts import Call, Completion, HostEnv, HostStep, Request, Result, Said
from flowgrpo.generate.engine import Engine
from flowgrpo.models.decoder import make_policy
from flowgrpo.report.progress import with_progress
from flowgrpo.report.tables import show_lines, significant
from flowgrpo.rollout.hosted import hosted
from flowgrpo.types import BadInput

from .ceilings import TINY
from .measuring import medians_in_turn, print_result, whole_numbers


def _make_env() -> HostEnv:
    """A state is the number of the trajectory, and of turns so far; every action has its full length."""
    sizes: dict[str, Any] = {"turns": _TURNS.value, "max_tokens": _TOKENS.value, "stop_ids": ()}
    return HostEnv("waiting", ("wait",), reset=lambda _key, task, _do: ((task, 0), _say(task, 0)), step=_step, **sizes)


def _step(state: tuple[int, int], tokens, do) -> tuple[tuple[int, int], HostStep]:
    """The tool is called, and says what has nothing to do with the call."""
    task, turn = state
    result = do(Call("tool", "wait", {"tokens": list(tokens)}))
    return (task, turn + 1), HostStep(_say(task, turn + 1), False, tool="wait", error=result.error)


def _say(task: int, turn: int) -> Said:
    size = _SAID.value if _APPENDS.value and turn else _PROMPT.value
    return Said(np.random.default_rng((task, turn)).integers(1, TINY.v, size).tolist(), _APPENDS.value)


class Chains:
    """The requests of each trajectory, sent one after the other to the engine and from its own thread."""

    def __init__(self, engine: Engine, chains: list[list[Request]]):
        self.engine, self.chains, self.done = engine, chains, Event()

    def run(self) -> None:
        """All of them, as many at a time as a rollout has under way, until the last has its answer."""
        self.waiting, self.left = self.chains[_WIDTH.value :], len(self.chains)
        self.done.clear()
        for chain in self.chains[: _WIDTH.value]:
            self._send(chain)
        self.done.wait()

    def _send(self, chain: list[Request]) -> None:
        self.engine.submit(chain[0]).add_done_callback(lambda future: self._next(chain[1:], future))

    def _next(self, chain: list[Request], future: "Future[Completion]") -> None:
        """In the engine's thread: the chain's next request, or another chain where it has none."""
        assert len(future.result().tokens) == _TOKENS.value
        self.left -= not chain
        if chain or self.waiting:
            self._send(chain or self.waiting.pop())
        elif not self.left:
            self.done.set()


def _measure(engine: Engine, count: int, latency: float) -> dict:
    """Seconds of a rollout of so many trajectories, and of its bounds."""
    asked: list[Request] = []

    def submit(request: Request) -> "Future[Completion]":
        asked.append(request)
        return engine.submit(request)

    def wait(_: Call) -> Result:
        time.sleep(latency)
        return Result("done")

    work = {"tasks": range(count), "keys": jax.random.split(jax.random.key(count), count), "groups": range(count)}
    rollout = hosted(_make_env(), engine.submit, do=wait, width=_WIDTH.value)
    played = hosted(_make_env(), submit, do=lambda _: Result("done"), width=1)(**work).played
    assert [len(one.turns) for one in played] == [_TURNS.value] * count
    chains = Chains(engine, [asked[n * _TURNS.value : (n + 1) * _TURNS.value] for n in range(count)])
    works = {"decoding": chains.run, "rollout": lambda: len(rollout(**work).played)}
    middle = medians_in_turn(works, _REPEATS.value)
    tools = latency * _TURNS.value
    return {
        "trajectories": count,
        "latency": latency,
        "rollout_seconds": round(middle["rollout"], 3),
        "decoding_seconds": round(middle["decoding"], 3),
        "tool_seconds": round(tools, 3),
        "over_larger": significant(middle["rollout"] / max(middle["decoding"], tools)),
        "tokens_per_second": round(count * _TURNS.value * _TOKENS.value / middle["rollout"]),
    }


def _latencies() -> list[float]:
    """Read the latencies of `--latency`."""
    try:
        found = [float(value) for value in _LATENCY.value]
    except ValueError:
        found = [-1.0]
    if min(found, default=-1.0) < 0:
        raise BadInput(f"--latency={','.join(_LATENCY.value)} must be numbers of at least 0 between commas")
    return found


def main() -> None:
    """Measure every number of trajectories at every latency, print the table and one JSON line."""
    cases = list(product(_latencies(), whole_numbers(_TRAJECTORIES)))
    policy, longest = make_policy(TINY), _PROMPT.value + _TURNS.value * (_TOKENS.value + _SAID.value)
    sizes: dict[str, Any] = {"slots": _SLOTS.value, "chunk": _CHUNK.value, "steps": _STEPS.value}
    with Engine(policy, policy.init(jax.random.key(0)), slot_length=longest, **sizes) as engine:
        rows = [_measure(engine, count, latency) for latency, count in with_progress("rollout", cases)]
    show_lines(rows)
    print_result("hosted", appends=_APPENDS.value, **sizes, rows=rows)


if __name__ == "__main__":
    app.run(main, exact=True)
