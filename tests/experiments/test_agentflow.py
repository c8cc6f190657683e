"""The agent run as a command: what it writes, how it goes on, what it refuses."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from experiments import agent_setups
from experiments.recorded import read_trajectories
from experiments.recorded_ratios import ratios_of
from flowgrpo.learner.folder import read_run
from flowgrpo.rollout.records import from_json
from flowgrpo.types import BadInput

pytestmark = pytest.mark.slow

SMALL = (
    *("--warm_steps=20", "--demonstrations=100", "--queries=4", "--samples=3"),
    *("--test_tasks=12", "--checkpoint_every=2", "--slots=16"),
)


@pytest.fixture(scope="module")
def whole(command, tmp_path_factory) -> Path:
    """Four updates in one go."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    command("agentflow", f"--workdir={folder}", "--updates=4", *SMALL)
    return folder


def result(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


def test_it_writes_what_it_says(whole):
    found = result(whole)
    domains = {"mathematics", "code", "search", "drawing"}
    assert {"success_before", "success_after", "tool_error_before", "tool_error_after", "turns_after"} <= set(found)
    assert set(found["success_by_domain_after"]) == set(found["tool_error_by_domain_before"]) == domains
    assert (found["updates"], found["resumed_at"], found["env"]) == (4, [], "agent")
    assert (whole / "curves.png").read_bytes().startswith(b"\x89PNG")
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["phase"] == "train"]
    assert len(trained) == 4
    assert all(0 <= line[f"success_{domain}"] <= 1 for line in trained for domain in domains)
    assert all(line["tokens_trained"] + line.get("tokens_dropped_no_signal", 0) > 0 for line in trained)


def test_its_trajectories_are_records_that_can_be_read(whole):
    names = sorted(path.name for path in (whole / "trajectories").iterdir())
    trained = [f"{update:06d}{end}" for update in (1, 2, 3, 4) for end in (".advantages.jsonl", ".jsonl")]
    assert names == [*trained, "test-after.jsonl", "test-before.jsonl"]
    played = [from_json(line) for line in (whole / "trajectories" / "test-after.jsonl").read_text().splitlines()]
    assert len(played) == 12
    assert all(one.trajectory.turns for one in played)


def test_they_become_a_page_with_advantages_and_ratios(command, whole):
    """The policy that sampled scores its own tokens: their ratios are 1 (F7)."""
    found = read_trajectories(whole)
    learned = [one for one in found if one.phase == "train"]
    assert all(one.advantages is None or len(one.advantages) == len(one.played.trajectory.turns) for one in learned)
    assert any(one.advantages for one in learned)
    before = [one.played for one in found if one.phase == "test before"]
    update, ratios = ratios_of(read_run(whole)["settings"], whole, before, "start")
    assert update == 0
    for one, own in zip(before, ratios, strict=True):
        for turn, ratio in zip(one.trajectory.turns, own, strict=True):
            np.testing.assert_allclose(ratio[turn.chosen], 1.0, atol=1e-4)
    said = command("view", f"--workdir={whole}", "--ratios=last").stdout
    assert f"{len(found)} trajectories of {whole}" in said
    assert "π(last, update 4) / π(sampled)" in json.loads(f'"{page_names(whole)}"')


def page_names(folder: Path) -> str:
    """What the page of a run calls its ratios."""
    return re.search(r'"names":\{"ratio":"(.*?)"\}', (folder / "trajectories.html").read_text())[1]


def test_S1_a_run_that_was_stopped_ends_as_one_that_was_not(command, whole, tmp_path):
    folder = tmp_path / "parts"
    command("agentflow", f"--workdir={folder}", "--updates=2", *SMALL)
    command("agentflow", f"--workdir={folder}", "--updates=4", *SMALL)
    for path in sorted((whole / "trajectories").glob("*.advantages.jsonl")):
        assert (folder / "trajectories" / path.name).read_bytes() == path.read_bytes()
    assert result(folder)["resumed_at"] == [2]
    assert result(folder)["params_sha256"] == result(whole)["params_sha256"]
    assert (folder / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def test_a_finished_run_is_evaluated_on_fresh_tasks_by_domain(command, whole):
    said = command("evaluate", f"--workdir={whole}", "--num_tasks=8", "--samples=2").stdout
    found = json.loads(said.splitlines()[-1])
    assert {"success_before", "success_after", "pass@2_after", "success_by_domain_after"} <= set(found)
    assert "drawing" in said


def test_a_dry_run_shows_prompts_and_rollouts_and_leaves_no_run(command, tmp_path):
    said = command("agentflow", "--dry_run", f"--workdir={tmp_path}", *SMALL).stdout
    assert "<|im_start|>user" in said
    assert said.count("\nreward ") == 4
    assert not (tmp_path / "run.json").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--tools=calculator,browser"], "'browser' is none of calculator, python, search"),
        (["--domains=chess"], "'chess' has no offline tasks"),
        (["--tasks=nowhere.jsonl"], "nowhere.jsonl"),
        (["--corpus=nowhere.txt"], "nowhere.txt"),
        (["--executor=loud"], "loud"),
        (["--turns=0"], "turns"),
        (["--mcp=no-such-command-anywhere"], "no-such-command-anywhere"),
        (["--prompts=curriculum"], "--prompts=curriculum needs --difficulty"),
        (["--prompts=curriculum", "--difficulty=level"], "field 'level' is missing"),
        (["--difficulty=level"], "--difficulty=level needs --prompts=curriculum"),
    ],
)
def test_bad_flags_are_one_sentence(command, tmp_path, given, said):
    refused(command, tmp_path, given, said)


def test_a_model_that_is_nowhere_is_one_sentence(command, tmp_path):
    tasks = tmp_path / "tasks.jsonl"
    task = {"domain": "mathematics", "query": "What is 2 + 2?", "answers": ["4"]}
    tasks.write_text("".join(json.dumps(task | {"id": f"sum-{number}"}) + "\n" for number in range(200)))
    given = ["--model=nowhere/at/all", f"--tasks={tasks}", "--tools=calculator"]
    refused(command, tmp_path, given, "nowhere/at/all")


def refused(command, tmp_path, given, said):
    """The command ends with one sentence that says so, and writes no result."""
    done = command("agentflow", f"--workdir={tmp_path}", "--updates=1", *SMALL, *given, check=False)
    assert done.returncode != 0
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "result.json").exists()


def test_without_a_model_the_settings_are_offline_and_with_one_those_of_the_paper():
    paper = agent_setups.settings_of("some/model")
    assert {name: paper[name] for name in ("queries", "samples", "learning_rate", "beta", "clip_high")} == {
        "queries": 32,
        "samples": 8,
        "learning_rate": 1e-6,
        "beta": 0.001,
        "clip_high": 0.2,
    }
    assert (paper["temperature"], paper["turns"], paper["exam_turns"], paper["max_tokens"]) == (0.5, 3, 10, 2048)
    assert agent_setups.settings_of(None)["warm_steps"] > 0
    with pytest.raises(BadInput, match="is no setting"):
        agent_setups.settings_of(None, colour="red")
