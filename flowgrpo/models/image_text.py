"""Image-text models, CLIP and SigLIP: pixels and tokens flow in, embeddings and scores flow out.

    score = exp(scale) <image, text> (+ bias)       image, text: embeddings of length 1

    per layer of a tower:  x += o(attention(norm1(x)));   x += down(act(up(norm2(x))))

CLIP (Radford et al., 2021, arXiv:2103.00020) reads an image off a class token, and a text, seen causally, off its end
token; SigLIP (Zhai et al., 2023, arXiv:2303.15343) off the patches by a probe that attends to them, and off the last
position, padding included. That is all in which they differ, and `READ` holds it.

The Flax module holds the parameters, as `image_text_config` declares them; from there on everything is a pure function
of a flat dict. Letters beside those of `types`: i image, j text, c channel, y and x pixels, q numbers of a patch, p
embedding.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from flowgrpo.contracts import Params
from flowgrpo.models.image_text_config import CHANNELS, ImageTextConfig, Tower, check_config, layers_of, parameters
from flowgrpo.types import BadInput

ACTIVATE: dict[str, Callable[[Array], Array]] = {
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
}


class ImageText(nnx.Module):
    """The parameters of an image-text model, as a Flax module."""

    def __init__(self, config: ImageTextConfig, *, rngs: nnx.Rngs, dtype=jnp.float32):
        check_config(config)
        for name, parameter in parameters(config).items():
            layers = layers_of(parameter, config)
            shape = parameter.shape if layers is None else (layers, *parameter.shape)
            noise = jax.random.normal(rngs.params(), shape, jnp.float32)
            setattr(self, name, nnx.Param((parameter.constant + parameter.deviation * noise).astype(dtype)))


def init_params(config: ImageTextConfig, key: Array, *, dtype=jnp.float32) -> Params:
    """Random parameters, a flat dict."""
    return nnx.to_pure_dict(nnx.split(ImageText(config, rngs=nnx.Rngs(params=key), dtype=dtype))[1])


# Scores -----------------------------------------------------------------------------------------------


def image_text_scores(params: Params, pixels_icyx: Array, tokens_js: Array, *, config: ImageTextConfig) -> Array:
    """The score of every image with every text -> [i j]; transformers' `logits_per_image`."""
    image_ip = image_embeddings(params, pixels_icyx, config=config)
    text_jp = text_embeddings(params, tokens_js, config=config)
    return as_scores(params, image_ip @ text_jp.T)


def as_scores(params: Params, cosine: Array) -> Array:
    """Scores from cosines: scaled, and shifted where the model has a bias."""
    scores = cosine * jnp.exp(params["scale"].astype(jnp.float32))
    return scores + params["bias"].astype(jnp.float32) if "bias" in params else scores


def image_embeddings(params: Params, pixels_icyx: Array, *, config: ImageTextConfig) -> Array:
    """One embedding of length 1 for each preprocessed image, in float32 -> [i p]."""
    patches_isq = _patches(jnp.asarray(pixels_icyx), config)
    x_isd = patches_isq.astype(params["patch"].dtype) @ params["patch"]
    return _to_length_1(READ[config.kind].image(params, x_isd, config))


def text_embeddings(params: Params, tokens_js: Array, *, config: ImageTextConfig) -> Array:
    """One embedding of length 1 for each text, in float32 -> [j p]."""
    tokens_js = jnp.asarray(tokens_js)
    x_jsd = params["token"][tokens_js] + params["text_position"][None, : tokens_js.shape[1]]
    return _to_length_1(READ[config.kind].text(params, x_jsd, tokens_js, config))


def _patches(pixels_icyx: Array, config: ImageTextConfig) -> Array:
    """Squares of pixels in reading order, channel by channel within each -> [i s q]."""
    expected, n = (CHANNELS, config.side, config.side), config.side // config.patch
    if pixels_icyx.ndim != 4 or pixels_icyx.shape[1:] != expected:
        needed = ", ".join(map(str, expected))
        raise BadInput(f"pixels have the shape {pixels_icyx.shape}, but must have (images, {needed})")
    whole = pixels_icyx[:, :, : n * config.patch, : n * config.patch]
    cut = whole.reshape(len(whole), CHANNELS, n, config.patch, n, config.patch)
    return cut.transpose(0, 2, 4, 1, 3, 5).reshape(len(whole), n * n, -1)


def _to_length_1(x: Array) -> Array:
    wide = x.astype(jnp.float32)
    return wide / jnp.sqrt((wide**2).sum(axis=-1, keepdims=True))


# What differs -----------------------------------------------------------------------------------------


def _clip_image(params: Params, x_isd: Array, config: ImageTextConfig) -> Array:
    first = jnp.broadcast_to(params["class"][None, None], (len(x_isd), 1, config.vision.d))
    x_isd = jnp.concatenate([first, x_isd], axis=1) + params["vision_position"][None]
    x_isd = _layer_norm(x_isd, params, "vision_first_norm", config.vision)
    x_isd = _run(params, x_isd, "vision", config.vision, None)
    return _layer_norm(x_isd[:, 0], params, "vision_norm", config.vision) @ params["vision_project"]


def _clip_text(params: Params, x_jsd: Array, tokens_js: Array, config: ImageTextConfig) -> Array:
    causal = jnp.tri(tokens_js.shape[1], dtype=bool)
    x_jsd = _run(params, x_jsd, "text", config.text, causal)
    end_j = jnp.argmax(tokens_js if config.eos_id == 2 else tokens_js == config.eos_id, axis=1)
    end_jd = jnp.take_along_axis(x_jsd, end_j[:, None, None], axis=1)[:, 0]
    return _layer_norm(end_jd, params, "text_norm", config.text) @ params["text_project"]


def _siglip_image(params: Params, x_isd: Array, config: ImageTextConfig) -> Array:
    tower = config.vision
    x_isd = x_isd + params["patch_bias"][None, None] + params["vision_position"][None]
    x_isd = _layer_norm(_run(params, x_isd, "vision", tower, None), params, "vision_norm", tower)
    weights, biases = (jnp.split(params[name], 3, axis=-1) for name in ("pool_qkv", "pool_qkv_bias"))
    probe = jnp.broadcast_to(params["probe"][None, None], (len(x_isd), 1, tower.d))
    inputs = (probe, x_isd, x_isd)
    q, k, v = (x @ w + b[None, None] for x, w, b in zip(inputs, weights, biases, strict=True))
    pooled = _multiply(_mix(q, k, v, tower, None), params, "pool_o")
    return (pooled + _feed_forward(_layer_norm(pooled, params, "pool_norm", tower), params, "pool", tower))[:, 0]


def _siglip_text(params: Params, x_jsd: Array, tokens_js: Array, config: ImageTextConfig) -> Array:
    x_jsd = _run(params, x_jsd, "text", config.text, None)
    last_jd = _layer_norm(x_jsd[:, -1], params, "text_norm", config.text)
    return last_jd @ params["text_project"] + params["text_project_bias"][None]


class Reading(NamedTuple):
    """How a kind reads an image off its patches, and a text off its embedded tokens."""

    image: Callable[..., Array]  # (params, x_isd, config) -> [i p]
    text: Callable[..., Array]  # (params, x_jsd, tokens_js, config) -> [j p]


READ = {"clip": Reading(_clip_image, _clip_text), "siglip": Reading(_siglip_image, _siglip_text)}


# The tower --------------------------------------------------------------------------------------------


def _run(params: Params, x: Array, side: str, tower: Tower, seen: Array | None) -> Array:
    """All layers of a tower; `seen` [s s] says who sees whom, None: everybody."""
    names = ("norm1", "norm2", "q", "k", "v", "o", "up", "down")
    stacked = {name + end: params[f"{side}_{name}{end}"] for name in names for end in ("", "_bias")}
    return jax.lax.scan(partial(_layer, tower=tower, seen=seen), x, stacked)[0]


def _layer(x: Array, layer: Params, *, tower: Tower, seen: Array | None) -> tuple[Array, None]:
    normed = _layer_norm(x, layer, "norm1", tower)
    q, k, v = (_multiply(normed, layer, name) for name in ("q", "k", "v"))
    x = x + _multiply(_mix(q, k, v, tower, seen), layer, "o")
    return x + _feed_forward(_layer_norm(x, layer, "norm2", tower), layer, "", tower), None


def _feed_forward(x: Array, params: Params, part: str, tower: Tower) -> Array:
    up, down = (f"{part}_{name}" if part else name for name in ("up", "down"))
    return _multiply(ACTIVATE[tower.activation](_multiply(x, params, up)), params, down)


def _mix(q: Array, k: Array, v: Array, tower: Tower, seen: Array | None) -> Array:
    """Attention in float32 over heads: [r s d], [r c d], [r c d] -> [r s d]."""
    e = tower.d // tower.h
    q, k, v = (x.reshape(*x.shape[:2], tower.h, e) for x in (q, k, v))
    logits = jnp.einsum("rshe,rche->rhsc", q, k, preferred_element_type=jnp.float32) * e**-0.5
    if seen is not None:
        logits = jnp.where(seen[None, None], logits, -jnp.inf)
    share = jax.nn.softmax(logits, axis=-1).astype(v.dtype)
    return jnp.einsum("rhsc,rche->rshe", share, v).reshape(*q.shape[:2], tower.d)


def _multiply(x: Array, params: Params, name: str) -> Array:
    return x @ params[name] + params[f"{name}_bias"][None, None]


def _layer_norm(x: Array, params: Params, name: str, tower: Tower) -> Array:
    """`x` less its mean over its deviation, in float32, scaled and shifted."""
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(axis=-1, keepdims=True)
    normed = centred * jax.lax.rsqrt((centred**2).mean(axis=-1, keepdims=True) + tower.norm_eps)
    before = tuple(range(x.ndim - 1))
    scale, bias = (jnp.expand_dims(params[name + end].astype(jnp.float32), before) for end in ("", "_bias"))
    return (normed * scale + bias).astype(x.dtype)
