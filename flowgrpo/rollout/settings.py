"""How trajectories are rolled out, and who is told of it: what `hosted` was given, checked."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from flowgrpo.contracts import Do, HostEnv, Reward, Scored
from flowgrpo.rollout.deadlines import Fired
from flowgrpo.rollout.member import Submit
from flowgrpo.rollout.records import Hosted, Played
from flowgrpo.rollout.width import Width
from flowgrpo.types import BadInput


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How trajectories are rolled out; `hosted` says what each means."""

    env: HostEnv
    submit: Submit
    do: Do
    reward: Reward | None
    solved: Callable[[Scored], bool]
    by_turn: bool
    temperature: float
    width: int | Width
    deadline: float | None
    turn_deadline: float | None
    judges: int
    judge_deadline: float
    repeats: int | None
    fired: Fired

    def __post_init__(self):
        for name in ("temperature", "deadline", "turn_deadline", "judges", "judge_deadline"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise BadInput(f"{name}={value}, but must be greater than 0")
        if not isinstance(self.width, Width):
            Width(self.width)  # which says where that can't be
        if self.repeats is not None and self.repeats < 2:
            raise BadInput(f"repeats={self.repeats}, but an action is repeated when it comes at least 2 times")


class Told(NamedTuple):
    """Callbacks that tell of trajectories, called in the caller's thread; `_rollout` in `hosted` says when."""

    on_done: Callable[[Played], None] | None = None
    on_played: Callable[[Hosted], None] | None = None
