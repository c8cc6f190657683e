"""Write a page of what a run recorded in `trajectories/`: `write_page`, with phases, advantages and ratios.

The ratio π(checkpoint) / π(sampled) of a token comes from what scores it in training, under the temperature that it was
sampled with (`ratios_of`).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import flowgrpo as fg
from flowgrpo import loop
from flowgrpo.data.tokenizer import load_text
from flowgrpo.envs.env import PAD
from flowgrpo.files import parse_json
from flowgrpo.learner.scoring import make_score_trajectories
from flowgrpo.recipes import agent_config, pure
from flowgrpo.recipes.export import read_config, read_planner, word_model
from flowgrpo.recipes.hosted import ADVANTAGES, HostedConfig
from flowgrpo.recipes.planner import load_start, make_planner
from flowgrpo.recipes.registry import make_env
from flowgrpo.report.trajectory_page import viewer
from flowgrpo.rollout.records import Played, from_json, rollout_of
from flowgrpo.rollout.trajectory_view import Spell, shown_trajectory, speller, word_speller
from flowgrpo.run.config import RunConfig
from flowgrpo.run.run_dir import START
from flowgrpo.staged import is_fresh, turn_by_turn
from flowgrpo.types import Trajectories

BLOCK = 16  # trajectories that are scored together


def ratios_of(
    config: RunConfig, folder: Path, played: Sequence[Played], which: str
) -> tuple[int, list[list[np.ndarray] | None]]:
    """The update of the checkpoint, and the ratios of each trajectory by turn; None for one that has no turn."""
    update, part = read_planner(folder, which)
    if isinstance(config, pure.Config):
        score = _pure_score(config, part)
    else:
        assert isinstance(config, HostedConfig)
        score = _hosted_score(config, folder, part)
    ratios: list[list[np.ndarray] | None] = [None] * len(played)
    every = [one.turns for one in played]
    acted = sorted((n for n, own in enumerate(every) if own), key=lambda n: max(len(turn.tokens) for turn in every[n]))
    turns = max((len(own) for own in every), default=1)
    for first in range(0, len(acted), BLOCK):
        block = acted[first : first + BLOCK]
        logp_ntl = score(rollout_of([played[n] for n in block], (), turns=turns))
        for n, logp_tl in zip(block, logp_ntl, strict=True):
            ratios[n] = [  # of every token; those of context mean nothing
                np.exp(logp_l[: len(turn.tokens)] - turn.logp_sampled)
                for turn, logp_l in zip(every[n], logp_tl, strict=False)
            ]
    return update, ratios


def _pure_score(config: pure.Config, params: Any) -> Callable[[Trajectories], np.ndarray]:
    slots = loop.longest(make_env(config.env))
    return _scoring(word_model(config).policy, params, config.temperature, BLOCK, banned=(PAD,), slots=slots)


def _hosted_score(config: HostedConfig, folder: Path, part: Any) -> Callable[[Trajectories], np.ndarray]:
    """On one device, whatever the run had; `part` is what it trains."""
    here = replace(config, mesh=None, offload="none")
    model = load_start(config.model or folder / START, here)
    planner = make_planner(model, here)
    params = planner.trained.put(planner.params, part)
    sizes = {"slots": config.context_tokens, "compute_dtype": planner.compute_dtype}
    rows = min(config.micro_rows, BLOCK)
    return _scoring(planner.policy, params, config.temperature, rows, banned=model.banned, **sizes)


def _scoring(policy, params: Any, temperature: float, rows: int, **sizes: Any) -> Callable[[Trajectories], np.ndarray]:
    """Log-probabilities (n t l) of trajectories on the host; contexts that are rendered afresh have their own rows."""
    score_trajectories = make_score_trajectories(
        policy, needs={"logp_ref"}, temperature=temperature, micro_rows=rows, **sizes
    )
    run = jax.jit(lambda params, trajectories: score_trajectories(params, params, trajectories).logp_ref)

    def score(trajectories: Trajectories) -> np.ndarray:
        logp = run(params, turn_by_turn(trajectories) if is_fresh(trajectories) else trajectories)
        return np.asarray(logp).reshape(trajectories.tokens.shape)

    return score


FOLDER = "trajectories"


EXAMINED = "trajectories of an examination have none: nothing was learned from them"
UNSCORED = "give --ratios=best, last or start to score these tokens with the weights of a checkpoint"


class Recorded(NamedTuple):
    """A trajectory of a run."""

    played: Played
    phase: str  # "train", "test before", "test after"
    update: int | None  # that learned from it
    advantages: list[Any] | None  # by turn; None where none were recorded, or it took no part


def write_page(folder: Path, out: Path, *, ratios: str | None = None, tokenizer: str | None = None) -> int:
    """Write the page of a run; `ratios` names a checkpoint to score its tokens with. How many trajectories it has."""
    config = read_config(folder)
    recorded = read_trajectories(folder)
    spell = speller_of(config, folder, tokenizer)
    scored, names = [None] * len(recorded), {}
    if ratios is not None:
        update, scored = ratios_of(config, folder, [one.played for one in recorded], ratios)
        names = {"ratio": f"π({ratios}, update {update}) / π(sampled)"}
    every = [
        shown_trajectory(one.played, spell, phase=one.phase, update=one.update, advantages=one.advantages, ratios=own)
        for one, own in zip(recorded, scored, strict=True)
    ]
    is_trained = any(one.update is not None for one in recorded)
    lacking = {"ratio": UNSCORED} | ({} if is_trained else {"advantage": EXAMINED})
    chosen = [config.algorithm] if isinstance(config, pure.Config | agent_config.TaskConfig) else []
    note = ", ".join([folder.resolve().name, *chosen])
    viewer(every, out, title="Rollouts", note=f"{note}, seed {config.seed}", lacking=lacking, names=names)
    return len(every)


def read_trajectories(folder: Path) -> list[Recorded]:
    """All that was recorded: examinations first, then update by update."""
    every = sorted((folder / FOLDER).glob("*.jsonl"))
    files = [path for path in every if not path.name.endswith(ADVANTAGES)]
    if not files:
        raise fg.BadInput(
            f"{folder / FOLDER} holds no trajectories: a quickstart writes some when it has ended, other runs with "
            "every update; let the run go on"
        )
    files.sort(key=lambda path: (path.stem.isdigit(), path.stem != "test-before", path.stem))
    return [one for path in files for one in _read_file(path)]


def _read_file(path: Path) -> list[Recorded]:
    trains = path.stem.isdecimal()
    phase, update = ("train", int(path.stem)) if trains else (path.stem.replace("-", " "), None)
    found = _advantages(path.with_suffix(ADVANTAGES)) if trains else {}
    records = []
    for line in _lines(path):
        played = from_json(line)
        records.append(Recorded(played, phase, update, found.get((played.group, played.sample))))
    return records


def _lines(path: Path) -> list[str]:
    """The lines that are whole; the last of a file that is being written may not be."""
    return [line for line in path.read_text(encoding="utf-8").split("\n")[:-1] if line]


def _advantages(path: Path) -> dict[tuple[int, int], list[Any] | None]:
    """By group and sample; nothing for runs that recorded none."""
    if not path.exists():
        return {}
    try:
        lines = [parse_json(line) for line in _lines(path)]
        return {(line["group"], line["sample"]): line["advantage"] for line in lines}
    except (ValueError, KeyError, TypeError) as error:
        raise fg.BadInput(f"{path} holds no advantages ({error!r:.80}): remove it, or let the run go on") from None


def speller_of(config: RunConfig, folder: Path, tokenizer: str | None = None) -> Spell:
    """Make the function that spells the run's tokens: by the words of its environment, or by its tokenizer."""
    if isinstance(config, pure.Config):
        return word_speller(make_env(config.env).words)
    assert isinstance(config, HostedConfig)
    source = tokenizer or config.model or folder / START
    try:
        return speller(load_text(source))
    except fg.BadInput as error:
        raise fg.BadInput(f"{error}; or name the run's tokenizer by --tokenizer") from None
