"""The files of a model folder as they lie there: JSON, and memory-mapped tensors by name; and tensors written.

folder -> open_tensors -> {name: Stored};   a name is the same whether the folder held more than a text model
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flowgrpo.types import BadInput

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Of text-only folders, of old and of new multimodal ones; what other parts of those are called; old buffers.
PREFIXES = ("model.", "language_model.model.", "model.language_model.")
IGNORED = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.|.*\.rotary_emb\.inv_freq$")


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds."""
    if not path.exists():
        raise BadInput(f"{path} is missing; a model folder holds config.json and safetensors")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadInput(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise BadInput(f"{path} holds a {type(found).__name__}, where one JSON object belongs")
    return found


class Stored(NamedTuple):
    """A tensor in a file."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str  # as the file calls it

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """A copy of the tensor, or of these entries of its first axis."""
        with _opened(self.path) as file:
            return file.get_slice(self.name)[start:stop]


def find_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of the text model in the folder, by the name that it has in a text-only folder."""
    found: dict[str, Stored] = {}
    for path in _weight_files(folder):
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                found[name] = Stored(path, name, tuple(part.get_shape()), part.get_dtype())
    prefix = next((each for each in PREFIXES if f"{each}embed_tokens.weight" in found), "model.")
    return {_plain(name, prefix): stored for name, stored in found.items() if not IGNORED.match(name)}


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write a file of tensors with the permissions of any new file; `OSError` where the system can't."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from None
    path.chmod(mode)  # safetensors lets only the owner read


def _opened(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="np")
    except (SafetensorError, OSError) as error:
        raise BadInput(f"{path} can't be read as safetensors: {error}") from error


def _plain(name: str, prefix: str) -> str:
    if name.startswith(prefix):
        return "model." + name.removeprefix(prefix)
    return name.removeprefix("language_model.")  # of lm_head, in old multimodal folders


def _weight_files(folder: Path) -> list[Path]:
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    if not (folder / INDEX).exists():
        others = sorted(path.name for path in folder.glob("*.bin"))
        mend = f"{others[0]} is there: save it again in the safetensors format" if others else "copy them into it"
        raise BadInput(f"{folder} has no weights ({SINGLE}, or {INDEX} with its shards); {mend}")
    shards = read_json(folder / INDEX).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise BadInput(f"{folder / INDEX} has no weight_map")
    paths = [folder / str(name) for name in sorted(set(shards.values()))]
    absent = [path.name for path in paths if not path.exists()]
    if absent:
        raise BadInput(f"{folder / INDEX} names {absent[0]} ({len(absent)} such), which is absent; copy it too")
    return paths
