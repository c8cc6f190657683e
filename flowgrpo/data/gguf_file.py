"""The header of a GGUF file, llama.cpp's format: metadata by name, and the place of each tensor.

    read_header(path) -> GGUFFile;   GGUFFile.tensors[name].read(start, stop) -> float32 [stop - start, ...]

    magic  version  tensor count  metadata count  (name type value)*  (name axes sizes type offset)*  padding  data

The package `gguf` dequantises. Its reader is not used: it takes 8 s for a vocabulary of 262,144 tokens (0.2 s here) and
checks no bounds. For a file that is cut it reports that an array can't be reshaped, and it tries to read an array that
claims 2^60 entries.
"""

import os
import re
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flowgrpo.data.foreign_files import check_file
from flowgrpo.files import pip_install
from flowgrpo.types import BadInput

SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32  # of the data, unless general.alignment is set
MAX_ENTRIES = 1 << 20  # entries of the metadata, and tensors
MAX_AXES = 4
FLOAT32, STRING, ARRAY = 6, 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # by type
PART_NAME = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
FIX = "copy the file again"


class GGUFTensor(NamedTuple):
    """A tensor in a file; its axes are in the order of a Hugging Face file, rows first."""

    path: Path
    name: str
    shape: tuple[int, ...]
    kind: Any  # a GGMLQuantizationType
    offset: int  # of its first byte in the file
    row_bytes: int

    dtype = "F32"  # of `read`, in the notation of safetensors

    @property
    def nbytes(self) -> int:
        """Its size in the file, in bytes."""
        return self.row_bytes * (int(np.prod(self.shape)) // max(self.shape[-1], 1)) if self.shape else self.row_bytes

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """The tensor dequantised to float32, or the entries [start, stop) of its first axis."""
        import gguf

        first, last, _ = slice(start, stop).indices(self.shape[0])
        if len(self.shape) == 1:  # blocks of a vector can't be split: it is read whole, and is small
            first_row, rows, selected = 0, 1, slice(first, last)
        else:
            per_entry = int(np.prod(self.shape[1:-1], dtype=np.int64))
            first_row, rows, selected = first * per_entry, (last - first) * per_entry, slice(None)
        offset = self.offset + first_row * self.row_bytes
        data = np.fromfile(self.path, np.uint8, rows * self.row_bytes, offset=offset)
        if data.size < rows * self.row_bytes:
            raise BadInput(f"{self.path} ends within {self.name}: {FIX}")
        with np.errstate(all="ignore"):
            values = gguf.dequantize(data.reshape(rows, self.row_bytes), self.kind)
        if not np.isfinite(values).all():
            origin = "" if self.kind.name in ("F32", "F16", "BF16") else ", from the scale of a block"
            raise BadInput(
                f"{self.path}: {self.name} ({self.kind.name}) holds NaN or infinity{origin}: {FIX}, or take another"
            )
        return values.reshape(-1, *self.shape[1:])[selected]


class GGUFFile(NamedTuple):
    """The header of a file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Whether a path is that of a GGUF file, by its suffix."""
    return str(path).lower().endswith(SUFFIX)


def import_gguf() -> Any:
    """The package `gguf`; `BadInput` with the command that installs it."""
    try:
        import gguf
    except ImportError:
        raise BadInput(f"GGUF is read by the package gguf, which is not installed: {pip_install('gguf')}") from None
    return gguf


def read_header(path: str | os.PathLike[str]) -> GGUFFile:
    """The header of a GGUF file: all but the tensors' values. `BadInput` names the file and what is wrong in it."""
    gguf = import_gguf()
    file = Path(path).expanduser()
    if not file.exists():
        raise BadInput(f"{file} does not exist: give a GGUF file, a model folder, or a hub id owner/name")
    check_file(file, Path(os.path.realpath(file)).parent)
    if (part := PART_NAME.search(file.name)) and int(part[2]) > 1:
        first = PART_NAME.sub(f"-00001-of-{part[2]}.gguf", file.name)
        joined = PART_NAME.sub(".gguf", file.name)
        raise BadInput(
            f"{file} is part {int(part[1])} of {int(part[2])}: join them by `llama-gguf-split --merge {first} "
            f"{joined}`, and give {joined}"
        )
    reader = _Reader(file)
    metadata, count = reader.metadata()
    infos = [reader.tensor_info() for _ in range(count)]
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise BadInput(f"{file}: general.alignment is {alignment!r:.40}, but must be a power of two: {FIX}")
    data_start = -(-reader.at // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, kind, offset in infos:
        tensor = _tensor(gguf, file, name, shape, kind, data_start + offset)
        if tensor.offset + tensor.nbytes > len(reader.data):
            missing = tensor.offset + tensor.nbytes - len(reader.data)
            raise BadInput(f"{file} is cut: {name} ends {missing} bytes after the file does: {FIX}")
        if name in tensors:
            raise BadInput(f"{file} names {name} twice: convert the model again")
        tensors[name] = tensor
    return GGUFFile(file, metadata, tensors)


def _tensor(gguf: Any, file: Path, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GGUFTensor:
    try:
        quantisation = gguf.GGMLQuantizationType(kind)
        block, size = gguf.GGML_QUANT_SIZES[quantisation]
        gguf.dequantize(np.zeros((1, size), np.uint8), quantisation)
    except (ValueError, KeyError, NotImplementedError):  # an unknown type, no block sizes, no decoder in gguf
        names = {number.value: number.name for number in gguf.GGMLQuantizationType}
        raise BadInput(
            f"{file}: {name} is of the type {names.get(kind, kind)}, which the package gguf {gguf_version()} does not "
            "dequantise: quantise the model again, for example as Q8_0, or install a newer package"
        ) from None
    if shape[-1] % block:
        raise BadInput(
            f"{file}: {name} has rows of {shape[-1]} numbers, where {quantisation.name} has blocks of {block}: {FIX}"
        )
    return GGUFTensor(file, name, shape, quantisation, offset, shape[-1] // block * size)


def gguf_version() -> str:
    """Version of the installed package `gguf`."""
    from importlib.metadata import version

    return version("gguf")


class _Reader:
    """A cursor over the bytes of the file; each method reads what is at it, and moves it on."""

    def __init__(self, file: Path) -> None:
        self.file, self.at = file, 0
        if file.stat().st_size < 24:
            self.refuse_magic(file.read_bytes()[:4])
        self.data = np.memmap(file, np.uint8, "r")
        self.bytes = memoryview(self.data)  # pyright: ignore[reportArgumentType]
        self.refuse_magic(bytes(self.bytes[:4]))
        version, self.tensors, self.entries = struct.unpack_from("<IQQ", self.bytes, 4)
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            why = "has its bytes in the order of big-endian machines" if swapped else f"is of version {version}"
            raise BadInput(f"{file} {why}, and only versions 2 and 3 can be read: convert the model again")
        for name, count in (("tensors", self.tensors), ("entries of metadata", self.entries)):
            if count > MAX_ENTRIES:
                raise BadInput(f"{file} claims {count} {name}, more than {MAX_ENTRIES}: {FIX}")
        self.at = 24

    def refuse_magic(self, magic: bytes) -> None:
        """Raise `BadInput` unless the file starts like a GGUF file."""
        if magic != MAGIC:
            raise BadInput(f"{self.file} is no GGUF file: it begins with {magic!r} and not {MAGIC!r}; {FIX}")
        if self.file.stat().st_size < 24:
            raise BadInput(f"{self.file} is cut within its header: {FIX}")

    def unpack(self, form: str) -> Any:
        """A number in the notation of `struct`."""
        form = "<" + form
        self.need(struct.calcsize(form))
        (value,) = struct.unpack_from(form, self.bytes, self.at)
        self.at += struct.calcsize(form)
        return value

    def need(self, size: int) -> None:
        """Raise `BadInput` unless `size` more bytes are there."""
        if size > len(self.bytes) - self.at:
            raise BadInput(f"{self.file} is cut within its header, which continues after byte {self.at}: {FIX}")

    def string(self) -> str:
        """A length and as many bytes of UTF-8."""
        size = self.unpack("Q")
        self.need(size)
        start, self.at = self.at, self.at + size
        return str(self.bytes[start : self.at], "utf-8", "replace")

    def metadata(self) -> tuple[dict[str, Any], int]:
        """(values by name, number of tensors that follow)."""
        values: dict[str, Any] = {}
        for _ in range(self.entries):
            name = self.string()
            if name in values:
                raise BadInput(f"{self.file} has {name!r:.80} twice in its metadata: convert the model again")
            values[name] = self.value(name, self.unpack("I"))
        return values, self.tensors

    def value(self, name: str, kind: int) -> Any:
        """A value of the metadata; arrays of numbers are NumPy's, of strings lists."""
        if kind == STRING:
            return self.string()
        if kind in SCALARS:
            number = self.unpack(SCALARS[kind])
            # The shortest decimal of a float32: the 1e-05 that was written, and not 9.999999747378752e-06.
            return float(str(np.float32(number))) if kind == FLOAT32 else number
        if kind != ARRAY:
            raise BadInput(f"{self.file}: {name!r:.80} in its metadata is of the unknown type {kind}: {FIX}")
        item, count = self.unpack("I"), self.unpack("Q")
        if item == STRING:
            self.need(8 * count)
            return [self.string() for _ in range(count)]
        if item not in SCALARS:
            raise BadInput(f"{self.file}: {name!r:.80} in its metadata is an array of the type {item}: {FIX}")
        dtype = np.dtype("<" + SCALARS[item])
        self.need(dtype.itemsize * count)
        start, self.at = self.at, self.at + dtype.itemsize * count
        return np.frombuffer(self.bytes[start : self.at], dtype).copy()

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape with rows first, type and offset of a tensor."""
        name, axes = self.string(), self.unpack("I")
        if not 1 <= axes <= MAX_AXES:
            raise BadInput(f"{self.file}: {name!r:.80} has {axes} axes instead of 1 to {MAX_AXES}: {FIX}")
        shape = tuple(self.unpack("Q") for _ in range(axes))[::-1]
        if min(shape) < 1 or np.prod([float(size) for size in shape]) > 2.0**48:
            raise BadInput(f"{self.file}: {name!r:.80} has the shape {list(shape)}: {FIX}")
        return name, shape, self.unpack("I"), self.unpack("Q")
