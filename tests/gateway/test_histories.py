"""The place from which a request goes on: found by the messages that were handed out, and by nothing else (A7)."""

import pytest

from flowgrpo.gateway.histories import Histories, comparable, for_template, text_of_content
from flowgrpo.types import BadInput

SYSTEM = {"role": "system", "content": "s"}
ASK, MORE = ({"role": "user", "content": words} for words in "ab")
SAID, OTHER = ({"role": "assistant", "content": words} for words in ("one", "two"))


def call(arguments: str, **more) -> dict:
    function = {"name": "f", "arguments": arguments}
    calls = [{"id": "c", "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls} | more


def test_A7_what_goes_on_from_the_newest_answer_appends_and_what_differs_begins_a_context():
    histories = Histories()
    assert histories.place([SYSTEM, ASK], []) == ("first", None, (SYSTEM, ASK))
    histories.answered([SYSTEM, ASK], [], SAID)
    assert histories.place([SYSTEM, ASK, SAID, MORE], []) == ("append", 0, (MORE,))
    histories.answered([SYSTEM, ASK, SAID, MORE], [], OTHER)
    longer = [SYSTEM, ASK, SAID, MORE, OTHER]
    assert histories.place([*longer, ASK, MORE], []) == ("append", 1, (ASK, MORE))
    assert histories.place([SYSTEM, ASK, SAID, ASK], []) == ("branch", 0, (ASK,))
    assert histories.place([SYSTEM, ASK, MORE], []).kind == "rewrite"
    assert histories.place([SYSTEM, ASK, {**SAID, "content": "one "}, MORE], []).kind == "rewrite"
    assert histories.place([{**SYSTEM, "content": "you search"}, MORE], []).kind == "branch"
    assert histories.place([*longer, ASK], [{"function": {"name": "f"}}]) == ("branch", None, (*longer, ASK))


def test_A7_fields_that_clients_add_or_leave_out_and_the_spelling_of_arguments_make_no_difference():
    histories = Histories()
    histories.answered([ASK], [], call('{"x": 1, "y": [2]}'))
    again = call('{ "y":[2],"x":1}', content="", refusal=None, annotations=[], audio=None)
    result = {"role": "tool", "content": "3", "tool_call_id": "c"}
    assert histories.place([ASK, again, result], []) == ("append", 0, (result,))
    other = call('{"x": 1, "y": [3]}')
    assert histories.place([ASK, other, result], []).after is None


def test_the_same_answer_twice_is_gone_on_from_where_it_was_given_last():
    histories = Histories()
    histories.answered([ASK], [], SAID)
    histories.answered([ASK], [], SAID)
    assert histories.place([ASK, SAID, MORE], []) == ("append", 1, (MORE,))
    histories.answered_prompt()
    assert histories.place([ASK, SAID, MORE], []) == ("branch", 1, (MORE,))


def test_an_answer_that_nothing_follows_is_no_request_to_go_on():
    histories = Histories()
    histories.answered([ASK], [], SAID)
    assert histories.place([ASK, SAID], []).kind == "rewrite"


def test_templates_read_arguments_as_values_and_content_as_text():
    assert for_template(call('{"x": 1}'))["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert for_template(call("{x"))["tool_calls"][0]["function"]["arguments"] == "{x"
    assert for_template(call("{}"))["content"] == ""
    assert comparable({"role": "user", "content": None, "refusal": None}) == {"role": "user", "content": ""}
    assert text_of_content([{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}], "content") == "ab"
    with pytest.raises(BadInput, match="content has a part of type 'image_url': this model reads text alone"):
        text_of_content([{"type": "image_url", "image_url": {"url": "x"}}], "content")
