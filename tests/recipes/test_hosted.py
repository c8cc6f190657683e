"""Runs on host environments: what is offloaded changes no number, and clocks stand apart."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_hosted import CONFIG, ENV, POLICY, make_setup

import flowgrpo as fg
from flowgrpo.envs.env import PAD
from flowgrpo.generate.engine import Engine
from flowgrpo.generate.requests import EngineSettings
from flowgrpo.parallel.offload import place_of
from flowgrpo.rewards.judge import make_next_logp
from flowgrpo.rollout.records import from_json
from flowgrpo.training import language_model
from flowgrpo.training.hosted_training import HostedTrainable
from flowgrpo.training.iteration import train_loop
from flowgrpo.training.language_model import make_offloader
from flowgrpo.training.pure_env import max_trajectory_tokens
from flowgrpo.training.stages import init_train_state

ENGINE = EngineSettings(slots=8, slot_length=max_trajectory_tokens(ENV) + 8, chunk=8, steps=4, banned=(PAD,))


@pytest.mark.slow
@pytest.mark.usefixtures("nan_allowed")  # where it is not, nothing is donated
def test_offloading_changes_no_number_and_reports_its_moves(tmp_path):
    params = POLICY.init(jax.random.key(0))
    runs = {}
    with Engine(POLICY, params, ENGINE) as engine:
        for offload in ("none", "disk"):
            setup = make_setup(tmp_path / offload, engine, params, offload)
            run = init_train_state(jax.tree.map(jnp.copy, params), setup.optimizer, jax.random.key(9))
            runs[offload] = list(train_loop(HostedTrainable(setup, "toy").make_step(), run, 2))
    for (_, figures), (_, others) in zip(*runs.values(), strict=True):
        clocks, more = figures.pop("timings"), others.pop("timings")
        assert figures == others
        assert figures["computed_tokens"] == figures["fill_rate"] * 128  # in one tree: the least block of kernels
        assert 0 < figures["outcome"] < 1
        assert clocks["moves"] == {}
        assert clocks["freed_bytes"] == more["freed_bytes"] > 0  # the sampler's cache, whatever else stays
        assert {"device to host", "host to disk"} <= set(more["moves"])
        assert min(more["rollout_seconds"], more["inference_seconds"], more["train_seconds"]) > 0
    (used, _), (run, _) = runs["none"]
    assert all(x.is_deleted() for x in jax.tree.leaves(used.learner.params))  # the second update wrote over them
    other, _ = runs["disk"][-1]
    assert place_of(other.learner.optimizer) == place_of(other.reference) == "disk"
    for x, y in zip(*(jax.tree.leaves(one.replace(key=None)) for one in (run, other)), strict=True):
        np.testing.assert_array_equal(x, y)
    assert (tmp_path / "disk" / "trajectories" / "000002.jsonl").read_text().count("\n") == 4
    assert list((tmp_path / "disk" / "offload").iterdir()) == []
    got = [(tmp_path / offload / "trajectories" / "000002.advantages.jsonl").read_text() for offload in runs]
    assert got[0] == got[1]
    lines = [json.loads(line) for line in got[0].splitlines()]
    assert [(line["group"], line["sample"]) for line in lines] == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert sum(line["advantage"][0] for line in lines) == pytest.approx(0.0, abs=1e-5)


@pytest.mark.slow
def test_test_trajectories_record_the_version_of_their_weights(tmp_path):
    params, played = POLICY.init(jax.random.key(0)), {}
    with Engine(POLICY, params, ENGINE) as engine:
        setup = make_setup(tmp_path, engine, params, test_tasks=4)
        language_model.test(setup, jax.random.key(0), (params, params), (0, 3))
    for when in ("before", "after"):
        lines = (tmp_path / "trajectories" / f"test-{when}.jsonl").read_text().splitlines()
        played[when] = {int(np.max(turn.version)) for line in lines for turn in from_json(line).turns}
    assert played == {"before": {0}, "after": {3}}


@pytest.mark.slow
def test_an_offloaded_judge_returns_the_same(tmp_path):
    with make_offloader(CONFIG.replace(offload="disk").devices, tmp_path) as offloader:
        offloader.put("judge", POLICY.init(jax.random.key(0)))
        next_logp = make_next_logp(POLICY, lambda: offloader["judge"], rows=2, lengths=(8,))
        said = []
        for stage in ("rollout", "train", "inference"):
            offloader.enter(stage)
            assert place_of(offloader["judge"]) == ("disk" if stage == "train" else "device")
            if stage != "train":
                said.append(next_logp([(2, 3), (4,)]))
        np.testing.assert_array_equal(*said)


def test_an_unknown_place_is_refused():
    with pytest.raises(fg.BadInput, match="--offload=tape is unknown; choose from none, host, disk"):
        CONFIG.replace(offload="tape")


def test_contexts_too_short_for_any_prompt_are_refused(tmp_path):
    params = POLICY.init(jax.random.key(0))
    with Engine(POLICY, params, replace(ENGINE, slot_length=2, chunk=1, steps=1)) as engine:
        setup = make_setup(tmp_path, engine, params)
        run = init_train_state(params, setup.optimizer, jax.random.key(9))
        said = rf"--context_tokens={CONFIG.rollout.context_tokens} holds none of the prompts of update 1 with an action"
        with pytest.raises(fg.BadInput, match=said):
            HostedTrainable(setup, "toy").make_step()(run)
