"""One run on a pure environment in its folder: warm start, training, checkpoints, the table at the end.

    session = Session(setup, folder);  session.restore() or session.warm_start(metrics);  session.train(metrics)

What `quickstart` runs, and what `evaluate` opens again.
"""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import flowgrpo as fg
from experiments import setups
from experiments.plays import right_tool_share
from flowgrpo import loop
from flowgrpo.envs.env import PAD, in_words
from flowgrpo.evaluate import Evaluation, evaluate
from flowgrpo.learner.checkpoint import Checkpoints, params_sha256
from flowgrpo.report.metrics import Metrics
from flowgrpo.report.plots import curves
from flowgrpo.report.progress import Progress
from flowgrpo.rollout.compiled import Rollout
from flowgrpo.spread import share

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

    def _exam(self, split: str, tasks: int, samples: int = 1):
        setup, temperature = self.setup, self.setup.settings["temperature"]
        sizes = {"tasks": tasks, "samples": samples}
        return loop.make_exam(setup.env, setup.policy, split, **sizes, temperature=temperature, mesh=setup.mesh)

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
        self.run, self.start = share((tree["run"], tree["start"]), self.setup.mesh)
        self.position = tree["position"]
        self.resumed_at = list(tree["resumed_at"])
        if int(self.run.update) < self.setup.settings["updates"]:
            self.resumed_at.append(int(self.run.update))
            self.progress.say(f"going on at update {int(self.run.update)} of {self.folder}")
        return True

    def best_params(self) -> tuple[int | None, Any]:
        """The update with the best validation, and its parameters."""
        best = self.checkpoints.best()
        if best is None:
            return None, self.run.learner.params
        tree = {"run": self.run, "start": self.start, "resumed_at": ..., "position": ...}
        return best, self.checkpoints.restore(best, tree)["run"].learner.params

    def save(self, validation: float | None) -> None:
        """Write a checkpoint of where the run stands; without a validation, only if there is none yet."""
        if validation is None and self.checkpoints.latest() == int(self.run.update):
            return  # it would replace the note by which the best one is found
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
        self.run = share(loop.start_run(best, self.setup.optimizer, self.keys["run"]), self.setup.mesh)
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

    def train(self, metrics: Metrics, *, every: int) -> None:
        """To the last update, with a validation and a checkpoint every so many."""
        settings, began = self.setup.settings, time.monotonic()
        step = make_step(self.setup, self.keys)
        for run, figures in loop.train(step, self.run, settings["updates"]):
            took, began = time.monotonic() - began, time.monotonic()
            check_finite(figures, self.checkpoints)
            speed = {"seconds": took, "tokens_per_second": figures["tokens"] / took}
            metrics.write(plain(figures, self.setup.env), speed)
            self.progress.show("train", figures["update"], figures | speed)
            validation = None
            if figures["update"] % every == 0 or figures["update"] == settings["updates"]:
                seen = self.examine(run.learner.params)
                metrics.write({"phase": "validation", "update": figures["update"]} | shown(seen))
                validation = seen.success
            # From here on an interruption loses nothing: the state and the place in the files belong together.
            self.run, self.position = run, metrics.position
            if validation is not None:
                self.save(validation)

    def test(self, params: Sequence[Any], key: jax.Array, *, tasks: int, samples: int = 1) -> list[Rollout]:
        """How each of these parameters does on the same test tasks."""
        exam = jax.jit(self._exam("test", tasks, samples))
        return [exam(one, key) for one in params]

    def finish(self, minutes: float, speed: float | None, *, tasks: int) -> dict[str, Any]:
        """Test the warm start and the best checkpoint once, on the same tasks; write everything down."""
        best, final = self.best_params()
        rollouts = self.test((self.start, final), self.keys["test"], tasks=tasks)
        before, after = (judge(rollout, self.setup.env) for rollout in rollouts)
        right = [right_tool_share(self.setup.env, rollout) for rollout in rollouts]
        result = {
            **{
                f"{name}_{when}": getattr(figures, field)
                for when, figures in (("before", before), ("after", after))
                for name, field in (("success", "success"), ("tool_error", "tool_errors"), ("turns", "turns"))
            },
            "right_tool_before": right[0],
            "right_tool_after": right[1],
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
        print(report(before, after, right), "", *stories(rollouts, self.setup.env), sep="\n")
        print(f"\nwritten to {self.folder}: metrics.jsonl, timings.jsonl, curves.png, result.json, checkpoints/")
        return result


# Parts ------------------------------------------------------------------------------------------------


def make_step(setup: setups.Setup, keys: Mapping[str, jax.Array]):
    """`step(run) -> (run, metrics)`: an iteration, or as much imitation again where that is the control."""
    if setup.settings["control"] == "supervised":
        return setups.imitation_step(setup, keys["demonstrations"])
    return loop.three_programs(setup.iteration, setup.env, setup.algorithm, setup.sizes)


def judge(rollout: Rollout, env: fg.Env, *, samples: int = 1, ks: Sequence[int] = (1,)) -> Evaluation:
    """The figures of so many trajectories a task."""
    played = jax.device_get(rollout)
    trajectories = played.trajectories
    turns_nt = np.asarray(trajectories.turns)
    errors_n = (played.error & turns_nt).sum(axis=1)
    columns = (trajectories.correct, turns_nt.sum(axis=1), errors_n, played.tool)
    grouped = (np.asarray(x).reshape(-1, samples, *np.shape(x)[1:]) for x in columns)
    return evaluate(*grouped, tools=env.tools, ks=ks)


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


def report(before: Evaluation, after: Evaluation, right: Sequence[float | None] = (None, None)) -> str:
    """The table before / after; `right` is the share of calls that went to the right tool."""
    rows = [
        ("success", [f"{x.success:.1%} ({x.success_low:.1%} to {x.success_high:.1%})" for x in (before, after)]),
        ("tool errors", [f"{x.tool_errors:.1%}" for x in (before, after)]),
        ("turns", [f"{x.turns:.2f}" for x in (before, after)]),
        *(
            (f"calls of {name}", [f"{(x.tools or {}).get(name, 0):.1%}" for x in (before, after)])
            for name in after.tools or {}
        ),
        *([] if None in right else [("right tool of calls", [f"{share:.1%}" for share in right])]),
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
