"""The recipe that a command line chooses, of which all its other flags are: for `experiments.train`.

The choice is that of `fg.train` (`flowgrpo.api.choice`), but that what flags name stays a name: a run is evaluated and
exported by what its run.json says.
"""

import itertools
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from absl import flags

from flowgrpo.errors import BadInput
from flowgrpo.recipes.recipe import RECIPE_IMPORT, find_config, recipe_names
from flowgrpo.training.config_files import read_file
from flowgrpo.training.names import ENVIRONMENTS, EXTERNAL_ENVIRONMENTS

from . import app
from .help import HELP, flag_heading
from .recipes import define_recipe

flags.disclaim_key_flags()  # flags that are defined here belong to the command that runs

SINGLE_TURN = "flowgrpo.envs.text:SingleTurn"  # the environment of tasks without one
CHOOSING = ("recipe", "env", "agent", "tasks", "tools", "model")  # flags that a recipe follows from


def define_chosen_recipe(module: str, workdir: str) -> None:
    """Define the flags of the recipe that the command line chooses, if `module` is the command that runs."""
    flag_heading("Run")
    flags.DEFINE_string("recipe", None, f"Recipe: {', '.join(recipe_names())}, or {RECIPE_IMPORT}.")
    if module != "__main__":
        return
    try:
        given = choosing_settings(sys.argv[1:])
    except BadInput as error:
        app.exit_with_usage_error(str(error))
    if not given and HELP & {*sys.argv}:
        flags.DEFINE_string("env", None, "Environment: a built-in one, MODULE:NAME of yours, or KIND:SPEC.")
        flags.DEFINE_string("agent", None, "Agent: a command, or MODULE:FUNCTION.")
        flags.DEFINE_string("tasks", None, "Tasks: a file (.jsonl, .parquet), or a built-in set.")
        flags.DEFINE_string("tools", None, "Tools of the agent system that works on the tasks.")
        flags.DEFINE_string("model", None, "Model: a folder, GGUF file, smollm2, gemma3, or hub id.")
        return
    try:
        name = choose_recipe(given)
        complete = partial(complete_settings, name) if "recipe" not in given else dict
        define_recipe(name, find_config(name), workdir, dry_run=True, complete=complete)
    except BadInput as error:
        app.exit_with_usage_error(str(error))


def choose_recipe(given: Mapping[str, str]) -> str:
    """The recipe that trains what these flags name; raises `BadInput` if they contradict each other or name nothing."""
    env, tasks, has_model = given.get("env", ""), given.get("tasks"), bool(given.get("model"))
    if given.get("recipe"):
        return given["recipe"]
    if env and given.get("agent"):
        raise BadInput("--env and --agent are both given, and an agent brings what it acts in: leave out one of them")
    if given.get("agent"):
        return "own_agent"
    if env in ENVIRONMENTS and has_model:
        raise BadInput(f"--env={env} trains a small planner of its words, which is made here: leave out --model")
    if env.partition(":")[0] in EXTERNAL_ENVIRONMENTS or (env and has_model):
        return "own_env"
    if env and tasks:
        raise BadInput(f"--tasks={tasks} is for an environment of text: give its --model, too, or leave it out")
    if env:
        return "pure"
    if tasks:
        return "agent" if given.get("tools") else "own_env"
    raise BadInput("nothing says what to train on: give --env, --agent or --tasks, or --recipe")


def complete_settings(recipe: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with those that `fg.train` derives from environment, model and devices."""
    if recipe == "pure":
        return dict(given)
    from flowgrpo.api.choice import Subject  # imports JAX
    from flowgrpo.api.settings import derived_settings

    settings = {"env": SINGLE_TURN, **given} if recipe == "own_env" else dict(given)
    subject = Subject(
        env=settings.get("env"),
        agent=settings.get("agent", "") if recipe == "own_agent" else None,
        tools=settings.get("tools"),
        lora=settings.get("lora_rank") or None,
    )
    return derived_settings(subject, settings)


def choosing_settings(arguments: Sequence[str]) -> dict[str, str]:
    """What a command line that is not parsed yet says about the recipe, in the file of --config, --set and flags."""
    given: dict[str, str] = {}
    if (path := value_in(arguments, "config")) is not None:
        content = read_file(path)
        given = {key.rpartition(".")[2]: value for key, value in content.values.items() if isinstance(value, str)}
        if content.recipe is not None:
            given["recipe"] = content.recipe
    for assignment in values_in(arguments, "set"):
        key, _, value = assignment.partition("=")
        given[key.rpartition(".")[2]] = value
    given |= {name: value for name in CHOOSING if (value := value_in(arguments, name)) is not None}
    return {name: given[name] for name in CHOOSING if name in given}


def value_in(arguments: Sequence[str], name: str) -> str | None:
    """The value of a flag on a command line that is not parsed yet; None if it isn't there."""
    return next(iter(values_in(arguments, name)), None)


def values_in(arguments: Sequence[str], name: str) -> list[str]:
    """All values of a flag, each given as `--name=value` or `--name value`."""
    values = []
    for argument, following in itertools.zip_longest(arguments, arguments[1:]):
        key, equals, value = argument.lstrip("-").partition("=")
        if argument.startswith("-") and key == name and (equals or following is not None):
            values.append(value if equals else following)
    return values
