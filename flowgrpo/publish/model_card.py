"""The model card of exported weights: a README.md that the Hugging Face Hub can parse.

    text = model_card(CardFacts(recipe="agent", config=config, folder=folder, update=120, which="best"))

All of it is from the run's folder: base model, algorithm, settings, metrics, the command. Paths of this machine and
addresses of servers are left out, since a card is published.
"""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flowgrpo import __version__
from flowgrpo.files import read_json
from flowgrpo.recipes.recipe import find_recipe
from flowgrpo.training.config import RunConfig, flat_settings, make_config, setting_infos
from flowgrpo.training.session import RESULT
from flowgrpo.training.settings import HostedConfig

SELECT_PRESET = ("env", "algorithm", "model")  # settings on which the defaults of others depend
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
SERVER = "SERVER"  # replaces an address
METRICS = {  # of result.json, before and after training
    "success": "success on test tasks",
    "tool_error": "tool errors",
    "turns": "turns",
}


class CardFacts(NamedTuple):
    """The facts of a model card."""

    recipe: str
    config: RunConfig
    folder: Path  # of the run
    update: int  # whose parameters were written
    which: str  # best, last, start
    adapter: bool = False
    gguf: str | None = None  # the type of its tensors, of a GGUF file
    licence: str | None = None  # of the weights; None: that of the base model, or ours if there is none


def model_card(facts: CardFacts) -> str:
    """The text of the card: metadata for the Hub, then paragraphs for people."""
    base = base_id(facts.config)
    algorithm = facts.config.settings().get("algorithm", "flow_grpo")  # self-verification has no such setting
    return "\n".join(
        [
            *_front_matter(facts, base, algorithm),
            f"# A planner trained by `{algorithm}`",
            "",
            *_paragraphs(facts, base),
            *_figures(facts.folder),
            "## How it was trained",
            "",
            "```sh",
            training_command(facts.recipe, facts.config),
            "```",
            "",
            f"All settings, by flowgrpo {__version__}:",
            "",
            "```json",
            json.dumps(_public_settings(facts.config), indent=1),
            "```",
            "",
        ]
    )


def base_id(config: RunConfig) -> str | None:
    """The hub id of a run's start; None for a folder, a file, or a model that was made for the run."""
    model = config.model.model if isinstance(config, HostedConfig) else None
    return model if model and HUB_ID.fullmatch(model) and not Path(model).exists() else None


def training_command(recipe: str, config: RunConfig) -> str:
    """The command of a run, with the settings that differ from its preset."""
    infos, values = setting_infos(type(config)), flat_settings(config.to_json())
    selecting = {name: values[name] for name in SELECT_PRESET if name in values}
    defaults = flat_settings(make_config(type(config), selecting).to_json())
    words = [find_recipe(recipe).command_line()]
    for name, value in values.items():
        selects_preset = name in SELECT_PRESET
        if infos[name].heading is None or value is None or (value == defaults[name] and not selects_preset):
            continue
        public = _public(name, value)
        items = public if infos[name].repeated else [",".join(public) if isinstance(public, list) else public]
        words += [f"--{name}={shlex.quote(str(item))}" for item in items]
    return " ".join(words)


def _public_settings(config: RunConfig) -> dict[str, dict[str, Any]]:
    """All settings by section, as `run.json` has them."""
    sections = config.to_json().items()
    return {section: {name: _public(name, value) for name, value in values.items()} for section, values in sections}


def _public(name: str, value: Any) -> Any:
    """The value of a setting without paths of this machine or addresses of servers."""
    if isinstance(value, list):
        return [_public(name, item) for item in value]
    if not isinstance(value, str):
        return value
    if name == "mcp":
        return SERVER
    if "://" in value:
        return "#".join([SERVER, *value.split("#")[1:]])
    return Path(value).name if value.startswith(("/", "~", "./", "../")) else value


def _front_matter(facts: CardFacts, base: str | None, algorithm: str) -> Sequence[str]:
    """The metadata block: YAML whose values are JSON."""
    library = "peft" if facts.adapter else "gguf" if facts.gguf else "transformers"
    values: dict[str, Any] = {"library_name": library}
    values["pipeline_tag"] = "text-generation"
    if base is not None:
        values["base_model"] = base
    values |= _licence(facts, base)
    values["tags"] = [
        *(["gguf"] if facts.gguf else []),
        "flowgrpo",
        "reinforcement-learning",
        "agents",
        "tool-use",
        algorithm.replace("_", "-"),
    ]
    return ["---", *(f"{name}: {json.dumps(value)}" for name, value in values.items()), "---", ""]


def _licence(facts: CardFacts, base: str | None) -> Mapping[str, str]:
    """The Hub's licence fields: the given licence, or that of the base model."""
    if facts.licence is not None:
        return {"license": facts.licence}
    if isinstance(facts.config, HostedConfig) and facts.config.model.model is not None:
        link = {} if base is None else {"license_link": f"https://huggingface.co/{base}"}
        return {"license": "other", "license_name": "that-of-the-base-model", **link}
    return {"license": "apache-2.0"}


def _paragraphs(facts: CardFacts, base: str | None) -> Sequence[str]:
    config = facts.config
    model = config.model.model if isinstance(config, HostedConfig) else None
    start = "a small model that was made for the run" if model is None else f"`{base or Path(model).name}`"
    env = config.settings().get("env")
    task = f"recipe `{facts.recipe}`" if env is None else f"environment `{env}`"
    kind = "An adapter in PEFT's format, for" if facts.adapter else "Whole weights, trained from"
    if facts.gguf:
        kind = f"Whole weights in GGUF's {facts.gguf.upper()}, for llama.cpp and Ollama, trained from"
    return [
        f"{kind} {start}. The planner of a multi-turn agent was trained inside the running system "
        f"([Flow-GRPO](https://arxiv.org/abs/2510.05592)), {task}, seed {config.run.seed}. These are the parameters of "
        f"update {facts.update}, the {facts.which} one of the run.",
        "",
    ]


def _figures(folder: Path) -> Sequence[str]:
    """A table of the run's test metrics; a sentence if it has not ended."""
    path = folder / RESULT
    if not path.exists():
        return ["The run had not ended when this was written, so it was not tested yet.", ""]
    result = read_json(path, "restore or remove it")
    rows = [
        f"| {words} | {_number(result[f'{name}_before'])} | {_number(result[f'{name}_after'])} |"
        for name, words in METRICS.items()
        if f"{name}_before" in result and f"{name}_after" in result
    ]
    best, minutes = result.get("best_update"), f"{result['minutes']:.1f} minutes"
    summary = f"{result['updates']} updates, of which number {best} was best in validation; {minutes}."
    return ["| | start | best |", "|---|---|---|", *rows, "", summary, ""]


def _number(value: Any) -> str:
    return "" if value is None else f"{value:.3f}"
