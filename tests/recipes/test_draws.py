"""Tasks that are drawn from files, for runs on host environments."""

import pytest

import flowgrpo as fg
from flowgrpo.training.language_model import draw_from
from flowgrpo.types import BadInput


def sums(count: int) -> fg.data.Tasks:
    return fg.data.Tasks(
        tuple(fg.Task(f"sum-{i}", f"{i} + 1?", (str(i + 1),), "mathematics") for i in range(count)), "sums"
    )


def test_a_draw_follows_from_split_and_place_and_splits_share_no_task():
    draw = draw_from(sums(200), 3)
    assert draw("train", 4, 8) == draw("train", 0, 12)[4:]
    parts = {split: {task.id for task in draw(split, 0, 200)} for split in ("train", "validation", "test")}
    assert (
        not parts["train"] & parts["validation"] | parts["train"] & parts["test"] | parts["validation"] & parts["test"]
    )


def test_a_file_that_leaves_a_split_empty_is_refused_with_the_mend():
    with pytest.raises(BadInput, match=r"sums has no task for \w+: give more than 1"):
        draw_from(sums(1), 3)
