"""Rewards over images: boxes, points and counts that an answer names, and how well an image and a text agree.

    box_iou, box_f1    mean IoU of the best one-to-one matching with the gold boxes, or F1 at a threshold
    point_in_box       F1 of points, where a point in a gold box matches
    count              1 where the last number that the answer names is the gold one
    caption_score      an injected image-text score of the task's image and the answer
    picture_score      the score of what the answer draws and the task's query

Gold boxes are `task.metadata["boxes"]`, or what `task.answers` spell: "[10, 20, 40, 60]" is a box (x1, y1, x2, y2),
whichever corners were meant. A box too many costs as much as one that is missing. What the answer lacks is 0; what the
task lacks, such as its image file, is invalid. Of hostile text only the last `MOST` characters are read, numbers have
at most nine digits on either side, and more than `SHOWN` boxes are no answer. Letters: b box of an answer, g gold box.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from flowgrpo.contracts import Reward, Scored
from flowgrpo.files import is_file, pip_install
from flowgrpo.rewards.answers.numbers import SMALL
from flowgrpo.rewards.combine import model_scores, prepared, tried
from flowgrpo.types import BadInput, Task, first_line

MOST = 200_000  # characters
SHOWN = 100  # boxes or points
MOST_PIXELS = 64 << 20  # of an image that is opened

ScorePairs = Callable[[Sequence[np.ndarray], Sequence[str]], np.ndarray]  # images [y x 3] and texts -> [n]
Read = Callable[[str], np.ndarray]  # text -> rows of numbers
Worth = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (what was read, gold boxes) -> [b g]
Measure = Callable[[float, int, int], float]  # (worth of all pairs, boxes, gold boxes) -> value

_NUMBER = r"([-+]?(?:\d{1,9}(?:\.\d{0,9})?|\.\d{1,9}))"
_COMMA = r"\s{0,8},\s{0,8}"
_OPEN, _CLOSE = r"[\[(]\s{0,8}", r"\s{0,8}[\])]"
BOX = re.compile(_OPEN + _COMMA.join([_NUMBER] * 4) + _CLOSE)
POINT = re.compile(_OPEN + _COMMA.join([_NUMBER] * 2) + _CLOSE)
COUNTS = {word: value for word, value in SMALL.items() if value <= 20} | {"no": 0, "none": 0}
_COUNT = re.compile(rf"(?<![\w.,])(?:-?\d{{1,9}}(?![\w]|[.,]\d)|(?:{'|'.join(COUNTS)})\b)", re.IGNORECASE)


# What answers name --------------------------------------------------------------------------------------


def read_boxes(text: str) -> np.ndarray:
    """Read every box in a text, corners in order -> [b 4]; at most `SHOWN` + 1 of them."""
    return sort_corners(_found(BOX, text, 4))


def read_points(text: str) -> np.ndarray:
    """Read every point in a text -> [b 2]; at most `SHOWN` + 1 of them."""
    return _found(POINT, text, 2)


def read_count(text: str) -> int | None:
    """Read the last whole number that a text names, in digits or as a word up to twenty; None where it names none."""
    found = None
    for match in _COUNT.finditer(text[-MOST:]):
        found = match[0]
    return None if found is None else COUNTS[found.lower()] if found.lower() in COUNTS else int(found)


def sort_corners(box_bf: np.ndarray) -> np.ndarray:
    """Reorder the corners of boxes so that x1 <= x2 and y1 <= y2 -> [b 4]."""
    first, second = box_bf[:, :2], box_bf[:, 2:]
    return np.concatenate([np.minimum(first, second), np.maximum(first, second)], axis=1)


def iou(box_bf: np.ndarray, gold_gf: np.ndarray) -> np.ndarray:
    """Divide the area of intersection by the area of union, for every pair -> [b g]; 0 where both are empty."""
    low = np.maximum(box_bf[:, None, :2], gold_gf[None, :, :2])
    high = np.minimum(box_bf[:, None, 2:], gold_gf[None, :, 2:])
    shared_bg = np.maximum(high - low, 0.0).prod(axis=2)
    whole_bg = _area(box_bf)[:, None] + _area(gold_gf)[None, :] - shared_bg
    return np.divide(shared_bg, whole_bg, out=np.zeros_like(shared_bg), where=whole_bg > 0)


def inside(point_bf: np.ndarray, gold_gf: np.ndarray) -> np.ndarray:
    """Say whether each point lies in each box, its edge included -> [b g], as numbers."""
    above = point_bf[:, None, :] >= gold_gf[None, :, :2]
    below = point_bf[:, None, :] <= gold_gf[None, :, 2:]
    return (above & below).all(axis=2).astype(float)


def best_match(worth_bg: np.ndarray) -> np.ndarray:
    """Pair boxes, each with at most one partner, so that the summed worth is largest -> worth of each pair [pairs]."""
    from scipy.optimize import linear_sum_assignment

    return worth_bg[linear_sum_assignment(worth_bg, maximize=True)]


def _found(pattern: re.Pattern[str], text: str, width: int) -> np.ndarray:
    """Read the numbers of the first matches, a row each."""
    matches = islice(pattern.finditer(text[-MOST:]), SHOWN + 1)
    return as_rows(([float(part) for part in match.groups()] for match in matches), width)


def as_rows(rows: Iterable[Sequence[float]], width: int) -> np.ndarray:
    """Make rows of numbers an array of float64 [b width], also where there are none."""
    return np.asarray([*rows], np.float64).reshape(-1, width)


def _area(box_bf: np.ndarray) -> np.ndarray:
    return np.maximum(box_bf[:, 2:] - box_bf[:, :2], 0.0).prod(axis=1)


# Rewards of boxes, points and counts ---------------------------------------------------------------------


def box_iou() -> Reward:
    """Score the mean IoU under the best matching; what has no partner counts 0."""
    return _matched("box", read_boxes, iou, lambda worth, found, gold: worth / max(found, gold))


def box_f1(*, threshold: float = 0.5) -> Reward:
    """Score the F1 of boxes, where a pair matches at an IoU of at least `threshold`."""
    if not 0 < threshold <= 1:
        raise BadInput(f"threshold is {threshold}, but an IoU to reach lies above 0 and at most at 1")
    return _matched("box", read_boxes, lambda box_bf, gold_gf: (iou(box_bf, gold_gf) >= threshold).astype(float), _f1)


def point_in_box() -> Reward:
    """Score the F1 of points, where a pair matches if the point lies in the box: 1 for one in the one gold box."""
    return _matched("point", read_points, inside, _f1)


def count_match(*, credit: Callable[[int, int], float] = lambda found, gold: float(found == gold)) -> Reward:
    """Score whether the answer names the right number; `credit(found, gold)` may pay for a near miss (`near`)."""

    def score(task: Task, answer: str) -> Scored:
        given = task.metadata.get("count", task.answers[0] if task.answers else None)
        gold = given if isinstance(given, int) and not isinstance(given, bool) else read_count(str(given or ""))
        if gold is None:
            where = "metadata['count'] or in its answers"
            return Scored(None, f"task {task.id} has no gold count: put a whole number in {where}")
        found = read_count(answer)
        if found is None:
            return Scored(0.0, "the answer names no whole number")
        return Scored(credit(found, gold), "", {"found": float(found), "gold": float(gold)})

    return Reward(score)


def near(found: int, gold: int) -> float:
    """Give 1 for the right number, less by the relative error, 0 from an error of the number itself on."""
    return max(0.0, 1.0 - abs(found - gold) / max(abs(gold), 1))


def _matched(what: str, read: Read, worth: Worth, measure: Measure) -> Reward:
    """Make the reward that measures the best matching of what the answer names and the gold boxes."""

    def score(task: Task, answer: str) -> Scored:
        gold_gf = gold_boxes(task)
        found_bf = read(answer)
        if not len(found_bf):
            return Scored(0.0, f"the answer names no {what}")
        if len(found_bf) > SHOWN:
            return Scored(0.0, f"the answer names more than {SHOWN}: a {what} for each gold box is asked for")
        matched = float(best_match(worth(found_bf, gold_gf)).sum())
        parts = {"found": float(len(found_bf)), "gold": float(len(gold_gf)), "worth": matched}
        return Scored(measure(matched, len(found_bf), len(gold_gf)), "", parts)

    return Reward(partial(tried, score))


def _f1(worth: float, found: int, gold: int) -> float:
    return 2.0 * worth / (found + gold)


def gold_boxes(task: Task) -> np.ndarray:
    """Read the task's gold boxes, corners in order -> [g 4]; `BadInput` where it has none that can be read."""
    given = task.metadata.get("boxes")
    try:
        gold_gf = read_boxes("\n".join(task.answers)) if given is None else sort_corners(as_rows(given, 4))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        gold_gf = np.full((1, 4), np.nan)
    if len(gold_gf) and np.isfinite(gold_gf).all() and len(gold_gf) <= SHOWN:
        return gold_gf
    fix = f"put 1 to {SHOWN} boxes [x1, y1, x2, y2] into metadata['boxes'] or its answers"
    raise BadInput(f"task {task.id} has no gold boxes that can be read: {fix}")


# Rewards of an image and a text ------------------------------------------------------------------------------


def caption_score(score_pairs: ScorePairs, *, folder: str | Path = ".", key: str = "image") -> Reward:
    """Score how well the answer describes the task's image, whose path below `folder` is `metadata[key]`."""

    def pair(task: Task, answer: str) -> tuple[np.ndarray, str]:
        given = task.metadata.get(key)
        if not isinstance(given, str | Path) or not str(given):
            raise BadInput(f"task {task.id} has no image: put its path into metadata[{key!r}]")
        return load_image(Path(folder) / given), answer

    return _image_text(score_pairs, pair)


def picture_score(score_pairs: ScorePairs, render: Callable[[str], np.ndarray]) -> Reward:
    """Score how well what the answer draws shows the task's query; `render` makes an image [y x 3] of an answer."""
    return _image_text(score_pairs, lambda task, answer: (render(answer), task.query))


def load_image(path: str | Path) -> np.ndarray:
    """Read an image file as RGB bytes [y x 3]; `BadInput` naming the path where it can't be had."""
    try:
        from PIL import Image
    except ImportError as error:
        raise BadInput(f"images need Pillow: {pip_install('vision')}") from error
    path = Path(path)
    if not is_file(path):
        raise BadInput(f"image {path} does not exist: fix the task's path, or the folder that it is looked for in")
    try:
        with Image.open(path) as image:
            if image.width * image.height > MOST_PIXELS:
                raise BadInput(
                    f"image {path} has {image.width} x {image.height} pixels; at most {MOST_PIXELS} are read"
                )
            return np.asarray(image.convert("RGB"))
    except BadInput:
        raise
    except Exception as error:  # the readers of many formats, which raise whatever they like
        raise BadInput(f"image {path} can't be read ({first_line(error)}): replace the file") from error


def _image_text(score_pairs: ScorePairs, pair: Callable[[Task, str], tuple[np.ndarray, str]]) -> Reward:
    """Make a reward that scores all pairs of a call together; an empty answer is 0, a missing image is invalid."""
    return prepared(
        lambda task, answer: pair(task, answer) if answer.strip() else Scored(0.0, "the answer is empty"),
        lambda pairs: model_scores("image-text model", lambda both: score_pairs(*zip(*both, strict=True)), pairs),
    )
