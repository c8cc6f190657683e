"""The README.md beside exported weights: a model card in the form that the Hugging Face Hub reads.

    text = model_card(CardFacts(recipe="agent", config=config, folder=folder, update=120, which="best"))

It holds what the run's folder says and nothing else: base model, algorithm, settings, figures, the command. Places on
this machine and addresses of servers are left out, since a card is made to be published.
"""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flowgrpo as fg
from flowgrpo.files import read_json
from flowgrpo.recipes import agent_config, cluster_config, own_agent, own_env, pure, self_verify_tasks
from flowgrpo.recipes.planner import PlannerConfig
from flowgrpo.run.config import RunConfig, setting_infos
from flowgrpo.run.next_steps import command
from flowgrpo.run.session import RESULT

COMMANDS = {
    "pure": "quickstart",
    "agent": "agentflow",
    "own_agent": "train_agent",
    "own_env": "train_env",
    "cluster": "cluster",
    "self_verify": "self_verify",
}
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
SERVER = "SERVER"  # in the place of an address
FIGURES = {  # of result.json, before and after
    "success": "success on test tasks",
    "tool_error": "tool errors",
    "turns": "turns",
}


class CardFacts(NamedTuple):
    """Facts that a card tells."""

    recipe: str
    config: RunConfig
    folder: Path  # of the run
    update: int  # whose parameters were written
    which: str  # best, last, start
    adapter: bool = False
    gguf: str | None = None  # the type of its tensors, of a GGUF file
    licence: str | None = None  # of the weights; None: that of the base model, or our own where there is none


def model_card(facts: CardFacts) -> str:
    """Write the card: what the Hub reads, and what people do."""
    base = base_id(facts.config)
    algorithm = getattr(facts.config, "algorithm", "flow_grpo")  # of self-verification, where it is no setting
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
            f"All settings, by flowgrpo {fg.__version__}:",
            "",
            "```json",
            json.dumps({name: _public(name, x) for name, x in facts.config.to_json().items()}, indent=1),
            "```",
            "",
        ]
    )


def base_id(config: RunConfig) -> str | None:
    """The hub id that a run began with; None for a folder or a file, or a model that was made for the run."""
    model = config.model if isinstance(config, PlannerConfig) else None
    return model if model and HUB_ID.fullmatch(model) and not Path(model).exists() else None


def training_command(recipe: str, config: RunConfig) -> str:
    """The command of a run: its settings that are not those of its preset."""
    usual, infos = _preset(config).to_json(), setting_infos(type(config))
    words = [command(COMMANDS[recipe])]
    for name, value in config.to_json().items():
        named = name in ("env", "algorithm", "model")  # by which a preset is chosen
        if infos[name].heading is None or value is None or (value == usual[name] and not named):
            continue
        public = _public(name, value)
        several = public if infos[name].repeated else [",".join(public) if isinstance(public, list) else public]
        words += [f"--{name}={shlex.quote(str(one))}" for one in several]
    return " ".join(words)


def _preset(config: RunConfig) -> RunConfig:
    match config:
        case pure.Config():
            return pure.preset(config.env, config.algorithm)
        case cluster_config.Config():
            return cluster_config.preset(config.model)
        case agent_config.Config():
            return agent_config.preset(config.model)
        case own_agent.Config():
            return own_agent.preset(config.model)
        case own_env.Config():
            return own_env.preset(config.model, env=config.env)
        case self_verify_tasks.Config():
            return self_verify_tasks.preset(config.model)
    raise fg.BadInput(f"a {type(config).__name__} has no model card: give a run of {', '.join(COMMANDS)}")


def _public(name: str, value: Any) -> Any:
    """The value of a setting without a place on this machine or the address of a server."""
    if isinstance(value, list):
        return [_public(name, one) for one in value]
    if not isinstance(value, str):
        return value
    if name == "mcp":
        return SERVER
    if "://" in value:
        return "#".join([SERVER, *value.split("#")[1:]])
    return Path(value).name if value.startswith(("/", "~", "./", "../")) else value


def _front_matter(facts: CardFacts, base: str | None, algorithm: str) -> Sequence[str]:
    """The metadata, as YAML whose values are JSON."""
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
    """The Hub's fields of the licence: what was given, or that of the model that the weights come from."""
    if facts.licence is not None:
        return {"license": facts.licence}
    if isinstance(facts.config, PlannerConfig) and facts.config.model is not None:
        link = {} if base is None else {"license_link": f"https://huggingface.co/{base}"}
        return {"license": "other", "license_name": "that-of-the-base-model", **link}
    return {"license": "apache-2.0"}


def _paragraphs(facts: CardFacts, base: str | None) -> Sequence[str]:
    config = facts.config
    model = config.model if isinstance(config, PlannerConfig) else None
    began = "a small model that was made for the run" if model is None else f"`{base or Path(model).name}`"
    where = f"environment `{config.env}`" if isinstance(config, pure.Config) else f"recipe `{facts.recipe}`"
    kind = "An adapter in PEFT's format, which belongs to" if facts.adapter else "Whole weights, which began as"
    if facts.gguf:
        kind = f"Whole weights in GGUF's {facts.gguf.upper()}, for llama.cpp and Ollama, which began as"
    return [
        f"{kind} {began}. The planner of a multi-turn agent was trained inside the running system "
        f"([Flow-GRPO](https://arxiv.org/abs/2510.05592)), {where}, seed {config.seed}. These are the parameters of "
        f"update {facts.update}, the {facts.which} one of the run.",
        "",
    ]


def _figures(folder: Path) -> Sequence[str]:
    """Tabulate what the run found of itself at its end, where it has come to it."""
    path = folder / RESULT
    if not path.exists():
        return ["The run had not ended when this was written, so it was not tested yet.", ""]
    result = read_json(path, "restore or remove it")
    rows = [
        f"| {words} | {_number(result[f'{name}_before'])} | {_number(result[f'{name}_after'])} |"
        for name, words in FIGURES.items()
        if f"{name}_before" in result and f"{name}_after" in result
    ]
    best, took = result.get("best_update"), f"{result['minutes']:.1f} minutes"
    ended = f"{result['updates']} updates, of which that of number {best} was best in validation; {took}."
    return ["| | start | best |", "|---|---|---|", *rows, "", ended, ""]


def _number(value: Any) -> str:
    return "" if value is None else f"{value:.3f}"
