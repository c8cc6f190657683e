"""Conversations of a host environment with its model: prompts, new messages by exact ids, room for an action.

    chat = make_chat("env", tokenizer, max_tokens=80, context_tokens=600)
    conversation = chat.begin(messages)                                  # the first prompt
    conversation = conversation.extend(sampled, chosen=True)             # an action, as it was sampled
    ids = chat.add(conversation, messages)                               # what follows it, and nothing before (A5)
    conversation = conversation.extend(ids, chosen=False)
    chat.is_full(conversation) or chat.room(conversation)                # no room for an action, or its most tokens

What a user, a tool or an environment wrote is data: no control token in it is recognised.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from flowgrpo.data.tokenizer import (
    ChatTokenizer,
    Conversation,
    Messages,
    add_messages,
    clean,
    guard,
    start_conversation,
    tokenize_safely,
)
from flowgrpo.data.tool_calls import ToolCallFormat, tool_call_format
from flowgrpo.types import JSON, BadInput, check_range

EMPTY = Conversation((), ())


@dataclass(frozen=True)
class Chat:
    """The model's side of conversations."""

    tokenizer: ChatTokenizer
    guarded: ChatTokenizer  # which writes data
    call_format: ToolCallFormat | None  # of tool calls; None: the template has no place for tools
    max_tokens: int  # of an action
    context_tokens: int  # of a conversation with all its actions

    def begin(self, messages: Messages, tools: Sequence[JSON] = ()) -> Conversation:
        """A conversation of messages and the schemas of tools, by the chat template."""
        if tools and self.call_format is None:
            raise BadInput(f"the chat template of {self.tokenizer.source} has no place for tools: leave them out")
        return EMPTY.extend(encode_prompt(self.guarded, messages, tools), chosen=False)

    def add(self, conversation: Conversation, messages: Messages) -> tuple[int, ...]:
        """Ids of messages that follow a conversation's last action."""
        return encode_messages(self.guarded, conversation.tokens[-1], messages)

    def is_full(self, conversation: Conversation) -> bool:
        """Whether there is no room for an action."""
        return len(conversation.tokens) >= self.context_tokens

    def room(self, conversation: Conversation) -> int:
        """Maximal number of tokens of the next action."""
        return min(self.max_tokens, self.context_tokens - len(conversation.tokens))


def make_chat(
    owner: str,
    tokenizer: ChatTokenizer,
    *,
    turns: int,
    max_tokens: int,
    context_tokens: int,
    call_format: ToolCallFormat | None = None,
) -> Chat:
    """A `Chat`; raises `BadInput` for sizes that hold no turn.

    Args:
        owner: for messages.
        tokenizer: with the chat template.
        turns: maximal number of actions.
        max_tokens: of an action.
        context_tokens: of a conversation with all its actions.
        call_format: of tool calls; None: the one that the chat template teaches.
    """
    for setting, value in (("turns", turns), ("max_tokens", max_tokens)):
        check_range(owner, setting, value, 1, whole=True)
    if context_tokens <= max_tokens:
        raise BadInput(f"context_tokens={context_tokens} must be greater than max_tokens={max_tokens}, which it holds")
    call_format = call_format or tool_call_format(tokenizer.hf_tokenizer.chat_template)
    return Chat(tokenizer, guard(tokenizer), call_format, max_tokens, context_tokens)


def encode_prompt(guarded: ChatTokenizer, messages: Messages, tools: Sequence[JSON] = ()) -> tuple[int, ...]:
    """Ids of a conversation's first messages, in which data has no control token."""
    schemas = list(tools) or None
    return tokenize_safely(guarded, messages, lambda chat, written: start_conversation(chat, written, schemas).tokens)


def encode_messages(guarded: ChatTokenizer, last: int, messages: Messages) -> tuple[int, ...]:
    """Ids of messages after an action whose last token is `last`, in which data has no control token.

    That token is enough to close the action, or to see that it is closed.
    """
    action = Conversation((last,), (True,))
    return tokenize_safely(guarded, messages, lambda chat, written: add_messages(chat, action, written).tokens[1:])


def read_action(tokenizer: ChatTokenizer, tokens: Sequence[int]) -> tuple[str, bool]:
    """(valid text of an action without its stop token, whether it had one)."""
    text, is_complete = tokenizer.decode_action(tokens)
    return clean(text), is_complete
