"""Rewards over images: boxes, points and counts that an answer names, and how well an image and a text agree.

    box_iou     mean IoU of the best one-to-one matching, over the larger number of boxes
    box_f1      2 x matches / (boxes + gold boxes), a match being an IoU of at least `threshold`
    point       the same for points, a match being a point in a gold box
    count       1 where the last number that the answer names is the gold one
    caption     an injected image-text score of the task's image and the answer
    picture     the same of what the answer draws and the task's query

Gold boxes are `task.metadata["boxes"]`, or what `task.answers` spell. A box too many costs as much as one that is
missing. What the answer lacks is 0; what the task lacks, such as its image file, is invalid.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from flowgrpo.contracts import Reward, Scored
from flowgrpo.rewards.boxes import (
    SHOWN,
    as_rows,
    best_match,
    inside,
    iou,
    read_boxes,
    read_count,
    read_points,
    sort_corners,
)
from flowgrpo.rewards.prompts import first_line
from flowgrpo.types import BadInput, Task

MOST_PIXELS = 64 << 20  # of an image that is opened

ScorePairs = Callable[[Sequence[np.ndarray], Sequence[str]], np.ndarray]  # images [y x 3] and texts -> [n]
Read = Callable[[str], np.ndarray]  # text -> rows of numbers
Worth = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (what was read, gold boxes) -> [b g]
Measure = Callable[[np.ndarray, int, int], float]  # (worth of the pairs, boxes, gold boxes) -> value


# Boxes, points and counts -----------------------------------------------------------------------------


def box_iou() -> Reward:
    """Mean IoU under the best matching; what has no partner counts 0."""
    return Reward(partial(_matched, what="box", read=read_boxes, worth=iou, measure=_mean))


def box_f1(*, threshold: float = 0.5) -> Reward:
    """F1 of boxes, where a pair matches at an IoU of at least `threshold`."""
    if not 0 < threshold <= 1:
        raise BadInput(f"threshold is {threshold}, but an IoU to reach lies above 0 and at most at 1")
    return Reward(
        partial(_matched, what="box", read=read_boxes, worth=partial(_reaches, threshold=threshold), measure=_f1)
    )


def point_in_box() -> Reward:
    """F1 of points, where a pair matches if the point lies in the box: 1 for one point in the one gold box."""
    return Reward(partial(_matched, what="point", read=read_points, worth=inside, measure=_f1))


def count(*, credit: Callable[[int, int], float] = lambda found, gold: float(found == gold)) -> Reward:
    """Whether the answer names the right number; `credit(found, gold)` may pay for a near miss, as `near` does."""
    return Reward(partial(_counted, credit=credit))


def near(found: int, gold: int) -> float:
    """1 for the right number, less by the relative error, 0 from an error of the number itself on."""
    return max(0.0, 1.0 - abs(found - gold) / max(abs(gold), 1))


def _matched(task: Task, answer: str, *, what: str, read: Read, worth: Worth, measure: Measure) -> Scored:
    """The measure over the best matching of what the answer names and the gold boxes."""
    try:
        gold_gf = gold_boxes(task)
    except BadInput as error:
        return Scored(None, str(error))
    found_bf = read(answer)
    if not len(found_bf):
        return Scored(0.0, f"the answer names no {what}")
    if len(found_bf) > SHOWN:
        return Scored(0.0, f"the answer names more than {SHOWN}: a {what} for each gold box is asked for")
    pairs = best_match(worth(found_bf, gold_gf))
    parts = {"found": float(len(found_bf)), "gold": float(len(gold_gf)), "worth": float(pairs.sum())}
    return Scored(measure(pairs, len(found_bf), len(gold_gf)), "", parts)


def _reaches(box_bf: np.ndarray, gold_gf: np.ndarray, *, threshold: float) -> np.ndarray:
    return (iou(box_bf, gold_gf) >= threshold).astype(float)


def _mean(pairs: np.ndarray, found: int, gold: int) -> float:
    return float(pairs.sum() / max(found, gold))


def _f1(pairs: np.ndarray, found: int, gold: int) -> float:
    return float(2.0 * pairs.sum() / (found + gold))


def _counted(task: Task, answer: str, *, credit: Callable[[int, int], float]) -> Scored:
    given = task.metadata.get("count", task.answers[0] if task.answers else None)
    gold = given if isinstance(given, int) and not isinstance(given, bool) else read_count(str(given or ""))
    if gold is None:
        return Scored(
            None, f"task {task.id} has no gold count: put a whole number in metadata['count'] or in its answers"
        )
    found = read_count(answer)
    if found is None:
        return Scored(0.0, "the answer names no whole number")
    return Scored(credit(found, gold), "", {"found": float(found), "gold": float(gold)})


def gold_boxes(task: Task) -> np.ndarray:
    """The task's gold boxes, corners in order -> [g 4]; `BadInput` where it has none that can be read."""
    given = task.metadata.get("boxes")
    try:
        gold_gf = read_boxes("\n".join(task.answers)) if given is None else sort_corners(as_rows(given, 4))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        gold_gf = np.full((1, 4), np.nan)
    if len(gold_gf) and np.isfinite(gold_gf).all() and len(gold_gf) <= SHOWN:
        return gold_gf
    mend = f"put 1 to {SHOWN} boxes [x1, y1, x2, y2] into metadata['boxes'] or its answers"
    raise BadInput(f"task {task.id} has no gold boxes that can be read: {mend}")


# An image and a text ----------------------------------------------------------------------------------


def caption_score(score_pairs: ScorePairs, *, folder: str | Path = ".", key: str = "image") -> Reward:
    """How well the answer describes the task's image, whose path below `folder` is `metadata[key]`."""
    return _image_text(
        score_pairs, lambda task, _: load_image(_image_path(task, Path(folder), key)), lambda _, answer: answer
    )


def picture_score(score_pairs: ScorePairs, render: Callable[[str], np.ndarray]) -> Reward:
    """How well what the answer draws shows the task's query; `render` makes an image [y x 3] of an answer."""
    return _image_text(score_pairs, lambda _, answer: render(answer), lambda task, _: task.query)


def load_image(path: str | Path) -> np.ndarray:
    """An image file as RGB bytes [y x 3]; `BadInput` naming the path where it can't be had."""
    try:
        from PIL import Image
    except ImportError as error:
        raise BadInput("images need Pillow: pip install 'flowgrpo[vision]'") from error
    path = Path(path)
    if not path.is_file():
        raise BadInput(f"image {path} does not exist: mend the task's path, or the folder that it is looked for in")
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


def _image_path(task: Task, folder: Path, key: str) -> Path:
    given = task.metadata.get(key)
    if not isinstance(given, str | Path) or not str(given):
        raise BadInput(f"task {task.id} has no image: put its path into metadata[{key!r}]")
    return folder / given


def _image_text(score_pairs: ScorePairs, image_of: Callable, text_of: Callable[[Task, str], str]) -> Reward:
    """A reward that scores all pairs of a call together; an empty answer is 0, an image that is missing is invalid."""

    def score_many(tasks: Sequence[Task], answers: Sequence[str]) -> list[Scored]:
        images = [_try_image(image_of, task, answer) for task, answer in zip(tasks, answers, strict=True)]
        there = [i for i, image in enumerate(images) if not isinstance(image, Scored)]
        texts = [text_of(tasks[i], answers[i]) for i in there]
        scored = dict(zip(there, _score([images[i] for i in there], texts, score_pairs), strict=True))
        return [image if isinstance(image, Scored) else scored[i] for i, image in enumerate(images)]

    return Reward(lambda task, answer: score_many([task], [answer])[0], score_many)


def _try_image(image_of: Callable, task: Task, answer: str) -> np.ndarray | Scored:
    if not answer.strip():
        return Scored(0.0, "the answer is empty")
    try:
        return image_of(task, answer)
    except BadInput as error:
        return Scored(None, str(error))


def _score(images: Sequence, texts: Sequence[str], score_pairs: ScorePairs) -> list[Scored]:
    """One `Scored` for each pair."""
    if not texts:
        return []
    try:
        scores = np.asarray(score_pairs(images, texts), np.float64).reshape(len(texts))
    except Exception as error:  # a model can fail in its own way: device, memory, server; all are no score
        return [Scored(None, f"the image-text model failed: {first_line(error)}")] * len(texts)
    good = np.isfinite(scores)
    return [
        Scored(float(s)) if ok else Scored(None, f"the image-text score is {s}")
        for s, ok in zip(scores, good, strict=True)
    ]
