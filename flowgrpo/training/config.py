"""Settings of a run: a frozen dataclass whose fields are each declared with type, default, description and bounds.

    @dataclass(frozen=True, kw_only=True)
    class Config(RunConfig):
        rate: float = setting(1e-3, "Learning rate.", "Learning", at_least=0.0)

The flags of a command follow from the fields (`experiments.cli.flags`), and `run.json` stores their values. Making a
Config raises `BadInput` for a value that has the wrong type, is not finite, or is out of bounds.
"""

import difflib
import math
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import Field, asdict, dataclass, field, fields
from typing import Any, NamedTuple, Self, TypedDict, TypeVar

from flowgrpo.errors import BadInput

C = TypeVar("C", bound="RunConfig")


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
) -> Any:
    """Declare a setting as a field of a Config.

    Args:
        default: value if nothing else is chosen; a recipe's `defaults` may replace it.
        description: one sentence for --help: meaning, unit, and what 0 or None does.
        heading: the group of --help in which the flag appears; None: the setting has no flag.
        choices: allowed strings; () for all.
        at_least, at_most: inclusive bounds of a number.
        repeated: the flag is given once for each value, instead of once with a list.
        may_change: a resumed run may have another value.
        was: earlier name: its flag still works, and a stored run that has it can be read. It is never written.
    """
    info = SettingInfo(description, heading, tuple(choices), at_least, at_most, repeated, may_change, was)
    return field(default=default, metadata={"info": info})


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Settings of every run."""

    seed: int = setting(0, "Seed of all random numbers of the run.", "Run", at_least=0)
    control: str = setting("none", "Control experiment that replaces one part of training; none: train normally.")

    def __post_init__(self) -> None:
        for declared in fields(self):
            name, value = declared.name, getattr(self, declared.name)
            info: SettingInfo = declared.metadata["info"]
            kind, is_optional = setting_type(type(self), declared)
            if value is None and is_optional:
                continue
            if value is None or not _has_type(value, kind):
                expected = {int: "a whole number", float: "a finite number"}.get(kind, kind.__name__)
                raise BadInput(f"--{name}={value!r} must be {expected}")
            if info.choices and value not in info.choices:
                raise BadInput(f"--{name}={value} is unknown; choose from {', '.join(info.choices)}")
            if info.at_least is not None and value < info.at_least:
                raise BadInput(f"--{name}={value} must be at least {info.at_least:g}")
            if info.at_most is not None and value > info.at_most:
                raise BadInput(f"--{name}={value} must be at most {info.at_most:g}")

    @classmethod
    def defaults(cls, chosen: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG003  recipes read it
        """Defaults by name; those of some recipes depend on chosen settings, such as the environment or the model."""
        return {declared.name: declared.default for declared in fields(cls)}

    def to_json(self) -> dict[str, Any]:
        """Values by name, as `run.json` stores them."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """A Config of the values in `run.json`, whose settings may have their earlier names."""
        infos = setting_infos(cls)
        current = {info.was: name for name, info in infos.items() if info.was is not None}
        settings: dict[str, Any] = {
            current.get(name, name): tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
        wrong = sorted(infos.keys() ^ settings.keys())
        if wrong:
            raise BadInput(f"{wrong[0]!r} is {'missing' if wrong[0] in infos else 'no setting of this recipe'}")
        return cls(**settings)

    @classmethod
    def may_change(cls) -> tuple[str, ...]:
        """Names of the settings that may change when a run is resumed."""
        return tuple(name for name, info in setting_infos(cls).items() if info.may_change)


class RunSettings(TypedDict, total=False):
    """Settings of every run, as keyword arguments."""

    seed: int
    control: str


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(RunConfig):
    """Settings of every run that trains by reinforcement learning."""

    updates: int = setting(150, "Number of RL updates; 0 stops after imitation.", "Sizes", at_least=0, may_change=True)
    warm_steps: int = setting(0, "Maximum number of imitation steps before RL; 0: none.", "Learning", at_least=0)


class TrainingSettings(RunSettings, total=False):
    """Settings of every run that trains by reinforcement learning, as keyword arguments."""

    updates: int
    warm_steps: int


def setting_infos(config: type[RunConfig]) -> dict[str, SettingInfo]:
    """Each setting of a Config by name, in the order of declaration."""
    return {declared.name: declared.metadata["info"] for declared in fields(config)}


def setting_type(config: type[RunConfig], declared: Field) -> tuple[type, bool]:
    """Type of a setting's values, and whether it may be None."""
    hint = typing.get_type_hints(config)[declared.name]
    is_optional = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)] if is_optional else [hint]
    return typing.get_origin(kinds[0]) or kinds[0], is_optional


def _has_type(value: Any, kind: type) -> bool:
    """Whether a value has a type, where an int counts as a float, and a bool as neither."""
    if isinstance(value, bool) and kind is not bool:
        return False
    return isinstance(value, int | float) and math.isfinite(value) if kind is float else isinstance(value, kind)


def make_config(config: type[C], values: Mapping[str, Any]) -> C:
    """A Config of these values, and of the defaults that fit them; raises `BadInput` for an unknown name."""
    infos = setting_infos(config)
    unknown = sorted(values.keys() - infos.keys())
    if unknown:
        renamed = [name for name, info in infos.items() if info.was == unknown[0]]
        close = renamed or difflib.get_close_matches(unknown[0], infos, n=1)
        raise BadInput(f"{unknown[0]!r} is no setting{f'; did you mean {close[0]!r}?' if close else ''}")
    return config(**{**config.defaults(values), **values})
