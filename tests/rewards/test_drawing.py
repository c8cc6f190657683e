"""Drawing: what commands cover, what a picture scores, held-out splits, and lines that are no drawing."""

from collections import Counter

import numpy as np
import pytest

from flowgrpo.rewards.canvas import COLORS, MOST_LINES, SIZE, as_image, render, save_png
from flowgrpo.rewards.drawing import SPLITS, color_overlap, drawing_reward, make_drawings, oracle, picture_of, things
from flowgrpo.types import BadInput, Task

REWARD = drawing_reward()


def task(commands="rect 0 0 10 10 red"):
    return Task("d1", "Draw.", (), "vision", {"commands": commands})


def pixels(commands):
    return render(commands).pixels_yx


# The canvas -------------------------------------------------------------------------------------------


def test_shapes_cover_the_pixels_that_they_should():
    rect = pixels("rect 2 3 4 5 red")
    assert (rect[3:8, 2:6] == COLORS.index("red")).all()
    assert (rect > 0).sum() == 20
    circle = pixels("circle 10 20 2 blue")
    assert (circle > 0).sum() == 13
    assert circle[20, 12] == circle[18, 10] == COLORS.index("blue")
    assert np.argwhere(pixels("line 1 2 5 2 green")).tolist() == [[2, x] for x in range(1, 6)]
    assert np.argwhere(pixels("line 3 3 0 0 green")).tolist() == [[i, i] for i in range(4)]
    assert np.argwhere(pixels("line 7 7 7 7 green")).tolist() == [[7, 7]]
    assert np.argwhere(pixels("line 5 9 5 6 green")).tolist() == [[y, 5] for y in range(6, 10)]


def test_later_commands_cover_earlier_ones_and_white_erases():
    assert pixels("rect 0 0 64 64 red\nrect 0 0 64 64 blue").min() == COLORS.index("blue")
    assert not pixels("rect 0 0 9 9 red\nrect 0 0 64 64 white").any()


MALFORMED = ["rect 1 2 3 red", "circle 1 2 3 4 red", "rect 1 2 3 4 pink", "square 1 2 3 4 red", "rect 1.5 2 3 4 red"]
MALFORMED += [
    "rect 1 2 3 4 red; rect 5 5 5 5 blue",
    "rect 1 2 3 99999 red",
    "RECT 1 2 3 4 red",
    "rect \u0661 2 3 4 red",
]


def test_a_malformed_line_is_counted_and_the_others_are_drawn():
    for line in MALFORMED:
        drawn = render(f"\n{line}\n  rect 0 0 2 2 red \n")
        assert (drawn.commands, drawn.malformed, (drawn.pixels_yx > 0).sum()) == (1, 1, 4), line


def test_what_lies_outside_is_not_drawn():
    assert not pixels("circle 0 0 0 red\nrect 64 0 9 9 red\nrect 0 0 -5 5 red\ncircle 900 900 9 red").any()
    assert (pixels("circle -10 -10 999 red") > 0).all()
    assert (pixels("line -999 5 999 5 red") > 0).sum() == SIZE


def test_no_more_than_the_first_lines_are_drawn():
    drawn = render("rect 0 0 2 2 red\n" * MOST_LINES + "rect 0 0 64 64 blue")
    assert (drawn.commands, drawn.malformed) == (MOST_LINES, 1)
    assert (drawn.pixels_yx > 0).sum() == 4


# The reward -------------------------------------------------------------------------------------------


VALUES = {
    "rect 0 0 10 10 red": 1.0,
    "rect 0 0 5 10 red\nrect 5 0 5 10 red": 1.0,  # the same picture in other words
    "Here it is:\nrect 0 0 10 10 red": 1.0,
    "rect 0 0 10 5 red": 0.5,
    "rect 0 0 10 10 red\nrect 30 30 5 5 blue": 0.5,  # a colour too many
    "rect 0 0 64 64 red": 100 / 4096,
    "rect 0 0 10 10 blue": 0.0,
    "rect 0 0 64 64 white": 0.0,
    "": 0.0,
}


def test_values_by_hand():
    assert {answer: REWARD.score(task(), answer).value for answer in VALUES} == pytest.approx(VALUES)


def test_the_parts_tell_colours_and_lines():
    scored = REWARD.score(task("rect 0 0 10 10 red\ncircle 40 40 5 blue"), "rect 0 0 10 10 red\noops")
    assert scored.parts == {"commands": 1.0, "malformed": 1.0, "red": 1.0, "blue": 0.0}
    assert scored.value == 0.5


def test_overlap_equals_a_loop_over_pixels():
    random = np.random.default_rng(0)
    found, gold = random.integers(0, len(COLORS), (2, SIZE, SIZE)).astype(np.uint8)
    for i, color in enumerate(COLORS[1:], 1):
        pairs = list(zip(found.ravel().tolist(), gold.ravel().tolist(), strict=True))
        both = sum(a == i and b == i for a, b in pairs)
        either = sum(i in (a, b) for a, b in pairs)
        assert color_overlap(found, gold)[color] == pytest.approx(both / either)


def test_gold_that_cant_be_drawn_is_invalid():
    for metadata in ({}, {"commands": 7}, {"commands": ""}, {"commands": "rect 0 0 red"}):
        scored = REWARD.score(Task("d9", "Draw.", (), "vision", metadata), "rect 0 0 10 10 red")
        assert scored.value is None
        assert "d9" in scored.reason


# The tasks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", SPLITS)
def test_the_oracle_scores_1_and_an_empty_canvas_0(split):
    for one in make_drawings(3, 40, split):
        assert REWARD.score(one, oracle(one)) == (1.0, "", REWARD.score(one, oracle(one)).parts)
        assert REWARD.score(one, "").value == 0.0


def test_tasks_follow_from_seed_split_and_index():
    assert make_drawings(0, 20) == make_drawings(0, 30)[:20]
    assert [one.query for one in make_drawings(0, 20)] != [one.query for one in make_drawings(1, 20)]
    assert len({one.id for split in SPLITS for seed in (0, 1) for one in make_drawings(seed, 20, split)}) == 120
    assert make_drawings(0, 0) == []


def test_splits_share_no_thing_and_each_word_of_a_test_is_met_in_training():
    pools = {split: things(split) for split in SPLITS}
    assert sum(map(len, pools.values())) == len(set().union(*pools.values())) == 12 * 6 * 9
    assert 0.75 < len(pools["train"]) / (12 * 6 * 9) < 0.85
    drawn = [{line for one in make_drawings(0, 300, split) for line in oracle(one).splitlines()} for split in SPLITS]
    assert sum(map(len, drawn)) == len(set().union(*drawn))
    for field in range(5):
        assert {thing[field] for thing in pools["test"]} <= {thing[field] for thing in pools["train"]}


def test_things_lie_apart_so_that_the_order_of_commands_does_not_matter():
    for one in make_drawings(5, 60, most=9):
        lines = oracle(one).splitlines()
        assert sum((pixels(line) > 0).sum() for line in lines) == (pixels(oracle(one)) > 0).sum()
        assert REWARD.score(one, "\n".join(reversed(lines))).value == 1.0


def test_pictures_have_one_to_three_things_and_the_query_tells_each():
    counts = Counter(len(oracle(one).splitlines()) for one in make_drawings(0, 300))
    assert set(counts) == {1, 2, 3}
    assert min(counts.values()) > 60
    one = make_drawings(0, 1)[0]
    assert all(line.split()[-1] in one.query.split("\n")[0] for line in oracle(one).splitlines())


def test_settings_that_mean_nothing_are_refused():
    for bad in ({"split": "dev"}, {"most": 0}, {"most": 10}, {"count": -1}, {"seed": -1}):
        with pytest.raises(BadInput):
            make_drawings(**({"seed": 0, "count": 3, "split": "train"} | bad))


# Files ------------------------------------------------------------------------------------------------


def test_a_picture_is_saved_as_it_is_seen(tmp_path):
    from PIL import Image

    drawn = render("rect 0 0 10 10 red\ncircle 40 40 9 blue")
    save_png(drawn.pixels_yx, tmp_path / "one.png", scale=2)
    with Image.open(tmp_path / "one.png") as image:
        assert image.size == (128, 128)
        np.testing.assert_array_equal(np.asarray(image)[::2, ::2], as_image(drawn.pixels_yx))
    assert picture_of("rect 0 0 64 64 red")[5, 5].tolist() == [220, 40, 40]
    with pytest.raises(BadInput, match="absent"):
        save_png(drawn.pixels_yx, tmp_path / "absent" / "one.png")
