"""Settings of a run on an environment of your own: `Config`, and `preset`, which fits them to a model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Unpack

from flowgrpo.errors import BadInput
from flowgrpo.files import import_named
from flowgrpo.recipes.agent_config import LARGE, TaskConfig, TaskSettings, TurnsSection
from flowgrpo.training.config import Section, make_config, setting
from flowgrpo.training.names import EXTERNAL_ENVIRONMENTS

WITH_MODEL = {"turns": 8, "eval_turns": 8, "turn_seconds": 300.0, "beta": 0.0, "temperature": 1.0}


@dataclass(frozen=True, kw_only=True)
class StepsSection(TurnsSection):
    """Rollouts whose turns are steps of the environment."""

    rendering: str = setting("append", "Contexts of a trajectory: one growing conversation.", choices=("append",))
    turn_seconds: float = setting(
        90.0, "Timeout of a turn in seconds, the environment step included.", "Sampling", at_least=0.1
    )


@dataclass(frozen=True, kw_only=True)
class EnvironmentSection(Section):
    """The environment, and the limits of its process."""

    env: str = setting(
        "",
        "Environment: MODULE:CLASS of an fg.TextEnv, trl:MODULE:CLASS, gymnasium:ID, textarena:ID, or "
        "openenv:ws://HOST:PORT/ws.",
        "Run",
    )
    python: str = setting("", "Python interpreter with the environment's packages; this one by default.", "Run")
    instructions: str = setting("", "Instructions in the prompt, before the first observation.", "Run")
    concurrent_episodes: int | None = setting(
        None,
        "Number of episodes that run at a time; --slots by default. More than that evict each other's caches.",
        "Agents",
        at_least=1,
        may_change=True,
        was="episodes",
    )
    env_seconds: float = setting(60.0, "Timeout of one environment step in seconds.", "Sampling", at_least=0.1)

    def __post_init__(self) -> None:
        super().__post_init__()
        kind, _, spec = self.env.partition(":")
        if not (kind and spec):
            kinds = "KIND:SPEC as gymnasium:FrozenLake-v1, or MODULE:CLASS of a TextEnv"
            raise BadInput(f"--env={self.env!r} must be {kinds}")


@dataclass(frozen=True, kw_only=True)
class Config(TaskConfig):
    """Settings of a run on an environment of your own; `preset` has those of a large model."""

    rollout: StepsSection
    environment: EnvironmentSection

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model.model is None:
            raise BadInput("--env needs --model: the folder of a model, or a hub id")
        turn_seconds, env_seconds = self.rollout.turn_seconds, self.environment.env_seconds
        if turn_seconds <= env_seconds:
            step = f"--env_seconds={env_seconds:g}"
            raise BadInput(f"--turn_seconds={turn_seconds:g} must be greater than {step}, which it includes")

    @classmethod
    def defaults(cls, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults that fit a large model, with the sizes of a `TextEnv`."""
        return super().defaults(chosen) | LARGE | WITH_MODEL | sizes_of_env(chosen.get("env", ""))


def sizes_of_env(env: Any) -> dict[str, Any]:
    """The settings that follow from an environment, or from the one that MODULE:CLASS names: turns and tokens."""
    if isinstance(env, str):
        if ":" not in env or env.partition(":")[0] in EXTERNAL_ENVIRONMENTS:
            return {}
        try:
            env = import_named(env, "environment")
        except BadInput:  # `build` says so, unless it is handed the object
            return {}
    turns, max_tokens = getattr(env, "max_turns", None), getattr(env, "max_tokens", None)
    sizes: dict[str, Any] = {"turns": turns, "eval_turns": turns} if isinstance(turns, int) else {}
    return sizes | ({"max_tokens": max_tokens} if isinstance(max_tokens, int) else {})


class Settings(TaskSettings, total=False):
    """Settings of a run on an environment of your own, but for `model`, as keyword arguments of `preset`."""

    env: str
    tasks: str | None
    reward: str | None
    python: str
    instructions: str
    concurrent_episodes: int | None
    env_seconds: float


def preset(model: str | None = None, **settings: Unpack[Settings]) -> Config:
    """A Config with these settings; the others fit a large model."""
    return make_config(Config, {**settings, "model": model})
