"""Settings of a cluster that trains the agent system, and the schedule that they mean."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flowgrpo.errors import BadInput
from flowgrpo.recipes import agent_config
from flowgrpo.run.config import make_config, setting

if TYPE_CHECKING:
    from flowgrpo.distributed.schedule import Plan

ANY = "any"  # the domain whose reward workers judge what no others do
TAKES = {  # what means something to a schedule, beside the size of an update
    "sync": ("spare",),
    "one_step_off": ("spare",),
    "async": ("staleness",),
    "partial": ("staleness", "budget", "spare"),
}
SYNC = {"correction": 0.0}  # nothing is stale


@dataclass(frozen=True, kw_only=True)
class Config(agent_config.Config):
    """Those of the agent system, and the shape of the cluster, most of which changes no bit of a run."""

    schedule: str = setting("sync", "Who waits for whom.", "What is run", choices=TAKES)
    staleness: int | None = setting(None, "Versions at most, for async and partial.", "What is run", at_least=0)
    budget: int | None = setting(None, "Tokens of a trajectory in one stretch, for partial.", "What is run", at_least=1)
    spare: int | None = setting(None, "Groups under way beyond those of an update.", "What is run", at_least=0)
    rollout_workers: int = setting(1, "Processes that roll out.", "The cluster", at_least=1, may_differ=True)
    reward_workers: tuple[str, ...] = setting(
        (f"{ANY}=1",), "Processes that judge, by domain: any=1,code=4.", "The cluster", may_differ=True
    )
    trainer_workers: int = setting(1, "Processes that train, as one group.", "The cluster", at_least=1)
    room: int = setting(4, "Groups that a rollout worker plays at a time.", "The cluster", at_least=1, may_differ=True)
    judge_seconds: float = setting(
        600.0, "Of a group's reward, until its process is ended.", "The cluster", at_least=0.1, may_differ=True
    )
    silent_seconds: float = setting(
        120.0, "Until a worker that says nothing is ended.", "The cluster", at_least=1.0, may_differ=True
    )
    correction: float = setting(2.0, "Bound of the correction for stale tokens; 0: none.", "Learning", at_least=0.0)
    learn_from: str = setting("all", "Versions whose tokens are in the loss.", "Learning", choices=("all", "newest"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule == "sync":
            object.__setattr__(self, "correction", SYNC["correction"])
        if self.trainer_workers > 1 and self.mesh != f"data={self.trainer_workers}":
            raise BadInput(
                f"--trainer_workers={self.trainer_workers} deals rows over so many processes, which hold all "
                f"parameters each: give --mesh=data={self.trainer_workers}"
            )
        self.judges()
        schedule_of(self)

    @classmethod
    def defaults(cls, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the agent system, as far as the schedule has such a setting."""
        fit = super().defaults(chosen)
        return fit | (SYNC if chosen.get("schedule", fit["schedule"]) == "sync" else {})

    def judges(self) -> dict[str, int]:
        """Say how many processes judge each domain."""
        found = {}
        for part in self.reward_workers:
            domain, _, count = part.partition("=")
            if not (domain and count.isascii() and count.isdigit() and int(count)):
                raise BadInput(f"--reward_workers: {part!r} should be DOMAIN=COUNT, such as {ANY}=2")
            found[domain] = int(count)
        return {ANY: 1} | found


def preset(model: str | None = None, **chosen: Any) -> Config:
    """The settings that fit the offline run, or those of the paper for a model, with what was chosen in their place."""
    return make_config(Config, chosen | {"model": model})


def schedule_of(config: Config) -> "Plan":
    """The schedule that these settings mean."""
    from flowgrpo.distributed import schedule  # which needs JAX, for which flags shouldn't wait

    name, groups, updates = config.schedule, config.queries, config.updates
    own = {"staleness": config.staleness, "budget": config.budget, "spare": config.spare}
    given = {key: value for key, value in own.items() if value is not None}
    for key in given:
        if key not in TAKES[name]:
            raise BadInput(f"--{key} means nothing to --schedule={name}: leave it out")
    if name == "partial":
        if "budget" not in given:
            raise BadInput("--schedule=partial needs --budget: tokens of a trajectory in one stretch")
        return schedule.partial_rollouts(groups, updates, **{"spare": groups} | given)
    makes = {"sync": schedule.synchronous, "one_step_off": schedule.one_step_off, "async": schedule.asynchronous}
    return makes[name](groups, updates, **given)
