"""Questions to a frozen model as a tool: `llm`.

The function that answers is injected: from an engine, a server (`generate.openai_client`), a test. Whatever it raises
is the world's failure and not the policy's, so it enforces its own deadline and raises when that has passed.
"""

from collections.abc import Callable
from functools import partial

from flowgrpo.contracts import Tool
from flowgrpo.tools.schema import tool
from flowgrpo.tools.toolset import ToolError, ToolFailure, error_sentence

MAX_CHARS = 20_000  # characters of a question


def llm(ask: Callable[[str], str], *, name: str = "llm", pure: bool = False, timeout: float = 120.0) -> Tool:
    """The tool `name`, which asks a frozen model.

    Args:
        ask: question -> answer.
        name: of the tool.
        pure: whether equal questions get equal answers (greedy decoding).
        timeout: seconds after which the toolset abandons a call as an error; the deadline of `ask` should be shorter.
    """
    return tool(partial(ask_model, ask=ask), name=name, pure=pure, timeout=timeout)


def ask_model(question: str, *, ask: Callable[[str], str]) -> str:
    """Asks a language model, which knows nothing of what was said before.

    question: all that it needs to know to answer
    """
    if not question.strip():
        raise ToolError("The question is empty.")
    if len(question) > MAX_CHARS:
        raise ToolError(f"The question has {len(question)} characters, but may have {MAX_CHARS}.")
    try:
        answer = ask(question)
    except ToolFailure:
        raise
    except Exception as error:
        raise ToolFailure(f"the model did not answer: {error_sentence(error) or type(error).__name__}") from error
    if not isinstance(answer, str):
        raise ToolFailure(f"the model answered {type(answer).__name__}, but should answer a text")
    return answer
