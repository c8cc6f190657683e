"""The critic: zero at the start, blind to other segments and to what comes later, float32, and it learns."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_models import CONFIG, POLICY, random_params

from flowgrpo import BadInput
from flowgrpo.models.critic import (
    HEAD,
    critic_from_policy,
    critic_parameters,
    init_head,
    make_critic,
    value_head,
    values_before,
)
from flowgrpo.models.decoder import shape_of
from flowgrpo.models.lora import LoraParams

TOKENS = np.random.default_rng(0).integers(1, CONFIG.v, (2, 9)).astype(np.int32)
# Two conversations and padding in the first row, one in the second.
SEGMENTS = np.array([[1] * 4 + [2] * 3 + [0] * 2, [1] * 9], np.int32)
POSITIONS = np.array([[*range(4), *range(3), 0, 0], [*range(9)]], np.int32)
CRITIC = make_critic(CONFIG)


def critic_params():
    """A critic with a head that is not zero."""
    return critic_from_policy(random_params(CONFIG), CONFIG) | {HEAD: random_params(CONFIG)["norm"]}


apply = jax.jit(CRITIC.apply)


@pytest.mark.parametrize("tied", [False, True])
def test_the_parameters_are_the_decoders_without_logits_and_a_head(tied):
    config = replace(CONFIG, tied=tied)
    params = jax.eval_shape(make_critic(config, dtype=jnp.bfloat16).init, jax.random.key(0))
    expected = {name: shape_of(parameter, config) for name, parameter in critic_parameters(config).items()}
    assert {name: value.shape for name, value in params.items()} == expected
    assert "unembed" not in params
    assert {name for name, value in params.items() if value.dtype == jnp.float32} == {HEAD}


def test_critic_from_policy_copies_the_trunk():
    policy, originals = random_params(CONFIG), random_params(CONFIG)
    params = critic_from_policy(policy, CONFIG)
    assert params.keys() == critic_parameters(CONFIG).keys()
    jax.jit(lambda params: jax.tree.map(jnp.zeros_like, params), donate_argnums=0)(policy)
    for name in params.keys() - {HEAD}:  # readable after the policy was donated
        np.testing.assert_array_equal(params[name], originals[name])
    with pytest.raises(BadInput, match="merge"):
        critic_from_policy(LoraParams(originals, {}), CONFIG)  # pyright: ignore[reportArgumentType]


def test_M2_packed_conversations_are_isolated_and_causal():
    """A value after a token depends on it and those before it in its segment; the value before it, not on it."""
    params = critic_params()
    actual = np.asarray(apply(params, TOKENS, POSITIONS, SEGMENTS))
    assert not actual[0, 7:].any()
    assert np.abs(actual[0, :7]).min() > 0
    for row, place in ((0, slice(0, 4)), (0, slice(4, 7)), (1, slice(0, 9))):
        alone = apply(params, np.roll(TOKENS, -place.start, axis=1), POSITIONS[[1, 1]], SEGMENTS[[1, 1]])
        np.testing.assert_allclose(actual[row, place], alone[row, : place.stop - place.start], atol=1e-5)
    after = np.zeros((9, 9), bool)
    for s in range(9):
        changed = (TOKENS + (np.arange(9) == s).astype(np.int32)) % CONFIG.v
        after[:, s] = np.asarray(apply(params, changed, POSITIONS, SEGMENTS))[0] != actual[0]
    same = (SEGMENTS[0] == SEGMENTS[0][:, None]) & (SEGMENTS[0] > 0)
    np.testing.assert_array_equal(after, same & np.tri(9, dtype=bool))
    # The value before a token is that after the one before it; the first token of a segment has none.
    moved = values_before(jnp.arange(1.0, 19.0).reshape(2, 9), jnp.asarray(SEGMENTS))
    np.testing.assert_array_equal(moved, [[0, 1, 2, 3, 0, 5, 6, 0, 0], [0, *range(10, 18)]])


def test_shared_trunk_and_bfloat16_trunk_give_the_same_values():
    params = critic_params()
    expected = np.asarray(apply(params, TOKENS, POSITIONS, SEGMENTS))
    hidden, _ = jax.jit(POLICY.hidden)(random_params(CONFIG), TOKENS, POSITIONS, SEGMENTS)
    np.testing.assert_allclose(value_head(init_head(CONFIG) | {HEAD: params[HEAD]}, hidden), expected, atol=1e-5)
    narrow = {name: value if name == HEAD else value.astype(jnp.bfloat16) for name, value in params.items()}
    actual = jax.jit(make_critic(CONFIG, dtype=jnp.bfloat16).apply)(narrow, TOKENS, POSITIONS, SEGMENTS)
    assert actual.dtype == jnp.float32
    assert np.abs(actual - expected).mean() < 0.05 * np.abs(expected).mean()


@pytest.mark.slow
def test_values_start_at_zero_and_fit_a_target():
    critic, optimizer = make_critic(CONFIG, remat=True), optax.adam(3e-3)
    target_rs = jnp.where(jnp.asarray(SEGMENTS) > 0, jnp.asarray(TOKENS % 3, jnp.float32) - 1.0, 0.0)

    def loss(params):
        value_rs = critic.apply(params, TOKENS, POSITIONS, SEGMENTS)
        return 0.5 * ((value_rs - target_rs) ** 2).mean(), value_rs

    @jax.jit
    def step(params, state):
        (now, value_rs), slope = jax.value_and_grad(loss, has_aux=True)(params)
        changes, state = optimizer.update(slope, state, params)
        return optax.apply_updates(params, changes), state, now, value_rs

    params = critic.init(jax.random.key(2))
    state, losses = optimizer.init(params), []
    with jax.numpy_dtype_promotion("standard"):  # optax promotes its counter
        for _ in range(60):
            params, state, now, value_rs = step(params, state)
            assert losses or not np.asarray(value_rs).any()
            losses.append(float(now))
    assert losses[-1] < 0.05 * losses[0]
