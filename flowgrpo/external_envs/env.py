"""An external environment as a host environment: a conversation whose effects an `EnvProcess` runs.

with EnvProcess("gymnasium", "Taxi-v3") as process:
    env = external_env(text, turns=20, max_tokens=16, context_tokens=1024)
    hosted(env, engine.submit, call_tool=process.call_tool)(tasks, keys, groups)
"""

from collections.abc import Sequence

from flowgrpo.contracts import HostEnv
from flowgrpo.data.tokenizer import ChatTokenizer
from flowgrpo.data.tool_calls import ToolCallFormat
from flowgrpo.rollout.conversation_env import conversation_env


def external_env(
    tokenizer: ChatTokenizer,
    *,
    turns: int,
    max_tokens: int,
    context_tokens: int,
    instructions: str = "",
    tools: Sequence[str] = (),
    name: str = "env",
    call_format: ToolCallFormat | None = None,
) -> HostEnv:
    """The environment behind effects of kind "env", which an `EnvProcess` runs.

    Args:
        tokenizer: with the chat template.
        turns: maximal number of actions.
        max_tokens: of an action.
        context_tokens: of a conversation with all its actions.
        instructions: stand before the query and the first observation.
        tools: names of the tools whose calls are counted; `EnvProcess.check` returns all of them.
        name: for messages and metrics.
        call_format: of tool calls; None: the one that the chat template teaches.
    """
    return conversation_env(
        tokenizer,
        turns=turns,
        max_tokens=max_tokens,
        context_tokens=context_tokens,
        instructions=instructions,
        tools=tools,
        name=name,
        call_format=call_format,
    )
