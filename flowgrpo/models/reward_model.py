"""Read scalar-head reward models in the Hugging Face format, and score conversations with them.

    folder or hub id -> load_scorer -> Scorer;   scorer.score(params, tokens_rs, length_r) -> score_r

These are folders of transformers' sequence classification models (Qwen2ForSequenceClassification and its relatives)
with one label: a decoder, and `score.weight` [1 d] over its last hidden state. They are read as a critic's parameters;
the score is the critic's value after the last token.
"""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from flowgrpo.data.tokenizer import load_tokenizer
from flowgrpo.models import families, hf
from flowgrpo.models.config import DecoderConfig
from flowgrpo.models.critic import HEAD, Critic, make_critic, trunk_config
from flowgrpo.models.decoder import parameters
from flowgrpo.models.hf import StoredTensor, find_tensors
from flowgrpo.types import BadInput, Params

WEIGHT = "score.weight"
CLASSES = {  # by model_type
    model_type: "Gemma3TextForSequenceClassification"
    if model_type == "gemma3_text"
    else family.architecture.replace("CausalLM", "SequenceClassification")
    for model_type, family in families.FAMILIES.items()
}


class Scorer(NamedTuple):
    """A scalar-head reward model with its parameters, which are those of a critic."""

    critic: Critic
    params: Params
    tokenizer: Any  # a ChatTokenizer; None if it was loaded without
    config: DecoderConfig

    def score(self, params: Params, tokens_rs: Array, length_r: Array) -> Array:
        """The score after the last of each row's `length` tokens -> [r]; a row of length 0 scores 0."""
        return last_value(self.critic, params, tokens_rs, length_r)


def load_scorer(
    path: str | Path, *, dtype="float32", sharding: hf.Placement | None = None, tokenizer: bool = True
) -> Scorer:
    """Read a reward model from a folder or a hub id; the arguments are those of `load_model`. The head is float32."""
    folder, _, config = hf.read_config(path, _to_decoder_config_json)
    config = trunk_config(config)
    dtype, chat_tokenizer = hf.to_dtype(dtype), load_tokenizer(folder) if tokenizer else None
    tensors = find_tensors(folder)
    head = _read_head(tensors.pop(WEIGHT, None), folder, config)
    hf.check_model_tensors(folder, tensors, config)
    params = {name: hf.read_parameter(name, tensors, config, dtype, sharding) for name in parameters(config)}
    params[HEAD] = jax.device_put(head, hf.sharding_of(sharding, HEAD, "d"))
    return Scorer(make_critic(config, dtype=dtype), params, chat_tokenizer, config)


def last_value(critic: Critic, params: Params, tokens_rs: Array, length_r: Array) -> Array:
    """A critic's value after the last of each row's `length` tokens, which padding follows -> [r]."""
    real_rs = (jnp.arange(tokens_rs.shape[1])[None, :] < length_r[:, None]).astype(jnp.int32)
    value_rs = critic.apply(params, tokens_rs, None, real_rs)
    return jnp.take_along_axis(value_rs, jnp.maximum(length_r - 1, 0)[:, None], axis=1)[:, 0]


def _to_decoder_config_json(hf_config: families.ConfigJSON, location: str) -> families.ConfigJSON:
    """The config.json of the decoder under the head."""
    architecture, model_type = (hf_config.get("architectures") or [None])[0], str(hf_config.get("model_type"))
    if model_type not in CLASSES or architecture != CLASSES[model_type]:
        supported = ", ".join(CLASSES.values())
        raise BadInput(
            f"{location}: {architecture or model_type} is not read as a reward model; those read are {supported}"
        )
    return {**hf_config, "architectures": [families.FAMILIES[model_type].architecture]}


def _read_head(tensor: StoredTensor | None, folder: Path, config: DecoderConfig) -> np.ndarray:
    """The weights of the scalar head in float32 -> [d]."""
    if tensor is None:
        raise BadInput(f"{folder} has no {WEIGHT}: it is no reward model with a scalar head")
    if tensor.shape != (1, config.d):
        shape = f"{list(tensor.shape)} and not {[1, config.d]}"
        raise BadInput(f"{WEIGHT} in {folder} has shape {shape}: a reward model has one label (num_labels 1)")
    if tensor.dtype not in families.DTYPES.values():
        raise BadInput(f"{WEIGHT} in {folder} is {tensor.dtype} and not one of {', '.join(families.DTYPES.values())}")
    return tensor.read()[0].astype(np.float32)
