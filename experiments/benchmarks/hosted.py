"""Seconds of hosted rollouts against what they can't be shorter than: their decoding alone, or their tools' waiting.

    python -m experiments.benchmarks.hosted
    python -m experiments.benchmarks.hosted --trajectories=256 --latency=0 --slots=128 --steps=8
    python -m experiments.benchmarks.hosted --appends --slots=64 --width=64

Every trajectory has the same number of turns, and each turn calls a tool that takes `--latency` seconds. Contexts are
random tokens, rendered afresh each turn, or, with `--appends`, a conversation that grows. Decoding alone is the same
requests under the same keys, each sent from the callback of the one before it, without threads, tools and environment;
`over_larger` is the rollout over the larger of that and latency x turns. Medians of several runs, which alternate.

Measured on two cores on which twice as much again was running. 64 trajectories with a latency of 0.5 s: 1.18 to 1.25 of
the larger with 16 slots (the bar is 1.3), 1.26 to 1.36 with 32, since trajectories that are admitted together wait for
their tools together. Without latency: 256 trajectories in 2.0 s, 5,800 sampled tokens a second, of which the rollout
itself takes 0.2 ms of processor time a turn. Contexts that append need as many slots as `--width`: 128 of them, 64 at a
time over 64 slots, take 1.2 s, and all at once 23 s, because what is evicted is computed again token by token.
"""

import json
import time
from concurrent.futures import Future
from functools import partial
from itertools import product
from threading import Event

import jax
import numpy as np
from absl import flags

from experiments import common
from experiments.benchmarks.ceilings import TINY
from experiments.benchmarks.measured import medians, seconds, show_lines, significant
from experiments.headings import heading
from flowgrpo.contracts import Call, Completion, HostEnv, HostStep, Request, Result, Said
from flowgrpo.generate.engine import Engine
from flowgrpo.models.decoder import make_policy
from flowgrpo.report.progress import counted
from flowgrpo.rollout.hosted import hosted
from flowgrpo.types import BadInput

heading("What is run")
_APPENDS = flags.DEFINE_bool("appends", False, "Let each context append to the one before.")
heading("Sizes")
_TRAJECTORIES = flags.DEFINE_list("trajectories", ["16", "64", "256"], "Numbers of trajectories.")
_TURNS = flags.DEFINE_integer("turns", 3, "Turns of every trajectory.", lower_bound=1)
_PROMPT = flags.DEFINE_integer("prompt", 100, "Tokens of the first context, and of each that is rendered afresh.", 1)
_SAID = flags.DEFINE_integer("said", 20, "Tokens of an observation, where contexts append.", lower_bound=1)
_TOKENS = flags.DEFINE_integer("tokens", 15, "Tokens of an action.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Runs of which the median counts.", lower_bound=1)
heading("Costs")
_LATENCY = flags.DEFINE_list("latency", ["0", "0.5"], "Seconds that a tool takes.")
heading("Devices and memory")
_WIDTH = flags.DEFINE_integer("width", 256, "Trajectories under way at a time.", lower_bound=1)
_SLOTS = flags.DEFINE_integer("slots", 16, "Slots of the engine.", lower_bound=1)
_CHUNK = flags.DEFINE_integer("chunk", 128, "Largest piece of a prefill.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 16, "Decode steps of a stretch.", lower_bound=1)


# The environment --------------------------------------------------------------------------------------


def make_env() -> HostEnv:
    """A state is the number of the trajectory, and of turns so far."""
    return HostEnv(
        name="waiting",
        tools=("wait",),
        turns=_TURNS.value,
        max_tokens=_TOKENS.value,
        stop_ids=(),  # every action has its full length
        reset=lambda key, task, do: ((task, 0), say(task, 0)),  # noqa: ARG005
        step=step,
    )


def step(state: tuple[int, int], tokens, do) -> tuple[tuple[int, int], HostStep]:
    """The tool is called, and says what has nothing to do with the call."""
    task, turn = state
    result = do(Call("tool", "wait", {"tokens": list(tokens)}))
    return (task, turn + 1), HostStep(say(task, turn + 1), False, tool="wait", error=result.error)


def say(task: int, turn: int) -> Said:
    size = _SAID.value if _APPENDS.value and turn else _PROMPT.value
    return Said(np.random.default_rng((task, turn)).integers(1, TINY.v, size).tolist(), _APPENDS.value)


def wait(_: Call, latency: float) -> Result:
    """The tool."""
    time.sleep(latency)
    return Result("done")


# Decoding alone ---------------------------------------------------------------------------------------


class Chains:
    """The requests of each trajectory, sent one after the other to the engine and from its own thread."""

    def __init__(self, engine: Engine, chains: list[list[Request]]):
        self.engine, self.chains = engine, chains
        self.waiting, self.left, self.done = [], 0, Event()

    def run(self) -> None:
        """All of them, as many at a time as a rollout has under way, until the last has its answer."""
        self.waiting, self.left, self.done = self.chains[_WIDTH.value :], len(self.chains), Event()
        for chain in self.chains[: _WIDTH.value]:
            self._send(chain)
        self.done.wait()

    def _send(self, chain: list[Request]) -> None:
        self.engine.submit(chain[0]).add_done_callback(partial(self._next, chain[1:]))

    def _next(self, chain: list[Request], future: "Future[Completion]") -> None:
        """In the engine's thread: the chain's next request, or another chain where it has none."""
        assert len(future.result().tokens) == _TOKENS.value
        self.left -= not chain
        if chain or self.waiting:
            self._send(chain or self.waiting.pop())
        elif not self.left:
            self.done.set()


# Measuring --------------------------------------------------------------------------------------------


def measure(engine: Engine, count: int, latency: float) -> dict:
    """Seconds of a rollout of so many trajectories, and of its bounds."""
    asked: list[Request] = []

    def submit(request: Request) -> "Future[Completion]":
        asked.append(request)
        return engine.submit(request)

    tasks, keys = range(count), jax.random.split(jax.random.key(count), count)
    work = {"tasks": tasks, "keys": keys, "groups": tasks}
    rollout = hosted(make_env(), engine.submit, do=partial(wait, latency=latency), width=_WIDTH.value)
    played = hosted(make_env(), submit, do=partial(wait, latency=0.0), width=1)(**work).played
    assert [len(one.trajectory.turns) for one in played] == [_TURNS.value] * count
    chains = Chains(engine, [asked[n * _TURNS.value : (n + 1) * _TURNS.value] for n in range(count)])
    rows = []
    for _ in range(1 + _REPEATS.value):
        rows.append({"decoding": seconds(chains.run), "rollout": seconds(lambda: len(rollout(**work).played))})
    middle = medians(rows)
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


def numbers(flag: str, values: list[str]) -> list[float]:
    """The numbers of a flag, none of them negative."""
    try:
        found = [float(value) for value in values]
    except ValueError:
        found = [-1.0]
    if min(found, default=-1.0) < 0:
        raise BadInput(f"--{flag}={','.join(values)} must be a comma-separated list of numbers that aren't negative")
    return found


def main() -> None:
    """Measure every number of trajectories at every latency, print the table and one JSON line."""
    counts = [int(count) for count in numbers("trajectories", _TRAJECTORIES.value)]
    if 0 in counts:
        raise BadInput("--trajectories holds a 0: a rollout needs at least one")
    policy, longest = make_policy(TINY), _PROMPT.value + _TURNS.value * (_TOKENS.value + _SAID.value)
    slots, chunk, steps = _SLOTS.value, _CHUNK.value, _STEPS.value
    params = policy.init(jax.random.key(0))
    with Engine(policy, params, slots=slots, slot_length=longest, chunk=chunk, steps=steps) as engine:
        cases = list(product(numbers("latency", _LATENCY.value), counts))
        rows = [measure(engine, count, latency) for latency, count in counted("rollout", cases)]
    show_lines(rows)
    result = {"benchmark": "hosted", "appends": _APPENDS.value, "slots": slots, "chunk": chunk, "steps": steps}
    print(json.dumps(result | {"rows": rows}))


if __name__ == "__main__":
    common.run(main)
