"""Rewards that run in this process raise nothing, return in time and never reward a hostile output (R2)."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.benchmarks.pairs import read_pairs
from flowgrpo.rewards.answers.game24 import game24
from flowgrpo.rewards.answers.match import answer
from flowgrpo.rewards.answers.school import school
from flowgrpo.rewards.answers.symbolic import mathematics
from flowgrpo.rewards.format import check_format, check_json, heading, tag
from flowgrpo.rewards.vision.boxes import box_f1, box_iou, count_match, point_in_box
from flowgrpo.rewards.vision.drawing import drawing_reward
from flowgrpo.types import Task

DEADLINE = 10.0  # processor seconds; 0.1 are ample, and quadratic time takes an hour for 2 MB
GOLDS = ["42", "3/4", "B", "5 km", "July 4, 1776", "1, 2, 3", "(1, 2)", "yes", "photosynthesis", "$12.50", "3:4", "50%"]
GOLDS += ["x^2 + 1", "3:30 pm", "20 °C", "\\frac{\\sqrt{3}}{2}", "\\{1, 2\\}"]
QUERY = "What percent of km, in order? A) respiration B) photosynthesis"
METADATA = {"options": ["respiration", "photosynthesis"], "boxes": [[500, 500, 600, 600]], "count": 77}
METADATA["numbers"] = [41, 1]
METADATA["commands"] = "rect 0 0 10 10 red"


def call_all_different(function, *_, seconds):  # noqa: ARG001
    return True if function.endswith("readable") else ("different", 0.0)


MATCHERS = [answer(), school(), mathematics(call_all_different)]
REWARDS = [
    *MATCHERS,
    game24(target=42),
    check_format(tag("answer"), heading("Plan")),
    check_json({"a": int}),
    drawing_reward(),
]
REWARDS += [box_iou(), box_f1(), point_in_box(), count_match()]

LONG = 2_000_000
MANY = {  # number of repetitions -> pieces that are repeated
    LONG: ["a", "9", "\n"],
    LONG // 9: ["7 or 8\n", "\\boxed{", "[1,2,3,4]", "rect 0 0 64 64 red\n"],
    10_000: ["\\frac{", "(", "\ud800\udfff", "\x00", bytes(range(256)).decode("latin-1")],
    2001: [" \n\t", "1,", "1/", "$", "`", "\ufdfa", "B or C or ", "1 h 1 min ", "ABCDEFGHIJ "],
    301: ["answer is ", "one hundred and ", "</answer>", "A B C D E F G H I J "],
}
HOSTILE = {f"{piece[:20]!r} {times:,} times": piece * times for times, pieces in MANY.items() for piece in pieces}
HOSTILE |= {
    "nothing": "",
    "spaces": "(" + " " * LONG + "1",
    "a number": "circle " + "9" * LONG,
    "no end": "<answer>" + "x" * LONG,
    "brackets": "(" * 10_000 + "1" + ")" * 10_000,
    "wrappers": "\\text{" * 10_000 + "42" + "}" * 10_000,
    "boxes": "\\boxed{" * 10_000 + "41" + "}" * 10_000,
    "lists": "[" * 900 + "1, 3" + "]" * 900,
    "braced tower": "\\boxed{10^{10^{10}}}",
    "power": "9**9999999999",
    "exponent": "1e" + "9" * 300,
    "factorials": "9" + "!" * 300,
    "no numbers": "[1e9999, nan, inf, 2]",
    "stars": "*" * 1999 + "41",
    "emphasis": "*_a_* " * 300 + "_" * 200,
    "sum": "41" + "+(1" * 600,
    "product": "-" * 300 + "41" + "*1" * 600,
    "not": "not " * 500 + "B",
    "bait": "a" * 1000 + "!" + "aA" * 400,
    "combining": "e" + "\u0301" * 1990,
    "ratios": "1:" * 900 + "1",
    "units": "5 m/s/s/s/s/" + "s/" * 50,
}


def values(output, gold):
    """Yield the value of an output by every reward, and assert that each returns in time."""
    task = Task("t", QUERY, (gold,), "d", METADATA)
    for reward in REWARDS:
        start = time.process_time()
        scored = reward.score(task, output)
        assert time.process_time() - start < DEADLINE
        assert len(scored.reason) < 1000
        yield scored.value


@pytest.mark.parametrize("name", HOSTILE)
def test_R2_a_hostile_output_is_a_failure_and_a_hostile_gold_is_harmless(name):
    start = list(HOSTILE).index(name) % 4
    for gold in GOLDS[start::4]:
        assert max(values(HOSTILE[name], gold)) < 0.1, gold
    if HOSTILE[name].strip():
        list(values("B. the answer is 5 km, 3/4", HOSTILE[name][:5000]))


PAIRS = read_pairs()
PIECES = (
    "\\boxed{|}|{|$|<answer>|</answer>|Answer: | is | or | not |\\frac|^|10^10^10|%|-|,|1,000|½|\n|\x00| km|(|)|B|²"
)
PIECES += "|…|é|\ud800|e9999|/0|:|#### |rect 0 0 9 9 red|[500, 500, 600, 600]"


@st.composite
def mutated(draw):
    """An output of the pairs, with pieces inserted, removed and repeated."""
    text = draw(st.sampled_from(PAIRS)).output
    for _ in range(draw(st.integers(0, 4))):
        start, end = sorted(draw(st.tuples(st.integers(0, len(text)), st.integers(0, len(text)))))
        piece = draw(st.sampled_from(PIECES.split("|")) | st.text(max_size=5))
        text = draw(
            st.sampled_from([text[:start] + piece + text[start:], text[:start] + text[end:], text + text[start:end]])
        )
    return text


OUTPUTS = st.text() | st.text("0123456789.,/^%$\\{}()[]-+ eE", max_size=60) | mutated()
OUTPUTS |= st.text("rectcirlne 0123456789-\nredblu", max_size=200)


@given(OUTPUTS, st.sampled_from(GOLDS), OUTPUTS)
def test_R2_random_and_mutated_outputs_and_golds_raise_nothing_and_end_in_time(output, gold, other):
    assert all(0 <= value <= 1 for value in values(output, gold))
    if other.strip():
        list(values(output, other))
        assert list(values(other, other))[: len(MATCHERS)] == [1.0] * len(MATCHERS)
