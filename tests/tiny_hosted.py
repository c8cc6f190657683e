"""For tests of hosted runs: a tiny model that answers a question with one action, of which odd ones are right."""

from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from tiny_env import tiny_env

import flowgrpo as fg
from experiments.hosted_setup import HostedSetup, make_residency
from experiments.planner_setup import Planner
from flowgrpo import loop
from flowgrpo.contracts import Scored
from flowgrpo.effects import no_effects
from flowgrpo.envs.env import PAD
from flowgrpo.generate.engine import Engine
from flowgrpo.learner.state import make_optimizer
from flowgrpo.learner.trained import WHOLE
from flowgrpo.models.config import DecoderConfig, Rope
from flowgrpo.models.decoder import make_policy
from flowgrpo.rollout.pure import as_host

ENV = tiny_env(rounds=1)
HOSTED = as_host(ENV)
POLICY = make_policy(
    DecoderConfig(v=len(ENV.words), d=16, h=2, k=1, e=8, f=16, windows=(None,), ropes=(Rope(),), init_scale=0.3)
)
SETTINGS = {
    "rendering": "append",
    "context_tokens": loop.longest(ENV),
    "temperature": 1.0,
    "slots": 8,
    "group_seconds": 600.0,
    "turn_seconds": 600.0,
    "control": "none",
    "recorded": 1,
    "watch_seconds": 600.0,
}


def reset(key, task: fg.Task, do):
    return HOSTED.reset(key, np.int32(int(task.query)), do)


def step(state, tokens, do):
    """The first action is the answer."""
    state, now = HOSTED.step(state, tokens, do)
    return state, now._replace(said=None, done=True, output=" ".join(map(str, tokens)), reward=None)


def tasks(_split: str, first: int, count: int) -> list[fg.Task]:
    return [fg.Task(f"{first + i}", f"{(first + i) % 4}", ("1",), "toy") for i in range(count)]


def make_setup(folder, engine: Engine, params, offload: str = "none", **settings) -> HostedSetup:
    """The parts of a run; `settings` beside those above."""
    env = HOSTED._replace(reset=reset, step=step)
    return HostedSetup(
        name="toy",
        settings=SETTINGS | {"offload": offload} | settings,
        folder=folder,
        model=cast(Any, SimpleNamespace(policy=POLICY, banned=(PAD,))),
        planner=Planner(
            policy=POLICY,
            served=POLICY,
            params=params,
            trained=WHOLE,
            compute_dtype=None,
            serve=lambda params: params,
            mesh=None,
            place=lambda tree: tree,
        ),
        env=env,
        exam_env=env,
        engine=engine,
        residency=make_residency({"offload": offload}, folder),
        do=no_effects,
        reward=fg.Reward(lambda _, output: Scored(float(int(output.split()[0]) % 2))),
        tasks=tasks,
        algorithm=fg.flow_grpo(beta=0.01),
        optimizer=make_optimizer(learning_rate=0.01),
        sizes=loop.Settings(queries=4, samples=4, micro_rows=8),
        warm_start=lambda _: jax.tree.map(jnp.copy, params),
        story=lambda *_: "",
    )
