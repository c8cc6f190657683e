"""Render a state as the prompt of a role: a fresh context in each turn, or one that grows.

    fresh_context(settings, state, role)    -> (state, HostObservation): the whole prompt, a context of its own
    growing_context(settings, state, role)  -> (state, HostObservation): the first prompt, then only what follows the
                                               last action

Both return None as the observation if the prompt is too long even with an empty memory. Data is always text: all added
tokens are broken up in messages, even those like <think> that a tokenizer doesn't mark as special.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from flowgrpo.agent.roles import Role
from flowgrpo.agent.state import AgentState, Memory, render_memory
from flowgrpo.contracts import HostObservation
from flowgrpo.data.chat import EMPTY, encode_messages, encode_prompt
from flowgrpo.data.tokenizer import ChatTokenizer, encode_marked, mark

Tokens = tuple[int, ...]


class PromptSettings(NamedTuple):
    """Settings that all prompts share."""

    tokenizer: ChatTokenizer  # guarded
    memory_tokens: int

    def count(self, string: str) -> int:
        """Number of tokens of `string` within a message."""
        return len(encode_marked(self.tokenizer, mark(self.tokenizer, string)))


Rendering = Callable[[PromptSettings, AgentState, Role], tuple[AgentState, HostObservation | None]]


def fresh_context(settings: PromptSettings, state: AgentState, role: Role) -> tuple[AgentState, HostObservation | None]:
    """The whole prompt of this turn, with the whole memory."""

    def write(memory: str) -> Tokens:
        return encode_prompt(settings.tokenizer, role.prompt(state, memory))

    tokens = _fit_memory(settings, role, state.memory, state.budget.tokens, write)
    return state, None if tokens is None else HostObservation(tokens, extends_context=False)


def growing_context(
    settings: PromptSettings, state: AgentState, role: Role
) -> tuple[AgentState, HostObservation | None]:
    """The whole prompt in the first turn; then the new records, appended to the conversation."""
    conversation = state.conversation or EMPTY

    def write(memory: str) -> Tokens:
        if state.conversation is None:
            return encode_prompt(settings.tokenizer, role.prompt(state, memory))
        # An action without a token is closed like one that was cut.
        last_token = conversation.tokens[-1] if conversation.chosen[-1] else settings.tokenizer.pad_id
        return encode_messages(settings.tokenizer, last_token, role.follow_up(state, memory))

    tokens = _fit_memory(settings, role, state.memory.since(state.shown), state.budget.tokens, write)
    if tokens is None:
        return state, None
    state = replace(
        state,
        conversation=conversation.extend(tokens, chosen=False),
        shown=len(state.memory.records),
        budget=state.budget._replace(tokens=state.budget.tokens - len(tokens)),
    )
    return state, HostObservation(tokens)


def _fit_memory(
    settings: PromptSettings, role: Role, memory: Memory, limit: int, write: Callable[[str], Tokens]
) -> Tokens | None:
    """The prompt with as much memory as fits `limit` tokens; None if it is too long without any."""
    budget = settings.memory_tokens
    while True:
        text = render_memory(memory, budget=budget, count=settings.count, write_record=role.write_record)
        tokens = write(text)
        if len(tokens) <= limit:
            return tokens
        if not text:
            return None
        budget = min(budget, settings.count(text)) - (len(tokens) - limit)
