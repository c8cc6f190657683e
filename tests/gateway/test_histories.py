"""Which response a request continues: found by the messages that were handed out, and by nothing else (A7)."""

import pytest

from flowgrpo.gateway.histories import Histories, comparable, content_to_text, to_template
from flowgrpo.types import BadInput

SYSTEM = {"role": "system", "content": "s"}
ASK, MORE = ({"role": "user", "content": words} for words in "ab")
FIRST, SECOND = ({"role": "assistant", "content": words} for words in ("one", "two"))


def call(arguments: str, **more) -> dict:
    function = {"name": "f", "arguments": arguments}
    calls = [{"id": "c", "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls} | more


def test_A7_requests_extend_the_newest_response_or_start_a_context():
    histories = Histories()
    assert histories.match([SYSTEM, ASK], []) == ("first", None, (SYSTEM, ASK))
    histories.add_response([SYSTEM, ASK], [], FIRST)
    assert histories.match([SYSTEM, ASK, FIRST, MORE], []) == ("append", 0, (MORE,))
    histories.add_response([SYSTEM, ASK, FIRST, MORE], [], SECOND)
    longer = [SYSTEM, ASK, FIRST, MORE, SECOND]
    assert histories.match([*longer, ASK, MORE], []) == ("append", 1, (ASK, MORE))
    assert histories.match([SYSTEM, ASK, FIRST, ASK], []) == ("branch", 0, (ASK,))
    assert histories.match([SYSTEM, ASK, MORE], []).kind == "rewrite"
    assert histories.match([SYSTEM, ASK, {**FIRST, "content": "one "}, MORE], []).kind == "rewrite"
    assert histories.match([{**SYSTEM, "content": "you search"}, MORE], []).kind == "branch"
    assert histories.match([*longer, ASK], [{"function": {"name": "f"}}]) == ("branch", None, (*longer, ASK))


def test_A7_optional_fields_and_the_spelling_of_arguments_make_no_difference():
    histories = Histories()
    histories.add_response([ASK], [], call('{"x": 1, "y": [2]}'))
    repeated = call('{ "y":[2],"x":1}', content="", refusal=None, annotations=[], audio=None)
    result = {"role": "tool", "content": "3", "tool_call_id": "c"}
    assert histories.match([ASK, repeated, result], []) == ("append", 0, (result,))
    other = call('{"x": 1, "y": [3]}')
    assert histories.match([ASK, other, result], []).after is None


def test_of_two_equal_responses_the_newest_is_continued():
    histories = Histories()
    histories.add_response([ASK], [], FIRST)
    histories.add_response([ASK], [], FIRST)
    assert histories.match([ASK, FIRST, MORE], []) == ("append", 1, (MORE,))
    histories.add_prompt_response()
    assert histories.match([ASK, FIRST, MORE], []) == ("branch", 1, (MORE,))


def test_a_request_that_ends_with_a_response_continues_none():
    histories = Histories()
    histories.add_response([ASK], [], FIRST)
    assert histories.match([ASK, FIRST], []).kind == "rewrite"


def test_templates_read_arguments_as_values_and_content_as_text():
    assert to_template(call('{"x": 1}'))["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert to_template(call("{x"))["tool_calls"][0]["function"]["arguments"] == "{x"
    assert to_template(call("{}"))["content"] == ""
    assert comparable({"role": "user", "content": None, "refusal": None}) == {"role": "user", "content": ""}
    assert content_to_text([{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}], "content") == "ab"
    with pytest.raises(BadInput, match="content has a part of type 'image_url': this model reads text alone"):
        content_to_text([{"type": "image_url", "image_url": {"url": "x"}}], "content")
