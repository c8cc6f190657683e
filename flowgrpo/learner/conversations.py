"""Preferences and demonstrations that people wrote: read from JSONL as trajectories, and laid out in batches.

    {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}                                           a preference
    {"messages": [{"role": "user", ...}], "chosen": [{"role": "assistant", ...}, ...], "rejected": ...}      another
    {"messages": [{"role": "user", ...}, {"role": "assistant", ...}, {"role": "tool", ...}, ...]}  a demonstration
    {"prompt": "2 + 2?", "completion": "4"}                                                        another

A prompt is a text, which a user says, or messages; an answer is a text, which the assistant says, or messages of which
the first is the assistant's. Without a prompt, `chosen` and `rejected` are whole conversations that begin alike.
`tools` may hold schemas. What the assistant says in an answer is what is learned, and nothing else (F6); each of its
messages is a turn and ends with the token that the chat template closes it with. Null is the same as missing, and
other fields are not read. A bad record is a `BadInput` with file, line and field.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flowgrpo.algorithms.dpo import dpo
from flowgrpo.batching.collate import collate
from flowgrpo.batching.packing import pack
from flowgrpo.batching.prefix_tree import pack_tree
from flowgrpo.data.task_files import json_lines
from flowgrpo.data.tokenizer import Text, add_action, add_messages, closing_id, start
from flowgrpo.types import BadInput, Batch, Trajectory, Turn

Messages = list[Mapping[str, Any]]
Pair = tuple[Trajectory, Trajectory]
ASSISTANT = "assistant"


# Files --------------------------------------------------------------------------------------------------


def read_preferences(path: str | Path, text: Text) -> list[Pair]:
    """The pairs of a file, what was chosen first: outcome 1 against 0, and a group for each pair."""
    return _read(Path(path), text, _pair, "a preference is {…} with prompt or messages, chosen and rejected")


def read_demonstrations(path: str | Path, text: Text) -> list[Trajectory]:
    """The demonstrations of a file, each a group of its own, with outcome 1."""
    return _read(Path(path), text, _demonstration, "a demonstration is {…} with messages, or prompt and completion")


def _read(path: Path, text: Text, make: Callable[["Line"], Any], wanted: str) -> list:
    if path.suffix not in (".jsonl", ".ndjson") or not path.is_file():
        raise BadInput(f"{path} is no .jsonl file: give the path of one, where {wanted}")
    closing = closing_id(text)
    close = text.stop_ids[:1] if closing is None else (closing,)
    if not close:
        raise BadInput(f"the tokenizer of {text.source} has no token that ends a turn: give it an eos_token")
    made = []
    for record in json_lines(path, wanted):
        if isinstance(record.content, str):
            raise BadInput(f"{record.place}: {record.content}")
        content = {name: value for name, value in record.content.items() if value is not None}
        made.append(make(Line(record.place, content, len(made), text, close)))
    if not made:
        raise BadInput(f"{path} holds no line: {wanted}")
    return made


# Batches ------------------------------------------------------------------------------------------------


def preference_rows(pairs: Sequence[Pair], *, row_length: int, rows: int | None = None, shares: bool = False) -> Batch:
    """The pairs as a batch for `dpo`: advantage 1 for what was chosen and -1 for what was rejected.

    Where the policy `shares` prefixes, rows are trees, in which the prompt of a pair is there once.
    """
    if not pairs:
        raise BadInput("there is no preference to learn from")
    # Numbered again, so that a pair which is there twice counts twice.
    records, algorithm = [replace(record, group=i) for i, pair in enumerate(pairs) for record in pair], dpo()
    trajectories = collate(records)
    sides, weights = (np.asarray(credit(trajectories)) for credit in (algorithm.advantages, algorithm.weights))
    return (pack_tree if shares else pack)(trajectories, sides, weights, row_length=row_length, rows=rows)


def tokens_of(record: Trajectory) -> int:
    """Tokens of a conversation: the row that it needs."""
    return sum(len(turn.tokens) for turn in record.turns)


# Lines --------------------------------------------------------------------------------------------------


class Line(NamedTuple):
    """A record, its place and number, and what writes it down as tokens."""

    place: str  # "pairs.jsonl, line 3"
    content: Mapping[str, Any]
    number: int
    text: Text
    close: tuple[int, ...]  # ends a turn

    def bad(self, field: str, why: str) -> BadInput:
        """The error about a field."""
        return BadInput(f"{self.place}: field {field!r} {why}")


def _pair(line: Line) -> Pair:
    prompt = _prompt(line, "prompt", "messages")
    chosen, rejected = (_said(line, name, ASSISTANT) for name in ("chosen", "rejected"))
    if prompt is None:
        prompt, chosen, rejected = _parted(line, chosen, rejected)
    if chosen == rejected:
        raise line.bad("rejected", "is the same as 'chosen': remove the line")
    one = _trajectory(line, "chosen", prompt, chosen, outcome=1.0)
    return one, _trajectory(line, "rejected", prompt, rejected, outcome=0.0)


def _demonstration(line: Line) -> Trajectory:
    if "messages" not in line.content:
        prompt = _prompt(line, "prompt")
        if prompt is None:
            raise line.bad("messages", f"is missing ({_there(line)}): add it, or prompt and completion")
        return _trajectory(line, "completion", prompt, _said(line, "completion", ASSISTANT), outcome=1.0)
    messages = _said(line, "messages", "user")
    first = next((i for i, message in enumerate(messages) if message["role"] == ASSISTANT), len(messages))
    if first == 0:
        raise line.bad("messages", "begins with the assistant: put before it what it answers")
    return _trajectory(line, "messages", messages[:first], messages[first:], outcome=1.0)


def _prompt(line: Line, *names: str) -> Messages | None:
    """Read the messages to be answered from the first of these fields that is there; None where none is."""
    name = next((name for name in names if name in line.content), None)
    if name is None:
        return None
    messages = _said(line, name, "user")
    if messages[-1]["role"] == ASSISTANT:
        raise line.bad(name, "ends with the assistant, but it is the assistant who answers: leave that message out")
    return messages


def _parted(line: Line, chosen: Messages, rejected: Messages) -> tuple[Messages, Messages, Messages]:
    """Two whole conversations as what they have in common and how each goes on."""
    pairs = zip(chosen, rejected, strict=False)
    same = next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(chosen), len(rejected)))
    ends = chosen[same:], rejected[same:]
    if not same or any(end and end[0]["role"] != ASSISTANT for end in ends):
        raise line.bad("prompt", f"is missing ({_there(line)}), and 'chosen' and 'rejected' don't begin alike: add it")
    return chosen[:same], *ends


def _said(line: Line, name: str, role: str) -> Messages:
    """The messages of a field; a text is what this role says."""
    if name not in line.content:
        raise line.bad(name, f"is missing ({_there(line)}): add it")
    value: Any = line.content[name]
    if isinstance(value, str) and (value.strip() or role == ASSISTANT):
        return [{"role": role, "content": value}]
    listed = value if isinstance(value, list) else []
    if not listed or not all(isinstance(one, Mapping) and isinstance(one.get("role"), str) for one in listed):
        raise line.bad(name, f"is {repr(value)[:60]}, but must be a text or a list of {{'role': ..., 'content': ...}}")
    return listed


def _there(line: Line) -> str:
    return f"there are: {', '.join(map(repr, line.content)) or 'none'}"


# From messages to tokens ----------------------------------------------------------------------------------


def _trajectory(line: Line, name: str, prompt: Messages, answer: Messages, *, outcome: float) -> Trajectory:
    """The conversation; each message of the assistant in the answer is a turn."""
    turns, text, begin = [], line.text, 0
    try:
        conversation = start(text, prompt, line.content.get("tools"))
        for context, words in _exchanges(line, name, answer):
            conversation = add_messages(text, conversation, context) if context else conversation
            conversation = add_action(conversation, [*text.encode(words), *line.close])
            tokens, chosen = (np.array(x[begin:]) for x in (conversation.tokens, conversation.chosen))
            turns.append(Turn(tokens.astype(np.int32), chosen, np.zeros(len(tokens), np.float32)))
            begin = len(conversation.tokens)
    except BadInput as error:
        if str(error).startswith(line.place):
            raise
        raise BadInput(f"{line.place}, field {name!r}: {error}") from None
    return Trajectory(turns, outcome, line.number, correct=outcome > 0)


def _exchanges(line: Line, name: str, answer: Messages) -> list[tuple[Messages, str]]:
    """Split an answer into pairs, one a message of the assistant: the messages since the one before, and its words."""
    exchanges: list[tuple[Messages, str]] = []
    context: Messages = []
    for number, message in enumerate(answer):
        if message["role"] != ASSISTANT:
            context.append(message)
            continue
        if bool(exchanges) != bool(context):
            why = "follows another one of its own" if exchanges else "must come first"
            raise line.bad(name, f"has a message {number} where the assistant {why}")
        if not isinstance(message.get("content"), str) or message.get("tool_calls"):
            raise line.bad(
                name, f"has a message {number} of the assistant that is no text: write calls as it says them"
            )
        exchanges.append((context, message["content"]))
        context = []
    if context or not exchanges:
        raise line.bad(name, "must end with what the assistant says")
    return exchanges
