"""The contracts hold what they say."""

import jax.numpy as jnp
import numpy as np

import flowgrpo as fg


def test_policy_apply_composes_hidden_and_unembed():
    """Logits of the hidden states, and the cache that `hidden` returned."""

    def hidden(params, tokens, positions, segments, cache):
        assert positions is None
        assert segments is None
        return params * tokens, cache + 1

    policy = fg.contracts.Policy(init=lambda key: key, hidden=hidden, unembed=lambda params, hidden: hidden - params)
    logits, cache = policy.apply(jnp.float32(2.0), jnp.array([1.0, 3.0]), cache=4)
    np.testing.assert_allclose(logits, [0.0, 4.0])
    assert cache == 5


def test_reward_results_distinguish_invalid_from_zero():
    """A reward is a value, or None with a reason: never a silent 0."""
    assert fg.RewardResult(0.0).value == 0.0
    lost = fg.RewardResult(None, "the verifier timed out")
    assert lost.value is None
    assert lost.reason
