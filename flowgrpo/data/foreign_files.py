"""Checks of a downloaded model folder: which files are opened, and how much work they may cause.

`check_files` checks the kind of each file before it is opened, `check_tokenizer` a tokenizer.json before it is loaded:
their readers would wait for a pipe for ever, and follow links wherever they lead. What passes here may still be wrong
in other ways, which its reader reports.
"""

import base64
import binascii
import os
import stat
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from flowgrpo.files import parse_json
from flowgrpo.types import JSON, BadInput, first_line

PATTERNS = (  # of the files that we and transformers open in a folder
    *("*config*.json", "model*", "adapter_model*", "tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("vocab*", "merges.txt", "chat_template*", "additional_chat_templates/*", "*.model"),
)
MAX_JSON_BYTES = 1 << 26
MAX_NAME_BYTES = 255  # of a file, on any file system
TOKENIZER = "tokenizer.json"
MAX_TOKENIZER_BYTES = 1 << 27
MAX_ADDED_TOKENS = 1 << 18  # four times the largest codebooks of speech
MAX_ID = 1 << 24
MAX_GROWTH = 1024  # factor by which the steps of a tokenizer lengthen a text; published ones stay below 200
MAX_WORD_CHARS = 10_000  # of a word in WordPiece, whose time is quadratic


def check_files(folder: Path) -> None:
    """Raise `BadInput` for a file that is a pipe or a device, leads out of the folder, or is too large for JSON."""
    root = Path(os.path.realpath(folder))
    for path in sorted({path for pattern in PATTERNS for path in root.glob(pattern)}):
        if not path.is_dir():
            check_file(path, root)


def check_file(path: Path, root: Path) -> None:
    """Raise `BadInput` unless this is a file inside the folder `root`, or inside the hub's cache."""
    real = Path(os.path.realpath(path))
    try:
        stats = real.stat()
    except OSError as error:
        raise BadInput(f"{path} can't be read ({error.strerror}): copy the file again") from error
    if not stat.S_ISREG(stats.st_mode):
        raise BadInput(f"{path} is no regular file, but a pipe, a device or the like: put the file itself there")
    # A snapshot in the hub's cache consists of links to ../../blobs.
    blobs = root.parents[1] / "blobs" if root.parent.name == "snapshots" else root
    if not (real.is_relative_to(root) or real.is_relative_to(blobs)):
        raise BadInput(f"{path} leads out of its folder, to {real}: copy that file into the folder, if it is meant")
    max_bytes = MAX_TOKENIZER_BYTES if path.name == TOKENIZER else MAX_JSON_BYTES
    if path.suffix == ".json" and stats.st_size > max_bytes:
        raise BadInput(f"{path} has {stats.st_size} bytes, more than {max_bytes}: it is no file of a model")


def path_inside(folder: Path, name: JSON, index: Path) -> Path:
    """The path of a file that `index` names, which must be below the folder."""
    parts = PurePosixPath(name).parts if isinstance(name, str) and "\0" not in name else ()
    longest = max((len(part.encode("utf-8", "replace")) for part in parts), default=0)
    if not 0 < longest <= MAX_NAME_BYTES or ".." in parts or PurePosixPath(name).is_absolute():
        raise BadInput(f"{index} names the file {name!r:.200}, which is not in its folder: copy it there")
    return folder / name


# The tokenizer ------------------------------------------------------------------------------------------


def check_tokenizer(folder: Path) -> None:
    """Raise `BadInput` if the folder's tokenizer.json causes more work than any text needs."""
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
    if len(added) > MAX_ADDED_TOKENS:
        raise BadInput(f"{path}: added_tokens has {len(added)} entries, more than {MAX_ADDED_TOKENS}: remove some")
    ids = [token.get("id") for token in added if isinstance(token, dict)]
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids += list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    if largest := next((i for i in ids if type(i) is int and i >= MAX_ID), None):
        raise BadInput(f"{path}: a token has the id {largest}, where ids are below {MAX_ID}: number tokens from 0 on")
    if isinstance(model, dict) and (model.get("max_input_chars_per_word") or 0) > MAX_WORD_CHARS:
        size = model["max_input_chars_per_word"]
        raise BadInput(
            f"{path}: model.max_input_chars_per_word is {size}, above the maximum of {MAX_WORD_CHARS}: lower it"
        )
    for field in ("normalizer", "pre_tokenizer", "decoder"):
        if (factor := growth(parts.get(field), decodes=field == "decoder")) > MAX_GROWTH:
            raise BadInput(
                f"{path}: the steps of its {field} can make a text {factor:.3g} times as long, above the "
                f"maximum of {MAX_GROWTH}: remove steps that repeat each other"
            )


ENCODING_GROWTH = {
    "NFC": 3.0,
    "NFD": 3.0,
    "NFKC": 11.0,
    "NFKD": 11.0,
    "Lowercase": 3.0,
    "BertNormalizer": 9.0,
    "Nmt": 1.0,
}
ENCODING_GROWTH |= {"ByteLevel": 2.0, "Metaspace": 4.0}
DECODING_GROWTH = {"ByteLevel": 3.0, "WordPiece": 2.0, "BPEDecoder": 2.0, "ByteFallback": 1.0, "Metaspace": 1.0}


def growth(step: JSON, *, decodes: bool = False) -> float:
    """Upper bound of the bytes that a step of a tokenizer makes from one byte; the bounds of a sequence multiply."""
    if not isinstance(step, Mapping):
        return 1.0
    kind, factor = step.get("type"), 1.0
    if kind == "Sequence":
        for name in ("normalizers", "pretokenizers", "decoders"):
            for part in step.get(name) or ():
                factor = min(factor * growth(part, decodes=decodes), 1e300)
        return factor
    if kind == "Replace":
        pattern, new = step.get("pattern"), len(str(step.get("content", "")).encode("utf-8", "replace"))
        old = pattern.get("String") if isinstance(pattern, Mapping) else None
        # An expression, or an empty string, may match between any two bytes.
        return max(1.0, new / len(old.encode("utf-8", "replace")) if isinstance(old, str) and old else 1.0 + new)
    if kind == "Prepend":
        return 1.0 + len(str(step.get("prepend", "")).encode("utf-8", "replace"))
    if kind == "Precompiled":
        return max(1.0, _longest_mapped(step.get("precompiled_charsmap")))
    return (DECODING_GROWTH if decodes else ENCODING_GROWTH).get(str(kind), 1.0)


def _longest_mapped(charsmap: JSON) -> float:
    """Bytes of the longest string in a charsmap of SentencePiece, which is a trie and zero-terminated strings."""
    try:
        data = base64.b64decode(charsmap or "")
    except (TypeError, ValueError, binascii.Error):
        return 1.0  # tokenizers refuses it
    strings = data[4 + int.from_bytes(data[:4], "little") :]
    return float(max(map(len, strings.split(b"\0")), default=1))
