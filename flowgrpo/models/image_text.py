"""Image-text models, CLIP and SigLIP: shape, parameters and scores.

    score = exp(scale) <image, text> (+ bias)       image, text: embeddings of length 1

    per layer of a tower:  x += o(attention(norm1(x)));   x += down(act(up(norm2(x))))

CLIP (Radford et al., 2021, arXiv:2103.00020) pools an image by a class token, and a text, with causal attention, by
its end token. SigLIP (Zhai et al., 2023, arXiv:2303.15343) pools the patches by a probe that attends to them, and a
text by its last position, padding included. These are their only differences; see `POOL_IMAGE` and `POOL_TEXT`.

`image_text_parameters` declares every parameter once, with its tensor in published files. `image_embeddings`,
`text_embeddings` and `as_scores` are pure functions of a flat dict of parameters. Axis letters in addition to those of
`types`: d width of a tower, h heads, f ffn, v vocabulary, p embedding, i image, j text, c channel, y and x pixels, q
numbers of a patch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from flowgrpo.models.attention import PRECISE
from flowgrpo.types import BadInput, Params

_matmul = partial(jnp.matmul, precision=PRECISE)
CHANNELS = 3
KINDS = ("clip", "siglip")


@dataclass(frozen=True)
class Tower:
    """Shape of one transformer."""

    d: int
    h: int
    f: int
    layers: int
    activation: str
    norm_eps: float


@dataclass(frozen=True)
class ImageTextConfig:
    """Shape of an image-text model: everything that its computation depends on."""

    kind: str  # clip or siglip
    vision: Tower
    text: Tower
    side: int  # pixels of an image's side
    patch: int  # pixels of a patch's side
    v: int  # vocabulary
    positions: int  # tokens of a text, padding included
    p: int  # length of an embedding
    eos_id: int = 2  # CLIP's end token; 2, as in old configs, means the largest id of a text

    @property
    def patches(self) -> int:
        """Number of patches of an image."""
        return (self.side // self.patch) ** 2


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
}


def check_image_text_config(config: ImageTextConfig) -> None:
    """Raise `BadInput` for a shape that can't be."""
    if config.kind not in KINDS:
        raise BadInput(f"an image-text model of the kind {config.kind!r} is not supported; choose {' or '.join(KINDS)}")
    for side, tower in (("vision", config.vision), ("text", config.text)):
        sizes = {"width": tower.d, "heads": tower.h, "ffn": tower.f, "layers": tower.layers}
        for name, size in sizes.items():
            if size < 1:
                raise BadInput(f"{name} of the {side} tower is {size}, but must be at least 1")
        if tower.d % tower.h:
            raise BadInput(f"{tower.h} heads of the {side} tower can't share a width of {tower.d} equally")
        if tower.activation not in ACTIVATIONS:
            supported = ", ".join(ACTIVATIONS)
            raise BadInput(f"hidden_act of the {side} tower is {tower.activation!r}; supported are {supported}")
    if config.patch < 1 or config.side < config.patch:
        raise BadInput(f"image_size {config.side} must hold a patch of {config.patch} pixels")
    if min(config.v, config.positions, config.p) < 1:
        raise BadInput("vocabulary, positions and length of an embedding must be at least 1")
    if config.kind == "siglip" and config.p != config.vision.d:
        raise BadInput(f"the text is projected to {config.p} numbers, but SigLIP's images have {config.vision.d}")


# Parameters -------------------------------------------------------------------------------------------


class ImageTextParameter(NamedTuple):
    """Shape of a parameter, its tensor in published files, and its initialiser: normal, or a constant."""

    shape: tuple[int, ...]  # without the layer, which is stacked in front
    file: str  # name of the tensor; {n} is the layer
    file_shape: tuple[int, ...]
    deviation: float = 0.0
    constant: float = 0.0
    transposed: bool = False  # the file has outputs before inputs


def image_text_parameters(config: ImageTextConfig) -> dict[str, ImageTextParameter]:
    """Every parameter by name: the one place that declares them."""
    vision, text = config.vision, config.text
    patch_file = "vision_model.embeddings.patch_embedding.weight"
    patch_shape = (vision.d, CHANNELS, config.patch, config.patch)
    inputs = CHANNELS * config.patch**2
    shared = {
        "patch": ImageTextParameter((inputs, vision.d), patch_file, patch_shape, inputs**-0.5, transposed=True),
        "vision_position": _table(
            "vision_model.embeddings.position_embedding", config.patches + (config.kind == "clip"), vision.d
        ),
        "text_position": _table("text_model.embeddings.position_embedding", config.positions, text.d),
        "token": _table("text_model.embeddings.token_embedding", config.v, text.d),
        "scale": ImageTextParameter((), "logit_scale", (), constant=2.6592),
        **_norm("vision_norm", "vision_model.post_layernorm", vision.d),
        **_norm("text_norm", "text_model.final_layer_norm", text.d),
        **_layers("vision", vision),
        **_layers("text", text),
    }
    return shared | (_clip_parameters(config) if config.kind == "clip" else _siglip_parameters(config))


def _clip_parameters(config: ImageTextConfig) -> dict[str, ImageTextParameter]:
    d = config.vision.d
    return {
        "class": ImageTextParameter((d,), "vision_model.embeddings.class_embedding", (d,), d**-0.5),
        **_norm("vision_first_norm", "vision_model.pre_layrnorm", d),
        "vision_project": _weight("visual_projection", d, config.p),
        "text_project": _weight("text_projection", config.text.d, config.p),
    }


def _siglip_parameters(config: ImageTextConfig) -> dict[str, ImageTextParameter]:
    d, f, head = config.vision.d, config.vision.f, "vision_model.head."
    return {
        "patch_bias": ImageTextParameter((d,), "vision_model.embeddings.patch_embedding.bias", (d,)),
        "probe": ImageTextParameter((d,), head + "probe", (1, 1, d), d**-0.5),
        "pool_qkv": ImageTextParameter(
            (d, 3 * d), head + "attention.in_proj_weight", (3 * d, d), d**-0.5, transposed=True
        ),
        "pool_qkv_bias": ImageTextParameter((3 * d,), head + "attention.in_proj_bias", (3 * d,)),
        **_linear("pool_o", head + "attention.out_proj", d, d),
        **_norm("pool_norm", head + "layernorm", d),
        **_linear("pool_up", head + "mlp.fc1", d, f),
        **_linear("pool_down", head + "mlp.fc2", f, d),
        **_linear("text_project", "text_model.head", config.text.d, config.p),
        "bias": ImageTextParameter((), "logit_bias", ()),
    }


def _layers(side: str, tower: Tower) -> dict[str, ImageTextParameter]:
    prefix, d, f = f"{side}_model.encoder.layers.{{n}}.", tower.d, tower.f
    layer = _norm(f"{side}_norm1", prefix + "layer_norm1", d) | _norm(f"{side}_norm2", prefix + "layer_norm2", d)
    for name, file in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("o", "out_proj")):
        layer |= _linear(f"{side}_{name}", f"{prefix}self_attn.{file}", d, d)
    return layer | _linear(f"{side}_up", prefix + "mlp.fc1", d, f) | _linear(f"{side}_down", prefix + "mlp.fc2", f, d)


def _weight(file: str, inputs: int, outputs: int) -> ImageTextParameter:
    return ImageTextParameter((inputs, outputs), file + ".weight", (outputs, inputs), inputs**-0.5, transposed=True)


def _linear(name: str, file: str, inputs: int, outputs: int) -> dict[str, ImageTextParameter]:
    bias = ImageTextParameter((outputs,), file + ".bias", (outputs,))
    return {name: _weight(file, inputs, outputs), f"{name}_bias": bias}


def _norm(name: str, file: str, d: int) -> dict[str, ImageTextParameter]:
    scale = ImageTextParameter((d,), file + ".weight", (d,), constant=1.0)
    return {name: scale, f"{name}_bias": ImageTextParameter((d,), file + ".bias", (d,))}


def _table(file: str, rows: int, d: int) -> ImageTextParameter:
    return ImageTextParameter((rows, d), file + ".weight", (rows, d), d**-0.5)


def layers_of(parameter: ImageTextParameter, config: ImageTextConfig) -> int | None:
    """Number of layers that are stacked in a parameter; None if it belongs to no layer."""
    if "{n}" not in parameter.file:
        return None
    return config.vision.layers if parameter.file.startswith("vision") else config.text.layers


class ImageText(nnx.Module):
    """The parameters of an image-text model, as a Flax module."""

    def __init__(self, config: ImageTextConfig, *, rngs: nnx.Rngs, dtype=jnp.float32):
        check_image_text_config(config)
        for name, parameter in image_text_parameters(config).items():
            layers = layers_of(parameter, config)
            shape = parameter.shape if layers is None else (layers, *parameter.shape)
            noise = jax.random.normal(rngs.params(), shape, jnp.float32)
            setattr(self, name, nnx.Param((parameter.constant + parameter.deviation * noise).astype(dtype)))


def init_params(config: ImageTextConfig, key: Array, *, dtype=jnp.float32) -> Params:
    """Random parameters as a flat dict."""
    return nnx.to_pure_dict(nnx.split(ImageText(config, rngs=nnx.Rngs(params=key), dtype=dtype))[1])


# Scores -----------------------------------------------------------------------------------------------


def as_scores(params: Params, cosine: Array) -> Array:
    """Scores of cosines: `exp(scale) cosine`, plus the bias if the model has one."""
    scores = cosine * jnp.exp(params["scale"].astype(jnp.float32))
    return scores + params["bias"].astype(jnp.float32) if "bias" in params else scores


def image_embeddings(params: Params, pixels_icyx: Array, *, config: ImageTextConfig) -> Array:
    """One embedding of length 1 for each preprocessed image, in float32 -> [i p]."""
    patches_isq = _patches(jnp.asarray(pixels_icyx), config)
    x_isd = _matmul(patches_isq.astype(params["patch"].dtype), params["patch"])
    return _normalise(POOL_IMAGE[config.kind](params, x_isd, config))


def text_embeddings(params: Params, tokens_js: Array, *, config: ImageTextConfig) -> Array:
    """One embedding of length 1 for each text, in float32 -> [j p]."""
    tokens_js = jnp.asarray(tokens_js)
    x_jsd = params["token"][tokens_js] + params["text_position"][None, : tokens_js.shape[1]]
    return _normalise(POOL_TEXT[config.kind](params, x_jsd, tokens_js, config))


def _patches(pixels_icyx: Array, config: ImageTextConfig) -> Array:
    """Patches of pixels in reading order, channel by channel within each -> [i s q]."""
    expected, n = (CHANNELS, config.side, config.side), config.side // config.patch
    if pixels_icyx.ndim != 4 or pixels_icyx.shape[1:] != expected:
        needed = ", ".join(map(str, expected))
        raise BadInput(f"pixels have the shape {pixels_icyx.shape}, but must have (images, {needed})")
    cropped = pixels_icyx[:, :, : n * config.patch, : n * config.patch]
    grid = cropped.reshape(len(cropped), CHANNELS, n, config.patch, n, config.patch)
    return grid.transpose(0, 2, 4, 1, 3, 5).reshape(len(cropped), n * n, -1)


def _normalise(x: Array) -> Array:
    """`x / |x|` in float32."""
    x32 = x.astype(jnp.float32)
    return x32 / jnp.sqrt((x32**2).sum(axis=-1, keepdims=True))


# Pooling -----------------------------------------------------------------------------------------


def _clip_image(params: Params, x_isd: Array, config: ImageTextConfig) -> Array:
    class_token = jnp.broadcast_to(params["class"][None, None], (len(x_isd), 1, config.vision.d))
    x_isd = jnp.concatenate([class_token, x_isd], axis=1) + params["vision_position"][None]
    x_isd = _layer_norm(x_isd, params, "vision_first_norm", config.vision)
    x_isd = _run_tower(params, x_isd, "vision", config.vision, None)
    return _matmul(_layer_norm(x_isd[:, 0], params, "vision_norm", config.vision), params["vision_project"])


def _clip_text(params: Params, x_jsd: Array, tokens_js: Array, config: ImageTextConfig) -> Array:
    causal = jnp.tri(tokens_js.shape[1], dtype=bool)
    x_jsd = _run_tower(params, x_jsd, "text", config.text, causal)
    end_j = jnp.argmax(tokens_js if config.eos_id == 2 else tokens_js == config.eos_id, axis=1)
    end_jd = jnp.take_along_axis(x_jsd, end_j[:, None, None], axis=1)[:, 0]
    return _matmul(_layer_norm(end_jd, params, "text_norm", config.text), params["text_project"])


def _siglip_image(params: Params, x_isd: Array, config: ImageTextConfig) -> Array:
    tower = config.vision
    x_isd = x_isd + params["patch_bias"][None, None] + params["vision_position"][None]
    x_isd = _layer_norm(_run_tower(params, x_isd, "vision", tower, None), params, "vision_norm", tower)
    weights, biases = (jnp.split(params[name], 3, axis=-1) for name in ("pool_qkv", "pool_qkv_bias"))
    probe = jnp.broadcast_to(params["probe"][None, None], (len(x_isd), 1, tower.d))
    inputs = (probe, x_isd, x_isd)
    q, k, v = (_matmul(x, w) + b[None, None] for x, w, b in zip(inputs, weights, biases, strict=True))
    pooled = _linear_layer(_attention(q, k, v, tower, None), params, "pool_o")
    return (pooled + _feed_forward(_layer_norm(pooled, params, "pool_norm", tower), params, "pool", tower))[:, 0]


def _siglip_text(params: Params, x_jsd: Array, tokens_js: Array, config: ImageTextConfig) -> Array:
    x_jsd = _run_tower(params, x_jsd, "text", config.text, None)
    last_jd = _layer_norm(x_jsd[:, -1], params, "text_norm", config.text)
    return _matmul(last_jd, params["text_project"]) + params["text_project_bias"][None]


# Embedding of an image from its patches, and of a text from its embedded tokens.
POOL_IMAGE = {"clip": _clip_image, "siglip": _siglip_image}  # (params, x_isd, config) -> [i p]
POOL_TEXT = {"clip": _clip_text, "siglip": _siglip_text}  # (params, x_jsd, tokens_js, config) -> [j p]


# The tower --------------------------------------------------------------------------------------------


def _run_tower(params: Params, x: Array, side: str, tower: Tower, mask: Array | None) -> Array:
    """All layers of a tower; `mask` [s s] is the attention mask, None: full attention."""
    names = ("norm1", "norm2", "q", "k", "v", "o", "up", "down")
    stacked = {name + end: params[f"{side}_{name}{end}"] for name in names for end in ("", "_bias")}
    return jax.lax.scan(partial(_layer, tower=tower, mask=mask), x, stacked)[0]


def _layer(x: Array, layer: Params, *, tower: Tower, mask: Array | None) -> tuple[Array, None]:
    normed = _layer_norm(x, layer, "norm1", tower)
    q, k, v = (_linear_layer(normed, layer, name) for name in ("q", "k", "v"))
    x = x + _linear_layer(_attention(q, k, v, tower, mask), layer, "o")
    return x + _feed_forward(_layer_norm(x, layer, "norm2", tower), layer, "", tower), None


def _feed_forward(x: Array, params: Params, part: str, tower: Tower) -> Array:
    up, down = (f"{part}_{name}" if part else name for name in ("up", "down"))
    return _linear_layer(ACTIVATIONS[tower.activation](_linear_layer(x, params, up)), params, down)


def _attention(q: Array, k: Array, v: Array, tower: Tower, mask: Array | None) -> Array:
    """Attention in float32 over heads: [r s d], [r c d], [r c d] -> [r s d]."""
    e = tower.d // tower.h
    q, k, v = (x.reshape(*x.shape[:2], tower.h, e) for x in (q, k, v))
    logits = jnp.einsum("rshe,rche->rhsc", q, k, precision=PRECISE, preferred_element_type=jnp.float32) * e**-0.5
    if mask is not None:
        logits = jnp.where(mask[None, None], logits, -jnp.inf)
    probs = jax.nn.softmax(logits, axis=-1).astype(v.dtype)
    return jnp.einsum("rhsc,rche->rshe", probs, v, precision=PRECISE).reshape(*q.shape[:2], tower.d)


def _linear_layer(x: Array, params: Params, name: str) -> Array:
    return _matmul(x, params[name]) + params[f"{name}_bias"][None, None]


def _layer_norm(x: Array, params: Params, name: str, tower: Tower) -> Array:
    """`(x - mean) / deviation * scale + bias`, computed in float32."""
    x32 = x.astype(jnp.float32)
    centred = x32 - x32.mean(axis=-1, keepdims=True)
    normed = centred * jax.lax.rsqrt((centred**2).mean(axis=-1, keepdims=True) + tower.norm_eps)
    before = tuple(range(x.ndim - 1))
    scale, bias = (jnp.expand_dims(params[name + end].astype(jnp.float32), before) for end in ("", "_bias"))
    return (normed * scale + bias).astype(x.dtype)
