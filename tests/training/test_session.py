"""A run in its folder: whatever ends it, and wherever, it goes on to the same bits, and says what is saved (S1)."""

import errno
import json
import shutil
import signal
from functools import partial
from itertools import chain, repeat
from pathlib import Path

import jax
import numpy as np
import pytest
from event_files import fields, records
from tiny_work import tiny_work

from flowgrpo.report import metrics as files
from flowgrpo.training import checkpoints, run_dir, signals
from flowgrpo.training.checkpoints import Checkpoints, params_sha256
from flowgrpo.training.session import Session, open_session, run_session
from flowgrpo.training.time_budget import OutOfTime, time_budget
from flowgrpo.types import BadInput

pytestmark = pytest.mark.usefixtures("nan_allowed")  # while NaN is looked for, JAX donates nothing
EVERY = 2


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """An undisturbed run."""
    path = tmp_path_factory.mktemp("runs") / "whole"
    with jax.debug_nans(False):
        run_session(tiny_work(), path, every=EVERY)
    return path


def final(path: Path) -> tuple:
    """All of a finished run that must be the same whenever the run is."""
    result = json.loads((path / "result.json").read_text())
    last = Checkpoints(path).latest()
    states = [Checkpoints(path).restore_part(last, place) for place in ("run", "start")]
    for name in ("minutes", "tokens_per_second", "resumed_at"):
        del result[name]
    return (path / "metrics.jsonl").read_bytes(), result, last, [params_sha256(state) for state in states]


def raise_at(stage: str, update: int, number: int = signal.SIGTERM):
    """Return what sends the signal the first time that the run is there."""
    times = []

    def at(here: str, now: int) -> None:
        if (here, now) == (stage, update) and not times:
            times.append(here)
            signal.raise_signal(number)

    return at


def test_run_writes_its_files_and_a_finished_run_is_unchanged(whole):
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [(line["phase"], line["update"]) for line in lines if line["phase"] != "warm start"] == [
        ("validation", 0),
        *(("train", 1), ("train", 2), ("validation", 2)),
        *(("train", 3), ("train", 4), ("validation", 4)),
        *(("train", 5), ("validation", 5)),
    ]
    before = final(whole)
    result = run_session(tiny_work(), whole, every=EVERY)
    assert result["resumed_at"] == []
    assert final(whole) == before


@pytest.mark.parametrize(
    ("number", "stage", "update", "saved"),
    [
        (signal.SIGTERM, "warm start", 0, None),
        (signal.SIGINT, "examine", 0, 0),
        (signal.SIGTERM, "rollout", 4, 3),
        (signal.SIGINT, "learned", 4, 4),  # the state that it began with is donated: this one is the last whole one
        (signal.SIGTERM, "test", 0, 5),
    ],
)
def test_S1_stopped_run_resumes_bit_for_bit(whole, tmp_path, capsys, number, stage, update, saved):
    with pytest.raises(KeyboardInterrupt) as caught:
        run_session(tiny_work(raise_at(stage, update, number)), tmp_path, every=EVERY)
    assert signals.signal_of(caught.value) == number
    words = f"saved at update {saved}; the same command resumes from there"
    assert (
        words if saved is not None else "a warm start is saved at its validations: the same command starts it again"
    ) in capsys.readouterr().err
    assert Checkpoints(tmp_path).latest() == saved
    result = run_session(tiny_work(), tmp_path, every=EVERY)
    assert result["resumed_at"] == ([saved] if saved is not None and saved < 5 else [])
    assert final(tmp_path) == final(whole)


def test_S1_time_budget_stops_between_updates_and_resumes_bit_for_bit(whole, tmp_path, capsys):
    """Each session looks at its clock so many times before it is late: in the warm start, and around each update."""
    ended = []
    for looks in (0, 1, 2, 2, 3, 3, 2, 1, 0):
        budget = time_budget("8h50m", started=0.0, clock=partial(next, chain(repeat(0.0, looks), repeat(32e3))))
        with pytest.raises(OutOfTime):
            run_session(tiny_work(), tmp_path, every=EVERY, budget=budget)
        ended.append(Checkpoints(tmp_path).latest())
        last_line = capsys.readouterr().err.splitlines()[-1]
        assert last_line.startswith("the time budget of 8h50m is over: ")
        assert last_line.endswith(
            "the same command resumes from there" if ended[-1] is not None else "the last of them"
        )
    assert ended == [None, 0, 1, 2, 3, 4, 5, 5, 5]
    run_session(tiny_work(), tmp_path, every=EVERY, budget=time_budget("1h"))
    assert final(tmp_path) == final(whole)


def test_S1_loggers_do_not_change_the_run(whole, tmp_path):
    stopped = tiny_work(raise_at("rollout", 4))
    with pytest.raises(KeyboardInterrupt):
        run_session(stopped, tmp_path, every=EVERY, loggers=["tensorboard"])
    run_session(tiny_work(), tmp_path, every=EVERY, loggers=["tensorboard"])
    assert final(tmp_path) == final(whole)
    for name in ("run.json", "warnings.jsonl"):
        assert (tmp_path / name).read_bytes() == (whole / name).read_bytes()
    assert not (whole / "tensorboard").exists()
    values = {}
    for path in sorted((tmp_path / "tensorboard").glob("*/*")):
        events = [dict(fields(record)) for record in records(path.read_bytes())][1:]
        values.setdefault(path.parent.name, []).append([-one[2] if 7 in one else one[2] for one in events])
    assert values["train"] == [[1, 2, 3], [-4, 4, 5]]
    assert values["validation"] == [[0, 2], [-3, 4, 5]]


def test_S1_run_stopped_in_every_update_equals_undisturbed_run(whole, tmp_path):
    """A validation that was due and not made is made by the run that goes on."""
    for stage, update in [("examine", 0), ("learned", 1), ("learned", 2), ("rollout", 4), ("learned", 4), ("test", 0)]:
        with pytest.raises(KeyboardInterrupt):
            run_session(tiny_work(raise_at(stage, update)), tmp_path, every=EVERY)
    assert run_session(tiny_work(), tmp_path, every=EVERY)["resumed_at"] == [0, 1, 2, 3, 4]
    assert final(tmp_path) == final(whole)


def test_signal_during_a_checkpoint_is_deferred(whole, tmp_path, monkeypatch):
    taken = checkpoints.to_leaves

    def take(tree, **settings):
        if "run" in tree and int(tree["run"].update) == 2:
            monkeypatch.undo()
            signal.raise_signal(signal.SIGTERM)
        return taken(tree, **settings)

    monkeypatch.setattr(checkpoints, "to_leaves", take)
    with pytest.raises(signals.Terminated):
        run_session(tiny_work(), tmp_path, every=EVERY)
    assert Checkpoints(tmp_path).steps() == [0, 2]
    assert Checkpoints(tmp_path).metadata(2)["validation"] > 0
    run_session(tiny_work(), tmp_path, every=EVERY)
    assert final(tmp_path) == final(whole)


def test_signal_with_deleted_state_leaves_the_last_checkpoint(whole, tmp_path, monkeypatch, capsys):
    save = Session.save

    def moved(session: Session, extra_state=None) -> None:
        if int(session.state.update) == 3:
            jax.tree.leaves(session.state.learner.optimizer)[0].delete()
        save(session, extra_state)

    monkeypatch.setattr(Session, "save", moved)
    with pytest.raises(signals.Terminated):
        run_session(tiny_work(raise_at("rollout", 4)), tmp_path, every=EVERY)
    assert "saved at update 2; the same command resumes from there" in capsys.readouterr().err
    monkeypatch.undo()
    run_session(tiny_work(), tmp_path, every=EVERY)
    assert final(tmp_path) == final(whole)


def fill(monkeypatch, step: int) -> None:
    """From this checkpoint on the disk is full."""
    write = Path.write_text

    def full(path: Path, *rest, **more):
        if path.name == checkpoints.CONTENT and int(path.parent.name.split("-")[-1]) >= step:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, *rest, **more)

    monkeypatch.setattr(checkpoints.Path, "write_text", full)


@pytest.mark.parametrize(("step", "last", "at"), [(4, 2, raise_at("learned", 4)), (4, 2, None), (5, 4, None)])
def test_S1_full_disk_is_one_sentence_and_the_run_resumes(whole, tmp_path, monkeypatch, step, last, at):
    """In a checkpoint that was due, and in that of a signal."""
    fill(monkeypatch, step)
    message = rf"0000000{step} could not be written \(No space left on device\): the one of step {last} is whole"
    with pytest.raises(BadInput, match=message):
        run_session(tiny_work(at) if at else tiny_work(), tmp_path, every=EVERY)
    assert Checkpoints(tmp_path).latest() == last
    monkeypatch.undo()
    assert run_session(tiny_work(), tmp_path, every=EVERY)["resumed_at"] == [last]
    assert final(tmp_path) == final(whole)


def test_full_disk_of_other_files_is_one_sentence(whole, tmp_path):
    def full(stage: str, update: int) -> None:
        if (stage, update) == ("rollout", 4):
            raise OSError(errno.ENOSPC, "No space left on device", "trajectories/000004.jsonl")

    message = r"000004.jsonl could not be written \(No space.*last good checkpoint is that of update 2"
    with pytest.raises(BadInput, match=message):
        run_session(tiny_work(full), tmp_path, every=EVERY)
    run_session(tiny_work(), tmp_path, every=EVERY)
    assert final(tmp_path) == final(whole)


def test_checkpoint_stores_everything_needed_to_resume(whole):
    """Parameters, optimizer, keys, the cursor, counters, the place in the files."""
    checkpoints = Checkpoints(whole)
    names = {record["name"] for record in checkpoints._read_content(5)["leaves"]}
    run = {"params/w", "params/b", "version", "skipped"}
    assert {f"run/learner/{name}" for name in run} | {"run/key", "run/update", "run/reference/w"} <= names
    assert any(name.startswith("run/learner/optimizer/") for name in names)
    places = {f"position/{name}/{field}" for name in (files.METRICS, files.TIMINGS) for field in ("bytes", "crc32")}
    assert {"start/w", "resumed_at", *places} <= names
    size = (whole / files.METRICS).stat().st_size
    assert checkpoints.restore_part(5, "position")[files.METRICS]["bytes"] == size


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"seed": 1}, "seed: there 0, here 1"), ({"mesh": "data=4"}, 'mesh: there "data=8", here "data=4"')],
)
def test_another_run_is_refused_when_resumed_or_evaluated(whole, tmp_path, monkeypatch, changed, message):
    with pytest.raises(BadInput, match=f"holds another run: {message}"):
        run_session(tiny_work(**changed), whole, every=EVERY)
    (tmp_path / "checkpoints").symlink_to(whole / "checkpoints")  # with no run.json beside them
    for work in (partial(run_session, every=EVERY), open_session):
        with pytest.raises(BadInput, match=f"checkpoints holds another run: {message}"):
            work(tiny_work(**changed), tmp_path)
    here = run_dir.machine()
    monkeypatch.setattr(run_dir, "machine", lambda: here | {"devices": 4, "threads": 99})
    with pytest.raises(BadInput, match=r"devices: there 8, here 4; threads: there .*, here 99"):
        run_session(tiny_work(), whole, every=EVERY)
    assert int(open_session(tiny_work(), whole).state.update) == 5  # it may be evaluated on another machine


def test_S1_metrics_without_matching_checkpoint_are_not_cut(whole, tmp_path):
    """A run that was killed before its first checkpoint has none of an update, and begins again."""
    shutil.copytree(whole, tmp_path / "run")
    path = tmp_path / "run" / files.METRICS
    text = path.read_text()
    path.write_text(text.replace('"update": 3', '"update": 8'))
    with pytest.raises(
        BadInput, match=r"has other first .* bytes than at the checkpoint: restore it, or begin a new run"
    ):
        run_session(tiny_work(), tmp_path / "run", every=EVERY)
    path.write_text(text)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    message = "has 5 updates, and there is no checkpoint of any: restore the folder checkpoints beside it, or begin"
    with pytest.raises(BadInput, match=message):
        run_session(tiny_work(), tmp_path / "run", every=EVERY)
    assert path.read_text() == text
    path.write_text(text[: text.index('{"phase": "train"')])
    run_session(tiny_work(), tmp_path / "run", every=EVERY)
    assert final(tmp_path / "run") == final(whole)


def test_damage_is_reported_before_resuming(whole, tmp_path):
    """A note of the best checkpoint, and positions in other files than those of metrics."""
    shutil.copytree(whole, tmp_path / "run")
    work = tiny_work(lambda *_: pytest.fail("it went on"), updates=7)
    best = Checkpoints(whole, best="validation").best()
    content = tmp_path / "run" / "checkpoints" / f"{best:08d}" / checkpoints.CONTENT
    assert best != 5
    content.write_text(content.read_text().replace("validation", "valuation"))
    with pytest.raises(BadInput, match=rf"the best checkpoint is unknown: .*{best:08d} is damaged"):
        run_session(work, tmp_path / "run", every=EVERY)
    with pytest.raises(BadInput, match="has no checksums of its metrics"):
        files.MetricsWriter(tmp_path, {files.METRICS: {"bytes": 0}, "../run.json": files.START})


def test_run_can_be_extended(whole, tmp_path):
    run_session(tiny_work(updates=2), tmp_path, every=EVERY)
    run_session(tiny_work(updates=5), tmp_path, every=EVERY)
    assert final(tmp_path) == final(whole)


def test_start_params_are_copied_before_donation(tmp_path):
    session, params = Session(tiny_work(), tmp_path), {"w": jax.numpy.ones((4, 3)), "b": jax.numpy.zeros(3)}
    session.start_from(params, {})
    step = session.trainable.make_step()
    step(session.state)
    assert not session._is_intact()
    assert np.asarray(params["w"]).sum() == np.asarray(session.start_params["w"]).sum() == 12
