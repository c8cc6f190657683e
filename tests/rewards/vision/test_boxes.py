"""Boxes, points, counts and image-text scores: worked numbers, matching, missing files."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowgrpo.rewards.vision.boxes import (
    MAX_BOXES,
    best_match,
    box_f1,
    box_iou,
    caption_score,
    count_match,
    iou,
    load_image,
    near,
    picture_score,
    point_in_box,
    read_boxes,
    read_count,
    read_points,
    sort_corners,
)
from flowgrpo.types import BadInput, Task


def task(*boxes, answers=(), **metadata):
    return Task("t7", "Where?", answers, "vision", ({"boxes": boxes} if boxes else {}) | metadata)


UNIT = [0.0, 0.0, 10.0, 10.0]
TWO = task(UNIT, [20, 0, 30, 10])
FULL, OTHER = "[0, 0, 10, 10]", "[20, 0, 30, 10]"
numbers = st.integers(-20, 20).map(float)
boxes = st.lists(st.tuples(numbers, numbers, numbers, numbers), min_size=1, max_size=5)


def test_boxes_points_and_counts_are_read_from_text():
    text = 'It is {"bbox_2d": [10, 20.5, 3 ,40]} and (1,2,3,4), not [1, 2, 3] or [1, 2, 3, 4, 5].'
    np.testing.assert_array_equal(read_boxes(text), [[3, 20.5, 10, 40], [1, 2, 3, 4]])
    np.testing.assert_array_equal(read_points("click (-3, .5) or [7,8]"), [[-3, 0.5], [7, 8]])
    assert read_boxes("none").shape == (0, 4)
    counts = {"There are three cats.": 3, "First I saw 7, but there are 12.": 12, "Twelve": 12, "no cats": 0, "-4": -4}
    counts |= dict.fromkeys(("3.5 cats", "1,000 cats", "a2b someone", "", "9" * 5000))
    assert {text: read_count(text) for text in counts} == counts


@pytest.mark.parametrize(
    ("gold", "answer", "mean", "f1"),
    [
        (task(UNIT), FULL, 1.0, 1.0),
        (task(UNIT), "[10, 10, 0, 0]", 1.0, 1.0),  # the other corners
        (task(UNIT), "[0, 0, 10, 5]", 0.5, 1.0),
        (task(UNIT), "[5, 0, 15, 10]", 1 / 3, 0.0),
        (task(UNIT), "[20, 20, 30, 30]", 0.0, 0.0),
        (task(UNIT), "[3, 3, 3, 3]", 0.0, 0.0),
        (task(UNIT), FULL + OTHER, 0.5, 2 / 3),  # one too many
        (TWO, OTHER + FULL, 1.0, 1.0),
        (TWO, FULL + FULL, 0.5, 0.5),  # repeating one gains nothing
        (TWO, FULL, 0.5, 2 / 3),
        (task(answers=(FULL,)), FULL, 1.0, 1.0),
    ],
)
def test_boxes_by_hand(gold, answer, mean, f1):
    assert box_iou().score(gold, answer).value == pytest.approx(mean)
    assert box_f1().score(gold, answer).value == pytest.approx(f1)


def test_many_boxes_gain_nothing():
    many = " ".join(f"[{x}, {y}, {x + 10}, {y + 10}]" for x in range(10) for y in range(10))
    assert box_f1(threshold=0.99).score(task(UNIT), many).value == pytest.approx(2 / 101)
    assert box_iou().score(task(UNIT), "none") == (0.0, "the answer names no box", {})
    scored = box_iou().score(task(UNIT), many + "[1, 2, 3, 4]")
    assert scored.value == 0.0
    assert str(MAX_BOXES) in scored.reason


@pytest.mark.parametrize(
    ("reward", "gold", "answer", "value"),
    [
        (point_in_box(), task(UNIT), "(10, 0)", 1.0),
        (point_in_box(), task(UNIT), "(10.1, 0)", 0.0),
        (point_in_box(), TWO, "(25, 5), (5, 5)", 1.0),
        (point_in_box(), TWO, "(5, 5), (6, 6)", 0.5),
        (count_match(), task(count=4), "I see four.", 1.0),
        (count_match(), task(count=4), "I see 5.", 0.0),
        (count_match(), task(count=4), "many", 0.0),
        (count_match(), task(answers=("4",)), "4", 1.0),
        (count_match(), task(), "4", None),
        (count_match(), task(count="many"), "4", None),
        (count_match(), task(count=True), "4", None),
        (count_match(value_of=near), task(count=4), "5", 0.75),
        (count_match(value_of=near), task(count=0), "9", 0.0),
    ],
)
def test_points_and_counts_by_hand(reward, gold, answer, value):
    assert reward.score(gold, answer).value == value


@given(boxes, boxes)
def test_the_matching_is_the_best_of_all_and_iou_is_symmetric(found, gold):
    found_bf, gold_gf = (sort_corners(np.array(part)) for part in (found, gold))
    worth_bg = iou(found_bf, gold_gf)
    np.testing.assert_allclose(worth_bg, iou(gold_gf, found_bf).T)
    small, large = sorted(worth_bg.shape)
    wide = worth_bg if worth_bg.shape[0] == small else worth_bg.T
    best = max(
        sum(wide[i, j] for i, j in enumerate(columns)) for columns in itertools.permutations(range(large), small)
    )
    assert best_match(worth_bg).sum() == pytest.approx(best)


def test_gold_boxes_that_cant_be_read_are_invalid_and_bad_thresholds_refused():
    for bad in ([], "x", [[1, 2, 3]], [[1, 2, 3, float("nan")]], [["a"] * 4], 7, [[1, 2, 3, 4]] * 101):
        for reward in (box_iou(), box_f1(), point_in_box()):
            scored = reward.score(task(boxes=bad), FULL)
            assert scored.value is None
            assert "t7" in scored.reason
    assert box_iou().score(task(), FULL).value is None
    for threshold in (0.0, 1.5, -1.0):
        with pytest.raises(BadInput, match="threshold"):
            box_f1(threshold=threshold)


def brightness(images, texts):
    """Mean red plus the length of the text."""
    return np.array([image[..., 0].mean() + len(text) for image, text in zip(images, texts, strict=True)])


@pytest.fixture
def folder(tmp_path):
    from PIL import Image

    Image.new("RGB", (4, 3), (10, 0, 0)).save(tmp_path / "dark.png")
    Image.new("L", (4, 3), 90).save(tmp_path / "grey.png")
    (tmp_path / "text.png").write_text("no image")
    return tmp_path


def test_captions_are_scored_against_images_and_drawings_against_queries(folder):
    reward = caption_score(brightness, folder=folder)
    tasks = [task(image=name) for name in ("dark.png", "grey.png", "absent.png", "dark.png")]
    results = reward.score_all(tasks, ["abc", "abc", "abc", " "])
    assert [result.value for result in results] == [13.0, 93.0, None, 0.0]
    assert results[0] == reward.score(tasks[0], "abc")
    drawn = picture_score(brightness, lambda answer: np.full((2, 2, 3), len(answer), np.uint8))
    assert drawn.score(task(), "rect").value == 4 + len("Where?")


def test_a_missing_image_or_score_is_invalid_and_the_path_is_named(folder, monkeypatch):
    for name, message in (("absent.png", "absent.png does not exist"), ("text.png", "text.png can't be read")):
        scored = caption_score(brightness, folder=folder).score(task(image=name), "abc")
        assert scored.value is None
        assert message in scored.reason
        with pytest.raises(BadInput, match=name):
            load_image(folder / name)
    assert "metadata['image']" in caption_score(brightness, folder=folder).score(task(), "abc").reason

    def fail(*_):
        raise RuntimeError("device lost")

    for scorer in (fail, lambda images, _: np.full(len(images), np.nan)):
        assert caption_score(scorer, folder=folder).score(task(image="dark.png"), "abc").value is None
    monkeypatch.setattr("flowgrpo.rewards.vision.boxes.MAX_PIXELS", 11)  # it is refused before it is read
    with pytest.raises(BadInput, match=r"dark.png has 4 x 3 pixels"):
        load_image(folder / "dark.png")
