"""Questions to a frozen model as a tool: `llm`.

The function that answers is injected: of an engine, a server (`generate.openai_client`), a test. Whatever it raises is
the world's failure and not the policy's, so it keeps its deadline itself and raises when that has passed.
"""

from collections.abc import Callable
from functools import partial

from flowgrpo.contracts import Tool
from flowgrpo.tools.schema import tool
from flowgrpo.tools.toolset import ToolError, ToolFailure, error_sentence

LONGEST = 20_000  # characters of a question


def llm(ask: Callable[[str], str], *, name: str = "llm", pure: bool = False, seconds: float = 120.0) -> Tool:
    """Make the tool `name`, which puts a question to `ask`.

    `pure` where equal questions get equal answers (greedy decoding). `seconds` is the toolset's deadline, after which a
    call is abandoned as an error: let that of `ask` be shorter.
    """
    return tool(partial(put, ask=ask), name=name, pure=pure, seconds=seconds)


def put(question: str, *, ask: Callable[[str], str]) -> str:
    """Asks a language model, which knows nothing of what was said before.

    question: all that it needs to know to answer
    """
    if not question.strip():
        raise ToolError("The question is empty.")
    if len(question) > LONGEST:
        raise ToolError(f"The question has {len(question)} characters, but may have {LONGEST}.")
    try:
        answer = ask(question)
    except ToolFailure:
        raise
    except Exception as error:
        raise ToolFailure(f"the model did not answer: {error_sentence(error) or type(error).__name__}") from error
    if not isinstance(answer, str):
        raise ToolFailure(f"the model answered {type(answer).__name__}, but should answer a text")
    return answer
