"""Figures of episodes: the share of calls that go to the right tool, computed from trajectories."""

import jax
import jax.numpy as jnp
import pytest

import flowgrpo as fg
from flowgrpo.envs.lookup import FIRST_TOOL, TOOLS
from flowgrpo.learner.imitation import act_by_oracle, demonstrate
from flowgrpo.recipes.pure import draw_split, right_tool_fraction


def rollout_of(env: fg.Env, act=None) -> fg.Trajectories:
    """Episodes without a policy, as a rollout would give them."""
    count = 64
    tasks, keys = draw_split(env, "train", count=count), jax.random.split(jax.random.key(1), count)
    played = jax.jit(lambda tasks, keys: demonstrate(env, tasks, keys, act=act))(tasks, keys)
    chosen = jnp.asarray(played.chosen)
    first = jnp.take_along_axis(jnp.asarray(played.tokens), jnp.argmax(chosen, axis=2)[:, :, None], axis=2)[:, :, 0]
    called = chosen.any(axis=2) & (first >= FIRST_TOOL) & (first < FIRST_TOOL + len(TOOLS))
    return played.replace(tool=jnp.where(called, first - FIRST_TOOL, -1), error=jnp.zeros(called.shape, bool))


@pytest.mark.slow
def test_an_oracle_calls_the_right_tool_and_demonstrations_seldom_do():
    env = fg.lookup()
    played = rollout_of(env)
    assert right_tool_fraction(env, rollout_of(env, act_by_oracle(env))) == 1.0
    assert 0.25 < right_tool_fraction(env, played) < 0.45  # 35 % by what `lookup` says of them
    # Where a call alone can't tell, and where none was made, nothing is said.
    assert right_tool_fraction(fg.maze(), played) is None
    assert right_tool_fraction(fg.lookup(tools=3), played) is None  # whose words are others
    assert right_tool_fraction(env, played.replace(tool=jnp.full_like(played.tool, -1))) is None
