"""The critic: zero at the start, blind to other segments and to what comes later, float32, and it learns."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_models import CONFIG, POLICY, tiny_params

from flowgrpo import BadInput
from flowgrpo.models.critic import (
    HEAD,
    before,
    critic_parameters,
    from_policy,
    head,
    init_head,
    make_critic,
    values,
)
from flowgrpo.models.decoder import shape_of
from flowgrpo.models.lora import Adapted

pytestmark = pytest.mark.slow

CRITIC = make_critic(CONFIG)
TOKENS = np.random.default_rng(0).integers(1, CONFIG.v, (2, 9)).astype(np.int32)
# Two conversations and padding in the first row, one in the second.
SEGMENTS = np.array([[1] * 4 + [2] * 3 + [0] * 2, [1] * 9], np.int32)
POSITIONS = np.array([[*range(4), *range(3), 0, 0], [*range(9)]], np.int32)


@cache
def critic_params():
    """A critic with the policy's trunk and a head that is not zero."""
    return from_policy(tiny_params(), CONFIG) | {HEAD: jax.random.normal(jax.random.key(1), (CONFIG.d,))}


apply = jax.jit(CRITIC.apply)


def test_every_value_starts_at_zero():
    params = CRITIC.init(jax.random.key(0))
    assert not np.asarray(apply(params, TOKENS)).any()
    assert not np.asarray(apply(from_policy(tiny_params(), CONFIG), TOKENS)).any()
    slope = jax.grad(lambda params: CRITIC.apply(params, TOKENS).sum())(params)
    assert np.abs(slope[HEAD]).min() > 0  # so that the first step moves it


@pytest.mark.parametrize("tied", [False, True])
def test_the_parameters_are_the_decoders_without_logits_and_a_head(tied):
    config = replace(CONFIG, tied=tied)
    params = jax.eval_shape(make_critic(config, dtype=jnp.bfloat16).init, jax.random.key(0))
    expected = {name: shape_of(parameter, config) for name, parameter in critic_parameters(config).items()}
    assert {name: value.shape for name, value in params.items()} == expected
    assert HEAD in params
    assert "unembed" not in params
    assert {name for name, value in params.items() if value.dtype == jnp.float32} == {HEAD}


def test_a_critic_from_a_policy_has_copies_of_its_trunk():
    policy = tiny_params()
    params = from_policy(policy, CONFIG)
    assert params.keys() == critic_parameters(CONFIG).keys()
    for name in params.keys() - {HEAD}:
        np.testing.assert_array_equal(params[name], policy[name])
    jax.jit(lambda params: jax.tree.map(jnp.zeros_like, params), donate_argnums=0)(policy)
    assert all(np.isfinite(value).all() for value in params.values())  # readable after the policy was donated


def test_a_policy_with_an_adapter_is_refused_with_the_mend():
    with pytest.raises(BadInput, match="merge"):
        from_policy(Adapted(tiny_params(), {}), CONFIG)  # pyright: ignore[reportArgumentType]


def test_M2_packed_conversations_do_not_see_each_other_and_padding_is_zero():
    params = critic_params()
    found = apply(params, TOKENS, POSITIONS, SEGMENTS)
    np.testing.assert_allclose(found[0, :4], apply(params, TOKENS[:1, :4])[0], atol=1e-5)
    np.testing.assert_allclose(found[0, 4:7], apply(params, TOKENS[:1, 4:7])[0], atol=1e-5)
    np.testing.assert_allclose(found[1], apply(params, TOKENS[1:])[0], atol=1e-5)
    assert not np.asarray(found[0, 7:]).any()
    assert np.abs(found[0, :7]).min() > 0


def test_M2_causality_by_gradient():
    """A value depends on its own token and those before it in its segment; the value before a token, not on it."""
    params = critic_params()
    tokens_s = np.arange(1, 10, dtype=np.int32)  # all different, so an embedding is a position
    segments_rs = np.array([[1] * 4 + [2] * 3 + [0] * 2], np.int32)

    def row(embed):
        return values(CRITIC, params | {"embed": embed}, tokens_s[None], None, segments_rs)[0]

    def after(embed):
        return CRITIC.apply(params | {"embed": embed}, tokens_s[None], None, segments_rs)[0]

    same = (segments_rs == segments_rs.T) & (segments_rs > 0)
    for function, offset in ((after, 0), (row, -1)):
        slope = jax.jit(jax.jacrev(function))(params["embed"])  # s v d
        np.testing.assert_array_equal(np.abs(slope).sum(2)[:, tokens_s] > 0, same & np.tri(9, k=offset, dtype=bool))


def test_values_stand_where_ppo_reads_them():
    """The value before a token is that after the one before it; the first token of a segment has none."""
    after_rs = jnp.arange(1.0, 19.0).reshape(2, 9)
    found = before(after_rs, jnp.asarray(SEGMENTS))
    np.testing.assert_array_equal(found, [[0, 1, 2, 3, 0, 5, 6, 0, 0], [0, *range(10, 18)]])
    params = critic_params()
    whole = values(CRITIC, params, TOKENS, POSITIONS, SEGMENTS)
    expected = before(apply(params, TOKENS, POSITIONS, SEGMENTS), jnp.asarray(SEGMENTS))
    np.testing.assert_allclose(whole, expected, atol=1e-5)


def test_a_head_over_the_policys_own_states_gives_the_same_values():
    policy, params = tiny_params(), critic_params()
    shared = init_head(CONFIG) | {HEAD: params[HEAD]}
    hidden, _ = jax.jit(POLICY.hidden)(policy, TOKENS, POSITIONS, SEGMENTS)
    np.testing.assert_allclose(head(shared, hidden), apply(params, TOKENS, POSITIONS, SEGMENTS), atol=1e-5)


def test_values_are_float32_over_a_bfloat16_trunk():
    wide = critic_params()
    narrow = {name: value if name == HEAD else value.astype(jnp.bfloat16) for name, value in wide.items()}
    found = make_critic(CONFIG, dtype=jnp.bfloat16).apply(narrow, TOKENS, POSITIONS, SEGMENTS)
    expected = np.asarray(apply(wide, TOKENS, POSITIONS, SEGMENTS))
    assert found.dtype == jnp.float32
    assert np.abs(found - expected).mean() < 0.05 * np.abs(expected).mean()


@pytest.mark.parametrize("remat", [False, True])
def test_a_few_steps_fit_a_target(remat):
    critic, optimizer = make_critic(CONFIG, remat=remat), optax.adam(3e-3)
    target_rs = jnp.where(jnp.asarray(SEGMENTS) > 0, jnp.asarray(TOKENS % 3, jnp.float32) - 1.0, 0.0)

    def loss(params):
        return 0.5 * ((critic.apply(params, TOKENS, POSITIONS, SEGMENTS) - target_rs) ** 2).mean()

    @jax.jit
    def step(params, state):
        now, slope = jax.value_and_grad(loss)(params)
        changes, state = optimizer.update(slope, state, params)
        return optax.apply_updates(params, changes), state, now

    params = critic.init(jax.random.key(2))
    state, losses = optimizer.init(params), []
    with jax.numpy_dtype_promotion("standard"):  # optax promotes its counter
        for _ in range(60):
            params, state, now = step(params, state)
            losses.append(float(now))
    assert losses[-1] < 0.05 * losses[0]
