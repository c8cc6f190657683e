"""Sinks: the lines of metrics under flat names, nothing twice where a run goes on, and no failure that stops it."""

import json
import sys
from types import SimpleNamespace

import pytest
from event_files import fields, records

from flowgrpo.report.metrics import (
    ADVANTAGE,
    RATIO,
    MetricsWriter,
    advantage_edges,
    ratio_edges,
    ratio_place,
    read_metrics,
)
from flowgrpo.report.sinks import check_sinks, histograms, open_sinks, scalars
from flowgrpo.types import BadInput

LINE = {"phase": "train", "update": 1, "success": 0.5, "kl": None, "tools": {"add": 0.25, "search": 0.75}}
LINE |= {"kl_by_turn": [0.0, 0.125], "by": "words", ADVANTAGE: [0] * 15 + [3, 0, 5] + [0] * 15}


def write(folder, updates, position=None, sinks=("tensorboard",), log=print):
    """A run that writes these updates; its positions after each."""
    places = {}
    with MetricsWriter(folder, position, sinks=open_sinks(sinks, config={"seed": 0}, log=log)) as metrics:
        if position is None:
            metrics.write({"phase": "warm start", "update": 50, "loss": 2.0})
        for update in updates:
            metrics.write({**LINE, "update": update}, {"seconds": 1.5})
            places[update] = metrics.position
    return places


def write_twice(folder, *sinks):
    """A run that goes on after update 3, although it has come to 5; what was messages."""
    messages = []
    places = write(folder, range(1, 6), sinks=sinks, log=messages.append)
    write(folder, range(4, 7), places[3], sinks=sinks, log=messages.append)
    return messages


def test_names_are_flat_and_histograms_have_their_edges():
    tools = {"tools/add": 0.25, "tools/search": 0.75}
    assert scalars(LINE) == {"success": 0.5, **tools, "kl_by_turn/0": 0.0, "kl_by_turn/1": 0.125}
    assert histograms(LINE) == {ADVANTAGE: ([-0.375, -0.125, 0.125, 0.375], [3, 0, 5])}
    assert histograms({RATIO: [0] * 32}) == {}


def test_bins_are_even_around_the_middle():
    ratio, advantage = ratio_edges(), advantage_edges()
    assert (len(ratio), len(advantage)) == (33, 34)
    assert ratio[16] == 1.0
    assert [a * b for a, b in zip(ratio, reversed(ratio), strict=True)] == pytest.approx([1.0] * 33)
    assert [ratio_place(edge) for edge in ratio] == pytest.approx(list(range(-16, 17)), abs=1e-6)
    assert advantage[16] == -advantage[17] == -0.125


def steps(folder):
    """The steps of the events in each file of a phase, and of a purge as a negative number."""
    values = []
    for path in sorted(folder.iterdir()):
        events = [dict(fields(record)) for record in records(path.read_bytes())]
        values.append([-event[2] if 7 in event else event[2] for event in events[1:]])
    return values


def test_tensorboard_has_a_folder_per_phase_without_duplicates(tmp_path):
    write_twice(tmp_path, "tensorboard")
    assert steps(tmp_path / "tensorboard" / "train") == [[1, 2, 3, 4, 5], [-4, 4, 5, 6]]
    assert steps(tmp_path / "tensorboard" / "warm_start") == [[50], [-51]]
    write(tmp_path, [1])  # begun again without a checkpoint: all of it is purged
    assert steps(tmp_path / "tensorboard" / "train")[2:] == [[0, 1]]
    event = dict(fields(records(sorted((tmp_path / "tensorboard" / "train").iterdir())[0].read_bytes())[1]))
    tags = [dict(fields(value))[1].decode() for _, value in fields(event[5])]
    assert tags == [*scalars(LINE), "timings/seconds", ADVANTAGE]


class Fake:
    """In the place of wandb and trackio: notes what it is asked for, and may fail."""

    __spec__ = SimpleNamespace(origin="fake")
    Settings, Histogram = dict, staticmethod(lambda np_histogram: np_histogram)

    def __init__(self):
        self.failing, self.calls = "", []

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.note(name, args, kwargs)

    def note(self, name, args, kwargs):
        if name == self.failing:
            raise ConnectionError(f"no {name}\ntoday")
        self.calls.append((name, args, kwargs))
        return self

    def of(self, name):
        return [(*args, kwargs) for one, args, kwargs in self.calls if one == name]


@pytest.fixture
def fakes(monkeypatch):
    """Both packages, as fakes."""
    fakes = SimpleNamespace(wandb=Fake(), trackio=Fake())
    for name, fake in vars(fakes).items():
        monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    monkeypatch.setenv("TRACKIO_PROJECT", "mine")
    return fakes


def test_remote_run_gets_every_update_once(tmp_path, fakes):
    assert write_twice(tmp_path, "wandb", "trackio") == []
    (one,), (two,) = fakes.wandb.of("init")
    assert one == two
    assert (
        one.items() >= {"project": "flowgrpo", "resume": "allow", "dir": str(tmp_path), "config": {"seed": 0}}.items()
    )
    first, second, *rest = (figures for figures, *_ in fakes.wandb.of("log"))
    assert first == {"warm_start/update": 50, "warm_start/loss": 2.0}
    assert (second["train/tools/add"], second["train/timings/seconds"]) == (0.25, 1.5)
    assert second[f"train/{ADVANTAGE}"] == ([3, 0, 5], [-0.375, -0.125, 0.125, 0.375])
    assert [figures["train/update"] for figures in (second, *rest)] == [1, 2, 3, 4, 5, 6]
    assert ("train/*", {"step_metric": "train/update"}) in fakes.wandb.of("define_metric")
    assert [named["step"] for *_, named in fakes.trackio.of("log")][1:] == [1, 2, 3, 4, 5, 6]
    (one,), (two,) = fakes.trackio.of("init")
    assert (one["name"], one["project"], one["resume"]) == (two["name"], "mine", "allow")
    assert len(fakes.wandb.of("finish")) == len(fakes.trackio.of("finish")) == 2
    assert json.loads((tmp_path / "loggers.json").read_text())["wandb"]["last"] == {"warm_start": 50, "train": 6}


@pytest.mark.parametrize("failing", ["init", "define_metric", "log", "finish"])
def test_failing_sink_is_disabled_with_one_message(tmp_path, fakes, failing):
    fakes.wandb.failing = failing
    messages = []
    for name, sinks in (("plain", ()), ("run", ("wandb", "tensorboard"))):
        (tmp_path / name).mkdir()
        write(tmp_path / name, range(1, 4), sinks=sinks, log=messages.append)
    (words,) = messages
    assert words.startswith(f"warning: wandb failed (no {failing} today); the run continues without it")
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == (tmp_path / "plain/metrics.jsonl").read_bytes()
    assert steps(tmp_path / "run" / "tensorboard" / "train") == [[1, 2, 3]]


def test_names_are_checked_before_a_run(monkeypatch, tmp_path):
    assert check_sinks(["tensorboard", "tensorboard"]) == ("tensorboard",)
    with pytest.raises(BadInput, match="--loggers=tensorbord is unknown; choose from tensorboard, wandb, trackio"):
        check_sinks(["tensorbord"])
    (tmp_path / "trackio").mkdir()  # a folder of that name is no package
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(BadInput, match=r"--loggers=trackio needs .*pip install .*trackio"):
        check_sinks(["trackio"])


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore")
def test_wandb_accepts_all_metrics_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert write_twice(tmp_path, "wandb") == []
    files = list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert len({path.name for path in files}) == 1  # one run, by its id
    data = b"".join(path.read_bytes() for path in files)
    assert data.count(b"train/tools/search") >= 6
    assert len(list(read_metrics(tmp_path / "metrics.jsonl"))) == 7
