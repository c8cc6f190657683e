"""Settings of a run on an agent of your own: `Config`, and `preset`, which fits them to a model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Unpack

from flowgrpo.errors import BadInput
from flowgrpo.recipes.agent_config import (
    GIVEN,
    LARGE,
    OfflineConfig,
    OfflineSettings,
    OfflineTasksSection,
    TurnsSection,
)
from flowgrpo.training.config import Section, make_config, setting

POSTED = "posted"  # agents send their reward themselves
EXAMPLE = "flowgrpo.recipes.example_agent:agent"
WITH_MODEL = LARGE | GIVEN | {"turns": 8, "eval_turns": 8, "turn_seconds": 300.0}


@dataclass(frozen=True, kw_only=True)
class JudgedTasksSection(OfflineTasksSection):
    """Tasks, whose rewards agents may send themselves."""

    reward: str | None = setting(
        None,
        "Reward of all tasks as MODULE:FUNCTION, a function (task, answer) -> fg.RewardResult; posted: agents send "
        "their reward themselves; none: the reward of each task's domain.",
        "Run",
    )


@dataclass(frozen=True, kw_only=True)
class RequestsSection(TurnsSection):
    """Rollouts whose turns are an agent's requests."""

    rendering: str = setting("fresh", "Contexts of a trajectory: each request may begin a new one.", choices=("fresh",))
    turn_seconds: float = setting(
        90.0, "Timeout of a turn in seconds, from a response to the next request.", "Sampling", at_least=0.1
    )


@dataclass(frozen=True, kw_only=True)
class AgentSection(Section):
    """The agent, and the limits of its process."""

    agent: str = setting(
        EXAMPLE,
        "The agent: a command, started for each trajectory with the model's URL in OPENAI_BASE_URL and its task on "
        "standard input (and as {query}); or MODULE:FUNCTION, called with a task and a base URL.",
        "Run",
    )
    concurrent_agents: int | None = setting(
        None,
        "Number of agents that run at a time; --slots by default. More than that evict each other's caches.",
        "Agents",
        at_least=1,
        may_change=True,
        was="agents",
    )
    agent_seconds: float = setting(
        300.0, "Timeout of an agent in seconds, from start to exit.", "Sampling", at_least=0.1
    )
    silent_seconds: float = setting(
        60.0,
        "Timeout of an agent in seconds between a response and its next request or exit.",
        "Sampling",
        at_least=0.1,
    )
    retries: int = setting(
        2, "Number of restarts of an agent that exits before its first request; 0: none.", "Agents", at_least=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.agent.strip():
            raise BadInput("--agent is empty: give a command, or MODULE:FUNCTION")


@dataclass(frozen=True, kw_only=True)
class Config(OfflineConfig):
    """Settings of a run on an agent of your own; `preset` has those that fit a model."""

    tasks: JudgedTasksSection
    rollout: RequestsSection
    agent: AgentSection

    def __post_init__(self) -> None:
        super().__post_init__()
        turn_seconds, silent_seconds = self.rollout.turn_seconds, self.agent.silent_seconds
        if turn_seconds <= silent_seconds:
            silence = f"--silent_seconds={silent_seconds:g}"
            raise BadInput(f"--turn_seconds={turn_seconds:g} must be greater than {silence}, which it includes")

    @classmethod
    def defaults(cls, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults of the offline run, or those that fit a large model."""
        return super().defaults(chosen) | (WITH_MODEL if chosen.get("model") else {})


class LimitSettings(OfflineSettings, total=False):
    """Settings of a run on an agent of your own, but for `model`, `agent`, `tasks` and `reward`."""

    concurrent_agents: int | None
    agent_seconds: float
    silent_seconds: float
    retries: int


class Settings(LimitSettings, total=False):
    """Settings of a run on an agent of your own, but for `model`, as keyword arguments of `preset`."""

    agent: str
    tasks: str | None
    reward: str | None


def preset(model: str | None = None, **settings: Unpack[Settings]) -> Config:
    """A Config with these settings; the others are those of the offline run, or fit a large model."""
    return make_config(Config, {**settings, "model": model})
