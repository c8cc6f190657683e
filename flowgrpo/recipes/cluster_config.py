"""Settings of a cluster that trains the agent system, and the schedule that they mean."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Unpack

from flowgrpo.errors import BadInput
from flowgrpo.recipes import agent_config
from flowgrpo.training.config import Section, make_config, setting

if TYPE_CHECKING:
    from flowgrpo.distributed.schedule import Plan

ANY = "any"  # reward workers of domains that have none of their own
SCHEDULE_SETTINGS = {  # settings that each schedule reads, beside the size of an update
    "sync": ("extra_groups",),
    "one_step_off": ("extra_groups",),
    "async": ("staleness",),
    "partial": ("staleness", "segment_tokens", "extra_groups"),
}
SYNC = {"correction": 0.0}  # no token is stale


@dataclass(frozen=True, kw_only=True)
class StaleLearnerSection(agent_config.AlgorithmSection):
    """The algorithm, with a correction for tokens that older weights sampled."""

    correction: float = setting(
        2.0,
        "Cap of the importance weight pi_old / pi_sampled for stale tokens; 0: no correction.",
        "Learning",
        at_least=0.0,
    )
    loss_versions: str = setting(
        "all",
        "Tokens in the loss: all, or only those of the newest weights in a trajectory.",
        "Learning",
        choices=("all", "newest"),
        was="learn_from",
    )


@dataclass(frozen=True, kw_only=True)
class ClusterSection(Section):
    """The schedule and the processes."""

    schedule: str = setting(
        "sync",
        "Schedule: sync, one_step_off (rollouts one update ahead), async (bounded staleness), or partial (rollouts cut "
        "into segments).",
        "Run",
        choices=SCHEDULE_SETTINGS,
    )
    staleness: int | None = setting(
        None, "Maximum staleness of a group in weight versions, for async and partial.", "Run", at_least=0
    )
    segment_tokens: int | None = setting(
        None, "Number of tokens after which a trajectory is cut, for partial.", "Run", at_least=1, was="budget"
    )
    extra_groups: int | None = setting(
        None, "Number of groups in progress beyond those of an update.", "Run", at_least=0, was="spare"
    )
    rollout_workers: int = setting(1, "Number of processes that roll out.", "Cluster", at_least=1, may_change=True)
    reward_workers: tuple[str, ...] = setting(
        (f"{ANY}=1",), "Number of processes that judge, by domain: any=1,code=4.", "Cluster", may_change=True
    )
    trainer_workers: int = setting(
        1, "Number of processes that train together, one device each.", "Cluster", at_least=1
    )
    worker_capacity: int = setting(
        4,
        "Number of groups that a rollout worker runs at a time.",
        "Cluster",
        at_least=1,
        may_change=True,
        was="room",
    )
    judge_seconds: float = setting(
        600.0,
        "Timeout of a group's rewards in seconds, after which the process that judges is killed.",
        "Cluster",
        at_least=0.1,
        may_change=True,
    )
    silent_seconds: float = setting(
        120.0,
        "Seconds without a heartbeat after which a worker is killed.",
        "Cluster",
        at_least=1.0,
        may_change=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.judges()

    def judges(self) -> dict[str, int]:
        """Number of reward workers of each domain."""
        counts = {ANY: 1}
        for part in self.reward_workers:
            domain, _, count = part.partition("=")
            if not (domain and count.isascii() and count.isdigit() and int(count)):
                raise BadInput(f"--reward_workers: {part!r} should be DOMAIN=COUNT, such as {ANY}=2")
            counts[domain] = int(count)
        return counts


@dataclass(frozen=True, kw_only=True)
class Config(agent_config.Config):
    """Settings of the agent system, the schedule and the processes, most of which change no bit of a run."""

    learner: StaleLearnerSection
    cluster: ClusterSection

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cluster.schedule == "sync":
            object.__setattr__(self, "learner", replace(self.learner, **SYNC))
        workers = self.cluster.trainer_workers
        if workers > 1 and self.devices.mesh != f"data={workers}":
            raise BadInput(
                f"--trainer_workers={workers} shards rows over processes that each hold all parameters: "
                f"give --mesh=data={workers}"
            )
        schedule_of(self)

    @classmethod
    def defaults(cls, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults of the agent system, with those of the schedule."""
        defaults = super().defaults(chosen)
        return defaults | (SYNC if chosen.get("schedule", defaults["schedule"]) == "sync" else {})


class Settings(agent_config.Settings, total=False):
    """Settings of a cluster, but for `model`, as keyword arguments of `preset`."""

    schedule: str
    staleness: int | None
    segment_tokens: int | None
    extra_groups: int | None
    rollout_workers: int
    reward_workers: tuple[str, ...]
    trainer_workers: int
    worker_capacity: int
    judge_seconds: float
    silent_seconds: float


def preset(model: str | None = None, **settings: Unpack[Settings]) -> Config:
    """A Config with these settings; the others are those of the offline run, or of the paper for a model."""
    return make_config(Config, {**settings, "model": model})


def schedule_of(config: Config) -> "Plan":
    """The schedule that these settings describe."""
    from flowgrpo.distributed import schedule  # imports JAX, which flags should not wait for

    cluster, groups, updates = config.cluster, config.rollout.queries, config.run.updates
    for setting_name in ("staleness", "segment_tokens", "extra_groups"):
        if getattr(cluster, setting_name) is not None and setting_name not in SCHEDULE_SETTINGS[cluster.schedule]:
            raise BadInput(f"--{setting_name} means nothing to --schedule={cluster.schedule}: leave it out")
    chosen = {"staleness": cluster.staleness, "budget": cluster.segment_tokens, "spare": cluster.extra_groups}
    limits: dict[str, int] = {limit: value for limit, value in chosen.items() if value is not None}
    if cluster.schedule == "partial":
        if cluster.segment_tokens is None:
            raise BadInput("--schedule=partial needs --segment_tokens: the length of a segment")
        return schedule.partial_rollouts(groups, updates, **{"spare": groups} | limits)
    schedules = {"sync": schedule.synchronous, "one_step_off": schedule.one_step_off, "async": schedule.asynchronous}
    return schedules[cluster.schedule](groups, updates, **limits)
