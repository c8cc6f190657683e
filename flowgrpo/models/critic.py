"""A critic: a decoder under a scalar head, which gives a value for each token's state.

    value_s = hidden_s . w        w starts at zero, so every value does; float32 over a trunk of any dtype

`Critic.apply` gives the value *after* each token, as `Policy.apply` gives the logits after it: there stand a cut
trajectory's `last_value`, and the score of a scalar-head reward model. `before` makes of it the value *before* each
token, as `logprobs` gives the log-probability: that is `Scores.value` and `Trajectories.value`. One must not stand for
the other: a baseline that has seen its token biases the gradient.

Parameters are the decoder's flat dict without a matrix for logits, and `value` [d]. A head alone, `init_head`, may
stand over the policy's own hidden states instead: `before(value_head(params, hidden), segments)`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from flowgrpo import masked
from flowgrpo.contracts import Params
from flowgrpo.models.attention import PRECISE
from flowgrpo.models.config import DecoderConfig
from flowgrpo.models.decoder import Parameter, make_policy, parameters
from flowgrpo.types import BadInput

HEAD = "value"


class Critic(NamedTuple):
    """A value network as pure functions of its parameters."""

    init: Callable[[Array], Params]  # key -> params
    apply: Callable[..., Array]  # (params, tokens, positions, segments) -> value_rs after each token
    apply_tree: Callable[..., Array] | None = None  # (params, tokens, positions, ends) of a `PrefixTree` -> the same


def make_critic(config: DecoderConfig, *, dtype=jnp.float32, remat: bool = False) -> Critic:
    """A critic over a decoder of this shape; `dtype` is that of the trunk."""
    policy = make_policy(trunk_config(config), dtype=dtype, remat=remat)

    def trunk_of(params: Params) -> Params:
        return {name: value for name, value in params.items() if name != HEAD}

    def apply(params: Params, tokens, positions=None, segments=None) -> Array:
        value_rs = value_head(params, policy.hidden(trunk_of(params), tokens, positions, segments, None)[0])
        return value_rs if segments is None else masked.fill(value_rs, jnp.asarray(segments) > 0)

    def apply_tree(params: Params, tokens, positions, ends) -> Array:
        assert policy.hidden_tree is not None
        value_ru = value_head(params, policy.hidden_tree(trunk_of(params), tokens, positions, ends))
        return masked.fill(value_ru, jnp.asarray(ends) > 0)

    return Critic(lambda key: policy.init(key) | init_head(config), apply, apply_tree)


def trunk_config(config: DecoderConfig) -> DecoderConfig:
    """Tie a decoder's embeddings for a trunk: the config declares no matrix for logits, and the trunk computes none."""
    return replace(config, tied=True)


def critic_parameters(config: DecoderConfig) -> dict[str, Parameter]:
    """Every parameter of a critic by name, with its axes."""
    return parameters(trunk_config(config)) | {HEAD: Parameter("d")}


def init_head(config: DecoderConfig) -> Params:
    """A head that values everything at zero."""
    return {HEAD: jnp.zeros(config.d, jnp.float32)}


def from_policy(params: Mapping[str, Array], config: DecoderConfig) -> Params:
    """Parameters of a critic whose trunk starts as a decoder's: copies, so that either may be donated."""
    trunk = parameters(trunk_config(config))
    missing = [name for name in trunk if not isinstance(params, Mapping) or name not in params]
    if missing:
        raise BadInput(
            f"a critic starts from a decoder's parameters, but {missing[0]} is missing ({len(missing)} such); "
            "an adapted policy's are `merge`d or its `base`"
        )
    return {name: jnp.array(params[name], copy=True) for name in trunk} | init_head(config)


def value_head(params: Params, hidden: Array) -> Array:
    """Values from hidden states, in float32: [... d] -> [...]."""
    return jnp.einsum("...d,d->...", hidden.astype(jnp.float32), params[HEAD].astype(jnp.float32), precision=PRECISE)


def before(value_rs: Array, segments_rs: Array) -> Array:
    """The value before each token, from those after each; the first of a segment and padding have 0."""
    follows_rs = (segments_rs[:, 1:] == segments_rs[:, :-1]) & (segments_rs[:, 1:] > 0)
    return jnp.pad(masked.fill(value_rs[:, :-1], follows_rs), ((0, 0), (1, 0)))
