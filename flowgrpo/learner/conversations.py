"""Preferences and demonstrations from JSONL files: read as trajectories, and packed into batches.

    {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}                                           a preference
    {"messages": [{"role": "user", ...}], "chosen": [{"role": "assistant", ...}, ...], "rejected": ...}      another
    {"messages": [{"role": "user", ...}, {"role": "assistant", ...}, {"role": "tool", ...}, ...]}  a demonstration
    {"prompt": "2 + 2?", "completion": "4"}                                                        another

A prompt is a text (a user message) or messages; an answer is a text (an assistant message) or messages of which the
first is the assistant's. Without a prompt, `chosen` and `rejected` are whole conversations with a common prefix.
`tools` may contain schemas. Only assistant messages of an answer are learned (F6); each is a turn and ends with the
token that closes it in the chat template. Null counts as missing, and other fields are ignored. The error of a bad
record names file, line and field.
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
from flowgrpo.data.task_files import read_json_lines
from flowgrpo.data.tokenizer import ChatTokenizer, add_action, add_messages, closing_id, start_conversation
from flowgrpo.types import BadInput, Batch, Trajectory, Turn

Messages = list[Mapping[str, Any]]
Pair = tuple[Trajectory, Trajectory]
ASSISTANT = "assistant"


# Files --------------------------------------------------------------------------------------------------


def read_preferences(path: str | Path, text: ChatTokenizer) -> list[Pair]:
    """The (chosen, rejected) pairs of a file: outcomes 1 and 0, and one group per pair."""
    return _read(Path(path), text, _pair, "a preference is {…} with prompt or messages, chosen and rejected")


def read_demonstrations(path: str | Path, text: ChatTokenizer) -> list[Trajectory]:
    """The demonstrations of a file, one group each, with outcome 1."""
    return _read(Path(path), text, _demonstration, "a demonstration is {…} with messages, or prompt and completion")


def _read(path: Path, text: ChatTokenizer, make: Callable[["Line"], Any], form: str) -> list:
    if path.suffix not in (".jsonl", ".ndjson") or not path.is_file():
        raise BadInput(f"{path} is no .jsonl file: give the path of one, where {form}")
    closing = closing_id(text)
    close = text.stop_ids[:1] if closing is None else (closing,)
    if not close:
        raise BadInput(f"the tokenizer of {text.source} has no token that ends a turn: give it an eos_token")
    records = []
    for record in read_json_lines(path, form):
        if isinstance(record.content, str):
            raise BadInput(f"{record.place}: {record.content}")
        content = {name: value for name, value in record.content.items() if value is not None}
        records.append(make(Line(record.place, content, len(records), text, close)))
    if not records:
        raise BadInput(f"{path} holds no line: {form}")
    return records


# Batches ------------------------------------------------------------------------------------------------


def preference_rows(
    pairs: Sequence[Pair], *, row_length: int, rows: int | None = None, use_trees: bool = False
) -> Batch:
    """The pairs as a batch for `dpo`: advantage 1 for chosen and -1 for rejected answers.

    With `use_trees` rows are prefix trees, which hold the prompt of a pair once.
    """
    if not pairs:
        raise BadInput("there is no preference to learn from")
    # New group numbers, so that a duplicate pair counts twice.
    records, algorithm = [replace(record, group=i) for i, pair in enumerate(pairs) for record in pair], dpo()
    trajectories = collate(records)
    sides, weights = (np.asarray(function(trajectories)) for function in (algorithm.advantages, algorithm.weights))
    return (pack_tree if use_trees else pack)(trajectories, sides, weights, row_length=row_length, rows=rows)


def tokens_of(record: Trajectory) -> int:
    """Number of tokens of a conversation, which is the row length that it needs."""
    return sum(len(turn.tokens) for turn in record.turns)


# Lines --------------------------------------------------------------------------------------------------


class Line(NamedTuple):
    """A record of a file with its place and index, and the tokenizer that encodes it."""

    place: str  # "pairs.jsonl, line 3"
    content: Mapping[str, Any]
    number: int
    text: ChatTokenizer
    close: tuple[int, ...]  # tokens that end a turn

    def error(self, field: str, problem: str) -> BadInput:
        """The error about a field."""
        return BadInput(f"{self.place}: field {field!r} {problem}")


def _pair(line: Line) -> Pair:
    prompt = _prompt(line, "prompt", "messages")
    chosen, rejected = (_read_messages(line, name, ASSISTANT) for name in ("chosen", "rejected"))
    if prompt is None:
        prompt, chosen, rejected = _split_common_prefix(line, chosen, rejected)
    if chosen == rejected:
        raise line.error("rejected", "is the same as 'chosen': remove the line")
    return _trajectory(line, "chosen", prompt, chosen, outcome=1.0), _trajectory(
        line, "rejected", prompt, rejected, outcome=0.0
    )


def _demonstration(line: Line) -> Trajectory:
    if "messages" not in line.content:
        prompt = _prompt(line, "prompt")
        if prompt is None:
            raise line.error("messages", f"is missing ({_fields(line)}): add it, or prompt and completion")
        return _trajectory(line, "completion", prompt, _read_messages(line, "completion", ASSISTANT), outcome=1.0)
    messages = _read_messages(line, "messages", "user")
    first = next((i for i, message in enumerate(messages) if message["role"] == ASSISTANT), len(messages))
    if first == 0:
        raise line.error("messages", "begins with the assistant: put before it what it answers")
    return _trajectory(line, "messages", messages[:first], messages[first:], outcome=1.0)


def _prompt(line: Line, *names: str) -> Messages | None:
    """The prompt messages, from the first of these fields that exists; None if none does."""
    name = next((name for name in names if name in line.content), None)
    if name is None:
        return None
    messages = _read_messages(line, name, "user")
    if messages[-1]["role"] == ASSISTANT:
        raise line.error(name, "ends with the assistant, but it is the assistant who answers: leave that message out")
    return messages


def _split_common_prefix(line: Line, chosen: Messages, rejected: Messages) -> tuple[Messages, Messages, Messages]:
    """(common prefix, rest of chosen, rest of rejected) of two whole conversations."""
    pairs = zip(chosen, rejected, strict=False)
    size = next((i for i, (message, other) in enumerate(pairs) if message != other), min(len(chosen), len(rejected)))
    answers = chosen[size:], rejected[size:]
    if not size or any(answer and answer[0]["role"] != ASSISTANT for answer in answers):
        raise line.error(
            "prompt", f"is missing ({_fields(line)}), and 'chosen' and 'rejected' don't begin alike: add it"
        )
    return chosen[:size], *answers


def _read_messages(line: Line, name: str, role: str) -> Messages:
    """The messages of a field; a text is one message of `role`."""
    if name not in line.content:
        raise line.error(name, f"is missing ({_fields(line)}): add it")
    value: Any = line.content[name]
    if isinstance(value, str) and (value.strip() or role == ASSISTANT):
        return [{"role": role, "content": value}]
    messages = value if isinstance(value, list) else []
    if not messages or not all(isinstance(item, Mapping) and isinstance(item.get("role"), str) for item in messages):
        raise line.error(
            name, f"is {repr(value)[:60]}, but must be a text or a list of {{'role': ..., 'content': ...}}"
        )
    return messages


def _fields(line: Line) -> str:
    return f"there are: {', '.join(map(repr, line.content)) or 'none'}"


# From messages to tokens ----------------------------------------------------------------------------------


def _trajectory(line: Line, name: str, prompt: Messages, answer: Messages, *, outcome: float) -> Trajectory:
    """The conversation as a trajectory; each assistant message of the answer is a turn."""
    turns, text, start = [], line.text, 0
    try:
        conversation = start_conversation(text, prompt, line.content.get("tools"))
        for context, words in _exchanges(line, name, answer):
            conversation = add_messages(text, conversation, context) if context else conversation
            conversation = add_action(conversation, [*text.encode(words), *line.close])
            tokens, chosen = (np.array(x[start:]) for x in (conversation.tokens, conversation.chosen))
            turns.append(Turn(tokens.astype(np.int32), chosen, np.zeros(len(tokens), np.float32)))
            start = len(conversation.tokens)
    except BadInput as error:
        if str(error).startswith(line.place):
            raise
        raise BadInput(f"{line.place}, field {name!r}: {error}") from None
    return Trajectory(turns, outcome, line.number, correct=outcome > 0)


def _exchanges(line: Line, name: str, answer: Messages) -> list[tuple[Messages, str]]:
    """(messages since the previous one, its text) for each assistant message of an answer."""
    exchanges: list[tuple[Messages, str]] = []
    context: Messages = []
    for number, message in enumerate(answer):
        if message["role"] != ASSISTANT:
            context.append(message)
            continue
        if bool(exchanges) != bool(context):
            why = "follows another one of its own" if exchanges else "must come first"
            raise line.error(name, f"has a message {number} where the assistant {why}")
        if not isinstance(message.get("content"), str) or message.get("tool_calls"):
            raise line.error(
                name, f"has a message {number} of the assistant that is no text: write calls as it says them"
            )
        exchanges.append((context, message["content"]))
        context = []
    if context or not exchanges:
        raise line.error(name, "must end with what the assistant says")
    return exchanges
