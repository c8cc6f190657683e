"""`maze`: an episode in words, mazes against a naive search, and rewards by turn."""

import jax.numpy as jnp
import numpy as np
import pytest
from env_cases import ENVS, play, played, player, talk, talks, tasks_of, to_numpy

from flowgrpo.envs.maze import Maze, both_sides, furnish, maze, neighbours

ENV, SMALL, PAID = ENVS["maze"], maze(width=3), maze(by_turn=True)
WAY = ["east", "east", "south", "north", "west", "south", "south"]  # the oracle's, by hand


@pytest.fixture(scope="module")
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


def test_a_worked_episode(by_hand):
    """The oracle's way: past the fork to the key, back, and down to the goal."""
    found = talk(SMALL, by_hand, *WAY)
    seen = ["east", "east south west", "south key west", "key north", "south west", "east south west"]
    assert found.said == [*seen, "north south goal", ""]
    assert found.best[:-1] == [f"{word} <end>" for word in WAY]
    assert [SMALL.tools[now.tool] for now in found.steps] == WAY
    assert [(float(now.reward), bool(now.done), bool(now.correct)) for now in found.steps[-2:]] == [
        (0.0, False, False),
        (1.0, True, True),
    ]
    assert not any(now.error for now in found.steps)


def test_the_goal_without_the_key_is_a_room_like_others(by_hand):
    found = talk(SMALL, by_hand, "east", "south", "south")
    assert (found.said[-1], bool(found.steps[-1].done), float(found.steps[-1].reward)) == ("goal north", False, 0.0)


def test_walls_and_malformed_actions_cost_a_turn(by_hand):
    lines = {"north <end>": "wall", "key <end>": "error", "east east": "error", "east": "error", "<end>": "error"}
    for found, said in zip(talks(SMALL, by_hand, *([line] for line in lines), end=""), lines.values(), strict=True):
        (now,) = found.steps
        assert (found.said[1], bool(now.error), bool(now.done)) == (said, True, False)
        assert now.tool == (0 if said == "wall" else -1)
        assert found.anchors[1] == found.anchors[0]


def test_anchors_are_task_room_and_key(by_hand):
    """The way and the turn don't matter; the key does."""
    found = talk(SMALL, by_hand, *WAY[:-1], "north", "north")
    assert len(set(found.anchors[:7])) == 7  # with the key the same rooms are others
    assert (found.anchors[7], found.anchors[8]) == (found.anchors[5], found.anchors[5])
    assert len(np.unique(tasks_of(ENV).identity)) == len(tasks_of(ENV).identity)


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


def shortest(tasks: Maze) -> np.ndarray:
    rows = np.arange(len(tasks.start))
    return tasks.to_key[rows, tasks.start] + tasks.to_goal[rows, tasks.key]


def test_mazes_are_connected_and_their_distances_true():
    """Doors have two sides and none leads outside; start, key and goal differ; the way is at most 12 moves."""
    tasks, beside = to_numpy(tasks_of(ENV)), neighbours(4)
    assert not tasks.doors[:, beside < 0].any()
    np.testing.assert_array_equal(tasks.doors, tasks.doors & tasks.doors[:, beside, (np.arange(4) + 2) % 4])
    for i in range(100):
        np.testing.assert_array_equal(tasks.to_key[i], naive_distances(tasks.doors[i], tasks.key[i], 4))
        np.testing.assert_array_equal(tasks.to_goal[i], naive_distances(tasks.doors[i], tasks.goal[i], 4))
    assert 2 <= shortest(tasks).min() < shortest(tasks).max() <= 12
    doors = tasks.doors.sum(axis=(1, 2))
    assert 0.02 < (doors == 48).mean() < 0.12
    assert doors.min() / 2 >= 15
    assert all(set(places.tolist()) == set(range(16)) for places in (tasks.start, tasks.key, tasks.goal))


def test_the_oracle_takes_the_shortest_path():
    plays = played(ENV, "oracle")
    np.testing.assert_array_equal(plays.live.sum(axis=1), shortest(plays.task))


def test_rewards_by_turn_sum_to_one_if_solved():
    """The episodes are equal to those that are paid at the end, by 1 or 0."""
    paid, plays = play(PAID, player(PAID, "demonstrations")), played(ENV, "demonstrations")
    np.testing.assert_array_equal(paid.tokens, plays.tokens)
    assert (PAID.by_turn, ENV.by_turn) == (True, False)
    correct, outcome = plays.state.correct, paid.step.reward.sum(axis=1)
    np.testing.assert_allclose(outcome[correct], 1.0, rtol=1e-5)
    assert (outcome[~correct] < 0.999).all()
    assert (outcome > -15).all()
    assert (paid.step.reward < 0).any()
    np.testing.assert_array_equal(plays.step.reward.sum(axis=1), correct)
    assert (play(PAID, player(PAID, "oracle")).step.reward >= 0).all()
