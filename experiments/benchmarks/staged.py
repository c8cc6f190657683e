"""Stages of an iteration on one set of devices: seconds, rows filled, bytes moved, memory; and what rewards cost (R1).

    python -m experiments.benchmarks.staged
    python -m experiments.benchmarks.staged --model=medium --queries=16 --offload=none,host
    python -m experiments.benchmarks.staged --queries=2 --samples=4 --tokens=8 --prompt=16 --seconds=0.2 --repeats=1

Trajectories of several turns on random tokens are rolled out over one engine, judged group by group on the host, scored
by the reference, packed and learned from. The first table has a column for each place of what a stage does not use:
"none" leaves everything on the device and keeps the sampler's cache, "host" and "disk" move and destroy. The second
lets every reward take `--seconds`, those of a group side by side, against rewards that take no time, in iterations that
alternate; `over_instant` is the ratio of their medians. The aim is at most 1.1 where the other stages take longer than
a reward.
"""

import json
import statistics
import tempfile
import time
import zlib
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

import flowgrpo as fg
from experiments import common
from experiments.benchmarks.ceilings import SHAPES, open_model
from experiments.benchmarks.measured import show_columns, show_lines
from experiments.headings import heading
from experiments.planner_setup import OFFLOAD
from flowgrpo import loop
from flowgrpo.contracts import HostEnv, HostStep, Reward, Said, Scored
from flowgrpo.generate.engine import Engine
from flowgrpo.learner.residency import Residency, places
from flowgrpo.learner.state import make_optimizer
from flowgrpo.models.hf import Model
from flowgrpo.report.progress import counted
from flowgrpo.rollout.compiled import Rollout
from flowgrpo.rollout.hosted import Hosted, hosted
from flowgrpo.rollout.records import rollout_of
from flowgrpo.staged import Step, hosted_rollout, make_staged
from flowgrpo.types import BadInput, Status

heading("What is run")
_MODEL = flags.DEFINE_enum("model", "small", list(SHAPES), "A random model of this shape.")
_OFFLOAD = flags.DEFINE_list("offload", ["none", "host", "disk"], "Where models are that a stage doesn't use.")
heading("Sizes")
_QUERIES = flags.DEFINE_integer("queries", 16, "Groups of an iteration.", lower_bound=1)
_SAMPLES = flags.DEFINE_integer("samples", 8, "Trajectories of a group.", lower_bound=2)
_TURNS = flags.DEFINE_integer("turns", 2, "Turns of a trajectory at most.", lower_bound=1)
_PROMPT = flags.DEFINE_integer("prompt", 160, "Tokens of each observation.", lower_bound=1)
_TOKENS = flags.DEFINE_integer("tokens", 48, "Tokens of an action at most.", lower_bound=1)
_SLOTS = flags.DEFINE_integer("slots", 64, "Slots of the engine.", lower_bound=2)
_REPEATS = flags.DEFINE_integer("repeats", 3, "Iterations of which the median counts.", lower_bound=1)
heading("Costs")
_SECONDS = flags.DEFINE_float("seconds", 2.0, "What a reward takes in the second table.", lower_bound=0.01)
STOP = 1  # a token among all others, so that actions differ in length
STAGES = ("rollout", "inference", "rewards", "credit", "pack", "train", "iteration")


# The work ---------------------------------------------------------------------------------------------------


def make_env(vocabulary: int) -> HostEnv:
    """A state is a task and its actions; an even token at the end of the first action ends the trajectory."""
    return HostEnv(
        name="words",
        tools=(),
        turns=_TURNS.value,
        max_tokens=_TOKENS.value,
        stop_ids=(STOP,),
        reset=lambda key, task, do: ((task, 0), say(task, 0, vocabulary)),  # noqa: ARG005
        step=partial(step, vocabulary=vocabulary),
    )


def step(state: tuple[fg.Task, int], tokens, do, *, vocabulary: int) -> tuple[tuple[fg.Task, int], HostStep]:  # noqa: ARG001
    task, turn = state
    if turn + 1 < _TURNS.value and tokens[-1] % 2:
        return (task, turn + 1), HostStep(say(task, turn + 1, vocabulary), False)
    return state, HostStep(None, True, output=" ".join(map(str, tokens)), status=Status.FINISHED)


def say(task: fg.Task, turn: int, vocabulary: int) -> Said:
    seed = (zlib.crc32(task.id.encode()), turn)
    return Said(np.random.default_rng(seed).integers(2, vocabulary, _PROMPT.value).tolist())


class Rewards:
    """A reward that takes its time, for all outputs of a group at once, as in a sandbox of several workers."""

    def __init__(self):
        self.seconds = 0.0

    def many(self, tasks, outputs) -> list[Scored]:
        """Half of the outputs are right."""
        time.sleep(self.seconds)
        return [Scored(float(zlib.crc32(output.encode()) % 2)) for _, output in zip(tasks, outputs, strict=True)]


# A run ------------------------------------------------------------------------------------------------------


def row_length() -> int:
    """Tokens of the longest trajectory."""
    return _TURNS.value * (_PROMPT.value + _TOKENS.value)


def play(run: loop.Run, *, engine: Engine, env: HostEnv, rewards: Rewards, **callbacks) -> Hosted:
    """All trajectories of an iteration; three of four slots, so that groups end one after the other."""
    update, queries, samples = int(run.update), _QUERIES.value, _SAMPLES.value
    engine.swap(run.learner.params, int(run.learner.version))
    tasks = [fg.Task(f"{update * queries + group}", "", ("1",), "words") for group in range(queries)]
    reward = Reward(lambda task, output: rewards.many([task], [output])[0], rewards.many)
    rollout = hosted(env, engine.submit, reward=reward, width=max(_SLOTS.value * 3 // 4, 2), judges=queries)
    keys = jax.random.split(jax.random.fold_in(run.key, update), queries * samples)
    every = [task for task in tasks for _ in range(samples)]
    return rollout(every, keys, np.repeat(np.arange(queries), samples), **callbacks)


def dense(played: Hosted) -> Rollout:
    return rollout_of(played.played, (), turns=_TURNS.value, length=_PROMPT.value + _TOKENS.value)


def make_step(model: Model, engine: Engine, rewards: Rewards, residency: Residency, optimizer, moves: bool) -> Step:
    """One iteration, on the engine and with the rewards that are given."""
    sizes = loop.Settings(queries=_QUERIES.value, samples=_SAMPLES.value, micro_rows=8)
    return make_staged(
        model.policy,
        fg.flow_grpo(beta=0.01),
        optimizer,
        sizes,
        hosted_rollout(partial(play, engine=engine, env=make_env(model.config.v), rewards=rewards), dense),
        banned=(0,),
        tools=0,
        row_length=row_length(),
        rows=sizes.queries * sizes.samples,
        slots=row_length(),
        residency=residency,
        release=engine.release if moves else lambda: 0,
    )


def start(model: Model, optimizer) -> loop.Run:
    return loop.start_run(jax.tree.map(jnp.copy, model.params), optimizer, jax.random.key(7))


# Measuring --------------------------------------------------------------------------------------------------


def measure_stages(model: Model, engine: Engine, offload: str) -> dict[str, Any]:
    """The medians of several iterations, after one in which programs were compiled."""
    optimizer = make_optimizer(learning_rate=1e-4)
    with tempfile.TemporaryDirectory() as folder, Residency(places(OFFLOAD[offload]), folder=folder) as residency:
        take = make_step(model, engine, Rewards(), residency, optimizer, offload != "none")
        run, found = start(model, optimizer), []
        for _ in range(1 + _REPEATS.value):
            run, metrics = take(run)
            found.append(metrics)
        residency.wait()
    return {"offload": offload} | row(found[1:])


def row(found: list[dict]) -> dict[str, Any]:
    """A column of the table."""
    clocks = [metrics["timings"] for metrics in found]
    middle = {f"{name}_seconds": _median([one[f"{name}_seconds"] for one in clocks], 3) for name in STAGES}
    middle["fill_rate"] = _median([float(metrics["fill_rate"]) for metrics in found], 3)
    ways = sorted({way for one in clocks for way in one["moves"]})
    for way in ways:
        moved = [one["moves"][way] for one in clocks if way in one["moves"]]
        middle[f"{way}, MB"] = _median([one["bytes"] / 1e6 for one in moved], 1)
        middle[f"{way}, GB/s"] = _median([one["bytes_per_second"] / 1e9 for one in moved], 2)
    middle["cache_freed, MB"] = _median([one["freed_bytes"] / 1e6 for one in clocks], 1)
    for stage in ("rollout", "inference", "train"):
        middle[f"device in {stage}, MB"] = _median([one["device_bytes"][stage] / 1e6 for one in clocks], 1)
    middle["pinned, MB"] = _median([one["pinned_bytes"] / 1e6 for one in clocks], 1)
    return middle


def measure_rewards(model: Model, engine: Engine) -> dict[str, Any]:
    """Iterations whose rewards take their time against those whose rewards take none."""
    optimizer, rewards = make_optimizer(learning_rate=1e-4), Rewards()
    seconds: dict[float, list[dict]] = {0.0: [], _SECONDS.value: []}
    with Residency(places(OFFLOAD["none"])) as residency:
        take = make_step(model, engine, rewards, residency, optimizer, False)
        take(begun := start(model, optimizer))
        for _ in range(_REPEATS.value):
            for rewards.seconds in seconds:
                # The same trajectories each time, so that nothing but the rewards differs.
                seconds[rewards.seconds].append(take(begun)[1]["timings"])
    middle = {
        each: {name: statistics.median(one[name] for one in clocks) for name in clocks[0] if name.endswith("_seconds")}
        for each, clocks in seconds.items()
    }
    instant, slow = (middle[each] for each in seconds)
    rest = ("rollout", "inference", "train")
    return {
        "reward_seconds": _SECONDS.value,
        "instant": round(instant["iteration_seconds"], 3),
        "slow": round(slow["iteration_seconds"], 3),
        "over_instant": round(slow["iteration_seconds"] / instant["iteration_seconds"], 3),
        "judging": round(slow["judging_seconds"], 1),
        "waited": round(max(slow["rewards_seconds"] - slow["inference_seconds"], 0.0), 3),
        **{name: round(slow[f"{name}_seconds"], 3) for name in rest},
    }


def _median(values: list[float], digits: int) -> float:
    return round(statistics.median(values), digits)


def main() -> None:
    """Measure, print both tables and one JSON line."""
    unknown = [name for name in _OFFLOAD.value if name not in OFFLOAD]
    if unknown:
        raise BadInput(f"--offload={','.join(_OFFLOAD.value)} has {unknown[0]!r}; choose from {', '.join(OFFLOAD)}")
    model = open_model(_MODEL.value)
    sizes = {"slots": _SLOTS.value, "slot_length": row_length() + 8, "chunk": 32, "steps": 8, "banned": (0,)}
    with Engine(model.policy, model.params, **sizes) as engine:
        stages = [measure_stages(model, engine, offload) for offload in counted("stages", _OFFLOAD.value)]
        names = {name: None for one in stages for name in one}
        show_columns([{name: one.get(name, "-") for name in names} for one in stages])
        rewards = measure_rewards(model, engine)
    show_lines([rewards])
    device = jax.devices()[0].device_kind
    print(json.dumps({"benchmark": "staged", "device": device, "stages": stages, "rewards": rewards}))


if __name__ == "__main__":
    common.run(main)
