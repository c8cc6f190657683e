"""Files of a model folder that a stranger made: which of them are opened, and how much work they may ask for.

`check_files` looks at what kind of thing each file is before anybody opens it, `check_tokenizer` at a tokenizer.json
before it is loaded: readers of both wait for a pipe for ever, and follow links wherever they lead. What is within
bounds here may still be wrong in other ways, which its reader says.
"""

import base64
import binascii
import os
import stat
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from flowgrpo.files import parse_json
from flowgrpo.types import BadInput, first_line

READ = (  # what we and transformers open in a folder
    *("*config*.json", "model*", "adapter_model*", "tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("vocab*", "merges.txt", "chat_template*", "additional_chat_templates/*", "*.model"),
)
JSON_BYTES = 1 << 26
LONGEST_NAME = 255  # bytes, of any file system
TOKENIZER = "tokenizer.json"
TOKENIZER_BYTES = 1 << 27
ADDED_TOKENS = 1 << 18  # the largest codebooks of speech are a quarter of it
LARGEST_ID = 1 << 24
GROWTH = 1024  # times that the steps of a tokenizer make a text longer, at most; published ones stay below 200
WORD = 10_000  # characters of a word that WordPiece looks through; its time is quadratic


def check_files(folder: Path) -> None:
    """Raise `BadInput` for a file of the folder that is a pipe or a device, leads out of it, or is no size for JSON."""
    root = Path(os.path.realpath(folder))
    for path in sorted({path for pattern in READ for path in root.glob(pattern)}):
        if not path.is_dir():
            check_file(path, root)


def check_file(path: Path, root: Path) -> None:
    """Raise `BadInput` unless this is a file of the folder `root` itself, or one of the hub's cache."""
    real = Path(os.path.realpath(path))
    try:
        about = real.stat()
    except OSError as error:
        raise BadInput(f"{path} can't be read ({error.strerror}): copy the file again") from error
    if not stat.S_ISREG(about.st_mode):
        raise BadInput(f"{path} is no regular file, but a pipe, a device or the like: put the file itself there")
    # A snapshot of the hub's cache is made of links to ../../blobs.
    blobs = root.parents[1] / "blobs" if root.parent.name == "snapshots" else root
    if not (real.is_relative_to(root) or real.is_relative_to(blobs)):
        raise BadInput(f"{path} leads out of its folder, to {real}: copy that file into the folder, if it is meant")
    most = TOKENIZER_BYTES if path.name == TOKENIZER else JSON_BYTES
    if path.suffix == ".json" and about.st_size > most:
        raise BadInput(f"{path} has {about.st_size} bytes, where {most} are the most: it is no file of a model")


def inside(folder: Path, name: Any, where: Path) -> Path:
    """The path of a file that an index names, which must be one below the folder."""
    parts = PurePosixPath(name).parts if isinstance(name, str) and "\0" not in name else ()
    longest = max((len(part.encode("utf-8", "replace")) for part in parts), default=0)
    if not 0 < longest <= LONGEST_NAME or ".." in parts or PurePosixPath(name).is_absolute():
        raise BadInput(f"{where} names the file {name!r:.200}, which is not in its folder: copy it there")
    return folder / name


# The tokenizer ------------------------------------------------------------------------------------------


def check_tokenizer(folder: Path) -> None:
    """Raise `BadInput` where the folder's tokenizer.json asks for more work than any text needs."""
    path = folder / TOKENIZER
    if not path.exists():
        return  # a tokenizer of another format
    try:
        parts = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BadInput(f"no tokenizer can be read from {folder}: {path} is not JSON ({first_line(error)}): put its "
                       "tokenizer.json there again") from error  # fmt: skip
    if not isinstance(parts, dict):
        raise BadInput(
            f"no tokenizer can be read from {folder}: {path} must hold an object; put its tokenizer.json there"
        )
    added, model = parts.get("added_tokens") or [], parts.get("model") or {}
    if len(added) > ADDED_TOKENS:
        raise BadInput(
            f"{path}: added_tokens has {len(added)} entries, where {ADDED_TOKENS} are the most: take some out"
        )
    ids = [token.get("id") for token in added if isinstance(token, dict)]
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids += list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    if largest := next((i for i in ids if type(i) is int and i >= LARGEST_ID), None):
        raise BadInput(
            f"{path}: a token has the id {largest}, where ids are below {LARGEST_ID}: number tokens from 0 on"
        )
    if isinstance(model, dict) and (model.get("max_input_chars_per_word") or 0) > WORD:
        size = model["max_input_chars_per_word"]
        raise BadInput(f"{path}: model.max_input_chars_per_word is {size}, where {WORD} is the most: lower it")
    for field in ("normalizer", "pre_tokenizer", "decoder"):
        if (times := growth(parts.get(field), decodes=field == "decoder")) > GROWTH:
            raise BadInput(
                f"{path}: the steps of its {field} can make a text {times:.3g} times as long, where {GROWTH} times are "
                "the most: take out those that repeat each other"
            )


FACTORS = {"NFC": 3.0, "NFD": 3.0, "NFKC": 11.0, "NFKD": 11.0, "Lowercase": 3.0, "BertNormalizer": 9.0, "Nmt": 1.0}
FACTORS |= {"ByteLevel": 2.0, "Metaspace": 4.0}
DECODING = {"ByteLevel": 3.0, "WordPiece": 2.0, "BPEDecoder": 2.0, "ByteFallback": 1.0, "Metaspace": 1.0}


def growth(step: Any, *, decodes: bool = False) -> float:
    """An upper bound of how many bytes a step of a tokenizer makes of each byte, its parts one after the other."""
    if not isinstance(step, Mapping):
        return 1.0
    kind, times = step.get("type"), 1.0
    if kind == "Sequence":
        for name in ("normalizers", "pretokenizers", "decoders"):
            for part in step.get(name) or ():
                times = min(times * growth(part, decodes=decodes), 1e300)
        return times
    if kind == "Replace":
        return max(1.0, _replacing(step))
    if kind == "Prepend":
        return 1.0 + len(str(step.get("prepend", "")).encode("utf-8", "replace"))
    if kind == "Precompiled":
        return max(1.0, _longest_mapped(step.get("precompiled_charsmap")))
    return (DECODING if decodes else FACTORS).get(str(kind), 1.0)


def _replacing(step: Mapping[str, Any]) -> float:
    pattern, new = step.get("pattern"), len(str(step.get("content", "")).encode("utf-8", "replace"))
    old = pattern.get("String") if isinstance(pattern, Mapping) else None
    # An expression, or an empty string, may be found between any two bytes.
    return new / len(old.encode("utf-8", "replace")) if isinstance(old, str) and old else 1.0 + new


def _longest_mapped(charsmap: Any) -> float:
    """Bytes of the longest string that a charsmap of sentencepiece writes: a trie, and strings that end with zero."""
    try:
        data = base64.b64decode(charsmap or "")
    except (TypeError, ValueError, binascii.Error):
        return 1.0  # which tokenizers refuses
    strings = data[4 + int.from_bytes(data[:4], "little") :]
    return float(max(map(len, strings.split(b"\0")), default=1))
