"""Whatever an output is, rules that run in this process raise nothing, return in time, and never pay it (R2)."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.pairs import read_pairs
from flowgrpo.rewards.answer import answer
from flowgrpo.rewards.format import check_format, check_json, heading, tag
from flowgrpo.rewards.school import school
from flowgrpo.rewards.symbolic import PRELOAD, mathematics
from flowgrpo.sandbox import Sandbox
from flowgrpo.types import Task

DEADLINE = 1.0  # seconds of this process
GOLDS = ["42", "3/4", "B", "5 km", "July 4, 1776", "1, 2, 3", "(1, 2)", "yes", "photosynthesis", "$12.50", "3:4", "50%"]
GOLDS += ["x^2 + 1", "3:30 pm", "20 °C", "\\frac{\\sqrt{3}}{2}", "\\{1, 2\\}"]


def different(function, *_, seconds):  # noqa: ARG001
    return True if function.endswith("readable") else "different"


REWARDS = [
    answer(),
    school(),
    mathematics(different),
    check_format(tag("answer"), heading("Plan")),
    check_json({"a": int}),
]
OPTIONS = {"options": ["respiration", "photosynthesis"]}

HOSTILE = {
    "nothing": "",
    "spaces": " \n\t" * 1000,
    "10 MB of a letter": "a" * 10_000_000,
    "10 MB of digits": "9" * 10_000_000,
    "10 MB of lines": "7 or 8\n" * 1_400_000,
    "10 MB of boxes": "\\boxed{" * 1_400_000,
    "10 MB without an end": "<answer>" + "x" * 10_000_000,
    "binary": bytes(range(256)).decode("latin-1") * 100,
    "surrogates": "\ud800\udfff" * 500,
    "nulls": "\x00" * 3000,
    "10,000 brackets": "(" * 10_000 + "1" + ")" * 10_000,
    "10,000 braces": "{" * 10_000 + "}" * 10_000,
    "10,000 fractions": "\\frac{" * 10_000,
    "10,000 wrappers": "\\text{" * 10_000 + "42" + "}" * 10_000,
    "10,000 boxes": "\\boxed{" * 10_000 + "41" + "}" * 10_000,
    "tower": "10^10^10",
    "braced tower": "\\boxed{10^{10^{10}}}",
    "power": "9**9999999999",
    "exponent": "1e999999999999",
    "long exponent": "1e" + "9" * 300,
    "factorials": "9" + "!" * 300,
    "commas": "1," * 1000,
    "fractions": "1/" * 1000,
    "spaces between": "1 " * 1000,
    "signs": "-" * 2000 + "5",
    "dollars": "$" * 2000,
    "backticks": "`" * 2001,
    "stars": "*" * 1999 + "41",
    "backslashes": "\\" * 2001,
    "is": "answer is " * 300,
    "answers": "answer: " * 300,
    "or": "B or C or " * 400,
    "not": "not " * 500 + "B",
    "bait": "a" * 1000 + "!" + "aA" * 400,
    "nested lists": "[" * 900 + "1, 3" + "]" * 900,
    "combining": "e" + "\u0301" * 1990,
    "expanding": "\ufdfa" * 2000,
    "letters": " ".join("ABCDEFGHIJ" * 50),
    "numbers in words": "one hundred and " * 100,
    "ratios": "1:" * 900 + "1",
    "hours": "1 h 1 min " * 150,
    "units": "5 m/s/s/s/s/" + "s/" * 50,
    "quotes": "'\"" * 1000,
    "closing tags": "</answer>" * 200,
}


def check_all(output, golds=GOLDS):
    """Every reward says something of the output, in time; returns what was paid."""
    paid = []
    for gold in golds:
        task = Task("t", "What percent of km, in order? A) respiration B) photosynthesis", (gold,), "d", OPTIONS)
        for reward in REWARDS:
            start = time.process_time()
            scored = reward.score(task, output)
            assert time.process_time() - start < DEADLINE
            assert scored.value in (0.0, 1.0)
            assert len(scored.reason) < 1000
            paid += [(gold, scored)] * bool(scored.value)
    return paid


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_output_is_scored_as_a_failure_in_time(name):
    assert check_all(HOSTILE[name]) == []


@pytest.mark.parametrize("name", [name for name in HOSTILE if HOSTILE[name].strip()])
def test_a_hostile_gold_is_no_trouble_either(name):
    gold = HOSTILE[name][:5000]
    for reward in REWARDS:
        start = time.process_time()
        reward.score(Task("t", "", (gold,), "d"), "B. the answer is 5 km, 3/4")
        assert time.process_time() - start < DEADLINE


PAIRS = read_pairs()
PIECES = [
    "\\boxed{",
    "}",
    "{",
    "$",
    "<answer>",
    "</answer>",
    "Answer: ",
    " is ",
    " or ",
    " not ",
    "\\frac",
    "^",
    "10^10^10",
    "%",
]
PIECES += [
    "-",
    ",",
    "1,000",
    "½",
    "\n",
    "\x00",
    " km",
    "(",
    ")",
    "B",
    "²",
    "…",
    "é",
    "\ud800",
    "e9999",
    "/0",
    ":",
    "#### ",
]


@st.composite
def mutated(draw):
    """An output of the pairs, with pieces put in, cut out and doubled."""
    text = draw(st.sampled_from(PAIRS)).output
    for _ in range(draw(st.integers(0, 4))):
        at, end = sorted(draw(st.tuples(st.integers(0, len(text)), st.integers(0, len(text)))))
        piece = draw(st.sampled_from(PIECES) | st.text(max_size=5))
        text = draw(st.sampled_from([text[:at] + piece + text[at:], text[:at] + text[end:], text + text[at:end]]))
    return text


OUTPUTS = st.text() | st.text("0123456789.,/^%$\\{}()[]-+ eE", max_size=60) | mutated()


@settings(max_examples=300)
@given(OUTPUTS, st.sampled_from(GOLDS))
def test_random_and_mutated_outputs_raise_nothing_and_end_in_time(output, gold):
    check_all(output, [gold])


@pytest.mark.slow
@settings(max_examples=10_000)
@given(OUTPUTS, st.sampled_from(GOLDS))
def test_ten_thousand_random_and_mutated_outputs_raise_nothing_and_end_in_time(output, gold):
    check_all(output, [gold])


@settings(max_examples=300)
@given(OUTPUTS, OUTPUTS)
def test_any_text_is_itself_and_any_gold_is_read(gold, output):
    for reward in REWARDS[:3]:
        if gold.strip():
            assert reward.score(Task("t", "", (gold,), "d"), gold).value == 1
        reward.score(Task("t", "", (gold,), "d"), output)


@pytest.mark.slow
def test_mutated_formulas_through_the_sandbox_raise_nothing_and_end_in_time():
    with Sandbox(preload=PRELOAD) as sandbox:
        reward = mathematics(sandbox.call, seconds=1.0)

        @settings(max_examples=300)
        @given(mutated(), st.sampled_from(["x^2 + 1", "\\frac{\\sqrt{3}}{2}", "\\{1, 2\\}", "36\\pi"]))
        def check(output, gold):
            start = time.monotonic()
            assert reward.score(Task("t", "", (gold,), "d"), output).value in (0.0, 1.0)
            assert time.monotonic() - start < 6 * 1.5 + 10  # at most six readings, each with its own deadline

        check()
