"""A scalar-head reward model: question and answer as a conversation flow in, the model's score flows out.

    task, answer -> template([user: query, assistant: answer]) -> value = score after its last token

The score has no bounds and no unit; group statistics take it as it is. The scoring function is injected (token lists
in, one number each out), so any model can stand behind it; `models.reward_model` reads published ones.

Control tokens that query or answer spell out are broken up; a text that spells one in another way, which the tokenizer
normalises into it, is broken up after every character. Of a long answer the middle is left out.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from flowgrpo.contracts import Reward, Scored
from flowgrpo.rewards.prompts import (
    LEAST_BUDGET,
    LENGTHS,
    TokenLists,
    control_ids,
    encode_marked,
    first_line,
    in_fixed_shapes,
    mark,
    shorten,
)
from flowgrpo.text import Text, clean, guard, split_all
from flowgrpo.types import BadInput, Task

ScoreTokens = Callable[[TokenLists], np.ndarray]  # lists of ids -> [n]: the score after the last of each


def model_reward(
    text: Text,
    score_tokens: ScoreTokens,
    *,
    answer_tokens: int = 2048,
    conversation_tokens: int = LENGTHS[-1],
    template_options: Mapping[str, Any] | None = None,
) -> Reward:
    """The score of the conversation that ends with the answer, as transformers' own template writes it.

    Of the answer, `answer_tokens` are read, without its middle where it has more; a conversation above
    `conversation_tokens` and a score that is not finite are invalid. `template_options` go to the template.
    """
    if not LEAST_BUDGET <= answer_tokens <= conversation_tokens:
        limits = f"{LEAST_BUDGET} to conversation_tokens={conversation_tokens}"
        raise BadInput(f"answer_tokens is {answer_tokens}, but must lie from {limits}")
    options, control = {**text.options, **(template_options or {})}, control_ids(text)
    frame = sum(i in control for i in conversation_ids(text, "x", "x", options))
    made = _Conversations(text, options, answer_tokens, conversation_tokens, control, frame)

    def score_many(tasks: Sequence[Task], outputs: Sequence[str]) -> list[Scored]:
        lists = [_conversation(made, task, output) for task, output in zip(tasks, outputs, strict=True)]
        asked = [one for one in lists if not isinstance(one, Scored)]
        scored = iter(_score(asked, score_tokens) if asked else [])
        return [one if isinstance(one, Scored) else next(scored) for one in lists]

    return Reward(lambda task, output: score_many([task], [output])[0], score_many)


def make_score_tokens(
    score: Callable, params, *, rows: int = 8, lengths: Sequence[int] = LENGTHS, pad_id: int = 0
) -> ScoreTokens:
    """`score_tokens` of `score(params, tokens_rs, length_r) -> [r]`, compiled once for each of `lengths`."""
    return in_fixed_shapes(partial(jax.jit(score), params), rows=rows, lengths=lengths, pad_id=pad_id)


def conversation_ids(text: Text, query: str, answer: str, options: Mapping[str, Any]) -> list[int]:
    """The ids of a finished conversation of one question and one answer; `text` is guarded."""
    said = [("user", query), ("assistant", answer)]
    messages = [{"role": role, "content": mark(text, content)} for role, content in said]
    if not text.tokenizer.chat_template:
        raise BadInput(
            f"{text.source} has no chat template: put a chat_template.jinja there, or pass template= to load_text"
        )
    try:
        settings = {**options, "add_generation_prompt": False, "tokenize": False}
        rendered = text.tokenizer.apply_chat_template(messages, **settings)
    except Exception as error:  # a template is foreign code that can raise anything
        raise BadInput(
            f"the chat template of {text.source} can't render question and answer ({first_line(error)})"
        ) from error
    return encode_marked(text, rendered)


class _Conversations(NamedTuple):
    """How conversations are made."""

    text: Text
    options: Mapping[str, Any]
    answer_tokens: int
    conversation_tokens: int
    control: frozenset[int]
    written: int  # control tokens that the template itself writes


def _conversation(made: _Conversations, task: Task, answer: str) -> list[int] | Scored:
    """The ids to score, or why there are none."""
    try:
        ids = _as_data(made, clean(task.query), answer)
    except BadInput as error:
        return Scored(None, f"task {task.id}: {error}")
    if len(ids) > made.conversation_tokens:
        room = f"the conversation has {len(ids)} tokens, but the reward model reads {made.conversation_tokens}"
        return Scored(None, f"task {task.id}: {room}")
    return ids


def _as_data(made: _Conversations, query: str, answer: str) -> list[int]:
    """The ids of query and answer, with no more control tokens than the template writes around any text."""
    for text in (guard(made.text), split_all(made.text)):
        ids = conversation_ids(text, query, shorten(text, answer, made.answer_tokens, shape=str), made.options)
        if sum(i in made.control for i in ids) == made.written:
            return ids
    raise BadInput(
        f"the chat template of {made.text.source} writes other control tokens around this text than around 'x'"
    )


def _score(lists: TokenLists, score_tokens: ScoreTokens) -> list[Scored]:
    """One `Scored` for each list."""
    try:
        scores = np.asarray(score_tokens(lists), np.float64).reshape(len(lists))
    except Exception as error:  # a model can fail in its own way: device, server, memory; all are no score
        return [Scored(None, f"the reward model failed: {first_line(error)}")] * len(lists)
    return [
        Scored(float(score)) if np.isfinite(score) else Scored(None, f"the reward model's score is {score}")
        for score in scores
    ]
