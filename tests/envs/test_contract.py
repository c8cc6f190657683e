"""The contract of pure environments (E1), over every one of them: each is compiled once for all that is asserted."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
import pytest
from env_cases import ENVS, PLAYERS, TRACES, N, at, batched, keys, play, played, player, repeated, tasks_of, to_numpy

import flowgrpo as fg
from flowgrpo.envs.arithmetic import combination
from flowgrpo.envs.contract_check import _check_answer, _check_episodes, _check_oracle, _check_shapes
from flowgrpo.envs.env import SPLITS


class Case(NamedTuple):
    """Facts that the tests are given about an environment."""

    combinations: Callable  # tasks -> rows of what belongs to one split only
    solved: tuple[float, float]  # how often demonstrations succeed, at least and at most
    guess: float = 0.0  # how often an answer in the first turn is right
    malformed: float = 0.0  # the share of malformed actions in its demonstrations, at most


CASES = {
    "arithmetic": Case(jax.jit(jax.vmap(combination)), (0.3, 0.4), guess=0.06),
    "lookup": Case(
        lambda tasks: np.where(np.arange(3) < np.asarray(tasks.hops)[:, None], tasks.chain, -1), (0.12, 0.25), 1 / 15
    ),
    "maze": Case(lambda tasks: np.stack([tasks.start, tasks.key, tasks.goal], axis=1), (0.2, 0.45)),
    "tiny": Case(lambda tasks: tasks[:, None], (0.8, 0.95), malformed=0.3),
}


@pytest.fixture(params=ENVS)
def env(request) -> fg.Env:
    return ENVS[request.param]


def assert_same(one, other) -> None:
    """Equal to the bit, shapes and dtypes too."""
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), to_numpy(one), to_numpy(other))


# Pure ---------------------------------------------------------------------------------------------------


def test_E1_episodes_of_every_player_keep_the_rules(env):
    """Words in their slots, rewards finite and paid at the end, malformed actions errors, finished states absorbing."""
    _check_shapes(env, at(tasks_of(env), 0), jax.random.key(0))
    for name in PLAYERS:
        _check_episodes(env, played(env, name), name)


def test_E1_deterministic_in_its_key(env):
    first = played(env, "demonstrations")
    again = play(env, player(env, "demonstrations"))
    assert_same(again, first)
    other = play(env, player(env, "demonstrations"), seed=1)
    assert (other.tokens != first.tokens).any()
    assert len(np.unique(first.prompt.tokens, axis=0)) > 1


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n == "arithmetic" else n for n in ENVS])
def test_E1_vmap_equals_a_loop_and_jit_equals_no_jit(name):
    """Three turns of two episodes, batched and compiled, and one by one and not compiled; of each function."""
    env = ENVS[name]
    here, tasks = batched(env), tasks_of(env)
    state, prompt = here.reset(keys(7), tasks)
    for i in range(2):
        with jax.disable_jit():
            assert_same(env.reset(keys(7)[i], at(tasks, i)), at((state, prompt), i))
    for t in range(3):
        action = here.demonstrate(keys(t), state)
        following = here.step(state, *action)
        for i in range(2):
            one = at(state, i)
            with jax.disable_jit():
                found = (
                    env.demonstrate(keys(t)[i], one),
                    env.oracle(one),
                    env.anchor(one),
                    env.step(one, *at(action, i)),
                )
            assert_same(found, at((action, here.oracle(state), here.anchor(state), following), i))
        state = following[0]


def test_E1_no_retracing(env):
    """One trace serves every player and key, and the states after the end."""
    for name in PLAYERS[:2]:
        play(env, player(env, name))
    before = dict(TRACES)
    assert all(before[id(env), name] for name in ("reset", "step", "anchor", "oracle", "demonstrate"))
    for name in PLAYERS:
        play(env, player(env, name), seed=2)
    assert before == TRACES


def test_E1_a_finished_state_stays_as_it_is(env):
    here = batched(env)
    state, _ = here.reset(keys(0), tasks_of(env))
    while not state.done.all():
        state, _ = here.step(state, *here.oracle(state))
    for name in PLAYERS:
        after, now = here.step(state, *player(env, name)(keys(1), state))
        assert_same(after, state)
        assert now.done.all()
        assert now.correct.all()
        assert not any(np.any(leaf) for leaf in (now.reward, now.error, *now.observation))


# Worth learning -----------------------------------------------------------------------------------------


def test_the_oracle_solves_what_demonstrations_seldom_and_random_tokens_never_do(env):
    (oracle, demonstrations, random), case = (played(env, name) for name in PLAYERS[:3]), CASES[env.name]
    _check_oracle(env, oracle, "train")
    _check_answer(env, oracle)
    assert (env.answer is None) == (env.name == "maze")
    assert (oracle.live.sum(axis=1) >= 3).mean() >= 0.8
    assert demonstrations.step.error[demonstrations.live].mean() <= case.malformed
    assert case.solved[0] <= demonstrations.state.correct.mean() <= case.solved[1]
    assert random.state.correct.mean() <= 0.02
    assert random.step.error[random.live].mean() >= 0.6


def test_one_turn_is_no_better_than_a_guess(env):
    """The last action of any oracle's episode, taken at once and everywhere; and what is demonstrated first."""
    plays, here, guess = played(env, "oracle"), batched(env), CASES[env.name].guess
    ends = plays.live & plays.step.done
    _, first = np.unique(plays.tokens[ends], axis=0, return_index=True)
    state, _ = here.reset(keys(0), tasks_of(env))
    shares = [played(env, "demonstrations").step.correct[:, 0].mean()]
    for i in first:
        _, now = here.step(state, *repeated((plays.tokens[ends][i], plays.length[ends][i])))
        shares.append(np.mean(now.correct))
    assert max(shares) <= guess + 4 * np.sqrt(guess * (1 - guess) / N)


def test_anchors_are_equal_for_equal_states(env):
    """The environment's key changes no anchor; no state comes twice in an oracle's episode; other questions differ."""
    plays = played(env, "oracle")
    assert all(len(np.unique(row[live])) == live.sum() for row, live in zip(plays.anchor, plays.live, strict=True))
    starts = {(int(row[0]), tuple(said)) for row, said in zip(plays.anchor, plays.prompt.tokens, strict=True)}
    assert len({anchor for anchor, _ in starts}) == len(starts)
    here = batched(env)
    np.testing.assert_array_equal(here.anchor(here.reset(keys(9), tasks_of(env))[0]), plays.anchor[:, 0])


def test_an_unknown_split_is_refused(env):
    with pytest.raises(fg.BadInput, match="train, validation, test"):
        env.make_task(jax.random.key(0), "dev")


@pytest.mark.slow
def test_the_oracle_solves_every_split_and_splits_share_no_combination(env):
    """In training every part occurs at every place where it does in another split."""
    rows = {split: np.asarray(CASES[env.name].combinations(tasks_of(env, split))) for split in SPLITS}
    seen = {split: set(map(tuple, found.tolist())) for split, found in rows.items()}
    assert sum(map(len, seen.values())) == len(set.union(*seen.values()))
    for split in SPLITS[1:]:
        _check_oracle(env, played(env, "oracle", split), split)
        if env.name != "tiny":
            assert all(set(part) <= set(whole) for part, whole in zip(rows[split].T, rows["train"].T, strict=True))
