"""Find where a request of an agent goes on from: which of the answers that it was given its messages end with (A7).

    histories.place(messages, tools) -> Place       what is recorded already, and what is new
    histories.answered(messages, tools, answer)     one more answer, from which a later request may go on

Messages are compared as values, never as text that is encoded again: what a model said is found by the very message in
which it was handed out. What differs in any letter is not recorded, and begins a context of its own.
"""

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

from flowgrpo.types import BadInput

MAX_DEPTH = 64  # of what is nested in a request, or in the arguments of a call
Message = Mapping[str, Any]
Kind = Literal["first", "append", "rewrite", "branch"]


class Place(NamedTuple):
    """Place of a request's messages among those that are recorded.

    kind    first, append (goes on from the newest answer), branch (from an older one, or with other words from the
            beginning), rewrite (begins as another context did, and says something else later)
    after   number of the answer that it goes on from; None: a context of its own
    new     messages that are not recorded
    """

    kind: Kind
    after: int | None
    new: tuple[Message, ...]


class Histories:
    """The histories of a session: one for each of its answers."""

    def __init__(self) -> None:
        self._answer_at: dict[bytes, int] = {}  # the messages up to an answer -> its number, the newest of equal ones
        self._begun: set[bytes] = set()  # the messages that contexts began with
        self._count = 0

    def place(self, messages: Sequence[Message], tools: Sequence[Any]) -> Place:
        """Find where a request stands."""
        digests = _digests(messages, tools)
        for size in range(len(messages) - 1, 0, -1):
            after = self._answer_at.get(digests[size])
            if after is not None and messages[size - 1]["role"] == "assistant":
                kind = "append" if after == self._count - 1 else "branch"
                return Place(kind, after, tuple(messages[size:]))
        if not self._count:
            return Place("first", None, tuple(messages))
        return Place("rewrite" if digests[_opening(messages)] in self._begun else "branch", None, tuple(messages))

    def answered(self, messages: Sequence[Message], tools: Sequence[Any], answer: Message) -> None:
        """Record an answer to a request."""
        digests = _digests([*messages, answer], tools)
        self._answer_at[digests[-1]] = self._count
        self._begun.add(digests[_opening(messages)])
        self._count += 1

    def answered_prompt(self) -> None:
        """Record an answer to a prompt, which has no messages."""
        self._count += 1


def _opening(messages: Sequence[Message]) -> int:
    """The number of messages up to the first that is no instruction."""
    instructions = ("system", "developer")
    return next((i + 1 for i, one in enumerate(messages) if one["role"] not in instructions), len(messages))


def _digests(messages: Sequence[Message], tools: Sequence[Any]) -> list[bytes]:
    """A digest of the tools and of each number of messages, from none to all."""
    found = [_digest(b"", list(tools))]
    for message in messages:
        found.append(_digest(found[-1], comparable(message)))
    return found


def _digest(before: bytes, value: Any) -> bytes:
    return blake2b(before + json.dumps(value, sort_keys=True).encode(), digest_size=16).digest()


def comparable(message: Message) -> dict[str, Any]:
    """Reduce a message to what tells it from others: fields that clients add or leave out at will are not in it."""
    found = {"role": message["role"], "content": message.get("content") or ""}
    if message.get("tool_calls"):
        found["tool_calls"] = [_comparable_call(call) for call in message["tool_calls"]]
    return found | {name: message[name] for name in ("tool_call_id", "name") if message.get(name)}


def _comparable_call(call: Mapping[str, Any]) -> list[Any]:
    function = call["function"]
    return [call.get("id", ""), function["name"], readable_arguments(function.get("arguments"))]


def readable_arguments(written: Any) -> Any:
    """The arguments of a call as a value; what can't be read as it was written."""
    if not isinstance(written, str):
        return written
    try:
        return json.loads(written)
    except (ValueError, RecursionError):
        return written


def is_deeper(value: Any, most: int) -> bool:
    """Whether objects and lists are nested in a value more than so many deep."""
    level = [value]
    for _ in range(most + 1):
        level = [
            item
            for holder in level
            if isinstance(holder, Mapping | list | tuple)
            for item in (holder.values() if isinstance(holder, Mapping) else holder)
        ]
        if not level:
            return False
    return any(isinstance(item, Mapping | list | tuple) for item in level)


def for_template(message: Message) -> dict[str, Any]:
    """The message as chat templates read it: the arguments of calls are values, and content is a string."""
    found = dict(message) | {"content": message.get("content") or ""}
    if message.get("tool_calls"):
        found["tool_calls"] = [_for_template(call) for call in message["tool_calls"]]
    return found


def _for_template(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    return dict(call) | {"function": function | {"arguments": readable_arguments(function.get("arguments"))}}


def text_of_content(content: Any, where: str) -> str | None:
    """The text of a message's content, which may come in parts; `BadInput` for what is no text."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
        raise BadInput(f"{where} must be a string or a list of parts")
    texts = ("text", "input_text", "output_text")
    for part in content:
        if part.get("type") not in texts or not isinstance(part.get("text"), str):
            raise BadInput(f"{where} has a part of type {part.get('type')!r}: this model reads text alone")
    return "".join(part["text"] for part in content)
