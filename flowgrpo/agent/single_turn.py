"""Single-turn question answering: `single_turn` makes an environment whose only action is its output.

env = single_turn(tokenizer, max_tokens=512)
state, observation = env.reset(key, task, call_tool)
state, step = env.step(state, tokens, call_tool)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from flowgrpo.agent.state import digest31
from flowgrpo.contracts import HostEnv, HostObservation, HostStep, ToolRunner
from flowgrpo.data.chat import encode_prompt, read_action
from flowgrpo.data.tokenizer import ChatTokenizer, clean, guard
from flowgrpo.types import Status, Task, check_range


@dataclass(frozen=True)
class SingleTurnState:
    """A question and, after the action, its answer."""

    task_id: str
    query: str
    output: str | None = None
    error: bool = False
    status: Status = Status.FINISHED


def single_turn(
    tokenizer: ChatTokenizer, *, max_tokens: int, instructions: str = "", name: str = "question"
) -> HostEnv:
    """An environment of one action, whose text without the stop token is the output.

    An action that was cut before its stop token is scored as it is, with TOKEN_LIMIT; an empty one is an error.

    Args:
        tokenizer: that of the policy.
        max_tokens: of the action, its stop token included.
        instructions: text before the query.
        name: of the environment, for messages and metrics.
    """
    check_range("single_turn", "max_tokens", max_tokens, 1, whole=True)
    env = SingleTurn(tokenizer, instructions)
    return HostEnv(
        name=name,
        tools=(),
        max_turns=1,
        max_tokens=max_tokens,
        stop_ids=tokenizer.stop_ids,
        reset=env.reset,
        step=env.step,
        anchor=lambda state: digest31(state.query),
    )


class SingleTurn(NamedTuple):
    """The functions of a single-turn environment."""

    tokenizer: ChatTokenizer
    instructions: str

    def reset(self, _key: Any, task: Task, _call_tool: ToolRunner) -> tuple[SingleTurnState, HostObservation]:
        """The instructions and the query as a prompt."""
        state = SingleTurnState(task.id, clean(task.query))
        content = "\n\n".join(part for part in (self.instructions, state.query) if part)
        prompt = encode_prompt(guard(self.tokenizer), [{"role": "user", "content": content}])
        return state, HostObservation(prompt, extends_context=False)

    def step(
        self, state: SingleTurnState, tokens: Sequence[int], _call_tool: ToolRunner
    ) -> tuple[SingleTurnState, HostStep]:
        """The action's text is the output."""
        if state.output is None:
            output, is_complete = read_action(self.tokenizer, tokens)
            error = not is_complete or not output.strip()
            status = Status.FINISHED if is_complete else Status.TOKEN_LIMIT
            state = replace(state, output=output, error=error, status=status)
        return state, HostStep(None, True, error=state.error, output=state.output, status=state.status)
