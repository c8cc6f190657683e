"""The agent run on a set of tasks with a given model, as a command: examples, warm start, and the check of its form."""

import json

import pytest
from tiny_planner import EXAMPLE, SIZES, planner_folder, write_tasks

from flowgrpo.training.run_files import EXAMPLES
from tests.experiments.conftest import check_refused, last_line, metrics, result

OPTIMIZATION_LEVEL = 1  # of its commands: the warm start computes more than it compiles


def flags(folder, **chosen) -> list[str]:
    """A run on word problems by a tiny model, in a folder of its own."""
    write_tasks(folder / "examples.jsonl", EXAMPLE)
    fixed = {"model": planner_folder(), "tasks": "word_problems", "examples": folder / "examples.jsonl", **SIZES}
    fixed |= {"workdir": folder / "run", "updates": 1, "mini_batches": 1}
    return [f"--{name}={value}" for name, value in (fixed | chosen).items()]


IMITATES = {"warm_start": "expert", "lora_rank": 0, "warm_steps": 120, "warm_rate": 0.02, "warm_rows": 4}
IMITATES |= {"demonstrations": 60, "checkpoint_every": 1}


@pytest.mark.slow
def test_imitation_of_experts_learns_the_form_and_keeps_the_examples(command, tmp_path):
    command("agentflow", *flags(tmp_path, **IMITATES))
    run = tmp_path / "run"
    losses = [line["loss"] for line in metrics(run, "warm start")]
    assert len(losses) == 5
    assert min(losses) < losses[0] / 2
    (trained,) = metrics(run, "train")
    assert trained["format_compliance"] > 0.8
    assert trained["tools"] == {"calculator": 1.0}
    assert set(result(run)["success_by_domain_after"]) == {"answer"}
    assert not (run / "warm_start").exists()

    examples = (run / EXAMPLES).read_text()
    assert json.loads(examples)["messages"][1]["content"] == "calculator(2 + 3)"
    command("agentflow", *flags(tmp_path, **IMITATES, updates=2))
    assert (run / EXAMPLES).read_text() == examples
    assert [line["update"] for line in metrics(run, "train")] == [1, 2]
    assert len(metrics(run, "warm start")) == 5
    said = command("evaluate", f"--workdir={run}", "--num_tasks=4")
    assert "success_by_domain_after" in last_line(said)


@pytest.mark.slow
def test_a_model_that_writes_no_action_is_refused_after_the_first_rollout(command, tmp_path):
    done = command("agentflow", *flags(tmp_path, warm_start="none"), check=False)
    check_refused(done, f"{planner_folder()} wrote none of the ")
    said = done.stderr.strip().splitlines()[-1]
    assert " actions of the first rollout in the form of --actions=calls; it said '" in said
    assert said.endswith(
        "Try more --examples, --warm_start=expert or a model that can, another form of --actions than calls, a larger "
        "--max_tokens, a larger model"
    )
    assert metrics(tmp_path / "run", "train") == []


@pytest.mark.slow
def test_a_model_without_right_answers_of_its_own_has_nothing_to_imitate(command, tmp_path):
    done = command("agentflow", *flags(tmp_path, warm_start="own"), check=False)
    check_refused(done, "--warm_start=own: none of 16 trajectories came to a right answer, so there is nothing to")
    sampled = (tmp_path / "run" / "trajectories" / "warm_start.jsonl").read_text()
    assert sampled.count("\n") == 16
    again = command("agentflow", *flags(tmp_path, warm_start="own"), check=False)
    assert again.stderr.splitlines()[-1] == done.stderr.splitlines()[-1]
    assert (tmp_path / "run" / "trajectories" / "warm_start.jsonl").read_text() == sampled


@pytest.mark.slow
def test_a_dry_run_shows_the_examples_and_leaves_no_run(command, tmp_path):
    said = command("agentflow", "--dry_run", *flags(tmp_path, warm_start="none")).stdout
    assert EXAMPLE["query"] in said
    assert "calculator(2 + 3)" in said
    assert "error     the action was cut before its end" in said
    assert [path.name for path in (tmp_path / "run").iterdir()] == [EXAMPLES]
