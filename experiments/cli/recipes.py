"""Commands that train by a recipe: their flags, and the run that these describe.

    define_recipe("own_env", Config, "runs/train_env-SEED")
    app.read_flags(__name__)

    if __name__ == "__main__":
        run_command()

The flags are those of the Config, which imports no JAX. The recipe is imported when the flags have been read.
"""

import itertools
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from flowgrpo import launch
from flowgrpo.errors import BadInput
from flowgrpo.recipes.recipe import RECIPE_IMPORT, Recipe, find_config, find_recipe, recipe_names
from flowgrpo.training.config import RunConfig
from flowgrpo.training.names import ENVIRONMENTS, EXTERNAL_ENVIRONMENTS

from . import app
from .flags import RunOptions, define_config, define_run, given_settings, run_options
from .help import HELP, flag_heading

flags.disclaim_key_flags()  # flags that are defined here belong to the command that runs

_defined: list["RecipeFlags"] = []  # of the command that runs


class RecipeFlags(NamedTuple):
    """The recipe of a command, its settings, and the folder of a run, with settings in capitals."""

    recipe: str
    config: type[RunConfig]
    workdir: str


class RunOfFlags(NamedTuple):
    """The run that the flags describe."""

    recipe: Recipe[Any, Any]
    config: Any  # of the recipe's class
    folder: Path
    options: RunOptions


def define_recipe(
    recipe: str,
    config: type[RunConfig],
    workdir: str,
    *,
    every: int = 10,
    unit: str = "updates",
    dry_run: bool = False,
) -> None:
    """Define the flags of a recipe: its settings, the run's folder, checkpoints and loggers.

    Args:
        recipe: name of the recipe.
        config: its settings.
        workdir: the default folder, in which SEED, ENV and other words in capitals stand for the settings.
        every: default interval of validations and checkpoints, in `unit`.
        unit: what --checkpoint_every counts.
        dry_run: whether to define --dry_run.
    """
    _defined[:] = [RecipeFlags(recipe, config, workdir)]
    define_config(config)
    if dry_run:
        flag_heading("Run")
        flags.DEFINE_bool("dry_run", False, "Print rollouts of the first tasks, and exit.")
    define_run(workdir, every=every, unit=unit)


def run_of_flags() -> RunOfFlags:
    """The run that the flags describe, by the recipe of the command."""
    (defined,) = _defined
    recipe = find_recipe(defined.recipe)
    config = recipe.preset(**given_settings(defined.config))
    folder, options = run_options(default_folder(defined.workdir, config))
    return RunOfFlags(recipe, config, folder, options)


def default_folder(workdir: str, config: RunConfig) -> str:
    """The default folder of a run, with its settings in place of words in capitals."""
    return re.sub("[A-Z]+", lambda word: str(getattr(config, word[0].lower())).replace(":", "-"), workdir)


def train_by_recipe() -> None:
    """Train as the flags say, and print the result as JSON; with --dry_run print the first rollouts."""
    recipe, config, folder, options = run_of_flags()
    if "dry_run" in flags.FLAGS and flags.FLAGS["dry_run"].value in (True, "true"):
        recipe.dry_run(config, folder)
    else:
        print(json.dumps(recipe.train(config, folder, **options)))


def run_command(main: Callable[[], None] = train_by_recipe) -> None:
    """Run `main` as a command on the devices that its recipe wants; does not return."""
    (defined,) = _defined
    recipe = find_recipe(defined.recipe)
    app.run(main, cpu_devices=launch.num_cores() if recipe.all_devices else 1, exact=recipe.exact)


# The choice of a recipe ---------------------------------------------------------------------------------

CHOOSING = {  # flags that a recipe follows from
    "recipe": f"Recipe: {', '.join(recipe_names())}, or {RECIPE_IMPORT}.",
    "env": "Environment: a built-in one, MODULE:NAME of yours, or KIND:SPEC of another library.",
    "agent": "Agent: a command, or MODULE:FUNCTION.",
    "tasks": "Tasks: a file (.jsonl, .parquet), or a built-in set.",
    "model": "Model: a folder, GGUF file, smollm2, gemma3, or hub id.",
}


def define_chosen_recipe(module: str, workdir: str) -> None:
    """Define the flags of the recipe that the command line chooses, if `module` is the command that runs."""
    flag_heading("Run")
    flags.DEFINE_string("recipe", None, CHOOSING["recipe"])
    if module != "__main__":
        return
    given = {name: value for name in CHOOSING if (value := _value_in(sys.argv[1:], name)) is not None}
    if not given and HELP & {*sys.argv}:
        for name in [name for name in CHOOSING if name != "recipe"]:
            flags.DEFINE_string(name, None, CHOOSING[name])
        return
    try:
        name = choose_recipe(given)
        define_recipe(name, find_config(name), workdir, dry_run=True)
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
        return "agent"
    raise BadInput("nothing says what to train on: give --env, --agent or --tasks, or --recipe")


def _value_in(arguments: Sequence[str], name: str) -> str | None:
    """The value of a flag on a command line that is not parsed yet, as `--name=value` or `--name value`."""
    for argument, following in itertools.zip_longest(arguments, arguments[1:]):
        key, equals, value = argument.lstrip("-").partition("=")
        if argument.startswith("-") and key == name:
            return value if equals else following
    return None
