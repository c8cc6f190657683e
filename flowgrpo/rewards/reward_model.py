"""A scalar-head reward model as a reward: `model_reward` scores the conversation of a question and its answer.

    task, answer -> template([user: query, assistant: answer]) -> value = score after its last token

The score is unbounded and without a unit; group statistics take it as it is. The scoring function is injected (token
lists in, one number each out), so any model can compute it; `models.reward_model` reads published ones.

Control tokens that query or answer spell out are broken up; a text with another spelling of one, which the tokenizer
normalises into it, is broken up after every character. The middle of a long answer is left out.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import numpy as np

from flowgrpo.contracts import Reward, RewardResult
from flowgrpo.data.tokenizer import (
    ChatTokenizer,
    apply_template,
    break_all,
    clean,
    control_ids,
    encode_marked,
    guard,
    mark,
)
from flowgrpo.rewards.combine import model_scores, prepared_reward
from flowgrpo.rewards.judge import PADDED_LENGTHS, TokenLists, check_budget, in_fixed_shapes, shorten_quote
from flowgrpo.types import BadInput, Task

ScoreTokens = Callable[[TokenLists], np.ndarray]  # lists of ids -> [n]: the score after the last of each


def model_reward(
    text: ChatTokenizer,
    score_tokens: ScoreTokens,
    *,
    answer_tokens: int = 2048,
    conversation_tokens: int = PADDED_LENGTHS[-1],
) -> Reward:
    """Score the conversation that ends with the answer, as transformers' own template writes it.

    At most `answer_tokens` of the answer are read; the middle of a longer one is left out. A conversation of more than
    `conversation_tokens` and a score that is not finite are invalid.
    """
    check_budget(answer_tokens, "conversation_tokens", conversation_tokens)
    template_controls = len(control_ids(text, conversation_ids(text, "x", "x")))

    def conversation(task: Task, answer: str) -> list[int] | RewardResult:
        try:
            for guarded in (guard(text), break_all(text)):
                short = shorten_quote(guarded, answer, answer_tokens, shape=str)
                ids = conversation_ids(guarded, clean(task.query), short)
                if len(control_ids(text, ids)) == template_controls:
                    break
            else:
                reason = "writes other control tokens around this text than around 'x'"
                raise BadInput(f"the chat template of {text.source} {reason}")
        except BadInput as error:
            return RewardResult(None, f"task {task.id}: {error}")
        if len(ids) > conversation_tokens:
            too_long = f"the conversation has {len(ids)} tokens, but the reward model reads {conversation_tokens}"
            return RewardResult(None, f"task {task.id}: {too_long}")
        return ids

    return prepared_reward(conversation, lambda lists: model_scores("reward model", score_tokens, lists))


def make_score_tokens(
    score: Callable, params, *, rows: int = 8, lengths: Sequence[int] = PADDED_LENGTHS
) -> ScoreTokens:
    """Make `score_tokens` from `score(params, tokens_rs, length_r) -> [r]`, compiled once for each of `lengths`."""
    return in_fixed_shapes(partial(jax.jit(score), params), rows=rows, lengths=lengths)


def conversation_ids(text: ChatTokenizer, query: str, answer: str) -> list[int]:
    """Token ids of a finished conversation of one question and one answer; `text` is guarded."""
    turns = [("user", query), ("assistant", answer)]
    messages = [{"role": role, "content": mark(text, content)} for role, content in turns]
    rendered, problem = apply_template(text, messages, invite=False)
    if problem:
        raise BadInput(f"the chat template of {text.source} can't render question and answer ({problem})")
    return encode_marked(text, rendered)
