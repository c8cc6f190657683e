"""`maze`: fetch a key and carry it to the goal through rooms of which only the present one's doors can be seen.

    east        east -> east south west      east -> south key west      south -> key north       north -> south west
                west -> east south west      south -> north south goal   south

What is shown: `key` or `goal` if it is in this room, then each direction that has a door, and after it what lies in the
room behind. A key is taken by entering its room. Entering the goal's room with the key ends the episode with 1; without
it, nothing happens. A move into a wall says `wall`, and anything malformed `error`: both are errors and cost a turn.

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

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from flowgrpo.contracts import Env, Observation, Sizes, Step
from flowgrpo.envs.env import END, PAD, SPECIAL, absorbing, fill
from flowgrpo.envs.grids import DIRECTIONS, FAR, Maze, make_task, neighbours, remaining
from flowgrpo.types import check_range

WORDS = (*SPECIAL, *DIRECTIONS, "key", "goal", "wall", "error")
NORTH, KEY, GOAL, WALL, ERROR = (WORDS.index(word) for word in ("north", "key", "goal", "wall", "error"))
SEEN = 6  # four doors, and key and goal at most once


class State(struct.PyTreeNode):
    """A maze and where one is in it."""

    task: Maze
    room: Array
    has_key: Array
    done: Array
    correct: Array


def maze(*, width: int = 4, turns: int = 16, slip: float = 0.75, by_turn: bool = False) -> Env:
    """The environment; `turns` must leave room for the longest of the shortest ways."""
    check_range("maze", "width", width, 2, whole=True)
    longest = 4 * (width - 1)
    check_range("maze", "turns", turns, longest, whole=True)
    check_range("maze", "slip", slip, 0.0, 1.0)
    return Env(
        name="maze",
        words=WORDS,
        tools=DIRECTIONS,
        sizes=Sizes(prompt=SEEN, observation=SEEN, action=2, turns=turns),
        make_task=partial(make_task, width=width, longest=longest),
        reset=partial(reset, width=width),
        step=absorbing(partial(step, width=width, pay=progress if by_turn else success)),
        anchor=anchor,
        oracle=partial(oracle, width=width),
        demonstrate=partial(demonstrate, width=width, slip=slip),
        by_turn=by_turn,
    )


def reset(_: Array, task: Maze, *, width: int) -> tuple[State, Observation]:
    """At the start, without the key."""
    no = jnp.zeros((), bool)
    state = State(task, task.start, no, no, no)
    return state, look(state, width=width)


def step(state: State, tokens: Array, length: Array, *, width: int, pay) -> tuple[State, Step]:
    """A direction and END is a move."""
    direction = tokens[0] - NORTH
    well_formed = (direction >= 0) & (direction < 4) & (tokens[1] == END) & (length == 2)
    direction = jnp.where(well_formed, direction, 0)
    moves = well_formed & state.task.doors[state.room, direction]
    room = jnp.where(moves, jnp.asarray(neighbours(width))[state.room, direction], state.room)
    has_key = state.has_key | (room == state.task.key)
    done = has_key & (room == state.task.goal)
    following = state.replace(room=room, has_key=has_key, done=done, correct=done)

    refused = Observation(fill([jnp.where(well_formed, WALL, ERROR)], SEEN), jnp.int32(1))
    seen = jax.tree.map(partial(jnp.where, moves), look(following, width=width, taken=state.has_key), refused)
    seen = jax.tree.map(lambda said: jnp.where(done, jnp.zeros_like(said), said), seen)
    tool = jnp.where(well_formed, direction, -1)
    return following, Step(seen, pay(state, following), done, done, tool, ~moves)


def look(state: State, *, width: int, taken: Array | None = None) -> Observation:
    """Show what is here and behind each door; a key that was `taken` before this turn is nowhere."""
    task, taken = state.task, state.has_key if taken is None else taken

    def lies_in(room):
        return jnp.where((room == task.key) & ~taken, KEY, jnp.where(room == task.goal, GOAL, PAD))

    doors = task.doors[state.room]
    behind = jnp.where(doors, lies_in(jnp.asarray(neighbours(width))[state.room]), PAD)
    ways = jnp.where(doors, NORTH + jnp.arange(4), PAD)
    words = jnp.concatenate([lies_in(state.room)[None], jnp.stack([ways, behind], axis=1).reshape(8)])
    first = jnp.argsort(words == PAD, stable=True)[:SEEN]
    return Observation(words[first].astype(jnp.int32), jnp.sum(words != PAD, dtype=jnp.int32))


def success(_: State, following: State) -> Array:
    """1 at the goal."""
    return following.correct.astype(jnp.float32)


def progress(state: State, following: State) -> Array:
    """How much nearer the turn came, over the distance from the start; over an episode that is solved, 1."""
    task = state.task
    nearer = remaining(task, state.room, state.has_key) - remaining(task, following.room, following.has_key)
    return nearer.astype(jnp.float32) / remaining(task, task.start, jnp.zeros((), bool)).astype(jnp.float32)


def anchor(state: State) -> Array:
    """Equal where task, room and key are; within a task exactly, whatever the turn."""
    places = 2 * len(state.task.doors)
    return state.task.number * places + 2 * state.room + state.has_key.astype(jnp.int32)


def oracle(state: State, *, width: int) -> tuple[Array, Array]:
    """Through the door with the shortest way behind it."""
    beside = jnp.asarray(neighbours(width))[state.room]
    moves = jax.vmap(partial(remaining, state.task), in_axes=(0, None))(beside, state.has_key)
    direction = jnp.argmin(jnp.where(state.task.doors[state.room], moves, FAR))
    return fill([NORTH + direction.astype(jnp.int32), END], 2), jnp.int32(2)


def demonstrate(key: Array, state: State, *, width: int, slip: float) -> tuple[Array, Array]:
    """The best door, or any door with probability `slip`."""
    slip_key, door_key = jax.random.split(key)
    chances = jnp.where(state.task.doors[state.room], 0.0, -jnp.inf)
    direction = jax.random.categorical(door_key, chances).astype(jnp.int32)
    tokens, length = oracle(state, width=width)
    astray = jax.random.bernoulli(slip_key, slip)
    return jnp.where(astray, fill([NORTH + direction, END], 2), tokens), length
