"""One question, one answer: a task's query flows in as a prompt, and the decoded action flows out as the output.

env = question(text, max_tokens=512);   state, said = env.reset(key, task, do);   state, step = env.step(...)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import Any

from flowgrpo.agent.rendering import first_tokens
from flowgrpo.contracts import Do, HostEnv, HostStep, Said
from flowgrpo.text import Text, clean, guard
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
    return HostEnv(
        name=name,
        tools=(),
        turns=1,
        max_tokens=max_tokens,
        stop_ids=text.stop_ids,
        reset=partial(_reset, guard(text), instructions),
        step=partial(_step, text),
        anchor=_anchor,
    )


def _reset(text: Text, instructions: str, _key: Any, task: Task, _do: Do) -> tuple[QuestionState, Said]:
    state = QuestionState(task.id, clean(task.query))
    content = "\n\n".join(part for part in (instructions, state.query) if part)
    return state, Said(first_tokens(text, [{"role": "user", "content": content}]), appends=False)


def _step(text: Text, state: QuestionState, tokens: Sequence[int], _do: Do) -> tuple[QuestionState, HostStep]:
    if state.output is None:
        sampled = [int(i) for i in tokens]
        whole = bool(sampled) and sampled[-1] in text.stop_ids
        output = clean(text.decode(i for i in (sampled[:-1] if whole else sampled) if i < text.vocab_size))
        error = not whole or not output.strip()
        status = Status.FINISHED if whole else Status.TOKEN_LIMIT
        state = replace(state, output=output, error=error, status=status)
    return state, HostStep(None, True, error=state.error, output=state.output, status=state.status)


def _anchor(state: QuestionState) -> int:
    return int.from_bytes(blake2b(state.query.encode(), digest_size=4).digest(), "little") & 0x7FFFFFFF
