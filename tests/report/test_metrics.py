"""Metrics in files: plain JSON, and byte for byte the same after any interruption (S1)."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowgrpo.report.metrics import METRICS, TIMINGS, MetricsWriter, plain_json, read_metrics
from flowgrpo.types import BadInput


def line(update: int) -> dict:
    return {"phase": "train", "update": update, "success": np.float32(update) / 7, "tools": {"add": 1 / (update + 1)}}


def test_lines_are_plain_json(tmp_path):
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(line(3), {"seconds": 0.25})
        metrics.write({"phase": "train", "update": 4})
    assert (tmp_path / METRICS).read_text().splitlines() == [
        '{"phase": "train", "update": 3, "success": 0.42857143, "tools": {"add": 0.25}}',
        '{"phase": "train", "update": 4}',
    ]
    assert (tmp_path / TIMINGS).read_text() == '{"phase": "train", "update": 3, "seconds": 0.25}\n'


def test_old_names_of_metrics_are_read(tmp_path):
    (tmp_path / TIMINGS).write_text('{"phase": "train", "update": 1, "credit_seconds": 0.5}\n')
    assert list(read_metrics(tmp_path / TIMINGS)) == [{"phase": "train", "update": 1, "advantages_seconds": 0.5}]


@pytest.mark.usefixtures("nan_allowed")
def test_values_become_plain_json():
    """float32 in its shortest form, which gives the same float32 again; what is no number is null."""
    tenths = [np.float32(0.1), 0.1, np.float64(0.1), jnp.float32(0.1), jnp.bfloat16(0.1)]
    assert plain_json(tenths) == [0.1, 0.1, 0.1, 0.1, 0.100097656]  # what bfloat16 has of it
    others = {"a": np.arange(2), 3: (True, np.bool_(False), None, "x", np.int8(-1))}
    assert plain_json(others) == {"a": [0, 1], "3": [True, False, None, "x", -1]}
    assert plain_json([float("nan"), np.float32("inf"), jnp.array([1.0, jnp.nan])]) == [None, None, [1.0, None]]
    value = np.float32(1) / 3
    assert np.float32(plain_json(value)) == value


@given(st.integers(1, 8), st.integers(0, 8), st.integers(0, 60), st.integers(1, 3))
def test_S1_interrupted_file_equals_undisturbed_file(tmp_path_factory, updates, killed, torn, every):
    """Killed after any update and in the middle of any line, it goes on from the last checkpoint to the same bytes."""
    here, there = tmp_path_factory.mktemp("here"), tmp_path_factory.mktemp("there")
    with MetricsWriter(there) as metrics:
        for update in range(updates):
            metrics.write(line(update))
    position, first = None, 0
    with MetricsWriter(here) as metrics:
        for update in range(min(killed, updates)):
            metrics.write(line(update), {"seconds": 1.0})
            if update % every == 0:
                position, first = metrics.position, update + 1
    with (here / METRICS).open("ab") as file:
        file.write(json.dumps(line(killed), default=float).encode()[:torn])
    with MetricsWriter(here, position) as metrics:
        for update in range(first, updates):
            metrics.write(line(update), {"seconds": 2.0})
    assert (here / METRICS).read_bytes() == (there / METRICS).read_bytes()
    assert len(list(read_metrics(here / TIMINGS))) == updates


def test_lines_are_written_unbuffered(tmp_path):
    with MetricsWriter(tmp_path) as metrics:
        metrics.write({"update": 0})
        assert list(read_metrics(tmp_path / METRICS)) == [{"update": 0}]


def test_files_that_cannot_be_resumed_are_refused_uncut(tmp_path, monkeypatch):
    path = tmp_path / METRICS
    with MetricsWriter(tmp_path) as metrics:
        metrics.write({"update": 0}, {"seconds": 1.5})
        first = metrics.position
        metrics.write({"update": 1}, {"seconds": 2.5})
        last = metrics.position
    with path.open("a") as file:
        file.write('{"upd')
    whole = {name: (tmp_path / name).read_bytes() for name in (METRICS, TIMINGS)}
    for position, name, old, new, words in (  # a digit that changed, a line that is gone, another that came first
        (last, METRICS, b"0", b"7", "metrics.jsonl has other first 28 bytes than at the checkpoint: restore it, or"),
        (first, TIMINGS, b"1.5", b"1.4", "timings.jsonl has other first .* bytes than at the checkpoint"),
        (
            last,
            METRICS,
            b'{"update": 1}\n{"upd',
            b"",
            "has 14 bytes, and had 28 at the checkpoint: restore it, or begin",
        ),
        (first, METRICS, b"{", b"{}\n{", "has other first 14 bytes than"),
    ):
        changed = whole[name].replace(old, new)
        (tmp_path / name).write_bytes(changed)
        with pytest.raises(BadInput, match=words):
            MetricsWriter(tmp_path, position)
        assert (tmp_path / name).read_bytes() == changed
        (tmp_path / name).write_bytes(whole[name])
    with pytest.raises(BadInput, match="has no checksums of its metrics, as older ones: begin a new run"):
        MetricsWriter(tmp_path, {METRICS: 14, TIMINGS: 0})  # type: ignore[dict-item]
    with pytest.raises(BadInput, match=r"can't be written \(No such file or directory\): choose another folder"):
        MetricsWriter(tmp_path / "nowhere")
    assert list(read_metrics(path)) == [{"update": 0}, {"update": 1}]  # without the torn line
    path.write_text('{"update": 0}\nhello\n')
    for bad, words in ((path, "metrics.jsonl:2 is not a JSON object: remove"), (tmp_path / "no", "can't be read")):
        with pytest.raises(BadInput, match=words):
            list(read_metrics(bad))
    with MetricsWriter(tmp_path) as metrics, Path("/dev/full").open("wb", buffering=0) as full:
        monkeypatch.setitem(metrics._files, METRICS, full)
        with pytest.raises(BadInput, match=r"/dev/full could not be written \(No space left on device\)"):
            metrics.write({"update": 0})
        monkeypatch.undo()
