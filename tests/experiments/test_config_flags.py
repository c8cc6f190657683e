"""--config, --set and --print_config: which wins, and what is refused before anything compiles."""

import pytest
import yaml

from tests.experiments.conftest import check_refused


@pytest.fixture(scope="module")
def printed(command):
    """The settings that a command line describes, by section."""

    def run(module: str, *arguments: str, **more) -> dict:
        return yaml.safe_load(command(module, *arguments, "--print_config", **more).stdout)

    return run


def test_presets_files_assignments_and_flags_win_in_this_order(printed, tmp_path):
    (tmp_path / "mine.yaml").write_text("learner: {learning_rate: 0.1, beta: 0.2}\nrun: {seed: 3}\n")
    found = printed(
        "quickstart", "--config=mine.yaml", "--set", "learner.beta=0.3", "--set=samples=4", "--seed=5", cwd=tmp_path
    )
    assert found["recipe"] == "pure"
    learner, rollout = found["settings"]["learner"], found["settings"]["rollout"]
    assert (learner["learning_rate"], learner["beta"], rollout["samples"]) == (0.1, 0.3, 4)
    assert (found["settings"]["run"]["seed"], learner["mini_batches"]) == (5, 4)  # of the preset


def test_what_is_printed_describes_the_same_run_and_chooses_its_recipe(command, tmp_path):
    own = ("--set", "model.model=a/model", "--env=gymnasium:Taxi-v3", "--print_config")
    first = command("train_env", *own).stdout
    (tmp_path / "run.yaml").write_text(first)
    assert command("train", "--config", str(tmp_path / "run.yaml"), "--print_config").stdout == first


@pytest.mark.parametrize(
    ("module", "flags", "why"),
    [
        ("quickstart", ("--set=beta=1", "--beta=2"), "--set beta=1.0 and --beta=2.0 contradict each other: give one"),
        ("quickstart", ("--set=beta=1", "--set=learner.beta=2"), "--set beta is given twice, with 1.0 and with 2.0"),
        ("quickstart", ("--config=other.json",), "--config=other.json is of a run of agent, and this command's"),
        ("train", ("--config=gone.yaml",), "--config=gone.yaml can't be read (No such file or directory)"),
        ("finetune", ("--method=sft",), "--data must be given"),
    ],
)
def test_contradictions_are_refused_when_the_flags_are_read(module, flags, why, command, tmp_path):
    (tmp_path / "other.json").write_text('{"recipe": "agent", "settings": {}}')
    check_refused(command(module, *flags, cwd=tmp_path, check=False), why, status=2)
