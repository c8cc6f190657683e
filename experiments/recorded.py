"""Read what a run recorded in `trajectories/`, with phase and advantages, and write a page of it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import flowgrpo as fg
from experiments.hosted_setup import ADVANTAGES
from experiments.members import make_env
from experiments.recorded_ratios import ratios_of
from flowgrpo.learner.folder import RUN, START, read_run
from flowgrpo.report.viewer import viewer
from flowgrpo.rollout.records import Played, from_json
from flowgrpo.rollout.shown import Spell, shown, speller, word_speller
from flowgrpo.text import load_text

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
    if not (folder / RUN).exists():
        raise fg.BadInput(f"{folder} holds no run: {RUN} is missing; give the --workdir of one")
    settings = read_run(folder)["settings"]
    recorded = read_trajectories(folder)
    spell = speller_of(settings, folder, tokenizer)
    scored, names = [None] * len(recorded), {}
    if ratios is not None:
        update, scored = ratios_of(settings, folder, [one.played for one in recorded], ratios)
        names = {"ratio": f"π({ratios}, update {update}) / π(sampled)"}
    every = [
        shown(one.played, spell, phase=one.phase, update=one.update, advantages=one.advantages, ratios=own)
        for one, own in zip(recorded, scored, strict=True)
    ]
    is_trained = any(one.update is not None for one in recorded)
    lacking = {"ratio": UNSCORED} | ({} if is_trained else {"advantage": EXAMINED})
    # A self_verify has no choice of algorithms.
    note = ", ".join([folder.resolve().name, *([settings["algorithm"]] if "algorithm" in settings else [])])
    viewer(every, out, title="Rollouts", note=f"{note}, seed {settings['seed']}", lacking=lacking, names=names)
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
    trains = path.stem.isdigit()
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
        lines = [json.loads(line) for line in _lines(path)]
        return {(line["group"], line["sample"]): line["advantage"] for line in lines}
    except (ValueError, KeyError, TypeError) as error:
        raise fg.BadInput(f"{path} holds no advantages ({error!r:.80}): remove it, or let the run go on") from None


def speller_of(settings: Mapping[str, Any], folder: Path, tokenizer: str | None = None) -> Spell:
    """Make the function that spells the run's tokens: by the words of its environment, or by its tokenizer."""
    if "env" in settings:
        return word_speller(make_env(settings["env"]).words)
    source = tokenizer or settings["model"] or folder / START
    try:
        return speller(load_text(source))
    except fg.BadInput as error:
        raise fg.BadInput(f"{error}; or name the run's tokenizer by --tokenizer") from None
