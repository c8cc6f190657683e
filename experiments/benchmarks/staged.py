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

import statistics
import tempfile
import time
import zlib
from typing import Any

from absl import flags

from ..cli import app
from ..cli.help import flag_heading
from .shapes import SHAPES

flag_heading("What is run")
_MODEL = flags.DEFINE_enum("model", "small", list(SHAPES), "A random model of this shape.")
_OFFLOAD = flags.DEFINE_list("offload", ["none", "host", "disk"], "Where models are that a stage doesn't use.")
flag_heading("Sizes")
_QUERIES = flags.DEFINE_integer("queries", 16, "Groups of an iteration.", lower_bound=1)
_SAMPLES = flags.DEFINE_integer("samples", 8, "Trajectories of a group.", lower_bound=2)
_TURNS = flags.DEFINE_integer("turns", 2, "Turns of a trajectory at most.", lower_bound=1)
_PROMPT = flags.DEFINE_integer("prompt", 160, "Tokens of each observation.", lower_bound=1)
_TOKENS = flags.DEFINE_integer("tokens", 48, "Tokens of an action at most.", lower_bound=1)
_SLOTS = flags.DEFINE_integer("slots", 64, "Slots of the engine.", lower_bound=2)
_REPEATS = flags.DEFINE_integer("repeats", 3, "Iterations of which the median counts.", lower_bound=1)
flag_heading("Costs")
_SECONDS = flags.DEFINE_float("seconds", 2.0, "What a reward takes in the second table.", lower_bound=0.01)

app.read_flags(__name__)

import jax
import jax.numpy as jnp
import numpy as np

import flowgrpo as fg
from flowgrpo import loop
from flowgrpo.contracts import HostEnv, HostStep, Said, Scored
from flowgrpo.generate.engine import Engine
from flowgrpo.learner.state import make_optimizer
from flowgrpo.models.hf import Model
from flowgrpo.parallel.offload import Residency, places
from flowgrpo.recipes.planner import OFFLOAD
from flowgrpo.report.progress import with_progress
from flowgrpo.report.tables import show_columns, show_lines, significant
from flowgrpo.rewards.combine import batched
from flowgrpo.rollout.hosted import Hosted, hosted
from flowgrpo.rollout.records import rollout_of
from flowgrpo.staged import Step, hosted_rollout, make_staged
from flowgrpo.types import Status

from .ceilings import open_model
from .measuring import check_known, print_result

OPTIMIZER = make_optimizer(learning_rate=1e-4)
STOP = 1  # a token among all others, so that actions differ in length
STAGES = ("rollout", "inference", "rewards", "credit", "pack", "train", "iteration")


def _make_env(vocabulary: int) -> HostEnv:
    """A state is a task and its turn; an even token at the end of an action ends the trajectory."""

    def step(state: tuple[fg.Task, int], tokens, _do) -> tuple[tuple[fg.Task, int], HostStep]:
        task, turn = state
        if turn + 1 < _TURNS.value and tokens[-1] % 2:
            return (task, turn + 1), HostStep(_say(task, turn + 1, vocabulary), False)
        return state, HostStep(None, True, output=" ".join(map(str, tokens)), status=Status.FINISHED)

    def reset(_key, task: fg.Task, _do) -> tuple[tuple[fg.Task, int], Said]:
        return (task, 0), _say(task, 0, vocabulary)

    sizes: dict[str, Any] = {"turns": _TURNS.value, "max_tokens": _TOKENS.value, "stop_ids": (STOP,)}
    return HostEnv(name="words", tools=(), reset=reset, step=step, **sizes)


def _say(task: fg.Task, turn: int, vocabulary: int) -> Said:
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


def _make_step(model: Model, engine: Engine, rewards: Rewards, residency: Residency, moves: bool) -> Step:
    """One iteration, on the engine and with the rewards that are given."""
    queries, samples = _QUERIES.value, _SAMPLES.value
    length = _PROMPT.value + _TOKENS.value  # of a turn
    width = max(_SLOTS.value * 3 // 4, 2)  # fewer than slots, so that groups end one after the other
    reward = batched(rewards.many)
    rollout = hosted(_make_env(model.config.v), engine.submit, reward=reward, width=width, judges=queries)

    def roll_out(run: loop.Run, **callbacks) -> Hosted:
        update = int(run.update)
        engine.swap(run.learner.params, int(run.learner.version))
        tasks = [fg.Task(f"{update * queries + group}", "", ("1",), "words") for group in range(queries)]
        keys = jax.random.split(jax.random.fold_in(run.key, update), queries * samples)
        every = [task for task in tasks for _ in range(samples)]
        return rollout(every, keys, np.repeat(np.arange(queries), samples), **callbacks)

    return make_staged(
        model.policy,
        fg.flow_grpo(beta=0.01),
        OPTIMIZER,
        loop.Settings(queries=queries, samples=samples, micro_rows=8),
        hosted_rollout(roll_out, lambda played: rollout_of(played.played, (), turns=_TURNS.value, length=length)),
        banned=(0,),
        tools=0,
        longest=_TURNS.value * length,
        trajectories=queries * samples,
        residency=residency,
        release=engine.release if moves else lambda: 0,
    )


def _start(model: Model) -> loop.Run:
    return loop.start_run(jax.tree.map(jnp.copy, model.params), OPTIMIZER, jax.random.key(7))


def _measure_stages(model: Model, engine: Engine, offload: str) -> dict[str, Any]:
    """The medians of several iterations, after one in which programs were compiled."""
    with tempfile.TemporaryDirectory() as folder, Residency(places(OFFLOAD[offload]), folder=folder) as residency:
        take = _make_step(model, engine, Rewards(), residency, offload != "none")
        run, rows = _start(model), []
        for _ in range(1 + _REPEATS.value):
            run, metrics = take(run)
            rows.append(_row(metrics))
        residency.wait()
    names = {name: None for one in rows[1:] for name in one}  # not everything moves in every iteration
    middle = {name: statistics.median(one[name] for one in rows[1:] if name in one) for name in names}
    return {"offload": offload} | {name: significant(value, 4) for name, value in middle.items()}


def _row(metrics: dict) -> dict[str, float]:
    """The figures of one iteration: seconds, shares, megabytes."""
    clocks = metrics["timings"]
    found = {f"{name}_seconds": clocks[f"{name}_seconds"] for name in STAGES}
    found["fill_rate"] = float(metrics["fill_rate"])
    for way, moved in sorted(clocks["moves"].items()):
        found |= {f"{way}, MB": moved["bytes"] / 1e6, f"{way}, GB/s": moved["bytes_per_second"] / 1e9}
    found["cache_freed, MB"] = clocks["freed_bytes"] / 1e6
    for stage in ("rollout", "inference", "train"):
        found[f"device in {stage}, MB"] = clocks["device_bytes"][stage] / 1e6
    return found | {"pinned, MB": clocks["pinned_bytes"] / 1e6}


def _measure_rewards(model: Model, engine: Engine) -> dict[str, Any]:
    """Iterations whose rewards take their time against those whose rewards take none."""
    rewards, clocks = Rewards(), {0.0: [], _SECONDS.value: []}
    with Residency(places(OFFLOAD["none"])) as residency:
        take = _make_step(model, engine, rewards, residency, False)
        take(begun := _start(model))
        for _ in range(_REPEATS.value):
            for rewards.seconds in clocks:
                # The same trajectories each time, so that nothing but the rewards differs.
                clocks[rewards.seconds].append(take(begun)[1]["timings"])

    names = ("iteration", "judging", "rollout", "inference", "train", "rewards")
    instant, slow = (
        {name: statistics.median(one[f"{name}_seconds"] for one in each) for name in names} for each in clocks.values()
    )
    figures = {
        "reward_seconds": _SECONDS.value,
        "instant": instant["iteration"],
        "slow": slow["iteration"],
        "over_instant": slow["iteration"] / instant["iteration"],
        "judging": slow["judging"],
        "waited": max(slow["rewards"] - slow["inference"], 0.0),
        **{name: slow[name] for name in ("rollout", "inference", "train")},
    }
    return {name: round(value, 3) for name, value in figures.items()}


def main() -> None:
    """Measure, print both tables and one JSON line."""
    check_known(_OFFLOAD, OFFLOAD)
    model = open_model(_MODEL.value)
    length = _TURNS.value * (_PROMPT.value + _TOKENS.value) + 8
    sizes = {"slots": _SLOTS.value, "slot_length": length, "chunk": 32, "steps": 8, "banned": (0,)}
    with Engine(model.policy, model.params, **sizes) as engine:
        stages = [_measure_stages(model, engine, offload) for offload in with_progress("stages", _OFFLOAD.value)]
        names = {name: None for one in stages for name in one}
        show_columns([{name: one.get(name, "-") for name in names} for one in stages])
        rewards = _measure_rewards(model, engine)
    show_lines([rewards])
    print_result("staged", device=jax.devices()[0].device_kind, stages=stages, rewards=rewards)


if __name__ == "__main__":
    app.run(main)
