"""Benchmarks print a table and one JSON line; their figures are not judged here."""

import json
import os
import signal
import sys
from dataclasses import replace

import numpy as np
import pytest
from commands import ROOT
from tiny_planner import EXAMPLE, SIZES, planner_folder, write_tasks

from experiments.benchmarks import attention
from experiments.benchmarks.ceilings import shape_called
from experiments.benchmarks.measuring import run_watched
from experiments.benchmarks.shapes import LEARNERS
from flowgrpo.batching.layouts import full_batch
from flowgrpo.planning.cost_model import count_parameters
from flowgrpo.types import check_axes
from tests.experiments.conftest import check_refused, last_line


def test_shapes_have_the_sizes_that_are_reported():
    sizes = {name: round(count_parameters(shape_called(name)) / 1e6, 1) for name in LEARNERS}
    assert sizes == {"prototype": 0.3, "small": 4.1, "medium": 20.7, "large": 75.1}


def test_full_rows_are_whole_segments_whose_first_token_was_given():
    batch = full_batch(shape_called("small").v, 4, 10, segments=3)
    check_axes(batch)
    np.testing.assert_array_equal(batch.segments[0], [1, 1, 1, 2, 2, 2, 3, 3, 3, 3])
    np.testing.assert_array_equal(batch.positions[0], [0, 1, 2, 0, 1, 2, 0, 1, 2, 3])
    np.testing.assert_array_equal(batch.chosen, batch.positions > 0)
    assert batch.weight.sum() == pytest.approx(1)


def test_a_watched_command_ends_with_its_watcher(tmp_path, capfd):
    said = "import sys; held = b'x' * 2**28; print('not shown'); print('step 1', file=sys.stderr); sys.exit(3)"
    ended = run_watched([sys.executable, "-c", said])
    assert (ended.status, ended.errors) == (3, "step 1\n")
    assert ended.gib > 0.25
    assert capfd.readouterr() == ("", "step 1\n")

    name = tmp_path / "pid"
    # it interrupts its parent once it has written its process id
    waiting = (
        f"import os, signal, time; open({str(name)!r}, 'w').write(str(os.getpid())); "
        "os.kill(os.getppid(), signal.SIGALRM); time.sleep(600)"
    )
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_watched([sys.executable, "-c", waiting])
    finally:
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(ProcessLookupError):
        os.kill(int(name.read_text()), 0)


@pytest.mark.slow
def test_packing_and_answers_run_end_to_end(command):
    found = last_line(command("benchmarks.packing", "--sizes=200,400", "--repeats=1", "--ranks=2"))
    assert [row["trajectories"] for row in found["rows"]] == [200, 400]
    assert all(0.9 < row["fill"] <= 1.0 and row["seconds"] > 0 for row in found["rows"])
    found = last_line(command("benchmarks.answers", "--pairs=tests/rewards/fresh_pairs.txt"))
    lines = (ROOT / "tests/rewards/fresh_pairs.txt").read_text().splitlines()
    pairs = sum(line.startswith(("right", "wrong")) for line in lines)
    assert (found["benchmark"], found["pairs"]) == ("answers", pairs)
    assert found["agreement"]["ours"] > max(0.9, found["agreement"]["math-verify"], found["agreement"]["plain"])


@pytest.mark.slow
def test_an_attention_is_timed_and_compared_with_float32():
    def off(q, k, v, mask, config):
        return 1.5 * attention.attend(q, k, v, mask, config)

    config = replace(attention.SHAPE, h=2, k=1, e=8)
    plain, other = attention.attention_lines(config, off, rows=2, tokens=20, segments=3, repeats=1)
    assert (plain["way"], other["way"]) == ("plain", "off")
    assert 0 < plain["out"] < 0.02 < 0.4 < other["out"] < 0.6
    assert max(plain[name] for name in ("d_q", "d_k", "d_v")) < 0.05
    assert min(plain["forward_ms"], plain["both_ms"]) > 0


@pytest.mark.slow
def test_a_pretrained_model_is_measured_and_finished_parts_are_not_rerun(command, tmp_path):
    """A tiny model that imitates experts, in two runs: without updates, and of one seed."""
    sizes = SIZES | {
        "warm_steps": 120,
        "warm_rate": 0.02,
        "warm_rows": 4,
        "demonstrations": 60,
        "updates": 1,
        "lora_rank": 0,
    }
    sizes |= {"examples": write_tasks(tmp_path / "examples.jsonl", EXAMPLE)}
    more = " ".join(f"--{name}={value}" for name, value in sizes.items())
    flags = [f"--model={planner_folder()}", "--seeds=1", "--nocontrol", "--num_tasks=3", "--samples=2"]
    flags += [f"--folder={tmp_path}", f"--agentflow={more} --decay_updates=1"]
    found = last_line(command("benchmarks.agents", *flags))
    assert [(row["run"], row["planner"]) for row in found["rows"]] == [
        ("pretrained, examples", "start"),
        ("seed-1", "start"),
        ("seed-1", "best"),
    ]
    assert all(row["low"] <= row["pass@1"] <= min(row["pass@2"], row["high"]) for row in found["rows"])
    assert all(row["gib"] > 0 for row in found["rows"])
    named = f"{planner_folder().name}-word_problems"
    assert (tmp_path / f"{named}-trajectories.md").read_text().count("Before:") == 3
    assert "seed 1" in (tmp_path / f"{named}-curves.svg").read_text()
    measured = tmp_path / f"{named}-seed-1" / "measured.json"
    assert json.loads(measured.read_text())["minutes"] > 0
    written = measured.stat().st_mtime_ns
    assert last_line(command("benchmarks.agents", *flags))["rows"] == found["rows"]
    assert measured.stat().st_mtime_ns == written
    other = command("benchmarks.agents", *flags[:-1], f"{flags[-1]} --turns=3", check=False)
    check_refused(other, "was made with command python -m flowgrpo agentflow")


@pytest.mark.oracle
def test_pytorch_does_the_same_work(command):
    pytest.importorskip("torch", reason="needs the extra [oracle]")
    flags = ["--parts=torch", "--models=small", "--rows=8", "--lengths=16", "--repeats=1"]
    (row,) = last_line(command("benchmarks.update", *flags))["torch"]
    assert min(row["ours_share"], row["torch_share"], row["torch_over_ours"]) > 0
