"""One run in its folder: warm start, training with validations and checkpoints, test; whatever is trained.

    result = run_session(trainable, folder, every=10)     to the end, from the last checkpoint if there is one

A `Trainable` defines the stages, and every recipe has one. `Session` holds the state of the run, saves it and restores
it; its `train` is the loop. `open_session` opens a run to evaluate it.
"""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from flowgrpo.evaluation.metrics import Evaluation
from flowgrpo.files import write_atomic
from flowgrpo.learner.critic import without_critic
from flowgrpo.models.hf import Model
from flowgrpo.models.trainable import ALL_PARAMS, TrainableSubset
from flowgrpo.report.health import WARNINGS, health_sink, health_summary
from flowgrpo.report.metrics import (
    TIMINGS,
    MetricsWriter,
    Position,
    check_no_unsaved_updates,
    read_metrics,
    without_empty_means,
)
from flowgrpo.report.notebook import show_picture
from flowgrpo.report.plots import draw_curves
from flowgrpo.report.progress import Progress
from flowgrpo.report.sinks import open_sinks
from flowgrpo.training.checkpoints import Checkpoints, is_disk_full, params_sha256
from flowgrpo.training.config import RunConfig, flat_settings
from flowgrpo.training.iteration import Iteration, Rollout, RolloutCallbacks, Step, to_numbers
from flowgrpo.training.next_steps import training_message
from flowgrpo.training.run_dir import check_identity, check_same, delete_run, identity, machine, run_folder
from flowgrpo.training.run_files import RESULT
from flowgrpo.training.signals import STOPPING, defer_signals, stop_on_signals
from flowgrpo.training.stages import TrainState, init_train_state
from flowgrpo.training.time_budget import UNLIMITED, TimeBudget
from flowgrpo.training.warm_start import WarmStart, finish_warm_start, no_warm_start, saved_position, warm_start
from flowgrpo.types import JSON, BadInput, Params, PyTree

PARAMS, VERSION = "run/learner/params", "run/learner/version"  # their places in a checkpoint


class Validation(NamedTuple):
    """Result of validating parameters."""

    score: float  # the best checkpoint is the one with the highest
    metrics: dict[str, Any]
    message: str = ""  # for the terminal, after the warm start


class TestReport(NamedTuple):
    """Results of several parameters on the same test tasks."""

    evaluations: list[Evaluation]
    summary: str  # the table, and what else is worth reading
    results: dict[str, Any]  # further entries of result.json


class ExtraState(Protocol):
    """State of a run beside its train state, which checkpoints store too, such as the success rates of its tasks."""

    def to_checkpoint(self, update: int) -> PyTree:
        """What a checkpoint of this update stores."""
        ...

    def restore(self, update: int, saved: PyTree) -> None:
        """Restore from a checkpoint of this update."""
        ...


class Trainable(ABC):
    """The stages of a run, for a `Session`; each recipe derives its own.

    Args:
        recipe: name of the recipe, for `run.json`.
        config: settings of the run.
        updates: number of updates.
        name: of the environment or data, for the result.
        algorithm: its name, for the result.
        optimizer: of the reinforcement phase.
        key: of the run, from which the keys of all updates follow.
        progress: prints to the terminal.
    """

    subset: TrainableSubset = ALL_PARAMS  # the parameters that are trained, and that a checkpoint stores
    can_evaluate = True  # whether the command `evaluate` tests such a run on fresh tasks
    can_export = True  # whether the commands `export` and `view` can read its planner
    keeps_start_params = True  # whether the parameters after the warm start are kept, for the test and as reference
    teacher_params: Params = None  # the reference, if it isn't the start
    offloads_models = False  # whether models are moved off the device, so that none may share another's arrays
    objects: Mapping[str, str] = {}  # names of objects that replace what settings name, for `run.json`
    has_extra_state = False  # whether checkpoints store extra state that is passed to `Session.save`
    extra_state: ExtraState | None = None  # or that the trainable itself has
    # Compiles the programs after the warm start for a state like this one, in a thread beside it.
    compile_ahead: Callable[[TrainState], None] | None = None

    def __init__(
        self,
        recipe: str,
        config: RunConfig,
        *,
        updates: int,
        name: str,
        algorithm: str,
        optimizer: optax.GradientTransformation,
        key: jax.Array,
        progress: Progress | None = None,
    ):
        self.recipe, self.config, self.updates, self.name, self.algorithm = recipe, config, updates, name, algorithm
        self.optimizer, self.key, self.progress = optimizer, key, progress or Progress(updates)

    def place(self, tree: PyTree) -> PyTree:
        """Put a state or parameters on their devices."""
        return tree

    @abstractmethod
    def init_params(self) -> Params:
        """Parameters before the warm start; their shapes are those that a checkpoint is restored into."""

    def frozen_params(self) -> Params:
        """Parameters that the trained subset is merged into; None if all are trained."""
        return None

    def warm_start(self) -> WarmStart:
        """Imitation before the reinforcement; by default none."""
        return no_warm_start(self.init_params())

    def prepare_params(self, params: Params) -> Params:
        """Make the parameters of the reinforcement from those of the warm start, by adding a critic for instance."""
        return params

    @abstractmethod
    def make_step(self) -> Step:
        """Make the step of an update: rollout, advantages and gradient steps."""

    def metrics_line(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """A line of `metrics.jsonl` from the metrics of an update."""
        return {"phase": "train"} | dict(metrics)

    @abstractmethod
    def validate(self, params: Params) -> Validation:
        """Validate parameters."""

    @abstractmethod
    def finish(self, session: "Session", minutes: float) -> dict[str, Any]:
        """Write the outcome of the run -> the result."""


class EvaluatedTrainable(Trainable):
    """A run whose start and best parameters are tested on the same tasks at its end."""

    @abstractmethod
    def test(self, params: Sequence[Params], versions: Sequence[int]) -> TestReport:
        """Test these parameters; recorded tokens carry the version of those that sampled them."""

    def finish(self, session: "Session", minutes: float) -> dict[str, Any]:
        """Test the start and the best parameters, and write the result."""
        best, params = session.best_params()
        self.progress.log(f"testing the start and update {best}, on tasks of their own")
        return session.finish(minutes, self.test((session.start_params, params), (0, session.best_version())))


class RolloutTrainable(EvaluatedTrainable):
    """A run whose updates are rollout, advantages and update; a `Trainer` calls these stages one by one."""

    iteration: Iteration

    @abstractmethod
    def roll_out(
        self, state: TrainState, callbacks: RolloutCallbacks, tasks: Any = None, samples: int | None = None
    ) -> Rollout:
        """Roll out the tasks of an update; or these tasks, `samples` trajectories each."""

    @abstractmethod
    def evaluate(self, params: Params, tasks: Any = None, samples: int = 1) -> Evaluation:
        """Evaluate parameters on validation tasks, or on these, with `samples` trajectories each."""

    @abstractmethod
    def to_model(self, params: Params) -> Model:
        """The model with these parameters."""


def validation_of(evaluation: Evaluation) -> Validation:
    """The validation of an evaluation: its metrics without `pass@k`; the best has the highest success."""
    errors = "" if evaluation.tool_errors is None else f", tool errors {evaluation.tool_errors:.3f}"
    metrics = {name: value for name, value in evaluation.metrics().items() if not name.startswith("pass@")}
    return Validation(evaluation.success, metrics, f"validation success {evaluation.success:.3f}{errors}")


class Snapshot(NamedTuple):
    """Where a run is; its parts are saved together or not at all."""

    state: TrainState
    position: Position  # end of the metrics files
    validation: float | None = None  # score; None if this update is not validated, or not yet


class Session:
    """One run in its folder: its state, and what it writes."""

    def __init__(self, trainable: Trainable, folder: Path):
        self.trainable, self.folder = trainable, folder
        self.checkpoints = Checkpoints(folder, keep=2, best="validation", background=True)
        self.progress = trainable.progress
        self.identity = identity(trainable.recipe, trainable.config.to_json(), trainable.objects)
        self.snapshot: Snapshot | None = None
        self.resumed_at: list[int] = []
        self.extra_state: PyTree = None  # of the checkpoint that the run resumed from
        self._start: Params = None  # the trained subset after the warm start, on the host

    @property
    def state(self) -> TrainState:
        """The train state of the run."""
        assert self.snapshot is not None
        return self.snapshot.state

    @property
    def start_params(self) -> Params:
        """The parameters after the warm start."""
        if self.trainable.offloads_models:
            return self._merge(self._start)
        return self._merge(_share_arrays(self._start, self.state.reference))

    # The loop -----------------------------------------------------------------------------------------

    def train(
        self,
        metrics: MetricsWriter,
        *,
        every: int,
        budget: TimeBudget = UNLIMITED,
        on_update: Callable[[dict[str, Any]], object] | None = None,
    ) -> None:
        """Train to the last update, with a validation and a checkpoint every `every` updates.

        A signal waits until the step has ended, if the step has donated the state: only then is there one to save.
        """
        budget.check()
        if self.is_validation_due(every):  # of the start, or of an update after which the run was stopped
            self.record_validation(self.trainable.validate(self.state.learner.params), metrics)
        step = self.trainable.make_step()
        for _ in range(int(self.state.update), self.trainable.updates):
            budget.check()
            with defer_signals(unless=self._is_intact):
                numbers = self.run_update(step, metrics)
            if on_update is not None:
                on_update(numbers)
            budget.check()
            if self.is_validation_due(every):
                self.record_validation(self.trainable.validate(self.state.learner.params), metrics)
        budget.check()

    def run_update(self, step: Step, metrics: MetricsWriter) -> dict[str, Any]:
        """Run one update: rollout, advantages, gradient steps and metrics -> its metrics and timings."""
        started = time.monotonic()
        state, updated = step(self.state)
        numbers: dict[str, Any] = {"update": int(state.update), **to_numbers(updated)}
        seconds = time.monotonic() - started
        check_finite(numbers, self.checkpoints)
        timings = {
            "seconds": seconds,
            "tokens_per_second": numbers["tokens"] / seconds,
            **numbers.pop("timings", {}),
        }
        metrics.write(self.trainable.metrics_line(numbers), timings)
        self.progress.show("train", numbers["update"], {**without_empty_means(numbers), **timings})
        self.snapshot = Snapshot(state, metrics.position)
        return numbers | timings

    def is_validation_due(self, every: int) -> bool:
        """Whether the current update is to be validated, and has not been."""
        assert self.snapshot is not None
        update = int(self.state.update)
        return self.snapshot.validation is None and (update % every == 0 or update == self.trainable.updates)

    def record_validation(self, validation: Validation, metrics: MetricsWriter, extra_state: PyTree = None) -> None:
        """Write the metrics of a validation, and a checkpoint with `extra_state`."""
        assert self.snapshot is not None
        update = int(self.state.update)
        if update == 0 and validation.message:
            self.progress.log(f"the start: {validation.message}")
        with defer_signals():
            metrics.write({"phase": "validation", "update": update} | validation.metrics)
            self.snapshot = self.snapshot._replace(position=metrics.position, validation=validation.score)
            self.save(extra_state)
            if update == 0:  # so that metrics of an update mean that there is a checkpoint
                self.checkpoints.wait()
                finish_warm_start(self.folder)

    def _is_intact(self) -> bool:
        """Whether the state can be saved: no step has donated its arrays."""
        return not any(x.is_deleted() for x in jax.tree.leaves(self.state) if isinstance(x, jax.Array))

    # Before the loop ----------------------------------------------------------------------------------

    def warm_start(self, metrics: MetricsWriter, budget: TimeBudget = UNLIMITED) -> None:
        """Run the warm start while later programs compile, and start the reinforcement from its parameters."""

        def on_validation(step: int, loss: float) -> None:
            metrics.write({"phase": "warm start", "update": step, "loss": loss})
            self.progress.show("warm start", step, {"loss": loss}, total=warm.steps)

        def compile_ahead(params: Params) -> None:
            if trainable.compile_ahead is not None:
                state = _init_state(trainable, trainable.prepare_params(params), trainable.key)
                trainable.compile_ahead(trainable.place(state))

        trainable = self.trainable
        warm = trainable.warm_start()
        pool = ThreadPoolExecutor(1)
        try:
            compiling = pool.submit(compile_ahead, warm.state.params)
            params = warm_start(warm, self.folder, on_validation, lambda: metrics.position, budget)
            compiling.result()
        finally:
            pool.shutdown(wait=False)
        with defer_signals():
            self.start_from(trainable.prepare_params(params), metrics.position)

    def start_from(self, params: Params, position: Position) -> None:
        """Set the state before the first update, with these parameters."""
        trainable, subset = self.trainable, self.trainable.subset
        self._start = jax.device_get(subset.split(params)) if trainable.keeps_start_params else None
        self.snapshot = Snapshot(initial_state(trainable, params), position)

    def open_metrics(self, loggers: Sequence[str] = ()) -> MetricsWriter:
        """Open the metrics files, cut back to the current snapshot, with sinks for health warnings and loggers."""
        log = self.progress.log
        position = saved_position(self.folder) if self.snapshot is None else self.snapshot.position
        if position is None:
            check_no_unsaved_updates(self.folder)
        loggers_sinks = open_sinks(loggers, config=flat_settings(self.trainable.config.to_json()), log=log)
        return MetricsWriter(self.folder, position, sinks=[partial(health_sink, log=log), *loggers_sinks])

    # Checkpoints --------------------------------------------------------------------------------------

    def save(self, extra_state: PyTree = None) -> None:
        """Write a checkpoint of the current snapshot, in the background."""
        assert self.snapshot is not None
        state, position, validation = self.snapshot
        if self.trainable.extra_state is not None:
            extra_state = self.trainable.extra_state.to_checkpoint(int(state.update))
        tree = {
            "run": without_frozen(self.trainable, state),
            "start": self._start,
            "resumed_at": self.resumed_at,
            "position": dict(position),
        }
        tree |= {} if extra_state is None else {"memory": extra_state}
        metadata: dict[str, JSON] = {"run": self.identity}
        metadata |= {} if validation is None else {"validation": validation}
        self.checkpoints.save(int(state.update), tree, metadata)

    def restore(self, *, may_change: Sequence[str] = ()) -> bool:
        """Restore the newest checkpoint -> whether there is one.

        The checkpoint of another run is refused, unless the two differ in settings named in `may_change` alone.
        """
        trainable, step = self.trainable, self.checkpoints.latest()
        if step is None:
            return False
        metadata = self.checkpoints.metadata(step)
        saved_identity = check_identity(metadata.get("run"), self.checkpoints.folder)
        allowed = (*trainable.config.may_change(), *may_change)
        check_same(self.checkpoints.folder, saved_identity, self.identity, may_change=allowed)
        self.checkpoints.best()  # damaged metadata raises now, and not at the end
        tree = self.checkpoints.restore(step, self._template())
        self._start, self.resumed_at = tree["start"], list(tree["resumed_at"])
        self.extra_state = tree.get("memory")
        if trainable.extra_state is not None:
            trainable.extra_state.restore(step, self.extra_state)
        self.snapshot = Snapshot(with_frozen(trainable, tree["run"]), tree["position"], metadata.get("validation"))
        if step < trainable.updates:
            self.resumed_at.append(step)
        return True

    def _template(self) -> dict[str, Any]:
        """The structure and shapes of a checkpoint."""
        trainable = self.trainable
        params = jax.eval_shape(lambda: trainable.prepare_params(trainable.init_params()))
        state = jax.eval_shape(
            lambda params, key: without_frozen(trainable, _init_state(trainable, params, key)), params, trainable.key
        )
        start = None
        if trainable.keeps_start_params:
            start = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), state.learner.params)
        has_extra_state = trainable.has_extra_state or trainable.extra_state is not None
        extra = {"memory": ...} if has_extra_state else {}
        return {"run": state, "start": start, "resumed_at": ..., "position": ..., **extra}

    def _merge(self, subset: Params) -> Params:
        return merge_params(self.trainable, subset)

    def best_params(self) -> tuple[int | None, Params]:
        """The update with the best validation, and its parameters."""
        best = self.checkpoints.best()
        if best is None or best == int(self.state.update):
            return best, self.state.learner.params
        return best, self.params_at(best)

    def best_version(self) -> int:
        """The version of the parameters with the best validation: the number of updates that had changed them."""
        best = self.checkpoints.best()
        if best is None or best == int(self.state.update):
            return int(self.state.learner.version)
        return int(self.checkpoints.restore_part(best, VERSION))

    def params_at(self, update: int) -> Params:
        """The parameters of a checkpoint."""
        return self._merge(self.checkpoints.restore_part(update, PARAMS, self._template()["run"].learner.params))

    # The end ------------------------------------------------------------------------------------------

    def stop(self, reason: str = "") -> None:
        """Save the current snapshot, unless it is saved already, and print that, with the reason."""
        latest = self.checkpoints.latest()
        try:
            # A second checkpoint of the same update would lose the score of the best one.
            if self.snapshot is not None and int(self.state.update) != latest:
                self.save()
        except RuntimeError:
            if self._is_intact():
                raise
            # Another thread moved a model to where it is not used: the last checkpoint counts.
        self.checkpoints.wait()
        update, because = self.checkpoints.latest(), f"{reason}: " if reason else ""
        if update is None:
            has_saved_steps = saved_position(self.folder) is not None
            action = "resumes from the last of them" if has_saved_steps else "starts it again"
            self.progress.log(f"{because}a warm start is saved at its validations: the same command {action}")
        else:
            self.progress.log(f"{because}saved at update {update}; the same command resumes from there")

    def finish(self, minutes: float, report: TestReport) -> dict[str, Any]:
        """Write the result, the curves and the closing message of a run that was tested."""
        before, after = report.evaluations
        timings = list(read_metrics(self.folder / TIMINGS))
        speeds = [line["tokens_per_second"] for line in timings if "tokens_per_second" in line]
        result = {
            **{
                f"{name}_{when}": getattr(evaluation, field)
                for when, evaluation in (("before", before), ("after", after))
                for name, field in (("success", "success"), ("tool_error", "tool_errors"), ("turns", "turns"))
            },
            **report.results,
            "minutes": minutes,
            "updates": int(self.state.update),
            "best_update": self.checkpoints.best(),
            "seed": self.trainable.config.run.seed,
            "tokens_per_second": float(np.median(speeds)) if speeds else None,
            "params_sha256": params_sha256(self.state.learner.params),
            "resumed_at": self.resumed_at,
            "env": self.trainable.name,
            "algorithm": self.trainable.algorithm,
            "control": self.trainable.config.run.control,
        }
        self.write_result(result)
        with defer_signals():  # an interruption in matplotlib's compiled parts would come out as another error
            curves = draw_curves(self.folder, title=f"{self.trainable.name}, {self.trainable.algorithm}")
        self.progress.end()
        show_picture(curves)
        print(report.summary)
        warnings = health_summary(list(read_metrics(self.folder / WARNINGS)))
        if warnings is not None:
            print(f"\n{warnings}")
        can = {"can_evaluate": self.trainable.can_evaluate, "can_export": self.trainable.can_export}
        print(training_message(self.folder, self.trainable.updates, **can))
        return result

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write the result as JSON, atomically."""
        write_atomic(self.folder / RESULT, json.dumps(result, indent=1) + "\n")


# States -----------------------------------------------------------------------------------------------


def initial_state(trainable: Trainable, params: Params) -> TrainState:
    """The state before the first update, with these parameters, on its devices."""
    start = trainable.subset.split(params)
    params = trainable.subset.merge(params, jax.tree.map(jnp.copy, start))  # a step may donate the subset
    state = _init_state(trainable, params, trainable.key, start=None if trainable.offloads_models else start)
    return trainable.place(state)


def _init_state(trainable: Trainable, params: Params, key: jax.Array, start: Params = None) -> TrainState:
    """The state before the first update; its reference is the teacher, `start`, or a copy of the subset."""
    reference = without_critic(start) if trainable.keeps_start_params else ()
    reference = reference if trainable.teacher_params is None else trainable.teacher_params
    return init_train_state(params, trainable.optimizer, key, reference=reference, trainable=trainable.subset)


def without_frozen(trainable: Trainable, state: TrainState) -> TrainState:
    """The state with the trained subset of its parameters alone, as checkpoints store it."""
    return state.replace(learner=state.learner.replace(params=trainable.subset.split(state.learner.params)))


def with_frozen(trainable: Trainable, state: TrainState) -> TrainState:
    """A state as checkpoints store it with all its parameters, on its devices."""
    state = state.replace(learner=state.learner.replace(params=merge_params(trainable, state.learner.params)))
    frozen = trainable.frozen_params()
    if frozen is not None and not trainable.offloads_models:
        start = without_critic(trainable.subset.split(frozen))
        state = state.replace(reference=_share_arrays(state.reference, start))
    return trainable.place(state)


def merge_params(trainable: Trainable, subset: Params) -> Params:
    """All parameters with this trained subset, on their devices."""
    return trainable.place(trainable.subset.merge(trainable.frozen_params(), jax.device_put(subset)))


def _share_arrays(tree: PyTree, other: PyTree) -> PyTree:
    """The tree with the arrays of the other one if all are equal, so that one of the two can be freed."""
    leaves, others = jax.tree.leaves(tree), jax.tree.leaves(other)
    if jax.tree.structure(tree) != jax.tree.structure(other):
        return tree
    pairs = zip(leaves, others, strict=True)
    return other if all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in pairs) else tree


def trainable_folder(
    recipe: str, config: RunConfig, folder: Path, *, objects: Mapping[str, str] = {}, lock_timeout: float = 0.0
) -> AbstractContextManager[Path]:
    """The folder of a run with this Config and these names of objects, as `run_folder` opens it."""
    may_change = config.may_change()
    return run_folder(
        folder, recipe, config.to_json(), objects=objects, may_change=may_change, lock_timeout=lock_timeout
    )


def run_session(
    trainable: Trainable,
    folder: Path,
    *,
    every: int = 10,
    resume: bool = True,
    loggers: Sequence[str] = (),
    budget: TimeBudget = UNLIMITED,
    on_update: Callable[[dict[str, Any]], object] | None = None,
) -> dict[str, Any]:
    """Train in a folder to the end, and test -> the result. Ctrl-C, SIGTERM or the end of the budget save it first.

    Args:
        every: number of updates between two validations, each with a checkpoint.
        resume: continue from the newest checkpoint; False deletes an earlier run.
        loggers: where to send metrics too: "tensorboard", "wandb", "trackio".
        budget: the time that the run may take now.
        on_update: called after each update with its metrics and timings.
    """
    started = time.monotonic()
    if not resume:
        delete_run(folder)
    run = trainable_folder(trainable.recipe, trainable.config, folder, objects=trainable.objects)
    with stop_on_signals(*STOPPING), run:
        session = Session(trainable, folder)
        try:
            if session.restore():
                session.progress.log(f"resuming at update {int(session.state.update)} of {folder}")
            with session.open_metrics(loggers) as metrics, session.checkpoints:
                if session.snapshot is None:
                    has_saved_steps = saved_position(folder) is not None
                    action = "resuming the warm start of" if has_saved_steps else "a new run in"
                    session.progress.log(f"{action} {folder}; programs are compiled as they come up")
                    session.warm_start(metrics, budget)
                session.train(metrics, every=every, budget=budget, on_update=on_update)
            return trainable.finish(session, (time.monotonic() - started) / 60)
        except KeyboardInterrupt as stop:
            session.stop(str(stop))
            raise
        except OSError as error:
            if not is_disk_full(error):
                raise
            raise BadInput(
                f"{error.filename or folder} could not be written ({error.strerror}): make room, and call the same "
                f"command again; the last good checkpoint is that of update {session.checkpoints.latest()}"
            ) from error


def open_session(trainable: Trainable, folder: Path) -> Session:
    """The run in a folder at its newest checkpoint, to evaluate it; on any machine."""
    session = Session(trainable, folder)
    if not session.restore(may_change=tuple(machine())):
        raise BadInput(f"{folder} has no checkpoint yet: continue the run")
    return session


# Lines and tables -------------------------------------------------------------------------------------


def check_finite(metrics: Mapping[str, Any], checkpoints: Checkpoints) -> None:
    """Raise `BadInput` if the loss of an update was not finite, with the last good checkpoint."""
    if metrics.get("skipped", 0) > 0:
        raise BadInput(
            f"the loss of update {metrics['update']} is not finite: lower --learning_rate; the last good checkpoint is "
            f"that of update {checkpoints.latest()}"
        )


def train_line(metrics: Mapping[str, Any], tools: Sequence[str]) -> dict[str, Any]:
    """A line of `metrics.jsonl` from an update: fractions of calls by tool, and no mean over no tokens."""
    calls = np.asarray(metrics.get("tool_calls", []), float)
    fractions = (calls / max(calls.sum(), 1.0)).tolist()
    other = {name: value for name, value in without_empty_means(metrics).items() if name != "tool_calls"}
    return {"phase": "train"} | other | {"tools": dict(zip(tools, fractions, strict=False))}


def before_after_table(before: Evaluation, after: Evaluation) -> str:
    """Table of two evaluations on the test tasks, before and after training."""
    right = (before.right_tool, after.right_tool)
    rows = [
        ("success", [f"{x.success:.1%} ({x.success_low:.1%} to {x.success_high:.1%})" for x in (before, after)]),
        ("tool errors", [f"{x.tool_errors:.1%}" for x in (before, after)]),
        ("turns", [f"{x.turns:.2f}" for x in (before, after)]),
        *(
            (f"calls of {tool}", [f"{(x.tools or {}).get(tool, 0):.1%}" for x in (before, after)])
            for tool in after.tools or {}
        ),
        *([] if None in right else [("right tool of calls", [f"{fraction:.1%}" for fraction in right])]),
    ]
    head = f"{'test tasks':24}{'before':>28}{'after':>28}"
    return "\n".join([head, *(f"{name:24}{start:>28}{trained:>28}" for name, (start, trained) in rows)])
