"""Settings of a run on a pure environment, fit for each environment, and the parts that they build.

Settings are one flat dict, which `run.json` keeps beside a run's results, so that another command can build the same
parts again.
"""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh

import flowgrpo as fg
from experiments.devices import mesh_of, placing
from experiments.members import BY_IMPORT, make_algorithm, make_env
from flowgrpo import loop
from flowgrpo.envs.env import PAD
from flowgrpo.learner.critic import ActorCritic, Valuation, by_part, copied_trunk, own_network, shared_trunk
from flowgrpo.learner.sharding import critic_axes, decoder_axes, settled
from flowgrpo.learner.state import init_learner, make_optimizer
from flowgrpo.learner.warmstart import demonstrate, imitation_rows, make_supervised, make_validation, train_to_minimum
from flowgrpo.models.config import DecoderConfig, small_config
from flowgrpo.models.critic import HEAD, make_critic
from flowgrpo.models.decoder import make_policy, matrices
from flowgrpo.rollout.exam import draw_tasks, shuffled_rewards

COMMON: dict[str, Any] = {
    "algorithm": "flow_grpo",
    "control": "none",
    "mesh": None,  # all devices side by side
    "temperature": 1.0,
    "head": 16,  # dimensions of an attention head
    "queries": 32,
    "samples": 8,
    "oversample": 1,
    "mini_batches": 1,
    "epochs": 1,
    "beta": 0.0,
    "clip_high": 0.28,
    "entropy_bonus": 0.0,
    "learning_rate": 1e-3,
    "decay": 1.0,  # the share of the learning rate that is left after `decay_updates`
    "decay_updates": 200,  # not `updates`, so that a run that is made longer goes on as if asked for at once
    "warm_rate": 3e-3,
    "warm_steps": 600,
    "warm_rows": 64,
}
PRESETS: dict[str, dict[str, Any]] = {
    "lookup": {"d": 96, "layers": 3, "updates": 150, "decay": 0.2, "decay_updates": 150, "warm_steps": 400},
    "arithmetic": {
        "d": 96,
        "layers": 4,
        "head": 32,
        "updates": 600,
        "learning_rate": 5e-4,
        "decay": 0.2,
        "decay_updates": 600,
        "warm_steps": 2000,
        "warm_rows": 32,
    },
    "maze": {
        "d": 64,
        "layers": 2,
        "updates": 150,
        "learning_rate": 5e-4,
        "mini_batches": 4,
        "decay": 0.2,
        "decay_updates": 150,
    },
}
OUTSIDE: dict[str, Any] = {"d": 64, "layers": 2, "updates": 150}  # of environments that nobody has tuned anything for
# What fits an algorithm where that differs from what fits Flow-GRPO; and how long it then takes in an environment.
BY_ALGORITHM: dict[str, dict[str, Any]] = {
    "ppo": {
        "critic": "own",  # a network of its own that starts as the policy, or "shared": a head on the policy's trunk
        "critic_rate": 1e-3,
        "gamma": 1.0,
        "lam": 0.95,
        "mini_batches": 4,
        "learning_rate": 5e-4,
        "clip_high": 0.2,
    },
    "dpo": {"beta": 0.1, "epochs": 2, "mini_batches": 1},
}
LENGTHS: dict[tuple[str, str], dict[str, Any]] = {("lookup", "ppo"): {"updates": 75, "decay_updates": 75}}
CONTROLS = ("none", "shuffled_rewards", "supervised", "last_turn")
VALIDATION_ROWS = 256
ASKED_EVERY, PATIENCE = 50, 10  # steps of the warm start between two validations; how many may bring nothing


class Setup(NamedTuple):
    """The parts of a run."""

    settings: dict[str, Any]
    env: fg.Env
    policy: fg.Policy
    algorithm: fg.Algorithm
    optimizer: optax.GradientTransformation
    sizes: loop.Settings
    iteration: loop.Iteration
    mesh: Mesh | None
    place: Callable[[Any], Any]  # what holds parameters -> the same on the mesh
    critic: Valuation | None = None


def settings_of(env: str, **chosen: Any) -> dict[str, Any]:
    """The preset of an environment with what was chosen in its place; `None` is no choice."""
    if env not in PRESETS and ":" not in env:
        raise fg.BadInput(f"environment {env!r} is unknown; choose from {', '.join(PRESETS)}, or {BY_IMPORT}")
    algorithm = chosen.get("algorithm") or COMMON["algorithm"]
    preset = COMMON | PRESETS.get(env, OUTSIDE) | BY_ALGORITHM.get(algorithm, {}) | LENGTHS.get((env, algorithm), {})
    unknown = sorted(set(chosen) - set(preset) - {"seed"})
    if unknown:
        raise fg.BadInput(f"{unknown[0]!r} is no setting; they are {', '.join(preset)}")
    return {"env": env, "seed": 0} | preset | {name: value for name, value in chosen.items() if value is not None}


def build(settings: dict[str, Any], *, env: fg.Env | None = None, algorithm: fg.Algorithm | None = None) -> Setup:
    """The parts that these settings describe, or those that are given in their place."""
    env = make_env(settings["env"]) if env is None else env
    config = shape(env, settings)
    policy = make_policy(config, unroll=True)
    algorithm = _algorithm(settings, env) if algorithm is None else algorithm
    steps = settings["decay_updates"] * settings["mini_batches"] * settings["epochs"]
    fall = {"decay_steps": steps, "final_share": settings["decay"]} if settings["decay"] < 1 else {}
    optimizer = make_optimizer(learning_rate=settings["learning_rate"], **fall)
    critic = _critic(settings, env, policy) if algorithm.targets is not None else None
    if critic is not None:
        optimizer = by_part(optimizer, make_optimizer(learning_rate=settings["critic_rate"], **fall))
    names = ("queries", "samples", "oversample", "temperature", "mini_batches", "epochs")
    sizes = loop.Settings(**{name: settings[name] for name in names})
    judge = partial(shuffled_rewards, samples=sizes.samples) if settings["control"] == "shuffled_rewards" else None
    mesh = mesh_of(settings["mesh"])
    policy, place = settled(policy, mesh, decoder_axes(config)), placing(mesh, _axes(config, settings, critic))
    iteration = loop.make_iteration(env, policy, algorithm, optimizer, sizes, judge=judge, critic=critic, mesh=mesh)
    return Setup(settings, env, policy, algorithm, optimizer, sizes, iteration, mesh, place, critic)


def _axes(config: DecoderConfig, settings: Mapping[str, Any], critic: Valuation | None) -> Any:
    """The axis letters of all parameters."""
    if critic is None:
        return decoder_axes(config)
    return ActorCritic(decoder_axes(config), critic_axes(config) if settings["critic"] == "own" else {HEAD: "d"})


def shape(env: fg.Env, settings: Mapping[str, Any]) -> DecoderConfig:
    """A small decoder over the words of an environment."""
    return small_config(len(env.words), d=settings["d"], layers=settings["layers"], head=settings["head"])


def _critic(settings: Mapping[str, Any], env: fg.Env, policy: fg.Policy) -> Valuation:
    """A critic that starts from what the policy knows."""
    config, kinds = shape(env, settings), ("own", "shared")
    if settings["critic"] not in kinds:
        raise fg.BadInput(f"critic {settings['critic']!r} is unknown; choose from {', '.join(kinds)}")
    if settings["critic"] == "shared":
        return shared_trunk(policy, config)
    return own_network(policy, make_critic(config), init=copied_trunk(config))


def _algorithm(settings: dict[str, Any], env: fg.Env) -> fg.Algorithm:
    if settings["control"] not in CONTROLS:
        raise fg.BadInput(f"control {settings['control']!r} is unknown; choose from {', '.join(CONTROLS)}")
    own = ("beta", "clip_high", "entropy_bonus", "gamma", "lam")
    algorithm = make_algorithm(
        settings["algorithm"],
        **{name: settings[name] for name in own if name in settings},
        max_tokens=env.sizes.turns * env.sizes.action,
    )
    return fg.last_turn_only(algorithm) if settings["control"] == "last_turn" else algorithm


def seed_keys(seed: int) -> dict[str, jax.Array]:
    """A key for each purpose of a run."""
    names = ("start", "demonstrations", "run", "validation", "test")
    return dict(zip(names, jax.random.split(jax.random.key(seed), len(names)), strict=True))


# Imitation --------------------------------------------------------------------------------------------


def demonstration_rows(setup: Setup, key: jax.Array, *, rows: int, split: str) -> fg.Batch:
    """Fresh demonstrations, one a row; pure."""
    task_key, play_key = jax.random.split(key)
    tasks = draw_tasks(setup.env, task_key, rows, split)
    batch = imitation_rows(demonstrate(setup.env, tasks, jax.random.split(play_key, rows)))
    return jax.tree.map(lambda x_rs: x_rs[:, : loop.longest(setup.env)], batch)


def warm_optimizer(setup: Setup) -> optax.GradientTransformation:
    """The optimizer of the imitation that comes before reinforcement."""
    return make_optimizer(
        learning_rate=setup.settings["warm_rate"],
        warmup_steps=20,
        decay_steps=setup.settings["warm_steps"],
        matrices=matrices(shape(setup.env, setup.settings)),
    )


def warm_start(setup: Setup, params, key: jax.Array, tell: Callable[[int, float], None]):
    """Parameters at the lowest validation loss of imitation, which `tell` hears of every few steps."""
    steps, rows = setup.settings["warm_steps"], setup.settings["warm_rows"]
    optimizer = warm_optimizer(setup)
    step = jax.jit(make_supervised(setup.policy, optimizer, banned=(PAD,), mesh=setup.mesh))
    draw = jax.jit(partial(demonstration_rows, setup, rows=rows, split="train"))
    held = jax.jit(partial(demonstration_rows, setup, rows=VALIDATION_ROWS, split="validation"))(key)
    loss = jax.jit(make_validation(setup.policy, banned=(PAD,), mesh=setup.mesh))
    asked = count(0, ASKED_EVERY)

    def validate(params) -> jax.Array:
        value = loss(params, held)
        tell(next(asked), float(value))
        return value

    batches = (draw(jax.random.fold_in(key, index)) for index in range(1, steps + 1))
    state = setup.place(init_learner(params, optimizer))
    return train_to_minimum(state, batches, step, validate, every=ASKED_EVERY, patience=PATIENCE)[0].params


def imitation_step(setup: Setup, key: jax.Array) -> Callable[[loop.Run], tuple[loop.Run, dict]]:
    """A control: as many trajectories an update, imitated."""
    rows = setup.sizes.queries * setup.sizes.samples
    micro_rows = setup.sizes.micro_rows
    step = make_supervised(setup.policy, setup.optimizer, banned=(PAD,), micro_rows=micro_rows, mesh=setup.mesh)

    def imitate(run: loop.Run) -> tuple[loop.Run, dict]:
        own = jax.random.fold_in(jax.random.fold_in(key, 1), run.update)
        batch = demonstration_rows(setup, own, rows=rows, split="train")
        learner, loss = step(run.learner, batch)
        tokens = (batch.segments > 0).sum()
        return run.replace(learner=learner, update=run.update + 1), {"loss": loss, "tokens": tokens}

    return jax.jit(imitate)
