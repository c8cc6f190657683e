"""A frozen model as a tool: its answers are observations, its troubles are nobody's fault."""

from unittest.mock import Mock

import pytest

from flowgrpo.contracts import Call, Result
from flowgrpo.tools.llm import llm
from flowgrpo.tools.toolset import ToolFailure, toolset


def ask(answer, question="What is it?", **settings):
    with toolset([llm(answer, **settings)]) as tools:
        return tools.call_tool(Call("tool", settings.get("name", "llm"), {"question": question}))


def test_a_question_is_answered_by_the_model_of_that_name():
    assert ask(str.upper) == Result("WHAT IS IT?")
    assert ask(str.upper, name="expert") == Result("WHAT IS IT?")


@pytest.mark.parametrize("question", ["", " \n", "x" * 20_001])
def test_no_question_and_too_long_a_question_are_errors(question):
    questions = []
    assert ask(questions.append, question).error
    assert not questions


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ([ToolFailure("line cut")], "llm: line cut"),
        ([OSError("down")], "llm: the model did not answer: down"),
        ([None], "llm: the model answered NoneType, but should answer a text"),
    ],
)
def test_a_failing_model_is_a_failure(answer, words):
    assert ask(Mock(side_effect=answer)) == Result("", failure=words)
