"""S1: a run that is killed at random moments ends as one that nobody disturbed, and a soak finds where it does not."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny_work import tiny_work

from experiments import kills
from experiments.kills import Kill, Moment, Timeline, draw, run_soak, wrong_starts
from experiments.same_run import differences
from experiments.session import one_run
from flowgrpo.learner.checkpoint import Checkpoints
from flowgrpo.types import BadInput

ROOT = Path(__file__).parent.parent.parent
LINES = ["warm start", "warm start", "validation", "train", "train", "validation", "train", "train", "validation"]
TIMELINE = Timeline(
    [float(second) for second in range(1, 11)], ["start", *(kills.NAMES[phase] for phase in LINES[1:]), "test"]
)

# Where the signals come ---------------------------------------------------------------------------------


def test_moments_are_spread_over_all_that_a_run_does_in_its_order():
    moments = draw(TIMELINE, 40, seed=0)
    assert moments == sorted(moments) == draw(TIMELINE, 40, seed=0) != draw(TIMELINE, 40, seed=1)
    assert {moment.kind for moment in moments} == set(kills.KINDS)
    for moment in moments:
        assert 0 <= moment.share < 1
        at = TIMELINE.kinds[moment.lines]
        assert moment.kind == at or (moment.kind == "write" and TIMELINE.kinds[moment.lines - 1] == "examination")
    updates = {moment.lines for moment in moments if moment.kind == "update"}
    assert updates == {3, 4, 6, 7}


def test_a_gap_is_the_time_from_a_line_to_the_next_or_to_the_end():
    timeline = Timeline([2.0, 2.5, 4.0], ["start", "update", "test"])
    assert [timeline.gap(lines) for lines in (0, 1, 2)] == [2.0, 0.5, 1.5]


def test_a_run_that_began_somewhere_else_than_at_its_newest_checkpoint_is_found():
    moment = Moment(3, 0.5, "update")
    good = [Kill(moment, True, None, None, 0, False), Kill(moment, True, 4, 4, 6, True)]
    assert wrong_starts(good) == []
    assert wrong_starts([*good, Kill(moment, True, 0, 6, 6, False)]) == [
        "a run went on from update 0, and the newest checkpoint was of 6"
    ]


# What differs -------------------------------------------------------------------------------------------


@pytest.fixture
def pair(tmp_path) -> tuple[Path, Path]:
    """A run, and the same again."""
    one, two = tmp_path / "one", tmp_path / "two"
    one_run(tiny_work(), one, every=2)
    shutil.copytree(one, two)
    for folder, seconds in ((one, 0.5), (two, 0.7)):
        (folder / "trajectories").mkdir()
        (folder / "trajectories" / "000001.jsonl").write_text(json.dumps({"log": ["4"], "seconds": seconds}) + "\n")
    return one, two


def test_equal_runs_have_no_difference_whatever_the_clock_said(pair):
    result = json.loads((pair[1] / "result.json").read_text())
    (pair[1] / "result.json").write_text(json.dumps(result | {"minutes": 99, "resumed_at": [2]}))
    assert differences(*pair) == {}


def change_metrics(folder: Path) -> None:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    lines[3] = lines[3].replace("1", "2", 1)
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def change_result(folder: Path) -> None:
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps(result | {"best_update": 77}))


def change_trajectories(folder: Path) -> None:
    (folder / "trajectories" / "000001.jsonl").write_text(json.dumps({"log": ["5"], "seconds": 0.5}) + "\n")


def change_leaf(folder: Path, name: str) -> None:
    """One bit of an array of the last checkpoint."""
    checkpoints = Checkpoints(folder, keep=9)
    last = checkpoints.latest()
    assert last is not None
    tree, note = checkpoints.restore(last, ...), checkpoints.note(last)
    *above, key = name.split("/")
    place = tree
    for part in above:
        place = place[int(part)] if isinstance(place, list) else place[part]
    array = np.array(place[key])
    array.view(np.uint8).reshape(-1)[0] ^= 1
    place[key] = array
    checkpoints.save(last, tree, note)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "part", "said"),
    [
        (change_metrics, "metrics", "metrics.jsonl:4"),
        (change_result, "result", "best_update"),
        (change_trajectories, "trajectories", "000001.jsonl:1"),
        (lambda folder: change_leaf(folder, "run/learner/params/w"), "checkpoint", "run/learner/params/w"),
        (lambda folder: change_leaf(folder, "start/b"), "checkpoint", "start/b"),
    ],
)
def test_every_difference_is_found_and_named(pair, change, part, said):
    change(pair[1])
    found = differences(*pair)
    assert list(found) == [part]
    assert found[part] == said


# Processes ----------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(monkeypatch) -> list[str]:
    """The command of a tiny run."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT}/tests")
    return [sys.executable, str(ROOT / "tests" / "tiny_run.py")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kills"), [("TERM", 2), ("KILL", 3)])
def test_S1_a_tiny_run_ends_as_if_nothing_had_been(tiny, tmp_path, name, kills):
    found = run_soak(tiny, tmp_path, kills=kills, seed=0, name=name)
    assert found["kills"] == kills
    assert (found["differences"], found["wrong_starts"]) == ({}, [])
    assert found["resumed_at"]
    assert all(update > 0 for update in found["went_on_from"][found["went_on_from"].count(0) :])


@pytest.mark.slow
def test_a_run_that_differs_by_itself_and_one_that_fails_are_one_sentence(tiny, tmp_path):
    with pytest.raises(BadInput, match=r"two undisturbed runs differ in .*metrics"):
        run_soak([*tiny, "--odd"], tmp_path, kills=1, seed=0, name="KILL")
    with pytest.raises(BadInput, match="holds an earlier soak"):
        run_soak(tiny, tmp_path, kills=1, seed=0, name="KILL")
    with pytest.raises(BadInput, match=r"ended with status 2 .*--even is no flag"):
        run_soak([*tiny, "--even"], tmp_path / "other", kills=1, seed=0, name="KILL")


SIZES = {
    "quickstart": "--updates=4 --test_tasks=16",
    "agentflow": "--updates=2 --domains=drawing --warm_steps=100 --demonstrations=200 --test_tasks=8 "
    "--checkpoint_every=1",
}


@pytest.mark.soak
@pytest.mark.parametrize("experiment", list(SIZES))
def test_S1_a_run_killed_at_random_moments_ends_as_if_nothing_had_been(experiment, command, tmp_path):
    """30 kills of each: `python -m experiments.soak --experiment=...`."""
    rest = (f"--workdir={tmp_path}", f"--arguments={SIZES[experiment]}")
    said = command("soak", f"--experiment={experiment}", "--kills=5", *rest, check=False, timeout=1800)
    assert said.returncode == 0, said.stdout + said.stderr
    found = json.loads(said.stdout.splitlines()[-1])
    assert found["kills"] == 5
    assert found["differences"] == {}
    lines = [json.loads(line) for line in (tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()]
    assert any(line.get("grad_norm", 0) > 0 for line in lines)  # there was something to learn
