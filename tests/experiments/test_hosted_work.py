"""Runs on host environments: what is offloaded changes no number, and clocks stand apart."""

from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_env import tiny_env

import flowgrpo as fg
from experiments.hosted_work import HostedSetup, make_residency, make_step
from experiments.planner_setup import Planner
from flowgrpo import loop
from flowgrpo.contracts import Scored
from flowgrpo.effects import no_effects
from flowgrpo.envs.env import PAD
from flowgrpo.generate.engine import Engine
from flowgrpo.learner.residency import place_of
from flowgrpo.learner.state import make_optimizer
from flowgrpo.learner.trained import WHOLE
from flowgrpo.models.config import DecoderConfig, Rope
from flowgrpo.models.decoder import make_policy
from flowgrpo.rewards.judge import make_next_logp
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


def make_setup(folder, engine: Engine, params, offload: str) -> HostedSetup:
    env = HOSTED._replace(reset=reset, step=step)
    return HostedSetup(
        name="toy",
        settings=SETTINGS | {"offload": offload},
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
        warm_start=lambda _: None,
        story=lambda _: "",
    )


@pytest.mark.slow
def test_offloading_changes_no_number_and_says_what_it_moved(tmp_path):
    params = POLICY.init(jax.random.key(0))
    sizes = {"slots": 8, "slot_length": loop.longest(ENV) + 8, "chunk": 8, "steps": 4, "banned": (PAD,)}
    runs = {}
    with Engine(POLICY, params, **sizes) as engine:
        for offload in ("none", "disk"):
            setup = make_setup(tmp_path / offload, engine, params, offload)
            run = loop.start_run(jax.tree.map(jnp.copy, params), setup.optimizer, jax.random.key(9))
            runs[offload] = list(loop.train(make_step(setup), run, 2))
    for (_, figures), (_, others) in zip(*runs.values(), strict=True):
        clocks, more = figures.pop("timings"), others.pop("timings")
        assert figures == others
        assert figures["fill_rate"] > 0.3
        assert 0 < figures["outcome"] < 1
        assert (clocks["moves"], clocks["freed_bytes"]) == ({}, 0)
        assert more["freed_bytes"] > 0
        assert {"device to host", "host to disk"} <= set(more["moves"])
        assert min(more["rollout_seconds"], more["inference_seconds"], more["train_seconds"]) > 0
    (run, _), (other, _) = (one[-1] for one in runs.values())
    assert place_of(other.learner.optimizer) == place_of(other.reference) == "disk"
    for x, y in zip(*(jax.tree.leaves(one.replace(key=None)) for one in (run, other)), strict=True):
        np.testing.assert_array_equal(x, y)
    assert (tmp_path / "disk" / "trajectories" / "000002.jsonl").read_text().count("\n") == 4
    assert list((tmp_path / "disk" / "offload").iterdir()) == []


@pytest.mark.slow
def test_a_judge_that_was_away_says_the_same(tmp_path):
    with make_residency({"offload": "disk"}, tmp_path) as residency:
        residency.hold("judge", POLICY.init(jax.random.key(0)))
        next_logp = make_next_logp(POLICY, lambda: residency["judge"], rows=2, lengths=(8,))
        said = []
        for stage in ("rollout", "train", "inference"):
            residency.enter(stage)
            assert place_of(residency["judge"]) == ("disk" if stage == "train" else "device")
            if stage != "train":
                said.append(next_logp([(2, 3), (4,)]))
        np.testing.assert_array_equal(*said)


def test_an_unknown_place_is_refused(tmp_path):
    with pytest.raises(fg.BadInput, match="--offload=tape is unknown; choose from none, host, disk"):
        make_residency({"offload": "tape"}, tmp_path)
