"""Small config.json dicts of every family, with all sizes different, in old and new styles."""

from tiny_models import random_params

from flowgrpo.models.decoder import make_policy
from flowgrpo.models.families import decoder_config, text_model_config
from flowgrpo.models.hf import Model

SIZES = {"vocab_size": 131, "hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 2, "rms_norm_eps": 1e-4}
SIZES |= {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 256}
SIZES |= {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
HEADS = {"head_dim": 16, "num_key_value_heads": 3}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
WINDOW = {"use_sliding_window": True, "sliding_window": 5}
GEMMA2 = {"query_pre_attn_scalar": 20, "sliding_window": 5, "num_hidden_layers": 3}
GEMMA3 = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
FULL, SLIDING = "full_attention", "sliding_attention"


def make_source(kind: str, *changes: dict, **more) -> dict:
    """One config.json: the common sizes, and what a family changes."""
    source = {"model_type": kind, **SIZES}
    for change in (*changes, more):
        source |= change
    return source


FAMILIES: dict[str, dict] = {
    "qwen2": make_source("qwen2", rope_theta=1e6, tie_word_embeddings=True),
    "qwen2 window, yarn": make_source(
        "qwen2", WINDOW, num_hidden_layers=4, max_window_layers=2, head_dim=10, rope_scaling={"type": "yarn", **YARN}
    ),
    "qwen3": make_source("qwen3", HEADS, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "qwen3 bias, layer_types": make_source(
        "qwen3",
        HEADS,
        WINDOW,
        attention_bias=True,
        tie_word_embeddings=True,
        num_hidden_layers=3,
        layer_types=[FULL, SLIDING, FULL],
        rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "beta_fast": 8.0, "truncate": False, **YARN},
    ),
    "llama": make_source("llama", attention_bias=True, mlp_bias=True, rope_scaling={"type": "linear", "factor": 3.0}),
    "llama llama3": make_source("llama", HEADS, rope_theta=5e5, rope_scaling=LLAMA3, tie_word_embeddings=True),
    "mistral window": make_source("mistral", sliding_window=5),
    "gemma": make_source("gemma", HEADS),
    "gemma2": make_source("gemma2", HEADS, GEMMA2, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    "gemma3": make_source("gemma3_text", HEADS, GEMMA2, GEMMA3, num_hidden_layers=7, sliding_window_pattern=3),
    "gemma3 new, bias, untied": make_source(
        "gemma3_text",
        HEADS,
        GEMMA2,
        attention_bias=True,
        tie_word_embeddings=False,
        layer_types=[SLIDING, FULL, SLIDING],
        rope_parameters={
            FULL: {"rope_type": "yarn", "rope_theta": 1e5, **YARN},
            SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
}


def random_model(name: str, dtype: str = "float32", seed: int = 0) -> Model:
    """A model in which no two parameters are alike, without tokenizer."""
    source = text_model_config(FAMILIES[name])
    config = decoder_config(source)
    return Model(make_policy(config, dtype=dtype), random_params(config, seed, dtype), None, config, source)
