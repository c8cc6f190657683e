"""A critic: a decoder under a scalar head, which predicts the value of each token's state.

    value_s = hidden_s . w        w starts at zero, so every value does; float32 over a trunk of any dtype

`Critic.apply` gives the value *after* each token, as `Policy.apply` gives the logits after it: that is `last_value` of
a cut trajectory, and the score of a scalar-head reward model. `values_before` shifts it to the value *before* each
token, as `logprobs` gives its log-probability: that is `Scores.value` and `Trajectories.value`. The two must not be
confused: a baseline that has seen its token biases the gradient.

Parameters are the decoder's flat dict without an unembedding, and `value` [d]. A head alone (`init_head`) can use the
policy's hidden states instead: `values_before(value_head(params, hidden), segments)`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from flowgrpo import masked
from flowgrpo.models.attention import PRECISE
from flowgrpo.models.config import DecoderConfig
from flowgrpo.models.decoder import Parameter, make_policy, parameters
from flowgrpo.types import BadInput, Params

HEAD = "value"


class Critic(NamedTuple):
    """A value network as pure functions of its parameters."""

    init: Callable[[Array], Params]  # key -> params
    apply: Callable[..., Array]  # (params, tokens, positions, segments) -> value_rs after each token
    apply_tree: Callable[..., Array] | None = None  # (params, tokens, positions, ends) of a `PrefixTree` -> the same


def make_critic(config: DecoderConfig, *, dtype=jnp.float32, remat: bool = False) -> Critic:
    """A critic with a decoder of this shape as its trunk, which computes in `dtype`."""
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
    """The config of a decoder without an unembedding: tied embeddings, since a trunk computes no logits."""
    return replace(config, tied=True)


def critic_parameters(config: DecoderConfig) -> dict[str, Parameter]:
    """Shape and initialiser of every parameter of a critic, by name."""
    return parameters(trunk_config(config)) | {HEAD: Parameter("d")}


def init_head(config: DecoderConfig) -> Params:
    """A value head whose values are all 0."""
    return {HEAD: jnp.zeros(config.d, jnp.float32)}


def critic_from_policy(params: Mapping[str, Array], config: DecoderConfig) -> Params:
    """Parameters of a critic whose trunk starts as a copy of a decoder; being a copy, either may be donated."""
    trunk = parameters(trunk_config(config))
    missing = [name for name in trunk if not isinstance(params, Mapping) or name not in params]
    if missing:
        raise BadInput(
            f"a critic starts from a decoder's parameters, but {missing[0]} is missing ({len(missing)} such); "
            "an adapted policy's are `merge`d or its `base`"
        )
    return {name: jnp.array(params[name], copy=True) for name in trunk} | init_head(config)


def value_head(params: Params, hidden: Array) -> Array:
    """Values of hidden states, in float32: [... d] -> [...]."""
    return jnp.einsum("...d,d->...", hidden.astype(jnp.float32), params[HEAD].astype(jnp.float32), precision=PRECISE)


def values_before(value_rs: Array, segments_rs: Array) -> Array:
    """The value before each token, from the values after each; 0 for padding and the first token of a segment."""
    follows_rs = (segments_rs[:, 1:] == segments_rs[:, :-1]) & (segments_rs[:, 1:] > 0)
    return jnp.pad(masked.fill(value_rs[:, :-1], follows_rs), ((0, 0), (1, 0)))
