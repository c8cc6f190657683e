"""The benchmark of the update runs in every part; what was predicted of memory is what a process holds."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from experiments.benchmarks.rows import SHAPES, full_batch, shape_called
from flowgrpo.learner.floor import count_parameters
from flowgrpo.types import check_axes

ROOT = Path(__file__).parent.parent.parent


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A benchmark with these flags."""
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def result(*arguments: str) -> dict:
    """The last line that it prints, read as JSON."""
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_shapes_have_the_sizes_that_are_reported():
    sizes = {name: round(count_parameters(shape_called(name)) / 1e6, 1) for name in SHAPES}
    assert sizes == {"prototype": 0.3, "small": 4.1, "medium": 20.7, "large": 75.1}


def test_full_rows_are_whole_segments_whose_first_token_was_given():
    batch = full_batch(shape_called("small"), 4, 10, segments=3)
    check_axes(batch)
    np.testing.assert_array_equal(batch.segments[0], [1, 1, 1, 2, 2, 2, 3, 3, 3, 3])
    np.testing.assert_array_equal(batch.positions[0], [0, 1, 2, 0, 1, 2, 0, 1, 2, 3])
    np.testing.assert_array_equal(batch.chosen, batch.positions > 0)
    assert batch.weight.sum() == pytest.approx(1)


@pytest.mark.soak
def test_speed_and_growth_have_a_row_for_each_size():
    flags = ["--parts=speed,growth", "--models=prototype", "--growth_model=prototype", "--forms=plain,kl", "--rows=8"]
    printed = result("experiments.benchmarks.update", *flags, "--lengths=16", "--turns=2", "--turn_tokens=8")
    (speed,), growth = printed["speed"], printed["growth"]
    assert (speed["model"], speed["rows"], speed["length"]) == ("prototype", 8, 16)
    assert min(speed[name] for name in ("gflops", "plain_s", "kl_s", "plain_share", "kl_share")) > 0
    assert [(row["rows"], row["length"]) for row in growth] == [
        *[(4, 16), (8, 16), (16, 16)],
        *[(8, 8), (8, 16), (8, 32)],
        *[(8, 16), (8, 24)],
    ]
    assert all(row["tokens_per_second"] > 0 for row in growth)


@pytest.mark.soak
def test_an_update_holds_as_much_memory_as_was_predicted():
    printed = result("experiments.benchmarks.resident", "--model=small", "--rows=16", "--length=96")
    # Tables of programs and the allocator's own pages come on top, some tens of MiB.
    assert 0.9 * printed["expected_mib"] < printed["held_mib"] < 1.1 * printed["expected_mib"] + 40
    assert printed["expected_mib"] > printed["floor_mib"]


@pytest.mark.oracle
@pytest.mark.skipif(find_spec("torch") is None, reason="needs the extra [oracle]")
def test_pytorch_does_the_same_work():
    flags = ["--parts=torch", "--models=small", "--rows=8", "--lengths=16", "--repeats=1"]
    (row,) = result("experiments.benchmarks.update", *flags)["torch"]
    assert min(row["ours_share"], row["torch_share"], row["torch_over_ours"]) > 0


@pytest.mark.soak
@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--parts=whole", "--parts=whole has 'whole'; choose from speed, memory, growth, torch"),
        ("--models=huge", "--models=huge has 'huge'; choose from prototype, small, medium, large"),
        ("--lengths=96,x", "--lengths=96,x must be a comma-separated list of positive integers"),
    ],
)
def test_bad_flags_get_one_sentence_and_a_status(flag, words):
    done = run("experiments.benchmarks.update", flag)
    assert done.returncode == 1
    assert done.stdout == ""
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
