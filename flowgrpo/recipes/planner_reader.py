"""How the planner of a run is read from its folder: its start as a model, the text of its tokens, their scores.

`TEXT` reads a planner with a tokenizer; `word_planner.WORDS` that of a pure environment. A `Recipe` has one of them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from flowgrpo.contracts import Policy
from flowgrpo.data.tokenizer import load_tokenizer
from flowgrpo.learner.update import ScoreSettings
from flowgrpo.models.hf import Model, load_model
from flowgrpo.recipes.recipe import Objects
from flowgrpo.rollout.trajectory_view import TokenDecoder, make_token_decoder
from flowgrpo.training.planner import frozen_base_dtype, load_start, make_planner
from flowgrpo.training.run_files import START
from flowgrpo.training.settings import HostedConfig
from flowgrpo.types import Params


class RecordedScoring(NamedTuple):
    """What scores recorded tokens as training does."""

    policy: Policy
    params: Params  # all of them
    settings: ScoreSettings
    micro_rows: int
    slots: int  # of a row


class PlannerReader(NamedTuple):
    """Functions of a run's settings and its folder.

    start_path      folder or hub id of the start; None if it has no files
    load_start      (settings, folder, objects) -> the start as a model: shape, tokenizer, weights under an adapter
    token_decoder   (settings, folder, tokenizer or None) -> the function from token ids to text
    scoring         (settings, folder, trained parameters) -> what scores recorded tokens
    replaced_by     kinds of objects of which settings and folder have the name alone, so it can't be read
    """

    start_path: Callable[[Any, Path], str | Path | None]
    load_start: Callable[[Any, Path, Objects], Model]
    token_decoder: Callable[[Any, Path, str | None], TokenDecoder]
    scoring: Callable[[Any, Path, Params], RecordedScoring]
    replaced_by: tuple[str, ...]


def _start_path(config: HostedConfig, folder: Path) -> str | Path:
    return config.model.model or folder / START


def _load_start(config: HostedConfig, folder: Path, objects: Objects) -> Model:
    if isinstance(objects.model, Model):
        return objects.model.base
    return load_model(_start_path(config, folder), dtype=config.model.dtype, quantised=frozen_base_dtype(config.model))


def _token_decoder(config: HostedConfig, folder: Path, tokenizer: str | None = None) -> TokenDecoder:
    return make_token_decoder(load_tokenizer(tokenizer or _start_path(config, folder)))


def _scoring(config: HostedConfig, folder: Path, params: Params) -> RecordedScoring:
    local = config.replace(mesh=None, offload="none")  # on one device, whatever the run had
    model = load_start(_start_path(config, folder), local.model)
    planner = make_planner(model, local.model, local.devices, seed=local.run.seed)
    settings = ScoreSettings(
        temperature=config.rollout.temperature, banned=model.banned, compute_dtype=planner.compute_dtype
    )
    whole = planner.trainable.merge(planner.params, params)
    return RecordedScoring(planner.policy, whole, settings, config.learner.micro_rows, config.rollout.context_tokens)


TEXT = PlannerReader(_start_path, _load_start, _token_decoder, _scoring, replaced_by=("model",))
