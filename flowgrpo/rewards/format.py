"""The format checker: declared pieces and an output flow in, 1 where it has exactly that form flows out, else 0.

    check_format(tag("think"), tag("answer"))             <think> ... </think> <answer> ... </answer>
    check_format(heading("Plan"), heading("Answer"), literal("####"))
    check_json({"answer": str, "steps": list})

Each piece must stand exactly once, in the order in which it is declared. Pieces are literal text, so there is nothing
to backtrack; an output is searched once per piece. What is longer than `MOST` characters has no form.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from flowgrpo.contracts import Reward, Scored
from flowgrpo.types import BadInput, Task

MOST = 1 << 20  # characters of an output
KINDS: Mapping[type, str] = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
KINDS = {**KINDS, list: "a list", dict: "an object", type(None): "null"}


class Place(NamedTuple):
    """Start and end of a piece in an output, or the reason why it isn't there as it should be."""

    start: int = 0
    end: int = 0
    trouble: str = ""


class Piece(NamedTuple):
    """Something that an output must have once."""

    name: str
    find: Callable[[str], Place]


def tag(name: str, *, empty: bool = False) -> Piece:
    """`<name> ... </name>`, with something inside unless `empty`."""
    if not name or not name.replace("_", "").replace("-", "").isalnum():
        raise BadInput(f"tag: its name is {name!r}, but must be letters, digits, - or _")
    return Piece(name, partial(_find_tag, f"<{name}>", f"</{name}>", 0 if empty else 1))


def heading(title: str) -> Piece:
    """A line that is this title, after any number of `#` or within `**`."""
    if not title.strip() or "\n" in title:
        raise BadInput(f"heading: its title is {title!r}, but must be one line of text")
    return Piece(title, partial(_find_heading, title.strip()))


def literal(text: str) -> Piece:
    """This very text."""
    if not text:
        raise BadInput("literal: its text is empty; give the text that must appear")
    return Piece(text, partial(_find_literal, text))


def check_format(*pieces: Piece) -> Reward:
    """1 where each piece stands exactly once and in this order; `parts` says which do."""
    names = [piece.name for piece in pieces]
    if not pieces or len(set(names)) < len(names):
        raise BadInput(f"check_format: the pieces are {names}, but there must be some, each with a name of its own")
    return Reward(partial(_score_pieces, pieces))


def _score_pieces(pieces: Sequence[Piece], task: Task, output: str) -> Scored:  # noqa: ARG001
    if len(output) > MOST:
        return Scored(0.0, f"the output is longer than {MOST} characters")
    places = {piece.name: piece.find(output) for piece in pieces}
    parts = {name: float(not place.trouble) for name, place in places.items()}
    for name, place in places.items():
        if place.trouble:
            return Scored(0.0, f"{name}: {place.trouble}", parts)
    ends = 0
    for name, place in places.items():
        if place.start < ends:
            return Scored(0.0, f"{name}: out of order", parts)
        ends = place.end
    return Scored(1.0, "", parts)


def _find_literal(text: str, output: str) -> Place:
    start = output.find(text)
    if start < 0:
        return Place(trouble="missing")
    if output.find(text, start + 1) >= 0:
        return Place(trouble="more than once")
    return Place(start, start + len(text))


def _find_tag(opening: str, closing: str, least: int, output: str) -> Place:
    first, last = _find_literal(opening, output), _find_literal(closing, output)
    if first.trouble or last.trouble:
        return Place(trouble=f"{opening} is {first.trouble}" if first.trouble else f"{closing} is {last.trouble}")
    if last.start < first.end:
        return Place(trouble=f"{closing} comes before {opening}")
    if len(output[first.end : last.start].strip()) < least:
        return Place(trouble="nothing inside")
    return Place(first.start, last.end)


def _find_heading(title: str, output: str) -> Place:
    found = []
    start = 0
    for line in output.split("\n"):
        if line.strip().strip("#*: ").strip() == title and line.strip() != "":
            found.append(Place(start, start + len(line)))
        start += len(line) + 1
    if len(found) != 1:
        return Place(trouble="more than once" if found else "missing")
    return found[0]


# JSON -----------------------------------------------------------------------------------------------------


def check_json(schema: Mapping[str, type | tuple[type, ...]], *, extra: bool = False) -> Reward:
    """1 where the whole output is one JSON object with these keys, of these types, and no others unless `extra`."""
    for key, types in schema.items():
        for kind in types if isinstance(types, tuple) else (types,):
            if kind not in KINDS:
                raise BadInput(
                    f"check_json: {key!r} has the type {kind!r}, but JSON knows str, int, float, bool, list, dict"
                )
    return Reward(partial(_score_json, dict(schema), extra))


def _score_json(schema: Mapping[str, Any], extra: bool, task: Task, output: str) -> Scored:  # noqa: ARG001
    text = _unfenced(output) if len(output) <= MOST else ""
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        return Scored(
            0.0, f"not JSON: {str(error).partition(chr(10))[0][:80]}" if text else "not JSON: empty or too long"
        )
    if not isinstance(value, dict):
        return Scored(0.0, "JSON, but no object")
    parts = {key: float(key in value and _is_of(value[key], types)) for key, types in schema.items()}
    for key, types in schema.items():
        if not parts[key]:
            kinds = " or ".join(KINDS[kind] for kind in (types if isinstance(types, tuple) else (types,)))
            return Scored(0.0, f"{key!r} is {f'not {kinds}' if key in value else 'missing'}", parts)
    others = [] if extra else [key for key in value if key not in schema]
    return Scored(0.0, f"{others[0][:40]!r} is not in the schema", parts) if others else Scored(1.0, "", parts)


def _unfenced(output: str) -> str:
    """The text within a ```json fence where it is all that there is."""
    text = output.strip()
    if text.startswith("```") and text.endswith("```") and "\n" in text:
        return text[text.index("\n") : -3].strip()
    return text


def _is_of(value: object, types: type | tuple[type, ...]) -> bool:
    """Whether a value is of the types, where true is no number and a whole number is one."""
    kinds = types if isinstance(types, tuple) else (types,)
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, kinds) or (float in kinds and isinstance(value, int))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key appears twice")
    return found


def _no_constant(name: str):
    raise ValueError(f"{name} is not JSON")
