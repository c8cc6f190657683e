"""Imitation before reinforcement: steps until the validation loss falls no more, with checkpoints of its own.

    params = warm_start(WarmStart(state, step, batches, validate, steps=400), folder, tell)

A process that is killed goes on from the last validation, to the same bits. `finish_warm_start(folder)` removes the
checkpoints, when what follows has saved one of its own.
"""

import shutil
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optax

from flowgrpo.contracts import Params
from flowgrpo.learner.state import LearnerState, init_learner
from flowgrpo.models.trainable import WHOLE, Trained
from flowgrpo.run.checkpoints import Checkpoints
from flowgrpo.run.time_budget import ENDLESS, TimeBudget
from flowgrpo.types import BadInput, Batch

WARM = "warm_start"  # the folder of its checkpoints, in that of the run


class WarmStart(NamedTuple):
    """An imitation: where it begins, how it steps, and when it ends."""

    state: LearnerState  # to begin with, where it belongs
    step: Callable[[LearnerState, Batch], tuple[LearnerState, Any]]  # which must not donate the state
    batches: Callable[[int], Iterable[Batch]]  # those from a step on
    validate: Callable[[Params], Any]  # a loss
    steps: int  # at most
    every: int = 50  # steps between two validations
    patience: int = 6  # validations that may bring nothing
    trained: Trained = WHOLE  # the part that moves: what a checkpoint holds


def no_warm_start(params: Params) -> WarmStart:
    """An imitation of no steps, for a run that begins with these parameters."""
    state = init_learner(params, optax.identity())
    return WarmStart(state, lambda state, _batch: (state, None), lambda _first: (), lambda _params: 0.0, steps=0)


class Reached(NamedTuple):
    """Point of an imitation at a validation."""

    count: int  # steps that were made
    state: LearnerState
    best: Params  # where the loss was lowest
    losses: list[float]  # of every validation
    position: Mapping[str, Any]  # in the files of metrics


def warm_start(
    warm: WarmStart,
    folder: Path,
    tell: Callable[[int, float], Any],
    position: Callable[[], Mapping[str, Any]] = dict,
    budget: TimeBudget = ENDLESS,
) -> Params:
    """Return the parameters at the lowest validation loss; `tell(steps, loss)` hears of each validation.

    `position` says where the files of metrics stand, which a checkpoint holds, too. The budget is looked at after each
    validation.
    """
    if not warm.steps:
        return warm.state.params
    with Checkpoints(folder / WARM, keep=1, background=True) as checkpoints:
        latest = checkpoints.latest()
        if latest is not None:
            template = {"count": ..., "losses": ..., "position": ..., **_part(warm.trained, warm.state)}
            at = Reached(**checkpoints.restore(latest, template))
            best = warm.trained.put(warm.state.params, at.best)
            params = warm.trained.put(warm.state.params, at.state.params)
            at = at._replace(state=at.state.replace(params=params), best=best)
        else:
            loss = float(warm.validate(warm.state.params))
            tell(0, loss)
            at = Reached(0, warm.state, warm.state.params, [loss], position())
        _check(at.losses)
        state = at.state
        batches = () if _is_over(at, warm) else islice(warm.batches(at.count), warm.steps - at.count)
        for count, batch in enumerate(batches, at.count + 1):
            state, _ = warm.step(state, batch)
            if count % warm.every:
                continue
            loss = float(warm.validate(state.params))
            tell(count, loss)
            losses = [*at.losses, loss]
            _check(losses)
            at = Reached(count, state, state.params if loss == min(losses) else at.best, losses, position())
            saved = {"count": count, "losses": losses, "position": dict(at.position)}
            checkpoints.save(count, {**saved, **_part(warm.trained, state, at.best)})
            if _is_over(at, warm):
                break
            budget.check()
    return at.best


def _part(trained: Trained, state: LearnerState, best: Params | None = None) -> dict[str, Any]:
    """What a checkpoint holds of a state, and of the best parameters; those of the state by default."""
    best = state.params if best is None else best
    return {"state": state.replace(params=trained.take(state.params)), "best": trained.take(best)}


def saved_position(folder: Path) -> Mapping[str, Any] | None:
    """Read where the files of metrics stood at the checkpoint that a warm start goes on from; None without one."""
    checkpoints = Checkpoints(folder / WARM)
    latest = checkpoints.latest()
    return None if latest is None else checkpoints.part(latest, "position")


def finish_warm_start(folder: Path) -> None:
    """Remove the checkpoints of a warm start, since the run has one of its own."""
    shutil.rmtree(folder / WARM, ignore_errors=True)


def _is_over(at: Reached, warm: WarmStart) -> bool:
    """Say whether the loss has fallen no more for as many validations as are tolerated."""
    return len(at.losses) - 1 - int(np.argmin(at.losses)) >= warm.patience


def _check(losses: list[float]) -> None:
    if not np.isfinite(losses).all():
        raise BadInput("the warm start's validation loss is not finite: lower --warm_rate")
