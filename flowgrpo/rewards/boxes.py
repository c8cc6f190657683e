"""Boxes, points and counts in text: an answer flows in, arrays flow out; and how boxes are matched.

    "the dogs are at [10, 20, 40, 60] and [5, 5, 9, 9]" -> box_bf [[10 20 40 60] [5 5 9 9]]

A box is (x1, y1, x2, y2), whichever corners were meant. Only the last `MOST` characters of an answer are read, numbers
have at most nine digits on either side, and more than `SHOWN` boxes are too many to be an answer, so hostile text costs
no long time. Letters: b box of the answer, g gold box.
"""

import re
from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np

MOST = 200_000  # characters
SHOWN = 100  # boxes or points

_NUMBER = r"([-+]?(?:\d{1,9}(?:\.\d{0,9})?|\.\d{1,9}))"
_COMMA = r"\s{0,8},\s{0,8}"
_OPEN, _CLOSE = r"[\[(]\s{0,8}", r"\s{0,8}[\])]"
BOX = re.compile(_OPEN + _COMMA.join([_NUMBER] * 4) + _CLOSE)
POINT = re.compile(_OPEN + _COMMA.join([_NUMBER] * 2) + _CLOSE)
WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
)
COUNTS = {word: value for value, word in enumerate([*WORDS.split(), "eighteen", "nineteen", "twenty"])} | {
    "no": 0,
    "none": 0,
}
_COUNT = re.compile(rf"(?<![\w.,])(?:-?\d{{1,9}}(?![\w]|[.,]\d)|(?:{'|'.join(COUNTS)})\b)", re.IGNORECASE)


def read_boxes(text: str) -> np.ndarray:
    """Every box in a text, corners in order -> [b 4]; at most `SHOWN` + 1 of them."""
    return sort_corners(_found(BOX, text, 4))


def read_points(text: str) -> np.ndarray:
    """Every point in a text -> [b 2]; at most `SHOWN` + 1 of them."""
    return _found(POINT, text, 2)


def read_count(text: str) -> int | None:
    """The last whole number that a text names, in digits or as a word up to twenty; None where it names none."""
    found = None
    for match in _COUNT.finditer(text[-MOST:]):
        found = match[0]
    return None if found is None else COUNTS[found.lower()] if found.lower() in COUNTS else int(found)


def sort_corners(box_bf: np.ndarray) -> np.ndarray:
    """Reorder the corners of boxes so that x1 <= x2 and y1 <= y2 -> [b 4]."""
    first, second = box_bf[:, :2], box_bf[:, 2:]
    return np.concatenate([np.minimum(first, second), np.maximum(first, second)], axis=1)


def iou(box_bf: np.ndarray, gold_gf: np.ndarray) -> np.ndarray:
    """Area of intersection over area of union, for every pair -> [b g]; 0 where both are empty."""
    low = np.maximum(box_bf[:, None, :2], gold_gf[None, :, :2])
    high = np.minimum(box_bf[:, None, 2:], gold_gf[None, :, 2:])
    shared_bg = np.maximum(high - low, 0.0).prod(axis=2)
    whole_bg = _area(box_bf)[:, None] + _area(gold_gf)[None, :] - shared_bg
    return np.divide(shared_bg, whole_bg, out=np.zeros_like(shared_bg), where=whole_bg > 0)


def inside(point_bf: np.ndarray, gold_gf: np.ndarray) -> np.ndarray:
    """Whether each point lies in each box, its edge included -> [b g], as numbers."""
    above = point_bf[:, None, :] >= gold_gf[None, :, :2]
    below = point_bf[:, None, :] <= gold_gf[None, :, 2:]
    return (above & below).all(axis=2).astype(float)


def best_match(worth_bg: np.ndarray) -> np.ndarray:
    """Pair boxes, each with at most one partner, so that the summed worth is largest -> worth of each pair [pairs]."""
    from scipy.optimize import linear_sum_assignment

    return worth_bg[linear_sum_assignment(worth_bg, maximize=True)]


def _found(pattern: re.Pattern[str], text: str, width: int) -> np.ndarray:
    """The numbers of the first matches, a row each."""
    matches = islice(pattern.finditer(text[-MOST:]), SHOWN + 1)
    return as_rows(([float(part) for part in match.groups()] for match in matches), width)


def as_rows(rows: Iterable[Sequence[float]], width: int) -> np.ndarray:
    """Rows of numbers as float64 [b width], also where there are none."""
    return np.asarray([*rows], np.float64).reshape(-1, width)


def _area(box_bf: np.ndarray) -> np.ndarray:
    return np.maximum(box_bf[:, 2:] - box_bf[:, :2], 0.0).prod(axis=1)
