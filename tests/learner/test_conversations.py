"""Preferences and demonstrations from files: the tokens that the policy would have written, and errors with a place."""

import json

import numpy as np
import pytest
from tiny_judge import judge_text

import flowgrpo as fg
from flowgrpo.data.tokenizer import closing_id
from flowgrpo.learner.conversations import (
    preference_rows,
    read_demonstrations,
    read_preferences,
    tokens_of,
)
from flowgrpo.learner.imitation import packed_imitation

ASK = {"role": "user", "content": "Is it so?"}
SAY = {"role": "assistant", "content": "Yes"}
TOOL = {"role": "user", "content": "a result"}
PAIR = {"prompt": "Is it so?", "chosen": "Yes", "rejected": "No, it is not."}


def write(folder, *lines) -> str:
    path = folder / "data.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def tokens_chosen(record: fg.Trajectory) -> tuple[list[int], list[bool]]:
    """All tokens of a conversation, and which of them are learned."""
    tokens, chosen = (np.concatenate([getattr(turn, name) for turn in record.turns]) for name in ("tokens", "chosen"))
    return tokens.tolist(), chosen.tolist()


@pytest.mark.parametrize("style", ["qwen2.5", "llama3", "mistral"])
def test_A5_tokens_equal_those_of_a_rollout(style, tmp_path):
    text = judge_text(style)
    ((chosen, rejected),) = read_preferences(write(tmp_path, PAIR), text)
    for record, words in ((chosen, "Yes"), (rejected, "No, it is not.")):
        action = [*text.encode(words), closing_id(text)]
        conversation = fg.data.add_action(fg.data.start_conversation(text, [ASK]), action)
        assert tokens_chosen(record) == (list(conversation.tokens), list(conversation.chosen))
        assert tokens_of(record) == len(conversation.tokens)
    assert (chosen.outcome, rejected.outcome) == (1.0, 0.0)
    assert chosen.group == rejected.group


def test_only_assistant_turns_are_learned(tmp_path):
    text, more = judge_text(), {"role": "assistant", "content": "No"}
    (record,) = read_demonstrations(write(tmp_path, {"messages": [ASK, SAY, TOOL, more]}), text)
    first, second = ([*text.encode(one["content"]), closing_id(text)] for one in (SAY, more))
    conversation = fg.data.add_action(
        fg.data.add_messages(text, fg.data.add_action(fg.data.start_conversation(text, [ASK]), first), [TOOL]), second
    )
    assert tokens_chosen(record) == (list(conversation.tokens), list(conversation.chosen))
    assert [turn.tokens[turn.chosen].tolist() for turn in record.turns] == [first, second]


@pytest.mark.parametrize(
    "other",
    [
        {"messages": [ASK], "chosen": [SAY], "rejected": "No, it is not."},
        {"prompt": [ASK], "chosen": "Yes", "rejected": [{"role": "assistant", "content": "No, it is not."}]},
        {"chosen": [ASK, SAY], "rejected": [ASK, {"role": "assistant", "content": "No, it is not."}]},
        PAIR | {"messages": None, "source": "somewhere"},
    ],
    ids=["messages", "prompt of messages", "whole conversations", "null and other fields"],
)
def test_a_preference_may_be_written_in_several_ways(other, tmp_path):
    text = judge_text()
    one, two = read_preferences(write(tmp_path, PAIR, other), text)
    for side, like in zip(one, two, strict=True):
        assert tokens_chosen(side) == tokens_chosen(like)
        assert side.group != like.group


def test_a_prompt_and_its_completion_are_a_demonstration(tmp_path):
    lines = {"prompt": "Is it so?", "completion": "Yes"}, {"messages": [ASK, SAY]}
    one, two = read_demonstrations(write(tmp_path, *lines), judge_text())
    assert tokens_chosen(one) == tokens_chosen(two)


def test_assistant_messages_of_a_prompt_are_not_learned(tmp_path):
    text = judge_text()
    line = {"messages": [ASK, SAY, TOOL], "chosen": "Yes", "rejected": "No"}
    chosen, _ = read_preferences(write(tmp_path, line), text)[0]
    assert len(chosen.turns) == 1
    assert chosen.turns[0].chosen.sum() == len(text.encode("Yes")) + 1


def test_tool_schemas_are_in_the_prompt(tmp_path):
    schema = {"type": "function", "function": {"name": "clock", "description": "tells the time", "parameters": {}}}
    text = judge_text()
    chosen, _ = read_preferences(write(tmp_path, PAIR | {"tools": [schema]}), text)[0]
    assert "tells the time" in text.decode(chosen.turns[0].tokens)


def test_preferences_have_sides_as_advantages_and_pairs_as_groups(tmp_path):
    lines = [PAIR, PAIR | {"chosen": "No"}, PAIR | {"rejected": "No"}]
    pairs = read_preferences(write(tmp_path, *lines), judge_text())
    batch = preference_rows(pairs, row_length=64, rows=6)
    own_rs = np.asarray(batch.loss_mask)
    assert batch.tokens.shape == (6, 64)
    assert set(zip(batch.group[own_rs].tolist(), batch.advantage[own_rs].tolist(), strict=True)) == {
        (pair, side) for pair in range(3) for side in (1.0, -1.0)
    }
    np.testing.assert_allclose(batch.weight[own_rs], 1 / 3)
    np.testing.assert_array_equal(own_rs, batch.chosen)


@pytest.mark.slow
def test_duplicate_pairs_count_twice(tmp_path):
    (pair,) = read_preferences(write(tmp_path, PAIR), judge_text("qwen2.5"))
    once, twice = (preference_rows([pair] * count, row_length=64, rows=8) for count in (1, 2))
    assert len(np.unique(twice.group[np.asarray(twice.loss_mask)])) == 2
    assert np.asarray(twice.loss_mask).sum() == 2 * np.asarray(once.loss_mask).sum()


def test_demonstrations_weight_all_learned_tokens_equally(tmp_path):
    lines = [{"prompt": "Is it so?", "completion": words} for words in ("Yes", "No, it is not.")]
    batch = packed_imitation(read_demonstrations(write(tmp_path, *lines), judge_text()), row_length=64, rows=2)
    own_rs = np.asarray(batch.loss_mask)
    np.testing.assert_allclose(batch.weight[own_rs], 1 / own_rs.sum())
    np.testing.assert_array_equal(own_rs, batch.chosen)


BAD_PREFERENCES = {
    "no json": ("{", r"line 2: isn't JSON"),
    "no object": ("[1]", r"line 2: isn't a JSON object; a preference is"),
    "no prompt": ({"chosen": "a", "rejected": "b"}, r"line 2: field 'prompt' is missing \(there are: 'chosen', 'rej"),
    "nothing in common": (
        {"chosen": [ASK, SAY], "rejected": [TOOL, SAY]},
        r"field 'prompt' is missing .* don't begin alike: add it",
    ),
    "no rejected": ({"prompt": "a", "chosen": "b"}, r"line 2: field 'rejected' is missing \(there are: 'prompt', 'ch"),
    "a number": (PAIR | {"chosen": 7}, r"line 2: field 'chosen' is 7, but must be a text or a list"),
    "no role": (PAIR | {"chosen": [{"content": "x"}]}, r"field 'chosen' is .* but must be a text or a list"),
    "the same": (PAIR | {"rejected": "Yes"}, r"field 'rejected' is the same as 'chosen': remove the line"),
    "an empty prompt": (PAIR | {"prompt": " "}, r"line 2: field 'prompt' is ' ', but must be a text"),
    "the assistant asks": (PAIR | {"prompt": [ASK, SAY]}, r"field 'prompt' ends with the assistant"),
    "the user answers": (PAIR | {"chosen": [TOOL]}, r"field 'chosen' must end with what the assistant says"),
    "twice in a row": (PAIR | {"chosen": [SAY, SAY]}, r"'chosen' has a message 1 where the assistant follows another"),
    "the user first": (PAIR | {"chosen": [TOOL, SAY]}, r"'chosen' has a message 1 where the assistant must come first"),
    "a call": (
        PAIR | {"chosen": [{"role": "assistant", "content": None, "tool_calls": [{}]}]},
        r"'chosen' has a message 0 of the assistant that is no text: write calls as it says them",
    ),
    "an odd role": (PAIR | {"prompt": [{"role": "user"}]}, r"line 2, field 'chosen': message 0 .* has no content"),
}


@pytest.mark.parametrize("case", BAD_PREFERENCES)
def test_a_bad_preference_is_named_with_line_and_field(case, tmp_path):
    line, words = BAD_PREFERENCES[case]
    with pytest.raises(fg.BadInput, match=words) as error:
        read_preferences(write(tmp_path, PAIR, line), judge_text())
    assert str(tmp_path / "data.jsonl") in str(error.value)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"prompt": "a"}, r"line 1: field 'completion' is missing"),
        ({"text": "a"}, r"line 1: field 'messages' is missing \(there are: 'text'\): add it, or prompt and completion"),
        ({"messages": [SAY]}, r"field 'messages' begins with the assistant: put before it what it answers"),
        ({"messages": [ASK]}, r"field 'messages' must end with what the assistant says"),
        ({"messages": [ASK, SAY, TOOL]}, r"field 'messages' must end with what the assistant says"),
    ],
)
def test_a_bad_demonstration_is_named_with_line_and_field(line, words, tmp_path):
    with pytest.raises(fg.BadInput, match=words):
        read_demonstrations(write(tmp_path, line), judge_text())


def test_missing_or_empty_files_are_named(tmp_path):
    with pytest.raises(fg.BadInput, match=r"absent.jsonl is no .jsonl file: give the path of one, where a preference"):
        read_preferences(tmp_path / "absent.jsonl", judge_text())
    with pytest.raises(fg.BadInput, match=r"data.jsonl holds no line: a demonstration is"):
        read_demonstrations(write(tmp_path), judge_text())
    for rows in (preference_rows, packed_imitation):
        with pytest.raises(fg.BadInput, match="there is no"):
            rows([], row_length=8)
