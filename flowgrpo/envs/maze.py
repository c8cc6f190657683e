"""`maze`: fetch a key and carry it to the goal through rooms of which only the present one's doors can be seen.

    east        east -> east south west      east -> south key west      south -> key north       north -> south west
                west -> east south west      south -> north south goal   south

An observation shows: `key` or `goal` if it is in this room, then each direction that has a door, and after it what
lies in the room behind. A key is taken by entering its room. Entering the goal's room with the key ends the episode
with 1; without it, nothing happens. A move into a wall says `wall`, and anything malformed `error`: both are errors
and cost a turn.

Rooms form a square. Doors are a random tree and a sixth of the other walls, so every room can be reached; a maze whose
shortest way is longer than 4 (width - 1) moves has all doors open. Splits share no (start, key, goal). With
`by_turn=True` each turn is paid by how much nearer it came, in true distance over that of the start: the sum is 1 where
the goal was reached, less elsewhere, and bounded. Anchors are task, room and whether the key is carried.

Demonstrations know the map: at every turn they take a random door with probability `slip`, and the best one otherwise.

Measured over 4096 tasks of each split with the defaults: the oracle solves all of them in 6.9 turns on average (at
most 12); demonstrations solve 32 to 33 % in 14 turns, and paid by turn they get 0.57 (training split). Of policies that
do not know the map, one that goes to what it sees and else to the least visited room next to it solves 51 %, one that
takes random doors 11 %, random directions 5 %, and one direction for ever 0.2 %. Arbitrary tokens, and a single turn,
gain nothing.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from flowgrpo.contracts import Env, Observation, Sizes, Step
from flowgrpo.envs.env import END, PAD, SPECIAL, absorbing, draw_task, hashed, pad_tokens, select
from flowgrpo.types import check_range

DIRECTIONS = ("north", "east", "south", "west")
MOVES = ((-1, 0), (0, 1), (1, 0), (0, -1))  # row and column
EXTRA = 6  # one wall in so many of a carved tree becomes a door
FAR = 1 << 20  # no way
WORDS = (*SPECIAL, *DIRECTIONS, "key", "goal", "wall", "error")
NORTH, KEY, GOAL, WALL, ERROR = (WORDS.index(word) for word in ("north", "key", "goal", "wall", "error"))
SEEN = 6  # four doors, and key and goal at most once


class Maze(struct.PyTreeNode):
    """A task."""

    doors: Array  # rooms x 4
    start: Array
    key: Array
    goal: Array
    to_key: Array  # by room: how many moves away
    to_goal: Array
    number: Array  # of the task


class MazeState(struct.PyTreeNode):
    """A maze and where one is in it."""

    task: Maze
    room: Array
    has_key: Array
    done: Array
    correct: Array


# The environment --------------------------------------------------------------------------------------


def maze(*, width: int = 4, turns: int = 16, slip: float = 0.75, by_turn: bool = False) -> Env:
    """The environment; `turns` must leave room for the longest of the shortest ways."""
    check_range("maze", "width", width, 2, whole=True)
    check_range("maze", "slip", slip, 0.0, 1.0)
    rules = MazeRules(width, slip, by_turn)
    check_range("maze", "turns", turns, rules.longest, whole=True)
    return Env(
        name="maze",
        words=WORDS,
        tools=DIRECTIONS,
        sizes=Sizes(prompt=SEEN, observation=SEEN, action=2, turns=turns),
        make_task=rules.make_task,
        reset=rules.reset,
        step=absorbing(rules.step),
        anchor=_anchor,
        oracle=rules.oracle,
        demonstrate=rules.demonstrate,
        by_turn=by_turn,
    )


@dataclass(frozen=True)
class MazeRules:
    """The settings of a maze, and what follows from them."""

    width: int
    slip: float
    by_turn: bool

    @property
    def longest(self) -> int:
        """Moves of the longest way; a maze with a longer one has all doors open."""
        return 4 * (self.width - 1)

    def make_task(self, key: Array, split: str) -> Maze:
        """A maze of the split."""
        draw_key, carve_key = jax.random.split(key)
        rooms = draw_task(draw_key, split, self.propose, lambda rooms: rooms)
        carved = furnish(carve(carve_key, width=self.width), rooms, width=self.width)
        everywhere = both_sides(jnp.ones_like(carved.doors), width=self.width)
        opened = furnish(everywhere, rooms, width=self.width)
        too_long = remaining(carved, carved.start, jnp.zeros((), bool)) > self.longest
        return select(too_long, opened, carved)

    def propose(self, key: Array) -> Array:
        """Three different rooms: start, key and goal."""
        return jnp.argsort(jax.random.bits(key, (self.width * self.width,)))[:3].astype(jnp.int32)

    def reset(self, _: Array, task: Maze) -> tuple[MazeState, Observation]:
        """At the start, without the key."""
        no = jnp.zeros((), bool)
        state = MazeState(task, task.start, no, no, no)
        return state, self.look(state)

    def step(self, state: MazeState, tokens: Array, length: Array) -> tuple[MazeState, Step]:
        """A direction and END is a move."""
        direction = tokens[0] - NORTH
        well_formed = (direction >= 0) & (direction < 4) & (tokens[1] == END) & (length == 2)
        direction = jnp.where(well_formed, direction, 0)
        moves = well_formed & state.task.doors[state.room, direction]
        room = jnp.where(moves, jnp.asarray(neighbours(self.width))[state.room, direction], state.room)
        has_key = state.has_key | (room == state.task.key)
        done = has_key & (room == state.task.goal)
        following = state.replace(room=room, has_key=has_key, done=done, correct=done)

        refused = Observation(pad_tokens([jnp.where(well_formed, WALL, ERROR)], SEEN), jnp.int32(1))
        seen = select(moves, self.look(following, taken=state.has_key), refused)
        seen = jax.tree.map(lambda said: jnp.where(done, jnp.zeros_like(said), said), seen)
        tool = jnp.where(well_formed, direction, -1)
        pay = progress if self.by_turn else success
        return following, Step(seen, pay(state, following), done, done, tool, ~moves)

    def look(self, state: MazeState, *, taken: Array | None = None) -> Observation:
        """Show what is here and behind each door; a key that was `taken` before this turn is nowhere."""
        task, taken = state.task, state.has_key if taken is None else taken

        def lies_in(room):
            return jnp.where((room == task.key) & ~taken, KEY, jnp.where(room == task.goal, GOAL, PAD))

        doors = task.doors[state.room]
        behind = jnp.where(doors, lies_in(jnp.asarray(neighbours(self.width))[state.room]), PAD)
        ways = jnp.where(doors, NORTH + jnp.arange(4), PAD)
        words = jnp.concatenate([lies_in(state.room)[None], jnp.stack([ways, behind], axis=1).reshape(8)])
        first = jnp.argsort(words == PAD, stable=True)[:SEEN]
        return Observation(words[first].astype(jnp.int32), jnp.sum(words != PAD, dtype=jnp.int32))

    def oracle(self, state: MazeState) -> tuple[Array, Array]:
        """Through the door with the shortest way behind it."""
        beside = jnp.asarray(neighbours(self.width))[state.room]
        moves = jax.vmap(lambda room: remaining(state.task, room, state.has_key))(beside)
        direction = jnp.argmin(jnp.where(state.task.doors[state.room], moves, FAR))
        return pad_tokens([NORTH + direction.astype(jnp.int32), END], 2), jnp.int32(2)

    def demonstrate(self, key: Array, state: MazeState) -> tuple[Array, Array]:
        """The best door, or any door with probability `slip`."""
        slip_key, door_key = jax.random.split(key)
        chances = jnp.where(state.task.doors[state.room], 0.0, -jnp.inf)
        direction = jax.random.categorical(door_key, chances).astype(jnp.int32)
        tokens, length = self.oracle(state)
        astray = jax.random.bernoulli(slip_key, self.slip)
        return jnp.where(astray, pad_tokens([NORTH + direction, END], 2), tokens), length


def success(_: MazeState, following: MazeState) -> Array:
    """1 at the goal."""
    return following.correct.astype(jnp.float32)


def progress(state: MazeState, following: MazeState) -> Array:
    """Say how much nearer the turn came, over the distance from the start; over an episode that is solved, 1."""
    task = state.task
    nearer = remaining(task, state.room, state.has_key) - remaining(task, following.room, following.has_key)
    return nearer.astype(jnp.float32) / remaining(task, task.start, jnp.zeros((), bool)).astype(jnp.float32)


def _anchor(state: MazeState) -> Array:
    """Equal where task, room and key are; within a task exactly, whatever the turn."""
    places = 2 * len(state.task.doors)
    return state.task.number * places + 2 * state.room + state.has_key.astype(jnp.int32)


# Mazes ------------------------------------------------------------------------------------------------


def furnish(doors: Array, rooms: Array, *, width: int) -> Maze:
    """A maze with its start, key and goal in these rooms."""
    start, key, goal = rooms
    sides = jnp.sum(jnp.where(doors, jnp.array([[1, 2, 4, 8]], jnp.int32), 0), axis=1, dtype=jnp.int32)
    to_key, to_goal = distances(doors, key, width=width), distances(doors, goal, width=width)
    return Maze(doors, start, key, goal, to_key, to_goal, hashed(jnp.concatenate([rooms, sides])))


def remaining(task: Maze, room: Array, has_key: Array) -> Array:
    """Moves of the shortest way from here, past the key, to the goal."""
    return jnp.where(has_key, task.to_goal[room], task.to_key[room] + task.to_goal[task.key])


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
