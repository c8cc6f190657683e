"""Read published image-text models, and score images and texts with them.

    folder or hub id -> load_image_text -> Loaded(config, params, prepare, encode)
    make_score_pairs(loaded)(images, texts) -> [n]        what the vision rewards are given

`encode` turns texts into ids of one length. `prepare` turns RGB bytes [y x 3] into normalised pixels [3 y x], without
PyTorch: resize by Pillow, centre crop, x factor, (x - mean) / deviation, each where the folder's
preprocessor_config.json says so.
"""

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from flowgrpo.contracts import Params
from flowgrpo.data.tokenizer import any_of, load_text
from flowgrpo.files import pip_install
from flowgrpo.models import hf
from flowgrpo.models.families import check_numbers, check_tensors
from flowgrpo.models.hf import Stored, find_tensors, read_json
from flowgrpo.models.image_text import (
    KINDS,
    ImageTextConfig,
    ImageTextParameter,
    Tower,
    as_scores,
    check_image_text_config,
    image_embeddings,
    image_text_parameters,
    layers_of,
    text_embeddings,
)
from flowgrpo.types import BadInput

MOST_PIXELS = 64 << 20  # of a resized image
EDGES = (("shortest_edge",), ("height", "width"))  # how a size may be given


@dataclass(frozen=True)
class Preparation:
    """Steps that prepare an image, with their settings; None leaves a step out."""

    size: int | tuple[int, int] | None  # of the shorter edge, or height and width
    resample: int  # Pillow's number of a filter; 3 is bicubic
    crop: tuple[int, int] | None  # height and width
    factor: float | None
    mean: tuple[float, ...] | None
    deviation: tuple[float, ...] | None


def read_preparation(source: Mapping[str, Any], where: str, *, kind: str, side: int) -> Preparation:
    """Parse a preprocessor_config.json, which must give `side` x `side` pixels; CLIP crops unless told not to."""

    def given(key: str) -> Any:
        if source.get(key) is None:
            raise BadInput(f"{where} has no {key}: write what the model was trained with")
        return source[key]

    check_numbers(source, where)
    resizes, crops = source.get("do_resize", True), source.get("do_center_crop", kind == "clip")
    rescales, normalises = source.get("do_rescale", True), source.get("do_normalize", True)
    crop = _edges(given("crop_size"), f"{where}, crop_size") if crops else None
    found = Preparation(
        size=_edges(given("size"), f"{where}, size") if resizes else None,
        resample=int(given("resample")) if resizes else 0,
        crop=(crop, crop) if isinstance(crop, int) else crop,
        factor=float(source.get("rescale_factor", 1 / 255)) if rescales else None,
        mean=_three(given("image_mean"), f"{where}, image_mean") if normalises else None,
        deviation=_three(given("image_std"), f"{where}, image_std") if normalises else None,
    )
    last = found.crop or found.size
    if last != (side, side):
        raise BadInput(f"{where} makes images of {last}, but the model reads {side} x {side}: fix size or crop_size")
    return found


def prepare(image_yxc: np.ndarray, *, preparation: Preparation) -> np.ndarray:
    """RGB bytes [y x 3] -> pixels [3 y x] in float32."""
    if image_yxc.dtype != np.uint8 or image_yxc.ndim != 3 or image_yxc.shape[2] != 3 or 0 in image_yxc.shape:
        raise BadInput(f"an image is bytes of the shape [y, x, 3], not {image_yxc.dtype} {list(image_yxc.shape)}")
    if preparation.size is not None:
        image_yxc = resize(image_yxc, preparation.size, preparation.resample)
    if preparation.crop is not None:
        image_yxc = centre_crop(image_yxc, preparation.crop)
    if preparation.factor is not None:
        image_yxc = (image_yxc.astype(np.float64) * preparation.factor).astype(np.float32)
    if preparation.mean is not None and preparation.deviation is not None:
        mean, deviation = (np.array(part, np.float32) for part in (preparation.mean, preparation.deviation))
        image_yxc = (image_yxc.astype(np.float32) - mean) / deviation
    return np.ascontiguousarray(image_yxc.astype(np.float32).transpose(2, 0, 1))


def resize(image_yxc: np.ndarray, size: int | tuple[int, int], resample: int) -> np.ndarray:
    """By Pillow, to height and width, or so that the shorter edge has `size` pixels."""
    try:
        from PIL import Image
    except ImportError as error:
        raise BadInput(f"images need Pillow: {pip_install('vision')}") from error
    height, width = image_yxc.shape[:2]
    if isinstance(size, int):
        long = int(size * max(height, width) / min(height, width))
        size = (size, long) if height <= width else (long, size)
    if size[0] * size[1] > MOST_PIXELS:
        raise BadInput(f"an image of {width} x {height} pixels is too narrow: resized it has {size[1]} x {size[0]}")
    filtered = Image.fromarray(image_yxc).resize((size[1], size[0]), resample=Image.Resampling(resample))
    return np.asarray(filtered)


def centre_crop(image_yxc: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """The middle of an image; what is missing of a small one is black."""
    for axis, wanted in enumerate(size):
        found = image_yxc.shape[axis]
        if found < wanted:
            before = -(-(wanted - found) // 2)
            widths = [(0, 0)] * 3
            widths[axis] = (before, wanted - found - before)
            image_yxc = np.pad(image_yxc, widths)
        first = max(found - wanted, 0) // 2
        image_yxc = image_yxc.take(range(first, first + wanted), axis=axis)
    return image_yxc


def _edges(value: Any, where: str) -> int | tuple[int, int]:
    """The shorter edge, or height and width."""
    sizes = value if isinstance(value, list) else [value]
    if isinstance(value, Mapping):
        sizes = next(([value[key] for key in keys] for keys in EDGES if set(keys) == set(value)), [])
    if not all(isinstance(size, int) and 0 < size <= 8192 for size in sizes) or not 1 <= len(sizes) <= 2:
        raise BadInput(f"{where} is {value!r}: write a number of pixels, or height and width")
    return sizes[0] if len(sizes) == 1 else (sizes[0], sizes[1])


def _three(value: Any, where: str) -> tuple[float, ...]:
    values = value if isinstance(value, list) else [value] * 3
    if len(values) != 3 or not all(isinstance(each, int | float) for each in values):
        raise BadInput(f"{where} is {value!r}: write one number for each of three channels")
    return tuple(float(each) for each in values)


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
    config = read_image_text_config(read_json(folder / "config.json"), str(folder / "config.json"))
    preparation = read_preparation(*_preparation_file(folder), kind=config.kind, side=config.side)
    tensors = {name: stored for name, stored in find_tensors(folder).items() if not BUFFERS.match(name)}
    _check(folder, tensors, config)
    kind = hf._dtype(dtype)
    params = {
        name: _read(parameter, tensors, config, kind) for name, parameter in image_text_parameters(config).items()
    }
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
    encode, step = loaded.encode, jax.jit(partial(_pairs, config=loaded.config, value=value))

    def score_pairs(images: Sequence[np.ndarray], texts: Sequence[str]) -> np.ndarray:
        found = []
        for first in range(0, len(texts), rows):
            # The last group is filled up with its first pair, so that the shape never changes.
            part = [first + i if first + i < len(texts) else first for i in range(rows)]
            pixels_icyx = np.stack([loaded.prepare(images[i]) for i in part])
            found.append(np.asarray(step(loaded.params, pixels_icyx, encode([texts[i] for i in part]))))
        return np.concatenate(found)[: len(texts)] if found else np.zeros(0, np.float32)

    return score_pairs


def _pairs(params: Params, pixels_icyx: Array, tokens_is: Array, *, config: ImageTextConfig, value: Callable) -> Array:
    image_ip = image_embeddings(params, pixels_icyx, config=config)
    return value(params, (image_ip * text_embeddings(params, tokens_is, config=config)).sum(axis=1))


# config.json ------------------------------------------------------------------------------------------


def read_image_text_config(source: Mapping[str, Any], where: str = "config.json") -> ImageTextConfig:
    """The shape that a config.json says, with the defaults of transformers."""
    from transformers import AutoConfig

    kind = str(source.get("model_type"))
    if kind not in KINDS:
        raise BadInput(f"{where}: model_type {kind} is not an image-text model that is supported: {', '.join(KINDS)}")
    for name in ("vision_config", "text_config"):
        part = source.get(name) or {}
        if not isinstance(part, Mapping):
            raise BadInput(f"{where}: {name} is {part!r:.80}, but must be an object")
        check_numbers(part, f"{where}, {name}")
    check_numbers(source, where)
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
        check_image_text_config(config)
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


def _names(parameter: ImageTextParameter, config: ImageTextConfig) -> list[str]:
    """The tensors of a parameter, layer by layer."""
    layers = layers_of(parameter, config)
    return [parameter.file] if layers is None else [parameter.file.format(n=n) for n in range(layers)]


def _check(folder: Path, tensors: Mapping[str, Stored], config: ImageTextConfig) -> None:
    expected = {
        name: parameter.file_shape
        for parameter in image_text_parameters(config).values()
        for name in _names(parameter, config)
    }
    numbers = {name for name, stored in tensors.items() if stored.shape == (1,) and expected.get(name) == ()}
    expected |= dict.fromkeys(numbers, (1,))  # a number may be a list of one
    check_tensors(f"the tensors in {folder} are not those of its config.json", tensors, expected)


def _read(parameter: ImageTextParameter, tensors: Mapping[str, Stored], config: ImageTextConfig, dtype) -> Array:
    """One parameter; on the host there is never more than that."""
    names, stacked = _names(parameter, config), layers_of(parameter, config) is not None
    host = np.empty((len(names), *parameter.shape), dtype)
    for n, name in enumerate(names):
        stored = tensors[name].read()
        host[n] = stored.reshape(parameter.shape[::-1]).T if parameter.transposed else stored.reshape(parameter.shape)
    return jnp.asarray(host if stacked else host[0])


# Texts ------------------------------------------------------------------------------------------------


def _encoder(folder: Path, config: ImageTextConfig) -> Callable[[Sequence[str]], np.ndarray]:
    """Texts -> ids, padded or cut to all positions; special tokens that a text spells out are left out."""
    tokenizer = load_text(folder).tokenizer
    if tokenizer.pad_token_id is None:
        raise BadInput(f"the tokenizer in {folder} has no pad_token: add one to its tokenizer_config.json")
    return lambda texts: _encode(texts, tokenizer, any_of(tokenizer.all_special_tokens), config)


def _encode(texts: Sequence[str], tokenizer, special: re.Pattern[str], config: ImageTextConfig) -> np.ndarray:
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
            f"the tokenizer ends a text without id {config.eos_id}, the eos_token_id of config.json: fix one of them"
        )
    return tokens_js
