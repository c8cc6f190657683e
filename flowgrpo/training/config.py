"""Settings of a run: a Config of a few sections, in which each setting is declared with type, default and bounds.

    @dataclass(frozen=True, kw_only=True)
    class LearnerSection(Section):
        learning_rate: float = setting(1e-3, "Learning rate.", "Learning", at_least=0.0)

    @dataclass(frozen=True, kw_only=True)
    class Config(RunConfig):
        learner: LearnerSection

    config = make_config(Config, {"learning_rate": 1e-5, "seed": 1})
    config.learner.learning_rate                # as code reads it
    config.replace(learning_rate=1e-4)          # as flags and keyword arguments name it

Names of settings are unique within a Config, so that flags (`experiments.cli.flags`) and keyword arguments need no
section; `run.json` stores the values by section. Making a section raises `BadInput` for a value that has the wrong
type, is not finite, or is out of bounds; a Config checks what settings of several sections mean together.
"""

import difflib
import math
import os
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Self, TypedDict, TypeVar

from flowgrpo.errors import BadInput

C = TypeVar("C", bound="RunConfig")
KINDS = {int: "a whole number", float: "a finite number", str: "a text", bool: "true or false", tuple: "a list"}


class SettingInfo(NamedTuple):
    """How a setting is described, checked and resumed."""

    description: str
    heading: str | None  # of --help; None: no flag
    choices: tuple[str, ...] = ()
    at_least: float | None = None
    at_most: float | None = None
    repeated: bool = False  # the flag is given once for each value, instead of once with a list
    may_change: bool = False  # when a run is resumed
    was: str | None = None  # earlier name, which is still read
    imports: bool = False  # MODULE:NAME is allowed beside the choices


class Setting(NamedTuple):
    """A setting as a section declares it."""

    default: Any
    info: SettingInfo
    kind: type  # of its values
    is_optional: bool  # whether it may be None


def setting(
    default: Any,
    description: str,
    heading: str | None = None,
    *,
    choices: Collection[str] = (),
    at_least: float | None = None,
    at_most: float | None = None,
    repeated: bool = False,
    may_change: bool = False,
    was: str | None = None,
    imports: bool = False,
) -> Any:
    """Declare a setting as a field of a section.

    Args:
        default: value if nothing else is chosen; a recipe's `defaults` may replace it.
        description: one sentence for --help: meaning, unit, and what 0 or None does.
        heading: the group of --help in which the flag appears; None: the setting has no flag.
        choices: allowed strings; () for all.
        at_least, at_most: inclusive bounds of a number.
        repeated: the flag is given once for each value, instead of once with a list.
        may_change: a resumed run may have another value.
        was: earlier name: its flag still works, and a stored run that has it can be read. It is never written.
        imports: MODULE:NAME, which is imported, is allowed beside the choices.
    """
    info = SettingInfo(description, heading, tuple(choices), at_least, at_most, repeated, may_change, was, imports)
    return field(default=default, metadata={"info": info})


@dataclass(frozen=True, kw_only=True)
class Section:
    """Settings that are read together: the fields of a subclass, each declared by `setting`."""

    def __post_init__(self) -> None:
        for name, declared in settings_of_section(type(self)).items():
            check_setting(f"--{name}", getattr(self, name), declared)

    def settings(self) -> dict[str, Any]:
        """Values by name."""
        return {declared.name: getattr(self, declared.name) for declared in fields(self)}


@dataclass(frozen=True, kw_only=True)
class RunSection(Section):
    """What every run has."""

    seed: int = setting(0, "Seed of all random numbers of the run.", "Run", at_least=0)
    control: str = setting("none", "Control experiment that replaces one part of training; none: train normally.")


ELSEWHERE = {  # what other frameworks call a setting
    "lr": "learning_rate",
    "steps": "updates",
    "max_steps": "updates",
    "group_size": "samples",
    "num_generations": "samples",
    "batch_size": "queries",
    "kl_coef": "beta",
    "max_new_tokens": "max_tokens",
    "max_turns": "turns",
}


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Settings of every run. A recipe's Config adds the sections that it reads, and checks them together."""

    run: RunSection

    @classmethod
    def defaults(cls, chosen: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG003  recipes read it
        """Defaults by name; those of some recipes depend on chosen settings, such as the environment or the model."""
        return {name: declared.default for name, declared in declared_settings(cls).items()}

    @classmethod
    def from_settings(cls, values: Mapping[str, Any]) -> Self:
        """A Config of these values by name; the others are as declared. `make_config` has those of the recipe."""
        infos = setting_infos(cls)
        unknown = sorted(values.keys() - infos.keys())
        if unknown:
            renamed = [name for name, info in infos.items() if info.was == unknown[0]]
            elsewhere = [name for name in [ELSEWHERE.get(unknown[0])] if name in infos]
            close = renamed or elsewhere or difflib.get_close_matches(unknown[0], infos, n=1)
            raise BadInput(f"{unknown[0]!r} is no setting{f'; did you mean {close[0]!r}?' if close else ''}")
        parts: dict[str, Any] = {
            name: section(**{key: values[key] for key in settings_of_section(section) if key in values})
            for name, section in section_types(cls).items()
        }
        return cls(**parts)

    def settings(self) -> dict[str, Any]:
        """Values by name, of all sections."""
        return {name: value for part in fields(self) for name, value in getattr(self, part.name).settings().items()}

    def replace(self, **settings: object) -> Self:
        """The same settings, but for these, which are checked again: `config.replace(seed=1, mesh=None)`."""
        return self.from_settings(self.settings() | settings)

    def to_json(self) -> dict[str, Any]:
        """Values by section and name, as `run.json` stores them."""
        sections = {part.name: getattr(self, part.name).settings() for part in fields(self)}
        return {
            section: {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
            for section, values in sections.items()
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """A Config of the values in `run.json`: by section, or all in one, and perhaps by their earlier names."""
        infos = setting_infos(cls)
        current = {info.was: name for name, info in infos.items() if info.was is not None}
        settings: dict[str, Any] = {
            current.get(name, name): tuple(value) if isinstance(value, list) else value
            for name, value in flat_settings(values).items()
        }
        wrong = sorted(infos.keys() ^ settings.keys())
        if wrong:
            raise BadInput(f"{wrong[0]!r} is {'missing' if wrong[0] in infos else 'no setting of this recipe'}")
        return cls.from_settings(settings)

    @classmethod
    def from_file(cls, path: str | os.PathLike) -> Self:
        """A Config of the settings in a YAML or JSON file, such as `run.json`, and of the defaults that fit them."""
        from flowgrpo.training.config_files import read_settings

        return make_config(cls, read_settings(cls, Path(path)).values)

    @classmethod
    def may_change(cls) -> tuple[str, ...]:
        """Names of the settings that may change when a run is resumed."""
        return tuple(name for name, info in setting_infos(cls).items() if info.may_change)


class RunSettings(TypedDict, total=False):
    """Settings of every run, as keyword arguments."""

    seed: int
    control: str


def flat_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by name, of those by section (`run.json`) or by name (a run of an earlier version)."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= value if isinstance(value, dict) else {name: value}
    return flat


@cache
def section_types(config: type[RunConfig]) -> dict[str, type[Section]]:
    """The sections of a Config by name."""
    hints = typing.get_type_hints(config)
    return {part.name: hints[part.name] for part in fields(config)}


@cache
def settings_of_section(section: type[Section]) -> dict[str, Setting]:
    """The settings of a section by name, in the order of declaration."""
    hints, settings = typing.get_type_hints(section), {}
    for declared in fields(section):
        hint = hints[declared.name]
        is_optional = typing.get_origin(hint) in (typing.Union, types.UnionType)
        kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)] if is_optional else [hint]
        kind = typing.get_origin(kinds[0]) or kinds[0]
        settings[declared.name] = Setting(declared.default, declared.metadata["info"], kind, is_optional)
    return settings


@cache
def declared_settings(config: type[RunConfig]) -> dict[str, Setting]:
    """All settings of a Config by name, section after section."""
    settings: dict[str, Setting] = {}
    for section in section_types(config).values():
        own = settings_of_section(section)
        assert not own.keys() & settings.keys(), f"{config} has two settings called {own.keys() & settings.keys()}"
        settings |= own
    return settings


def setting_infos(config: type[RunConfig]) -> dict[str, SettingInfo]:
    """How each setting of a Config is described, by name."""
    return {name: declared.info for name, declared in declared_settings(config).items()}


def check_setting(label: str, value: Any, declared: Setting) -> None:
    """Raise `BadInput` for a value of the wrong type or out of bounds; `label` says where it was given."""
    info, kind = declared.info, declared.kind
    if value is None and declared.is_optional:
        return
    if value is None or not _has_type(value, kind):
        raise BadInput(f"{label}={value!r} must be {KINDS[kind]}")
    if info.choices and value not in info.choices and not (info.imports and ":" in value):
        others = ", or MODULE:NAME" if info.imports else ""
        raise BadInput(f"{label}={value} is unknown; choose from {', '.join(info.choices)}{others}")
    if info.at_least is not None and value < info.at_least:
        raise BadInput(f"{label}={value} must be at least {info.at_least:g}")
    if info.at_most is not None and value > info.at_most:
        raise BadInput(f"{label}={value} must be at most {info.at_most:g}")


def _has_type(value: Any, kind: type) -> bool:
    """Whether a value has a type, where an int counts as a float, and a bool as neither."""
    if isinstance(value, bool) and kind is not bool:
        return False
    return isinstance(value, int | float) and math.isfinite(value) if kind is float else isinstance(value, kind)


def make_config(config: type[C], values: Mapping[str, Any]) -> C:
    """A Config of these values, and of the defaults that fit them; raises `BadInput` for an unknown name."""
    unknown = values.keys() - setting_infos(config).keys()
    defaults = {} if unknown else config.defaults(values)  # an unknown name is reported before anything else
    return config.from_settings({**defaults, **values})
