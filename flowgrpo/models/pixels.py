"""Images as image-text models want them: RGB bytes flow in, normalised pixels flow out, as transformers' own do.

    resize (Pillow) -> centre crop -> x factor -> (x - mean) / deviation         [y x 3] bytes -> [3 y x] float32

Each step is done where the folder's preprocessor_config.json says so. Without PyTorch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

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

    resizes, crops = source.get("do_resize", True), source.get("do_center_crop", kind == "clip")
    rescales, normalises = source.get("do_rescale", True), source.get("do_normalize", True)
    found = Preparation(
        size=_edges(given("size"), f"{where}, size") if resizes else None,
        resample=int(given("resample")) if resizes else 0,
        crop=_both(_edges(given("crop_size"), f"{where}, crop_size")) if crops else None,
        factor=float(source.get("rescale_factor", 1 / 255)) if rescales else None,
        mean=_three(given("image_mean"), f"{where}, image_mean") if normalises else None,
        deviation=_three(given("image_std"), f"{where}, image_std") if normalises else None,
    )
    last = found.crop or found.size
    if last != (side, side):
        raise BadInput(f"{where} makes images of {last}, but the model reads {side} x {side}: mend size or crop_size")
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
        raise BadInput("images need Pillow: pip install 'flowgrpo[vision]'") from error
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


def _both(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def _three(value: Any, where: str) -> tuple[float, ...]:
    values = value if isinstance(value, list) else [value] * 3
    if len(values) != 3 or not all(isinstance(each, int | float) for each in values):
        raise BadInput(f"{where} is {value!r}: write one number for each of three channels")
    return tuple(float(each) for each in values)
