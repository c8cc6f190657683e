"""`maze`: fetch a key and carry it to the goal through rooms, with only the doors of the current room in view.

    east        east -> east south west      east -> south key west      south -> key north       north -> south west
                west -> east south west      south -> north south goal   south

An observation has `key` or `goal` if it is in this room, then each direction that has a door, followed by `key` or
`goal` if it is in the room behind. A key is taken by entering its room. Entering the goal's room with the key ends the
episode with reward 1; without it, nothing happens. The observation after a move into a wall is `wall`, and after a
malformed action `error`: both are errors and cost a turn.

Rooms form a square. Doors are a random tree and a sixth of the other walls, so every room can be reached; a maze whose
shortest path is longer than 4 (width - 1) moves has all doors open. Splits share no (start, key, goal). With
`by_turn=True` the reward of a turn is the decrease of the true distance, over the distance at the start: the sum is 1
if the goal is reached, less otherwise, and bounded. Anchors are task, room and whether the key is carried.

Demonstrations know the map: at every turn they take a random door with probability `slip`, and the best one otherwise.

Measured over 4096 tasks of each split with the defaults: the oracle solves all of them in 6.9 turns on average (at
most 12); demonstrations solve 32 to 33 % in 14 turns, and with rewards by turn their outcome is 0.57 (training split).
Of policies that do not know the map, one that goes to key or goal when they are in view, and else to the least visited
room next to it, solves 51 %, one that takes random doors 11 %, random directions 5 %, and always the same direction
0.2 %. Arbitrary tokens, and a single turn, have no reward.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from flowgrpo.contracts import Env, Observation, Sizes, Step
from flowgrpo.envs.env import END, PAD, SPECIAL, absorbing, draw_task, hash_ints, pad_tokens, select
from flowgrpo.types import check_range

DIRECTIONS = ("north", "east", "south", "west")
MOVES = ((-1, 0), (0, 1), (1, 0), (0, -1))  # row and column
EXTRA_DOORS = 6  # one in six walls of a carved tree becomes a door
UNREACHABLE = 1 << 20  # moves
WORDS = (*SPECIAL, *DIRECTIONS, "key", "goal", "wall", "error")
NORTH, KEY, GOAL, WALL, ERROR = (WORDS.index(word) for word in ("north", "key", "goal", "wall", "error"))
OBSERVATION = 6  # tokens: four doors, and key and goal at most once


class Maze(struct.PyTreeNode):
    """A task: a maze with start, key and goal."""

    doors: Array  # rooms x 4
    start: Array
    key: Array
    goal: Array
    to_key: Array  # by room: moves of the shortest path
    to_goal: Array
    identity: Array  # hash of the task


class MazeState(struct.PyTreeNode):
    """A maze and the position in it."""

    task: Maze
    room: Array
    has_key: Array
    done: Array
    correct: Array


# The environment --------------------------------------------------------------------------------------


def maze(*, width: int = 4, turns: int = 16, slip: float = 0.75, by_turn: bool = False) -> Env:
    """The environment.

    Args:
        width: rooms in a row; the maze is a square.
        turns: at least the longest of the shortest paths.
        slip: probability that a demonstration takes a random door.
        by_turn: reward by turn, for the decrease of the distance, and not only at the goal.
    """
    check_range("maze", "width", width, 2, whole=True)
    check_range("maze", "slip", slip, 0.0, 1.0)
    rules = MazeRules(width, slip, by_turn)
    check_range("maze", "turns", turns, rules.max_distance, whole=True)
    return Env(
        name="maze",
        vocabulary=WORDS,
        tools=DIRECTIONS,
        sizes=Sizes(prompt=OBSERVATION, observation=OBSERVATION, action=2, turns=turns),
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
    """The settings of a maze, and its functions."""

    width: int
    slip: float
    by_turn: bool

    @property
    def max_distance(self) -> int:
        """Moves of the longest path from start to goal; a maze with a longer one has all doors open."""
        return 4 * (self.width - 1)

    def make_task(self, key: Array, split: str) -> Maze:
        """A maze of the split."""
        draw_key, carve_key = jax.random.split(key)
        rooms = draw_task(draw_key, split, self.propose, lambda rooms: rooms)
        carved = furnish(carve(carve_key, width=self.width), rooms, width=self.width)
        all_doors = both_sides(jnp.ones_like(carved.doors), width=self.width)
        opened = furnish(all_doors, rooms, width=self.width)
        is_too_long = distance(carved, carved.start, jnp.zeros((), bool)) > self.max_distance
        return select(is_too_long, opened, carved)

    def propose(self, key: Array) -> Array:
        """Three different rooms: start, key and goal."""
        return jnp.argsort(jax.random.bits(key, (self.width * self.width,)))[:3].astype(jnp.int32)

    def reset(self, _: Array, task: Maze) -> tuple[MazeState, Observation]:
        """At the start, without the key."""
        false = jnp.zeros((), bool)
        state = MazeState(task, task.start, false, false, false)
        return state, self.look(state)

    def step(self, state: MazeState, tokens: Array, length: Array) -> tuple[MazeState, Step]:
        """A direction and END is a move."""
        direction = tokens[0] - NORTH
        is_direction = (direction >= 0) & (direction < 4) & (tokens[1] == END) & (length == 2)
        direction = jnp.where(is_direction, direction, 0)
        moves = is_direction & state.task.doors[state.room, direction]
        room = jnp.where(moves, jnp.asarray(neighbours(self.width))[state.room, direction], state.room)
        has_key = state.has_key | (room == state.task.key)
        done = has_key & (room == state.task.goal)
        next_state = state.replace(room=room, has_key=has_key, done=done, correct=done)

        refusal = Observation(pad_tokens([jnp.where(is_direction, WALL, ERROR)], OBSERVATION), jnp.int32(1))
        observation = select(moves, self.look(next_state, had_key=state.has_key), refusal)
        observation = jax.tree.map(lambda x: jnp.where(done, jnp.zeros_like(x), x), observation)
        tool = jnp.where(is_direction, direction, -1)
        reward = progress if self.by_turn else success
        return next_state, Step(observation, reward(state, next_state), done, done, tool, ~moves)

    def look(self, state: MazeState, *, had_key: Array | None = None) -> Observation:
        """The room and what is behind each door; the key is in no room if the agent had it before this turn."""
        task, had_key = state.task, state.has_key if had_key is None else had_key

        def content_of(room):
            return jnp.where((room == task.key) & ~had_key, KEY, jnp.where(room == task.goal, GOAL, PAD))

        doors = task.doors[state.room]
        behind = jnp.where(doors, content_of(jnp.asarray(neighbours(self.width))[state.room]), PAD)
        directions = jnp.where(doors, NORTH + jnp.arange(4), PAD)
        words = jnp.concatenate([content_of(state.room)[None], jnp.stack([directions, behind], axis=1).reshape(8)])
        first = jnp.argsort(words == PAD, stable=True)[:OBSERVATION]
        return Observation(words[first].astype(jnp.int32), jnp.sum(words != PAD, dtype=jnp.int32))

    def oracle(self, state: MazeState) -> tuple[Array, Array]:
        """The door with the shortest path behind it."""
        next_rooms = jnp.asarray(neighbours(self.width))[state.room]
        moves = jax.vmap(lambda room: distance(state.task, room, state.has_key))(next_rooms)
        direction = jnp.argmin(jnp.where(state.task.doors[state.room], moves, UNREACHABLE))
        return pad_tokens([NORTH + direction.astype(jnp.int32), END], 2), jnp.int32(2)

    def demonstrate(self, key: Array, state: MazeState) -> tuple[Array, Array]:
        """The best door, or any door with probability `slip`."""
        slip_key, door_key = jax.random.split(key)
        logits = jnp.where(state.task.doors[state.room], 0.0, -jnp.inf)
        direction = jax.random.categorical(door_key, logits).astype(jnp.int32)
        tokens, length = self.oracle(state)
        is_slip = jax.random.bernoulli(slip_key, self.slip)
        return jnp.where(is_slip, pad_tokens([NORTH + direction, END], 2), tokens), length


def success(_: MazeState, next_state: MazeState) -> Array:
    """Reward 1 at the goal."""
    return next_state.correct.astype(jnp.float32)


def progress(state: MazeState, next_state: MazeState) -> Array:
    """Decrease of the distance over the distance from the start; the sum of a solved episode is 1."""
    task = state.task
    moves = distance(task, state.room, state.has_key) - distance(task, next_state.room, next_state.has_key)
    return moves.astype(jnp.float32) / distance(task, task.start, jnp.zeros((), bool)).astype(jnp.float32)


def _anchor(state: MazeState) -> Array:
    """Equal for equal task, room and key; within a task exactly, whatever the turn."""
    positions = 2 * len(state.task.doors)
    return state.task.identity * positions + 2 * state.room + state.has_key.astype(jnp.int32)


# Mazes ------------------------------------------------------------------------------------------------


def furnish(doors: Array, rooms: Array, *, width: int) -> Maze:
    """A maze of these doors, with start, key and goal in these rooms."""
    start, key, goal = rooms
    sides = jnp.sum(jnp.where(doors, jnp.array([[1, 2, 4, 8]], jnp.int32), 0), axis=1, dtype=jnp.int32)
    to_key, to_goal = distances(doors, key, width=width), distances(doors, goal, width=width)
    return Maze(doors, start, key, goal, to_key, to_goal, hash_ints(jnp.concatenate([rooms, sides])))


def distance(task: Maze, room: Array, has_key: Array) -> Array:
    """Moves of the shortest path from this room, past the key, to the goal."""
    return jnp.where(has_key, task.to_goal[room], task.to_key[room] + task.to_goal[task.key])


def neighbours(width: int) -> np.ndarray:
    """The next room by room and direction; -1 for none."""
    rooms = np.full((width * width, 4), -1, np.int32)
    for room in range(width * width):
        for direction, (down, right) in enumerate(MOVES):
            row, column = room // width + down, room % width + right
            if 0 <= row < width and 0 <= column < width:
                rooms[room, direction] = row * width + column
    return rooms


def both_sides(doors: Array, *, width: int) -> Array:
    """The doors, opened from both sides, without those that lead outside."""
    next_rooms = neighbours(width)
    opposite = doors[next_rooms, (np.arange(4) + 2) % 4]
    return (doors | opposite) & jnp.asarray(next_rooms >= 0)


def carve(key: Array, *, width: int) -> Array:
    """Doors of a random tree (Prim's algorithm with random weights), and a few more."""
    next_rooms = jnp.asarray(neighbours(width))
    tree_key, extra_key = jax.random.split(key)
    weights = jnp.where(next_rooms >= 0, jax.random.uniform(tree_key, next_rooms.shape), 2.0)

    def add_room(_, carry):
        is_reached, doors = carry
        is_new = is_reached[:, None] & ~is_reached[next_rooms] & (next_rooms >= 0)
        room, direction = jnp.divmod(jnp.argmin(jnp.where(is_new, weights, 3.0)), 4)
        return is_reached.at[next_rooms[room, direction]].set(True), doors.at[room, direction].set(True)

    rooms = width * width
    start = (jnp.arange(rooms) == rooms // 2, jnp.zeros(next_rooms.shape, bool))
    _, doors = jax.lax.fori_loop(0, rooms - 1, add_room, start)
    # A wall can be opened from either side.
    extra = jax.random.bits(extra_key, next_rooms.shape) % (2 * EXTRA_DOORS) == 0
    return both_sides(doors | extra, width=width)


def distances(doors: Array, goal: Array, *, width: int) -> Array:
    """Moves from each room to the goal, by as many relaxations as the longest path can have moves."""
    next_rooms = jnp.asarray(neighbours(width))

    def relax(_, moves):
        through_doors = jnp.where(doors, moves[next_rooms], UNREACHABLE)
        return jnp.minimum(moves, 1 + through_doors.min(axis=1))

    start = jnp.where(jnp.arange(width * width) == goal, 0, UNREACHABLE)
    return jax.lax.fori_loop(0, width * width - 1, relax, start)
