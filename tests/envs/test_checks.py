"""`check_env` passes what keeps the contract (E1), and names the rule that a broken environment breaks."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from tiny_env import oracle, step, tiny_env

import flowgrpo as fg
from experiments.members import ENVIRONMENTS
from flowgrpo.envs.env import absorbing, fill


def never_absorbs(state, tokens, length):
    return step(state, tokens, length, rounds=1)


def pays_early(state, tokens, length):
    state, now = step(state, tokens, length, rounds=3)
    return state, now._replace(reward=jnp.where(now.error, 0.0, 0.1))


def forgives(state, tokens, length):
    state, now = step(state, tokens, length, rounds=3)
    return state, now._replace(error=jnp.bool_(False))


def never_right(state, tokens, length):
    state, now = step(state, tokens, length, rounds=3)
    return state.replace(correct=jnp.bool_(False)), now._replace(reward=jnp.float32(0), correct=jnp.bool_(False))


def speaks_at_the_end(state, tokens, length):
    state, now = step(state, tokens, length, rounds=3)
    said = fg.Observation(fill([2], 2), jnp.int32(1))
    return state, now._replace(observation=jax.tree.map(partial(jnp.where, now.done), said, now.observation))


def disagrees(which: str, state, tokens, length):
    """`correct` of the state or of the step is lost."""
    state, now = step(state, tokens, length, rounds=3)
    lost = jnp.bool_(False)
    return (state.replace(correct=lost), now) if which == "state" else (state, now._replace(correct=lost))


def decides(state, tokens, length):
    if tokens[0] == 2:
        return state, fg.Step
    return step(state, tokens, length, rounds=3)


def looks_up(state):
    return oracle(state.replace(digit=("none", "one")[state.digit]))


def demonstrates(digit: int, key, state):  # noqa: ARG001
    return oracle(state.replace(digit=jnp.int32(digit)))


SMALL = fg.Sizes(prompt=3, observation=2, action=3, turns=2)
BROKEN = {
    "must begin with": {"words": ("one", "two")},
    "a word is there twice": {"words": (*tiny_env().words, "one")},
    "the prompt is int32.3. and int32.., but by sizes": {"sizes": fg.Sizes(prompt=4, observation=2, action=3, turns=5)},
    "does not absorb": {"step": never_absorbs},
    "paid before the end, but by_turn is not set": {"step": absorbing(pays_early)},
    "garbage is no error": {"step": absorbing(forgives)},
    "the oracle solves 0%": {"step": absorbing(never_right)},
    "the oracle makes errors": {"oracle": lambda state: oracle(state.replace(digit=3 - state.digit))},
    "an action of the oracle is int32.2.": {"oracle": lambda _: (fill([2, 1], 2), jnp.int32(2))},
    "what is none of the 7 words": {"demonstrate": partial(demonstrates, 5)},
    "is over still speaks": {"step": absorbing(speaks_at_the_end)},
    "the oracle solves 0%.*or needs more than turns=2: 100% of its episodes": {"sizes": SMALL},
    "Step.correct is true where state.correct is not": {"step": absorbing(partial(disagrees, "state"))},
    "state.correct is true where Step.correct is not": {"step": absorbing(partial(disagrees, "step"))},
    r"step decides on an array with a Python if: use jnp.where .*test_checks.py:\d+: if tokens": {"step": decides},
    "oracle indexes a Python value with an array": {"oracle": looks_up},
    "demonstrate is None, but must be a function": {"demonstrate": None},
    "3 tokens do not fit 2 slots": {"demonstrate": lambda *_: (fill([2, 2, 1], 2), jnp.int32(3))},
}


def test_E1_an_environment_that_keeps_the_contract_passes():
    figures = fg.check_env(tiny_env(), episodes=32)
    assert figures["oracle"] == 1.0
    assert figures["random"] < figures["demonstrations"] < 1.0
    assert figures["turns"] == 3.0


@pytest.mark.slow
def test_an_anchor_may_be_left_out_and_demonstrations_that_leave_nothing_to_learn_are_warned_of():
    given = {name: value for name, value in tiny_env()._asdict().items() if name != "anchor"}
    perfect = fg.Env(**given | {"demonstrate": lambda _, state: oracle(state)})
    with pytest.warns(UserWarning, match="tiny: demonstrations solve 100%.*make them solve 5% to 90%"):
        assert fg.check_env(perfect, episodes=8)["oracle"] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("make", [*ENVIRONMENTS.values(), partial(fg.maze, by_turn=True)])
def test_E1_the_environments_of_the_family_pass(make):
    assert fg.check_env(make())["oracle"] == 1.0


COMPILED = {  # rules that show in whole episodes, which are compiled for each
    "paid before the end, but by_turn is not set",
    "garbage is no error",
    "the oracle solves 0%",
    "the oracle makes errors",
    "is over still speaks",
    "the oracle solves 0%.*or needs more than turns=2: 100% of its episodes",
    "Step.correct is true where state.correct is not",
    "state.correct is true where Step.correct is not",
    "what is none of the 7 words",
    "does not absorb",
}


@pytest.mark.parametrize(
    "rule", [pytest.param(rule, marks=pytest.mark.slow) if rule in COMPILED else rule for rule in BROKEN]
)
def test_E1_a_broken_rule_is_named(rule):
    with pytest.raises(fg.BadInput, match=rule):
        fg.check_env(tiny_env()._replace(**BROKEN[rule]), episodes=16)
