"""One run in its folder, whatever its environment: warm start, training, checkpoints, the table at the end.

    session = Session(work, folder)
    session.restore() or session.warm_start(metrics);   session.train(metrics, every=10);   session.finish(...)

A `Work` says what is done at each of these stages: `pure_work` for pure environments, `hosted_work` for the agent
system. What `quickstart` and `agentflow` run, and what `evaluate` opens again.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

import flowgrpo as fg
from experiments.endings import after_training
from experiments.session_files import check_finite, median_speed, shown, write_result
from experiments.stopping import STOPPING, held, listening
from flowgrpo import loop
from flowgrpo.evaluate import Evaluation
from flowgrpo.learner.checkpoint import Checkpoints, params_sha256
from flowgrpo.learner.disk import is_full
from flowgrpo.learner.folder import begin_anew, check_same, identity, machine, run_folder
from flowgrpo.learner.trained import WHOLE, Trained
from flowgrpo.report.health import WARNINGS, summary, watch_health
from flowgrpo.report.metrics import Metrics, Position, check_saved, read_metrics
from flowgrpo.report.plots import curves
from flowgrpo.report.progress import Progress
from flowgrpo.report.sinks import open_sinks

RESULT = "result.json"
PARAMS = "run/learner/params"  # where a checkpoint holds them
MAY_DIFFER = ("updates", "offload", "watch_seconds")  # a run may be made longer; the others change no bit


class Tested(NamedTuple):
    """How parameters did on the same test tasks."""

    figures: list[Evaluation]
    words: str  # the table, and what else is worth reading
    more: dict[str, Any]  # for result.json


class Memory(Protocol):
    """Knowledge that a run has beside its state, and that its checkpoints hold."""

    def saved(self, update: int) -> Any:
        """Pack what a checkpoint of this update is to hold."""
        ...

    def restore(self, update: int, memory: Any) -> None:
        """Know what a checkpoint of this update held."""
        ...


class Work(NamedTuple):
    """Functions of a run for each of its stages, and the settings they need; its environment may be pure or not."""

    name: str  # of the environment
    algorithm: str
    settings: Mapping[str, Any]
    optimizer: optax.GradientTransformation
    key: jax.Array  # of the run
    place: Callable[[Any], Any]  # a run, or parameters -> the same on the devices where they belong
    blank: Callable[[], Any]  # parameters of the right shapes, to restore into
    warm_start: Callable[[Callable[[int, float], None]], Any]  # tell -> the parameters to begin with
    make_step: Callable[[], Callable[[loop.Run], tuple[loop.Run, dict[str, Any]]]]
    line: Callable[[Mapping[str, Any]], dict[str, Any]]  # an update's figures as a line of metrics
    examine: Callable[[Any], Evaluation]  # of parameters, on validation tasks
    test: Callable[[Sequence[Any]], Tested]  # of the warm start and the best, once
    trained: Trained = WHOLE  # the part that changes: what a checkpoint holds
    frozen: Callable[[], Any] = lambda: None  # the parameters that the part belongs into, where it isn't all
    remembers: bool = False  # whether its checkpoints hold the memory of a master
    memory: Memory | None = None  # or that of the run itself, which is one process then
    progress: Progress | None = None  # that its stages show themselves


class Standing(NamedTuple):
    """Point that a run has reached, whole: one part is never saved without the other."""

    run: loop.Run
    position: Position  # in the files of metrics
    validation: float | None = None  # None until it was examined, or where that isn't due


class Session:
    """One run in its folder: where it stands, and what it writes."""

    def __init__(self, work: Work, folder: Path):
        self.work, self.folder = work, folder
        self.checkpoints = Checkpoints(folder, keep=2, best="validation", background=True)
        self.progress = work.progress or Progress(work.settings["updates"])
        self.identity = identity(work.settings)
        self.at: Standing | None = None
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
        return self._whole(self._start)

    # Stages -------------------------------------------------------------------------------------------

    def begin(self, params, position: Position) -> None:
        """Stand before the first update, with these parameters."""
        trained = self.work.trained
        part = trained.take(params)
        own = trained.put(params, jax.tree.map(jnp.copy, part))  # a step may donate the part
        run = loop.start_run(own, self.work.optimizer, self.work.key, trained=trained)
        self._start = jax.device_get(part)
        self.at = Standing(self.work.place(run), position)

    def _whole(self, part: Any) -> Any:
        """The parameters with this part, where they are used."""
        return self.work.place(self.work.trained.put(self.work.frozen(), jax.device_put(part)))

    def _part(self, run: loop.Run) -> loop.Run:
        """Take what is saved of a state: all but what is frozen."""
        return run.replace(learner=run.learner.replace(params=self.work.trained.take(run.learner.params)))

    def restore(self, *, may_differ: Sequence[str] = MAY_DIFFER) -> bool:
        """Go on from the newest checkpoint, if there is one; another run's is refused, with what differs."""
        step = self.checkpoints.latest()
        if step is None:
            return False
        note = self.checkpoints.note(step)
        check_same(self.checkpoints.folder, note.get("run", {}), self.identity, may_differ=may_differ)
        tree = self.checkpoints.restore(step, self._template())
        self._start, self.resumed_at = tree["start"], list(tree["resumed_at"])
        self.memory = tree.get("memory")
        if self.work.memory is not None:
            self.work.memory.restore(step, self.memory)
        learner = tree["run"].learner
        run = tree["run"].replace(learner=learner.replace(params=self._whole(learner.params)))
        self.at = Standing(self.work.place(run), tree["position"], note.get("validation"))
        if step < self.work.settings["updates"]:
            self.resumed_at.append(step)
        return True

    def _template(self) -> dict[str, Any]:
        """The shapes of what a checkpoint holds."""
        start = partial(loop.start_run, optimizer=self.work.optimizer, trained=self.work.trained)
        blank = jax.eval_shape(self.work.blank)
        run = jax.eval_shape(lambda params, key: self._part(start(params, key=key)), blank, self.work.key)
        host = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), run.learner.params)
        memory = {"memory": ...} if self.work.remembers or self.work.memory is not None else {}
        return {"run": run, "start": host, "resumed_at": ..., "position": ..., **memory}

    def best_params(self) -> tuple[int | None, Any]:
        """The update with the best validation, and its parameters."""
        best = self.checkpoints.best()
        if best is None or best == int(self.run.update):
            return best, self.run.learner.params
        return best, self.params_at(best)

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

    def warm_start(self, metrics: Metrics) -> None:
        """Run whatever comes before reinforcement, and begin with the parameters that it gives."""
        params = self.work.warm_start(self._told(metrics))
        with held():
            self.begin(params, metrics.position)

    def open_metrics(self, loggers: Sequence[str] = ()) -> Metrics:
        """The files of metrics, cut back to where the run stands; every line is looked at, and logged elsewhere."""
        say = self.progress.say
        if self.at is None:
            check_saved(self.folder)
        sinks = [partial(watch_health, say=say), *open_sinks(loggers, config=self.work.settings, say=say)]
        return Metrics(self.folder, self.at and self.at.position, sinks=sinks)

    def _told(self, metrics: Metrics):
        def tell(step: int, loss: float) -> None:
            metrics.write({"phase": "warm start", "update": step, "loss": loss})
            self.progress.show("warm start", step, {"loss": loss}, total=self.work.settings["warm_steps"])

        return tell

    def train(self, metrics: Metrics, *, every: int) -> None:
        """To the last update, with a validation and a checkpoint every so many."""
        self._validate(metrics, every)
        step = self.work.make_step()
        while int(self.run.update) < self.work.settings["updates"]:
            # A step may donate the state that it is given: from then on there is none to save until it has ended.
            with held(unless=self._is_whole):
                self.advance(step, metrics)
            self._validate(metrics, every)

    def _is_whole(self) -> bool:
        """Whether the state can be saved as it is."""
        return not any(x.is_deleted() for x in jax.tree.leaves(self.run) if isinstance(x, jax.Array))

    def advance(self, step, metrics: Metrics) -> dict[str, Any]:
        """One update, and its figures."""
        began = time.monotonic()
        run, figures = next(loop.train(step, self.run, self.work.settings["updates"]))
        took = time.monotonic() - began
        check_finite(figures, self.checkpoints)
        speed = {"seconds": took, "tokens_per_second": figures["tokens"] / took, **figures.pop("timings", {})}
        metrics.write(self.work.line(figures), speed)
        self.progress.show("train", figures["update"], figures | speed)
        self.at = Standing(run, metrics.position)
        return figures | speed

    def is_due(self, every: int) -> bool:
        """Whether an examination is due, or was left undone by an interruption."""
        assert self.at is not None
        update, updates = int(self.run.update), self.work.settings["updates"]
        return self.at.validation is None and (update % every == 0 or update == updates)

    def _validate(self, metrics: Metrics, every: int) -> None:
        """Examine and save where that is due."""
        if self.is_due(every):
            self.examined(self.work.examine(self.run.learner.params), metrics)
            if int(self.run.update) == 0:  # so that metrics of an update mean that there is a checkpoint
                self.checkpoints.wait()

    def examined(self, seen: Evaluation, metrics: Metrics, memory: Any = None) -> None:
        """Write down what was seen, and save; `memory` is what else a checkpoint is to hold."""
        assert self.at is not None
        update = int(self.run.update)
        if update == 0:
            words = f"validation success {seen.success:.3f}, tool errors {seen.tool_errors:.3f}"
            self.progress.say(f"warm start: {words}")
        with held():
            metrics.write({"phase": "validation", "update": update} | shown(seen))
            self.at = self.at._replace(position=metrics.position, validation=seen.success)
            self.save(memory)

    def stop(self) -> None:
        """Save where the run stands, unless that is saved, and say so."""
        latest = self.checkpoints.latest()
        try:
            if self.at is not None and int(self.run.update) != latest:  # or else the note of the best one would go
                self.save()
        except RuntimeError:
            if self._is_whole():
                raise
            # Another thread moved a model to where it is not used: the last checkpoint counts.
        self.checkpoints.wait()
        update = self.checkpoints.latest()
        if update is None:
            self.progress.say("a warm start is not saved while it runs: the same command begins it anew")
        else:
            self.progress.say(f"saved at update {update}; the same command goes on from there")

    def finish(self, minutes: float, tested: Tested | None = None) -> dict[str, Any]:
        """Test the warm start and the best checkpoint once, on the same tasks, unless they were; write all down."""
        best = self.checkpoints.best()
        self.progress.say(f"testing the start and update {best}, on tasks of their own")
        tested = self.work.test((self.start, self.best_params()[1])) if tested is None else tested
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
        write_result(self.folder / RESULT, result)
        with held():  # an interruption in matplotlib's compiled parts would come out as another error
            curves(self.folder, title=f"{self.work.name}, {self.work.algorithm}")
        self.progress.end()
        print(tested.words)
        told = summary(list(read_metrics(self.folder / WARNINGS)))
        if told is not None:
            print(f"\n{told}")
        print(after_training(self.folder, self.work.settings))
        return result


def one_run(
    work: Work, folder: Path, *, every: int, resume: bool = True, loggers: Sequence[str] = ()
) -> dict[str, Any]:
    """Train in a folder, or go on there, to the end; what Ctrl-C or SIGTERM ends is saved first."""
    began = time.monotonic()
    if not resume:
        begin_anew(folder)
    with listening(*STOPPING), run_folder(folder, dict(work.settings), may_differ=MAY_DIFFER):
        session = Session(work, folder)
        try:
            if session.restore():
                session.progress.say(f"going on at update {int(session.run.update)} of {folder}")
            with session.open_metrics(loggers) as metrics, session.checkpoints:
                if session.at is None:
                    session.progress.say(f"a new run in {folder}; programs are compiled as they come up")
                    session.warm_start(metrics)
                session.train(metrics, every=every)
            return session.finish((time.monotonic() - began) / 60)
        except KeyboardInterrupt:
            session.stop()
            raise
        except OSError as error:
            if not is_full(error):
                raise
            raise fg.BadInput(
                f"{error.filename or folder} could not be written ({error.strerror}): make room, and call the same "
                f"command again; the last good checkpoint is that of update {session.checkpoints.latest()}"
            ) from error


def open_session(work: Work, folder: Path) -> Session:
    """The run in a folder, where it stands."""
    session = Session(work, folder)
    if not session.restore(may_differ=(*MAY_DIFFER, *machine())):  # it may be evaluated anywhere
        raise fg.BadInput(f"{folder} has no checkpoint yet: let the run go on")
    return session


def blank_like(init: Callable[..., Any], key: jax.Array) -> Any:
    """Zeros of the shapes that `init(key)` would give."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(init, key))
