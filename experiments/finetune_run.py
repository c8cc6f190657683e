"""The run of `experiments.finetune`: steps, validations and checkpoints, which go on where they were stopped."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import flowgrpo as fg
from experiments.endings import command, contents, ending
from experiments.finetune_lessons import METHODS, Lesson, lesson_of, split
from experiments.session import RESULT
from experiments.session_files import write_result
from experiments.stopping import STOPPING, held, listening
from flowgrpo.learner.checkpoint import Checkpoints, params_sha256
from flowgrpo.learner.folder import begin_anew, run_folder
from flowgrpo.learner.state import LearnerState, init_learner, make_optimizer
from flowgrpo.learner.update import cast
from flowgrpo.models.decoder import make_policy
from flowgrpo.models.hf import Model
from flowgrpo.report.metrics import Metrics, Position, check_saved
from flowgrpo.report.progress import Progress
from flowgrpo.report.sinks import open_sinks


class Place(NamedTuple):
    """Point that a run has reached, as a checkpoint holds it."""

    state: LearnerState
    step: int
    resumed_at: list[int]
    position: Position  # in the files of metrics; empty before the first line


def finetune(
    settings: Mapping[str, Any], folder: Path, *, resume: bool = True, loggers: Sequence[str] = ()
) -> dict[str, Any]:
    """Train in a folder, or go on there, to the end."""
    began, model = time.monotonic(), load_masters(settings)
    examples = split(settings, METHODS[settings["method"]].read(settings["data"], model.text))
    if not resume:
        begin_anew(folder)
    steps = max(math.ceil(settings["epochs"] * len(examples.learned) / settings["batch"]), 1)
    optimizer = make_optimizer(
        learning_rate=settings["learning_rate"], warmup_steps=steps // 20, decay_steps=steps - steps // 20
    )
    lesson = lesson_of(settings, model, examples.held, optimizer)
    progress, checkpoints = Progress(steps), Checkpoints(folder, keep=2, best="validation")
    counts = {"examples": len(examples.learned), "held_out": len(examples.held), "left_out": examples.left_out}
    progress.say("{examples} examples, {held_out} held out, {left_out} left out as too long".format(**counts))
    before = lesson.examine(model.params)
    sinks = open_sinks(loggers, config=settings, say=progress.say)
    with listening(*STOPPING), run_folder(folder, settings, may_differ=("checkpoint_every",)):
        place = _restore(checkpoints, Place(init_learner(model.params, optimizer), 0, [], {}), steps, progress)
        if not place.position:
            check_saved(folder)
        with Metrics(folder, place.position, sinks=sinks) as metrics:
            if not place.position:
                place = _validated(place, before, metrics, checkpoints)
            place = _train(place, lesson, examples.learned, settings, steps, metrics, checkpoints, progress)
        best = checkpoints.best()
        assert best is not None  # the end was validated
        params = checkpoints.part(best, "state/params", model.params)
        fg.save_model(folder / "model", model._replace(params=cast(params, settings["dtype"])))
        result = {
            "method": settings["method"],
            **{f"{name}_before": value for name, value in before.items()},
            **{f"{name}_after": value for name, value in lesson.examine(params).items()},
            **counts,
            "steps": steps,
            "best_step": best,
            "seed": settings["seed"],
            "minutes": (time.monotonic() - began) / 60,
            "params_sha256": params_sha256(params),
            "resumed_at": place.resumed_at,
        }
        write_result(folder / RESULT, result)
        progress.end()
        print(ending(f"written to {folder}: {contents(folder)}", _next(folder)))
    return result


def _next(folder: Path) -> list[tuple[str, str]]:
    """List what can be done with the model: (command, what it is for)."""
    return [
        (command("chat", model=folder / "model"), "talks to it"),
        (command("agentflow", model=folder / "model", tasks="TASKS"), "trains it inside the agent system"),
    ]


def load_masters(settings: Mapping[str, Any]) -> Model:
    """The model with its parameters in float32, since small steps would be lost in less, and a policy that computes."""
    model = fg.load_model(settings["model"], dtype="float32")
    return model._replace(policy=make_policy(model.config, dtype=settings["dtype"]))


def _train(
    place: Place, lesson: Lesson, examples: Sequence[Any], settings, steps: int, metrics, checkpoints, progress
) -> Place:
    """To the last step, with a validation and a checkpoint every so many; an interruption is saved first."""
    try:
        if place.step and _is_due(place.step, steps, settings) and "validation" not in checkpoints.note(place.step):
            place = _validated(place, lesson.examine(place.state.params), metrics, checkpoints)  # it was stopped in it
        for chosen in batches(len(examples), settings["batch"], settings["seed"], place.step, steps):
            began, batch = time.monotonic(), lesson.lay([examples[i] for i in chosen])
            state, figures = lesson.step(place.state, batch)
            figures, step = {name: float(value) for name, value in figures.items()}, place.step + 1
            if figures.pop("skipped") > 0:
                raise fg.BadInput(f"the loss of step {step} is not finite: lower --learning_rate")
            speed = {"tokens_per_second": (np.asarray(batch.segments) > 0).sum() / (time.monotonic() - began)}
            with held():
                metrics.write({"phase": "train", "update": step} | figures, speed)
                place = place._replace(state=state, step=step, position=metrics.position)
            progress.show(settings["method"], step, figures | speed)
            if _is_due(step, steps, settings):
                place = _validated(place, lesson.examine(place.state.params), metrics, checkpoints)
    except KeyboardInterrupt:
        if checkpoints.latest() != place.step:  # another of the same would replace the note by which the best is found
            checkpoints.save(place.step, _tree(place))
        progress.say(f"saved at step {place.step}; the same command goes on from there")
        raise
    return place


def _is_due(step: int, steps: int, settings: Mapping[str, Any]) -> bool:
    """Whether a step is validated."""
    return step % settings["checkpoint_every"] == 0 or step == steps


def _validated(place: Place, seen: Mapping[str, float], metrics: Metrics, checkpoints: Checkpoints) -> Place:
    """The place with its held-out figures written down, and saved."""
    with held():
        metrics.write({"phase": "validation", "update": place.step} | dict(seen))
        place = place._replace(position=metrics.position)
        loss = next(iter(seen.values()))
        checkpoints.save(place.step, _tree(place), {"validation": -loss})
    return place


def _tree(place: Place) -> dict[str, Any]:
    """Pack a place as the tree that a checkpoint holds."""
    return {"state": place.state, "resumed_at": list(place.resumed_at), "position": dict(place.position)}


def _restore(checkpoints: Checkpoints, start: Place, steps: int, progress: Progress) -> Place:
    """Restore the place of the newest checkpoint, or give the start where there is none."""
    step = checkpoints.latest()
    if step is None:
        return start
    tree = checkpoints.restore(step, {"state": start.state, "resumed_at": ..., "position": ...})
    going_on = [step] if step < steps else []
    progress.say(f"going on at step {step} of {checkpoints.folder.parent}")
    return Place(tree["state"], step, [*tree["resumed_at"], *going_on], tree["position"])


def batches(count: int, size: int, seed: int, first: int, steps: int) -> Iterator[Sequence[int]]:
    """The examples of each step from the `first` on: a new order in every epoch, end to end, without a state."""
    for step in range(first, steps):
        places = np.arange(step * size, (step + 1) * size)
        epochs = sorted({int(place) // count for place in places})
        orders = {epoch: np.random.default_rng([seed, epoch]).permutation(count) for epoch in epochs}
        yield [int(orders[place // count][place % count]) for place in places.tolist()]
