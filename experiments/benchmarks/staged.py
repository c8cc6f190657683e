"""Stages of an iteration on one set of devices: seconds, rows filled, bytes moved, memory; and what rewards cost (R1).

    python -m experiments.benchmarks.staged
    python -m experiments.benchmarks.staged --model=medium --queries=16 --offload=none,host
    python -m experiments.benchmarks.staged --queries=2 --samples=4 --tokens=8 --prompt=16 --seconds=0.2 --repeats=1

Trajectories of several turns on random tokens are rolled out by one engine, judged group by group on the host, scored
by the reference, packed and trained on. The first table has a column for each place of arrays that a stage doesn't use:
"none" leaves everything on the device and keeps the sampler's cache, "host" and "disk" move arrays and free the cache.
In the second, every reward takes `--seconds`, in parallel within a group, compared with instant rewards in alternating
iterations; `over_instant` is the ratio of their medians. The aim is at most 1.1 if the other stages take longer than a
reward.
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

flag_heading("Run")
_MODEL = flags.DEFINE_enum("model", "small", list(SHAPES), "Shape of the model, with random weights.")
_OFFLOAD = flags.DEFINE_list("offload", ["none", "host", "disk"], "Where arrays are stored that a stage doesn't use.")
flag_heading("Sizes")
_QUERIES = flags.DEFINE_integer("queries", 16, "Groups of an iteration.", lower_bound=1)
_SAMPLES = flags.DEFINE_integer("samples", 8, "Trajectories of a group.", lower_bound=2)
_TURNS = flags.DEFINE_integer("turns", 2, "Most turns of a trajectory.", lower_bound=1)
_PROMPT = flags.DEFINE_integer("prompt", 160, "Tokens of each observation.", lower_bound=1)
_TOKENS = flags.DEFINE_integer("tokens", 48, "Most tokens of an action.", lower_bound=1)
_SLOTS = flags.DEFINE_integer("slots", 64, "Slots of the engine.", lower_bound=2)
_REPEATS = flags.DEFINE_integer("repeats", 3, "Number of iterations; their median is reported.", lower_bound=1)
flag_heading("Costs")
_SECONDS = flags.DEFINE_float("seconds", 2.0, "Seconds that a reward takes in the second table.", lower_bound=0.01)

app.read_flags(__name__)

import jax
import jax.numpy as jnp
import numpy as np

from flowgrpo.algorithms.policy_gradient import flow_grpo
from flowgrpo.contracts import HostEnv, HostObservation, HostStep, RewardResult
from flowgrpo.generate.engine import Engine, EngineSettings
from flowgrpo.learner.state import adamw
from flowgrpo.models.hf import Model
from flowgrpo.parallel.offload import HostOffloader, placement_table
from flowgrpo.report.progress import with_progress
from flowgrpo.report.tables import show_columns, show_lines, significant
from flowgrpo.rewards.combine import batch_reward
from flowgrpo.rollout.hosted import RolloutResult, hosted
from flowgrpo.rollout.records import to_trajectories
from flowgrpo.training.iteration import Iteration, RolloutShape, Staging, Step, hosted_rollout
from flowgrpo.training.planner import OFFLOAD
from flowgrpo.training.stages import IterationSettings, TrainState, init_train_state, make_update_stages
from flowgrpo.types import Status, Task

from .ceilings import open_model
from .measuring import check_known, print_result

OPTIMIZER = adamw(1e-4)
STOP = 1  # an ordinary token, so that actions differ in length
STAGES = ("rollout", "inference", "rewards", "advantages", "pack", "train", "iteration")


def _make_env(vocabulary: int) -> HostEnv:
    """Environment whose state is a task and its turn; an even last token of an action ends the trajectory."""

    def step(state: tuple[Task, int], tokens, _do) -> tuple[tuple[Task, int], HostStep]:
        task, turn = state
        if turn + 1 < _TURNS.value and tokens[-1] % 2:
            return (task, turn + 1), HostStep(_say(task, turn + 1, vocabulary), False)
        return state, HostStep(None, True, output=" ".join(map(str, tokens)), status=Status.FINISHED)

    def reset(_key, task: Task, _do) -> tuple[tuple[Task, int], HostObservation]:
        return (task, 0), _say(task, 0, vocabulary)

    sizes: dict[str, Any] = {"max_turns": _TURNS.value, "max_tokens": _TOKENS.value, "stop_ids": (STOP,)}
    return HostEnv(name="words", tools=(), reset=reset, step=step, **sizes)


def _say(task: Task, turn: int, vocabulary: int) -> HostObservation:
    seed = (zlib.crc32(task.id.encode()), turn)
    return HostObservation(np.random.default_rng(seed).integers(2, vocabulary, _PROMPT.value).tolist())


class Rewards:
    """A reward that takes `seconds`, for all outputs of a group at once, as in a sandbox of several workers."""

    def __init__(self):
        self.seconds = 0.0

    def score_all(self, tasks, outputs) -> list[RewardResult]:
        """Scores; half of the outputs are right."""
        time.sleep(self.seconds)
        return [RewardResult(float(zlib.crc32(output.encode()) % 2)) for _, output in zip(tasks, outputs, strict=True)]


def _make_step(model: Model, engine: Engine, rewards: Rewards, offloader: HostOffloader, moves: bool) -> Step:
    """Make an iteration with this engine and these rewards."""
    queries, samples = _QUERIES.value, _SAMPLES.value
    turn_length = _PROMPT.value + _TOKENS.value  # of a turn
    concurrency = max(_SLOTS.value * 3 // 4, 2)  # below the number of slots, so that groups end one after another
    reward = batch_reward(rewards.score_all)
    rollout = hosted(_make_env(model.config.v), engine.submit, reward=reward, concurrency=concurrency, judges=queries)

    def roll_out(run: TrainState, **callbacks) -> RolloutResult:
        update = int(run.update)
        engine.update_weights(run.learner.params, int(run.learner.version))
        tasks = [Task(f"{update * queries + group}", "", ("1",), "words") for group in range(queries)]
        keys = jax.random.split(jax.random.fold_in(run.key, update), queries * samples)
        repeated_tasks = [task for task in tasks for _ in range(samples)]
        return rollout(repeated_tasks, keys, np.repeat(np.arange(queries), samples).tolist(), **callbacks)

    length = _TURNS.value * turn_length
    settings = IterationSettings(queries=queries, samples=samples, micro_rows=8)
    stages = make_update_stages(model.policy, flow_grpo(beta=0.01), OPTIMIZER, settings, banned=(0,), slots=length)
    return Iteration(
        hosted_rollout(
            roll_out, lambda result: to_trajectories(result.trajectories, (), turns=_TURNS.value, length=turn_length)
        ),
        stages,
        RolloutShape(tools=0, samples=samples, trajectories=queries * samples, max_trajectory_tokens=length),
        Staging(offloader=offloader, scores_ahead=True, release=engine.release if moves else lambda: 0),
    )


def _start(model: Model) -> TrainState:
    return init_train_state(jax.tree.map(jnp.copy, model.params), OPTIMIZER, jax.random.key(7))


def _measure_stages(model: Model, engine: Engine, offload: str) -> dict[str, Any]:
    """Medians over several iterations, after one that compiles."""
    with (
        tempfile.TemporaryDirectory() as folder,
        HostOffloader(placement_table(OFFLOAD[offload]), folder=folder) as offloader,
    ):
        step = _make_step(model, engine, Rewards(), offloader, offload != "none")
        run, rows = _start(model), []
        for _ in range(1 + _REPEATS.value):
            run, metrics = step(run)
            rows.append(_row(metrics))
        offloader.wait()
    names = {name: None for row in rows[1:] for name in row}  # not everything is moved in every iteration
    middle = {name: statistics.median(row[name] for row in rows[1:] if name in row) for name in names}
    return {"offload": offload} | {name: significant(value, 4) for name, value in middle.items()}


def _row(metrics: dict) -> dict[str, float]:
    """Figures of one iteration: seconds, fractions, megabytes."""
    timings = metrics["timings"]
    row = {f"{name}_seconds": timings[f"{name}_seconds"] for name in STAGES}
    row["fill_rate"] = float(metrics["fill_rate"])
    for route, move in sorted(timings["moves"].items()):
        row |= {f"{route}, MB": move["bytes"] / 1e6, f"{route}, GB/s": move["bytes_per_second"] / 1e9}
    row["cache_freed, MB"] = timings["freed_bytes"] / 1e6
    for stage in ("rollout", "inference", "train"):
        row[f"device in {stage}, MB"] = timings["device_bytes"][stage] / 1e6
    return row | {"pinned, MB": timings["pinned_bytes"] / 1e6}


def _measure_rewards(model: Model, engine: Engine) -> dict[str, Any]:
    """Iterations with slow rewards compared with iterations with instant ones."""
    rewards, clocks = Rewards(), {0.0: [], _SECONDS.value: []}
    with HostOffloader(placement_table(OFFLOAD["none"])) as offloader:
        step = _make_step(model, engine, rewards, offloader, False)
        step(state := _start(model))
        for _ in range(_REPEATS.value):
            for rewards.seconds in clocks:
                # the same trajectories each time, so that only the rewards differ
                clocks[rewards.seconds].append(step(state)[1]["timings"])

    names = ("iteration", "judging", "rollout", "inference", "train", "rewards")
    instant, slow = (
        {name: statistics.median(timing[f"{name}_seconds"] for timing in timings) for name in names}
        for timings in clocks.values()
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
    with Engine(model.policy, model.params, EngineSettings(**sizes)) as engine:
        stages = [_measure_stages(model, engine, offload) for offload in with_progress("stages", _OFFLOAD.value)]
        names = {name: None for row in stages for name in row}
        show_columns([{name: row.get(name, "-") for name in names} for row in stages])
        rewards = _measure_rewards(model, engine)
    show_lines([rewards])
    print_result("staged", device=jax.devices()[0].device_kind, stages=stages, rewards=rewards)


if __name__ == "__main__":
    app.run(main)
