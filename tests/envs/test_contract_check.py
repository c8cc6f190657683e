"""`check_env` passes environments that keep the contract (E1), and names the rule that another breaks."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from env_cases import ENVS, played
from tiny_env import AGAIN, oracle, step, tiny_env

import flowgrpo as fg
from flowgrpo.envs.contract_check import _check_answer, _check_episodes, _check_oracle
from flowgrpo.envs.env import END, pad_tokens

TINY = ENVS["tiny"]


def test_E1_an_environment_that_keeps_the_contract_passes():
    figures = fg.check_env(tiny_env(), episodes=32)
    assert figures["oracle"] == 1.0
    assert figures["random"] < figures["demonstrations"] < 1.0
    assert figures["turns"] == 3.0


@pytest.mark.slow
@pytest.mark.parametrize("make", [fg.lookup, partial(fg.maze, by_turn=True)])
def test_E1_the_environments_of_the_family_pass(make):
    assert fg.check_env(make())["oracle"] == 1.0


@pytest.mark.slow
def test_anchor_is_optional_and_perfect_demonstrations_are_warned_of():
    given = {name: value for name, value in tiny_env()._asdict().items() if name != "anchor"}
    perfect = fg.Env(**given | {"demonstrate": lambda _, state: oracle(state)})
    with pytest.warns(UserWarning, match="tiny: demonstrations solve 100%.*make them solve 5% to 90%"):
        assert fg.check_env(perfect, episodes=8)["oracle"] == 1.0


def decides(state, tokens, length):
    if tokens[0] == 2:
        return state, fg.Step
    return step(state, tokens, length, rounds=3)


def looks_up(state):
    return oracle(state.replace(digit=("none", "one")[state.digit]))


BROKEN = {
    "must begin with": {"vocabulary": ("one", "two")},
    "a word is there twice": {"vocabulary": (*TINY.vocabulary, "one")},
    "the prompt is int32.3. and int32.., but by sizes": {"sizes": TINY.sizes._replace(prompt=4)},
    "an action of the oracle is int32.2.": {"oracle": lambda _: (pad_tokens([2, 1], 2), jnp.int32(2))},
    "a demonstrated action is int32.2.": {"demonstrate": lambda *_: (pad_tokens([2, 1], 2), jnp.int32(2))},
    r"the anchor is float32\[\], not int32\[\]": {"anchor": lambda _: jnp.float32(0)},
    r"step decides on an array with a Python if: use jnp.where .*test_contract_check.py:\d+: if tokens": {
        "step": decides
    },
    "oracle indexes a Python value with an array": {"oracle": looks_up},
    "demonstrate is None, but must be a function": {"demonstrate": None},
    "3 tokens do not fit 2 slots": {"demonstrate": lambda *_: (pad_tokens([2, 2, 1], 2), jnp.int32(3))},
}


@pytest.mark.parametrize("rule", BROKEN)
def test_E1_a_broken_rule_is_named(rule):
    with pytest.raises(fg.BadInput, match=rule):
        fg.check_env(TINY._replace(**BROKEN[rule]), episodes=16)


@pytest.mark.slow
def test_E1_a_step_that_does_not_absorb_is_refused():
    with pytest.raises(fg.BadInput, match=r"does not absorb .wrap step in envs.env.absorbing"):
        fg.check_env(TINY._replace(step=partial(step, rounds=1)), episodes=16)


# Rules of episodes, on episodes that keep them all but for one number ----------------------------------

FIRST, LAST, AFTER = (0, 0), (0, 2), (0, 3)  # turns of an oracle's episode: it ends with the third of five

IN_EPISODES = {  # player, then (array, place, value) for what is changed
    "has other words than those of the environment": ("oracle", (lambda p: p.step.observation.tokens, (*FIRST, 0), 8)),
    "or no padding after its length": ("oracle", (lambda p: p.step.observation.tokens, (*FIRST, 1), 3)),
    "not over has an empty observation": (
        "oracle",
        (lambda p: p.step.observation.tokens, FIRST, 0),
        (lambda p: p.step.observation.length, FIRST, 0),
    ),
    "is over has an observation": (
        "oracle",
        (lambda p: p.step.observation.tokens, LAST, 2),
        (lambda p: p.step.observation.length, LAST, 2),
    ),
    "a reward is not finite": ("oracle", (lambda p: p.step.reward, LAST, np.nan)),
    "a tool's number is none of tools": ("oracle", (lambda p: p.step.tool, FIRST, 1)),
    "correct is true before the end": ("oracle", (lambda p: p.step.correct, FIRST, True)),
    "reward before the end, but by_turn is not set": ("oracle", (lambda p: p.step.reward, FIRST, 0.1)),
    "a malformed action is correct or has a reward": ("oracle", (lambda p: p.step.error, LAST, True)),
    "a finished state does not absorb": ("oracle", (lambda p: p.step.reward, AFTER, 1.0)),
    "Step.correct is true where state.correct is not": ("oracle", (lambda p: p.state.correct, 0, False)),
    "state.correct is true where Step.correct is not": ("oracle", (lambda p: p.step.correct, LAST, False)),
    "none of the 7 words": ("oracle", (lambda p: p.tokens, (*FIRST, 0), 7)),
    "none of the 7 words, or no padding": ("demonstrations", (lambda p: p.tokens, (*FIRST, 2), 3)),
    "does not end with <end> at its length": ("demonstrations", (lambda p: p.tokens, (*FIRST, 1), 3)),
    "the oracle makes errors": ("oracle", (lambda p: p.step.error, FIRST, True)),
    "garbage is no error": ("garbage", (lambda p: p.step.error, ..., False)),
}


@pytest.mark.parametrize("rule", IN_EPISODES)
def test_E1_a_rule_that_an_episode_breaks_is_named(rule):
    name, *changes = IN_EPISODES[rule]
    plays = jax.tree.map(np.array, played(TINY, name))
    _check_episodes(TINY, plays, name)
    for array, place, value in changes:
        array(plays)[place] = value
    with pytest.raises(fg.BadInput, match=f"{rule}.*episodes by {name}"):
        _check_episodes(TINY, plays, name)


def test_E1_an_oracle_that_loses_or_runs_out_of_turns_is_named():
    plays = played(TINY, "oracle")
    lost = plays._replace(state=plays.state.replace(correct=np.zeros_like(plays.state.correct)))
    with pytest.raises(fg.BadInput, match=r"the oracle solves 0% of the tasks of test: it must know the best action$"):
        _check_oracle(TINY, lost, "test")
    unended = lost._replace(step=plays.step._replace(done=np.zeros_like(plays.step.done)))
    with pytest.raises(fg.BadInput, match=r"the oracle solves 0%.*or needs more than turns=5: 100% of its episodes"):
        _check_oracle(TINY, unended, "test")


def test_E1_an_answer_that_is_not_the_oracle_s_last_action_is_named():
    wrong = TINY._replace(answer=lambda _: (pad_tokens([AGAIN, END], 3), jnp.int32(2)))
    with pytest.raises(fg.BadInput, match=r"answer is 'again <end>' where the oracle ends a task by '(one|two) <end>'"):
        _check_answer(wrong, played(TINY, "oracle"))
