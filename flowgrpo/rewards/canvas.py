"""A tiny drawing language: commands flow in, a picture of palette indices flows out; pure NumPy, bounded work.

    rect 8 8 16 12 red          a filled rectangle: left, top, width, height
    circle 40 20 9 blue         a filled disc: centre, radius
    line 2 60 60 50 green       from a point to a point, one pixel wide

One command a line, whole numbers from -999 to 999, colours from `PALETTE`; later ones cover earlier ones, and what is
outside the canvas is not drawn. A line that is none of these is counted and skipped. Only the first `MOST_LINES` lines
of the first `MOST_CHARACTERS` characters are read, and the rest counts as one malformed line.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

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

row_yx, column_yx = np.mgrid[0:SIZE, 0:SIZE]


class Drawn(NamedTuple):
    """Picture that commands drew, with the numbers of lines drawn and malformed."""

    pixels_yx: np.ndarray  # indices into `COLORS`
    commands: int  # lines that were drawn
    malformed: int  # lines that were not


def render(commands: str) -> Drawn:
    """The picture that the commands draw on an empty canvas."""
    lines = commands[:MOST_CHARACTERS].splitlines()
    pixels_yx, drawn = np.full((SIZE, SIZE), BACKGROUND, np.uint8), 0
    written = [line.strip() for line in lines[:MOST_LINES] if line.strip()]
    for line in written:
        match = COMMAND.fullmatch(line)
        shape = None if match is None else SHAPES.get(match["shape"])
        numbers = [] if match is None else [int(number) for number in match["numbers"].split()]
        if match is None or shape is None or match["color"] not in PALETTE or len(numbers) != shape.numbers:
            continue
        pixels_yx[shape.covers(*numbers)] = COLORS.index(match["color"])
        drawn += 1
    unread = len(commands) > MOST_CHARACTERS or len(lines) > MOST_LINES
    return Drawn(pixels_yx, drawn, len(written) - drawn + unread)


def as_image(pixels_yx: np.ndarray) -> np.ndarray:
    """RGB bytes [y x 3] of a picture."""
    return np.array(list(PALETTE.values()), np.uint8)[pixels_yx]


# The shapes -------------------------------------------------------------------------------------------


class Shape(NamedTuple):
    """How many numbers a command takes, and the pixels that it covers -> [y x]."""

    numbers: int
    covers: Callable[..., np.ndarray]


def _rect(left: int, top: int, width: int, height: int) -> np.ndarray:
    return (column_yx >= left) & (column_yx < left + width) & (row_yx >= top) & (row_yx < top + height)


def _circle(x: int, y: int, radius: int) -> np.ndarray:
    return ((column_yx - x) ** 2 + (row_yx - y) ** 2 <= radius**2) & (radius > 0)


def _line(x1: int, y1: int, x2: int, y2: int) -> np.ndarray:
    """The pixels at most half a pixel away from the line, across its longer direction."""
    width, height = x2 - x1, y2 - y1
    if max(abs(width), abs(height)) == 0:
        return (x1 == column_yx) & (y1 == row_yx)
    along, first, last = (column_yx, x1, x2) if abs(width) >= abs(height) else (row_yx, y1, y2)
    offset = np.abs((column_yx - x1) * height - (row_yx - y1) * width) / max(abs(width), abs(height))
    return (offset <= 0.5) & (along >= min(first, last)) & (along <= max(first, last))


SHAPES = {"rect": Shape(4, _rect), "circle": Shape(3, _circle), "line": Shape(4, _line)}
COMMAND = re.compile(r"(?P<shape>[a-z]{1,8})(?P<numbers>(?: {1,4}-?[0-9]{1,3}){3,4}) {1,4}(?P<color>[a-z]{1,8})")
