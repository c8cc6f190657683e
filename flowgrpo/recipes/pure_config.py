"""Settings of a run on a pure environment: `Config`, and `preset`, which fits them to environment and algorithm."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Unpack

from flowgrpo.errors import BadInput
from flowgrpo.training.config import RunConfig, RunSection, RunSettings, Section, make_config, setting
from flowgrpo.training.names import ALGORITHMS, ENV_IMPORT, ENVIRONMENTS, HARD_VARIANTS

CONTROLS = ("none", "shuffled_rewards", "supervised", "last_turn")
CRITICS = ("own", "shared")


@dataclass(frozen=True, kw_only=True)
class PureRunSection(RunSection):
    """How long a run is, and its control experiment."""

    updates: int = setting(150, "Number of RL updates; 0 stops after imitation.", "Sizes", at_least=0, may_change=True)
    control: str = setting(
        "none",
        "Control experiment: none, shuffle the rewards within each group, imitate instead of RL (supervised), or give "
        "the advantage to the last turn only.",
        "Run",
        choices=CONTROLS,
    )


@dataclass(frozen=True, kw_only=True)
class EnvironmentSection(Section):
    """The environment."""

    env: str = setting("lookup", f"Environment: {', '.join(ENVIRONMENTS)}, or {ENV_IMPORT}.", "Run")


@dataclass(frozen=True, kw_only=True)
class SmallModelSection(Section):
    """The shape of the planner."""

    model_dim: int = setting(96, "Width of the planner (d_model).", "Sizes", at_least=1, was="d")
    layers: int = setting(3, "Number of layers of the planner.", "Sizes", at_least=1)
    head_dim: int = setting(16, "Dimension of an attention head.", "Sizes", at_least=2, was="head")


@dataclass(frozen=True, kw_only=True)
class RolloutSection(Section):
    """Rollouts of an update."""

    queries: int = setting(32, "Number of queries (groups) per update.", "Sizes", at_least=1)
    samples: int = setting(8, "Number of trajectories per query (group size).", "Sizes", at_least=2)
    oversample: int = setting(
        1,
        "Oversampling factor: roll out this many times `queries`, and keep groups with non-zero advantage.",
        "Sizes",
        at_least=1,
    )
    temperature: float = setting(1.0, "Sampling temperature of the planner; 0: greedy.", "Sampling", at_least=0.0)


@dataclass(frozen=True, kw_only=True)
class LearnerSection(Section):
    """The algorithm, its optimizer, and what some algorithms add."""

    algorithm: str = setting(
        "flow_grpo", "Algorithm, or MODULE:NAME of an fg.Algorithm.", "Run", choices=ALGORITHMS, imports=True
    )
    teacher: str | None = setting(
        None, "Folder of a run on the same environment whose best planner is the teacher; for opd.", "Run"
    )
    learning_rate: float = setting(1e-3, "Learning rate of RL.", "Learning", at_least=0.0)
    optimizer: str = setting(
        "adamw",
        "Optimizer: adamw, or muon (Muon for matrices, AdamW for the rest).",
        "Learning",
        choices=("adamw", "muon"),
    )
    mini_batches: int = setting(1, "Number of gradient steps per epoch of an update.", "Learning", at_least=1)
    epochs: int = setting(1, "Number of epochs over the trajectories of an update.", "Learning", at_least=1)
    beta: float = setting(0.0, "KL coefficient; at 0 the KL is not measured.", "Learning", at_least=0.0)
    clip_high: float = setting(
        0.28, "Upper clip width: ratios are clipped at 1 + clip_high; 0: the algorithm's own.", "Learning", at_least=0.0
    )
    entropy_bonus: float = setting(0.0, "Entropy coefficient; 0: no bonus.", "Learning")
    decay_to: float = setting(
        0.2,
        "Fraction of the learning rate that is left after decay_updates; 1: constant.",
        "Learning",
        at_least=0.0,
        at_most=1.0,
        was="decay",
    )
    # Not `updates`, so that a run that is resumed with more updates equals one that had them from the start.
    decay_updates: int = setting(150, "Number of updates over which the learning rate decays.", "Learning", at_least=1)
    critic: str = setting(
        "own",
        "Critic of ppo: own (a network of its own), or shared (a value head on the policy's trunk).",
        "Learning",
        choices=CRITICS,
    )
    critic_rate: float = setting(1e-3, "Learning rate of ppo's critic.", "Learning", at_least=0.0)
    gamma: float = setting(1.0, "Discount factor of ppo.", "Learning", at_least=0.0, at_most=1.0)
    lam: float = setting(0.95, "GAE lambda of ppo.", "Learning", at_least=0.0, at_most=1.0)


@dataclass(frozen=True, kw_only=True)
class WarmStartSection(Section):
    """Imitation before reinforcement learning."""

    warm_steps: int = setting(400, "Maximum number of imitation steps before RL.", "Learning", at_least=1)
    warm_rate: float = setting(3e-3, "Learning rate of imitation.", "Learning", at_least=0.0)
    warm_rows: int = setting(64, "Number of demonstrations per imitation step.", "Learning", at_least=1)


@dataclass(frozen=True, kw_only=True)
class EvaluationSection(Section):
    """Sizes of evaluations."""

    test_tasks: int = setting(1000, "Number of test tasks of the final table.", "Sizes", at_least=1, may_change=True)


@dataclass(frozen=True, kw_only=True)
class DevicesSection(Section):
    """Devices."""

    mesh: str | None = setting(
        None, "Device mesh, such as data=2,fsdp=4; all devices as data by default.", "Devices and memory"
    )


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """Settings of a run on a pure environment; `preset` has those that fit an environment."""

    run: PureRunSection
    environment: EnvironmentSection
    model: SmallModelSection
    rollout: RolloutSection
    learner: LearnerSection
    warm_start: WarmStartSection
    evaluation: EvaluationSection
    devices: DevicesSection

    @classmethod
    def defaults(cls, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults that fit the environment and the algorithm."""
        defaults = super().defaults(chosen)
        env, algorithm = (str(chosen.get(name, defaults[name])) for name in ("env", "algorithm"))
        if env not in ENVIRONMENTS and ":" not in env:
            raise BadInput(f"environment {env!r} is unknown; choose from {', '.join(ENVIRONMENTS)}, or {ENV_IMPORT}")
        family = env if env in PRESETS else HARD_VARIANTS.get(env, env)
        for_env = PRESETS.get(family, IMPORTED)
        return defaults | for_env | BY_ALGORITHM.get(algorithm, {}) | BY_BOTH.get((env, algorithm), {})


PRESETS: dict[str, dict[str, Any]] = {
    "lookup": {"updates": 120, "decay_updates": 120, "learning_rate": 5e-4, "mini_batches": 4},
    "lookup_hard": {},  # one gradient step per update, as in the studies on it
    "arithmetic": {
        "layers": 4,
        "head_dim": 32,
        "updates": 400,
        "learning_rate": 4e-4,
        "mini_batches": 4,
        "decay_updates": 400,
        "warm_steps": 1500,
        "warm_rows": 32,
    },
    "maze": {"model_dim": 64, "layers": 2, "learning_rate": 5e-4, "mini_batches": 4, "warm_steps": 600},
}
IMPORTED: dict[str, Any] = {
    "model_dim": 64,
    "layers": 2,
    "decay_to": 1.0,
    "decay_updates": 200,
    "warm_steps": 600,
}  # not tuned
# Settings of an algorithm where they differ from those of Flow-GRPO; then those of an algorithm in one environment.
BY_ALGORITHM: dict[str, dict[str, Any]] = {
    "ppo": {"mini_batches": 4, "learning_rate": 5e-4, "clip_high": 0.2},
    "dpo": {"beta": 0.1, "epochs": 2, "mini_batches": 1},
}
BY_BOTH: dict[tuple[str, str], dict[str, Any]] = {
    ("lookup", "ppo"): {"updates": 75, "decay_updates": 75},
    ("lookup", "dpo"): {"updates": 150, "decay_updates": 150, "learning_rate": 1e-3},
}


class Settings(RunSettings, total=False):
    """Settings of a run on a pure environment, but for `env` and `algorithm`, as keyword arguments of `preset`."""

    updates: int
    warm_steps: int
    teacher: str | None
    model_dim: int
    layers: int
    head_dim: int
    queries: int
    samples: int
    oversample: int
    test_tasks: int
    learning_rate: float
    optimizer: str
    mini_batches: int
    epochs: int
    beta: float
    clip_high: float
    entropy_bonus: float
    decay_to: float
    decay_updates: int
    warm_rate: float
    warm_rows: int
    critic: str
    critic_rate: float
    gamma: float
    lam: float
    temperature: float
    mesh: str | None


def preset(env: str = "lookup", algorithm: str = "flow_grpo", **settings: Unpack[Settings]) -> Config:
    """A Config with these settings; the others fit the environment and the algorithm."""
    return make_config(Config, {**settings, "env": env, "algorithm": algorithm})
