"""Runs on host environments: what is offloaded changes no number, and clocks stand apart."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_hosted import CONFIG, ENV, POLICY, make_setup

import flowgrpo as fg
from flowgrpo import loop
from flowgrpo.envs.env import PAD
from flowgrpo.generate.engine import Engine
from flowgrpo.parallel.offload import place_of
from flowgrpo.recipes import hosted
from flowgrpo.recipes.hosted import make_residency
from flowgrpo.recipes.hosted_training import HostedWork
from flowgrpo.rewards.judge import make_next_logp
from flowgrpo.rollout.records import from_json


@pytest.mark.slow
@pytest.mark.usefixtures("nan_allowed")  # where it is not, nothing is donated
def test_offloading_changes_no_number_and_says_what_it_moved(tmp_path):
    params = POLICY.init(jax.random.key(0))
    sizes = {"slots": 8, "slot_length": loop.longest(ENV) + 8, "chunk": 8, "steps": 4, "banned": (PAD,)}
    runs = {}
    with Engine(POLICY, params, **sizes) as engine:
        for offload in ("none", "disk"):
            setup = make_setup(tmp_path / offload, engine, params, offload)
            run = loop.start_run(jax.tree.map(jnp.copy, params), setup.optimizer, jax.random.key(9))
            runs[offload] = list(loop.train_loop(HostedWork(setup, "toy").make_step(), run, 2))
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
def test_what_is_tested_records_the_version_that_played(tmp_path):
    params, played = POLICY.init(jax.random.key(0)), {}
    with Engine(POLICY, params, slots=8, slot_length=loop.longest(ENV) + 8, chunk=8, steps=4, banned=(PAD,)) as engine:
        setup = make_setup(tmp_path, engine, params, test_tasks=4)
        hosted.test(setup, jax.random.key(0), (params, params), (0, 3))
    for when in ("before", "after"):
        lines = (tmp_path / "trajectories" / f"test-{when}.jsonl").read_text().splitlines()
        played[when] = {int(np.max(turn.version)) for line in lines for turn in from_json(line).turns}
    assert played == {"before": {0}, "after": {3}}


@pytest.mark.slow
def test_a_judge_that_was_away_says_the_same(tmp_path):
    with make_residency(replace(CONFIG, offload="disk"), tmp_path) as residency:
        residency.hold("judge", POLICY.init(jax.random.key(0)))
        next_logp = make_next_logp(POLICY, lambda: residency["judge"], rows=2, lengths=(8,))
        said = []
        for stage in ("rollout", "train", "inference"):
            residency.enter(stage)
            assert place_of(residency["judge"]) == ("disk" if stage == "train" else "device")
            if stage != "train":
                said.append(next_logp([(2, 3), (4,)]))
        np.testing.assert_array_equal(*said)


def test_an_unknown_place_is_refused():
    with pytest.raises(fg.BadInput, match="--offload=tape is unknown; choose from none, host, disk"):
        replace(CONFIG, offload="tape")


def test_a_context_that_holds_no_prompt_is_refused_where_nothing_could_be_learned(tmp_path):
    params = POLICY.init(jax.random.key(0))
    with Engine(POLICY, params, slots=8, slot_length=2, chunk=1, steps=1, banned=(PAD,)) as engine:
        setup = make_setup(tmp_path, engine, params)
        run = loop.start_run(params, setup.optimizer, jax.random.key(9))
        said = rf"--context_tokens={CONFIG.context_tokens} holds none of the prompts of update 1 with an action"
        with pytest.raises(fg.BadInput, match=said):
            HostedWork(setup, "toy").make_step()(run)
