"""A scalar-head reward model as a reward: `model_reward` scores the conversation of a question and its answer.

    task, answer -> template([user: query, assistant: answer]) -> value = score after its last token

The score has no bounds and no unit; group statistics take it as it is. The scoring function is injected (token lists
in, one number each out), so any model can stand behind it; `models.reward_model` reads published ones.

Control tokens that query or answer spell out are broken up; a text that spells one in another way, which the tokenizer
normalises into it, is broken up after every character. Of a long answer the middle is left out.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import numpy as np

from flowgrpo.contracts import Reward, Scored
from flowgrpo.data.tokenizer import Text, apply_template, clean, control_ids, encode_marked, guard, mark, split_all
from flowgrpo.rewards.combine import model_scores, prepared
from flowgrpo.rewards.judge import LENGTHS, TokenLists, check_budget, in_fixed_shapes, shorten_quote
from flowgrpo.types import BadInput, Task

ScoreTokens = Callable[[TokenLists], np.ndarray]  # lists of ids -> [n]: the score after the last of each


def model_reward(
    text: Text,
    score_tokens: ScoreTokens,
    *,
    answer_tokens: int = 2048,
    conversation_tokens: int = LENGTHS[-1],
) -> Reward:
    """Score the conversation that ends with the answer, as transformers' own template writes it.

    Of the answer, `answer_tokens` are read, without its middle where it has more; a conversation above
    `conversation_tokens` and a score that is not finite are invalid.
    """
    check_budget(answer_tokens, "conversation_tokens", conversation_tokens)
    written = len(control_ids(text, conversation_ids(text, "x", "x")))

    def conversation(task: Task, answer: str) -> list[int] | Scored:
        try:
            for guarded in (guard(text), split_all(text)):
                short = shorten_quote(guarded, answer, answer_tokens, shape=str)
                ids = conversation_ids(guarded, clean(task.query), short)
                if len(control_ids(text, ids)) == written:
                    break
            else:
                why = "writes other control tokens around this text than around 'x'"
                raise BadInput(f"the chat template of {text.source} {why}")
        except BadInput as error:
            return Scored(None, f"task {task.id}: {error}")
        if len(ids) > conversation_tokens:
            room = f"the conversation has {len(ids)} tokens, but the reward model reads {conversation_tokens}"
            return Scored(None, f"task {task.id}: {room}")
        return ids

    return prepared(conversation, lambda lists: model_scores("reward model", score_tokens, lists))


def make_score_tokens(score: Callable, params, *, rows: int = 8, lengths: Sequence[int] = LENGTHS) -> ScoreTokens:
    """Make `score_tokens` of `score(params, tokens_rs, length_r) -> [r]`, compiled once for each of `lengths`."""
    return in_fixed_shapes(partial(jax.jit(score), params), rows=rows, lengths=lengths)


def conversation_ids(text: Text, query: str, answer: str) -> list[int]:
    """Encode a finished conversation of one question and one answer; `text` is guarded."""
    said = [("user", query), ("assistant", answer)]
    messages = [{"role": role, "content": mark(text, content)} for role, content in said]
    rendered, why = apply_template(text, messages, invite=False)
    if why:
        raise BadInput(f"the chat template of {text.source} can't render question and answer ({why})")
    return encode_marked(text, rendered)
