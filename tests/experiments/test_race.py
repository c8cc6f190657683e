"""The race of `benchmarks.peers`: processes that take turns, and what becomes of one that fails."""

import os
import subprocess
import sys

import pytest

from experiments.benchmarks.racers import workload
from experiments.benchmarks.racers.race import Racer, Track, run_race, summarize
from experiments.benchmarks.racers.workload import WORDS
from experiments.benchmarks.shapes import SHAPES
from flowgrpo.envs.env import END, PAD, SPECIAL
from tests.experiments.conftest import EXPERIMENTS, last_line

# It notes when its steps begin and end, in a file that all share.
FAKE = """
import os, sys, time
from experiments.benchmarks.racers.protocol import Lane

lane, name, notes, bad = Lane(), sys.argv[1], sys.argv[2], sys.argv[3:]
print("a library prints this")
for step in range(9):
    lane.wait()
    with open(notes, "a") as file:
        file.write(f"{name} begins\\n")
    if step == 1 and "dies" in bad:
        raise RuntimeError("no memory is left")
    if step == 1 and "hangs" in bad:
        time.sleep(60)
    with open(notes, "a") as file:
        file.write(f"{name} ends\\n")
    lane.done(tokens=10 * (1 + step))
"""


@pytest.fixture
def fake(tmp_path):
    """Return the function that makes a racer of a few lines of the standard library."""

    def make(name: str, *bad: str, timeout: float = 30) -> Racer:
        command = [sys.executable, "-c", FAKE, name, str(tmp_path / "notes"), *bad]
        env = os.environ | {"PYTHONPATH": str(EXPERIMENTS.parent)}
        return Racer(name, command, env=env, folder=tmp_path, log=tmp_path / f"{name}.log", timeout=timeout)

    return make


def test_racers_take_turns_and_end(fake, tmp_path):
    rounds = []
    tracks = run_race([fake("a"), fake("b")], warm_up=1, rounds=2, on_round=rounds.append)
    notes = (tmp_path / "notes").read_text().split("\n")[:-1]
    assert notes == 3 * ["a begins", "a ends", "b begins", "b ends"]
    assert rounds == [1, 2, 3]
    for track in tracks.values():
        assert (track.failed, track.tokens) == ("", [10, 20, 30])
        assert track.setup > track.seconds[0] > 0
        assert track.peak_mib > 1


def test_one_that_dies_or_hangs_leaves_the_race_with_a_sentence(fake):
    tracks = run_race([fake("dead", "dies"), fake("slow", "hangs", timeout=3), fake("good")], warm_up=1, rounds=1)
    reason = "dead ended with status 1; its last output: RuntimeError: no memory is left"
    assert tracks["dead"].failed == reason
    assert tracks["slow"].failed == "slow did not answer in 3 s; its last output: a library prints this"
    assert tracks["good"].tokens == [10, 20]
    assert [record["system"] for record in summarize(tracks, "dead", warm_up=1, episodes=0)] == ["good"]


def test_ratios_are_of_the_same_round_and_warm_up_does_not_count():
    ours = Track(setup=9.0, seconds=[5.0, 1.0, 2.0, 4.0], tokens=[0, 10, 10, 10], peak_mib=7)
    theirs = Track(setup=9.0, seconds=[5.0, 3.0, 2.0, 4.0], tokens=[0, 10, 10, 40], peak_mib=7)
    first, second = summarize({"ours": ours, "theirs": theirs}, "ours", warm_up=1, episodes=64)
    assert (first["over_ours"], first["over_ours_max"]) == (1, 1)
    assert [second[f"over_ours{end}"] for end in ("", "_min", "_max")] == [1, 1, 3]
    assert [second[f"seconds{end}"] for end in ("", "_min", "_max")] == [3, 2, 4]
    assert (second["episodes_per_second"], second["tokens"], second["first_step_seconds"]) == (21.33, 20, 5)
    (alone,) = summarize({"theirs": theirs}, "ours", warm_up=1, episodes=0)
    assert (alone["over_ours"], alone["tokens_per_second"]) == (None, 6.667)


def test_the_words_are_those_of_our_environments():
    assert WORDS[: len(SPECIAL)] == SPECIAL
    assert (workload.PAD, workload.END) == (PAD, END)
    assert len(WORDS) == workload.VOCABULARY == SHAPES["small"]["vocab_size"]
    assert [WORDS[word] for word in (workload.TOOL, workload.MODEL, workload.EQUALS)] == ["<tool>", "<model>", "="]
    assert WORDS[workload.DIGIT : workload.OTHER] == tuple("0123456789")
    ids = workload.random_ids(3)
    assert [len(row) for row in ids] == 3 * [workload.PROMPT]
    assert workload.spell([5, 6, 15]) == "0 1 w15"
    assert workload.fraction_of_digits([5, 14, 15, 1]) == 0.5


def test_racers_of_others_start_without_our_packages():
    """An interpreter that has none of them can read the job, and fails only where it imports its own library."""
    modules = ["protocol", "workload", "torch_generate", "trl_trainer", "tunix_learner", "vllm_engine"]
    names = ", ".join(f"experiments.benchmarks.racers.{module}" for module in modules)
    program = f"import sys, {names}; print({{'flowgrpo', 'jax', 'absl', 'torch'}} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-S", "-c", program], cwd=EXPERIMENTS.parent, capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"


@pytest.mark.oracle
def test_trl_makes_a_step_and_transformers_races_against_ours(command):
    """One counted round of each; a step of ours compiles for longer than both together, and other tests make it."""
    pytest.importorskip("trl", reason="needs the extra [oracle]")
    found = last_line(command("benchmarks.peers", "--cases=single", "--systems=trl", "--repeats=1"))
    (theirs,) = found["records"]
    assert (theirs["system"], theirs["over_ours"], found["failed"]) == ("trl", None, {})
    assert 32 * workload.EPISODES < theirs["tokens"] <= workload.ANSWER * workload.EPISODES
    systems = "--systems=flowgrpo,generate"
    found = last_line(command("benchmarks.peers", "--cases=decode_16x128", systems, "--repeats=1"))
    assert not found["failed"]
    ours, other = found["records"]
    assert (ours["system"], ours["over_ours"], other["system"]) == ("flowgrpo", 1, "generate")
    for row in (ours, other):
        assert row["tokens"] == 16 * 128
        assert min(row["seconds"], row["over_ours"], row["peak_mib"]) > 0
        assert row["setup_seconds"] > row["first_step_seconds"]
