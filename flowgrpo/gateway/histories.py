"""Find which earlier response a request continues, by its messages (A7).

    histories.match(messages, tools) -> HistoryMatch           which messages are new, and what they continue
    histories.add_response(messages, tools, message)           record a response, which later requests may continue

Messages are compared as values and never as re-encoded text: what the model wrote is recognised by the very message in
which it was handed out. A message that differs in a single letter is new, and starts a context of its own.
"""

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

from flowgrpo.types import JSON, BadInput

Message = Mapping[str, JSON]
Kind = Literal["first", "append", "rewrite", "branch"]


class HistoryMatch(NamedTuple):
    """Which recorded response a request continues, and with which messages.

    kind          first; append: continues the newest response; branch: continues an older one, or starts differently
                  from all contexts; rewrite: starts like another context, but differs later
    after         number of the response that it continues; None: it starts a context of its own
    new_messages  messages after that response
    """

    kind: Kind
    after: int | None
    new_messages: tuple[Message, ...]


class Histories:
    """Message histories of a session, one for each response."""

    def __init__(self) -> None:
        self._response_at: dict[bytes, int] = {}  # digest of messages up to a response -> number of the newest such
        self._openings: set[bytes] = set()  # digests of the messages that contexts started with
        self._count = 0

    def match(self, messages: Sequence[Message], tools: Sequence[JSON]) -> HistoryMatch:
        """Find the longest recorded history that the messages start with."""
        digests = _digests(messages, tools)
        for size in range(len(messages) - 1, 0, -1):
            after = self._response_at.get(digests[size])
            if after is not None and messages[size - 1]["role"] == "assistant":
                kind = "append" if after == self._count - 1 else "branch"
                return HistoryMatch(kind, after, tuple(messages[size:]))
        if not self._count:
            return HistoryMatch("first", None, tuple(messages))
        is_rewrite = digests[_opening_length(messages)] in self._openings
        return HistoryMatch("rewrite" if is_rewrite else "branch", None, tuple(messages))

    def add_response(self, messages: Sequence[Message], tools: Sequence[JSON], response: Message) -> None:
        """Record the response to a request, as a message."""
        digests = _digests([*messages, response], tools)
        self._response_at[digests[-1]] = self._count
        self._openings.add(digests[_opening_length(messages)])
        self._count += 1

    def add_prompt_response(self) -> None:
        """Record the response to a text prompt, which has no messages."""
        self._count += 1


def _opening_length(messages: Sequence[Message]) -> int:
    """Number of messages up to and including the first that is no system message."""
    instructions = ("system", "developer")
    return next((i + 1 for i, message in enumerate(messages) if message["role"] not in instructions), len(messages))


def _digests(messages: Sequence[Message], tools: Sequence[JSON]) -> list[bytes]:
    """Digests of the tools with the first 0, 1, ..., n messages."""

    def digest(prefix: bytes, value: JSON) -> bytes:
        return blake2b(prefix + json.dumps(value, sort_keys=True).encode(), digest_size=16).digest()

    digests = [digest(b"", list(tools))]
    for message in messages:
        digests.append(digest(digests[-1], comparable(message)))
    return digests


def comparable(message: Message) -> dict[str, JSON]:
    """The parts of a message that tell it from others, without fields that clients add or leave out at will."""
    parts: dict[str, JSON] = {"role": message["role"], "content": message.get("content") or ""}
    if message.get("tool_calls"):
        parts["tool_calls"] = [
            [call.get("id", ""), call["function"]["name"], parse_arguments(call["function"].get("arguments"))]
            for call in message["tool_calls"]
        ]
    return parts | {name: message[name] for name in ("tool_call_id", "name") if message.get(name)}


def parse_arguments(arguments: Any) -> JSON:
    """The arguments of a tool call as a value; a string that is no JSON stays as it is."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def to_template(message: Message) -> dict[str, JSON]:
    """The message as chat templates read it: content is a string, and arguments of tool calls are values."""
    converted = dict(message) | {"content": message.get("content") or ""}
    if message.get("tool_calls"):
        converted["tool_calls"] = [
            dict(call)
            | {"function": dict(call["function"]) | {"arguments": parse_arguments(call["function"].get("arguments"))}}
            for call in message["tool_calls"]
        ]
    return converted


def content_to_text(content: JSON, place: str) -> str | None:
    """The text of a message's content, which may come in parts; `BadInput` for other types, which names `place`."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
        raise BadInput(f"{place} must be a string or a list of parts")
    text_types = ("text", "input_text", "output_text")
    for part in content:
        if part.get("type") not in text_types or not isinstance(part.get("text"), str):
            raise BadInput(f"{place} has a part of type {part.get('type')!r}: this model reads text alone")
    return "".join(part["text"] for part in content)
