"""The page of the trajectories that a run recorded in `trajectories/`: `write_page`.

It shows phases, advantages, and with `ratios` the importance ratio pi(checkpoint) / pi(sampled) of each token, scored
as in training, at the temperature of sampling (`ratios_of`).
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from flowgrpo.files import parse_json
from flowgrpo.learner.scoring import make_score_trajectories
from flowgrpo.publish.export import read_config, read_planner, reader_of
from flowgrpo.recipes.planner_reader import PlannerReader, RecordedScoring
from flowgrpo.report.trajectory_page import write_viewer
from flowgrpo.rollout.records import RecordedTrajectory, from_json, to_trajectories
from flowgrpo.rollout.trajectory_view import TokenDecoder, shown_trajectory
from flowgrpo.training.config import RunConfig
from flowgrpo.training.language_model import ADVANTAGES
from flowgrpo.training.stages import has_fresh_contexts, split_turns
from flowgrpo.types import BadInput, Trajectories

BLOCK = 16  # trajectories that are scored together
FOLDER = "trajectories"
NO_ADVANTAGES = "trajectories of an evaluation have none: nothing was learned from them"
NO_RATIOS = "give --ratios=best, last or start to score these tokens with the weights of a checkpoint"


class LoggedTrajectory(NamedTuple):
    """A recorded trajectory, with what the page shows of it."""

    trajectory: RecordedTrajectory
    phase: str  # "train", "test before", "test after"
    update: int | None  # that learned from it
    advantages: list[Any] | None  # by turn; None if none were recorded, or it took no part in the update


def write_page(folder: Path, out: Path, *, ratios: str | None = None, tokenizer: str | None = None) -> int:
    """Write the page of a run -> the number of its trajectories.

    Args:
        folder: of the run.
        out: file to write.
        ratios: checkpoint (best, last, start) by which tokens are scored; None: no ratios.
        tokenizer: of the run's model, if it is not where the run found it.
    """
    config = read_config(folder)
    recorded = read_trajectories(folder)
    decode = token_decoder_of(reader_of(folder), config, folder, tokenizer)
    ratios_by_trajectory, names = [None] * len(recorded), {}
    if ratios is not None:
        update, ratios_by_trajectory = ratios_of(config, folder, [entry.trajectory for entry in recorded], ratios)
        names = {"ratio": f"π({ratios}, update {update}) / π(sampled)"}
    shown = [
        shown_trajectory(
            entry.trajectory,
            decode,
            phase=entry.phase,
            update=entry.update,
            advantages=entry.advantages,
            ratios=trajectory_ratios,
        )
        for entry, trajectory_ratios in zip(recorded, ratios_by_trajectory, strict=True)
    ]
    has_training = any(entry.update is not None for entry in recorded)
    missing = {"ratio": NO_RATIOS} | ({} if has_training else {"advantage": NO_ADVANTAGES})
    algorithm = config.settings().get("algorithm")
    note = ", ".join(filter(None, [folder.resolve().name, algorithm]))
    write_viewer(shown, out, title="Rollouts", note=f"{note}, seed {config.run.seed}", lacking=missing, names=names)
    return len(shown)


# Ratios -------------------------------------------------------------------------------------------------


def ratios_of(
    config: RunConfig, folder: Path, trajectories: Sequence[RecordedTrajectory], which: str
) -> tuple[int, list[list[np.ndarray] | None]]:
    """The update of the checkpoint, and each trajectory's ratios by turn and token; None for one without a turn."""
    update, params = read_planner(folder, which)
    scoring = reader_of(folder).scoring(config, folder, params)
    score = _make_score(scoring)
    ratios: list[list[np.ndarray] | None] = [None] * len(trajectories)
    turns = [trajectory.turns for trajectory in trajectories]
    acted = sorted((n for n, own in enumerate(turns) if own), key=lambda n: max(len(turn.tokens) for turn in turns[n]))
    max_turns = max((len(own) for own in turns), default=1)
    for first in range(0, len(acted), BLOCK):
        block = acted[first : first + BLOCK]
        logp_ntl = score(to_trajectories([trajectories[n] for n in block], (), turns=max_turns))
        for n, logp_tl in zip(block, logp_ntl, strict=True):
            ratios[n] = [  # of all tokens; those of observations mean nothing
                np.exp(logp_l[: len(turn.tokens)] - turn.logp_sampled)
                for turn, logp_l in zip(turns[n], logp_tl, strict=False)
            ]
    return update, ratios


def _make_score(scoring: RecordedScoring) -> Callable[[Trajectories], np.ndarray]:
    """Log-probabilities (n t l) of trajectories, on the host; each fresh context is scored as a row of its own."""
    score_trajectories = make_score_trajectories(
        scoring.policy,
        needs={"logp_ref"},
        settings=scoring.settings,
        micro_rows=min(scoring.micro_rows, BLOCK),
        slots=scoring.slots,
    )
    params = scoring.params
    run = jax.jit(lambda params, trajectories: score_trajectories(params, params, trajectories).logp_ref)

    def score(trajectories: Trajectories) -> np.ndarray:
        logp = run(params, split_turns(trajectories) if has_fresh_contexts(trajectories) else trajectories)
        return np.asarray(logp).reshape(trajectories.tokens.shape)

    return score


# Files --------------------------------------------------------------------------------------------------


def read_trajectories(folder: Path) -> list[LoggedTrajectory]:
    """All recorded trajectories: those of evaluations first, then update by update."""
    paths = sorted((folder / FOLDER).glob("*.jsonl"))
    files = [path for path in paths if not path.name.endswith(ADVANTAGES)]
    if not files:
        raise BadInput(
            f"{folder / FOLDER} holds no trajectories: a quickstart writes some when it has ended, other runs with "
            "every update; continue the run"
        )
    files.sort(key=lambda path: (path.stem.isdigit(), path.stem != "test-before", path.stem))
    recorded = []
    for path in files:
        is_training = path.stem.isdecimal()
        phase, update = ("train", int(path.stem)) if is_training else (path.stem.replace("-", " "), None)
        advantages = _read_advantages(path.with_suffix(ADVANTAGES)) if is_training else {}
        for line in _whole_lines(path):
            trajectory = from_json(line)
            own_advantages = advantages.get((trajectory.group, trajectory.sample))
            recorded.append(LoggedTrajectory(trajectory, phase, update, own_advantages))
    return recorded


def _whole_lines(path: Path) -> list[str]:
    """The complete lines; the last one of a file that is being written may be cut."""
    return [line for line in path.read_text(encoding="utf-8").split("\n")[:-1] if line]


def _read_advantages(path: Path) -> dict[tuple[int, int], list[Any] | None]:
    """Advantages by group and sample; {} if none were recorded."""
    if not path.exists():
        return {}
    try:
        lines = [parse_json(line) for line in _whole_lines(path)]
        return {(line["group"], line["sample"]): line["advantage"] for line in lines}
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{path} holds no advantages ({error!r:.80}): remove it, or continue the run") from None


def token_decoder_of(reader: PlannerReader, config: RunConfig, folder: Path, tokenizer: str | None) -> TokenDecoder:
    """The function from token ids to text: by the words of a pure environment, or by the run's tokenizer."""
    try:
        return reader.token_decoder(config, folder, tokenizer)
    except BadInput as error:
        raise BadInput(f"{error}; or name the run's tokenizer by --tokenizer") from None
