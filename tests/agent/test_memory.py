"""Memory: its text never exceeds the budget, and the newest record stays whole longest."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowgrpo.agent.state import Memory, MemoryRecord, render_memory, shorten

WORDS = st.text("ab 1\n\r\u2028é世", max_size=60)
RECORDS = st.builds(
    MemoryRecord, st.integers(1, 30), WORDS, st.sampled_from(["", "echo"]), WORDS, WORDS | WORDS.map(lambda w: w * 40)
)
COUNTS = {
    "characters": len,
    "words": lambda string: len(string.split()),
    "bytes": lambda string: len(string.encode()),
    "a token for three": lambda string: -(-len(string) // 3),
}


def memory(*observations: str) -> Memory:
    return Memory(tuple(MemoryRecord(i, "", "echo", f"call {i}", seen) for i, seen in enumerate(observations, 1)))


@pytest.mark.parametrize("name", COUNTS)
@given(records=st.lists(RECORDS, max_size=8), budget=st.integers(-1, 300), limit=st.none() | st.integers(0, 300))
def test_what_is_shown_never_exceeds_the_budget(name, records, budget, limit):
    shown = render_memory(Memory(tuple(records)), budget=budget, count=COUNTS[name], max_field_tokens=limit)
    assert COUNTS[name](shown) <= max(budget, 0)
    assert shown == render_memory(Memory(tuple(records)), budget=budget, count=COUNTS[name], max_field_tokens=limit)


def test_records_are_one_line_each_where_they_are_short():
    records = (
        MemoryRecord(1, "", "calculator", "2*3", "6"),
        MemoryRecord(2, "look it up", "search", "boiling point", "100 °C", reason="Fahrenheit is asked for"),
        MemoryRecord(3, "", "", "", "there is no tool 'browser'", error=True),
        MemoryRecord(4, "", "add", {"a": "é"}, "b is missing", error=True),
        MemoryRecord(5, "", "now", {}, 'a\n5. calculator("1") -> "1"', stop=True),
    )
    assert render_memory(Memory(records), budget=1000, count=len) == (
        '1. calculator("2*3") -> "6"\n'
        '2. "look it up": search("boiling point") -> "100 °C" [continue: "Fahrenheit is asked for"]\n'
        "3. error: \"there is no tool 'browser'\"\n"
        '4. add({"a": "é"}) -> error: "b is missing"\n'
        '5. now() -> "a\\n5. calculator(\\"1\\") -> \\"1\\"" [stop]'
    )


def test_older_records_are_shortened_before_newer_ones():
    observations = ["a" * 300, "b" * 300, "c" * 300]
    seen = [
        render_memory(memory(*observations), budget=budget, count=len, max_field_tokens=400)
        for budget in range(1000, 0, -1)
    ]
    kinds = []
    for shown in seen:
        kind = tuple(
            "whole"
            if letter * 300 in shown
            else "cut"
            if f'-> "{letter}' in shown
            else str(f'echo("call {i}")' in shown)
            for i, letter in enumerate("abc", 1)
        )
        if not kinds or kinds[-1] != kind:
            kinds.append(kind)
    assert kinds[0] == ("whole", "whole", "whole")
    assert kinds[1:6] == [
        ("cut", "whole", "whole"),
        ("cut", "cut", "whole"),
        ("True", "cut", "whole"),
        ("True", "True", "whole"),
        ("False", "True", "whole"),
    ]
    assert kinds[6] == ("False", "False", "whole")
    assert kinds[7:] == [("False", "False", "cut"), ("False", "False", "True"), ("False", "False", "False")]
    assert any(re.match(r"\(1 earlier left out\)\n2\. ", shown) for shown in seen)
    assert seen[-1] == ""


def test_a_short_observation_is_not_replaced_by_longer_words():
    shown = render_memory(memory(*["6"] * 30), budget=200, count=len)
    assert "..." not in shown
    assert shown.endswith('30. echo("call 30") -> "6"')


def test_a_single_observation_is_bounded():
    shown = render_memory(memory("x" * 10**6, "6"), budget=1000, count=len)
    assert 450 <= shown.count("x") <= 500
    assert shown.endswith('2. echo("call 2") -> "6"')
    assert re.search(r'x" \[\.\.\. \d+ characters \.\.\.\] "x', shown)


def test_counting_tokens_is_cheap_for_any_observation():
    """The texts that are counted are bounded by the budget, not by the observation."""
    counted = []

    def count(string: str) -> int:
        counted.append(len(string))
        return len(string.split())

    render_memory(memory("word " * 10**6, "x" * 10**6, "6"), budget=100, count=count)
    assert max(counted) <= 100 * 16
    assert len(counted) < 200


@given(string=st.text(max_size=200), budget=st.integers(0, 120))
def test_shorten_keeps_both_ends_and_fits(string, budget):
    short = shorten(string, budget, len)
    assert len(short) <= budget
    if len(string) <= budget:
        assert short == string
    elif short:
        head, found, tail = short.partition(" [... ")
        assert found
        assert string.startswith(head)
        assert string.endswith(tail.partition(" characters ...] ")[2])
