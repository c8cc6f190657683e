"""A planner that starts weak learns to use tools over several turns, by Flow-GRPO, while you watch.

    python -m experiments.quickstart
    python -m experiments.quickstart --env=arithmetic --seed=1 --workdir=runs/mine
    python -m experiments.quickstart --control=shuffled_rewards

Two phases: a small model imitates flawed demonstrations, and is then trained in the environment on nothing but the
outcome. At the end the table compares both on tasks of kinds that neither training nor the choice of the checkpoint
has seen, and shows one of them before and after. Everything lies in the work directory: `metrics.jsonl`,
`timings.jsonl`, `curves.png`, `result.json`, `checkpoints/`. The same command goes on where a run was stopped.

Runs on any CPU, offline, in minutes.
"""

import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

import flowgrpo as fg
from experiments import common, setups
from experiments.members import ALGORITHMS
from flowgrpo import loop
from flowgrpo.envs.env import PAD, in_words
from flowgrpo.evaluate import Evaluation, evaluate
from flowgrpo.learner.checkpoint import Checkpoints, params_sha256
from flowgrpo.learner.folder import run_folder
from flowgrpo.report.metrics import TIMINGS, Metrics, read_metrics
from flowgrpo.report.plots import curves
from flowgrpo.report.progress import Progress
from flowgrpo.rollout.compiled import Rollout

_ENV = flags.DEFINE_enum("env", "lookup", list(setups.PRESETS), "Environment.")
_ALGORITHM = flags.DEFINE_enum("algorithm", None, list(ALGORITHMS), "Member of the family; flow_grpo by default.")
_CONTROL = flags.DEFINE_enum("control", None, setups.CONTROLS, "Shuffle rewards within groups, or imitate on.")
_UPDATES = flags.DEFINE_integer("updates", None, "Updates of the reinforcement phase.", lower_bound=0)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of everything.")
_NUM_SEEDS = flags.DEFINE_integer("num_seeds", 1, "Runs with successive seeds, one after another.", lower_bound=1)
_WORKDIR = flags.DEFINE_string("workdir", None, "Where results lie; runs/quickstart-ENV-SEED by default.")
_RESUME = flags.DEFINE_bool("resume", True, "Go on with what is in the work directory; --noresume begins anew.")
_QUERIES = flags.DEFINE_integer("queries", None, "Queries of an update.", lower_bound=1)
_SAMPLES = flags.DEFINE_integer("samples", None, "Trajectories of a query.", lower_bound=2)
_RATE = flags.DEFINE_float("learning_rate", None, "Of the reinforcement phase.", lower_bound=0.0)
_WARM = flags.DEFINE_integer("warm_steps", None, "Steps of imitation at most.", lower_bound=1)
_EVERY = flags.DEFINE_integer("checkpoint_every", 10, "Updates between validations and checkpoints.", lower_bound=1)
_TEST = flags.DEFINE_integer("test_tasks", 1000, "Test tasks of the final table.", lower_bound=1)

VALIDATION_TASKS = 256


class Session:
    """One run in its folder: where it stands, and what it writes."""

    def __init__(self, setup: setups.Setup, folder: Path):
        self.setup, self.folder, self.keys = setup, folder, setups.seed_keys(setup.settings["seed"])
        self.checkpoints = Checkpoints(folder, keep=2, best="validation")
        self.progress = Progress(setup.settings["updates"])
        self.exam = jax.jit(self._exam("validation", VALIDATION_TASKS))
        self.run: Any = None
        self.start: Any = None  # the parameters after the warm start
        self.resumed_at: list[int] = []
        self.position: Mapping[str, int] | None = None

    def _exam(self, split: str, tasks: int):
        setup = self.setup
        return loop.make_exam(setup.env, setup.policy, split, tasks=tasks, temperature=setup.settings["temperature"])

    # Stages -------------------------------------------------------------------------------------------

    def restore(self) -> bool:
        """Go on from the newest checkpoint, if there is one."""
        step = self.checkpoints.latest()
        if step is None:
            return False
        params = jax.eval_shape(self.setup.policy.init, self.keys["start"])
        blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)
        run = loop.start_run(blank, self.setup.optimizer, self.keys["run"])
        tree = self.checkpoints.restore(step, {"run": run, "start": blank, "resumed_at": ..., "position": ...})
        self.run, self.start, self.position = tree["run"], tree["start"], tree["position"]
        self.resumed_at = [*tree["resumed_at"], int(self.run.update)]
        self.progress.say(f"going on at update {int(self.run.update)} of {self.folder}")
        return True

    def save(self, validation: float | None) -> None:
        """Write a checkpoint of where the run stands."""
        tree = {
            "run": self.run,
            "start": self.start,
            "resumed_at": self.resumed_at,
            "position": dict(self.position or {}),
        }
        note = {} if validation is None else {"validation": validation}
        self.checkpoints.save(int(self.run.update), tree, note)

    def warm_start(self, metrics: Metrics) -> None:
        """Imitate demonstrations until the validation loss is lowest."""
        params = jax.jit(self.setup.policy.init)(self.keys["start"])
        best = setups.warm_start(self.setup, params, self.keys["demonstrations"], self._told(metrics))
        self.start = best
        self.run = loop.start_run(best, self.setup.optimizer, self.keys["run"])
        figures = self.examine(best)
        metrics.write({"phase": "validation", "update": 0} | shown(figures))
        self.position = metrics.position
        self.progress.say(
            f"warm start: validation success {figures.success:.3f}, tool errors {figures.tool_errors:.3f}"
        )
        self.save(figures.success)

    def _told(self, metrics: Metrics):
        def tell(step: int, loss: float) -> None:
            metrics.write({"phase": "warm start", "update": step, "loss": loss})
            self.progress.show("warm start", step, {"loss": loss}, total=self.setup.settings["warm_steps"])

        return tell

    def examine(self, params) -> Evaluation:
        """Validation figures."""
        return judge(self.exam(params, self.keys["validation"]), self.setup.env)

    def train(self, metrics: Metrics) -> None:
        """Flow-GRPO, to the last update."""
        settings, began = self.setup.settings, time.monotonic()
        step = make_step(self.setup, self.keys)
        for run, figures in loop.train(step, self.run, settings["updates"]):
            took, began = time.monotonic() - began, time.monotonic()
            check_finite(figures, self.checkpoints)
            speed = {"seconds": took, "tokens_per_second": figures["tokens"] / took}
            metrics.write(plain(figures, self.setup.env), speed)
            self.progress.show("train", figures["update"], figures | speed)
            validation = None
            if figures["update"] % _EVERY.value == 0 or figures["update"] == settings["updates"]:
                seen = self.examine(run.learner.params)
                metrics.write({"phase": "validation", "update": figures["update"]} | shown(seen))
                validation = seen.success
            # From here on an interruption loses nothing: the state and the place in the files belong together.
            self.run, self.position = run, metrics.position
            if validation is not None:
                self.save(validation)

    def finish(self, minutes: float, speed: float | None) -> dict[str, Any]:
        """Test the warm start and the best checkpoint once, on the same tasks; write everything down."""
        best = self.checkpoints.best()
        tree = {"run": self.run, "start": self.start, "resumed_at": ..., "position": ...}
        final = (
            self.checkpoints.restore(best, tree)["run"].learner.params if best is not None else self.run.learner.params
        )
        exam = jax.jit(self._exam("test", _TEST.value))
        rollouts = [exam(params, self.keys["test"]) for params in (self.start, final)]
        before, after = (judge(rollout, self.setup.env) for rollout in rollouts)
        result = {
            **{
                f"{name}_{when}": getattr(figures, field)
                for when, figures in (("before", before), ("after", after))
                for name, field in (("success", "success"), ("tool_error", "tool_errors"), ("turns", "turns"))
            },
            "minutes": minutes,
            "updates": int(self.run.update),
            "best_update": best,
            "seed": self.setup.settings["seed"],
            "tokens_per_second": speed,
            "params_sha256": params_sha256(self.run.learner.params),
            "resumed_at": self.resumed_at,
            "env": self.setup.env.name,
            "algorithm": self.setup.algorithm.name,
            "control": self.setup.settings["control"],
        }
        (self.folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
        curves(self.folder, title=f"{self.setup.env.name}, {self.setup.algorithm.name}")
        self.progress.end()
        print(report(before, after), "", *stories(rollouts, self.setup.env), sep="\n")
        print(f"\nwritten to {self.folder}: metrics.jsonl, timings.jsonl, curves.png, result.json, checkpoints/")
        return result


# Parts ------------------------------------------------------------------------------------------------


def make_step(setup: setups.Setup, keys: Mapping[str, jax.Array]):
    """`step(run) -> (run, metrics)`: an iteration, or as much imitation again where that is the control."""
    if setup.settings["control"] == "supervised":
        return setups.imitation_step(setup, keys["demonstrations"])
    return loop.three_programs(setup.iteration, setup.env, setup.algorithm, setup.sizes)


def judge(rollout: Rollout, env: fg.Env) -> Evaluation:
    """The figures of one trajectory a task."""
    played = jax.device_get(rollout)
    trajectories = played.trajectories
    turns_nt = np.asarray(trajectories.turns)
    errors_n = (played.error & turns_nt).sum(axis=1)
    correct_gn, turns_gn, errors_gn = (x[:, None] for x in (trajectories.correct, turns_nt.sum(axis=1), errors_n))
    return evaluate(correct_gn, turns_gn, errors_gn, played.tool[:, None], tools=env.tools)


def shown(figures: Evaluation) -> dict[str, Any]:
    """What of an evaluation goes into the metrics."""
    return {name: value for name, value in figures.figures().items() if not name.startswith("pass@")}


def plain(figures: Mapping[str, Any], env: fg.Env) -> dict[str, Any]:
    """An update's figures as a line of metrics: shares of the tools by name."""
    calls = np.asarray(figures.get("tool_calls", []), float)
    rest = {name: value for name, value in figures.items() if name != "tool_calls"}
    shares = calls / max(calls.sum(), 1.0)
    return {"phase": "train"} | rest | {"tools": dict(zip(env.tools, shares.tolist(), strict=False))}


def check_finite(figures: Mapping[str, Any], checkpoints: Checkpoints) -> None:
    """Stop where a loss was not a number; the checkpoints before are whole."""
    if figures.get("skipped", 0) > 0:
        raise fg.BadInput(
            f"the loss of update {figures['update']} is not finite: lower --learning_rate; the last good checkpoint is "
            f"that of update {checkpoints.latest()}"
        )


def report(before: Evaluation, after: Evaluation) -> str:
    """The table before / after."""
    rows = [
        ("success", [f"{x.success:.1%} ({x.success_low:.1%} to {x.success_high:.1%})" for x in (before, after)]),
        ("tool errors", [f"{x.tool_errors:.1%}" for x in (before, after)]),
        ("turns", [f"{x.turns:.2f}" for x in (before, after)]),
        *(
            (f"calls of {name}", [f"{(x.tools or {}).get(name, 0):.1%}" for x in (before, after)])
            for name in after.tools or {}
        ),
    ]
    head = f"{'test tasks':24}{'warm start':>28}{'trained':>28}"
    return "\n".join([head, *(f"{name:24}{one:>28}{two:>28}" for name, (one, two) in rows)])


def stories(rollouts: list[Rollout], env: fg.Env) -> list[str]:
    """One task that was failed before and solved after, if there is one, in words."""
    right = [np.asarray(rollout.trajectories.correct) for rollout in rollouts]
    index = int(np.argmax(~right[0] & right[1]))
    names = ("before", "after")
    return [f"{name}:\n{story(rollout, env, index)}" for name, rollout in zip(names, rollouts, strict=True)]


def story(rollout: Rollout, env: fg.Env, index: int) -> str:
    """A trajectory in words: what was said, and after the arrow what was chosen."""
    trajectories = rollout.trajectories
    lines = []
    for turn in range(int(trajectories.turns[index].sum())):
        tokens, chosen = (np.asarray(x[index, turn]) for x in (trajectories.tokens, trajectories.chosen))
        heard = in_words(env, np.where(chosen, PAD, tokens))
        lines.append(f"    {heard:30} > {in_words(env, np.where(chosen, tokens, PAD))}")
    return "\n".join([*lines, f"    {'solved' if bool(trajectories.correct[index]) else 'not solved'}"])


# The command ------------------------------------------------------------------------------------------


def read_flags(seed: int) -> dict[str, Any]:
    """The run's settings: the environment's preset, with what the flags say."""
    chosen = {
        "seed": seed,
        "algorithm": _ALGORITHM.value,
        "control": _CONTROL.value,
        "updates": _UPDATES.value,
        "queries": _QUERIES.value,
        "samples": _SAMPLES.value,
        "learning_rate": _RATE.value,
        "warm_steps": _WARM.value,
    }
    return setups.settings_of(_ENV.value, **chosen)


def one_run(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train in a folder, or go on there."""
    began = time.monotonic()
    setup = setups.build(settings)
    if not _RESUME.value and folder.exists():
        shutil.rmtree(folder)
    with run_folder(folder, settings, may_differ=("updates",)):
        session = Session(setup, folder)
        restored = session.restore()
        with Metrics(folder, session.position) as metrics:
            if not restored:
                session.warm_start(metrics)
            try:
                session.train(metrics)
            except KeyboardInterrupt:
                session.save(None)
                session.progress.say(f"saved at update {int(session.run.update)}; the same command goes on from there")
                raise
        spent = time.monotonic() - began
        return session.finish(spent / 60, mean_speed(folder))


def mean_speed(folder: Path) -> float | None:
    """Median tokens a second of the updates."""
    speeds = [line["tokens_per_second"] for line in read_metrics(folder / TIMINGS) if "tokens_per_second" in line]
    return float(np.median(speeds)) if speeds else None


def main() -> None:
    """Run every seed."""
    results = []
    for seed in range(_SEED.value, _SEED.value + _NUM_SEEDS.value):
        settings = read_flags(seed)
        base = Path(_WORKDIR.value or f"runs/quickstart-{settings['env']}-{seed}")
        folder = base / f"seed{seed}" if _WORKDIR.value and _NUM_SEEDS.value > 1 else base
        results.append(one_run(settings, folder))
    if len(results) > 1:
        for result in results:
            print(f"seed {result['seed']}: {result['success_before']:.1%} -> {result['success_after']:.1%}")
    print(json.dumps(results if len(results) > 1 else results[0]))


if __name__ == "__main__":
    common.run(main)
