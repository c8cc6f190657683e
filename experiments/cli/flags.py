"""Flags of a recipe: one for each setting of its Config, and those for checkpoints and resuming.

define_config(Config, "pure")             one flag for each setting of a Config, --config, --set and --print_config
preset(**given_settings(Config))          the settings that a file, --set and flags give, by name
define_run("runs/NAME-SEED")              --workdir, --resume, --checkpoint_every, --stop_after, --loggers
folder, options = run_options("runs/...") for `train(config, folder, **options)`
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from absl import flags

from flowgrpo.errors import BadInput
from flowgrpo.report.sinks import TENSORBOARD, check_sinks
from flowgrpo.training.config import RunConfig, declared_settings, make_config, setting_infos
from flowgrpo.training.config_files import format_config, parse_setting, read_file, read_settings
from flowgrpo.training.time_budget import UNLIMITED, TimeBudget, time_budget

from .help import flag_heading, show_defaults

_STARTED = time.monotonic()  # of the command, before its heavy imports
_RENAMED: dict[str, str] = {}  # earlier name of a flag -> its name
Complete = Callable[[Mapping[str, Any]], Mapping[str, Any]]  # adds settings to those that were given


class DefinedConfig(NamedTuple):
    """The settings of the command that runs."""

    config: type[RunConfig]
    recipe: str
    complete: Complete


_defined: list[DefinedConfig] = []

flags.disclaim_key_flags()  # flags that are defined here belong to the command that runs, so that its --help lists them


class ImportableEnumParser(flags.EnumParser):
    """Parser of a name among choices, or of MODULE:NAME."""

    def parse(self, argument: str) -> str:
        """The argument, if it is one of these."""
        return argument if ":" in argument else super().parse(argument)


def define_config(config: type[RunConfig], recipe: str, complete: Complete = dict) -> None:
    """Define a flag for each setting that has a heading, and those that read and print all settings.

    The preset decides about settings that are not given. A flag with an earlier name is an alias that --help does not
    list.
    """
    _defined[:] = [DefinedConfig(config, recipe, complete)]
    flag_heading("Files and resuming")
    flags.DEFINE_string(
        "config", None, "Settings in a YAML or JSON file, such as the run.json of a run; --set and flags replace them."
    )
    flags.DEFINE_multi_string("set", None, "A setting as SECTION.NAME=VALUE or NAME=VALUE; no flag may contradict it.")
    flags.DEFINE_bool("print_config", False, "Print the settings of the run as YAML, which --config reads, and exit.")
    for name, declared in declared_settings(config).items():
        info, kind = declared.info, declared.kind
        if info.heading is None:
            continue
        flag_heading(info.heading)
        if info.choices and info.imports:
            parser, serializer = ImportableEnumParser(list(info.choices)), flags.ArgumentSerializer()
            flags.DEFINE(parser, name, None, info.description, serializer=serializer)
        elif info.choices:
            flags.DEFINE_enum(name, None, list(info.choices), info.description)
        elif kind is tuple:
            (flags.DEFINE_multi_string if info.repeated else flags.DEFINE_list)(name, None, info.description)
        elif kind is bool:
            flags.DEFINE_bool(name, None, info.description)
        elif kind is int:
            low, high = (None if bound is None else int(bound) for bound in (info.at_least, info.at_most))
            flags.DEFINE_integer(name, None, info.description, lower_bound=low, upper_bound=high)
        elif kind is float:
            flags.DEFINE_float(name, None, info.description, lower_bound=info.at_least, upper_bound=info.at_most)
        else:
            flags.DEFINE_string(name, None, info.description)
        if info.was is not None:
            flags.DEFINE_alias(info.was, name, module_name="renamed")
            _RENAMED[info.was] = name
    show_defaults(lambda: config.defaults(given_settings(config)))


def report_renamed() -> None:
    """Print one line to stderr for each flag that was given by its earlier name."""
    for old, new in _RENAMED.items():
        if flags.FLAGS[old].present:
            print(f"--{old} is now called --{new}", file=sys.stderr)


def given_settings(config: type[RunConfig]) -> dict[str, Any]:
    """The settings that were given, by name: in the file of --config, by --set, which wins, or by their flags."""
    path, assigned = flags.FLAGS["config"].value, {}
    for assignment in flags.FLAGS["set"].value or ():
        name, value = parse_setting(config, assignment)
        if name in assigned and setting_infos(config)[name].repeated:
            value = assigned[name] + value
        elif assigned.get(name, value) != value:
            raise BadInput(f"--set {name} is given twice, with {assigned[name]} and with {value}: give it once")
        assigned[name] = value
    by_flag = {name: flags.FLAGS[name].value for name in setting_infos(config) if name in flags.FLAGS}
    by_flag = {name: tuple(x) if isinstance(x, list) else x for name, x in by_flag.items() if x is not None}
    for name in assigned.keys() & by_flag.keys():
        if assigned[name] != by_flag[name]:
            raise BadInput(
                f"--set {name}={assigned[name]} and --{name}={by_flag[name]} contradict each other: give one of them"
            )
    return ({} if path is None else read_settings(config, path).values) | assigned | by_flag


def check_settings() -> None:
    """Read the settings that were given; with --print_config print all that the run would have, and exit."""
    for config, recipe, complete in _defined:
        path = flags.FLAGS["config"].value
        other = None if path is None else read_file(path).recipe
        if other not in (None, recipe):
            raise BadInput(f"--config={path} is of a run of {other}, and this command's are of {recipe}: leave it out")
        given = given_settings(config)
        if flags.FLAGS["print_config"].value:
            print(format_config(make_config(config, complete(given)), recipe), end="")
            sys.exit(0)


def require_flags(*names: str) -> None:
    """Require flags of a command, unless --config or --set is given, which may have their settings."""
    for name in names:
        flags.register_validator(
            name,
            lambda value: value is not None or bool(flags.FLAGS["config"].value or flags.FLAGS["set"].value),
            message="must have a value other than None.",
        )


def define_run(workdir: str, *, every: int = 10, unit: str = "updates") -> None:
    """Define the flags for the run's folder, its checkpoints and its loggers.

    Args:
        workdir: the default folder, as --help shows it.
        every: default interval of validations and checkpoints, in `unit`.
        unit: what --checkpoint_every counts.
    """
    flag_heading("Files and resuming")
    flags.DEFINE_string("workdir", None, f"Folder of the run; {workdir} by default.")
    flags.DEFINE_bool("resume", True, "Resume the run in the work directory; --noresume deletes it and starts again.")
    flags.DEFINE_integer(
        "checkpoint_every", every, f"Number of {unit} between validations and checkpoints.", lower_bound=1
    )
    define_stop_after()
    flags.DEFINE_list(
        "loggers", [TENSORBOARD], "Loggers for metrics, separated by commas: tensorboard, wandb, trackio; or none."
    )


def define_stop_after() -> None:
    """Define --stop_after, the time budget."""
    flags.DEFINE_string(
        "stop_after",
        None,
        "Time budget from the start of the command, such as 8h50m, 45m or 90s: the current update is finished and "
        "saved, and the command exits with status 0; the same command resumes.",
    )


def stop_after() -> TimeBudget:
    """The time budget of --stop_after, counted from the start of the command."""
    text = flags.FLAGS["stop_after"].value
    return UNLIMITED if text is None else time_budget(text, started=_STARTED, source="--stop_after")


class RunOptions(TypedDict):
    """Keyword arguments of a recipe's `train`."""

    every: int
    resume: bool
    loggers: Sequence[str]
    budget: TimeBudget


def run_options(workdir: str) -> tuple[Path, RunOptions]:
    """The folder of the run, and the arguments of `train` that flags choose; `workdir` is the default folder."""
    values = flags.FLAGS
    options = RunOptions(
        every=values["checkpoint_every"].value or 1,
        resume=bool(values["resume"].value),
        loggers=chosen_sinks(),
        budget=stop_after(),
    )
    return Path(values["workdir"].value or workdir), options


def chosen_sinks() -> tuple[str, ...]:
    """The loggers that --loggers names, checked before training starts; () for `none`."""
    names = [name.strip() for name in flags.FLAGS["loggers"].value or () if name.strip()]
    return () if names == ["none"] else check_sinks(names)
