"""Format rewards: each piece once, in order; JSON of a schema; bounded time for any input."""

import pytest

from flowgrpo.rewards.format import MAX_CHARACTERS, check_format, check_json, heading, literal, tag
from flowgrpo.types import BadInput, Task

TASK = Task("t", "", (), "format")
TAGS = check_format(tag("think"), tag("answer"))
JSON = check_json({"answer": str, "steps": list, "sure": (float, type(None))})
GOOD = '{"answer": "5", "steps": [1], "sure": 0.5}'


def score(reward, output):
    return reward.score(TASK, output)


BROKEN = {
    "": "think: <think> is missing",
    "<think>a</think>": "answer: <answer> is missing",
    "<think>a</think><answer>5": "answer: </answer> is missing",
    "<think></think><answer>5</answer>": "think: nothing inside",
    "<answer>5</answer><think>a</think>": "answer: out of order",
    "<think>a<answer>5</answer></think>": "answer: out of order",
    "<think>a</think><answer>5</answer><answer>6</answer>": "answer: <answer> is more than once",
    "</think>a<think><answer>5</answer>": "think: </think> comes before <think>",
    "<think>" * 10_000: "think: <think> is more than once",
    "x" * (MAX_CHARACTERS + 1): f"the output is longer than {MAX_CHARACTERS} characters",
}


def test_only_the_declared_form_scores_1_and_others_say_why():
    assert score(TAGS, "<think>a</think>\n<answer>5</answer>") == (1.0, "", {"think": 1.0, "answer": 1.0})
    assert {output: score(TAGS, output)[:2] for output in BROKEN} == {
        output: (0.0, BROKEN[output]) for output in BROKEN
    }
    assert score(TAGS, "<think>a</think>").parts == {"think": 1.0, "answer": 0.0}


def test_headings_and_literal_text():
    reward = check_format(heading("Plan"), heading("Answer"), literal("####"))
    for output, value, reason in (
        ("## Plan\nwalk\n**Answer:**\n#### 5", 1.0, ""),
        ("Plan\nAnswer\n#### 5", 1.0, ""),
        ("My Plan\nAnswer\n#### 5", 0.0, "Plan: missing"),
        ("Plan\nPlan\nAnswer\n#### 5", 0.0, "Plan: more than once"),
        ("Plan\nAnswer\n#### 5 ####", 0.0, "####: more than once"),
    ):
        assert score(reward, output)[:2] == (value, reason)


def test_senseless_formats_are_refused():
    for make in (check_format, lambda: tag("a b"), lambda: tag(""), lambda: heading(" "), lambda: literal("")):
        with pytest.raises(BadInput):
            make()
    with pytest.raises(BadInput, match="its own name"):
        check_format(tag("a"), tag("a"))
    with pytest.raises(BadInput, match="JSON knows"):
        check_json({"a": set})


BAD_JSON = {
    "": "not JSON: empty",
    "[" * 10_000: "not JSON",
    '{"answer": ' * 10_000: "not JSON",
    "1" * 10_000: "not JSON",
    "[1]": "no object",
    '{"answer": "5", "steps": [1]}': "'sure' is missing",
    GOOD.replace("0.5", "true"): "'sure' is not a number or null",
    GOOD.replace("0.5", "NaN"): "NaN is not JSON",
    GOOD.replace('"5"', "5"): "'answer' is not text",
    GOOD.replace("}", ', "answer": "6"}'): "twice",
    GOOD.replace("}", ', "more": 1}'): "'more' is not in the schema",
    GOOD + " and so on": "not JSON",
    "\x00": "not JSON",
}


def test_only_json_of_the_schema_scores_1_and_others_say_why():
    for output in (GOOD, f"```json\n{GOOD}\n```", GOOD.replace("0.5", "null"), GOOD.replace("0.5", "1")):
        assert score(JSON, output).value == 1
    for output, reason in BAD_JSON.items():
        scored = score(JSON, output)
        assert scored.value == 0
        assert reason in scored.reason
    assert score(check_json({"a": int}, extra=True), '{"a": 1, "b": 2}').value == 1
    assert score(check_json({"a": int}), '{"a": true}').value == 0
