"""The agent run as a command: one run, how it goes on, and everything that opens it again."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from flowgrpo.publish.export import read_config
from flowgrpo.publish.pages import ratios_of, read_trajectories
from flowgrpo.recipes.agent_config import preset
from flowgrpo.recipes.dry_runs import hosted_workload
from flowgrpo.rollout.records import from_json
from flowgrpo.training.run_dir import START
from flowgrpo.types import BadInput
from tests.experiments.conftest import last_line, metrics, result

OPTIMIZATION_LEVEL = 1  # of its commands: the warm start and the examinations compute more than they compile
SMALL = (
    *("--warm_steps=4", "--demonstrations=40", "--queries=4", "--samples=2", "--mini_batches=2"),
    *("--validation_tasks=8", "--test_tasks=8", "--checkpoint_every=1", "--slots=8"),
)
DOMAINS = {"mathematics", "code", "search", "drawing"}


@pytest.fixture(scope="module")
def whole(command, tmp_path_factory) -> Path:
    """Two updates in one go."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    command("agentflow", f"--workdir={folder}", "--updates=2", *SMALL)
    return folder


@pytest.mark.slow
def test_a_run_writes_what_it_says(whole):
    found, trained = result(whole), metrics(whole, "train")
    assert {"success_before", "success_after", "tool_error_before", "tool_error_after", "turns_after"} <= set(found)
    assert set(found["success_by_domain_after"]) == set(found["tool_error_by_domain_before"]) == DOMAINS
    assert (found["updates"], found["resumed_at"], found["env"]) == (2, [], "agent")
    assert (whole / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert len(trained) == 2
    assert all(0 <= line[f"success_{domain}"] <= 1 for line in trained for domain in DOMAINS)
    assert all(line["tokens_trained"] + line.get("tokens_dropped_no_signal", 0) > 0 for line in trained)
    names = sorted(path.name for path in (whole / "trajectories").iterdir())
    recorded = [f"{update:06d}{end}" for update in (1, 2) for end in (".advantages.jsonl", ".jsonl")]
    assert names == [*recorded, "test-after.jsonl", "test-before.jsonl"]
    played = [from_json(line) for line in (whole / "trajectories" / "test-after.jsonl").read_text().splitlines()]
    assert len(played) == 8
    assert all(one.turns for one in played)


@pytest.mark.slow
def test_F7_its_trajectories_become_a_page_with_advantages_and_ratios(command, whole):
    """The policy that sampled scores its own tokens: their ratios are 1."""
    found = read_trajectories(whole)
    learned = [one for one in found if one.phase == "train"]
    assert all(one.advantages is None or len(one.advantages) == len(one.trajectory.turns) for one in learned)
    assert any(one.advantages for one in learned)
    before = [one.trajectory for one in found if one.phase == "test before"]
    update, ratios = ratios_of(read_config(whole), whole, before, "start")
    assert update == 0
    for one, own in zip(before, ratios, strict=True):
        for turn, ratio in zip(one.turns, own, strict=True):
            np.testing.assert_allclose(ratio[turn.chosen], 1.0, atol=1e-4)
    said = command("view", f"--workdir={whole}", "--ratios=last").stdout
    assert f"{len(found)} trajectories of {whole}" in said
    named = re.search(r'"names":\{"ratio":("[^"]*")\}', (whole / "trajectories.html").read_text())
    assert "π(last, update 2) / π(sampled)" in json.loads(named[1])


@pytest.mark.slow
def test_a_finished_run_is_evaluated_on_fresh_tasks_by_domain(command, whole):
    said = command("evaluate", f"--workdir={whole}", "--num_tasks=4", "--samples=2")
    assert {"success_before", "success_after", "pass@2_after", "success_by_domain_after"} <= set(last_line(said))
    assert "drawing" in said.stdout


@pytest.mark.slow
def test_a_dry_run_shows_prompts_and_rollouts_and_leaves_no_run(command, tmp_path):
    said = command("agentflow", "--dry_run", f"--workdir={tmp_path}", *SMALL).stdout
    assert "<|im_start|>user" in said
    assert said.count("\nreward ") == 4
    assert not (tmp_path / "run.json").exists()


@pytest.mark.slow
def test_a_dry_run_compiles_the_programs_of_the_run_and_leaves_nothing(command, whole, tmp_path):
    asked = ("--dry_run=compile", "--mesh=data=2", "--cpu_devices=2", "--device_memory=9MB", "--dtype=float32")
    sizes = ("--queries=2", "--samples=2", "--context_tokens=64", "--max_tokens=8", "--slots=4")
    said = command("agentflow", f"--model={whole / START}", f"--workdir={tmp_path / 'dry'}", *asked, *sizes)
    found = last_line(said)
    assert [row["program"] for row in found["programs"]] == ["update", "reference", "prefill", "decode"]
    fits = {row["program"]: row["fits"] for row in found["programs"]}
    assert (fits["update"], fits["decode"]) == (False, True)
    assert all(row["peak"] > 0 and row["tflop"] > 0 for row in found["programs"])
    assert not (tmp_path / "dry").exists()


def test_what_is_compiled_is_what_the_settings_ask_for():
    config = preset("nowhere", queries=4, samples=2)
    job = hosted_workload(config)  # contexts afresh: each of the three turns is a row
    assert (job.rows, job.length, job.prompt) == (24, 8192, 8192 - 2048)
    assert (job.dtype, job.compute_dtype, job.remat) == ("float32", "bfloat16", True)
    adapted = hosted_workload(config.replace(lora_rank=4, rendering="append"))
    assert (adapted.rows, adapted.dtype, adapted.compute_dtype) == (8, "bfloat16", None)


def test_defaults_are_offline_or_with_a_model_the_papers():
    paper = preset("some/model").settings()
    names = (
        "queries",
        "samples",
        "learning_rate",
        "beta",
        "clip_high",
        "temperature",
        "turns",
        "eval_turns",
        "max_tokens",
    )
    assert [paper[name] for name in names] == [32, 8, 1e-6, 0.001, 0.2, 0.5, 3, 10, 2048]
    assert preset().warm_start.warm_steps > 0
    with pytest.raises(BadInput, match="is no setting"):
        preset(colour="red")  # type: ignore[call-arg]
