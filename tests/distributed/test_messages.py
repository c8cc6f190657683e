"""Messages between master and workers: a stretch as text is the same stretch, and every token is counted once."""

from dataclasses import replace

from flowgrpo.contracts import Completion
from flowgrpo.distributed.messages import Stretch, lengths, pack_stretch, unpack_stretch, versions
from flowgrpo.rollout.records import CutAction, Unfinished, aborted, make_turn
from flowgrpo.types import Task

TURN = make_turn([1, 2], [3, 4], [-0.5, -0.25], 3, None, 7)
WHOLE = Unfinished(Task("t", "q", ("1",), "any"), (1, 2), 4, 0, (TURN,), ("echo",), (False,), (), (0, 0), 1.5)
SAMPLED = Completion([5, 6, 7], [-1.5, -0.1, -0.2], [3, 3, 4], "budget")
CUT = replace(WHOLE, sample=1, begun=CutAction((8, 9), -1, SAMPLED))
STRETCH = Stretch((replace(aborted(CUT, "late"), sample=2),), (WHOLE, CUT))


def test_S1_a_stretch_as_text_is_the_same_stretch():
    again = unpack_stretch(pack_stretch(STRETCH))
    assert pack_stretch(again) == pack_stretch(STRETCH)
    assert again.unfinished[0].begun is None
    begun = again.unfinished[1].begun
    assert begun is not None
    assert (begun.said, begun.anchor) == ((8, 9), -1)
    assert begun.sampled == SAMPLED
    assert again.played[0].turns[1].version.tolist() == [3, 3, 3, 3, 4]


def test_A6_the_tokens_of_an_action_that_was_cut_count():
    assert lengths(STRETCH) == {(4, 0): 2, (4, 1): 5, (4, 2): 5}
    assert versions(STRETCH) == {3, 4}
    assert versions(Stretch((), (WHOLE,))) == {3}
