"""Drawing what is described: a vision task that works offline, from the task to its reward.

    query    "Draw on a white canvas of 64 x 64 pixels: a red square with sides of 20 pixels in the middle, ..."
    answer   rect 22 22 20 20 red
    value    mean over the colours of either picture of |both| / |either|, the background left aside

So an empty canvas scores 0, and only the same picture scores 1; a colour that does not belong counts as one that is
missing. Malformed lines are counted in the parts and cost nothing but themselves. Gold is `metadata["commands"]`, and
`oracle` answers it.

A picture has one to three things in different thirds of the canvas. What a thing is (shape, colour, size, place) is its
combination, and a hash deals every combination to one split, 8 : 1 : 1. All things of a task are of its split, so no
thing of a test task was ever drawn in training, though each of its words was.
"""

import hashlib
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from flowgrpo.contracts import Reward, Scored
from flowgrpo.rewards.canvas import BACKGROUND, COLORS, SIZE, Drawn, as_image, render
from flowgrpo.types import BadInput, Task

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


class Thing(NamedTuple):
    """One thing of a picture: its combination."""

    kind: str
    color: str
    size: int
    row: int
    column: int

    @property
    def words(self) -> str:
        """As the query describes it."""
        place = f"in the {ROWS[self.row]} {COLUMNS[self.column]}"
        return f"a {self.color} {self.kind} {KINDS[self.kind].format(self.size)}, {place}"

    @property
    def command(self) -> str:
        """As it is drawn."""
        x, y, half = CENTRES[self.column], CENTRES[self.row], self.size // 2
        numbers = {
            "square": f"rect {x - half} {y - half} {self.size} {self.size}",
            "circle": f"circle {x} {y} {self.size}",
            "line": f"line {x - half} {y} {x - half + self.size - 1} {y}",
        }
        return f"{numbers[self.kind]} {self.color}"


def things(split: str) -> list[Thing]:
    """Every thing that belongs to a split, in one order."""
    if split not in SPLITS:
        raise BadInput(f"split is {split!r}, but must be one of {', '.join(SPLITS)}")
    kinds = [(kind, size) for kind, sizes in SIZES.items() for size in sizes]
    found = (Thing(kind, c, size, y, x) for (kind, size), c, y, x in product(kinds, INKS, range(3), range(3)))
    return [thing for thing in found if _hand(thing) in SPLITS[split]]


def make_drawings(seed: int, count: int, split: str = "train", *, most: int = 3) -> list[Task]:
    """`count` tasks of a split with one to `most` things; task i depends on the seed, the split and i alone."""
    if not 1 <= most <= 9:
        raise BadInput(f"most is {most}, but a picture has 1 to 9 things, one for each place")
    if count < 0 or seed < 0:
        raise BadInput(f"seed={seed} and count={count} must be at least 0")
    pool = things(split)
    return [_task(seed, i, split, pool, most) for i in range(count)]


def drawing_reward() -> Reward:
    """How much of the task's picture the answer's commands draw: 0 for an empty canvas, 1 for the same picture."""
    return Reward(_score)


def oracle(task: Task) -> str:
    """The commands that draw the task's picture."""
    commands = task.metadata.get("commands")
    if not isinstance(commands, str):
        raise BadInput(f"task {task.id} has no gold commands: put them into metadata['commands']")
    return commands


def gold_picture(task: Task) -> Drawn:
    """The task's picture; `BadInput` where its commands are malformed or draw nothing."""
    drawn = render(oracle(task))
    if drawn.malformed or not (drawn.pixels_yx != BACKGROUND).any():
        what = f"{drawn.malformed} malformed lines" if drawn.malformed else "nothing on the canvas"
        raise BadInput(f"the gold commands of task {task.id} have {what}: mend metadata['commands']")
    return drawn


def picture_of(answer: str) -> np.ndarray:
    """The picture that an answer draws, as RGB bytes [y x 3]: what an image-text score looks at."""
    return as_image(render(answer).pixels_yx)


def color_overlap(found_yx: np.ndarray, gold_yx: np.ndarray) -> dict[str, float]:
    """Pixels of a colour in both pictures over those in either, for each colour that is in either."""
    return {
        COLORS[i]: float(((found_yx == i) & (gold_yx == i)).sum() / ((found_yx == i) | (gold_yx == i)).sum())
        for i in range(len(COLORS))
        if i != BACKGROUND and ((found_yx == i) | (gold_yx == i)).any()
    }


def _score(task: Task, answer: str) -> Scored:
    try:
        gold = gold_picture(task)
    except BadInput as error:
        return Scored(None, str(error))
    drawn = render(answer)
    overlaps = color_overlap(drawn.pixels_yx, gold.pixels_yx)
    parts = {"commands": float(drawn.commands), "malformed": float(drawn.malformed)}
    reason = "" if drawn.commands else "the answer has no drawing command that can be read"
    return Scored(sum(overlaps.values()) / len(overlaps), reason, parts | overlaps)


def _task(seed: int, index: int, split: str, pool: Sequence[Thing], most: int) -> Task:
    """Task `index`: things in different places, drawn one after the other."""
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
    """Which of ten hands the hash deals a combination to; the same in every process and version."""
    return int.from_bytes(hashlib.sha256(repr(tuple(thing)).encode()).digest()[:8], "big") % 10
