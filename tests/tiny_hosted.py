"""For tests of hosted runs: a tiny model that answers a question with one action, of which odd ones are right."""

from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from tiny_env import tiny_env

import flowgrpo as fg
from flowgrpo.contracts import RewardResult
from flowgrpo.envs.env import PAD
from flowgrpo.generate.engine import Engine
from flowgrpo.learner.state import adamw
from flowgrpo.models.config import DecoderConfig, Rope
from flowgrpo.models.decoder import make_policy
from flowgrpo.models.trainable import ALL_PARAMS
from flowgrpo.rollout.effects import no_effects
from flowgrpo.rollout.host_adapter import as_host
from flowgrpo.training.config import make_config
from flowgrpo.training.language_model import HostedSetup, make_offloader
from flowgrpo.training.planner import Planner
from flowgrpo.training.pure_env import max_trajectory_tokens
from flowgrpo.training.settings import HostedConfig
from flowgrpo.training.stages import IterationSettings
from flowgrpo.training.warm_start import no_warm_start

ENV = tiny_env(rounds=1)
HOSTED = as_host(ENV)
POLICY = make_policy(
    DecoderConfig(v=len(ENV.vocabulary), d=16, h=2, k=1, e=8, f=16, windows=(None,), ropes=(Rope(),), init_scale=0.3)
)
CONFIG = make_config(
    HostedConfig,
    {
        "rendering": "append",
        "max_tokens": 1,
        "context_tokens": max_trajectory_tokens(ENV),
        "slots": 8,
        "group_seconds": 600.0,
        "turn_seconds": 600.0,
        "recorded_groups": 1,
        "watch_seconds": 600.0,
    },
)


def reset(key, task: fg.Task, call_tool):
    return HOSTED.reset(key, np.int32(int(task.query)), call_tool)


def step(state, tokens, call_tool):
    """The first action is the answer."""
    state, now = HOSTED.step(state, tokens, call_tool)
    return state, now._replace(observation=None, done=True, output=" ".join(map(str, tokens)), reward=None)


def tasks(_split: str, first: int, count: int) -> list[fg.Task]:
    return [fg.Task(f"{first + i}", f"{(first + i) % 4}", ("1",), "toy") for i in range(count)]


def make_setup(folder, engine: Engine, params, offload: str = "none", **settings) -> HostedSetup:
    """The parts of a run; `settings` beside those above."""
    env = HOSTED._replace(reset=reset, step=step)
    config = CONFIG.replace(offload=offload, **settings)
    return HostedSetup(
        name="toy",
        config=config,
        folder=folder,
        model=cast(Any, SimpleNamespace(policy=POLICY, banned=(PAD,))),
        planner=Planner(
            policy=POLICY,
            engine_policy=POLICY,
            params=params,
            trainable=ALL_PARAMS,
            compute_dtype=None,
            to_engine=lambda params: params,
            to_mesh=lambda tree: tree,
        ),
        env=env,
        eval_env=env,
        engine=engine,
        offloader=make_offloader(config.devices, folder),
        call_tool=no_effects,
        reward=fg.Reward(lambda _, output: RewardResult(float(int(output.split()[0]) % 2))),
        tasks=tasks,
        algorithm=fg.flow_grpo(beta=0.01),
        optimizer=adamw(0.01),
        sizes=IterationSettings(queries=4, samples=4, micro_rows=8),
        warm_start=lambda _: no_warm_start(jax.tree.map(jnp.copy, params)),
        format_trajectory=lambda *_: "",
    )
