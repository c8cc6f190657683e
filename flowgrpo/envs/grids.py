"""Grids of rooms, the tasks of `maze`: doors that join every room to every other, drawn in a fixed number of steps.

Rooms are numbered by row from the north-west, directions by `DIRECTIONS`. `doors` is rooms x 4; a door has two sides.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from flowgrpo.envs.deal import draw, hashed

DIRECTIONS = ("north", "east", "south", "west")
MOVES = ((-1, 0), (0, 1), (1, 0), (0, -1))  # row and column
EXTRA = 6  # one wall in so many of a carved tree becomes a door
FAR = 1 << 20  # no way


class Maze(struct.PyTreeNode):
    """A task."""

    doors: Array  # rooms x 4
    start: Array
    key: Array
    goal: Array
    to_key: Array  # by room: how many moves away
    to_goal: Array
    number: Array  # of the task


def neighbours(width: int) -> np.ndarray:
    """By room and direction: the next room, or -1 outside."""
    rooms = np.full((width * width, 4), -1, np.int32)
    for room in range(width * width):
        for direction, (down, right) in enumerate(MOVES):
            row, column = room // width + down, room % width + right
            if 0 <= row < width and 0 <= column < width:
                rooms[room, direction] = row * width + column
    return rooms


def both_sides(doors: Array, *, width: int) -> Array:
    """Every door can be used from either side, and none leads outside."""
    beside = neighbours(width)
    back = doors[beside, (np.arange(4) + 2) % 4]
    return (doors | back) & jnp.asarray(beside >= 0)


def carve(key: Array, *, width: int) -> Array:
    """Doors of a random tree (Prim's algorithm with random weights), and a few more."""
    beside = jnp.asarray(neighbours(width))
    tree_key, extra_key = jax.random.split(key)
    weights = jnp.where(beside >= 0, jax.random.uniform(tree_key, beside.shape), 2.0)

    def join(_, built):
        reached, doors = built
        leads_out = reached[:, None] & ~reached[beside] & (beside >= 0)
        room, direction = jnp.divmod(jnp.argmin(jnp.where(leads_out, weights, 3.0)), 4)
        return reached.at[beside[room, direction]].set(True), doors.at[room, direction].set(True)

    rooms = width * width
    start = (jnp.arange(rooms) == rooms // 2, jnp.zeros(beside.shape, bool))
    _, doors = jax.lax.fori_loop(0, rooms - 1, join, start)
    extra = jax.random.bits(extra_key, beside.shape) % (2 * EXTRA) == 0  # a wall has two sides to be opened from
    return both_sides(doors | extra, width=width)


def distances(doors: Array, goal: Array, *, width: int) -> Array:
    """Moves from each room to the goal, by as many relaxations as the longest way has moves."""
    beside = jnp.asarray(neighbours(width))

    def relax(_, moves):
        through = jnp.where(doors, moves[beside], FAR)
        return jnp.minimum(moves, 1 + through.min(axis=1))

    start = jnp.where(jnp.arange(width * width) == goal, 0, FAR)
    return jax.lax.fori_loop(0, width * width - 1, relax, start)


def propose(key: Array, *, width: int) -> Array:
    """Three different rooms: start, key and goal."""
    return jnp.argsort(jax.random.bits(key, (width * width,)))[:3].astype(jnp.int32)


def make_task(key: Array, split: str, *, width: int, longest: int) -> Maze:
    """A maze of the split; where the shortest way has more moves than `longest`, all its doors are open."""
    draw_key, carve_key = jax.random.split(key)
    rooms = draw(draw_key, split, partial(propose, width=width), lambda rooms: rooms)
    carved = furnish(carve(carve_key, width=width), rooms, width=width)
    everywhere = both_sides(jnp.ones_like(carved.doors), width=width)
    opened = furnish(everywhere, rooms, width=width)
    too_long = remaining(carved, carved.start, jnp.zeros((), bool)) > longest
    return jax.tree.map(partial(jnp.where, too_long), opened, carved)


def furnish(doors: Array, rooms: Array, *, width: int) -> Maze:
    """A maze with its start, key and goal in these rooms."""
    start, key, goal = rooms
    sides = jnp.sum(jnp.where(doors, jnp.array([[1, 2, 4, 8]], jnp.int32), 0), axis=1, dtype=jnp.int32)
    to_key, to_goal = distances(doors, key, width=width), distances(doors, goal, width=width)
    return Maze(doors, start, key, goal, to_key, to_goal, hashed(jnp.concatenate([rooms, sides])))


def remaining(task: Maze, room: Array, has_key: Array) -> Array:
    """Moves of the shortest way from here, past the key, to the goal."""
    return jnp.where(has_key, task.to_goal[room], task.to_key[room] + task.to_goal[task.key])
