"""Benchmarks run, and print a table and one JSON line; their figures are not judged here."""

import json
from pathlib import Path

import pytest
from commands import run_module

slow, soak = pytest.mark.slow, pytest.mark.soak

ROOT = Path(__file__).parent.parent.parent


@slow
def test_packing_benchmark_runs():
    result = run("experiments.benchmarks.packing", "--sizes=200,400", "--repeats=1", "--ranks=2")
    assert [row["trajectories"] for row in result["rows"]] == [200, 400]
    assert all(0.9 < row["fill"] <= 1.0 and row["seconds"] > 0 for row in result["rows"])


def run(*arguments: str) -> dict:
    """The last line that a benchmark prints, read as JSON."""
    done = run_module(*arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@soak
def test_decode_benchmark_runs():
    flags = ["--rows=2,3", "--tokens=4,3", "--prompt=5", "--requests=6", "--slots=2", "--mean=3", "--repeats=1"]
    result = run("experiments.benchmarks.decode", *flags)
    assert (result["benchmark"], result["model"], result["params"]) == ("decode", "small", 4_067_584)
    assert [(row["rows"], row["tokens"]) for row in result["blocks"]] == [(2, 4), (3, 3)]
    assert all(row["tokens_per_second"] > 0 and 0 < row["of_bandwidth"] < 2 for row in result["blocks"])
    engine = result["engine"]
    assert (engine["requests"], engine["slots"]) == (6, 2)
    assert min(engine[name] for name in ("tokens_per_second", "gapless_tokens_per_second", "over_gapless")) > 0
    # Nothing is compiled once the engine is warm: this one is a count, and no matter of speed.
    assert engine["compiled_in_warm_up"] > engine["compiled_after"] == 0


@soak
def test_logprobs_benchmark_runs():
    flags = ["--models=small", "--rows=2", "--length=8", "--repeats=1", "--vocabulary=20000", "--memory_length=64"]
    result = run("experiments.benchmarks.logprobs", *flags)
    assert result["benchmark"] == "logprobs"
    assert result["gflops"] > 0
    assert [row["work"] for row in result["rows"]] == ["forward", "forward+backward"]
    assert all(row["tokens_per_second"] > 0 and row["of_matrix_product"] > 0 for row in result["rows"])
    memory = result["memory"]
    assert (memory["vocabulary"], memory["rows"], memory["length"]) == (20_000, 8, 64)
    assert 0 < memory["temporary_mib"] < memory["plain_mib"]


@soak
def test_loading_benchmark_runs():
    flags = ["--layers=2", "--width=256", "--vocabulary=512", "--shard_mib=1"]
    result = run("experiments.benchmarks.loading", *flags, "--stored=bfloat16", "--dtypes=float32", "--devices=8")
    assert result["benchmark"] == "loading"
    (row,) = result["rows"]
    assert (row["stored"], row["dtype"], row["devices"], row["shards"]) == ("bfloat16", "float32", 8, 4)
    assert row["params_mib"] == 5.9
    assert min(row["layer_mib"], row["largest_shard_mib"], row["seconds"]) > 0
    # The table is rounded to a tenth of a MiB, and all of it may be rounding in a model as small as this.
    expected = row["beyond_mib"] / (row["largest_shard_mib"] + row["layer_mib"])
    assert row["over_allowed"] == pytest.approx(expected, rel=0.1, abs=0.1)


@soak
def test_exactness_benchmark_runs():
    """Bits at one width are a law and no figure (E3), so they are asserted here too."""
    flags = ["--models=tiny", "--tokens=64", "--half_tokens=64", "--requests=3", "--widths=2", "--widths=3"]
    result = run("experiments.benchmarks.exactness", *flags)
    assert [(row["dtype"], row["support"]) for row in result["ratio"]] == [
        (dtype, support) for dtype in ("float32", "bfloat16") for support in ("full", "top-k 20, top-p 0.9")
    ]
    assert all(row["tokens"] == 64 and 0 <= row["mean"] <= row["p999"] <= row["max"] < 0.5 for row in result["ratio"])
    assert [(row["width"], row["requests"], row["tokens"]) for row in result["widths"]] == [(3, 3, 192), (2, 3, 192)]
    assert all(row["alone_equal"] and row["shuffled_equal"] and not row["not_near"] for row in result["widths"])
    assert len(result["near_ties"]) == sum(row["parted"] for row in result["widths"])


@soak
def test_cluster_benchmark_runs():
    """Both come to the same parameters by its own check; a cluster's first iteration ends with its second update."""
    sizes = ["--queries=2", "--samples=2", "--updates=3", "--warm_steps=20", "--demonstrations=64"]
    result = run("experiments.benchmarks.cluster", *sizes)
    assert [(row["process"], row["iterations"]) for row in result["rows"]] == [("single", 2), ("cluster", 1)]
    assert result["over_single"] > 0


@slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["decode", "--rows=4", "--tokens=2,2"], "--rows has 1 entries and --tokens 2: give one of each a block"),
        (["decode", "--rows=x,1"], "--rows=x,1 must be a comma-separated list of positive integers"),
        (["decode", "--model=/nowhere"], "/nowhere"),
        (["logprobs", "--models=/nowhere"], "/nowhere"),
        (["exactness", "--models=/nowhere"], "/nowhere"),
        (["packing", "--sizes=abc"], "--sizes=abc must be a comma-separated list of positive integers"),
        (["answers", "--pairs=none.txt"], "--pairs=none.txt is no file"),
        (["loading", "--width=300"], "--width=300 must be a multiple of 256"),
    ],
)
def test_bad_flags_get_one_sentence_and_a_status(arguments, words):
    done = run_module(f"experiments.benchmarks.{arguments[0]}", *arguments[1:])
    assert done.returncode == 1
    assert done.stdout == ""
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@slow
def test_answers_benchmark_runs():
    result = run("experiments.benchmarks.answers", "--pairs=tests/rewards/fresh_pairs.txt")
    assert (result["benchmark"], result["pairs"]) == ("answers", 106)
    assert result["agreement"]["ours"] > max(0.9, result["agreement"]["math-verify"], result["agreement"]["plain"])


@soak
def test_rewards_benchmark_runs():
    """Its own checks hold that right answers are right and what hangs is wrong."""
    result = run("experiments.benchmarks.rewards", "--checks=20", "--cores=1", "--seconds=0.3", "--hanging=0.1")
    assert [row["what"] for row in result["sandbox"]] == ["run", "call", "past the deadline"]
    assert [row["what"] for row in result["members"]] == ["answer", "school", "mathematics", "code", "drawing"]
    assert all(row["a_second"] > 0 for part in ("sandbox", "members", "hanging") for row in result[part])
    without, hanging = result["hanging"]
    assert hanging["seconds"] >= 2 * 0.3  # two of them, for a deadline each, one after another
    assert without["what"] != hanging["what"]
    assert result["overlap"][0]["both_seconds"] > 0
