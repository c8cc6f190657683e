"""One run in its folder, whatever its environment: warm start, training, checkpoints, the table at the end.

    session = Session(work, folder)
    session.restore() or session.warm_start(metrics);   session.train(metrics, every=10);   session.finish(...)

A `Work` says what is done at each of these stages: `pure_work` for pure environments, `agent_work` for the agent
system. What `quickstart` and `agentflow` run, and what `evaluate` opens again.
"""

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import flowgrpo as fg
from flowgrpo import loop
from flowgrpo.evaluate import Evaluation
from flowgrpo.learner.checkpoint import Checkpoints, params_sha256
from flowgrpo.learner.folder import run_folder
from flowgrpo.report.metrics import TIMINGS, Metrics, read_metrics
from flowgrpo.report.plots import curves
from flowgrpo.report.progress import Progress
from flowgrpo.spread import share


class Tested(NamedTuple):
    """How parameters did on the same test tasks."""

    figures: list[Evaluation]
    words: str  # the table, and what else is worth reading
    more: dict[str, Any]  # for result.json


class Work(NamedTuple):
    """What a run does at each stage; pure or not."""

    name: str  # of the environment
    algorithm: str
    settings: Mapping[str, Any]
    optimizer: optax.GradientTransformation
    key: jax.Array  # of the run
    mesh: Mesh | None
    blank: Callable[[], Any]  # parameters of the right shapes, to restore into
    warm_start: Callable[[Callable[[int, float], None]], Any]  # tell -> the parameters to begin with
    make_step: Callable[[], Callable[[loop.Run], tuple[loop.Run, dict[str, Any]]]]
    line: Callable[[Mapping[str, Any]], dict[str, Any]]  # an update's figures as a line of metrics
    examine: Callable[[Any], Evaluation]  # of parameters, on validation tasks
    test: Callable[[Sequence[Any]], Tested]  # of the warm start and the best, once


class Session:
    """One run in its folder: where it stands, and what it writes."""

    def __init__(self, work: Work, folder: Path):
        self.work, self.folder = work, folder
        self.checkpoints = Checkpoints(folder, keep=2, best="validation")
        self.progress = Progress(work.settings["updates"])
        self.run: Any = None
        self.start: Any = None  # the parameters after the warm start
        self.resumed_at: list[int] = []
        self.position: Mapping[str, int] | None = None

    # Stages -------------------------------------------------------------------------------------------

    def begin(self, params) -> None:
        """Stand before the first update, with these parameters."""
        self.start = params
        self.run = share(loop.start_run(params, self.work.optimizer, self.work.key), self.work.mesh)

    def restore(self) -> bool:
        """Go on from the newest checkpoint, if there is one."""
        step = self.checkpoints.latest()
        if step is None:
            return False
        blank = self.work.blank()
        run = loop.start_run(blank, self.work.optimizer, self.work.key)
        tree = self.checkpoints.restore(step, {"run": run, "start": blank, "resumed_at": ..., "position": ...})
        self.run, self.start = share((tree["run"], tree["start"]), self.work.mesh)
        self.position = tree["position"]
        self.resumed_at = list(tree["resumed_at"])
        if int(self.run.update) < self.work.settings["updates"]:
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
        """Whatever comes before reinforcement, and how good that is."""
        self.begin(self.work.warm_start(self._told(metrics)))
        figures = self.work.examine(self.start)
        metrics.write({"phase": "validation", "update": 0} | shown(figures))
        self.position = metrics.position
        self.progress.say(
            f"warm start: validation success {figures.success:.3f}, tool errors {figures.tool_errors:.3f}"
        )
        self.save(figures.success)

    def _told(self, metrics: Metrics):
        def tell(step: int, loss: float) -> None:
            metrics.write({"phase": "warm start", "update": step, "loss": loss})
            self.progress.show("warm start", step, {"loss": loss}, total=self.work.settings["warm_steps"])

        return tell

    def train(self, metrics: Metrics, *, every: int) -> None:
        """To the last update, with a validation and a checkpoint every so many."""
        settings, began = self.work.settings, time.monotonic()
        step = self.work.make_step()
        for run, figures in loop.train(step, self.run, settings["updates"]):
            took, began = time.monotonic() - began, time.monotonic()
            check_finite(figures, self.checkpoints)
            speed = {"seconds": took, "tokens_per_second": figures["tokens"] / took}
            metrics.write(self.work.line(figures), speed)
            self.progress.show("train", figures["update"], figures | speed)
            validation = None
            if figures["update"] % every == 0 or figures["update"] == settings["updates"]:
                seen = self.work.examine(run.learner.params)
                metrics.write({"phase": "validation", "update": figures["update"]} | shown(seen))
                validation = seen.success
            # From here on an interruption loses nothing: the state and the place in the files belong together.
            self.run, self.position = run, metrics.position
            if validation is not None:
                self.save(validation)

    def finish(self, minutes: float) -> dict[str, Any]:
        """Test the warm start and the best checkpoint once, on the same tasks; write everything down."""
        best, final = self.best_params()
        tested = self.work.test((self.start, final))
        before, after = tested.figures
        result = {
            **{
                f"{name}_{when}": getattr(figures, field)
                for when, figures in (("before", before), ("after", after))
                for name, field in (("success", "success"), ("tool_error", "tool_errors"), ("turns", "turns"))
            },
            **tested.more,
            "minutes": minutes,
            "updates": int(self.run.update),
            "best_update": best,
            "seed": self.work.settings["seed"],
            "tokens_per_second": median_speed(self.folder),
            "params_sha256": params_sha256(self.run.learner.params),
            "resumed_at": self.resumed_at,
            "env": self.work.name,
            "algorithm": self.work.algorithm,
            "control": self.work.settings["control"],
        }
        (self.folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
        curves(self.folder, title=f"{self.work.name}, {self.work.algorithm}")
        self.progress.end()
        print(tested.words)
        print(f"\nwritten to {self.folder}: metrics.jsonl, timings.jsonl, curves.png, result.json, checkpoints/")
        return result


def one_run(work: Work, folder: Path, *, every: int, resume: bool = True) -> dict[str, Any]:
    """Train in a folder, or go on there, to the end; an interruption is saved first."""
    began = time.monotonic()
    if not resume and folder.exists():
        shutil.rmtree(folder)
    with run_folder(folder, dict(work.settings), may_differ=("updates",)):
        session = Session(work, folder)
        restored = session.restore()
        with Metrics(folder, session.position) as metrics:
            if not restored:
                session.warm_start(metrics)
            try:
                session.train(metrics, every=every)
            except KeyboardInterrupt:
                session.save(None)
                session.progress.say(f"saved at update {int(session.run.update)}; the same command goes on from there")
                raise
        return session.finish((time.monotonic() - began) / 60)


# Parts ------------------------------------------------------------------------------------------------


def blank_like(init: Callable[..., Any], key: jax.Array) -> Any:
    """Zeros of the shapes that `init(key)` would give."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(init, key))


def median_speed(folder: Path) -> float | None:
    """Median tokens a second of the updates."""
    speeds = [line["tokens_per_second"] for line in read_metrics(folder / TIMINGS) if "tokens_per_second" in line]
    return float(np.median(speeds)) if speeds else None


def shown(figures: Evaluation) -> dict[str, Any]:
    """What of an evaluation goes into the metrics."""
    return {name: value for name, value in figures.figures().items() if not name.startswith("pass@")}


def train_line(figures: Mapping[str, Any], tools: Sequence[str]) -> dict[str, Any]:
    """An update's figures as a line of metrics: shares of the tools by name."""
    calls = np.asarray(figures.get("tool_calls", []), float)
    rest = {name: value for name, value in figures.items() if name != "tool_calls"}
    shares = calls / max(calls.sum(), 1.0)
    return {"phase": "train"} | rest | {"tools": dict(zip(tools, shares.tolist(), strict=False))}


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
