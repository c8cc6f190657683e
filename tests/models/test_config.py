"""config.json -> DecoderConfig: published files of the old style, files of the new style, defaults of a family."""

import math

import numpy as np
import pytest
from model_cases import LLAMA3, WINDOW, YARN, make_source

from flowgrpo.models.config import DecoderConfig, Rope, rope_frequencies, yarn_magnitude
from flowgrpo.models.families import decoder_config, text_model_config

WINDOWED = make_source("qwen2", WINDOW, max_window_layers=1)


def parsed(source):
    return decoder_config(text_model_config(source))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            make_source("qwen2", rope_theta=1e6, sliding_window=5),
            {"ropes": (Rope(theta=1e6),) * 2, "windows": (None, None)},
        ),
        (make_source("qwen2"), {"e": 8, "qkv_bias": True, "o_bias": False, "ffn_bias": False, "qk_norm": False}),
        (make_source("qwen2"), {"tied": False, "sandwich_norms": False, "activation": "silu", "embed_scale": 1.0}),
        (WINDOWED, {"windows": (None, 5)}),
        (WINDOWED | {"model_type": "qwen3"}, {"windows": (None, 5)}),
        (WINDOWED | {"layer_types": ["sliding_attention", "full_attention"]}, {"windows": (5, None)}),
        (make_source("mistral", sliding_window=None), {"windows": (None, None)}),
        (make_source("mistral", sliding_window=5), {"windows": (5, 5)}),
        (make_source("llama", tie_word_embeddings=True), {"tied": True, "norm_eps": 1e-4, "qkv_bias": False, "k": 2}),
        (make_source("llama", rope_theta=5e5, rope_scaling=LLAMA3), {"ropes": (Rope(5e5, "llama3", 8.0, 32),) * 2}),
        ({"model_type": "gemma2", "num_hidden_layers": 4}, {"windows": (4096, None, 4096, None)}),
        ({"model_type": "gemma2"}, {"attention_softcap": 50.0, "logit_softcap": 30.0, "query_scale": 256**-0.5}),
    ],
)
def test_fields_and_defaults_of_a_family(source, expected):
    before = repr(source)
    config = parsed(source)
    assert repr(source) == before
    assert {name: getattr(config, name) for name in expected} == expected


def test_the_sparse_config_of_a_published_multimodal_gemma3():
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "torch_dtype": "bfloat16"}
    source = text_model_config({**outer, "text_config": text, "vision_config": {}, "eos_token_id": [1, 106]})
    assert (source["architectures"], source["model_type"]) == (["Gemma3ForCausalLM"], "gemma3_text")
    assert (source["eos_token_id"], source["torch_dtype"]) == ([1, 106], "bfloat16")
    assert decoder_config(source) == DecoderConfig(
        v=262208,
        d=2560,
        h=8,
        k=4,
        e=256,
        f=10240,
        windows=(*[1024] * 5, None) * 5 + (1024,) * 4,
        ropes=(*[Rope(1e4)] * 5, Rope(1e6, "linear", 8.0)) * 5 + (Rope(1e4),) * 4,
        activation="gelu_tanh",
        norm_offset=1.0,
        sandwich_norms=True,
        qk_norm=True,
        tied=True,
        embed_scale=2560**0.5,
        query_scale=256**-0.5,
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, {**LLAMA3, "rope_theta": 5e5}),
        ({"rope_scaling": {"type": "yarn", **YARN}}, {"rope_type": "yarn", "rope_theta": 1e4, **YARN}),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_type": "linear", "factor": 2.0}),
    ],
)
def test_old_and_new_fields_of_rotary_positions_are_equivalent(old, new):
    assert parsed(make_source("llama", old)) == parsed(make_source("llama", rope_parameters=new))


def test_angles_by_hand():
    np.testing.assert_allclose(rope_frequencies(Rope(theta=100.0), 4), [1.0, 0.1], rtol=1e-6)
    np.testing.assert_allclose(rope_frequencies(Rope(theta=100.0, kind="linear", factor=4.0), 4), [0.25, 0.025])


def test_llama3_rope_keeps_high_stretches_low_and_blends_middle_frequencies():
    rope = Rope(theta=1e4, kind="llama3", factor=8.0, original_length=64)
    plain, actual = rope_frequencies(Rope(theta=1e4), 16), rope_frequencies(rope, 16)
    turns = 64 * plain / (2 * math.pi)
    np.testing.assert_allclose(actual[turns >= 4], plain[turns >= 4])
    np.testing.assert_allclose(actual[turns <= 1], plain[turns <= 1] / 8)
    between = (turns > 1) & (turns < 4)
    assert between.any()
    assert np.all((plain[between] / 8 < actual[between]) & (actual[between] < plain[between]))


def test_the_magnitude_of_yarn():
    assert yarn_magnitude(4.0) == 0.1 * math.log(4.0) + 1.0
    assert yarn_magnitude(1.0) == 1.0
    assert yarn_magnitude(4.0, 2.0, 1.0) == (0.2 * math.log(4.0) + 1.0) / (0.1 * math.log(4.0) + 1.0)
    rope = {"rope_type": "yarn", "rope_theta": 1e4, **YARN}
    assert parsed(make_source("qwen2", rope_parameters=rope)).ropes[0].magnitude == yarn_magnitude(4.0)
    assert parsed(make_source("qwen2", rope_parameters={**rope, "attention_factor": 1.5})).ropes[0].magnitude == 1.5
