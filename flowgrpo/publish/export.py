"""Export a run's planner: `export` as a model folder, `export_gguf` as GGUF, `export_adapter` as a PEFT adapter.

`read_config` reads a run's settings, and `read_planner` a checkpoint's planner. The planner of a pure environment is
exported as a small Llama whose tokenizer has the environment's words; GGUF has no form for such a tokenizer.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from flowgrpo.data.tokenizer import load_tokenizer, start_conversation
from flowgrpo.models.gguf_export import save_gguf_folder
from flowgrpo.models.hf import Model, save_model
from flowgrpo.models.lora import LoraParams, merge_adapter
from flowgrpo.models.peft import save_adapter
from flowgrpo.models.trainable import ActorCritic, actor_params
from flowgrpo.publish.model_card import CardFacts, model_card
from flowgrpo.recipes.planner_reader import PlannerReader
from flowgrpo.recipes.recipe import NO_OBJECTS, Objects, Recipe, all_recipes, find_recipe
from flowgrpo.training.checkpoints import Checkpoints, params_sha256
from flowgrpo.training.config import RunConfig
from flowgrpo.training.planner import lora_of
from flowgrpo.training.run_dir import RUN, read_run
from flowgrpo.training.session import PARAMS
from flowgrpo.training.settings import HostedConfig
from flowgrpo.types import BadInput

# Reading a run ------------------------------------------------------------------------------------------


def read_planner(folder: Path, which: str) -> tuple[int, Any]:
    """The update and the parameters of a checkpoint's planner: its adapter, if it has one.

    `which` is "best" in validation, "last", or "start".
    """
    checkpoints = Checkpoints(folder, best="validation")
    last = checkpoints.latest()
    if last is None:
        raise BadInput(f"{folder} has no checkpoint yet: continue the run")
    if which == "start":
        return 0, _planner(checkpoints.restore_part(last, "start"))
    step = checkpoints.best() if which == "best" else last
    step = last if step is None else step
    return step, _planner(checkpoints.restore_part(step, PARAMS))


def _planner(stored: Mapping[str, Any]) -> Any:
    """The planner's parameters in a checkpoint, which stores a pair of actor and critic as a mapping."""
    params = actor_params(ActorCritic(**stored)) if set(stored) == set(ActorCritic._fields) else stored
    return jax.tree.map(jnp.asarray, params)


def exported_recipe(folder: Path, objects: Objects = NO_OBJECTS) -> Recipe[Any, Any]:
    """The recipe of a run whose planner can be read, with these of its objects; raises `BadInput` for another."""
    run = read_run(folder)
    recipe = find_recipe(run["recipe"])
    if recipe.planner is None:
        names = [recipe.name for recipe in all_recipes() if recipe.planner is not None]
        raise BadInput(f"{folder} is a run of {recipe.name}: give one of {', '.join(names)}")
    needed = {kind: name for kind, name in run.get("objects", {}).items() if kind in recipe.planner.replaced_by}
    missing = [f"{kind} {name}" for kind, name in needed.items() if kind not in objects.given()]
    if missing:
        raise BadInput(
            f"{folder} was trained with {' and '.join(missing)}, an object that its {RUN} only has the name of: save "
            "its model in the program that made it"
        )
    return recipe


def read_config(folder: Path, objects: Objects = NO_OBJECTS) -> RunConfig:
    """The Config with which a run of RL was last started."""
    recipe = exported_recipe(folder, objects)
    try:
        return recipe.Config.from_json(read_run(folder)["settings"])
    except BadInput as error:
        raise BadInput(f"{folder / RUN}: {error}; it was written by another version") from None


def trained_model(folder: Path, which: str = "best", *, objects: Objects = NO_OBJECTS) -> Model:
    """The planner of a checkpoint as a model, with its adapter if it has one.

    Args:
        folder: of the run.
        which: checkpoint, best in validation, last, or start.
        objects: those that the run was trained with, of which its folder only has the names.
    """
    config = read_config(folder, objects)
    _, params = read_planner(folder, which)
    model = reader_of(folder, objects).load_start(config, folder, objects)
    lora = lora_of(config.model) if isinstance(config, HostedConfig) else None
    if lora is None:
        return model._replace(params=params)
    return model.with_adapter(lora, params)


def reader_of(folder: Path, objects: Objects = NO_OBJECTS) -> PlannerReader:
    """How the planner of a run is read."""
    reader = exported_recipe(folder, objects).planner
    assert reader is not None  # checked there
    return reader


def start_path(folder: Path) -> str | Path | None:
    """The folder or hub id of a run's start; None if it has no files, as that of a pure environment."""
    return reader_of(folder).start_path(read_config(folder), folder)


# Writing ------------------------------------------------------------------------------------------------


def export(folder: Path, out: Path, *, which: str = "best", licence: str | None = None) -> dict[str, Any]:
    """Write a run's planner as a model folder, with a model card -> a record of it.

    Args:
        folder: of the run.
        out: folder to write; one that is there is replaced.
        which: checkpoint, best in validation, last, or start.
        licence: of the weights; None: that of the base model.
    """
    model, facts = _whole_model(folder, out, which, licence)
    save_model(out, model, card=model_card(facts))
    return _written(out, facts, model.params)


def export_gguf(
    folder: Path, out: Path, *, tensor_type: str = "f16", which: str = "best", licence: str | None = None
) -> dict[str, Any]:
    """Write a run's planner as GGUF, with a Modelfile and a model card -> a record of it.

    Args:
        folder: of the run.
        out: folder to write; one that is there is replaced.
        tensor_type: of the matrices: f16, bf16, f32 or q8_0.
        which: checkpoint, best in validation, last, or start.
        licence: of the weights; None: that of the base model.
    """
    if out.suffix == ".gguf":
        raise BadInput(
            f"--out={out} names a file, and a folder is written, with a Modelfile: give {out.with_suffix('')}"
        )
    if start_path(folder) is None:
        raise BadInput(f"the planner of {folder} speaks in whole words, which GGUF has no form for: leave out --format")
    model, facts = _whole_model(folder, out, which, licence)
    facts = facts._replace(gguf=tensor_type)
    temperature = facts.config.settings().get("temperature")
    save_gguf_folder(out, model, tensor_type=tensor_type, temperature=temperature, card=model_card(facts))
    return {**_written(out, facts, model.params), "gguf_type": tensor_type}


def _whole_model(folder: Path, out: Path, which: str, licence: str | None) -> tuple[Model, CardFacts]:
    """The planner of a checkpoint with its adapter merged into its base, and the facts of its card."""
    config = read_config(folder)
    step, params = read_planner(folder, which)
    _check_out(folder, out)
    model = reader_of(folder).load_start(config, folder, NO_OBJECTS)
    lora = lora_of(config.model) if isinstance(config, HostedConfig) else None
    if lora is not None:
        params = merge_adapter(LoraParams(model.params, params), model.config, lora)
    facts = CardFacts(read_run(folder)["recipe"], config, folder, step, which, licence=licence)
    return model._replace(params=params), facts


def _written(out: Path, facts: CardFacts, params: Any) -> dict[str, Any]:
    return {"out": str(out), "which": facts.which, "update": facts.update, "params_sha256": params_sha256(params)}


def export_adapter(folder: Path, out: Path, *, which: str = "best", licence: str | None = None) -> dict[str, Any]:
    """Write a run's adapter in PEFT's format, with a model card -> a record of it; arguments as in `export`."""
    config = read_config(folder)
    lora = lora_of(config.model) if isinstance(config, HostedConfig) else None
    if lora is None:
        raise BadInput(f"{folder} trains all parameters and has no adapter: leave out --adapter")
    assert isinstance(config, HostedConfig)
    step, adapter = read_planner(folder, which)
    _check_out(folder, out)
    model = reader_of(folder).load_start(config, folder, NO_OBJECTS)
    base = config.model.model or str(Path(str(start_path(folder))).resolve())
    facts = CardFacts(read_run(folder)["recipe"], config, folder, step, which, adapter=True, licence=licence)
    save_adapter(out, adapter, model.config, lora, base_model=base, card=model_card(facts))
    return _written(out, facts, adapter)


def has_chat_template(folder: Path) -> bool:
    """Whether the tokenizer of a model folder has a chat template that can render a user's message."""
    try:
        start_conversation(load_tokenizer(folder), [{"role": "user", "content": "x"}])
    except BadInput:
        return False
    return True


def _check_out(folder: Path, out: Path) -> None:
    """Raise `BadInput` if `out` is a run or the start of this one, since writing replaces the whole folder."""
    if (out / RUN).exists():
        raise BadInput(f"--out={out} is the folder of a run: give another one, such as {out / 'model'}")
    path = start_path(folder)
    if path is None:
        return
    start = Path(path).resolve()
    if out.resolve() in (start, start.parent if start.is_file() else start):
        raise BadInput(f"--out={out} is the model that the run started with: give another folder")
