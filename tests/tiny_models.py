"""Small decoders with many features on, shared by the tests of models and generation."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.ceilings import TINY
from flowgrpo.models.config import Rope
from flowgrpo.models.decoder import make_policy, parameters, shape_of

BANNED = (0,)
CONFIG = TINY
POLICY = make_policy(CONFIG)
FULL = replace(  # every feature that any family has, and every kind of angles
    TINY,
    windows=(4, None, 7),
    ropes=(
        Rope(theta=100.0),
        Rope(theta=1e3, kind="yarn", factor=4.0, original_length=16, magnitude=1.1),
        Rope(theta=1e3, kind="llama3", factor=8.0, original_length=32),
    ),
    activation="gelu_tanh",
    norm_offset=1.0,
    o_bias=True,
    ffn_bias=True,
    tied=True,
    embed_scale=24**0.5,
    query_scale=0.3,
    attention_softcap=2.0,
    logit_softcap=5.0,
)


def tiny_params(seed: int = 0):
    """Random parameters, whose policy is neither uniform nor deterministic."""
    return POLICY.init(jax.random.key(seed))


def random_params(config, seed: int = 1, dtype="float32"):
    """Random parameters, none of which is 0 or 1, drawn by NumPy so that nothing is compiled for a shape."""
    random = np.random.default_rng(seed)
    shapes = {name: shape_of(parameter, config) for name, parameter in parameters(config).items()}
    return {name: jnp.asarray(random.normal(0.0, 0.3, shape), dtype) for name, shape in shapes.items()}
