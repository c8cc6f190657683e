"""Published image-text models: a folder in the Hugging Face format flows in, a scorer of images and texts flows out.

    folder or hub id -> load_image_text -> Loaded(config, params, prepare, encode)
    make_score_pairs(loaded)(images, texts) -> [n]        what the vision rewards are given

`prepare` turns RGB bytes [y x 3] into pixels as the folder's preprocessor_config.json says: resized by Pillow, cropped,
rescaled and normalised in NumPy; `encode` turns texts into ids of one length. Reading goes tensor by tensor.
"""

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from flowgrpo.contracts import Params
from flowgrpo.models import hf
from flowgrpo.models import stored as stored_files
from flowgrpo.models.image_text import as_scores, image_embeddings, text_embeddings
from flowgrpo.models.image_text_config import (
    KINDS,
    ImageTextConfig,
    Parameter,
    Tower,
    check_config,
    layers_of,
    parameters,
)
from flowgrpo.models.pixels import prepare, read_preparation
from flowgrpo.models.stored import Stored, find_tensors, read_json
from flowgrpo.types import BadInput

BUFFERS = re.compile(r".*\.position_ids$")  # of old folders
LONGEST_TOKEN = 16  # characters of a text that are read for each of its positions


class Loaded(NamedTuple):
    """An image-text model with its parameters, and what brings images and texts before it."""

    config: ImageTextConfig
    params: Params
    prepare: Callable[[np.ndarray], np.ndarray]  # RGB bytes [y x 3] -> pixels [3 side side]
    encode: Callable[[Sequence[str]], np.ndarray] | None  # texts -> ids [j positions]; None without tokenizer


def load_image_text(path: str | Path, *, dtype="float32", text: bool = True) -> Loaded:
    """Read a CLIP or SigLIP folder or hub id; `text=False` reads no tokenizer."""
    folder = hf._folder(path)
    config = read_config(read_json(folder / "config.json"), str(folder / "config.json"))
    preparation = read_preparation(*_preparation_file(folder), kind=config.kind, side=config.side)
    tensors = {name: stored for name, stored in find_tensors(folder).items() if not BUFFERS.match(name)}
    _check(folder, tensors, config)
    kind = hf._dtype(dtype)
    params = {name: _read(parameter, tensors, config, kind) for name, parameter in parameters(config).items()}
    encode = _encoder(folder, config) if text else None
    return Loaded(config, params, partial(prepare, preparation=preparation), encode)


def cosine(_: Params, cosine_n: Array) -> Array:
    """The cosine itself, from -1 to 1."""
    return cosine_n


def probability(params: Params, cosine_n: Array) -> Array:
    """The sigmoid of the score: SigLIP's probability that image and text belong together."""
    return jax.nn.sigmoid(as_scores(params, cosine_n))


def make_score_pairs(
    loaded: Loaded, *, rows: int = 8, value: Callable[[Params, Array], Array] = cosine
) -> Callable[[Sequence[np.ndarray], Sequence[str]], np.ndarray]:
    """`score_pairs(images, texts) -> [n]`, `rows` pairs at a time in one compiled shape.

    `value` makes the number of a cosine: `cosine`, `as_scores` or `probability`.
    """
    if loaded.encode is None:
        raise BadInput("texts can't be scored without a tokenizer: load the model with text=True")
    step = jax.jit(partial(_pairs, config=loaded.config, value=value))
    return partial(_score_pairs, loaded=loaded, step=step, rows=rows)


def _pairs(params: Params, pixels_icyx: Array, tokens_is: Array, *, config: ImageTextConfig, value: Callable) -> Array:
    image_ip = image_embeddings(params, pixels_icyx, config=config)
    return value(params, (image_ip * text_embeddings(params, tokens_is, config=config)).sum(axis=1))


def _score_pairs(images: Sequence[np.ndarray], texts: Sequence[str], *, loaded: Loaded, step, rows: int) -> np.ndarray:
    """The last group is filled up with its first pair, so that the shape never changes."""
    assert loaded.encode is not None
    found = []
    for first in range(0, len(texts), rows):
        part = [first + i if first + i < len(texts) else first for i in range(rows)]
        pixels_icyx = np.stack([loaded.prepare(images[i]) for i in part])
        found.append(np.asarray(step(loaded.params, pixels_icyx, loaded.encode([texts[i] for i in part]))))
    return np.concatenate(found)[: len(texts)] if found else np.zeros(0, np.float32)


# config.json ------------------------------------------------------------------------------------------


def read_config(source: Mapping[str, Any], where: str = "config.json") -> ImageTextConfig:
    """The shape that a config.json says, with the defaults of transformers."""
    from transformers import AutoConfig

    kind = str(source.get("model_type"))
    if kind not in KINDS:
        raise BadInput(f"{where}: model_type {kind} is not an image-text model that is supported: {', '.join(KINDS)}")
    try:
        full = AutoConfig.for_model(**copy.deepcopy(dict(source)))
    except Exception as error:  # each field is checked by transformers, with exceptions of many classes
        raise BadInput(f"{where}: transformers refuses it: {' '.join(str(error).split())}") from error
    vision, text = full.vision_config, full.text_config
    if not all(isinstance(size, int) for size in (vision.image_size, vision.patch_size)) or vision.num_channels != 3:
        raise BadInput(f"{where}: images must be square, of square patches and three channels")
    if not getattr(vision, "vision_use_head", True):
        raise BadInput(f"{where}: vision_use_head is false, but without a head there is no embedding of an image")
    if kind == "clip" and not isinstance(text.eos_token_id, int):
        raise BadInput(
            f"{where}: eos_token_id of text_config is {text.eos_token_id!r}, but CLIP's texts have one end token"
        )
    config = ImageTextConfig(
        kind=kind,
        vision=_tower(vision),
        text=_tower(text),
        side=vision.image_size,
        patch=vision.patch_size,
        v=text.vocab_size,
        positions=text.max_position_embeddings,
        p=full.projection_dim if kind == "clip" else text.projection_size,
        eos_id=text.eos_token_id if kind == "clip" else 2,
    )
    try:
        check_config(config)
    except BadInput as error:
        raise BadInput(f"{where}: {error}") from None
    return config


def _tower(part) -> Tower:
    return Tower(
        d=part.hidden_size,
        h=part.num_attention_heads,
        f=part.intermediate_size,
        layers=part.num_hidden_layers,
        activation={"gelu_new": "gelu_pytorch_tanh"}.get(part.hidden_act, str(part.hidden_act)),
        norm_eps=part.layer_norm_eps,
    )


def _preparation_file(folder: Path) -> tuple[Mapping[str, Any], str]:
    """Read the settings that prepare images, and where they stand; new folders hold them in processor_config.json."""
    path = folder / "preprocessor_config.json"
    if path.exists() or not (folder / "processor_config.json").exists():
        return read_json(path), str(path)
    path = folder / "processor_config.json"
    found = read_json(path).get("image_processor")
    if not isinstance(found, dict):
        raise BadInput(f"{path} has no image_processor, and there is no preprocessor_config.json: copy it too")
    return found, f"{path}, image_processor"


# Tensors ----------------------------------------------------------------------------------------------


def _names(parameter: Parameter, config: ImageTextConfig) -> list[str]:
    """The tensors of a parameter, layer by layer."""
    layers = layers_of(parameter, config)
    return [parameter.file] if layers is None else [parameter.file.format(n=n) for n in range(layers)]


def _check(folder: Path, tensors: Mapping[str, Stored], config: ImageTextConfig) -> None:
    """Raise one error for all that is missing, unexpected, wrongly shaped or of a dtype that can't be read."""
    expected = {
        name: parameter.file_shape for parameter in parameters(config).values() for name in _names(parameter, config)
    }
    wrong = [f"{name} is missing" for name in expected if name not in tensors]
    wrong += [f"{name} is unexpected" for name in sorted(set(tensors) - set(expected))]
    for name in (name for name in expected if name in tensors):
        shape, dtype = tensors[name].shape, tensors[name].dtype
        if shape != expected[name] and (expected[name], shape) != ((), (1,)):  # a number may be a list of one
            wrong.append(f"{name} has shape {list(shape)} and not {list(expected[name])}")
        elif dtype not in hf.DTYPES.values():
            wrong.append(f"{name} is {dtype} and not one of {', '.join(hf.DTYPES.values())}")
    hf._raise_all(f"the tensors in {folder} are not those of its config.json", wrong)


def _read(parameter: Parameter, tensors: Mapping[str, Stored], config: ImageTextConfig, dtype) -> Array:
    """One parameter; on the host there is never more than that."""
    names, stacked = _names(parameter, config), layers_of(parameter, config) is not None
    host = np.empty((len(names), *parameter.shape), dtype)
    for n, name in enumerate(names):
        stored = _whole(tensors[name])
        host[n] = stored.reshape(parameter.shape[::-1]).T if parameter.transposed else stored.reshape(parameter.shape)
    return jnp.asarray(host if stacked else host[0])


def _whole(stored: Stored) -> np.ndarray:
    """A tensor; a single number has no axis of which entries could be read."""
    if stored.shape:
        return stored.read()
    with stored_files._opened(stored.path) as file:
        return file.get_tensor(stored.name)


# Texts ------------------------------------------------------------------------------------------------


def _encoder(folder: Path, config: ImageTextConfig) -> Callable[[Sequence[str]], np.ndarray]:
    """Texts -> ids, padded or cut to all positions; special tokens that a text spells out are left out."""
    from flowgrpo.text import load_text

    tokenizer = load_text(folder).tokenizer
    if tokenizer.pad_token_id is None:
        raise BadInput(f"the tokenizer in {folder} has no pad_token: add one to its tokenizer_config.json")
    special = re.compile(
        "|".join(map(re.escape, sorted(tokenizer.all_special_tokens, key=len, reverse=True))) or "(?!)"
    )
    return partial(_encode, tokenizer=tokenizer, special=special, config=config)


def _encode(texts: Sequence[str], *, tokenizer, special: re.Pattern[str], config: ImageTextConfig) -> np.ndarray:
    """An end token within a text would end it early, so none is left in."""
    length = config.positions
    clean = [special.sub(" ", text[: length * LONGEST_TOKEN].encode("utf-8", "replace").decode()) for text in texts]
    found = tokenizer(clean, padding="max_length", truncation=True, max_length=length)["input_ids"]
    tokens_js = np.asarray(found, np.int32)
    if tokens_js.max(initial=0) >= config.v:
        raise BadInput(
            f"the tokenizer gives id {tokens_js.max()}, but the model has {config.v}: they don't belong together"
        )
    if config.kind == "clip" and config.eos_id != 2 and not (tokens_js == config.eos_id).any(axis=1).all():
        raise BadInput(
            f"the tokenizer ends a text without id {config.eos_id}, the eos_token_id of config.json: mend one"
        )
    return tokens_js
