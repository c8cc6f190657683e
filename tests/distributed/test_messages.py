"""Messages between master and workers: a slice survives as text, and every token is counted once."""

from dataclasses import replace

from flowgrpo.contracts import Completion
from flowgrpo.distributed.messages import RolloutSlice, lengths, pack_slice, unpack_slice, versions
from flowgrpo.rollout.records import PartialAction, PartialTrajectory, abort, make_turn
from flowgrpo.types import Task

TURN = make_turn([1, 2], [3, 4], [-0.5, -0.25], 3, None, 7)
WHOLE = PartialTrajectory(Task("t", "q", ("1",), "any"), (1, 2), 4, 0, (TURN,), ("echo",), (False,), (), (0, 0), 1.5)
SAMPLED = Completion([5, 6, 7], [-1.5, -0.1, -0.2], [3, 3, 4], "budget")
CUT = replace(WHOLE, sample=1, partial_action=PartialAction((8, 9), -1, SAMPLED))
SLICE = RolloutSlice((replace(abort(CUT, "late"), sample=2),), (WHOLE, CUT))


def test_S1_a_slice_survives_as_text():
    restored = unpack_slice(pack_slice(SLICE))
    assert pack_slice(restored) == pack_slice(SLICE)
    assert restored.unfinished[0].partial_action is None
    partial_action = restored.unfinished[1].partial_action
    assert partial_action is not None
    assert (partial_action.context, partial_action.anchor) == ((8, 9), -1)
    assert partial_action.completion == SAMPLED
    assert restored.trajectories[0].turns[1].version.tolist() == [3, 3, 3, 3, 4]


def test_A6_tokens_of_a_cut_action_are_counted():
    assert lengths(SLICE) == {(4, 0): 2, (4, 1): 5, (4, 2): 5}
    assert versions(SLICE) == {3, 4}
    assert versions(RolloutSlice((), (WHOLE,))) == {3}
