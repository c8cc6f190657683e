"""config.json -> DecoderConfig: published files of the old style, files of the new style, defaults of a family."""

import math

import numpy as np
import pytest
from model_cases import FAMILIES, LLAMA3, YARN, made

from flowgrpo.models.config import Rope, rope_frequencies, small_config, yarn_magnitude
from flowgrpo.models.families import decoder_config, text_source


def parsed(source):
    return decoder_config(text_source(source))


def test_a_published_qwen2():
    config = parsed(
        {
            "architectures": ["Qwen2ForCausalLM"],
            "hidden_act": "silu",
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "max_position_embeddings": 32768,
            "max_window_layers": 28,
            "model_type": "qwen2",
            "num_attention_heads": 28,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "sliding_window": 131072,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_sliding_window": False,
            "vocab_size": 152064,
        }
    )
    assert (config.v, config.d, config.h, config.k, config.e, config.f) == (152064, 3584, 28, 4, 128, 18944)
    assert config.windows == (None,) * 28
    assert config.ropes == (Rope(theta=1e6),) * 28
    assert config.qkv_bias
    others = (config.o_bias, config.tied, config.qk_norm, config.sandwich_norms, config.ffn_bias)
    assert not any(others)


def test_a_published_llama():
    config = parsed(
        {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "eos_token_id": [128001, 128008, 128009],
            "head_dim": 64,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": 32,
            "num_hidden_layers": 16,
            "num_key_value_heads": 8,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 8192},
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "vocab_size": 128256,
        }
    )
    assert config.ropes[0] == Rope(
        theta=5e5, kind="llama3", factor=32.0, original_length=8192, low_factor=1.0, high_factor=4.0
    )
    assert (config.tied, config.norm_eps, config.num_layers, config.qkv_bias) == (True, 1e-5, 16, False)


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
    source = text_source({**outer, "text_config": text, "vision_config": {}, "eos_token_id": [1, 106]})
    assert source["architectures"] == ["Gemma3ForCausalLM"]
    assert (source["eos_token_id"], source["torch_dtype"], source["model_type"]) == (
        [1, 106],
        "bfloat16",
        "gemma3_text",
    )
    config = decoder_config(source)
    assert (config.v, config.h, config.k, config.e) == (262208, 8, 4, 256)
    assert config.windows == tuple(None if (i + 1) % 6 == 0 else 1024 for i in range(34))
    assert config.ropes[0] == Rope(theta=1e4)
    assert config.ropes[5] == Rope(theta=1e6, kind="linear", factor=8.0)
    assert (config.tied, config.qk_norm, config.sandwich_norms, config.norm_offset) == (True, True, True, 1.0)
    assert (config.query_scale, config.embed_scale) == (256**-0.5, 2560**0.5)
    assert (config.logit_softcap, config.attention_softcap, config.activation) == (None, None, "gelu_tanh")


def test_the_defaults_of_gemma2():
    config = parsed({"model_type": "gemma2", "num_hidden_layers": 4})
    assert config.windows == (4096, None, 4096, None)
    assert (config.attention_softcap, config.logit_softcap, config.query_scale) == (50.0, 30.0, 256**-0.5)


@pytest.mark.parametrize(("window", "windows"), [(None, (None, None)), (5, (5, 5))])
def test_mistral_has_a_window_on_all_layers_or_none(window, windows):
    assert parsed(made("mistral", sliding_window=window)).windows == windows


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_qwen_uses_windows_from_a_layer_on_and_only_when_told(kind):
    assert parsed(made(kind, sliding_window=5, max_window_layers=1)).windows == (None, None)
    told = made(kind, sliding_window=5, max_window_layers=1, use_sliding_window=True)
    assert parsed(told).windows == (None, 5)
    assert parsed(told | {"layer_types": ["sliding_attention", "full_attention"]}).windows == (5, None)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, {**LLAMA3, "rope_theta": 5e5}),
        ({"rope_scaling": {"type": "yarn", **YARN}}, {"rope_type": "yarn", "rope_theta": 1e4, **YARN}),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        ),
    ],
)
def test_old_and_new_fields_of_rotary_positions_say_the_same(old, new):
    assert parsed(made("llama", old)) == parsed(made("llama", rope_parameters=new))


def test_old_and_new_fields_of_gemma3_say_the_same():
    new = {key: value for key, value in FAMILIES["gemma3"].items() if not key.startswith(("rope", "sliding_window_p"))}
    new["layer_types"] = ["sliding_attention", "sliding_attention", "full_attention"] * 2 + ["sliding_attention"]
    new["rope_parameters"] = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert parsed(new) == parsed(FAMILIES["gemma3"])


def test_a_config_is_not_changed_by_reading_it():
    for source in FAMILIES.values():
        before = repr(source)
        parsed(source)
        assert repr(source) == before


# Angles -----------------------------------------------------------------------------------------------


def test_angles_by_hand():
    np.testing.assert_allclose(rope_frequencies(Rope(theta=100.0), 4), [1.0, 0.1], rtol=1e-6)
    np.testing.assert_allclose(rope_frequencies(Rope(theta=100.0, kind="linear", factor=4.0), 4), [0.25, 0.025])


def test_llama3_keeps_short_waves_stretches_long_ones_and_blends_between():
    rope = Rope(theta=1e4, kind="llama3", factor=8.0, original_length=64)
    plain, found = rope_frequencies(Rope(theta=1e4), 16), rope_frequencies(rope, 16)
    turns = 64 * plain / (2 * math.pi)
    np.testing.assert_allclose(found[turns >= 4], plain[turns >= 4])
    np.testing.assert_allclose(found[turns <= 1], plain[turns <= 1] / 8)
    between = (turns > 1) & (turns < 4)
    assert between.any()
    assert np.all((plain[between] / 8 < found[between]) & (found[between] < plain[between]))


def test_the_magnitude_of_yarn():
    assert yarn_magnitude(4.0) == 0.1 * math.log(4.0) + 1.0
    assert yarn_magnitude(1.0) == 1.0
    assert yarn_magnitude(4.0, 2.0, 1.0) == (0.2 * math.log(4.0) + 1.0) / (0.1 * math.log(4.0) + 1.0)
    given = {"rope_type": "yarn", "rope_theta": 1e4, **YARN}
    assert parsed(made("qwen2", rope_parameters=given)).ropes[0].magnitude == yarn_magnitude(4.0)
    assert parsed(made("qwen2", rope_parameters={**given, "attention_factor": 1.5})).ropes[0].magnitude == 1.5


def test_a_small_decoder():
    config = small_config(30, d=48, layers=3, head=24)
    assert (config.v, config.d, config.h, config.k, config.e, config.num_layers) == (30, 48, 2, 2, 24, 3)
    assert config.tied
