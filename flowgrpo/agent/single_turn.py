"""Ask one question for one answer: `question` makes an environment whose only action is its output.

env = question(text, max_tokens=512);   state, said = env.reset(key, task, do);   state, step = env.step(...)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from flowgrpo.agent.rendering import first_tokens
from flowgrpo.agent.state import small_digest
from flowgrpo.contracts import Do, HostEnv, HostStep, Said
from flowgrpo.data.tokenizer import Text, clean, guard
from flowgrpo.types import Status, Task, check_range


@dataclass(frozen=True)
class QuestionState:
    """A question and, once it is given, its answer."""

    task_id: str
    query: str
    output: str | None = None
    error: bool = False
    status: Status = Status.FINISHED


def question(text: Text, *, max_tokens: int, instructions: str = "", name: str = "question") -> HostEnv:
    """An environment of one action, whose text without the stop token is the output.

    An action that was cut before its stop token is scored as it stands, with TOKEN_LIMIT; an empty one is an error.
    """
    check_range("question", "max_tokens", max_tokens, 1, whole=True)
    asker = Question(text, instructions)
    return HostEnv(
        name=name,
        tools=(),
        turns=1,
        max_tokens=max_tokens,
        stop_ids=text.stop_ids,
        reset=asker.reset,
        step=asker.step,
        anchor=lambda state: small_digest(state.query),
    )


class Question(NamedTuple):
    """An environment of one action."""

    text: Text
    instructions: str

    def reset(self, _key: Any, task: Task, _do: Do) -> tuple[QuestionState, Said]:
        """The instructions and the query as a prompt."""
        state = QuestionState(task.id, clean(task.query))
        content = "\n\n".join(part for part in (self.instructions, state.query) if part)
        return state, Said(first_tokens(guard(self.text), [{"role": "user", "content": content}]), appends=False)

    def step(self, state: QuestionState, tokens: Sequence[int], _do: Do) -> tuple[QuestionState, HostStep]:
        """The action is the output."""
        if state.output is None:
            words, whole = self.text.spoken(tokens)
            output = clean(words)
            error = not whole or not output.strip()
            status = Status.FINISHED if whole else Status.TOKEN_LIMIT
            state = replace(state, output=output, error=error, status=status)
        return state, HostStep(None, True, error=state.error, output=state.output, status=state.status)
