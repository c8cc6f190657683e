"""Drawing: pixels that commands cover, values of pictures, held-out splits, and malformed lines."""

from collections import Counter

import numpy as np
import pytest

from flowgrpo.rewards.vision.drawing import (
    COLORS,
    MAX_LINES,
    SIZE,
    SPLITS,
    drawing_reward,
    gold_commands,
    make_drawings,
    picture_of,
    render_drawing,
    shapes_of,
)
from flowgrpo.types import BadInput, Task

REWARD = drawing_reward()


def score(answer, metadata):
    return REWARD.score(Task("d9", "Draw.", (), "vision", metadata), answer)


def pixels(commands):
    return render_drawing(commands).pixels_yx


def test_shapes_cover_their_pixels_and_later_ones_cover_earlier_ones():
    rect = pixels("rect 2 3 4 5 red")
    assert (rect[3:8, 2:6] == COLORS.index("red")).all()
    assert (rect > 0).sum() == 20
    circle = pixels("circle 10 20 2 blue")
    assert (circle > 0).sum() == 13
    assert circle[20, 12] == circle[18, 10] == COLORS.index("blue")
    for line, expected in (
        ("1 2 5 2", [[2, x] for x in range(1, 6)]),
        ("3 3 0 0", [[i, i] for i in range(4)]),
        ("7 7 7 7", [[7, 7]]),
        ("5 9 5 6", [[y, 5] for y in range(6, 10)]),
    ):
        assert np.argwhere(pixels(f"line {line} green")).tolist() == expected
    assert pixels("rect 0 0 64 64 red\nrect 0 0 64 64 blue").min() == COLORS.index("blue")
    assert not pixels("rect 0 0 9 9 red\nrect 0 0 64 64 white").any()


def test_pixels_outside_the_canvas_are_not_drawn():
    assert not pixels("circle 0 0 0 red\nrect 64 0 9 9 red\nrect 0 0 -5 5 red\ncircle 900 900 9 red").any()
    assert (pixels("circle -10 -10 999 red") > 0).all()
    assert (pixels("line -999 5 999 5 red") > 0).sum() == SIZE


def test_malformed_and_superfluous_lines_are_counted_and_others_drawn():
    malformed = (
        "rect 1 2 3 red|circle 1 2 3 4 red|rect 1 2 3 4 pink|square 1 2 3 4 red|rect 1.5 2 3 4 red|RECT 1 2 3 4 red"
    )
    malformed += "|rect 1 2 3 4 red; rect 5 5 5 5 blue|rect 1 2 3 99999 red|rect \u0661 2 3 4 red"
    for line in malformed.split("|"):
        drawn = render_drawing(f"\n{line}\n  rect 0 0 2 2 red \n")
        assert (drawn.commands, drawn.malformed, (drawn.pixels_yx > 0).sum()) == (1, 1, 4), line
    drawn = render_drawing("rect 0 0 2 2 red\n" * MAX_LINES + "rect 0 0 64 64 blue")
    assert (drawn.commands, drawn.malformed, (drawn.pixels_yx > 0).sum()) == (MAX_LINES, 1, 4)


VALUES = {
    "rect 0 0 10 10 red": 1.0,
    "rect 0 0 5 10 red\nrect 5 0 5 10 red": 1.0,  # the same picture by other commands
    "Here it is:\nrect 0 0 10 10 red": 1.0,
    "rect 0 0 10 5 red": 0.5,
    "rect 0 0 10 10 red\nrect 30 30 5 5 blue": 0.5,  # a colour too many
    "rect 0 0 64 64 red": 100 / 4096,
    "rect 0 0 10 10 blue": 0.0,
    "rect 0 0 64 64 white": 0.0,
    "": 0.0,
}


def test_values_by_hand_and_gold_that_cant_be_drawn():
    gold = {"commands": "rect 0 0 10 10 red"}
    assert {answer: score(answer, gold).value for answer in VALUES} == pytest.approx(VALUES)
    scored = score("rect 0 0 10 10 red\noops", {"commands": "rect 0 0 10 10 red\ncircle 40 40 5 blue"})
    assert (scored.value, scored.parts) == (0.5, {"commands": 1.0, "malformed": 1.0, "red": 1.0, "blue": 0.0})
    for bad in ({}, {"commands": 7}, {"commands": ""}, {"commands": "rect 0 0 red"}):
        assert score("rect 0 0 10 10 red", bad).value is None
        assert "d9" in score("rect 0 0 10 10 red", bad).reason


@pytest.mark.parametrize("split", SPLITS)
def test_gold_commands_score_1_in_any_order_and_an_empty_canvas_0(split):
    for task in make_drawings(3, 40, split, max_shapes=9):
        lines = gold_commands(task).splitlines()
        covered = (pixels(gold_commands(task)) > 0).sum()
        assert sum((pixels(line) > 0).sum() for line in lines) == covered  # no shapes overlap
        for answer, value in (("\n".join(lines), 1.0), ("\n".join(reversed(lines)), 1.0), ("", 0.0)):
            assert REWARD.score(task, answer).value == value


def test_tasks_follow_from_seed_split_and_index():
    tasks = make_drawings(0, 300)
    assert (make_drawings(0, 20), make_drawings(0, 0)) == (tasks[:20], [])
    assert len({task.id for split in SPLITS for seed in (0, 1) for task in make_drawings(seed, 20, split)}) == 120
    counts = Counter(len(gold_commands(task).splitlines()) for task in tasks)
    assert set(counts) == {1, 2, 3}
    assert min(counts.values()) > 60
    assert all(line.split()[-1] in tasks[0].query.split("\n")[0] for line in gold_commands(tasks[0]).splitlines())
    for bad in ({"split": "dev"}, {"max_shapes": 0}, {"max_shapes": 10}, {"count": -1}, {"seed": -1}):
        with pytest.raises(BadInput):
            make_drawings(**({"seed": 0, "count": 3, "split": "train"} | bad))


def test_splits_share_no_shape_and_training_has_each_word_of_a_test():
    pools = {split: shapes_of(split) for split in SPLITS}
    assert sum(map(len, pools.values())) == len(set().union(*pools.values())) == 12 * 6 * 9
    assert 0.75 < len(pools["train"]) / (12 * 6 * 9) < 0.85
    commands = [
        {line for task in make_drawings(0, 300, split) for line in gold_commands(task).splitlines()} for split in SPLITS
    ]
    assert sum(map(len, commands)) == len(set().union(*commands))
    for field in range(5):
        assert {shape[field] for shape in pools["test"]} <= {shape[field] for shape in pools["train"]}


def test_a_picture_has_the_colours_of_the_palette():
    assert picture_of("rect 0 0 64 64 red")[5, 5].tolist() == [220, 40, 40]
