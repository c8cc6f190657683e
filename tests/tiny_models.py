"""A small decoder with every feature on, shared by the tests of models and generation."""

import jax

from experiments.benchmarks.ceilings import TINY
from flowgrpo.models.decoder import make_policy

BANNED = (0,)
CONFIG = TINY
POLICY = make_policy(CONFIG)


def tiny_params(seed: int = 0):
    """Random parameters whose policy is neither flat nor certain."""
    return POLICY.init(jax.random.key(seed))
