"""Read published image-text models, and score images and texts with them.

    folder or hub id -> load_image_text -> ImageTextModel(config, params, preprocess, encode)
    make_score_pairs(model)(images, texts) -> [n]        scores for the vision rewards

`encode` turns texts into token ids of one length. `preprocess` turns RGB bytes [y x 3] into normalised pixels [3 y x],
without PyTorch: resize by Pillow, centre crop, x factor, (x - mean) / deviation, as the folder's
preprocessor_config.json says.
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

from flowgrpo.data.tokenizer import load_tokenizer, match_any
from flowgrpo.files import pip_install
from flowgrpo.models import hf
from flowgrpo.models.families import check_numbers, check_tensors
from flowgrpo.models.hf import StoredTensor, find_tensors, read_json
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
from flowgrpo.types import JSON, BadInput, Params

MAX_PIXELS = 64 << 20  # of a resized image
SIZE_KEYS = (("shortest_edge",), ("height", "width"))  # keys of a size: of its shorter edge, or of both


@dataclass(frozen=True)
class ImagePreprocessing:
    """Settings of the steps that preprocess an image, in order; None skips a step."""

    size: int | tuple[int, int] | None  # resize to: the shorter edge, or height and width
    resample: int  # Pillow's number of the filter; 3 is bicubic
    crop: tuple[int, int] | None  # height and width
    factor: float | None
    mean: tuple[float, ...] | None
    deviation: tuple[float, ...] | None


def parse_preprocessing(source: Mapping[str, Any], location: str, *, kind: str, side: int) -> ImagePreprocessing:
    """Parse a preprocessor_config.json, which must make `side` x `side` pixels; CLIP crops by default."""

    def required(key: str) -> Any:
        if source.get(key) is None:
            raise BadInput(f"{location} has no {key}: write what the model was trained with")
        return source[key]

    check_numbers(source, location)
    resizes, crops = source.get("do_resize", True), source.get("do_center_crop", kind == "clip")
    rescales, normalises = source.get("do_rescale", True), source.get("do_normalize", True)
    crop = _parse_size(required("crop_size"), f"{location}, crop_size") if crops else None
    preprocessing = ImagePreprocessing(
        size=_parse_size(required("size"), f"{location}, size") if resizes else None,
        resample=int(required("resample")) if resizes else 0,
        crop=(crop, crop) if isinstance(crop, int) else crop,
        factor=float(source.get("rescale_factor", 1 / 255)) if rescales else None,
        mean=_by_channel(required("image_mean"), f"{location}, image_mean") if normalises else None,
        deviation=_by_channel(required("image_std"), f"{location}, image_std") if normalises else None,
    )
    final_size = preprocessing.crop or preprocessing.size
    if final_size != (side, side):
        raise BadInput(
            f"{location} makes images of {final_size}, but the model reads {side} x {side}: fix size or crop_size"
        )
    return preprocessing


def preprocess(image_yxc: np.ndarray, *, settings: ImagePreprocessing) -> np.ndarray:
    """RGB bytes [y x 3] -> pixels [3 y x] in float32."""
    if image_yxc.dtype != np.uint8 or image_yxc.ndim != 3 or image_yxc.shape[2] != 3 or 0 in image_yxc.shape:
        raise BadInput(f"an image is bytes of the shape [y, x, 3], not {image_yxc.dtype} {list(image_yxc.shape)}")
    if settings.size is not None:
        image_yxc = resize(image_yxc, settings.size, settings.resample)
    if settings.crop is not None:
        image_yxc = centre_crop(image_yxc, settings.crop)
    if settings.factor is not None:
        image_yxc = (image_yxc.astype(np.float64) * settings.factor).astype(np.float32)
    if settings.mean is not None and settings.deviation is not None:
        mean, deviation = (np.array(part, np.float32) for part in (settings.mean, settings.deviation))
        image_yxc = (image_yxc.astype(np.float32) - mean) / deviation
    return np.ascontiguousarray(image_yxc.astype(np.float32).transpose(2, 0, 1))


def resize(image_yxc: np.ndarray, size: int | tuple[int, int], resample: int) -> np.ndarray:
    """Resize with Pillow to height and width, or so that the shorter edge has `size` pixels."""
    try:
        from PIL import Image
    except ImportError as error:
        raise BadInput(f"images need Pillow: {pip_install('vision')}") from error
    height, width = image_yxc.shape[:2]
    if isinstance(size, int):
        longer = int(size * max(height, width) / min(height, width))
        size = (size, longer) if height <= width else (longer, size)
    if size[0] * size[1] > MAX_PIXELS:
        raise BadInput(f"an image of {width} x {height} pixels is too narrow: resized it has {size[1]} x {size[0]}")
    resized = Image.fromarray(image_yxc).resize((size[1], size[0]), resample=Image.Resampling(resample))
    return np.asarray(resized)


def centre_crop(image_yxc: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """The centre of an image; a small image is padded with black."""
    for axis, target in enumerate(size):
        length = image_yxc.shape[axis]
        if length < target:
            before = -(-(target - length) // 2)
            widths = [(0, 0)] * 3
            widths[axis] = (before, target - length - before)
            image_yxc = np.pad(image_yxc, widths)
        first = max(length - target, 0) // 2
        image_yxc = image_yxc.take(range(first, first + target), axis=axis)
    return image_yxc


def _parse_size(value: JSON, location: str) -> int | tuple[int, int]:
    """The shorter edge, or height and width."""
    sizes = value if isinstance(value, list) else [value]
    if isinstance(value, Mapping):
        sizes = next(([value[key] for key in keys] for keys in SIZE_KEYS if set(keys) == set(value)), [])
    if not all(isinstance(size, int) and 0 < size <= 8192 for size in sizes) or not 1 <= len(sizes) <= 2:
        raise BadInput(f"{location} is {value!r}: write a number of pixels, or height and width")
    return sizes[0] if len(sizes) == 1 else (sizes[0], sizes[1])


def _by_channel(value: JSON, location: str) -> tuple[float, ...]:
    values = value if isinstance(value, list) else [value] * 3
    if len(values) != 3 or not all(isinstance(number, int | float) for number in values):
        raise BadInput(f"{location} is {value!r}: write one number for each of three channels")
    return tuple(float(number) for number in values)


OLD_BUFFERS = re.compile(r".*\.position_ids$")  # tensors of old folders that are no parameters
MAX_CHARACTERS_PER_TOKEN = 16  # longer texts are cut before they are tokenised


class ImageTextModel(NamedTuple):
    """An image-text model with its parameters, and the functions that preprocess images and texts for it."""

    config: ImageTextConfig
    params: Params
    preprocess: Callable[[np.ndarray], np.ndarray]  # RGB bytes [y x 3] -> pixels [3 side side]
    encode: Callable[[Sequence[str]], np.ndarray] | None  # texts -> token ids [j positions]; None without tokenizer


def load_image_text(path: str | Path, *, dtype="float32", tokenizer: bool = True) -> ImageTextModel:
    """Read a CLIP or SigLIP folder or hub id; `tokenizer=False` reads no tokenizer."""
    folder = hf.find_folder(path)
    config = read_image_text_config(read_json(folder / "config.json"), str(folder / "config.json"))
    settings = parse_preprocessing(*_read_preprocessor_config(folder), kind=config.kind, side=config.side)
    tensors = {name: tensor for name, tensor in find_tensors(folder).items() if not OLD_BUFFERS.match(name)}
    _check_tensors(folder, tensors, config)
    dtype = hf.to_dtype(dtype)
    params = {
        name: _read_parameter(parameter, tensors, config, dtype)
        for name, parameter in image_text_parameters(config).items()
    }
    encode = _make_encode(folder, config) if tokenizer else None
    return ImageTextModel(config, params, partial(preprocess, settings=settings), encode)


def cosine(_: Params, cosine_n: Array) -> Array:
    """The cosine itself, from -1 to 1."""
    return cosine_n


def probability(params: Params, cosine_n: Array) -> Array:
    """The sigmoid of the score: SigLIP's probability that image and text belong together."""
    return jax.nn.sigmoid(as_scores(params, cosine_n))


def make_score_pairs(
    model: ImageTextModel, *, rows: int = 8, value: Callable[[Params, Array], Array] = cosine
) -> Callable[[Sequence[np.ndarray], Sequence[str]], np.ndarray]:
    """`score_pairs(images, texts) -> [n]`, `rows` pairs at a time in one compiled shape.

    `value` computes the score from a cosine: `cosine`, `as_scores` or `probability`.
    """
    if model.encode is None:
        raise BadInput("texts can't be scored without a tokenizer: load the model with tokenizer=True")
    encode, step = model.encode, jax.jit(partial(_score_pairs, config=model.config, value=value))

    def score_pairs(images: Sequence[np.ndarray], texts: Sequence[str]) -> np.ndarray:
        scores = []
        for first in range(0, len(texts), rows):
            # The last group is filled up with its first pair, so that the shape never changes.
            indices = [first + i if first + i < len(texts) else first for i in range(rows)]
            pixels_icyx = np.stack([model.preprocess(images[i]) for i in indices])
            scores.append(np.asarray(step(model.params, pixels_icyx, encode([texts[i] for i in indices]))))
        return np.concatenate(scores)[: len(texts)] if scores else np.zeros(0, np.float32)

    return score_pairs


def _score_pairs(
    params: Params, pixels_icyx: Array, tokens_is: Array, *, config: ImageTextConfig, value: Callable
) -> Array:
    image_ip = image_embeddings(params, pixels_icyx, config=config)
    return value(params, (image_ip * text_embeddings(params, tokens_is, config=config)).sum(axis=1))


# config.json ------------------------------------------------------------------------------------------


def read_image_text_config(source: Mapping[str, Any], location: str = "config.json") -> ImageTextConfig:
    """The shape of the model of a config.json, with the defaults of transformers; `location` names it in errors."""
    from transformers import AutoConfig

    kind = str(source.get("model_type"))
    if kind not in KINDS:
        raise BadInput(
            f"{location}: model_type {kind} is not an image-text model that is supported: {', '.join(KINDS)}"
        )
    for name in ("vision_config", "text_config"):
        part = source.get(name) or {}
        if not isinstance(part, Mapping):
            raise BadInput(f"{location}: {name} is {part!r:.80}, but must be an object")
        check_numbers(part, f"{location}, {name}")
    check_numbers(source, location)
    try:
        full = AutoConfig.for_model(**copy.deepcopy(dict(source)))
    except Exception as error:  # each field is checked by transformers, with exceptions of many classes
        raise BadInput(f"{location}: transformers refuses it: {' '.join(str(error).split())}") from error
    vision, text = full.vision_config, full.text_config
    if not all(isinstance(size, int) for size in (vision.image_size, vision.patch_size)) or vision.num_channels != 3:
        raise BadInput(f"{location}: images must be square, of square patches and three channels")
    if not getattr(vision, "vision_use_head", True):
        raise BadInput(f"{location}: vision_use_head is false, but without a head there is no embedding of an image")
    if kind == "clip" and not isinstance(text.eos_token_id, int):
        raise BadInput(
            f"{location}: eos_token_id of text_config is {text.eos_token_id!r}, but CLIP's texts have one end token"
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
        raise BadInput(f"{location}: {error}") from None
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


def _read_preprocessor_config(folder: Path) -> tuple[Mapping[str, JSON], str]:
    """The settings that preprocess images, and their location; new folders have them in processor_config.json."""
    path = folder / "preprocessor_config.json"
    if path.exists() or not (folder / "processor_config.json").exists():
        return read_json(path), str(path)
    path = folder / "processor_config.json"
    settings = read_json(path).get("image_processor")
    if not isinstance(settings, dict):
        raise BadInput(f"{path} has no image_processor, and there is no preprocessor_config.json: copy it too")
    return settings, f"{path}, image_processor"


# Tensors ----------------------------------------------------------------------------------------------


def _tensor_names(parameter: ImageTextParameter, config: ImageTextConfig) -> list[str]:
    """Names of the tensors of a parameter, layer by layer."""
    layers = layers_of(parameter, config)
    return [parameter.file] if layers is None else [parameter.file.format(n=n) for n in range(layers)]


def _check_tensors(folder: Path, tensors: Mapping[str, StoredTensor], config: ImageTextConfig) -> None:
    expected = {
        name: parameter.file_shape
        for parameter in image_text_parameters(config).values()
        for name in _tensor_names(parameter, config)
    }
    scalars = {name for name, tensor in tensors.items() if tensor.shape == (1,) and expected.get(name) == ()}
    expected |= dict.fromkeys(scalars, (1,))  # a scalar may have the shape [1] in files
    check_tensors(f"the tensors in {folder} are not those of its config.json", tensors, expected)


def _read_parameter(
    parameter: ImageTextParameter, tensors: Mapping[str, StoredTensor], config: ImageTextConfig, dtype
) -> Array:
    """Read one parameter; the host holds one at a time."""
    names, stacked = _tensor_names(parameter, config), layers_of(parameter, config) is not None
    host = np.empty((len(names), *parameter.shape), dtype)
    for n, name in enumerate(names):
        value = tensors[name].read()
        host[n] = value.reshape(parameter.shape[::-1]).T if parameter.transposed else value.reshape(parameter.shape)
    return jnp.asarray(host if stacked else host[0])


# Texts ------------------------------------------------------------------------------------------------


def _make_encode(folder: Path, config: ImageTextConfig) -> Callable[[Sequence[str]], np.ndarray]:
    """`encode(texts)` -> token ids of `positions` tokens each; special tokens spelled out in a text are removed."""
    tokenizer = load_tokenizer(folder).hf_tokenizer
    if tokenizer.pad_token_id is None:
        raise BadInput(f"the tokenizer in {folder} has no pad_token: add one to its tokenizer_config.json")
    special, length = match_any(tokenizer.all_special_tokens), config.positions

    def encode(texts: Sequence[str]) -> np.ndarray:
        cut = [text[: length * MAX_CHARACTERS_PER_TOKEN].encode("utf-8", "replace").decode() for text in texts]
        clean = [special.sub(" ", text) for text in cut]  # an end token within a text would end it early
        ids = tokenizer(clean, padding="max_length", truncation=True, max_length=length)["input_ids"]
        tokens_js = np.asarray(ids, np.int32)
        if tokens_js.max(initial=0) >= config.v:
            raise BadInput(
                f"the tokenizer gives id {tokens_js.max()}, but the model has {config.v}: they don't belong together"
            )
        if config.kind == "clip" and config.eos_id != 2 and not (tokens_js == config.eos_id).any(axis=1).all():
            raise BadInput(
                f"the tokenizer ends a text without id {config.eos_id}, the eos_token_id of config.json: "
                "fix one of them"
            )
        return tokens_js

    return encode
