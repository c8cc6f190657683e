"""Ratios of recorded tokens: records and a checkpoint flow in, π(checkpoint) / π(sampled) of each token flows out.

The tokens are scored by what scores them in training, under the temperature that they were sampled with.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.members import make_env
from experiments.planner_files import read_planner, word_model
from experiments.planner_setup import load_start, make_planner
from flowgrpo import loop
from flowgrpo.envs.env import PAD
from flowgrpo.learner.appraise import make_appraise
from flowgrpo.learner.folder import START
from flowgrpo.rollout.records import Played, rollout_of
from flowgrpo.staged import turn_by_turn
from flowgrpo.types import Trajectories

BLOCK = 16  # trajectories that are scored together


def ratios_of(
    settings: Mapping[str, Any], folder: Path, played: Sequence[Played], which: str
) -> tuple[int, list[list[np.ndarray] | None]]:
    """The update of the checkpoint, and the ratios of each trajectory by turn; None for one that has no turn."""
    update, part = read_planner(folder, which)
    score = _pure_score(settings, part) if "env" in settings else _hosted_score(settings, folder, part)
    ratios: list[list[np.ndarray] | None] = [None] * len(played)
    acted = sorted((n for n, one in enumerate(played) if one.trajectory.turns), key=lambda n: _longest(played[n]))
    turns = max((len(one.trajectory.turns) for one in played), default=1)
    for first in range(0, len(acted), BLOCK):
        block = acted[first : first + BLOCK]
        logp_ntl = score(rollout_of([played[n] for n in block], (), turns=turns).trajectories)
        for n, logp_tl in zip(block, logp_ntl, strict=True):
            ratios[n] = _ratios(played[n], logp_tl)
    return update, ratios


def _longest(one: Played) -> int:
    return max(len(turn.tokens) for turn in one.trajectory.turns)


def _ratios(one: Played, logp_tl: np.ndarray) -> list[np.ndarray]:
    """By turn, of every token; those of context mean nothing."""
    turns = one.trajectory.turns
    return [
        np.exp(logp_l[: len(turn.tokens)] - turn.logp_sampled) for turn, logp_l in zip(turns, logp_tl, strict=False)
    ]


def _pure_score(settings: Mapping[str, Any], params: Any) -> Callable[[Trajectories], np.ndarray]:
    slots = loop.longest(make_env(settings["env"]))
    return _scoring(settings, word_model(settings).policy, params, banned=(PAD,), slots=slots)


def _hosted_score(settings: Mapping[str, Any], folder: Path, part: Any) -> Callable[[Trajectories], np.ndarray]:
    """On one device, whatever the run had; `part` is what it trains."""
    here = {**settings, "mesh": None, "offload": "none"}
    model = load_start(settings["model"] or folder / START, here)
    planner = make_planner(model, here)
    sizes = {"slots": settings["context_tokens"], "compute_dtype": planner.compute_dtype}
    return _scoring(here, planner.policy, planner.trained.put(planner.params, part), banned=model.banned, **sizes)


def _scoring(settings: Mapping[str, Any], policy, params: Any, **sizes: Any) -> Callable[[Trajectories], np.ndarray]:
    """Log-probabilities (n t l) of trajectories on the host; contexts that are rendered afresh have their own rows."""
    rows = min(settings.get("micro_rows", BLOCK), BLOCK)
    own = {"temperature": settings["temperature"], "micro_rows": rows}
    appraise = make_appraise(policy, needs={"logp_ref"}, **own, **sizes)
    run = jax.jit(lambda params, trajectories: appraise(params, params, trajectories).logp_ref)

    def score(trajectories: Trajectories) -> np.ndarray:
        appends = trajectories.appends is None or bool(np.all(trajectories.appends))
        logp = run(params, trajectories if appends else turn_by_turn(trajectories))
        return np.asarray(logp).reshape(trajectories.tokens.shape)

    return score
