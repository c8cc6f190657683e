"""Settings of a run on an agent of your own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flowgrpo.errors import BadInput
from flowgrpo.recipes.agent_config import LARGE, TaskConfig
from flowgrpo.run.config import make_config, setting

POSTED = "posted"  # the reward that agents give themselves
EXAMPLE = "flowgrpo.recipes.example_agent:agent"
WITH_MODEL = {"turns": 8, "exam_turns": 8, "turn_seconds": 300.0}


@dataclass(frozen=True, kw_only=True)
class Config(TaskConfig):
    """Settings of a run on an agent of your own; the defaults are those of the offline run, see `preset`."""

    agent: str = setting(
        EXAMPLE,
        "The agent: a command, which is started for each trajectory and finds the model at OPENAI_BASE_URL and its "
        "task on standard input (and as {query}); or MODULE:FUNCTION, called with a task and a base URL.",
        "What is run",
    )
    reward: str | None = setting(
        None,
        "Judge all tasks by MODULE:FUNCTION, a function (task, answer) -> fg.Scored; or posted, by agents themselves.",
        "What is run",
    )
    rendering: str = setting("fresh", "How many contexts there may be: as many as turns.", choices=("fresh",))
    agents: int | None = setting(
        None,
        "Agents at work at a time; as many as --slots by default. More than those take each other's caches, and wait.",
        "The agents",
        at_least=1,
        may_differ=True,
    )
    agent_seconds: float = setting(300.0, "Of an agent, from its start to its end.", "Sampling", at_least=0.1)
    silent_seconds: float = setting(
        60.0, "Of an agent between an answer and its next request, or its end.", "Sampling", at_least=0.1
    )
    turn_seconds: float = setting(90.0, "Of what follows one answer, silence and all.", "Sampling", at_least=0.1)
    retries: int = setting(
        2, "Times that an agent is started again which ends before its first request.", "The agents", at_least=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.agent.strip():
            raise BadInput("--agent is empty: give a command, or MODULE:FUNCTION")
        if self.turn_seconds <= self.silent_seconds:
            longest = f"--silent_seconds={self.silent_seconds:g}"
            raise BadInput(f"--turn_seconds={self.turn_seconds:g} must be greater than {longest}, which it holds")

    @classmethod
    def defaults(cls, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the offline run, or those that fit a model."""
        return super().defaults(chosen) | (LARGE | WITH_MODEL if chosen.get("model") else {})


def preset(model: str | None = None, **chosen: Any) -> Config:
    """The settings that fit the offline run, or those of a large model, with what was chosen in their place."""
    return make_config(Config, chosen | {"model": model})
