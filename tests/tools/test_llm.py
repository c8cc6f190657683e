"""A frozen model as a tool: its answers are observations, its troubles are nobody's fault."""

import threading

import pytest

from flowgrpo.contracts import Call, Result
from flowgrpo.tools.llm import llm
from flowgrpo.tools.toolset import ToolFailure, toolset


def ask(answer, question="What is it?", **settings):
    with toolset([llm(answer, **settings)]) as tools:
        return tools.do(Call("tool", settings.get("name", "llm"), {"question": question}))


def test_a_question_is_answered():
    assert ask(lambda prompt: prompt.upper()) == Result("WHAT IS IT?")
    assert ask(lambda prompt: prompt, name="expert") == Result("What is it?")


@pytest.mark.parametrize("question", ["", " \n", "x" * 20_001])
def test_no_question_and_too_long_a_question_are_errors(question):
    seen = []
    result = ask(seen.append, question)
    assert result.error
    assert not seen


@pytest.mark.parametrize(
    ("error", "words"),
    [(ToolFailure("line cut"), "llm: line cut"), (OSError("down"), "llm: the model did not answer: down")],
)
def test_whatever_the_model_raises_is_a_failure(error, words):
    def broken(_):
        raise error

    assert ask(broken) == Result("", failure=words)


def test_an_answer_that_is_no_text_is_a_failure():
    assert ask(lambda _: None).failure == "llm: the model answered NoneType, but should answer a text"


def test_a_model_that_hangs_ends_at_the_deadline():
    release = threading.Event()
    assert ask(lambda _: release.wait() and "", seconds=0.1).error
    release.set()


def test_equal_questions_to_a_greedy_model_are_asked_once():
    seen = []
    with toolset([llm(lambda prompt: seen.append(prompt) or "yes", pure=True)]) as tools:
        for _ in range(3):
            assert tools.do(Call("tool", "llm", {"question": "?"})) == Result("yes")
    assert len(seen) == 1
