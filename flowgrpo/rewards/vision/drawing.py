"""Drawing what is described: a vision task that works offline, from `make_drawings` to `drawing_reward`.

    query    "Draw on a white canvas of 64 x 64 pixels: a red square with sides of 20 pixels in the middle, ..."
    answer   rect 8 8 16 12 red          a filled rectangle: left, top, width, height
             circle 40 20 9 blue         a filled disc: centre, radius
             line 2 60 60 50 green       from a point to a point, one pixel wide
    value    mean over the colours of either picture of |both| / |either|, the background left aside

An empty canvas scores 0, and only the same picture scores 1; a colour that does not belong counts as one that is
missing. Gold is `metadata["commands"]`, and `oracle` answers it. One command a line, whole numbers from -999 to 999,
colours from `PALETTE`; later ones cover earlier ones, and what is outside the canvas is not drawn. Malformed lines are
skipped and counted in the parts. Only the first `MOST_LINES` lines of the first `MOST_CHARACTERS` characters are read,
and the rest counts as one malformed line.

A picture has one to three things in different thirds of the canvas. The combination of a thing is its shape, colour,
size and place, and a hash deals every combination to one split, 8 : 1 : 1. All things of a task are of its split, so no
thing of a test task was ever drawn in training, though each of its words was.
"""

import hashlib
import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np

from flowgrpo.contracts import Reward, Scored
from flowgrpo.rewards.combine import tried
from flowgrpo.types import BadInput, Task

SIZE = 64  # pixels of a side
MOST_LINES, MOST_CHARACTERS = 64, 8192
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
SPLITS = {"train": range(8), "validation": range(8, 9), "test": range(9, 10)}  # of ten hands of the hash
KINDS = {"square": "with sides of {} pixels", "circle": "with a radius of {} pixels", "line": "of {} pixels, level"}
SIZES = {"square": (8, 10, 12, 14), "circle": (4, 5, 6, 7), "line": (8, 10, 12, 14)}
# The nine places and their centres; things never overlap, since none is wider than a third.
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


class Drawn(NamedTuple):
    """Picture that commands drew, with the numbers of lines drawn and malformed."""

    pixels_yx: np.ndarray  # indices into `COLORS`
    commands: int  # lines that were drawn
    malformed: int  # lines that were not


def render_drawing(commands: str) -> Drawn:
    """Draw commands on an empty canvas."""
    lines = commands[:MOST_CHARACTERS].splitlines()
    pixels_yx, drawn = np.full((SIZE, SIZE), BACKGROUND, np.uint8), 0
    written = [line.strip() for line in lines[:MOST_LINES] if line.strip()]
    for match in filter(None, map(COMMAND.fullmatch, written)):
        shape, numbers = SHAPES.get(match["shape"]), [int(number) for number in match["numbers"].split()]
        if shape is not None and match["color"] in PALETTE and len(numbers) == shape.numbers:
            pixels_yx[shape.covers(*numbers)] = COLORS.index(match["color"])
            drawn += 1
    unread = len(commands) > MOST_CHARACTERS or len(lines) > MOST_LINES
    return Drawn(pixels_yx, drawn, len(written) - drawn + unread)


# The shapes -------------------------------------------------------------------------------------------


class DrawCommand(NamedTuple):
    """How many numbers a command takes, and the pixels that it covers -> [y x]."""

    numbers: int
    covers: Callable[..., np.ndarray]


def _rect(left: int, top: int, width: int, height: int) -> np.ndarray:
    return (column_yx >= left) & (column_yx < left + width) & (row_yx >= top) & (row_yx < top + height)


def _circle(x: int, y: int, radius: int) -> np.ndarray:
    return ((column_yx - x) ** 2 + (row_yx - y) ** 2 <= radius**2) & (radius > 0)


def _line(x1: int, y1: int, x2: int, y2: int) -> np.ndarray:
    """Cover the pixels at most half a pixel away from the line, across its longer direction."""
    width, height = x2 - x1, y2 - y1
    if max(abs(width), abs(height)) == 0:
        return (x1 == column_yx) & (y1 == row_yx)
    along, first, last = (column_yx, x1, x2) if abs(width) >= abs(height) else (row_yx, y1, y2)
    offset = np.abs((column_yx - x1) * height - (row_yx - y1) * width) / max(abs(width), abs(height))
    return (offset <= 0.5) & (along >= min(first, last)) & (along <= max(first, last))


SHAPES = {"rect": DrawCommand(4, _rect), "circle": DrawCommand(3, _circle), "line": DrawCommand(4, _line)}
COMMAND = re.compile(r"(?P<shape>[a-z]{1,8})(?P<numbers>(?: {1,4}-?[0-9]{1,3}){3,4}) {1,4}(?P<color>[a-z]{1,8})")


# Tasks --------------------------------------------------------------------------------------------------


class Thing(NamedTuple):
    """One thing of a picture: its combination."""

    kind: str
    color: str
    size: int
    row: int
    column: int

    @property
    def words(self) -> str:
        """Describe it, as the query does."""
        place = f"in the {ROWS[self.row]} {COLUMNS[self.column]}"
        return f"a {self.color} {self.kind} {KINDS[self.kind].format(self.size)}, {place}"

    @property
    def command(self) -> str:
        """Write the command that draws it."""
        x, y, half = CENTRES[self.column], CENTRES[self.row], self.size // 2
        numbers = {
            "square": f"rect {x - half} {y - half} {self.size} {self.size}",
            "circle": f"circle {x} {y} {self.size}",
            "line": f"line {x - half} {y} {x - half + self.size - 1} {y}",
        }
        return f"{numbers[self.kind]} {self.color}"


def things(split: str) -> list[Thing]:
    """List every thing that belongs to a split, in one order."""
    if split not in SPLITS:
        raise BadInput(f"split is {split!r}, but must be one of {', '.join(SPLITS)}")
    kinds = [(kind, size) for kind, sizes in SIZES.items() for size in sizes]
    found = (Thing(kind, c, size, y, x) for (kind, size), c, y, x in product(kinds, INKS, range(3), range(3)))
    return [thing for thing in found if _hand(thing) in SPLITS[split]]


def make_drawings(seed: int, count: int, split: str = "train", *, most: int = 3) -> list[Task]:
    """Make `count` tasks of a split with one to `most` things; task i depends on the seed, the split and i alone."""
    if not 1 <= most <= 9:
        raise BadInput(f"most is {most}, but a picture has 1 to 9 things, one for each place")
    if count < 0 or seed < 0:
        raise BadInput(f"seed={seed} and count={count} must be at least 0")
    pool = things(split)
    return [_task(seed, i, split, pool, most) for i in range(count)]


def _task(seed: int, index: int, split: str, pool: Sequence[Thing], most: int) -> Task:
    """Make task `index`: things in different places, drawn one after the other."""
    random = np.random.default_rng([seed, index, list(SPLITS).index(split)])
    wanted, chosen = int(random.integers(1, most + 1)), []
    for i in random.permutation(len(pool)):
        if len(chosen) < wanted and all((pool[i].row, pool[i].column) != (one.row, one.column) for one in chosen):
            chosen.append(pool[i])
    described = "; ".join(thing.words for thing in chosen)
    query = f"Draw on a {COLORS[BACKGROUND]} canvas of {SIZE} x {SIZE} pixels: {described}.\n{RULES}"
    commands = "\n".join(thing.command for thing in chosen)
    return Task(f"drawing-{split}-{seed}-{index}", query, (commands,), DOMAIN, {"commands": commands, "split": split})


def _hand(thing: Thing) -> int:
    """Find which of ten hands a hash deals a combination to; it is one in every process and version."""
    return int.from_bytes(hashlib.sha256(repr(tuple(thing)).encode()).digest()[:8], "big") % 10


# The reward ---------------------------------------------------------------------------------------------


def oracle(task: Task) -> str:
    """Get the commands that draw the task's picture."""
    commands = task.metadata.get("commands")
    if not isinstance(commands, str):
        raise BadInput(f"task {task.id} has no gold commands: put them into metadata['commands']")
    return commands


def gold_picture(task: Task) -> Drawn:
    """Draw the task's picture; `BadInput` where its commands are malformed or draw nothing."""
    drawn = render_drawing(oracle(task))
    if drawn.malformed or not (drawn.pixels_yx != BACKGROUND).any():
        what = f"{drawn.malformed} malformed lines" if drawn.malformed else "nothing on the canvas"
        raise BadInput(f"the gold commands of task {task.id} have {what}: fix metadata['commands']")
    return drawn


def picture_of(answer: str) -> np.ndarray:
    """Draw an answer as RGB bytes [y x 3], for an image-text score to look at."""
    return np.array(list(PALETTE.values()), np.uint8)[render_drawing(answer).pixels_yx]


def color_overlap(found_yx: np.ndarray, gold_yx: np.ndarray) -> dict[str, float]:
    """Divide the pixels of a colour in both pictures by those in either, for each colour that is in either."""
    return {
        COLORS[i]: float(((found_yx == i) & (gold_yx == i)).sum() / ((found_yx == i) | (gold_yx == i)).sum())
        for i in range(len(COLORS))
        if i != BACKGROUND and ((found_yx == i) | (gold_yx == i)).any()
    }


def drawing_reward() -> Reward:
    """Score how much of the task's picture the answer draws: 0 for an empty canvas, 1 for the same picture."""
    return Reward(partial(tried, _score))


def _score(task: Task, answer: str) -> Scored:
    gold, drawn = gold_picture(task), render_drawing(answer)
    overlaps = color_overlap(drawn.pixels_yx, gold.pixels_yx)
    parts = {"commands": float(drawn.commands), "malformed": float(drawn.malformed)}
    reason = "" if drawn.commands else "the answer has no drawing command that can be read"
    return Scored(sum(overlaps.values()) / len(overlaps), reason, parts | overlaps)
