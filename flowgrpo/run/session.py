"""One run in its folder: warm start, training, validations, checkpoints, the end; whatever is trained.

    result = run_session(work, folder, every=10)     to the end, or on from where it was stopped

A `Work` says what is done at each stage; every recipe has one. `Session` keeps where the run stands, saves it and goes
on from it; `open_session` opens one to look at.
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

from flowgrpo import loop
from flowgrpo.evaluation.metrics import Evaluation
from flowgrpo.files import write_whole
from flowgrpo.learner.critic import without_critic
from flowgrpo.models.trainable import WHOLE, Trained
from flowgrpo.report.health import WARNINGS, health_summary, watch_health
from flowgrpo.report.metrics import TIMINGS, Metrics, Position, check_saved, read_metrics, without_empty_means
from flowgrpo.report.plots import curves
from flowgrpo.report.progress import Progress
from flowgrpo.report.sinks import open_sinks
from flowgrpo.run.checkpoints import Checkpoints, is_full, params_sha256
from flowgrpo.run.config import RunConfig
from flowgrpo.run.next_steps import after_training
from flowgrpo.run.run_dir import begin_anew, check_identity, check_same, identity, machine, run_folder
from flowgrpo.run.run_files import RESULT
from flowgrpo.run.signals import STOPPING, held, listening
from flowgrpo.run.time_budget import ENDLESS, TimeBudget
from flowgrpo.run.warm_start import WarmStart, finish_warm_start, no_warm_start, saved_position, warm_start
from flowgrpo.types import BadInput

PARAMS, VERSION = "run/learner/params", "run/learner/version"  # where a checkpoint holds them
Step = Callable[[loop.Run], tuple[loop.Run, dict[str, Any]]]


class Validation(NamedTuple):
    """Validation of parameters."""

    score: float  # by which the best checkpoint is found, the higher the better
    figures: dict[str, Any]  # for the metrics
    words: str = ""  # said of the start


class Tested(NamedTuple):
    """How parameters did on the same test tasks."""

    figures: list[Evaluation]
    words: str  # the table, and what else is worth reading
    more: dict[str, Any]  # for result.json


class RunMemory(Protocol):
    """Knowledge that a run has beside its state, and that its checkpoints hold."""

    def saved(self, update: int) -> Any:
        """Pack what a checkpoint of this update is to hold."""
        ...

    def restore(self, update: int, memory: Any) -> None:
        """Know what a checkpoint of this update held."""
        ...


class Work(ABC):
    """The stages of a run, for a `Session`; a recipe derives its own."""

    trained: Trained = WHOLE  # the part that changes: what a checkpoint holds
    evaluates = True  # whether the command `evaluate` tests such a run on fresh tasks
    keeps_start = True  # whether the start is kept to the end, and is the reference
    teacher: Any = None  # parameters that are the reference in the place of the start
    moves_models = False  # whether models are moved off the device, where none may share another's arrays
    remembers = False  # whether checkpoints hold the memory of a master
    memory: RunMemory | None = None  # or that of the run itself, which is one process then
    # Compiles what comes after the imitation for a run like this one, in a thread beside it.
    compile_ahead: Callable[[loop.Run], None] | None = None

    def __init__(
        self,
        recipe: str,
        config: RunConfig,
        *,
        updates: int,
        name: str,  # of what is trained in
        algorithm: str,
        optimizer: optax.GradientTransformation,
        key: jax.Array,
        progress: Progress | None = None,
    ):
        self.recipe, self.config, self.updates, self.name, self.algorithm = recipe, config, updates, name, algorithm
        self.optimizer, self.key, self.progress = optimizer, key, progress or Progress(updates)

    def place(self, tree: Any) -> Any:
        """Put a run, or parameters, on the devices where they belong."""
        return tree

    @abstractmethod
    def initial(self) -> Any:
        """Make parameters of the shapes that are trained, to begin with and to restore into."""

    def frozen(self) -> Any:
        """The parameters that the trained part belongs into, where it isn't all."""
        return None

    def warm_start(self) -> WarmStart:
        """The imitation that comes first; by default none."""
        return no_warm_start(self.initial())

    def begin(self, params: Any) -> Any:
        """Make the parameters that reinforcement changes of those that the imitation ends with."""
        return params

    @abstractmethod
    def make_step(self) -> Step:
        """Make the step of an update."""

    def line(self, figures: Mapping[str, Any]) -> dict[str, Any]:
        """Format an update's figures as a line of metrics."""
        return {"phase": "train"} | dict(figures)

    @abstractmethod
    def examine(self, params: Any) -> Validation:
        """Validate parameters."""

    @abstractmethod
    def finish(self, session: "Session", minutes: float) -> dict[str, Any]:
        """Write what came of the run -> the result."""


class TestedWork(Work):
    """The stages of a run whose start and best parameters are tested on the same tasks at its end."""

    @abstractmethod
    def test(self, params: Sequence[Any], versions: Sequence[int]) -> Tested:
        """Test these parameters; what is played records the version of those that played it."""

    def finish(self, session: "Session", minutes: float) -> dict[str, Any]:
        """Test the start and the best parameters, once, and write the result."""
        best, params = session.best_params()
        self.progress.say(f"testing the start and update {best}, on tasks of their own")
        return session.finish(minutes, self.test((session.start, params), (0, session.best_version())))


def validation_of(figures: Evaluation) -> Validation:
    """Make the validation of an evaluation: all figures but `pass@k`, the best by success."""
    errors = "" if figures.tool_errors is None else f", tool errors {figures.tool_errors:.3f}"
    kept = {name: value for name, value in figures.figures().items() if not name.startswith("pass@")}
    return Validation(figures.success, kept, f"validation success {figures.success:.3f}{errors}")


class Snapshot(NamedTuple):
    """Point that a run has reached, whole: one part is never saved without the other."""

    run: loop.Run
    position: Position  # in the files of metrics
    validation: float | None = None  # None until it was examined, or where that isn't due


class Session:
    """One run in its folder: where it stands, and what it writes."""

    def __init__(self, work: Work, folder: Path):
        self.work, self.folder = work, folder
        self.checkpoints = Checkpoints(folder, keep=2, best="validation", background=True)
        self.progress = work.progress
        self.identity = identity(work.recipe, work.config.to_json())
        self.at: Snapshot | None = None
        self.resumed_at: list[int] = []
        self.memory: Any = None  # what else the checkpoint held from which the run goes on
        self._start: Any = None  # on the host, since it is wanted again at the end only

    @property
    def run(self) -> loop.Run:
        """The state of the run."""
        assert self.at is not None
        return self.at.run

    @property
    def start(self) -> Any:
        """The parameters after the warm start."""
        if self.work.moves_models:
            return self._whole(self._start)
        return self._whole(_same_arrays(self._start, self.run.reference))

    # Stages -------------------------------------------------------------------------------------------

    def begin(self, params, position: Position) -> None:
        """Stand before the first update, with these parameters."""
        trained = self.work.trained
        part = trained.take(params)
        own = trained.put(params, jax.tree.map(jnp.copy, part))  # a step may donate the part
        run = self._start_run(own, self.work.key, start=None if self.work.moves_models else part)
        self._start = jax.device_get(part) if self.work.keeps_start else None
        self.at = Snapshot(self.work.place(run), position)

    def _start_run(self, params: Any, key: jax.Array, start: Any = None) -> loop.Run:
        """The run that begins with `params`; its reference is `start` itself, a copy of what is trained, or nothing."""
        reference = without_critic(start) if self.work.keeps_start else ()
        reference = reference if self.work.teacher is None else self.work.teacher
        return loop.start_run(params, self.work.optimizer, key, reference=reference, trained=self.work.trained)

    def _whole(self, part: Any) -> Any:
        """The parameters with this part, where they are used."""
        return self.work.place(self.work.trained.put(self.work.frozen(), jax.device_put(part)))

    def _part(self, run: loop.Run) -> loop.Run:
        """Take what is saved of a state: all but what is frozen."""
        return run.replace(learner=run.learner.replace(params=self.work.trained.take(run.learner.params)))

    def restore(self, *, may_differ: Sequence[str] = ()) -> bool:
        """Go on from the newest checkpoint, if there is one; another run's is refused, with what differs."""
        step = self.checkpoints.latest()
        if step is None:
            return False
        note = self.checkpoints.note(step)
        allowed = (*self.work.config.may_differ(), *may_differ)
        there = check_identity(note.get("run"), self.checkpoints.folder)
        check_same(self.checkpoints.folder, there, self.identity, may_differ=allowed)
        self.checkpoints.best()  # a note that is damaged is found now, and not at the end
        tree = self.checkpoints.restore(step, self._template())
        self._start, self.resumed_at = tree["start"], list(tree["resumed_at"])
        self.memory = tree.get("memory")
        if self.work.memory is not None:
            self.work.memory.restore(step, self.memory)
        learner = tree["run"].learner
        run = tree["run"].replace(learner=learner.replace(params=self._whole(learner.params)))
        frozen = self.work.frozen()
        if frozen is not None and not self.work.moves_models:
            start = without_critic(self.work.trained.take(frozen))
            run = run.replace(reference=_same_arrays(run.reference, start))
        self.at = Snapshot(self.work.place(run), tree["position"], note.get("validation"))
        if step < self.work.updates:
            self.resumed_at.append(step)
        return True

    def _template(self) -> dict[str, Any]:
        """The shapes of what a checkpoint holds."""
        blank = jax.eval_shape(lambda: self.work.begin(self.work.initial()))
        run = jax.eval_shape(lambda params, key: self._part(self._start_run(params, key)), blank, self.work.key)
        host = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), run.learner.params) if self.work.keeps_start else None
        memory = {"memory": ...} if self.work.remembers or self.work.memory is not None else {}
        return {"run": run, "start": host, "resumed_at": ..., "position": ..., **memory}

    def best_params(self) -> tuple[int | None, Any]:
        """The update with the best validation, and its parameters."""
        best = self.checkpoints.best()
        if best is None or best == int(self.run.update):
            return best, self.run.learner.params
        return best, self.params_at(best)

    def best_version(self) -> int:
        """The version of the parameters with the best validation: updates that had changed them."""
        best = self.checkpoints.best()
        if best is None or best == int(self.run.update):
            return int(self.run.learner.version)
        return int(self.checkpoints.part(best, VERSION))

    def params_at(self, update: int) -> Any:
        """The parameters of a checkpoint."""
        return self._whole(self.checkpoints.part(update, PARAMS, self._template()["run"].learner.params))

    def save(self, memory: Any = None) -> None:
        """Write a checkpoint of where the run stands, while it goes on."""
        assert self.at is not None
        run, position, validation = self.at
        if self.work.memory is not None:
            memory = self.work.memory.saved(int(run.update))
        tree = {"run": self._part(run), "start": self._start, "resumed_at": self.resumed_at, "position": dict(position)}
        tree |= {} if memory is None else {"memory": memory}
        note = {"run": self.identity} | ({} if validation is None else {"validation": validation})
        self.checkpoints.save(int(run.update), tree, note)

    def warm_start(self, metrics: Metrics, budget: TimeBudget = ENDLESS) -> None:
        """Run whatever comes before reinforcement, and begin with the parameters that it gives."""

        def tell(step: int, loss: float) -> None:
            metrics.write({"phase": "warm start", "update": step, "loss": loss})
            self.progress.show("warm start", step, {"loss": loss}, total=warm.steps)

        warm = self.work.warm_start()
        pool = ThreadPoolExecutor(1)
        try:
            compiling = pool.submit(self._compile_ahead, warm.state.params)
            params = warm_start(warm, self.folder, tell, lambda: metrics.position, budget)
            compiling.result()
        finally:
            pool.shutdown(wait=False)
        with held():
            self.begin(self.work.begin(params), metrics.position)

    def _compile_ahead(self, params: Any) -> None:
        """Compile for a run with parameters like these, where the work can."""
        if self.work.compile_ahead is not None:
            self.work.compile_ahead(self.work.place(self._start_run(self.work.begin(params), self.work.key)))

    def open_metrics(self, loggers: Sequence[str] = ()) -> Metrics:
        """The files of metrics, cut back to where the run stands; every line is looked at, and logged elsewhere."""
        say = self.progress.say
        position = saved_position(self.folder) if self.at is None else self.at.position
        if position is None:
            check_saved(self.folder)
        sinks = [partial(watch_health, say=say), *open_sinks(loggers, config=self.work.config.to_json(), say=say)]
        return Metrics(self.folder, position, sinks=sinks)

    def train(self, metrics: Metrics, *, every: int, budget: TimeBudget = ENDLESS) -> None:
        """To the last update, with a validation and a checkpoint every so many, while there is time."""
        budget.check()
        self._validate(metrics, every)
        step = self.work.make_step()
        while int(self.run.update) < self.work.updates:
            budget.check()
            # A step may donate the state that it is given: from then on there is none to save until it has ended.
            with held(unless=self._is_whole):
                self.advance(step, metrics)
            budget.check()
            self._validate(metrics, every)
        budget.check()

    def _is_whole(self) -> bool:
        """Say whether the state can be saved as it is."""
        return not any(x.is_deleted() for x in jax.tree.leaves(self.run) if isinstance(x, jax.Array))

    def advance(self, step, metrics: Metrics) -> dict[str, Any]:
        """One update, and its figures."""
        began = time.monotonic()
        run, figures = next(loop.train_loop(step, self.run, self.work.updates, warns=False))
        took = time.monotonic() - began
        check_finite(figures, self.checkpoints)
        speed = {"seconds": took, "tokens_per_second": figures["tokens"] / took, **figures.pop("timings", {})}
        metrics.write(self.work.line(figures), speed)
        self.progress.show("train", figures["update"], figures | speed)
        self.at = Snapshot(run, metrics.position)
        return figures | speed

    def is_due(self, every: int) -> bool:
        """Say whether an examination is due, or was left undone by an interruption."""
        assert self.at is not None
        update, updates = int(self.run.update), self.work.updates
        return self.at.validation is None and (update % every == 0 or update == updates)

    def _validate(self, metrics: Metrics, every: int) -> None:
        """Examine and save where that is due."""
        if self.is_due(every):
            self.examined(self.work.examine(self.run.learner.params), metrics)

    def examined(self, seen: Validation, metrics: Metrics, memory: Any = None) -> None:
        """Write down what was seen, and save; `memory` is what else a checkpoint is to hold."""
        assert self.at is not None
        update = int(self.run.update)
        if update == 0 and seen.words:
            self.progress.say(f"warm start: {seen.words}")
        with held():
            metrics.write({"phase": "validation", "update": update} | seen.figures)
            self.at = self.at._replace(position=metrics.position, validation=seen.score)
            self.save(memory)
            if update == 0:  # so that metrics of an update mean that there is a checkpoint
                self.checkpoints.wait()
                finish_warm_start(self.folder)

    def stop(self, why: str = "") -> None:
        """Save where the run stands, unless that is saved, and say so, and `why`."""
        latest = self.checkpoints.latest()
        try:
            if self.at is not None and int(self.run.update) != latest:  # or else the note of the best one would go
                self.save()
        except RuntimeError:
            if self._is_whole():
                raise
            # Another thread moved a model to where it is not used: the last checkpoint counts.
        self.checkpoints.wait()
        update, because = self.checkpoints.latest(), f"{why}: " if why else ""
        if update is None:
            begun = saved_position(self.folder) is not None
            how = "goes on from the last of them" if begun else "begins it again"
            self.progress.say(f"{because}a warm start is saved at its validations: the same command {how}")
        else:
            self.progress.say(f"{because}saved at update {update}; the same command goes on from there")

    def finish(self, minutes: float, tested: Tested) -> dict[str, Any]:
        """Write the result, curves and closing message of a run that was tested."""
        before, after = tested.figures
        timings = list(read_metrics(self.folder / TIMINGS))
        speeds = [line["tokens_per_second"] for line in timings if "tokens_per_second" in line]
        result = {
            **{
                f"{name}_{when}": getattr(figures, field)
                for when, figures in (("before", before), ("after", after))
                for name, field in (("success", "success"), ("tool_error", "tool_errors"), ("turns", "turns"))
            },
            **tested.more,
            "minutes": minutes,
            "updates": int(self.run.update),
            "best_update": self.checkpoints.best(),
            "seed": self.work.config.seed,
            "tokens_per_second": float(np.median(speeds)) if speeds else None,
            "params_sha256": params_sha256(self.run.learner.params),
            "resumed_at": self.resumed_at,
            "env": self.work.name,
            "algorithm": self.work.algorithm,
            "control": self.work.config.control,
        }
        self.write_result(result)
        with held():  # an interruption in matplotlib's compiled parts would come out as another error
            curves(self.folder, title=f"{self.work.name}, {self.work.algorithm}")
        self.progress.end()
        print(tested.words)
        told = health_summary(list(read_metrics(self.folder / WARNINGS)))
        if told is not None:
            print(f"\n{told}")
        print(after_training(self.folder, self.work.updates, evaluates=self.work.evaluates))
        return result

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write the result as JSON, whole."""
        write_whole(self.folder / RESULT, json.dumps(result, indent=1) + "\n")


def _same_arrays(tree: Any, other: Any) -> Any:
    """The tree with the arrays of the other one, where all are equal: so that the memory of one of them goes."""
    leaves, others = jax.tree.leaves(tree), jax.tree.leaves(other)
    if jax.tree.structure(tree) != jax.tree.structure(other):
        return tree
    pairs = zip(leaves, others, strict=True)
    return other if all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in pairs) else tree


def work_folder(recipe: str, config: RunConfig, folder: Path, *, patience: float = 0.0) -> AbstractContextManager[Path]:
    """The folder of a run with this Config, as `run_folder` has it."""
    return run_folder(folder, recipe, config.to_json(), may_differ=config.may_differ(), patience=patience)


def run_session(
    work: Work,
    folder: Path,
    *,
    every: int = 10,
    resume: bool = True,
    loggers: Sequence[str] = (),
    budget: TimeBudget = ENDLESS,
) -> dict[str, Any]:
    """Train in a folder, or go on there, to the end; what Ctrl-C, SIGTERM or the budget ends is saved first."""
    began = time.monotonic()
    if not resume:
        begin_anew(folder)
    with listening(*STOPPING), work_folder(work.recipe, work.config, folder):
        session = Session(work, folder)
        try:
            if session.restore():
                session.progress.say(f"going on at update {int(session.run.update)} of {folder}")
            with session.open_metrics(loggers) as metrics, session.checkpoints:
                if session.at is None:
                    begun = saved_position(folder) is not None
                    how = "going on in the warm start of" if begun else "a new run in"
                    session.progress.say(f"{how} {folder}; programs are compiled as they come up")
                    session.warm_start(metrics, budget)
                session.train(metrics, every=every, budget=budget)
            return work.finish(session, (time.monotonic() - began) / 60)
        except KeyboardInterrupt as stop:
            session.stop(str(stop))
            raise
        except OSError as error:
            if not is_full(error):
                raise
            raise BadInput(
                f"{error.filename or folder} could not be written ({error.strerror}): make room, and call the same "
                f"command again; the last good checkpoint is that of update {session.checkpoints.latest()}"
            ) from error


def open_session(work: Work, folder: Path) -> Session:
    """The run in a folder, where it stands."""
    session = Session(work, folder)
    if not session.restore(may_differ=tuple(machine())):  # it may be evaluated anywhere
        raise BadInput(f"{folder} has no checkpoint yet: let the run go on")
    return session


# Lines and tables -------------------------------------------------------------------------------------


def check_finite(figures: Mapping[str, Any], checkpoints: Checkpoints) -> None:
    """Stop where a loss was not a number; the checkpoints before are whole."""
    if figures.get("skipped", 0) > 0:
        raise BadInput(
            f"the loss of update {figures['update']} is not finite: lower --learning_rate; the last good checkpoint is "
            f"that of update {checkpoints.latest()}"
        )


def train_line(figures: Mapping[str, Any], tools: Sequence[str]) -> dict[str, Any]:
    """An update's figures as a line of metrics: shares of the tools by name, and no mean over no tokens."""
    calls = np.asarray(figures.get("tool_calls", []), float)
    rest = {name: value for name, value in without_empty_means(figures).items() if name != "tool_calls"}
    shares = calls / max(calls.sum(), 1.0)
    return {"phase": "train"} | rest | {"tools": dict(zip(tools, shares.tolist(), strict=False))}


def before_after_table(before: Evaluation, after: Evaluation) -> str:
    """The table before / after."""
    right = (before.right_tool, after.right_tool)
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
