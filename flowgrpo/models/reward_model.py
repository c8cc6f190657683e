"""Read scalar-head reward models in the Hugging Face format, and score conversations with them.

    folder or hub id -> load_scorer -> Scorer;   scorer.score(params, tokens_rs, length_r) -> score_r

These are the folders of transformers' sequence classification (Qwen2ForSequenceClassification and its relatives) with
one label: a decoder, and `score.weight` [1 d] over its last hidden state. They are read as a critic's parameters, and
the score is the value after the last token.
"""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from flowgrpo.contracts import Params
from flowgrpo.data.tokenizer import load_text
from flowgrpo.models import families, hf
from flowgrpo.models.config import DecoderConfig
from flowgrpo.models.critic import HEAD, Critic, make_critic, trunk_config
from flowgrpo.models.decoder import parameters
from flowgrpo.models.hf import Stored, find_tensors
from flowgrpo.types import BadInput

WEIGHT = "score.weight"
CLASSES = {  # by model_type
    kind: "Gemma3TextForSequenceClassification"
    if kind == "gemma3_text"
    else family.architecture.replace("CausalLM", "SequenceClassification")
    for kind, family in families.FAMILIES.items()
}


class Scorer(NamedTuple):
    """A reward model with its parameters, those of a critic."""

    critic: Critic
    params: Params
    text: Any  # tokenizer and chat rendering, or None
    config: DecoderConfig

    def score(self, params: Params, tokens_rs: Array, length_r: Array) -> Array:
        """The score after the last of each row's `length` tokens -> [r]; a row of length 0 scores 0."""
        return last_value(self.critic, params, tokens_rs, length_r)


def load_scorer(path: str | Path, *, dtype="float32", sharding: hf.Placing | None = None, text: bool = True) -> Scorer:
    """Read a folder or a hub id; the arguments are those of `load_model`. The head is float32."""
    folder, _, config = hf._shape(path, _as_decoder)
    config = trunk_config(config)
    kind, words = hf._dtype(dtype), load_text(folder) if text else None
    tensors = find_tensors(folder)
    head = _head(tensors.pop(WEIGHT, None), folder, config)
    hf._check_tensors(folder, tensors, config)
    params = {name: hf._read(name, tensors, config, kind, sharding) for name in parameters(config)}
    params[HEAD] = jax.device_put(head, hf._place(sharding, HEAD, "d"))
    return Scorer(make_critic(config, dtype=kind), params, words, config)


def last_value(critic: Critic, params: Params, tokens_rs: Array, length_r: Array) -> Array:
    """A critic's value after the last of each row's tokens, padding after them -> [r]."""
    real_rs = (jnp.arange(tokens_rs.shape[1])[None, :] < length_r[:, None]).astype(jnp.int32)
    value_rs = critic.apply(params, tokens_rs, None, real_rs)
    return jnp.take_along_axis(value_rs, jnp.maximum(length_r - 1, 0)[:, None], axis=1)[:, 0]


def _as_decoder(source: families.Source, where: str) -> families.Source:
    """The config as that of the decoder under the head."""
    architecture, kind = (source.get("architectures") or [None])[0], str(source.get("model_type"))
    if kind not in CLASSES or architecture != CLASSES[kind]:
        supported = ", ".join(CLASSES.values())
        raise BadInput(f"{where}: {architecture or kind} is not read as a reward model; those read are {supported}")
    return {**source, "architectures": [families.FAMILIES[kind].architecture]}


def _head(stored: Stored | None, folder: Path, config: DecoderConfig) -> np.ndarray:
    """The weights of the head in float32 -> [d]."""
    if stored is None:
        raise BadInput(f"{folder} has no {WEIGHT}: it is no reward model with a scalar head")
    if stored.shape != (1, config.d):
        shape = f"{list(stored.shape)} and not {[1, config.d]}"
        raise BadInput(f"{WEIGHT} in {folder} has shape {shape}: a reward model has one label (num_labels 1)")
    if stored.dtype not in families.DTYPES.values():
        raise BadInput(f"{WEIGHT} in {folder} is {stored.dtype} and not one of {', '.join(families.DTYPES.values())}")
    return stored.read()[0].astype(np.float32)
