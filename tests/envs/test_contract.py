"""The contract of pure environments (E1), over every one of them."""

from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_env import tiny_env

import flowgrpo as fg
from experiments.members import ENVIRONMENTS
from experiments.plays import draw_tasks
from flowgrpo.envs.env import END, PAD, SPECIAL, SPLITS, fill
from flowgrpo.envs.expressions import combination
from flowgrpo.envs.play import PLAYERS, Play, play, play_turn

EPISODES = 300


class Case(NamedTuple):
    """What the tests are told of an environment."""

    combination: Callable  # task -> what belongs to one split only
    guess: float = 0.0  # how often an answer in the first turn is right
    malformed: float = 0.1  # the share of malformed actions in its demonstrations, at most


CASES = {
    "arithmetic": Case(lambda task: tuple(combination(task).tolist()), guess=0.06),
    "lookup": Case(lambda task: tuple(task.chain[: task.hops].tolist()), guess=1 / 15),
    "maze": Case(lambda task: (int(task.start), int(task.key), int(task.goal))),
    "tiny": Case(int, malformed=0.3),
}
BUILT = {name: make() for name, make in {**ENVIRONMENTS, "tiny": tiny_env}.items()}


QUICK = {"tiny"}  # the others compile longer
BY_TIER = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in BUILT]


@pytest.fixture(params=BY_TIER)
def env(request) -> fg.Env:
    return BUILT[request.param]


@pytest.fixture
def case(env) -> Case:
    return CASES[env.name]


@pytest.fixture(params=PLAYERS)
def plays(request, env) -> Play:
    """Episodes by the oracle, by demonstrations and by random tokens."""
    return played(env, request.param)


# One compiled program for many episodes and one for a single turn serve the whole file: `player` is data.


def act_as(player, given, env: fg.Env, key, state) -> tuple:
    """What the player of this number does; the one after the last does what it is given."""
    actions = [act(env, key, state) for act in PLAYERS.values()]
    return jax.tree.map(lambda *choices: jnp.stack(choices)[player], *actions, given)


@cache
def many(env: fg.Env) -> Callable:
    """(player, given, keys, tasks) -> episodes."""

    def one(player, given, key, task):
        return play(key, task, env, partial(act_as, player, given))

    return jax.jit(jax.vmap(one, in_axes=(None, None, 0, 0)))


TRACES: Counter[str] = Counter()  # of `turn`, by environment


def turn_as(player, given, key, state, env: fg.Env) -> tuple:
    TRACES[env.name] += 1
    return play_turn(state, key, env, partial(act_as, player, given))


@cache
def turn(env: fg.Env) -> Callable:
    """(player, given, key, state) -> the next state, and what came of the turn."""
    return jax.jit(partial(turn_as, env=env))


@cache
def tasks_of(env: fg.Env, split: str):
    return draw_tasks(env, split, count=EPISODES)


def number(player: str):
    return jnp.int32([*PLAYERS, "given"].index(player))


def row(env: fg.Env, *tokens: int) -> tuple:
    """These tokens as an action."""
    return fill([*tokens, PAD], env.sizes.action + 1)[:-1], jnp.int32(len(tokens))


def replay(env: fg.Env, player: str, split: str, given=None) -> Play:
    keys = jax.random.split(jax.random.key(1), EPISODES)
    plays = many(env)(number(player), given or row(env), keys, tasks_of(env, split))
    return jax.tree.map(to_numpy, plays)


played = cache(partial(replay, split="train"))


def task_at(env: fg.Env, split: str, i: int):
    return at(tasks_of(env, split), i)


@cache
def state_within(env: fg.Env, turns: int):
    """A state of an oracle's episode after some turns."""
    key = jax.random.key(turns)
    state, _ = env.reset(key, task_at(env, "train", turns))
    for _ in range(turns):
        state, _ = turn(env)(number("oracle"), row(env), key, state)
    return state


def to_numpy(leaf) -> np.ndarray:
    return np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)


def at(tree, i: int):
    return jax.tree.map(lambda leaf: leaf[i], tree)


def assert_same(one, other):
    """Equal to the bit, shapes and dtypes too."""
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(to_numpy(a), to_numpy(b), strict=True), one, other)


# Pure ---------------------------------------------------------------------------------------------------


def test_E1_deterministic_in_its_key(env):
    again = replay(env, "demonstrations", "train")
    assert_same(again, played(env, "demonstrations"))
    assert len(np.unique(again.prompt.tokens, axis=0)) > 1


def loop(env: fg.Env, one_turn: Callable, episode: int, turns: int) -> tuple:
    """The turns of an episode one by one, with the keys of `play`."""
    key = jax.random.split(jax.random.key(1), EPISODES)[episode]
    key_reset, key_act = jax.random.split(key)
    state, _ = env.reset(key_reset, task_at(env, "train", episode))
    keys_t, seen = jax.random.split(key_act, env.sizes.turns), []
    for t in range(turns):
        state, now = one_turn(number("demonstrations"), row(env), keys_t[t], state)
        seen.append(now)
    return jax.tree.map(lambda *leaves: np.stack(leaves), *seen), state


def test_E1_vmap_equals_a_loop_and_jit_equals_no_jit(env):
    """The same episodes batched, one by one, and not compiled; one trace serves every task and turn."""
    plays, turns = played(env, "demonstrations"), env.sizes.turns
    batched = (plays.anchor, plays.tokens, plays.length, plays.live, plays.step)
    for i in range(5):
        seen, last = loop(env, turn(env), i, turns)
        assert_same((seen, last), (at(batched, i), at(jax.tree.map(jnp.asarray, plays.state), i)))
    with jax.disable_jit():
        seen, _ = loop(env, partial(turn_as, env=env), 0, 2)
    assert_same(seen, jax.tree.map(lambda leaf: leaf[0, :2], batched))


def test_E1_no_retracing(env):
    """One trace serves every task, split and turn, and the states after the end."""
    before = TRACES[env.name]
    for i, split in enumerate(SPLITS):
        key = jax.random.key(i)
        state, _ = env.reset(key, task_at(env, split, i))
        for t in range(env.sizes.turns + 1):
            state, _ = turn(env)(number("oracle"), row(env), jax.random.fold_in(key, t), state)
    assert TRACES[env.name] - before <= 1
    assert TRACES[env.name] >= 1


def test_E1_shapes_and_dtypes_are_as_stated(env):
    key, state = jax.random.key(3), state_within(env, 0)
    _, prompt = env.reset(key, task_at(env, "train", 0))
    _, now = jax.eval_shape(env.step, state, *env.oracle(state))
    said = [(prompt, env.sizes.prompt), (now.observation, env.sizes.observation)]
    acted = [(env.oracle(state), env.sizes.action), (env.demonstrate(key, state), env.sizes.action)]
    for (tokens, length), size in said + acted:
        assert (tokens.shape, tokens.dtype, length.shape, length.dtype) == ((size,), jnp.int32, (), jnp.int32)
    kinds = {"reward": jnp.float32, "done": bool, "correct": bool, "tool": jnp.int32, "error": bool}
    assert {name: getattr(now, name).dtype for name in kinds} == kinds
    assert {getattr(now, name).shape for name in kinds} == {()}
    assert (env.anchor(state).shape, env.anchor(state).dtype) == ((), jnp.int32)


# Episodes -----------------------------------------------------------------------------------------------


def assert_row(env: fg.Env, tokens: np.ndarray, length: np.ndarray):
    """Words of the vocabulary up to `length`, and padding after it."""
    used = np.arange(tokens.shape[-1]) < length[..., None]
    assert ((length >= 0) & (length <= tokens.shape[-1])).all()
    assert ((tokens > PAD) & (tokens < len(env.words)))[used].all()
    assert (tokens == PAD)[~used].all()


def test_E1_what_is_said_fits_its_slots(env, plays):
    assert env.words[: len(SPECIAL)] == SPECIAL
    assert len(set(env.words)) == len(env.words)
    assert_row(env, *plays.prompt)
    assert_row(env, *plays.step.observation)
    assert (plays.prompt.length > 0).all()
    assert (plays.step.observation.length > 0)[plays.live & ~plays.step.done].all()


def test_E1_rewards_are_finite_and_paid_at_the_end(env, plays):
    step, ends = plays.step, plays.live & plays.step.done
    assert np.isfinite(step.reward).all()
    assert ((step.tool >= -1) & (step.tool < len(env.tools))).all()
    assert not step.correct[~step.done].any()
    assert not step.reward[~plays.live].any()
    if not env.by_turn:
        assert not step.reward[~ends].any()
        assert ((step.reward > 0) == step.correct)[ends].all()


def test_E1_finished_states_absorb(plays):
    """Whatever is done after the end changes nothing, says nothing, pays nothing and is no error."""
    over = ~plays.live
    assert not (plays.live[:, 1:] & plays.step.done[:, :-1]).any()
    assert plays.step.done[over].all()
    assert not any(field[over].any() for field in (plays.step.reward, plays.step.error, *plays.step.observation))
    assert (plays.step.tool == -1)[over].all()


def test_E1_a_finished_state_stays_as_it_is(env):
    state, key = state_within(env, env.sizes.turns), jax.random.key(5)
    assert state.done
    for player in ("oracle", "demonstrations", "random", "given"):
        after, (_, _, _, live, now) = turn(env)(number(player), row(env), key, state)
        assert_same(after, state)
        assert (bool(live), bool(now.done), bool(now.correct), float(now.reward)) == (False, True, True, 0.0)


@pytest.mark.parametrize("name", BY_TIER)
@given(data=st.data())
def test_E1_garbage_is_an_error_and_no_more(name, data):
    """Any integers: no END, or nothing at all, is malformed; what is malformed is told so, and pays nothing."""
    env, wide = BUILT[name], BUILT[name].sizes.action
    state = state_within(env, data.draw(st.integers(0, 2)))
    tokens = data.draw(st.lists(st.integers(-3, len(env.words) + 3), min_size=wide, max_size=wide))
    length = data.draw(st.integers(0, wide))
    given = (jnp.asarray(tokens, jnp.int32), jnp.int32(length))
    _, (_, _, _, _, now) = turn(env)(number("given"), given, jax.random.key(0), state)
    known = all(PAD < token < len(env.words) for token in tokens[:length])
    assert now.error or (known and tokens[:length].index(END) == length - 1)
    assert_row(env, *map(np.asarray, now.observation))
    assert np.isfinite(now.reward)
    if now.error:
        assert not now.correct
        assert now.reward <= 0
        assert now.done or now.observation.length > 0


# Worth learning -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", SPLITS)
def test_the_oracle_solves_the_tasks_of_every_split_and_needs_several_turns(env, split):
    plays = played(env, "oracle", split=split)
    assert plays.state.correct.mean() >= 0.99
    assert (plays.live.sum(axis=1) >= 3).mean() >= 0.8
    assert not plays.step.error.any()


@pytest.mark.parametrize("player", ["oracle", "demonstrations"])
def test_actions_end_where_they_say(env, player):
    plays = played(env, player)
    assert_row(env, plays.tokens, plays.length)
    last = np.arange(env.sizes.action) == plays.length[..., None] - 1
    assert ((plays.tokens == END) == last).all()


def test_demonstrations_are_well_formed_and_leave_much_to_learn(env, case):
    plays = played(env, "demonstrations")
    assert plays.step.error[plays.live].mean() <= case.malformed
    assert 0.05 <= plays.state.correct.mean() <= 0.9


def test_random_tokens_get_nowhere(env):
    plays = played(env, "random")
    assert plays.state.correct.mean() <= 0.02
    assert plays.step.error[plays.live].mean() >= 0.7


def test_one_turn_is_no_better_than_a_guess(env, case):
    """The last action of any oracle's episode, taken at once and everywhere; and what is demonstrated first."""
    plays = played(env, "oracle")
    last = np.unique(plays.tokens[plays.live & plays.step.done], axis=0)[:40]
    shares = [played(env, "demonstrations").step.correct[:, 0].mean()]
    for tokens in last:
        given = row(env, *tokens[tokens != PAD].tolist())
        shares.append(replay(env, "given", "train", given).step.correct[:, 0].mean())
    spread = np.sqrt(case.guess * (1 - case.guess) / EPISODES)
    assert max(shares) <= case.guess + 4 * spread


def test_splits_share_no_combination(env, case):
    found = {}
    for split in SPLITS:
        tasks = jax.tree.map(np.asarray, tasks_of(env, split))
        found[split] = {case.combination(at(tasks, i)) for i in range(EPISODES)}
    assert all(found.values())
    assert not found["train"] & found["validation"]
    assert not found["train"] & found["test"]
    assert not found["validation"] & found["test"]


def test_an_unknown_split_is_refused(env):
    with pytest.raises(fg.BadInput, match="train, validation, test"):
        env.make_task(jax.random.key(0), "dev")


def test_anchors_are_equal_where_the_state_is(env):
    """Whatever the key of the environment; no state comes twice in an oracle's episode; other questions differ."""
    plays = played(env, "oracle")
    for anchor_t, live_t in zip(plays.anchor, plays.live, strict=True):
        assert len(np.unique(anchor_t[live_t])) == live_t.sum()
    starts = {
        (int(anchor), tuple(tokens)) for anchor, tokens in zip(plays.anchor[:, 0], plays.prompt.tokens, strict=True)
    }
    assert len({anchor for anchor, _ in starts}) == len(starts)
    again = [env.anchor(env.reset(jax.random.key(seed), task_at(env, "train", 0))[0]) for seed in range(2)]
    assert again[0] == again[1] == plays.anchor[0, 0]
