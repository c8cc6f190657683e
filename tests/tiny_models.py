"""A small decoder with every feature on, shared by the tests of models and generation."""

import jax

from flowgrpo.models.config import DecoderConfig, Rope
from flowgrpo.models.decoder import make_policy

BANNED = (0,)
CONFIG = DecoderConfig(
    v=97,
    d=32,
    h=4,
    k=2,
    e=8,
    f=48,
    windows=(None, 9, None),
    ropes=(Rope(), Rope(theta=500.0), Rope(kind="linear", factor=2.0)),
    qkv_bias=True,
    qk_norm=True,
    sandwich_norms=True,
    logit_softcap=30.0,
    init_scale=0.3,
)
POLICY = make_policy(CONFIG)


def tiny_params(seed: int = 0):
    """Random parameters whose policy is neither flat nor certain."""
    return POLICY.init(jax.random.key(seed))
