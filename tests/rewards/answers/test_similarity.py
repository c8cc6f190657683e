"""Similarity to gold: its ratio, its power, lists, and what is invalid."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowgrpo.rewards import plain_list, similarity
from flowgrpo.rewards.answers.similarity import MAX_GOLD
from flowgrpo.types import BadInput, Task


def value(output, *answers, **options):
    """The value that `similarity` gives an output."""
    return similarity(**options).score(Task("t", "?", answers, "reverse_text"), output).value


def test_the_ratio_is_twice_the_shared_characters_over_the_lengths():
    assert value("abcd", "abcd") == 1.0
    assert value("abxx", "abcd") == 0.5
    assert value("bcd", "abcd") == pytest.approx(6 / 7)
    assert value("xyz", "abcd") == 0.0
    assert value("ABCD", "abcd") == 0.0


def test_a_power_lowers_the_value_of_a_nearly_right_answer():
    assert value("abxx", "abcd", power=4.0) == 0.5**4
    assert value("abcd", "abcd", power=4.0) == 1.0
    scored = similarity(power=4.0).score(Task("t", "?", ("abcd",), "d"), "abxx")
    assert scored.parts == {"similarity": 0.5}


def test_the_final_answer_is_compared_with_the_most_similar_gold():
    assert value("It is long.\n<answer> abcd </answer>", "zzzz", "abcd") == 1.0
    assert value("Answer: abcd", "abcd") == 1.0


def test_lists_are_compared_without_case_lines_and_stops():
    assert plain_list("Bo ,Al.\nCy\n") == "bo, al, cy"
    assert value("al,bo , CY.", "Al, Bo, Cy", spell=plain_list) == 1.0
    assert value("Bo, Al, Cy", "Al, Bo, Cy", spell=plain_list) < 1.0


def test_no_answer_scores_0_and_a_task_without_gold_is_invalid():
    assert value("", "abcd") == value(" \n", "abcd") == value(", .", "a, b", spell=plain_list) == 0.0
    scored = similarity().score(Task("t", "?", (), "d"), "abcd")
    assert (scored.value, scored.reason) == (None, "task 't' has no gold answer: give it one")
    assert value("abcd", "a" * (MAX_GOLD + 1)) is None
    with pytest.raises(BadInput, match="power is 0, but must be above 0"):
        similarity(power=0)


@given(st.text("abc, ", max_size=30), st.text("abc", min_size=1, max_size=30))
def test_only_gold_scores_1(output, gold):
    result = value(output, gold)
    assert 0 <= result <= 1
    assert (result == 1.0) == (output.strip() == gold)
