"""Records and arrays as trajectories to be shown: texts add up, calls belong to their turns, arrays come back."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from agent_cases import agent_text
from hypothesis import given
from hypothesis import strategies as st

import flowgrpo as fg
from flowgrpo.contracts import Call, Result, Scored
from flowgrpo.report.trajectory_page import page_columns
from flowgrpo.rollout.effects import Effect
from flowgrpo.rollout.records import Played, from_json, make_turn, rollout_of, to_json
from flowgrpo.rollout.trajectory_view import records_of, shown_trajectory, speller, word_speller
from flowgrpo.types import Status, Trajectories


def effect(words: str, **more) -> Effect:
    return Effect(Call("tool", "echo", {"words": words}), Result(f"heard {words}", **more))


def played(lens=(1, 0, 2), turns: int = 2, **more) -> Played:
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
        "lens": lens,
        "output": "5",
        "scored": Scored(1.0, "it is right", {"form": 0.5}),
        "reason": "",
        "seconds": 2.0,
    }
    return Played(**{**own, **more})


SPELL = word_speller(tuple("0123456789"))


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_A5_the_pieces_of_ids_are_the_text_of_them_all(string):
    text = agent_text()
    ids = text.encode(string)
    pieces = speller(text)(ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == text.decode(ids)


def test_a_character_of_several_tokens_stands_at_the_first_and_a_broken_one_is_marked():
    text = agent_text()
    whole = text.encode("é")
    assert speller(text)(whole) == ["é", ""]
    assert speller(text)(whole[:1]) == ["\ufffd"]
    assert speller(text)([text.vocab_size + 3]) == [f"<{text.vocab_size + 3}>"]


def test_a_record_is_shown_with_task_verdict_and_turns():
    one = shown_trajectory(
        played(), SPELL, phase="train", update=4, advantages=[0.5, 0.5], ratios=[np.ones(4), np.ones(4)]
    )
    assert (one.task, one.query, one.answers, one.domain) == ("t", "what?", ("5", "five"), "any")
    assert (one.phase, one.update, one.group, one.sample, one.reward, one.correct) == ("train", 4, 3, 1, 1.0, True)
    assert (one.output, one.verdict, one.parts, one.seconds) == ("5", "it is right", {"form": 0.5}, 2.0)
    assert [turn.tool for turn in one.turns] == ["", "echo"]
    assert list(one.turns[0].pieces) == ["4 ", "5 ", "6 ", "1 "]
    assert page_columns([one])["details"][0]["turns"][1]["advantage"] == 0.5


@pytest.mark.parametrize(
    ("lens", "before", "by_turn"),
    [
        ((1, 0, 2), "a", ["", "bc"]),
        ((0, 3, 0), "", ["abc", ""]),
        ((1, 1), "a", ["b", "c"]),  # the last step did not return: what it asked for is its own
        ((), "abc", []),  # nor did the reset
    ],
)
def test_calls_belong_to_the_turn_that_made_them(lens, before, by_turn):
    one = shown_trajectory(played(lens, turns=len(by_turn)), SPELL)
    assert "".join(call.asked["words"] for call in one.calls) == before
    assert ["".join(call.asked["words"] for call in turn.calls) for turn in one.turns] == by_turn
    assert [call.error for turn in one.turns for call in turn.calls if call.asked["words"] == "c"] in ([], [True])


def test_a_task_of_another_kind_and_no_verdict_are_shown_too():
    one = shown_trajectory(played(task={"digit": 3}, scored=None, output=None), SPELL)
    assert (one.task, one.answers, one.verdict, one.parts) == ("{'digit': 3}", (), "", {})


def test_the_action_that_finished_it_is_the_answer_of_a_record_without_one():
    assert shown_trajectory(played(output=None), SPELL).output == "6 1"
    assert shown_trajectory(played(output=None, turns=0, lens=(3,)), SPELL).output is None
    assert shown_trajectory(played(output=None, status=Status.TURN_LIMIT), SPELL).output is None


def test_arrays_become_records_and_come_back():
    rng = np.random.default_rng(0)
    lost = played()
    turns = [replace(turn, version=np.array([7, 7, 7, 8])) for turn in lost.turns]
    ended = {"turns": turns[:1], "outcome": None, "correct": False, "status": Status.TOOL_FAILURE}
    every = [lost, replace(lost, sample=2), replace(lost, group=4, **ended, tools=("echo",), errors=(True,))]
    dense = rollout_of(every, ("echo",))
    noise = np.where(dense.turns[:, :, None], dense.tokens, rng.integers(0, 9, (3, 2, 4)))
    dense = dense.replace(tokens=noise)
    tasks = [one.task for one in every]
    records = records_of(dense, tasks, ("echo",))
    assert [(one.group, one.sample, one.tools, one.errors) for one in records] == [
        (3, 0, ("", "echo"), (False, True)),
        (3, 1, ("", "echo"), (False, True)),
        (4, 0, ("echo",), (True,)),
    ]
    assert [one.outcome for one in records] == [1.0, 1.0, None]
    assert records[2].status == Status.TOOL_FAILURE
    again = rollout_of([from_json(to_json(one)) for one in records], ("echo",))
    for name in ("chosen", "logp_sampled", "version", "turns", "outcome", "status", "length"):
        np.testing.assert_array_equal(getattr(again, name), getattr(dense, name), name)
    np.testing.assert_array_equal(again.tool, dense.tool)
    kept = again.turns[:, :, None]
    np.testing.assert_array_equal(np.where(kept, again.tokens, 0), np.where(kept, noise, 0))


def test_no_reward_but_the_environment_judged():
    dense: Trajectories = rollout_of([played()], ("echo",))
    (one,) = records_of(dense, [SimpleNamespace()], ("echo",))
    assert (one.log, one.scored, one.output, one.seconds, one.lens) == ((), None, None, None, (0, 0, 0))


def test_tasks_that_are_arrays_are_named_by_their_group():
    dense: Trajectories = rollout_of([played()], ("echo",))
    (one,) = records_of(dense, tools=("echo",))
    assert shown_trajectory(one, SPELL).task == f"task {one.group}"
    with pytest.raises(fg.BadInput, match=r"tasks must be fg\.Task, one a trajectory"):
        records_of(dense, np.zeros((1, 3)))  # type: ignore[arg-type]
