"""S1: a run that is killed at random moments ends as one that nobody disturbed, and a soak finds where it does not."""

import json
import shutil
import sys
from functools import partial, reduce
from operator import getitem
from pathlib import Path

import jax
import numpy as np
import pytest
from commands import ROOT
from tiny_work import tiny_work

from flowgrpo.training import kill_series
from flowgrpo.training.checkpoints import Checkpoints
from flowgrpo.training.kill_series import Kill, Moment, Timeline, differences, draw_moments, run_soak, wrong_starts
from flowgrpo.training.session import run_session
from flowgrpo.types import BadInput

LINES = ["warm start", "warm start", "validation", "train", "train", "validation", "train", "train", "validation"]
TIMELINE = Timeline(
    [float(second) for second in range(1, 11)], ["start", *(kill_series.NAMES[phase] for phase in LINES[1:]), "test"]
)

# Where the signals come ---------------------------------------------------------------------------------


def test_moments_are_spread_over_all_that_a_run_does_in_its_order():
    moments = draw_moments(TIMELINE, 40, seed=0)
    assert moments == sorted(moments) == draw_moments(TIMELINE, 40, seed=0) != draw_moments(TIMELINE, 40, seed=1)
    assert {moment.kind for moment in moments} == set(kill_series.KINDS)
    for moment in moments:
        assert 0 <= moment.fraction < 1
        at = TIMELINE.kinds[moment.lines]
        assert moment.kind == at or (moment.kind == "write" and TIMELINE.kinds[moment.lines - 1] == "validation")
    updates = {moment.lines for moment in moments if moment.kind == "update"}
    assert updates == {3, 4, 6, 7}


def test_a_gap_is_the_time_to_the_next_line_or_end():
    timeline = Timeline([2.0, 2.5, 4.0], ["start", "update", "test"])
    assert [timeline.gap(lines) for lines in (0, 1, 2)] == [2.0, 0.5, 1.5]


def test_a_run_that_resumed_from_an_older_checkpoint_is_detected():
    moment = Moment(3, 0.5, "update")
    good = [Kill(moment, True, None, None, 0, False), Kill(moment, True, 4, 4, 6, True)]
    assert wrong_starts(good) == []
    assert wrong_starts([*good, Kill(moment, True, 0, 6, 6, False)]) == [
        "a run resumed from update 0, and the newest checkpoint was of 6"
    ]


# What differs -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run with a trajectory."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    with jax.debug_nans(False):  # while NaN is looked for, JAX donates nothing
        run_session(tiny_work(), folder, every=2)
    (folder / "trajectories").mkdir()
    (folder / "trajectories" / "000001.jsonl").write_text(json.dumps({"log": ["4"], "seconds": 0.5}) + "\n")
    return folder


def swap(name: str, words: str, others: str, folder: Path) -> None:
    """Change what stands somewhere in a file."""
    text = (folder / name).read_text()
    assert words in text
    (folder / name).write_text(text.replace(words, others, 1))


def flip(name: str, folder: Path) -> None:
    """Change one bit of an array of the last checkpoint."""
    checkpoints = Checkpoints(folder, keep=9)
    last = checkpoints.latest()
    assert last is not None
    tree, note = checkpoints.restore(last, ...), checkpoints.metadata(last)
    *above, key = name.split("/")
    place = reduce(getitem, above, tree)
    array = np.array(place[key])
    array.view(np.uint8).reshape(-1)[0] ^= 1
    place[key] = array
    checkpoints.save(last, tree, note)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (partial(swap, "trajectories/000001.jsonl", '"seconds": 0.5', '"seconds": 0.7'), {}),
        (partial(swap, "result.json", '"minutes": ', '"minutes": 9'), {}),
        (partial(swap, "result.json", '"resumed_at": []', '"resumed_at": [2]'), {}),
        (partial(swap, "metrics.jsonl", '"update": 2', '"update": 3'), {"metrics": "metrics.jsonl:2"}),
        (partial(swap, "result.json", '"best_update": ', '"best_update": 7'), {"result": "best_update"}),
        (partial(swap, "trajectories/000001.jsonl", "4", "5"), {"trajectories": "000001.jsonl:1"}),
        (partial(flip, "run/learner/params/w"), {"checkpoint": "run/learner/params/w"}),
        (partial(flip, "start/b"), {"checkpoint": "start/b"}),
    ],
)
def test_every_difference_is_found_and_named_and_clocks_make_none(whole, tmp_path, change, found):
    shutil.copytree(whole, tmp_path / "other")
    change(tmp_path / "other")
    assert differences(whole, tmp_path / "other") == found


# Processes ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_S1_a_killed_tiny_run_equals_an_undisturbed_one(monkeypatch, tmp_path):
    """In an update and while a checkpoint is written; `python -m experiments.soak` kills whole experiments."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT}/tests")
    command = [sys.executable, str(ROOT / "tests" / "tiny_run.py")]
    found = run_soak(command, tmp_path, kills=2, seed=0, name="KILL")
    assert (found["kills"], found["differences"], found["wrong_starts"]) == (2, {}, [])
    assert found["resumed_at"]
    assert all(update > 0 for update in found["resumed_from"][found["resumed_from"].count(0) :])


def test_differing_and_failing_runs_are_one_sentence(monkeypatch, tmp_path):
    failing = [sys.executable, "-c", "import sys; print('no such flag', file=sys.stderr); sys.exit(2)"]
    with pytest.raises(BadInput, match=r"ended with status 2 .*no such flag"):
        run_soak(failing, tmp_path / "failing", kills=1, seed=0, name="KILL")
    monkeypatch.setattr(kill_series, "undisturbed", lambda _command, folder: folder.mkdir() or TIMELINE)
    monkeypatch.setattr(kill_series, "differences", lambda *_: {"metrics": "metrics.jsonl:2"})
    with pytest.raises(BadInput, match=r"two undisturbed runs differ in .*metrics"):
        run_soak([], tmp_path, kills=1, seed=0, name="KILL")
    with pytest.raises(BadInput, match="holds an earlier soak"):
        run_soak([], tmp_path, kills=1, seed=0, name="KILL")
