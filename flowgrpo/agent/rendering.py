"""Render a state as the tokens that its role is shown: the context afresh each turn, or one that appends.

    fresh(frame, state, role)      -> (state, Said): the whole prompt, a sequence of its own
    appending(frame, state, role)  -> (state, Said): the first prompt, later only what stands after the last action

Both answer None for `Said` where even an empty memory leaves the prompt too long. Whatever data spells, it is text: all
added tokens are broken up in messages, also those like <think> that a tokenizer does not mark as special.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from flowgrpo.agent.roles import Role
from flowgrpo.agent.state import AgentState, Memory, render
from flowgrpo.contracts import Said
from flowgrpo.data.tokenizer import (
    Conversation,
    Messages,
    Text,
    add_messages,
    encode_marked,
    mark,
    start,
    write_plainly,
)

Tokens = tuple[int, ...]


class Frame(NamedTuple):
    """Settings that all prompts share."""

    text: Text  # guarded
    memory_tokens: int

    def count(self, string: str) -> int:
        """Tokens of `string` as it will stand in a message."""
        return len(encode_marked(self.text, mark(self.text, string)))


Rendering = Callable[[Frame, AgentState, Role], tuple[AgentState, Said | None]]


def fresh(frame: Frame, state: AgentState, role: Role) -> tuple[AgentState, Said | None]:
    """The prompt of this turn alone."""
    tokens = _fit(frame, role, state.memory, state.budget.tokens, lambda seen: _first(frame, state, role, seen))
    return state, None if tokens is None else Said(tokens, appends=False)


def appending(frame: Frame, state: AgentState, role: Role) -> tuple[AgentState, Said | None]:
    """The prompt of the first turn; then the records that are new, after all that was said."""
    talk, memory = state.conversation or Conversation((), ()), state.memory.since(state.shown)

    def write(seen: str) -> Tokens:
        begins = state.conversation is None
        return _first(frame, state, role, seen) if begins else _next(frame, state, role, talk, seen)

    tokens = _fit(frame, role, memory, state.budget.tokens, write)
    if tokens is None:
        return state, None
    budget = state.budget._replace(tokens=state.budget.tokens - len(tokens))
    talk, shown = talk.extend(tokens, chosen=False), len(state.memory.records)
    return replace(state, conversation=talk, shown=shown, budget=budget), Said(tokens)


def first_tokens(text: Text, messages: Messages) -> Tokens:
    """The first prompt, in which data spells no control token; `text` is guarded."""
    return write_plainly(text, messages, lambda text, messages: start(text, messages).tokens)


def _first(frame: Frame, state: AgentState, role: Role, seen: str) -> Tokens:
    return first_tokens(frame.text, role.prompt(state, seen))


def _next(frame: Frame, state: AgentState, role: Role, talk: Conversation, seen: str) -> Tokens:
    """Render the tokens between the last action and the next one, from the last token and the messages alone."""
    # An action without a token is closed as one that was cut.
    last = Conversation((talk.tokens[-1] if talk.chosen[-1] else frame.text.pad_id,), (True,))
    messages = role.follow(state, seen)
    return write_plainly(frame.text, messages, lambda text, messages: add_messages(text, last, messages).tokens[1:])


def _fit(frame: Frame, role: Role, memory: Memory, limit: int, write: Callable[[str], Tokens]) -> Tokens | None:
    """Write the prompt with as much memory as `limit` tokens leave room for; None where it is too long without any."""
    budget = frame.memory_tokens
    while True:
        seen = render(memory, budget=budget, count=frame.count, write_record=role.line)
        tokens = write(seen)
        if len(tokens) <= limit:
            return tokens
        if not seen:
            return None
        budget = min(budget, frame.count(seen)) - (len(tokens) - limit)
