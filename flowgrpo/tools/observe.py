"""Turn any value that a tool returned into the bounded, clean text that a policy is shown."""

import json
import re
from typing import Any

ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?)")  # colours, cursors, titles
UNCLEAN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # control characters, and surrogates without a pair
LEAST = 200  # characters of an observation, so that what is left out can be said
LOOKED_AT = 4096  # bytes, to tell text from other data
LONGEST_SENTENCE = 500


def observation(value: Any, most: int) -> str:
    """The text of a tool's result, at most `most` characters of it: head and tail, and how much is left out."""
    text = as_text(value, most)
    if len(text) <= most:
        return clean(text)
    room = most - len(f"\n[{len(text)} characters are left out here]\n")
    head, tail = clean(text[: room - room // 2]), clean(text[len(text) - room // 2 :])
    return f"{head}\n[{len(text) - room} characters are left out here]\n{tail}"


def as_text(value: Any, most: int) -> str:
    """A result as text: JSON where it is no text, words where it is binary."""
    if isinstance(value, str):
        return str(value)
    if value is None:
        return "(no result)"
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _decode(bytes(value), most)
    if isinstance(value, (bool, int, float, list, tuple, dict)):
        try:
            return json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            return str(value)
    return str(value)


def clean(text: str) -> str:
    """Text without escape sequences; other control characters and lone surrogates are replaced by U+FFFD."""
    plain = ESCAPES.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return UNCLEAN.sub("\ufffd", plain)


def sentence(error: BaseException, most: int = LONGEST_SENTENCE) -> str:
    """Get the message of an exception as clean text of at most `most` characters; "" where it has none, or raises."""
    try:
        return observation(str(error).strip(), most)
    except BaseException:  # its own words raise, and may raise anything
        return ""


def _decode(data: bytes, most: int) -> str:
    """Bytes that begin like text, as text; else how many there are."""
    head = data[:LOOKED_AT]
    broken = head.decode("utf-8", "replace").count("\ufffd")
    if b"\0" in head or broken > len(head) // 100 + 1:
        return f"({len(data)} bytes of binary data)"
    if len(data) <= 8 * most:
        return data.decode("utf-8", "replace")
    ends = data[: 4 * most], data[-4 * most :]
    left_out = len(data) - 8 * most
    return f"\n[{left_out} bytes are left out here]\n".join(part.decode("utf-8", "replace") for part in ends)
