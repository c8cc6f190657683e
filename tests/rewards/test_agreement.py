"""The matcher against labels by hand: every pair of pairs.txt and fresh_pairs.txt, with a list of all disagreements."""

from collections import Counter

import pytest

from experiments.benchmarks.pairs import MATHEMATICS, PAIRS, matcher, plain_comparison, read_pairs
from flowgrpo.rewards.answers.symbolic import PRELOAD
from flowgrpo.sandbox import Sandbox
from flowgrpo.types import BadInput

ALL_PAIRS = [*read_pairs(), *read_pairs(PAIRS.with_name("fresh_pairs.txt"))]
NOT_WORKED_OUT = ("7", "3 + 4")  # the one wrong answer that scores 1: equal, but not worked out
FALSE_NEGATIVES = {  # right answers that score 0, as (gold, output)
    ("Paris", "So my answer is Paris, the capital of France."),
    ("B", "Only B is consistent with the passage, since A and C contradict it."),
    ("The Pacific Ocean", "the Pacific"),
    ("It evaporates", "The water evaporates."),
    ("20%", "a 20% discount"),
    ("1, 2, 3", "1\n2\n3"),
    ("no", "It does not."),
    ("O(n log n)", "$O(n \\log n)$"),
    ("$4.75", "$4.75 per pound"),
    ("1945", "World War II ended in 1945."),
}


def disagreements(pairs, call):
    match = matcher(call)
    values = [(pair, match(pair).value) for pair in pairs]
    return {(pair.golds[0], pair.output) for pair, value in values if value is None or (value > 0) != pair.right}


def call_all_different(function, *_, seconds):  # noqa: ARG001
    """`Sandbox.call` without a process: formulas can be read, and none equals another."""
    return True if function.endswith("readable") else ("different", 0.0)


def test_every_pair_without_formulas_agrees_but_for_known_ones():
    pairs = [pair for pair in ALL_PAIRS if pair.domain != "symbolic"]
    assert disagreements(pairs, call_all_different) == FALSE_NEGATIVES
    school_pairs = [pair for pair in read_pairs() if pair.domain not in MATHEMATICS]
    assert sum((plain_comparison(pair) > 0) == pair.right for pair in school_pairs) < 0.6 * len(school_pairs)


@pytest.mark.slow
def test_every_pair_agrees_but_for_known_ones():
    with Sandbox(preload=PRELOAD) as sandbox:
        assert disagreements(ALL_PAIRS, sandbox.call) == FALSE_NEGATIVES | {NOT_WORKED_OUT}


def test_there_are_enough_pairs_of_both_verdicts_in_every_domain():
    verdicts = Counter((pair.domain, pair.right) for pair in read_pairs())
    assert verdicts.total() >= 400
    assert len(verdicts) == 2 * len({domain for domain, _ in verdicts})
    assert min(verdicts.values()) >= 6


def test_a_malformed_pair_is_named(tmp_path):
    path = tmp_path / "pairs.txt"
    path.write_text("# exact\nright ¦ a ¦ a\nmaybe ¦ a ¦ b\n")
    with pytest.raises(BadInput, match=r"pairs.txt:3: "):
        read_pairs(path)
