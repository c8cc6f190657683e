"""Commands that train by a recipe: their flags, and the run that these describe.

    define_recipe("own_env", Config, "runs/train_env-SEED")
    app.read_flags(__name__)

    if __name__ == "__main__":
        run_command()

The flags are those of the Config, which imports no JAX. The recipe is imported when the flags have been read.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from flowgrpo import launch
from flowgrpo.recipes.recipe import Recipe, find_recipe
from flowgrpo.training.config import RunConfig

from . import app
from .flags import Complete, RunOptions, define_config, define_run, given_settings, run_options
from .help import flag_heading

flags.disclaim_key_flags()  # flags that are defined here belong to the command that runs

_defined: list["RecipeFlags"] = []  # of the command that runs


class RecipeFlags(NamedTuple):
    """The recipe of a command, and how a run follows from its flags."""

    recipe: str
    config: type[RunConfig]
    workdir: str  # with settings in capitals
    complete: Complete


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
    complete: Complete = dict,
) -> None:
    """Define the flags of a recipe: its settings, the run's folder, checkpoints and loggers.

    Args:
        recipe: name of the recipe.
        config: its settings.
        workdir: the default folder, in which SEED, ENV and other words in capitals stand for the settings.
        every: default interval of validations and checkpoints, in `unit`.
        unit: what --checkpoint_every counts.
        dry_run: whether to define --dry_run.
        complete: from the settings that were given, those for the recipe's preset.
    """
    _defined[:] = [RecipeFlags(recipe, config, workdir, complete)]
    define_config(config, recipe, complete)
    if dry_run:
        flag_heading("Run")
        flags.DEFINE_bool("dry_run", False, "Print rollouts of the first tasks, and exit.")
    define_run(workdir, every=every, unit=unit)


def run_of_flags() -> RunOfFlags:
    """The run that the flags describe, by the recipe of the command."""
    (defined,) = _defined
    recipe = find_recipe(defined.recipe)
    config = recipe.preset(**defined.complete(given_settings(defined.config)))
    folder, options = run_options(default_folder(defined.workdir, config))
    return RunOfFlags(recipe, config, folder, options)


def default_folder(workdir: str, config: RunConfig) -> str:
    """The default folder of a run, with its settings in place of words in capitals."""
    return re.sub("[A-Z]+", lambda word: str(config.settings()[word[0].lower()]).replace(":", "-"), workdir)


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
