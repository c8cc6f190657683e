"""Settings of a run on an environment of your own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flowgrpo.errors import BadInput
from flowgrpo.recipes.agent_config import LARGE, TaskConfig
from flowgrpo.run.config import make_config, setting

WITH_MODEL = {"turns": 8, "exam_turns": 8, "turn_seconds": 300.0, "beta": 0.0, "temperature": 1.0}


@dataclass(frozen=True, kw_only=True)
class Config(TaskConfig):
    """Settings of a run on an environment of your own; the defaults are those of a large model, see `preset`."""

    env: str = setting(
        "",
        "The environment, as KIND:SPEC: trl:MODULE:CLASS, gymnasium:ID, textarena:ID, or openenv:ws://HOST:PORT/ws.",
        "What is run",
    )
    python: str = setting("", "The Python that has its packages; this one by default.", "What is run")
    instructions: str = setting("", "What the model is told before the first observation.", "What is run")
    rendering: str = setting("append", "One conversation.", choices=("append",))
    domains: str = setting("", "Not read here.")
    episodes: int | None = setting(
        None,
        "Episodes at a time; as many as --slots by default. More than those take each other's caches, and wait.",
        "The agents",
        at_least=1,
        may_differ=True,
    )
    env_seconds: float = setting(60.0, "Of an answer of the environment.", "Sampling", at_least=0.1)
    turn_seconds: float = setting(90.0, "Of what follows one action.", "Sampling", at_least=0.1)

    def __post_init__(self) -> None:
        super().__post_init__()
        kind, _, spec = self.env.partition(":")
        if not (kind and spec):
            raise BadInput(f"--env={self.env!r} must be KIND:SPEC, such as gymnasium:FrozenLake-v1")
        if self.model is None:
            raise BadInput("--env needs --model: the folder of a model, or a hub id")
        if self.turn_seconds <= self.env_seconds:
            longest = f"--env_seconds={self.env_seconds:g}"
            raise BadInput(f"--turn_seconds={self.turn_seconds:g} must be greater than {longest}, which it holds")

    @classmethod
    def defaults(cls, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Those of a large model."""
        return super().defaults(chosen) | LARGE | WITH_MODEL


def preset(model: str | None = None, **chosen: Any) -> Config:
    """The settings of a large model, with what was chosen in their place."""
    return make_config(Config, chosen | {"model": model})
