"""Shapes of published models by name, as their config.json has them, for plans that need no weights and no network.

`shape_of_model` takes one of these names, or a folder with a config.json.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowgrpo.models import families
from flowgrpo.models.config import DecoderConfig
from flowgrpo.models.stored import read_json
from flowgrpo.types import BadInput


def _shape(kind: str, width: int, layers: int, heads: int, kv_heads: int, ffn: int, words: int, **rest: Any) -> dict:
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    sizes |= {"num_key_value_heads": kv_heads, "intermediate_size": ffn, "vocab_size": words}
    return {"model_type": kind, "tie_word_embeddings": False} | sizes | rest


_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_QWEN2: dict[str, Any] = {"rope_theta": 1e6, "max_position_embeddings": 32_768}
_LLAMA3: dict[str, Any] = {"rope_theta": 5e5, "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072}
PUBLISHED: Mapping[str, dict[str, Any]] = {
    "qwen2.5-0.5b": _shape("qwen2", 896, 24, 14, 2, 4864, 151_936, **_TIED, **_QWEN2),
    "qwen2.5-1.5b": _shape("qwen2", 1536, 28, 12, 2, 8960, 151_936, **_TIED, **_QWEN2),
    "qwen2.5-3b": _shape("qwen2", 2048, 36, 16, 2, 11_008, 151_936, **_TIED, **_QWEN2),
    "qwen2.5-7b": _shape("qwen2", 3584, 28, 28, 4, 18_944, 152_064, **_QWEN2),
    "qwen2.5-14b": _shape("qwen2", 5120, 48, 40, 8, 13_824, 152_064, **_QWEN2),
    "qwen2.5-32b": _shape("qwen2", 5120, 64, 40, 8, 27_648, 152_064, **_QWEN2),
    "qwen2.5-72b": _shape("qwen2", 8192, 80, 64, 8, 29_568, 152_064, **_QWEN2),
    "qwen3-8b": _shape("qwen3", 4096, 36, 32, 8, 12_288, 151_936, head_dim=128, rope_theta=1e6),
    "llama-3.2-1b": _shape("llama", 2048, 16, 32, 8, 8192, 128_256, **_TIED, **_LLAMA3),
    "llama-3.1-8b": _shape("llama", 4096, 32, 32, 8, 14_336, 128_256, **_LLAMA3),
}


def shape_of_model(name: str) -> DecoderConfig:
    """The shape of a published model, or of a folder's config.json."""
    if name in PUBLISHED:
        return families.decoder_config(families.text_source(PUBLISHED[name], name), name)
    file = Path(name).expanduser() / "config.json"
    if not file.is_file():
        known = ", ".join(PUBLISHED)
        raise BadInput(f"--model={name} is neither a folder with a config.json nor one of the shapes {known}")
    return families.decoder_config(families.text_source(read_json(file), str(file)), str(file))
