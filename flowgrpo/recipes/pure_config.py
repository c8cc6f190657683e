"""Settings of a run on a pure environment: `Config`; `preset` has those that fit an environment and an algorithm."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flowgrpo.errors import BadInput
from flowgrpo.recipes.names import ALGORITHMS, BY_IMPORT, ENVIRONMENTS, HARDER
from flowgrpo.run.config import TrainingConfig, make_config, setting

CONTROLS = ("none", "shuffled_rewards", "supervised", "last_turn")
CRITICS = ("own", "shared")


@dataclass(frozen=True, kw_only=True)
class Config(TrainingConfig):
    """Settings of a run on a pure environment; `preset` has those that fit an environment."""

    env: str = setting("lookup", f"Any of {', '.join(ENVIRONMENTS)}, or {BY_IMPORT}.", "What is run")
    algorithm: str = setting("flow_grpo", "Member of the family.", "What is run", choices=ALGORITHMS)
    teacher: str | None = setting(
        None, "Of opd: the folder of a run of the same environment, whose best planner teaches.", "What is run"
    )
    control: str = setting(
        "none",
        "Shuffle rewards within groups, imitate on, or credit the last turn only.",
        "What is run",
        choices=CONTROLS,
    )
    d: int = setting(96, "Width of the planner.", "Sizes", at_least=1)
    layers: int = setting(3, "Layers of the planner.", "Sizes", at_least=1)
    head: int = setting(16, "Dimensions of an attention head.", "Sizes", at_least=2)
    queries: int = setting(32, "Queries of an update.", "Sizes", at_least=1)
    samples: int = setting(8, "Trajectories of a query.", "Sizes", at_least=2)
    oversample: int = setting(
        1, "Times as many queries are played, of which groups with a signal are kept.", "Sizes", at_least=1
    )
    test_tasks: int = setting(1000, "Test tasks of the final table.", "Sizes", at_least=1, may_differ=True)
    learning_rate: float = setting(1e-3, "Of the reinforcement phase.", "Learning", at_least=0.0)
    optimizer: str = setting(
        "adamw", "Of the planner: AdamW, or Muon for its matrices.", "Learning", choices=("adamw", "muon")
    )
    mini_batches: int = setting(1, "Gradient steps of an epoch.", "Learning", at_least=1)
    epochs: int = setting(1, "Times that the trajectories of an update are learned from.", "Learning", at_least=1)
    beta: float = setting(0.0, "Weight of the KL term.", "Learning", at_least=0.0)
    clip_high: float = setting(0.28, "Upper bound of the ratio, above 1.", "Learning", at_least=0.0)
    entropy_bonus: float = setting(0.0, "Weight of the entropy.", "Learning")
    decay: float = setting(
        0.2, "Share of the learning rate that is left after decay_updates.", "Learning", at_least=0.0, at_most=1.0
    )
    # Not `updates`, so that a run that is made longer goes on as if all updates had been asked for at once.
    decay_updates: int = setting(150, "Updates in which the learning rate falls.", "Learning", at_least=1)
    warm_steps: int = setting(400, "Steps of imitation at most.", "Learning", at_least=1)
    warm_rate: float = setting(3e-3, "Learning rate of the imitation.", "Learning", at_least=0.0)
    warm_rows: int = setting(64, "Demonstrations of a step of imitation.", "Learning", at_least=1)
    critic: str = setting(
        "own", "Of ppo: a network of its own, or a head on the policy's.", "Learning", choices=CRITICS
    )
    critic_rate: float = setting(1e-3, "Of ppo: learning rate of the critic.", "Learning", at_least=0.0)
    gamma: float = setting(1.0, "Of ppo: discount of a later reward.", "Learning", at_least=0.0, at_most=1.0)
    lam: float = setting(0.95, "Of ppo: GAE's λ.", "Learning", at_least=0.0, at_most=1.0)
    temperature: float = setting(1.0, "Of the planner's words.", "Sampling", at_least=0.0)
    mesh: str | None = setting(
        None, "How devices are arranged, such as data=2,fsdp=4; all as data by default.", "Devices and memory"
    )

    @classmethod
    def defaults(cls, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Those that fit the environment and the algorithm."""
        plain = super().defaults(chosen)
        env, algorithm = (str(chosen.get(name, plain[name])) for name in ("env", "algorithm"))
        if env not in ENVIRONMENTS and ":" not in env:
            raise BadInput(f"environment {env!r} is unknown; choose from {', '.join(ENVIRONMENTS)}, or {BY_IMPORT}")
        like = env if env in PRESETS else HARDER.get(env, env)
        fit = PRESETS.get(like, OUTSIDE) | BY_ALGORITHM.get(algorithm, {}) | BY_BOTH.get((env, algorithm), {})
        return plain | fit


PRESETS: dict[str, dict[str, Any]] = {
    "lookup": {"updates": 120, "decay_updates": 120, "learning_rate": 5e-4, "mini_batches": 4},
    "lookup_hard": {},  # one step an update, as the studies on it have
    "arithmetic": {
        "layers": 4,
        "head": 32,
        "updates": 400,
        "learning_rate": 4e-4,
        "mini_batches": 4,
        "decay_updates": 400,
        "warm_steps": 1500,
        "warm_rows": 32,
    },
    "maze": {"d": 64, "layers": 2, "learning_rate": 5e-4, "mini_batches": 4, "warm_steps": 600},
}
OUTSIDE: dict[str, Any] = {"d": 64, "layers": 2, "decay": 1.0, "decay_updates": 200, "warm_steps": 600}  # nobody tuned
# What fits an algorithm where that differs from what fits Flow-GRPO; and what fits it in one environment.
BY_ALGORITHM: dict[str, dict[str, Any]] = {
    "ppo": {"mini_batches": 4, "learning_rate": 5e-4, "clip_high": 0.2},
    "dpo": {"beta": 0.1, "epochs": 2, "mini_batches": 1},
}
BY_BOTH: dict[tuple[str, str], dict[str, Any]] = {
    ("lookup", "ppo"): {"updates": 75, "decay_updates": 75},
    ("lookup", "dpo"): {"updates": 150, "decay_updates": 150, "learning_rate": 1e-3},
}


def preset(env: str = "lookup", algorithm: str = "flow_grpo", **chosen: Any) -> Config:
    """The settings that fit an environment and an algorithm, with what was chosen in their place."""
    return make_config(Config, chosen | {"env": env, "algorithm": algorithm})
