"""Imitation before reinforcement: steps until the validation loss stops falling, with checkpoints of its own.

    params = warm_start(WarmStart(state, step, batches, validate, steps=400), folder, on_validation)

A process that is killed resumes from the last validation, bit for bit. `finish_warm_start(folder)` deletes the
checkpoints, once the reinforcement has saved one.
"""

import shutil
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optax

from flowgrpo.learner.state import LearnerState, init_learner
from flowgrpo.models.trainable import ALL_PARAMS, TrainableSubset
from flowgrpo.training.checkpoints import Checkpoints
from flowgrpo.training.time_budget import UNLIMITED, TimeBudget
from flowgrpo.types import BadInput, Batch, Params

WARM = "warm_start"  # subfolder of the run, with the checkpoints


class WarmStart(NamedTuple):
    """An imitation phase: where it starts, its steps, and when it ends."""

    state: LearnerState  # before the first step, on its devices
    step: Callable[[LearnerState, Batch], tuple[LearnerState, Any]]  # must not donate the state
    batches: Callable[[int], Iterable[Batch]]  # the batches from this step on
    validate: Callable[[Params], Any]  # -> loss
    steps: int  # at most
    every: int = 50  # steps between two validations
    patience: int = 6  # validations without a new lowest loss, after which it ends
    trainable: TrainableSubset = ALL_PARAMS  # the parameters that are trained, and that a checkpoint stores


def no_warm_start(params: Params) -> WarmStart:
    """An imitation of no steps, for a run that starts from these parameters."""
    state = init_learner(params, optax.identity())
    return WarmStart(state, lambda state, _batch: (state, None), lambda _first: (), lambda _params: 0.0, steps=0)


class _Point(NamedTuple):
    """An imitation at a validation; a checkpoint stores it under these names."""

    count: int  # number of steps done
    state: LearnerState
    best: Params  # at the lowest loss
    losses: list[float]  # of all validations
    position: Mapping[str, Any]  # end of the metrics files


def warm_start(
    warm: WarmStart,
    folder: Path,
    on_validation: Callable[[int, float], Any],
    position: Callable[[], Mapping[str, Any]] = dict,
    budget: TimeBudget = UNLIMITED,
) -> Params:
    """Imitate -> the parameters at the lowest validation loss.

    Args:
        folder: of the run.
        on_validation: called with (steps, loss) at each validation.
        position: end of the metrics files now, which a checkpoint stores too.
        budget: is checked after each validation.
    """
    if not warm.steps:
        return warm.state.params

    def is_over(losses: list[float]) -> bool:
        if not np.isfinite(losses).all():
            raise BadInput("the warm start's validation loss is not finite: lower --warm_rate")
        return len(losses) - 1 - int(np.argmin(losses)) >= warm.patience

    with Checkpoints(folder / WARM, keep=1, background=True) as checkpoints:
        latest = checkpoints.latest()
        if latest is not None:
            template = {"count": ..., "losses": ..., "position": ..., **_trained_part(warm.trainable, warm.state)}
            point = _Point(**checkpoints.restore(latest, template))
            best = warm.trainable.merge(warm.state.params, point.best)
            params = warm.trainable.merge(warm.state.params, point.state.params)
            point = point._replace(state=point.state.replace(params=params), best=best)
        else:
            loss = float(warm.validate(warm.state.params))
            on_validation(0, loss)
            point = _Point(0, warm.state, warm.state.params, [loss], position())
        state = point.state
        batches = () if is_over(point.losses) else islice(warm.batches(point.count), warm.steps - point.count)
        for count, batch in enumerate(batches, point.count + 1):
            state, _ = warm.step(state, batch)
            if count % warm.every:
                continue
            loss = float(warm.validate(state.params))
            on_validation(count, loss)
            losses = [*point.losses, loss]
            ends = is_over(losses)
            best = state.params if loss == min(losses) else point.best
            point = _Point(count, state, best, losses, position())
            saved = {"count": count, "losses": losses, "position": dict(point.position)}
            checkpoints.save(count, {**saved, **_trained_part(warm.trainable, state, best)})
            if ends:
                break
            budget.check()
    return point.best


def _trained_part(trainable: TrainableSubset, state: LearnerState, best: Params = None) -> dict[str, Any]:
    """What a checkpoint stores of a state, and of the best parameters, by default those of the state."""
    best = state.params if best is None else best
    return {"state": state.replace(params=trainable.split(state.params)), "best": trainable.split(best)}


def saved_position(folder: Path) -> Mapping[str, Any] | None:
    """End of the metrics files at the checkpoint from which a warm start resumes; None without one."""
    checkpoints = Checkpoints(folder / WARM)
    latest = checkpoints.latest()
    return None if latest is None else checkpoints.restore_part(latest, "position")


def finish_warm_start(folder: Path) -> None:
    """Delete the checkpoints of a warm start."""
    shutil.rmtree(folder / WARM, ignore_errors=True)
