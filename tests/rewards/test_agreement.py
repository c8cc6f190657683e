"""The matcher against a teacher: every pair of pairs.txt and fresh_pairs.txt, and each disagreement by name."""

import pytest

from experiments.pairs import MATHEMATICS, PAIRS, matcher, plain_comparison, read_pairs
from flowgrpo.rewards.symbolic import PRELOAD
from flowgrpo.sandbox import Sandbox
from flowgrpo.types import BadInput

FRESH = PAIRS.with_name("fresh_pairs.txt")

# Where program and teacher disagree, as (gold, output): all but the first are right answers that are not paid.
KNOWN = {
    ("7", "3 + 4"),  # equal, but not worked out
    ("Paris", "So my answer is Paris, the capital of France."),
    ("B", "Only B is consistent with the passage, since A and C contradict it."),
    ("The Pacific Ocean", "the Pacific"),
    ("It evaporates", "The water evaporates."),
    ("20%", "a 20% discount"),
    ("1, 2, 3", "1\n2\n3"),
    ("no", "It does not."),
}
KNOWN_FRESH = {
    ("O(n log n)", "$O(n \\log n)$"),
    ("9", "She has 12 - 3 = 9 left."),
    ("$4.75", "$4.75 per pound"),
    ("1945", "World War II ended in 1945."),
}


def disagreements(pairs, call):
    """Each disagreement, printed and returned as (gold, output)."""
    match, found = matcher(call, seconds=1.0), {}
    for pair in pairs:
        scored = match(pair)
        if scored.value is None or (scored.value > 0) != pair.right:
            print(
                f"line {pair.line}, {pair.domain}: teacher {pair.right}, gold {pair.golds}, {pair.output!r}: {scored}"
            )
            found[pair.golds[0], pair.output] = pair
    return found


def unused(*_, **__):
    raise AssertionError("schools need no other process")


def test_schools_agree_with_the_teacher_but_for_known_pairs():
    for path, known in ((PAIRS, KNOWN), (FRESH, KNOWN_FRESH)):
        pairs = [pair for pair in read_pairs(path) if pair.domain not in MATHEMATICS]
        pair_of = {(pair.golds[0], pair.output) for pair in pairs}
        assert set(disagreements(pairs, unused)) == known & pair_of


@pytest.mark.slow
def test_every_pair_agrees_with_the_teacher_but_for_known_ones():
    with Sandbox(preload=PRELOAD) as sandbox:
        found = disagreements(read_pairs(), sandbox.call)
        fresh = disagreements(read_pairs(FRESH), sandbox.call)
    assert set(found) == KNOWN
    assert set(fresh) == KNOWN_FRESH
    assert [pair.output for pair in (*found.values(), *fresh.values()) if not pair.right] == ["3 + 4"]


def test_there_are_enough_pairs_of_both_verdicts_in_every_domain():
    pairs = read_pairs()
    assert len(pairs) >= 400
    for domain in {pair.domain for pair in pairs}:
        verdicts = [pair.right for pair in pairs if pair.domain == domain]
        assert min(verdicts.count(True), verdicts.count(False)) >= 6, domain
    assert len({(pair.golds, pair.output, pair.query, pair.domain) for pair in pairs}) == len(pairs)


def test_plain_comparison_misses_what_the_matcher_finds():
    pairs = [pair for pair in read_pairs() if pair.domain not in MATHEMATICS]
    plain = sum((plain_comparison(pair) > 0) == pair.right for pair in pairs)
    assert plain < 0.6 * len(pairs) < len(pairs) - len(disagreements(pairs, unused))


def test_a_malformed_pair_is_named(tmp_path):
    path = tmp_path / "pairs.txt"
    path.write_text("# exact\nright ¦ a ¦ a\nmaybe ¦ a ¦ b\n")
    with pytest.raises(BadInput, match=r"pairs.txt:3: "):
        read_pairs(path)
