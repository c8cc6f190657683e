"""Shapes of the measured models; `ceilings` makes the models."""

from typing import Any

PROTOTYPE = "prototype"  # the planner of the pure environments, 0.34 M parameters


def _qwen2(width: int, layers: int, heads: int, kv_heads: int, hidden: int) -> dict[str, Any]:
    """A config.json."""
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "intermediate_size": hidden, "vocab_size": 512}
    head_sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return {"model_type": "qwen2", "tie_word_embeddings": True, "rope_theta": 1e6, **sizes, **head_sizes}


SHAPES = {
    "small": _qwen2(256, 4, 4, 2, 1024),  # 4.07 M parameters
    "medium": _qwen2(512, 6, 8, 2, 1792),  # 20.7 M parameters
}
LARGE = _qwen2(768, 10, 12, 4, 2560)  # 75 M parameters
LEARNERS = {PROTOTYPE: None, **SHAPES, "large": LARGE}  # models of update benchmarks
