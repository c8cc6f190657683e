"""`fg.compare`: what it reports, keeps and refuses, without training; and a small comparison with it."""

import numpy as np
import pytest

import flowgrpo as fg
from flowgrpo.recipes import compare

ENDS = {"flow_grpo": 0.5, "mine": 0.75}


@fg.algorithm
def mine(outcome_n, group_n, valid_n):
    return fg.group_center(outcome_n, group_n, valid_n)


@pytest.fixture
def trained(monkeypatch) -> list[tuple[str, list[int]]]:
    """Instead of training, each seed adds 0.01 to what its algorithm is known to reach -> what would be trained."""
    trained = []

    def run_arm(arm, _config, world, starts, **_):
        assert isinstance(world, fg.Env)
        name = arm.algorithm().name
        trained.append((name, starts.tolist()))
        return [{"updates": [0, 2], "success": [0.1, ENDS[name] + 0.01 * seed], "turns": [4.0, 3.0]} for seed in starts]

    monkeypatch.setattr(compare, "warm_start_seeds", lambda _config, _world, seeds, **_: np.array(seeds))
    monkeypatch.setattr(compare, "run_arm", run_arm)
    return trained


ALGORITHMS = {"flow_grpo": fg.flow_grpo(), "mine": mine}


def test_a_comparison_has_each_seeds_success_and_is_printed_as_its_table(trained, tmp_path):
    result = fg.compare(ALGORITHMS, env=fg.lookup(), seeds=range(4), updates=2, folder=tmp_path)
    assert trained == [("flow_grpo", [0, 1, 2, 3]), ("mine", [0, 1, 2, 3])]
    np.testing.assert_allclose(result.arms["mine"].success, [0.75, 0.76, 0.77, 0.78])
    low, high = result.arms["mine"].interval
    assert result.arms["mine"].iqm == pytest.approx(0.765)
    assert low <= result.arms["mine"].iqm <= high
    assert (result.arms["flow_grpo"].beats_first, result.arms["mine"].beats_first) == (None, 1.0)
    assert str(result) == (tmp_path / "table.md").read_text().removesuffix("\n")
    assert "beats flow_grpo" in str(result).splitlines()[0]
    assert (tmp_path / "index.html").exists()


def test_more_seeds_and_algorithms_run_what_is_missing_with_the_same_settings_alone(trained, tmp_path):
    fg.compare({"mine": mine}, env=fg.lookup(), seeds=[0], updates=2, folder=tmp_path)
    fg.compare(ALGORITHMS, env=fg.lookup(), seeds=[0, 1], updates=2, folder=tmp_path)
    assert trained == [("mine", [0]), ("flow_grpo", [0, 1]), ("mine", [1])]
    with pytest.raises(fg.BadInput, match="holds another run"):
        fg.compare(ALGORITHMS, env=fg.lookup(), seeds=[0], updates=3, folder=tmp_path)


@pytest.mark.usefixtures("trained")
def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = fg.compare(ALGORITHMS, env=fg.lookup(), seeds=[0], updates=2)
    assert (result.folder, list(tmp_path.iterdir())) == (None, [])


@pytest.mark.parametrize(
    ("algorithms", "env", "words"),
    [
        ({}, "lookup", "there is no algorithm"),
        (["grpo"], "lookup", "give them by name"),
        ({"mine": fg.flow_grpo}, "lookup", r"'mine' is <function flow_grpo.*; give an fg\.Algorithm"),
        (ALGORITHMS, "chess", "environment 'chess' is unknown; choose from lookup"),
        (ALGORITHMS, fg.lookup, r"env is <function lookup.*; give an fg\.Env"),
    ],
)
def test_what_cannot_be_compared_is_refused(algorithms, env, words):
    with pytest.raises(fg.BadInput, match=words):
        fg.compare(algorithms, env=env, seeds=[0])


@pytest.mark.slow
def test_an_object_and_a_name_with_the_same_settings_have_the_same_curve():
    changes = {"warm_steps": 20, "model_dim": 32, "layers": 1, "queries": 4, "samples": 4, "warm_rows": 8, "beta": 0.01}
    algorithms = {"object": fg.flow_grpo(beta=0.01, clip_high=0.28), "name": "flow_grpo", "mine": mine}
    result = fg.compare(algorithms, env=fg.lookup(hops=(1, 1)), seeds=[3], updates=2, tasks=64, changes=changes)
    lines = {name: result.runs[name, "lookup", 3] for name in algorithms}
    assert lines["object"]["train"] == lines["name"]["train"]
    assert lines["object"]["train"] != lines["mine"]["train"]
    assert lines["object"]["success"][0] == lines["mine"]["success"][0]
