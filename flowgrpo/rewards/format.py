"""Rewards of form: `check_format` of declared pieces and `check_json` give 1 where an output has exactly that form.

    check_format(tag("think"), tag("answer"))             <think> ... </think> <answer> ... </answer>
    check_format(heading("Plan"), heading("Answer"), literal("####"))
    check_json({"answer": str, "steps": list})

Each piece must stand exactly once, in the order in which it is declared. Pieces are literal text, so there is nothing
to backtrack; an output is searched once per piece. What is longer than `MOST` characters has no form.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from flowgrpo.contracts import Reward, Scored
from flowgrpo.data.tokenizer import strict_json
from flowgrpo.types import BadInput, Task

MOST = 1 << 20  # characters of an output
KINDS: Mapping[type, str] = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
KINDS = {**KINDS, list: "a list", dict: "an object", type(None): "null"}


class PiecePlace(NamedTuple):
    """Start and end of a piece in an output, or the reason why it isn't there as it should be."""

    start: int = 0
    end: int = 0
    trouble: str = ""


class FormatPiece(NamedTuple):
    """Something that an output must have once."""

    name: str
    find: Callable[[str], PiecePlace]


def literal(text: str) -> FormatPiece:
    """Ask for this very text."""
    if not text:
        raise BadInput("literal: its text is empty; give the text that must appear")
    return FormatPiece(text, lambda output: _find(text, output))


def tag(name: str, *, empty: bool = False) -> FormatPiece:
    """Ask for `<name> ... </name>`, with something inside unless `empty`."""
    if not name or not name.replace("_", "").replace("-", "").isalnum():
        raise BadInput(f"tag: its name is {name!r}, but must be letters, digits, - or _")
    opening, closing = f"<{name}>", f"</{name}>"

    def find(output: str) -> PiecePlace:
        first, last = _find(opening, output), _find(closing, output)
        if first.trouble or last.trouble:
            return PiecePlace(
                trouble=f"{opening} is {first.trouble}" if first.trouble else f"{closing} is {last.trouble}"
            )
        if last.start < first.end:
            return PiecePlace(trouble=f"{closing} comes before {opening}")
        if not empty and not output[first.end : last.start].strip():
            return PiecePlace(trouble="nothing inside")
        return PiecePlace(first.start, last.end)

    return FormatPiece(name, find)


def heading(title: str) -> FormatPiece:
    """Ask for a line that is this title, after any number of `#` or within `**`."""
    if not title.strip() or "\n" in title:
        raise BadInput(f"heading: its title is {title!r}, but must be one line of text")

    def find(output: str) -> PiecePlace:
        found, start = [], 0
        for line in output.split("\n"):
            if line.strip() and line.strip().strip("#*: ").strip() == title.strip():
                found.append(PiecePlace(start, start + len(line)))
            start += len(line) + 1
        return found[0] if len(found) == 1 else PiecePlace(trouble="more than once" if found else "missing")

    return FormatPiece(title, find)


def _find(text: str, output: str) -> PiecePlace:
    start = output.find(text)
    if start < 0:
        return PiecePlace(trouble="missing")
    return (
        PiecePlace(trouble="more than once")
        if output.find(text, start + 1) >= 0
        else PiecePlace(start, start + len(text))
    )


def check_format(*pieces: FormatPiece) -> Reward:
    """Give 1 where each piece stands exactly once and in this order; `parts` says which do."""
    names = [piece.name for piece in pieces]
    if not pieces or len(set(names)) < len(names):
        raise BadInput(f"check_format: the pieces are {names}, but there must be some, each with a name of its own")

    def score(_: Task, output: str) -> Scored:
        if len(output) > MOST:
            return Scored(0.0, f"the output is longer than {MOST} characters")
        places = {piece.name: piece.find(output) for piece in pieces}
        parts = {name: float(not place.trouble) for name, place in places.items()}
        troubles = [f"{name}: {place.trouble}" for name, place in places.items() if place.trouble]
        if not troubles:
            pairs = itertools.pairwise(places.items())
            troubles = [f"{name}: out of order" for (_, before), (name, place) in pairs if place.start < before.end]
        return Scored(0.0, troubles[0], parts) if troubles else Scored(1.0, "", parts)

    return Reward(score)


# JSON -----------------------------------------------------------------------------------------------------


def check_json(schema: Mapping[str, type | tuple[type, ...]], *, extra: bool = False) -> Reward:
    """Give 1 where the whole output is one JSON object with these keys, of these types; others only where `extra`."""
    wanted = {key: kinds if isinstance(kinds, tuple) else (kinds,) for key, kinds in schema.items()}
    for key, kinds in wanted.items():
        for kind in kinds:
            if kind not in KINDS:
                known = "JSON knows str, int, float, bool, list, dict"
                raise BadInput(f"check_json: {key!r} has the type {kind!r}, but {known}")

    def score(_: Task, output: str) -> Scored:
        text = _unfenced(output) if len(output) <= MOST else ""
        if not text:
            return Scored(0.0, "not JSON: empty or too long")
        try:
            value = strict_json(text, object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            return Scored(0.0, f"not JSON: {str(error).partition(chr(10))[0][:80]}")
        if not isinstance(value, dict):
            return Scored(0.0, "JSON, but no object")
        parts = {key: float(key in value and _is_of(value[key], kinds)) for key, kinds in wanted.items()}
        for key in wanted:
            if not parts[key]:
                named = " or ".join(KINDS[kind] for kind in wanted[key])
                return Scored(0.0, f"{key!r} is {f'not {named}' if key in value else 'missing'}", parts)
        others = [] if extra else [key for key in value if key not in wanted]
        return Scored(0.0, f"{others[0][:40]!r} is not in the schema", parts) if others else Scored(1.0, "", parts)

    return Reward(score)


def _unfenced(output: str) -> str:
    """Take off a ```json fence where it is around all that there is."""
    text = output.strip()
    if text.startswith("```") and text.endswith("```") and "\n" in text:
        return text[text.index("\n") : -3].strip()
    return text


def _is_of(value: object, kinds: tuple[type, ...]) -> bool:
    """Say whether a value is of the types, where true is no number and a whole number is one."""
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, kinds) or (float in kinds and isinstance(value, int))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key appears twice")
    return found
