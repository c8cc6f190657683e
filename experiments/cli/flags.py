"""Flags of a recipe: one for each setting of its Config, and those of how a run goes on.

define_config(Config)                    flags, by the fields of a Config
preset(**given(Config))                  values of those that were given, by their names
define_run("runs/NAME-SEED")             --workdir, --resume, --checkpoint_every, --stop_after, --loggers
folder, options = chosen_run("runs/...") for `train(config, folder, **options)`
"""

import time
from dataclasses import fields
from pathlib import Path
from typing import Any

from absl import flags

from flowgrpo.report.sinks import TENSORBOARD, check_sinks
from flowgrpo.run.config import RunConfig, kind_of, setting_infos
from flowgrpo.run.time_budget import ENDLESS, TimeBudget, time_budget

from .help import flag_heading, show_defaults

_STARTED = time.monotonic()  # of the command, before its heavy imports

flags.disclaim_key_flags()  # what is defined here belongs to the command that runs, so that its --help lists it


def define_config(config: type[RunConfig]) -> None:
    """Define a flag for each setting that has a heading; one that is not given is left to the preset."""
    for one in fields(config):
        own = setting_infos(config)[one.name]
        if own.heading is None:
            continue
        flag_heading(own.heading)
        words = own.help
        kind, _ = kind_of(config, one)
        if own.choices:
            flags.DEFINE_enum(one.name, None, list(own.choices), words)
        elif kind is tuple:
            (flags.DEFINE_multi_string if own.repeated else flags.DEFINE_list)(one.name, None, words)
        elif kind is bool:
            flags.DEFINE_bool(one.name, None, words)
        elif kind is int:
            low, high = (None if x is None else int(x) for x in (own.at_least, own.at_most))
            flags.DEFINE_integer(one.name, None, words, lower_bound=low, upper_bound=high)
        elif kind is float:
            flags.DEFINE_float(one.name, None, words, lower_bound=own.at_least, upper_bound=own.at_most)
        else:
            flags.DEFINE_string(one.name, None, words)
    show_defaults(lambda: config.defaults(given(config)))


def given(config: type[RunConfig]) -> dict[str, Any]:
    """The settings whose flags were given, by their names."""
    values = {one.name: flags.FLAGS[one.name].value for one in fields(config) if one.name in flags.FLAGS}
    return {name: tuple(x) if isinstance(x, list) else x for name, x in values.items() if x is not None}


def define_run(workdir: str, *, every: int = 10, what: str = "Updates") -> None:
    """Define the flags of how a run goes on; `workdir` says where it lies by default."""
    flag_heading("Files and resuming")
    flags.DEFINE_string("workdir", None, f"Where results lie; {workdir} by default.")
    flags.DEFINE_bool("resume", True, "Go on with what is in the work directory; --noresume begins again.")
    words = f"{what} between validations and checkpoints."
    flags.DEFINE_integer("checkpoint_every", every, words, lower_bound=1)
    define_stop_after()
    flags.DEFINE_list(
        "loggers", [TENSORBOARD], "Where figures go, too, by commas: tensorboard, wandb, trackio; or none."
    )


def define_stop_after() -> None:
    """Define the flag of a time budget."""
    flags.DEFINE_string(
        "stop_after",
        None,
        "Time from the start of the command, such as 8h50m, 45m or 90s, after which what is under way is finished and "
        "saved, and the command ends with status 0; the same command goes on.",
    )


def stop_after() -> TimeBudget:
    """The time budget that --stop_after gives, from the start of the command."""
    words = flags.FLAGS["stop_after"].value
    return ENDLESS if words is None else time_budget(words, began=_STARTED, of="--stop_after")


def chosen_run(workdir: str) -> tuple[Path, dict[str, Any]]:
    """The work directory, and the options of `train` that the flags choose."""
    values = flags.FLAGS
    options = {
        "every": values["checkpoint_every"].value,
        "resume": values["resume"].value,
        "loggers": chosen_loggers(),
        "budget": stop_after(),
    }
    return Path(values["workdir"].value or workdir), options


def chosen_loggers() -> tuple[str, ...]:
    """Read the names that --loggers gives, checked before anything is trained; () for `none`."""
    names = [name.strip() for name in flags.FLAGS["loggers"].value or () if name.strip()]
    return () if names == ["none"] else check_sinks(names)
