"""Drawing from a description: an offline vision task, from `make_drawings` to `drawing_reward`.

    query    "Draw on a white canvas of 64 x 64 pixels: a red square with sides of 20 pixels in the middle, ..."
    answer   rect 8 8 16 12 red          a filled rectangle: left, top, width, height
             circle 40 20 9 blue         a filled disc: centre, radius
             line 2 60 60 50 green       from a point to a point, one pixel wide
    value    IoU of the pixels of a colour, mean over the colours of either picture, without the background

An empty canvas scores 0, and only the same picture scores 1; a superfluous colour counts like a missing one. Gold is
`metadata["commands"]`, which `gold_commands` returns. One command per line, whole numbers from -999 to 999, colours
from `PALETTE`; later commands cover earlier ones, and pixels outside the canvas are not drawn. Malformed lines are
skipped and counted in the parts. Only the first `MAX_LINES` lines of the first `MAX_CHARACTERS` characters are read;
everything after that counts as one malformed line.

A picture has one to three shapes in different thirds of the canvas. A shape has a kind, a colour, a size and a place; a
hash assigns every combination to one split, 8 : 1 : 1. All shapes of a task belong to its split, so no shape of a test
task was ever drawn in training, though each of its words was.
"""

import hashlib
import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np

from flowgrpo.contracts import Reward, RewardResult
from flowgrpo.rewards.combine import invalid_if_bad_input
from flowgrpo.types import BadInput, Task

SIZE = 64  # pixels of a side
MAX_LINES, MAX_CHARACTERS = 64, 8192
BACKGROUND = 0
PALETTE = {  # the first is the background
    "white": (255, 255, 255),
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 80, 220),
    "yellow": (240, 200, 40),
    "black": (20, 20, 20),
    "purple": (140, 60, 180),
}
COLORS = tuple(PALETTE)

DOMAIN = "vision"
SPLITS = {"train": range(8), "validation": range(8, 9), "test": range(9, 10)}  # of ten buckets of the hash
KINDS = {"square": "with sides of {} pixels", "circle": "with a radius of {} pixels", "line": "of {} pixels, level"}
SIZES = {"square": (8, 10, 12, 14), "circle": (4, 5, 6, 7), "line": (8, 10, 12, 14)}
# The nine places and their centres; shapes never overlap, since none is wider than a third.
ROWS, COLUMNS = ("upper", "middle", "lower"), ("left", "centre", "right")
CENTRES = (11, 32, 53)
INKS = tuple(color for i, color in enumerate(COLORS) if i != BACKGROUND)

RULES = (
    "Answer with drawing commands only, one a line: `rect left top width height color`, "
    "`circle x y radius color`, `line x1 y1 x2 y2 color`. x grows to the right and y downwards, from 0 to 63. "
    f"Colors: {', '.join(INKS)}. The centres of the places lie at 11, 32 and 53 in each direction. "
    "A square of side n begins n/2 before its centre, and so does a line of n pixels, which ends after n of them."
)

row_yx, column_yx = np.mgrid[0:SIZE, 0:SIZE]


# Pictures -----------------------------------------------------------------------------------------------


class RenderedDrawing(NamedTuple):
    """A picture drawn by commands."""

    pixels_yx: np.ndarray  # indices into `COLORS`
    commands: int  # number of lines that were drawn
    malformed: int  # number of lines that were not


def render_drawing(commands: str) -> RenderedDrawing:
    """Draw commands on an empty canvas."""
    lines = commands[:MAX_CHARACTERS].splitlines()
    pixels_yx, drawn_count = np.full((SIZE, SIZE), BACKGROUND, np.uint8), 0
    stripped = [line.strip() for line in lines[:MAX_LINES] if line.strip()]
    for match in filter(None, map(COMMAND.fullmatch, stripped)):
        shape, numbers = SHAPES.get(match["shape"]), [int(number) for number in match["numbers"].split()]
        if shape is not None and match["color"] in PALETTE and len(numbers) == shape.numbers:
            pixels_yx[shape.covers(*numbers)] = COLORS.index(match["color"])
            drawn_count += 1
    is_truncated = len(commands) > MAX_CHARACTERS or len(lines) > MAX_LINES
    return RenderedDrawing(pixels_yx, drawn_count, len(stripped) - drawn_count + is_truncated)


# The shapes -------------------------------------------------------------------------------------------


class DrawCommand(NamedTuple):
    """A drawing command."""

    numbers: int  # number of its arguments
    covers: Callable[..., np.ndarray]  # arguments -> mask of the pixels that it covers [y x]


def _rect(left: int, top: int, width: int, height: int) -> np.ndarray:
    return (column_yx >= left) & (column_yx < left + width) & (row_yx >= top) & (row_yx < top + height)


def _circle(x: int, y: int, radius: int) -> np.ndarray:
    return ((column_yx - x) ** 2 + (row_yx - y) ** 2 <= radius**2) & (radius > 0)


def _line(x1: int, y1: int, x2: int, y2: int) -> np.ndarray:
    """Pixels at most half a pixel away from the line, across its longer direction."""
    width, height = x2 - x1, y2 - y1
    if max(abs(width), abs(height)) == 0:
        return (x1 == column_yx) & (y1 == row_yx)
    along, first, last = (column_yx, x1, x2) if abs(width) >= abs(height) else (row_yx, y1, y2)
    offset = np.abs((column_yx - x1) * height - (row_yx - y1) * width) / max(abs(width), abs(height))
    return (offset <= 0.5) & (along >= min(first, last)) & (along <= max(first, last))


SHAPES = {"rect": DrawCommand(4, _rect), "circle": DrawCommand(3, _circle), "line": DrawCommand(4, _line)}
COMMAND = re.compile(r"(?P<shape>[a-z]{1,8})(?P<numbers>(?: {1,4}-?[0-9]{1,3}){3,4}) {1,4}(?P<color>[a-z]{1,8})")


# Tasks --------------------------------------------------------------------------------------------------


class PlacedShape(NamedTuple):
    """One shape of a picture."""

    kind: str
    color: str
    size: int
    row: int
    column: int

    @property
    def words(self) -> str:
        """Description in the query."""
        place = f"in the {ROWS[self.row]} {COLUMNS[self.column]}"
        return f"a {self.color} {self.kind} {KINDS[self.kind].format(self.size)}, {place}"

    @property
    def command(self) -> str:
        """Command that draws it."""
        x, y, half = CENTRES[self.column], CENTRES[self.row], self.size // 2
        numbers = {
            "square": f"rect {x - half} {y - half} {self.size} {self.size}",
            "circle": f"circle {x} {y} {self.size}",
            "line": f"line {x - half} {y} {x - half + self.size - 1} {y}",
        }
        return f"{numbers[self.kind]} {self.color}"


def shapes_of(split: str) -> list[PlacedShape]:
    """All shapes of a split, in a fixed order."""
    if split not in SPLITS:
        raise BadInput(f"split is {split!r}, but must be one of {', '.join(SPLITS)}")
    kinds = [(kind, size) for kind, sizes in SIZES.items() for size in sizes]
    shapes = (PlacedShape(kind, c, size, y, x) for (kind, size), c, y, x in product(kinds, INKS, range(3), range(3)))
    return [shape for shape in shapes if _hash_bucket(shape) in SPLITS[split]]


def make_drawings(seed: int, count: int, split: str = "train", *, max_shapes: int = 3) -> list[Task]:
    """Make `count` tasks of a split, of 1 to `max_shapes` shapes; task i depends on seed, split and i alone."""
    if not 1 <= max_shapes <= 9:
        raise BadInput(f"max_shapes is {max_shapes}, but a picture has 1 to 9 shapes, one for each place")
    if count < 0 or seed < 0:
        raise BadInput(f"seed={seed} and count={count} must be at least 0")
    pool = shapes_of(split)
    return [_task(seed, i, split, pool, max_shapes) for i in range(count)]


def _task(seed: int, index: int, split: str, pool: Sequence[PlacedShape], max_shapes: int) -> Task:
    """Make task `index`: shapes in different places."""
    random = np.random.default_rng([seed, index, list(SPLITS).index(split)])
    count, shapes = int(random.integers(1, max_shapes + 1)), []
    for i in random.permutation(len(pool)):
        if len(shapes) < count and all((pool[i].row, pool[i].column) != (shape.row, shape.column) for shape in shapes):
            shapes.append(pool[i])
    description = "; ".join(shape.words for shape in shapes)
    query = f"Draw on a {COLORS[BACKGROUND]} canvas of {SIZE} x {SIZE} pixels: {description}.\n{RULES}"
    commands = "\n".join(shape.command for shape in shapes)
    return Task(f"drawing-{split}-{seed}-{index}", query, (commands,), DOMAIN, {"commands": commands, "split": split})


def _hash_bucket(shape: PlacedShape) -> int:
    """Bucket 0 to 9 of a shape, the same in every process and version."""
    return int.from_bytes(hashlib.sha256(repr(tuple(shape)).encode()).digest()[:8], "big") % 10


# The reward ---------------------------------------------------------------------------------------------


def gold_commands(task: Task) -> str:
    """Commands that draw the task's picture."""
    commands = task.metadata.get("commands")
    if not isinstance(commands, str):
        raise BadInput(f"task {task.id} has no gold commands: put them into metadata['commands']")
    return commands


def gold_picture(task: Task) -> RenderedDrawing:
    """Draw the task's picture; raises `BadInput` if its commands are malformed or draw nothing."""
    drawn = render_drawing(gold_commands(task))
    if drawn.malformed or not (drawn.pixels_yx != BACKGROUND).any():
        problem = f"{drawn.malformed} malformed lines" if drawn.malformed else "nothing on the canvas"
        raise BadInput(f"the gold commands of task {task.id} have {problem}: fix metadata['commands']")
    return drawn


def picture_of(answer: str) -> np.ndarray:
    """Draw an answer as RGB bytes [y x 3], for an image-text score."""
    return np.array(list(PALETTE.values()), np.uint8)[render_drawing(answer).pixels_yx]


def color_overlap(answer_yx: np.ndarray, gold_yx: np.ndarray) -> dict[str, float]:
    """IoU of the pixels of each colour that is in either picture."""
    return {
        COLORS[i]: float(((answer_yx == i) & (gold_yx == i)).sum() / ((answer_yx == i) | (gold_yx == i)).sum())
        for i in range(len(COLORS))
        if i != BACKGROUND and ((answer_yx == i) | (gold_yx == i)).any()
    }


def drawing_reward() -> Reward:
    """Mean IoU over the colours: 0 for an empty canvas, 1 for the task's own picture."""

    def score(task: Task, answer: str) -> RewardResult:
        gold, drawn = gold_picture(task), render_drawing(answer)
        overlaps = color_overlap(drawn.pixels_yx, gold.pixels_yx)
        parts = {"commands": float(drawn.commands), "malformed": float(drawn.malformed)}
        reason = "" if drawn.commands else "the answer has no drawing command that can be read"
        return RewardResult(sum(overlaps.values()) / len(overlaps), reason, parts | overlaps)

    return Reward(partial(invalid_if_bad_input, score))
