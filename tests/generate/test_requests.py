"""Checks of a request when it comes: one sentence for each that can't be run."""

import jax
import pytest

import flowgrpo as fg
from flowgrpo.generate.requests import EngineSettings, make_job

PARTIAL = fg.contracts.Completion([4, 5], [-0.5, -0.25], [0, 0], "budget")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tokens": []}, "needs at least one token"),
        ({"max_tokens": 126}, "must fit a slot of 128"),
        ({"max_tokens": 0}, "must fit a slot of 128"),
        ({"chosen": [True]}, "the request has 3 tokens, but `chosen` has 1"),
        ({"temperature": 0.0}, "temperature is 0.0, but must be greater than 0"),
        ({"stop_ids": tuple(range(9))}, "9 stop ids, but at most 8"),
        ({"stop": ("a", "")}, "must hold strings of at least one character"),
        ({"stop": ("a",)}, "detokenize"),
        ({"top_k": 5}, "cut the support, which training never"),
        ({"top_p": 0.9}, "cut the support, which training never"),
        ({"budget": 0}, "budget=0, but a request samples at least one token"),
        ({"partial": PARTIAL._replace(finish_reason="stop")}, "has ended as 'stop'"),
        ({"partial": PARTIAL._replace(finish_reason="length")}, "has ended as 'length'"),
        ({"partial": fg.contracts.Completion([], [], [], "budget")}, "has 0 tokens, but must have at least one"),
        ({"partial": PARTIAL, "max_tokens": 2}, "has 2 tokens, but must have at least one and less than max_tokens=2"),
        ({"partial": PARTIAL._replace(logp_sampled=[-0.5])}, "2 tokens, 1 log-probabilities and 2 versions"),
    ],
)
def test_a_request_that_can_not_be_served_raises_one_sentence(fields, words):
    settings = EngineSettings(slot_length=128)
    request = fg.contracts.Request([1, 2, 3], jax.random.key(0), 5)
    assert make_job(request._replace(partial=PARTIAL), 0.0, settings, has_detokenizer=False).tokens_left == 3
    with pytest.raises(fg.BadInput, match=words):
        make_job(request._replace(**fields), 0.0, settings, has_detokenizer=False)


def test_F7_training_has_full_support():
    """Requests of a rollout cut nothing, and an engine that draws from a part of the vocabulary refuses them."""
    request = fg.contracts.Request([1, 2, 3], jax.random.key(0), 5)
    settings = EngineSettings(slot_length=128, max_recorded_top_k=8)
    with pytest.raises(fg.BadInput, match="max_recorded_top_k=8"):
        make_job(request, 0.0, settings, has_detokenizer=False)
    assert make_job(request._replace(top_k=8), 0.0, settings, has_detokenizer=False).tokens_left == 5
