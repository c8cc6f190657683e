"""The benchmark of whole iterations runs in every part, and what it compares does the same work."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.soak

ROOT = Path(__file__).parent.parent.parent
TINY = ["--width=16", "--layers=1", "--queries=2", "--samples=2", "--warm_steps=5", "--repeats=1"]


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    """The benchmark with these flags."""
    command = [sys.executable, "-m", "experiments.benchmarks.iteration", *flags]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def result(*flags: str) -> dict:
    """The last line that it prints, read as JSON."""
    done = run(*flags)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_iterations_and_the_cache():
    printed = result("--parts=prefill,iteration", *TINY)
    (iteration,), (prefill,) = printed["iteration"], printed["prefill"]
    assert (printed["benchmark"], iteration["trajectories"], prefill["trajectories"]) == ("iteration", 4, 4)
    assert iteration["tokens"] >= 4 * (1 + iteration["turns"])
    stages = [iteration[f"{name}_seconds"] for name in ("rollout", "credit_and_pack", "update")]
    assert min(*stages, iteration["tokens_per_second"], iteration["one_program_tokens_per_second"]) > 0
    # Both draw with the same keys, so that another turn would mean that they did not answer the same question.
    assert prefill["same_turns"] == 1
    assert prefill["over_rollout"] > 0


def test_seeds():
    (seeds,) = result("--parts=seeds", *TINY, "--seeds=2")["seeds"]
    assert (seeds["seeds"], seeds["updates"]) == (2, 3)
    # Adam takes steps of about the learning rate, 1e-3, whatever the gradient.
    assert 0 <= seeds["largest_difference"] < 1e-2


def test_scaling_has_a_row_for_each_size():
    printed = result("--parts=scaling", *TINY, "--groups=3", "--widths=32", "--turns=9")
    assert [(row["samples"], row["d"], row["turn_limit"]) for row in printed["scaling"]] == [
        (3, 16, 10),
        (2, 32, 10),
        (2, 16, 9),
    ]
    assert all(row["tokens_per_second"] > 0 for row in printed["scaling"])


@pytest.mark.oracle
@pytest.mark.skipif(find_spec("trl") is None, reason="needs the extra [oracle]")
def test_both_sides_answer_about_as_much_as_the_other():
    printed = result("--parts=trl", "--repeats=1")
    one, three = printed["trl"]
    assert (one["turns"], three["turns"]) == (1, 3)
    for row in (one, three):
        assert row["over_trl"] > 0
        assert 0.7 < row["ours_words"] / row["trl_words"] < 1.4


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--parts=whole", "--parts=whole has 'whole'; choose from iteration, scaling, prefill, seeds, trl"),
        ("--widths=64,x", "--widths=64,x must be a comma-separated list of positive integers"),
        ("--width=8", "width"),
    ],
)
def test_bad_flags_get_one_sentence_and_a_status(flag, words):
    done = run(flag)
    assert done.returncode == (2 if flag == "--width=8" else 1)
    assert done.stdout == ""
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
