"""Records and arrays for the viewer: token texts add up, calls belong to their turns, arrays come back."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from agent_cases import agent_text
from hypothesis import given
from hypothesis import strategies as st

import flowgrpo as fg
from flowgrpo.contracts import Call, Result, RewardResult
from flowgrpo.report.trajectory_page import page_columns
from flowgrpo.rollout.effects import Effect
from flowgrpo.rollout.records import RecordedTrajectory, from_json, make_turn, to_json, to_trajectories
from flowgrpo.rollout.trajectory_view import make_token_decoder, make_word_decoder, shown_trajectory, to_records
from flowgrpo.types import Status, Trajectories


def effect(words: str, **more) -> Effect:
    return Effect(Call("tool", "echo", {"words": words}), Result(f"heard {words}", **more))


def played(effect_counts=(1, 0, 2), turns: int = 2, **more) -> RecordedTrajectory:
    sequence = [make_turn([4, 5], [6, 1], [-0.5, -0.25], 7, None, 0)] * turns
    own = {
        "task": fg.Task("t", "what?", ("5", "five"), "any"),
        "key": (1, 2),
        "group": 3,
        "sample": 1,
        "turns": sequence,
        "outcome": 1.0,
        "correct": True,
        "tools": ("", "echo")[:turns],
        "errors": (False, True)[:turns],
        "log": tuple(effect(word, error=word == "c") for word in "abc"),
        "effect_counts": effect_counts,
        "output": "5",
        "reward_result": RewardResult(1.0, "it is right", {"form": 0.5}),
        "reason": "",
        "seconds": 2.0,
    }
    return RecordedTrajectory(**{**own, **more})


DECODE = make_word_decoder(tuple("0123456789"))


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_A5_the_pieces_of_ids_are_the_text_of_them_all(string):
    text = agent_text()
    ids = text.encode(string)
    pieces = make_token_decoder(text)(ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == text.decode(ids)


def test_a_character_of_several_tokens_belongs_to_the_first():
    text = agent_text()
    whole = text.encode("é")
    assert make_token_decoder(text)(whole) == ["é", ""]
    assert make_token_decoder(text)(whole[:1]) == ["\ufffd"]
    assert make_token_decoder(text)([text.vocab_size + 3]) == [f"<{text.vocab_size + 3}>"]


def test_a_record_is_shown_with_task_reward_and_turns():
    one = shown_trajectory(
        played(), DECODE, phase="train", update=4, advantages=[0.5, 0.5], ratios=[np.ones(4), np.ones(4)]
    )
    assert (one.task, one.query, one.answers, one.domain) == ("t", "what?", ("5", "five"), "any")
    assert (one.phase, one.update, one.group, one.sample, one.outcome, one.correct) == ("train", 4, 3, 1, 1.0, True)
    assert (one.output, one.reward_reason, one.parts, one.seconds) == ("5", "it is right", {"form": 0.5}, 2.0)
    assert [turn.tool for turn in one.turns] == ["", "echo"]
    assert list(one.turns[0].pieces) == ["4 ", "5 ", "6 ", "1 "]
    assert page_columns([one])["details"][0]["turns"][1]["advantage"] == 0.5


@pytest.mark.parametrize(
    ("effect_counts", "before", "by_turn"),
    [
        ((1, 0, 2), "a", ["", "bc"]),
        ((0, 3, 0), "", ["abc", ""]),
        ((1, 1), "a", ["b", "c"]),  # the last step did not return: what it asked for is its own
        ((), "abc", []),  # nor did the reset
    ],
)
def test_calls_belong_to_the_turn_that_made_them(effect_counts, before, by_turn):
    one = shown_trajectory(played(effect_counts, turns=len(by_turn)), DECODE)
    assert "".join(call.arguments["words"] for call in one.calls) == before
    assert ["".join(call.arguments["words"] for call in turn.calls) for turn in one.turns] == by_turn
    assert [call.error for turn in one.turns for call in turn.calls if call.arguments["words"] == "c"] in ([], [True])


def test_tasks_of_other_types_and_missing_rewards_are_shown_too():
    one = shown_trajectory(played(task={"digit": 3}, reward_result=None, output=None), DECODE)
    assert (one.task, one.answers, one.reward_reason, one.parts) == ("{'digit': 3}", (), "", {})


def test_the_last_action_is_the_output_of_a_record_without_one():
    assert shown_trajectory(played(output=None), DECODE).output == "6 1"
    assert shown_trajectory(played(output=None, turns=0, effect_counts=(3,)), DECODE).output is None
    assert shown_trajectory(played(output=None, status=Status.TURN_LIMIT), DECODE).output is None


def test_arrays_become_records_and_come_back():
    rng = np.random.default_rng(0)
    lost = played()
    turns = [replace(turn, version=np.array([7, 7, 7, 8])) for turn in lost.turns]
    ended = {"turns": turns[:1], "outcome": None, "correct": False, "status": Status.TOOL_FAILURE}
    every = [lost, replace(lost, sample=2), replace(lost, group=4, **ended, tools=("echo",), errors=(True,))]
    dense = to_trajectories(every, ("echo",))
    noise = np.where(dense.turns[:, :, None], dense.tokens, rng.integers(0, 9, (3, 2, 4)))
    dense = dense.replace(tokens=noise)
    tasks = [one.task for one in every]
    records = to_records(dense, tasks, ("echo",))
    assert [(one.group, one.sample, one.tools, one.errors) for one in records] == [
        (3, 0, ("", "echo"), (False, True)),
        (3, 1, ("", "echo"), (False, True)),
        (4, 0, ("echo",), (True,)),
    ]
    assert [one.outcome for one in records] == [1.0, 1.0, None]
    assert records[2].status == Status.TOOL_FAILURE
    again = to_trajectories([from_json(to_json(one)) for one in records], ("echo",))
    for name in ("chosen", "logp_sampled", "version", "turns", "outcome", "status", "length"):
        np.testing.assert_array_equal(getattr(again, name), getattr(dense, name), name)
    np.testing.assert_array_equal(again.tool, dense.tool)
    kept = again.turns[:, :, None]
    np.testing.assert_array_equal(np.where(kept, again.tokens, 0), np.where(kept, noise, 0))


def test_records_of_arrays_have_no_reward_result():
    dense: Trajectories = to_trajectories([played()], ("echo",))
    (one,) = to_records(dense, [SimpleNamespace()], ("echo",))
    assert (one.log, one.reward_result, one.output, one.seconds, one.effect_counts) == ((), None, None, None, (0, 0, 0))


def test_array_tasks_are_named_by_their_group():
    dense: Trajectories = to_trajectories([played()], ("echo",))
    (one,) = to_records(dense, tools=("echo",))
    assert shown_trajectory(one, DECODE).task == f"task {one.group}"
    with pytest.raises(fg.BadInput, match=r"tasks must be fg\.Task, one a trajectory"):
        to_records(dense, np.zeros((1, 3)))  # type: ignore[arg-type]
