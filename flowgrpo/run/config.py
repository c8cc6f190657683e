"""Settings of a run: a frozen dataclass in which each is declared once, with its type, default, meaning and bounds.

    @dataclass(frozen=True, kw_only=True)
    class Config(RunConfig):
        rate: float = setting(1e-3, "Learning rate.", "Learning", at_least=0.0)

The flags of a command follow from the fields (`experiments.cli.flags`), and `run.json` holds their values. A value that
is not of its type, not finite, or out of its bounds is refused where a Config is made.
"""

import difflib
import math
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import Field, asdict, dataclass, field, fields
from typing import Any, NamedTuple, Self, TypeVar

from flowgrpo.errors import BadInput

C = TypeVar("C", bound="RunConfig")


class SettingInfo(NamedTuple):
    """How a setting is shown and checked."""

    help: str
    heading: str | None  # of --help; None: no flag
    choices: tuple[str, ...] = ()
    at_least: float | None = None
    at_most: float | None = None
    repeated: bool = False  # the flag is given once for each value, and not as one list
    may_differ: bool = False  # when a run goes on


def setting(
    default: Any,
    help: str,
    heading: str | None = None,
    *,
    choices: Collection[str] = (),
    at_least: float | None = None,
    at_most: float | None = None,
    repeated: bool = False,
    may_differ: bool = False,
) -> Any:
    """Declare a setting as a field of a Config."""
    about = SettingInfo(help, heading, tuple(choices), at_least, at_most, repeated, may_differ)
    return field(default=default, metadata={"about": about})


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The settings that every run has."""

    seed: int = setting(0, "Seed of everything.", "What is run", at_least=0)
    control: str = setting("none", "Change one thing, as a control.")

    def __post_init__(self) -> None:
        _check_config(self)

    @classmethod
    def defaults(cls, chosen: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG003  recipes read it
        """Defaults by name; those of some recipes depend on what was chosen, such as an environment or a model."""
        return {one.name: one.default for one in fields(cls)}

    def to_json(self) -> dict[str, Any]:
        """The values by their names, as `run.json` holds them."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Make a Config of what `run.json` holds."""
        declared = setting_infos(cls)
        strange = sorted(declared.keys() ^ values.keys())
        if strange:
            raise BadInput(f"{strange[0]!r} is {'missing' if strange[0] in declared else 'no setting of this recipe'}")
        given: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in values.items()}
        return cls(**given)

    @classmethod
    def may_differ(cls) -> tuple[str, ...]:
        """Name the settings that may change when a run goes on."""
        return tuple(name for name, one in setting_infos(cls).items() if one.may_differ)


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(RunConfig):
    """The settings that every run of reinforcement has."""

    updates: int = setting(150, "Updates of the reinforcement phase.", "Sizes", at_least=0, may_differ=True)
    warm_steps: int = setting(0, "Steps of imitation at most.", "Learning", at_least=0)


def setting_infos(config: type[RunConfig]) -> dict[str, SettingInfo]:
    """Say how each setting of a Config is shown and checked, in the order of declaration."""
    return {one.name: one.metadata["about"] for one in fields(config)}


def kind_of(config: type[RunConfig], one: Field) -> tuple[type, bool]:
    """The type of a setting's values, and whether it may be None."""
    hint = typing.get_type_hints(config)[one.name]
    optional = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = [x for x in typing.get_args(hint) if x is not type(None)] if optional else [hint]
    return typing.get_origin(kinds[0]) or kinds[0], optional


def _check_config(config: RunConfig) -> None:
    """Raise `BadInput` for the first value that is not what its setting is declared to be."""
    for one in fields(config):
        value = getattr(config, one.name)
        own: SettingInfo = one.metadata["about"]
        low, high = own.at_least, own.at_most
        kind, optional = kind_of(type(config), one)
        if value is None and optional:
            continue
        if value is None or not _is_of(kind, value):
            name = {int: "a whole number", float: "a finite number"}.get(kind, kind.__name__)
            raise BadInput(f"--{one.name}={value!r} must be {name}")
        if own.choices and value not in own.choices:
            raise BadInput(f"--{one.name}={value} is unknown; choose from {', '.join(own.choices)}")
        if low is not None and value < low:
            raise BadInput(f"--{one.name}={value} must be at least {low:g}")
        if high is not None and value > high:
            raise BadInput(f"--{one.name}={value} must be at most {high:g}")


def _is_of(kind: type, value: Any) -> bool:
    """Say whether a value is of a kind: a whole number is a number, and true and false are neither."""
    if isinstance(value, bool) and kind is not bool:
        return False
    return isinstance(value, int | float) and math.isfinite(value) if kind is float else isinstance(value, kind)


def make_config(config: type[C], values: Mapping[str, Any]) -> C:
    """A Config of these values and the defaults that fit them; an unknown name is refused with the nearest one."""
    unknown = sorted(values.keys() - setting_infos(config).keys())
    if unknown:
        near = difflib.get_close_matches(unknown[0], setting_infos(config), n=1)
        raise BadInput(f"{unknown[0]!r} is no setting{f'; did you mean {near[0]!r}?' if near else ''}")
    return config(**{**config.defaults(values), **values})
