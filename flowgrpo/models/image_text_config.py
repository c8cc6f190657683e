"""The shape of an image-text model, CLIP or SigLIP, and every parameter of it, declared once with its place in files.

Letters: d width of a tower, h heads, f ffn, v vocabulary, p embedding. A tensor of a file with outputs before inputs is
transposed here; those of layers are stacked in front.
"""

from dataclasses import dataclass
from typing import NamedTuple

from flowgrpo.types import BadInput

CHANNELS = 3
KINDS = ("clip", "siglip")


@dataclass(frozen=True)
class Tower:
    """The shape of one transformer."""

    d: int
    h: int
    f: int
    layers: int
    activation: str
    norm_eps: float


@dataclass(frozen=True)
class ImageTextConfig:
    """Everything that the arithmetic depends on."""

    kind: str  # clip or siglip
    vision: Tower
    text: Tower
    side: int  # pixels of an image's side
    patch: int  # pixels of a patch's side
    v: int  # vocabulary
    positions: int  # tokens of a text, padding included
    p: int  # length of an embedding
    eos_id: int = 2  # CLIP's end token; 2, as old configs have it, stands for the largest id of a text

    @property
    def patches(self) -> int:
        """How many patches an image has."""
        return (self.side // self.patch) ** 2


ACTIVATIONS = ("quick_gelu", "gelu", "gelu_pytorch_tanh")


def check_config(config: ImageTextConfig) -> None:
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
            known = ", ".join(ACTIVATIONS)
            raise BadInput(f"hidden_act of the {side} tower is {tower.activation!r}; supported are {known}")
    if config.patch < 1 or config.side < config.patch:
        raise BadInput(f"image_size {config.side} must hold a patch of {config.patch} pixels")
    if min(config.v, config.positions, config.p) < 1:
        raise BadInput("vocabulary, positions and length of an embedding must be at least 1")
    if config.kind == "siglip" and config.p != config.vision.d:
        raise BadInput(f"the text is projected to {config.p} numbers, but SigLIP's images have {config.vision.d}")


# Parameters -------------------------------------------------------------------------------------------


class Parameter(NamedTuple):
    """Shape, tensor in published files ({n} is the layer, stacked in front), and how it starts."""

    shape: tuple[int, ...]  # without the layer
    file: str
    file_shape: tuple[int, ...]
    deviation: float = 0.0
    constant: float = 0.0
    transposed: bool = False  # the file has outputs before inputs


def parameters(config: ImageTextConfig) -> dict[str, Parameter]:
    """Every parameter by name: the one place that declares them."""
    vision, text = config.vision, config.text
    patch_file = "vision_model.embeddings.patch_embedding.weight"
    patch_shape = (vision.d, CHANNELS, config.patch, config.patch)
    inputs = CHANNELS * config.patch**2
    found = {
        "patch": Parameter((inputs, vision.d), patch_file, patch_shape, inputs**-0.5, transposed=True),
        "vision_position": _table(
            "vision_model.embeddings.position_embedding", config.patches + (config.kind == "clip"), vision.d
        ),
        "text_position": _table("text_model.embeddings.position_embedding", config.positions, text.d),
        "token": _table("text_model.embeddings.token_embedding", config.v, text.d),
        "scale": Parameter((), "logit_scale", (), constant=2.6592),
        **_norm("vision_norm", "vision_model.post_layernorm", vision.d),
        **_norm("text_norm", "text_model.final_layer_norm", text.d),
        **_layers("vision", vision),
        **_layers("text", text),
    }
    return found | (_clip_only(config) if config.kind == "clip" else _siglip_only(config))


def _clip_only(config: ImageTextConfig) -> dict[str, Parameter]:
    d = config.vision.d
    return {
        "class": Parameter((d,), "vision_model.embeddings.class_embedding", (d,), d**-0.5),
        **_norm("vision_first_norm", "vision_model.pre_layrnorm", d),
        "vision_project": _weight("visual_projection", d, config.p),
        "text_project": _weight("text_projection", config.text.d, config.p),
    }


def _siglip_only(config: ImageTextConfig) -> dict[str, Parameter]:
    d, f, head = config.vision.d, config.vision.f, "vision_model.head."
    return {
        "patch_bias": Parameter((d,), "vision_model.embeddings.patch_embedding.bias", (d,)),
        "probe": Parameter((d,), head + "probe", (1, 1, d), d**-0.5),
        "pool_qkv": Parameter((d, 3 * d), head + "attention.in_proj_weight", (3 * d, d), d**-0.5, transposed=True),
        "pool_qkv_bias": Parameter((3 * d,), head + "attention.in_proj_bias", (3 * d,)),
        **_linear("pool_o", head + "attention.out_proj", d, d),
        **_norm("pool_norm", head + "layernorm", d),
        **_linear("pool_up", head + "mlp.fc1", d, f),
        **_linear("pool_down", head + "mlp.fc2", f, d),
        **_linear("text_project", "text_model.head", config.text.d, config.p),
        "bias": Parameter((), "logit_bias", ()),
    }


def _layers(side: str, tower: Tower) -> dict[str, Parameter]:
    prefix, d, f = f"{side}_model.encoder.layers.{{n}}.", tower.d, tower.f
    found = _norm(f"{side}_norm1", prefix + "layer_norm1", d) | _norm(f"{side}_norm2", prefix + "layer_norm2", d)
    for name, file in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("o", "out_proj")):
        found |= _linear(f"{side}_{name}", f"{prefix}self_attn.{file}", d, d)
    return found | _linear(f"{side}_up", prefix + "mlp.fc1", d, f) | _linear(f"{side}_down", prefix + "mlp.fc2", f, d)


def _weight(file: str, inputs: int, outputs: int) -> Parameter:
    return Parameter((inputs, outputs), file + ".weight", (outputs, inputs), inputs**-0.5, transposed=True)


def _linear(name: str, file: str, inputs: int, outputs: int) -> dict[str, Parameter]:
    bias = Parameter((outputs,), file + ".bias", (outputs,))
    return {name: _weight(file, inputs, outputs), f"{name}_bias": bias}


def _norm(name: str, file: str, d: int) -> dict[str, Parameter]:
    scale = Parameter((d,), file + ".weight", (d,), constant=1.0)
    return {name: scale, f"{name}_bias": Parameter((d,), file + ".bias", (d,))}


def _table(file: str, rows: int, d: int) -> Parameter:
    return Parameter((rows, d), file + ".weight", (rows, d), d**-0.5)


def layers_of(parameter: Parameter, config: ImageTextConfig) -> int | None:
    """How many layers are stacked in a parameter; None where there is one of it."""
    if "{n}" not in parameter.file:
        return None
    return config.vision.layers if parameter.file.startswith("vision") else config.text.layers
