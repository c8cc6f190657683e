"""The header of a GGUF file, llama.cpp's format: metadata by name, and where each tensor lies.

    read_header(path) -> GGUFFile;   GGUFFile.tensors[name].read(start, stop) -> float32 [stop - start, ...]

    magic  version  tensor count  metadata count  (name type value)*  (name axes sizes type offset)*  padding  data

The package `gguf` dequantises. Its reader is not used: it takes 8 s for a vocabulary of 262,144 tokens (0.2 s here) and
looks at no bound. Of a file that is cut it says that an array can't be reshaped, and an array that claims 2^60 entries
is waited for.
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
ALIGNMENT = 32  # of the data, where general.alignment says nothing
MOST = 1 << 20  # entries of the metadata, and tensors
MOST_AXES = 4
FLOAT32, STRING, ARRAY = 6, 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # by type
PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
AGAIN = "copy the file again"


class GGUFTensor(NamedTuple):
    """A tensor in a file; its axes stand as in a Hugging Face file, rows first."""

    path: Path
    name: str
    shape: tuple[int, ...]
    kind: Any  # a GGMLQuantizationType
    offset: int  # of its first byte in the file
    row_bytes: int

    dtype = "F32"  # what `read` gives, as safetensors calls it

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in the file."""
        return self.row_bytes * (int(np.prod(self.shape)) // max(self.shape[-1], 1)) if self.shape else self.row_bytes

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """The tensor dequantised to float32, or these entries of its first axis."""
        import gguf

        first, last, _ = slice(start, stop).indices(self.shape[0])
        if len(self.shape) == 1:  # blocks of a vector can't be cut: it is read whole, and is small
            begin, rows, cut = 0, 1, slice(first, last)
        else:
            per_entry = int(np.prod(self.shape[1:-1], dtype=np.int64))
            begin, rows, cut = first * per_entry, (last - first) * per_entry, slice(None)
        data = np.fromfile(self.path, np.uint8, rows * self.row_bytes, offset=self.offset + begin * self.row_bytes)
        if data.size < rows * self.row_bytes:
            raise BadInput(f"{self.path} ends within {self.name}: {AGAIN}")
        with np.errstate(all="ignore"):
            values = gguf.dequantize(data.reshape(rows, self.row_bytes), self.kind)
        if not np.isfinite(values).all():
            what = "" if self.kind.name in ("F32", "F16", "BF16") else ", from the scale of a block"
            raise BadInput(
                f"{self.path}: {self.name} ({self.kind.name}) holds NaN or infinity{what}: {AGAIN}, or take another"
            )
        return values.reshape(-1, *self.shape[1:])[cut]


class GGUFFile(NamedTuple):
    """What the header of a file says."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Whether a path names a GGUF file, by its suffix."""
    return str(path).lower().endswith(SUFFIX)


def import_gguf() -> Any:
    """The package `gguf`, or the command that installs it."""
    try:
        import gguf
    except ImportError:
        raise BadInput(f"GGUF is read by the package gguf, which is not installed: {pip_install('gguf')}") from None
    return gguf


def read_header(path: str | os.PathLike[str]) -> GGUFFile:
    """Read all but the tensors' values; `BadInput` names the file and what is wrong in it."""
    gguf = import_gguf()
    file = Path(path).expanduser()
    if not file.exists():
        raise BadInput(f"{file} does not exist: give a GGUF file, a model folder, or a hub id owner/name")
    check_file(file, Path(os.path.realpath(file)).parent)
    if (part := PART.search(file.name)) and int(part[2]) > 1:
        first = PART.sub(f"-00001-of-{part[2]}.gguf", file.name)
        whole = PART.sub(".gguf", file.name)
        raise BadInput(
            f"{file} is part {int(part[1])} of {int(part[2])}: join them by `llama-gguf-split --merge {first} "
            f"{whole}`, and give {whole}"
        )
    reader = _Reader(file)
    metadata, count = reader.metadata()
    infos = [reader.tensor_info() for _ in range(count)]
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise BadInput(f"{file}: general.alignment is {alignment!r:.40}, but must be a power of two: {AGAIN}")
    begin = -(-reader.at // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, kind, offset in infos:
        tensor = _tensor(gguf, file, name, shape, kind, begin + offset)
        if tensor.offset + tensor.nbytes > len(reader.data):
            missing = tensor.offset + tensor.nbytes - len(reader.data)
            raise BadInput(f"{file} is cut: {name} ends {missing} bytes after the file does: {AGAIN}")
        if name in tensors:
            raise BadInput(f"{file} names {name} twice: convert the model again")
        tensors[name] = tensor
    return GGUFFile(file, metadata, tensors)


def _tensor(gguf: Any, file: Path, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GGUFTensor:
    try:
        known = gguf.GGMLQuantizationType(kind)
        block, size = gguf.GGML_QUANT_SIZES[known]
        gguf.dequantize(np.zeros((1, size), np.uint8), known)
    except (ValueError, KeyError, NotImplementedError):  # by gguf: an unknown type, no block sizes, no way to decode it
        names = {number.value: number.name for number in gguf.GGMLQuantizationType}
        raise BadInput(
            f"{file}: {name} is of the type {names.get(kind, kind)}, which the package gguf {gguf_version()} does not "
            "dequantise: quantise the model anew, as Q8_0 say, or take a newer package"
        ) from None
    if shape[-1] % block:
        raise BadInput(
            f"{file}: {name} has rows of {shape[-1]} numbers, where {known.name} has blocks of {block}: {AGAIN}"
        )
    return GGUFTensor(file, name, shape, known, offset, shape[-1] // block * size)


def gguf_version() -> str:
    """The version of the package that is installed."""
    from importlib.metadata import version

    return version("gguf")


class _Reader:
    """What lies at a place of the file, and the place after it."""

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
            raise BadInput(f"{file} {why}, where versions 2 and 3 are read: convert the model again")
        for what, count in (("tensors", self.tensors), ("entries of metadata", self.entries)):
            if count > MOST:
                raise BadInput(f"{file} says that it has {count} {what}, where {MOST} are the most: {AGAIN}")
        self.at = 24

    def refuse_magic(self, magic: bytes) -> None:
        """Raise `BadInput` unless the file begins as a GGUF file does."""
        if magic != MAGIC:
            raise BadInput(f"{self.file} is no GGUF file: it begins with {magic!r} and not {MAGIC!r}; {AGAIN}")
        if self.file.stat().st_size < 24:
            raise BadInput(f"{self.file} is cut within its header: {AGAIN}")

    def unpack(self, form: str) -> Any:
        """One number."""
        form = "<" + form
        self.need(struct.calcsize(form))
        (value,) = struct.unpack_from(form, self.bytes, self.at)
        self.at += struct.calcsize(form)
        return value

    def need(self, size: int) -> None:
        """Raise `BadInput` where so many bytes are not there."""
        if size > len(self.bytes) - self.at:
            raise BadInput(f"{self.file} is cut within its header, which goes on after byte {self.at}: {AGAIN}")

    def string(self) -> str:
        """A length and so many bytes of UTF-8."""
        size = self.unpack("Q")
        self.need(size)
        begin, self.at = self.at, self.at + size
        return str(self.bytes[begin : self.at], "utf-8", "replace")

    def metadata(self) -> tuple[dict[str, Any], int]:
        """All values by name, and how many tensors follow."""
        found: dict[str, Any] = {}
        for _ in range(self.entries):
            name = self.string()
            if name in found:
                raise BadInput(f"{self.file} has {name!r:.80} twice in its metadata: convert the model again")
            found[name] = self.value(name, self.unpack("I"))
        return found, self.tensors

    def value(self, name: str, kind: int) -> Any:
        """A value of the metadata; arrays of numbers are NumPy's, of strings lists."""
        if kind == STRING:
            return self.string()
        if kind in SCALARS:
            number = self.unpack(SCALARS[kind])
            # Of float32 the shortest decimal: the 1e-05 that was written, and not 9.999999747378752e-06.
            return float(str(np.float32(number))) if kind == FLOAT32 else number
        if kind != ARRAY:
            raise BadInput(f"{self.file}: {name!r:.80} in its metadata is of the unknown type {kind}: {AGAIN}")
        item, count = self.unpack("I"), self.unpack("Q")
        if item == STRING:
            self.need(8 * count)
            return [self.string() for _ in range(count)]
        if item not in SCALARS:
            raise BadInput(f"{self.file}: {name!r:.80} in its metadata is an array of the type {item}: {AGAIN}")
        dtype = np.dtype("<" + SCALARS[item])
        self.need(dtype.itemsize * count)
        begin, self.at = self.at, self.at + dtype.itemsize * count
        return np.frombuffer(self.bytes[begin : self.at], dtype).copy()

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape with rows first, type and offset of a tensor."""
        name, axes = self.string(), self.unpack("I")
        if not 1 <= axes <= MOST_AXES:
            raise BadInput(f"{self.file}: {name!r:.80} has {axes} axes, where 1 to {MOST_AXES} are read: {AGAIN}")
        shape = tuple(self.unpack("Q") for _ in range(axes))[::-1]
        if min(shape) < 1 or np.prod([float(size) for size in shape]) > 2.0**48:
            raise BadInput(f"{self.file}: {name!r:.80} has the shape {list(shape)}: {AGAIN}")
        return name, shape, self.unpack("I"), self.unpack("Q")
