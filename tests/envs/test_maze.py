"""`maze`: an episode in words, mazes against a naive search, what is paid, its players, what its splits share."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from playing import action, compiled, garbage, play, turn

import flowgrpo as fg
from flowgrpo.envs.env import END, PAD, SPLITS, in_words
from flowgrpo.envs.grids import Maze, both_sides, furnish, neighbours
from flowgrpo.envs.maze import maze

pytestmark = pytest.mark.slow

ENV = compiled(maze())
PAID = compiled(maze(by_turn=True))
SMALL = compiled(maze(width=3))


@cache
def tasks_of(split: str) -> Maze:
    """1024 tasks."""
    make = jax.jit(jax.vmap(lambda key: ENV.make_task(key, split)))
    return make(jax.random.split(jax.random.key(5), 1024))


def by_hand() -> Maze:
    """Start, key and goal in S, K and G; rooms are joined where a line is drawn.

    S - o - o
        |   |
    o   o   K
        |
    o   G   o
    """
    doors = np.zeros((9, 4), bool)
    for room, direction in ((0, 1), (1, 1), (1, 2), (4, 2), (2, 2)):
        doors[room, direction] = True
    return furnish(both_sides(jnp.asarray(doors), width=3), jnp.array([0, 5, 7], jnp.int32), width=3)


def test_a_worked_episode():
    """The oracle's way: past the fork to the key, back, and down to the goal."""
    state, shown = SMALL.reset(jax.random.key(0), by_hand())
    assert in_words(SMALL, *shown) == "east"
    way = [
        ("east", "east south west"),
        ("east", "south key west"),
        ("south", "key north"),
        ("north", "south west"),
        ("west", "east south west"),
        ("south", "north south goal"),
    ]
    for words, expected in way:
        assert in_words(SMALL, *SMALL.oracle(state)) == f"{words} <end>"
        state, said, now = turn(SMALL, state, words)
        assert said == expected
        assert SMALL.tools[int(now.tool)] == words
        assert (float(now.reward), bool(now.done), bool(now.error)) == (0.0, False, False)
    state, said, now = turn(SMALL, state, "south")
    assert (said, float(now.reward), bool(now.done), bool(now.correct)) == ("", 1.0, True, True)


def test_the_goal_without_the_key_is_a_room_like_others():
    state, _ = SMALL.reset(jax.random.key(0), by_hand())
    for words in ("east", "south", "south"):
        state, said, now = turn(SMALL, state, words)
    assert (said, bool(now.done), float(now.reward)) == ("goal north", False, 0.0)


@pytest.mark.parametrize(
    ("words", "said"), [("north", "wall"), ("key", "error"), ("east east", "error"), ("", "error")]
)
def test_walls_and_malformed_actions_cost_a_turn(words, said):
    state, _ = SMALL.reset(jax.random.key(0), by_hand())
    tokens = [*(SMALL.words.index(word) for word in words.split()), END, PAD]
    following, now = SMALL.step(state, jnp.array(tokens[:2], jnp.int32), jnp.int32(len(words.split()) + 1))
    assert in_words(SMALL, *now.observation) == said
    assert bool(now.error & ~now.done)
    assert int(now.tool) == (0 if said == "wall" else -1)
    assert int(SMALL.anchor(following)) == int(SMALL.anchor(state))


def test_anchors_are_task_room_and_key():
    """The way and the turn don't matter; the key does."""

    def after(*words):
        state, _ = SMALL.reset(jax.random.key(len(words)), by_hand())
        for word in words:
            state, *_ = turn(SMALL, state, word)
        return int(SMALL.anchor(state))

    assert after("east", "south") == after("east", "north", "east", "west", "south")
    assert after("east") != after("east", "east", "south", "north", "west")
    anchors = {int(SMALL.anchor(SMALL.reset(jax.random.key(0), by_hand())[0].replace(room=room))) for room in range(9)}
    assert len(anchors) == 9
    numbers = np.asarray(tasks_of("train").number)
    assert len(set(numbers.tolist())) == len(numbers)


def naive_distances(doors: np.ndarray, goal: int, width: int) -> list[int]:
    """Breadth first, over Python lists."""
    beside, moves, queue = neighbours(width), {goal: 0}, [goal]
    for room in queue:
        for direction in range(4):
            following = int(beside[room, direction])
            if doors[room, direction] and following not in moves:
                moves[following] = moves[room] + 1
                queue.append(following)
    return [moves[room] for room in range(width * width)]


def test_mazes_are_connected_and_their_distances_true():
    """Doors have two sides and none leads outside; start, key and goal differ; the way is at most 12 moves."""
    tasks = jax.tree.map(np.asarray, tasks_of("train"))
    beside = neighbours(4)
    assert not tasks.doors[:, beside < 0].any()
    np.testing.assert_array_equal(tasks.doors, tasks.doors & tasks.doors[:, beside, (np.arange(4) + 2) % 4])
    for i in range(100):
        np.testing.assert_array_equal(tasks.to_key[i], naive_distances(tasks.doors[i], tasks.key[i], 4))
        np.testing.assert_array_equal(tasks.to_goal[i], naive_distances(tasks.doors[i], tasks.goal[i], 4))
    rows = np.arange(len(tasks.start))
    shortest = tasks.to_key[rows, tasks.start] + tasks.to_goal[rows, tasks.key]
    assert shortest.min() >= 2
    assert shortest.max() <= 12
    all_open = tasks.doors.sum(axis=(1, 2)) == 48
    assert 0.02 < all_open.mean() < 0.12
    assert tasks.doors.sum(axis=(1, 2)).min() / 2 >= 15


def test_the_oracle_takes_the_shortest_way():
    """On every split; and what is paid by turn sums to 1."""
    tasks = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *map(tasks_of, SPLITS))
    played = play(PAID, lambda _, state: PAID.oracle(state), tasks)
    assert played.correct.all()
    assert not played.error.any()
    rows = jnp.arange(len(tasks.start))
    np.testing.assert_array_equal(played.turns, tasks.to_key[rows, tasks.start] + tasks.to_goal[rows, tasks.key])
    np.testing.assert_allclose(played.outcome, 1.0, rtol=1e-6)
    assert (played.reward >= 0).all()


def test_demonstrations_are_well_formed_and_mostly_fail():
    """About a third succeed; paid by turn, a solved episode sums to 1 and any other to less."""
    played = play(PAID, PAID.demonstrate, tasks_of("train"))
    assert not played.error.any()
    assert 0.2 < played.correct.mean() < 0.45
    np.testing.assert_allclose(played.outcome[played.correct], 1.0, rtol=1e-5)
    assert (played.outcome[~played.correct] < 0.999).all()
    assert (played.outcome > -15).all()
    assert (played.reward < 0).any()


def test_what_is_paid_for_the_outcome_only():
    """The same episodes: the outcome is 1 or 0, at the last turn."""
    played = play(ENV, ENV.demonstrate, tasks_of("train"))
    np.testing.assert_array_equal(played.outcome, played.correct.astype(np.float32))
    np.testing.assert_array_equal((played.reward != 0).sum(axis=1), played.correct)
    assert PAID.by_turn
    assert not ENV.by_turn


def test_without_looking_little_is_gained():
    """One direction for ever, and arbitrary tokens."""
    north = play(ENV, lambda *_: action(ENV, "north"), tasks_of("train"))
    assert north.correct.mean() < 0.01
    lost = play(ENV, garbage(ENV), tasks_of("train"))
    assert lost.correct.mean() < 0.01
    assert np.isfinite(lost.reward).all()


def test_splits_share_no_combination_and_training_has_every_room():
    """Of (start, key, goal)."""
    rows = {}
    for split in SPLITS:
        tasks = tasks_of(split)
        rows[split] = np.stack([tasks.start, tasks.key, tasks.goal], axis=1)
    seen = {split: {tuple(row) for row in rows[split].tolist()} for split in SPLITS}
    assert not seen["train"] & (seen["validation"] | seen["test"])
    assert not seen["validation"] & seen["test"]
    for column in rows["train"].T:
        assert set(column.tolist()) == set(range(16))


def test_settings_are_checked():
    with pytest.raises(fg.BadInput, match="width"):
        maze(width=1)
    with pytest.raises(fg.BadInput, match="turns 11"):
        maze(turns=11)
