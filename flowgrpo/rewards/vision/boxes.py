"""Rewards over images: boxes, points and counts in an answer, and image-text scores.

    box_iou, box_f1    mean IoU of the best one-to-one matching with the gold boxes, or F1 at a threshold
    point_in_box       F1 of points; a point matches a gold box that contains it
    count_match        1 if the last number in the answer is the gold one
    caption_score      an injected image-text score of the task's image and the answer
    picture_score      an injected image-text score of the picture that the answer draws and the task's query

Gold boxes are `task.metadata["boxes"]`, or are read from `task.answers`: "[10, 20, 40, 60]" is a box (x1, y1, x2, y2),
any two opposite corners. A superfluous box costs as much as a missing one. An answer that lacks something scores 0; a
task that lacks something, such as its image file, is invalid. Of hostile text only the last `MAX_CHARACTERS` are read,
numbers have at most nine digits before and after the point, and more than `MAX_BOXES` boxes score 0. Axis letters:
b box of an answer, g gold box.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from flowgrpo.contracts import Reward, RewardResult
from flowgrpo.files import is_file, pip_install
from flowgrpo.rewards.answers.numbers import SMALL_NUMBERS
from flowgrpo.rewards.combine import invalid_if_bad_input, model_scores, prepared_reward
from flowgrpo.types import BadInput, Task, first_line

MAX_CHARACTERS = 200_000  # of an answer
MAX_BOXES = 100  # boxes or points
MAX_PIXELS = 64 << 20  # of an image file

ScorePairs = Callable[[Sequence[np.ndarray], Sequence[str]], np.ndarray]  # images [y x 3] and texts -> [n]
Read = Callable[[str], np.ndarray]  # text -> rows of numbers
PairScore = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (boxes or points of an answer, gold boxes) -> [b g]
Measure = Callable[[float, int, int], float]  # (summed score of the matched pairs, boxes, gold boxes) -> value

_NUMBER = r"([-+]?(?:\d{1,9}(?:\.\d{0,9})?|\.\d{1,9}))"
_COMMA = r"\s{0,8},\s{0,8}"
_OPEN, _CLOSE = r"[\[(]\s{0,8}", r"\s{0,8}[\])]"
BOX = re.compile(_OPEN + _COMMA.join([_NUMBER] * 4) + _CLOSE)
POINT = re.compile(_OPEN + _COMMA.join([_NUMBER] * 2) + _CLOSE)
COUNTS = {word: value for word, value in SMALL_NUMBERS.items() if value <= 20} | {"no": 0, "none": 0}
_COUNT = re.compile(rf"(?<![\w.,])(?:-?\d{{1,9}}(?![\w]|[.,]\d)|(?:{'|'.join(COUNTS)})\b)", re.IGNORECASE)


# Boxes, points and counts in a text ----------------------------------------------------------------------


def read_boxes(text: str) -> np.ndarray:
    """Parse the boxes in a text, corners in order -> [b 4]; at most `MAX_BOXES` + 1 of them."""
    return sort_corners(_read_rows(BOX, text, 4))


def read_points(text: str) -> np.ndarray:
    """Parse the points in a text -> [b 2]; at most `MAX_BOXES` + 1 of them."""
    return _read_rows(POINT, text, 2)


def read_count(text: str) -> int | None:
    """Last whole number in a text, in digits or as a word up to twenty; None if there is none."""
    last = None
    for match in _COUNT.finditer(text[-MAX_CHARACTERS:]):
        last = match[0]
    return None if last is None else COUNTS[last.lower()] if last.lower() in COUNTS else int(last)


def sort_corners(box_bf: np.ndarray) -> np.ndarray:
    """Reorder the corners of boxes so that x1 <= x2 and y1 <= y2 -> [b 4]."""
    first, second = box_bf[:, :2], box_bf[:, 2:]
    return np.concatenate([np.minimum(first, second), np.maximum(first, second)], axis=1)


def iou(box_bf: np.ndarray, gold_gf: np.ndarray) -> np.ndarray:
    """Area of intersection over area of union, for every pair -> [b g]; 0 if both are empty."""
    low = np.maximum(box_bf[:, None, :2], gold_gf[None, :, :2])
    high = np.minimum(box_bf[:, None, 2:], gold_gf[None, :, 2:])
    overlap_bg = np.maximum(high - low, 0.0).prod(axis=2)
    union_bg = _area(box_bf)[:, None] + _area(gold_gf)[None, :] - overlap_bg
    return np.divide(overlap_bg, union_bg, out=np.zeros_like(overlap_bg), where=union_bg > 0)


def is_inside(point_bf: np.ndarray, gold_gf: np.ndarray) -> np.ndarray:
    """1.0 if a point is in a box, its edge included, else 0.0, for every pair -> [b g]."""
    above = point_bf[:, None, :] >= gold_gf[None, :, :2]
    below = point_bf[:, None, :] <= gold_gf[None, :, 2:]
    return (above & below).all(axis=2).astype(float)


def best_match(score_bg: np.ndarray) -> np.ndarray:
    """One-to-one matching with the largest summed score -> score of each matched pair [pairs]."""
    from scipy.optimize import linear_sum_assignment

    return score_bg[linear_sum_assignment(score_bg, maximize=True)]


def _read_rows(pattern: re.Pattern[str], text: str, width: int) -> np.ndarray:
    """Numbers of the first matches, one row each."""
    matches = islice(pattern.finditer(text[-MAX_CHARACTERS:]), MAX_BOXES + 1)
    return to_rows(([float(part) for part in match.groups()] for match in matches), width)


def to_rows(rows: Iterable[Sequence[float]], width: int) -> np.ndarray:
    """Rows of numbers as a float64 array [b width], also if there are none."""
    return np.asarray([*rows], np.float64).reshape(-1, width)


def _area(box_bf: np.ndarray) -> np.ndarray:
    return np.maximum(box_bf[:, 2:] - box_bf[:, :2], 0.0).prod(axis=1)


# Rewards of boxes, points and counts ---------------------------------------------------------------------


def box_iou() -> Reward:
    """Mean IoU under the best matching; a box without a partner counts 0."""
    return _matching_reward("box", read_boxes, iou, lambda total, count, gold: total / max(count, gold))


def box_f1(*, threshold: float = 0.5) -> Reward:
    """F1 of boxes; a pair matches at an IoU of at least `threshold`."""
    if not 0 < threshold <= 1:
        raise BadInput(f"threshold is {threshold}, but an IoU threshold must be above 0 and at most 1")
    return _matching_reward(
        "box", read_boxes, lambda box_bf, gold_gf: (iou(box_bf, gold_gf) >= threshold).astype(float), _f1
    )


def point_in_box() -> Reward:
    """F1 of points; a pair matches if the point is in the gold box."""
    return _matching_reward("point", read_points, is_inside, _f1)


def count_match(*, value_of: Callable[[int, int], float] = lambda count, gold: float(count == gold)) -> Reward:
    """1 if the answer names the right number, else 0.

    `value_of(count, gold)` may give a part of 1 for a near miss, as `near` does.
    """

    def score(task: Task, answer: str) -> RewardResult:
        listed = task.metadata.get("count", task.answers[0] if task.answers else None)
        gold = listed if isinstance(listed, int) and not isinstance(listed, bool) else read_count(str(listed or ""))
        if gold is None:
            fix = "put a whole number in metadata['count'] or in its answers"
            return RewardResult(None, f"task {task.id} has no gold count: {fix}")
        count = read_count(answer)
        if count is None:
            return RewardResult(0.0, "the answer names no whole number")
        return RewardResult(value_of(count, gold), "", {"found": float(count), "gold": float(gold)})

    return Reward(score)


def near(count: int, gold: int) -> float:
    """1 minus the relative error, at least 0."""
    return max(0.0, 1.0 - abs(count - gold) / max(abs(gold), 1))


def _matching_reward(kind: str, read: Read, pair_score: PairScore, measure: Measure) -> Reward:
    """Make the reward that measures the best matching of the boxes or points of an answer with the gold boxes."""

    def score(task: Task, answer: str) -> RewardResult:
        gold_gf = gold_boxes(task)
        answer_bf = read(answer)
        if not len(answer_bf):
            return RewardResult(0.0, f"the answer names no {kind}")
        if len(answer_bf) > MAX_BOXES:
            return RewardResult(0.0, f"the answer names more than {MAX_BOXES}: a {kind} for each gold box is asked for")
        total = float(best_match(pair_score(answer_bf, gold_gf)).sum())
        parts = {"found": float(len(answer_bf)), "gold": float(len(gold_gf)), "worth": total}
        return RewardResult(measure(total, len(answer_bf), len(gold_gf)), "", parts)

    return Reward(partial(invalid_if_bad_input, score))


def _f1(total: float, count: int, gold: int) -> float:
    return 2.0 * total / (count + gold)


def gold_boxes(task: Task) -> np.ndarray:
    """The task's gold boxes, corners in order -> [g 4]; raises `BadInput` if it has none that can be read."""
    listed = task.metadata.get("boxes")
    try:
        gold_gf = read_boxes("\n".join(task.answers)) if listed is None else sort_corners(to_rows(listed, 4))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        gold_gf = np.full((1, 4), np.nan)
    if len(gold_gf) and np.isfinite(gold_gf).all() and len(gold_gf) <= MAX_BOXES:
        return gold_gf
    fix = f"put 1 to {MAX_BOXES} boxes [x1, y1, x2, y2] into metadata['boxes'] or its answers"
    raise BadInput(f"task {task.id} has no gold boxes that can be read: {fix}")


# Rewards of an image and a text ------------------------------------------------------------------------------


def caption_score(score_pairs: ScorePairs, *, folder: str | Path = ".", key: str = "image") -> Reward:
    """Score of the answer as a caption of the task's image, whose path below `folder` is `metadata[key]`."""

    def pair(task: Task, answer: str) -> tuple[np.ndarray, str]:
        path = task.metadata.get(key)
        if not isinstance(path, str | Path) or not str(path):
            raise BadInput(f"task {task.id} has no image: put its path into metadata[{key!r}]")
        return load_image(Path(folder) / path), answer

    return _image_text(score_pairs, pair)


def picture_score(score_pairs: ScorePairs, render: Callable[[str], np.ndarray]) -> Reward:
    """Score of the picture that the answer draws against the task's query; `render` draws an answer [y x 3]."""
    return _image_text(score_pairs, lambda task, answer: (render(answer), task.query))


def load_image(path: str | Path) -> np.ndarray:
    """Read an image file as RGB bytes [y x 3]; raises `BadInput` that names the path if it can't be read."""
    try:
        from PIL import Image
    except ImportError as error:
        raise BadInput(f"images need Pillow: {pip_install('vision')}") from error
    path = Path(path)
    if not is_file(path):
        raise BadInput(f"image {path} does not exist: fix the task's path or the folder")
    try:
        with Image.open(path) as image:
            if image.width * image.height > MAX_PIXELS:
                raise BadInput(f"image {path} has {image.width} x {image.height} pixels; at most {MAX_PIXELS} are read")
            return np.asarray(image.convert("RGB"))
    except BadInput:
        raise
    except Exception as error:  # readers of many formats, with errors of their own
        raise BadInput(f"image {path} can't be read ({first_line(error)}): replace the file") from error


def _image_text(score_pairs: ScorePairs, pair: Callable[[Task, str], tuple[np.ndarray, str]]) -> Reward:
    """Make a reward that scores all pairs of a call together; an empty answer scores 0, a missing image is invalid."""
    return prepared_reward(
        lambda task, answer: pair(task, answer) if answer.strip() else RewardResult(0.0, "the answer is empty"),
        lambda pairs: model_scores("image-text model", lambda both: score_pairs(*zip(*both, strict=True)), pairs),
    )
