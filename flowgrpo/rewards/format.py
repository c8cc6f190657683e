"""Format rewards: `check_format` and `check_json` give 1 if an output has exactly the declared form, else 0.

    check_format(tag("think"), tag("answer"))             <think> ... </think> <answer> ... </answer>
    check_format(heading("Plan"), heading("Answer"), literal("####"))
    check_json({"answer": str, "steps": list})

Each piece must occur exactly once, in the declared order. Pieces are literal text, so nothing can backtrack: an output
is searched once per piece. An output longer than `MAX_CHARACTERS` scores 0.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from flowgrpo.contracts import Reward, RewardResult
from flowgrpo.data.tokenizer import strict_json
from flowgrpo.types import BadInput, Task

MAX_CHARACTERS = 1 << 20
TYPE_NAMES: Mapping[type, str] = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
TYPE_NAMES = {**TYPE_NAMES, list: "a list", dict: "an object", type(None): "null"}


class PieceSpan(NamedTuple):
    """Start and end of a piece in an output, or what is wrong with it."""

    start: int = 0
    end: int = 0
    problem: str = ""


class FormatPiece(NamedTuple):
    """A piece that an output must contain once."""

    name: str
    find: Callable[[str], PieceSpan]


def literal(text: str) -> FormatPiece:
    """Require this text, character by character."""
    if not text:
        raise BadInput("literal: its text is empty; give the text that must appear")
    return FormatPiece(text, lambda output: _find(text, output))


def tag(name: str, *, empty: bool = False) -> FormatPiece:
    """Require `<name> ... </name>`, with text inside unless `empty` is allowed."""
    if not name or not name.replace("_", "").replace("-", "").isalnum():
        raise BadInput(f"tag: its name is {name!r}, but must be letters, digits, - or _")
    opening, closing = f"<{name}>", f"</{name}>"

    def find(output: str) -> PieceSpan:
        first, last = _find(opening, output), _find(closing, output)
        if first.problem or last.problem:
            return PieceSpan(
                problem=f"{opening} is {first.problem}" if first.problem else f"{closing} is {last.problem}"
            )
        if last.start < first.end:
            return PieceSpan(problem=f"{closing} comes before {opening}")
        if not empty and not output[first.end : last.start].strip():
            return PieceSpan(problem="nothing inside")
        return PieceSpan(first.start, last.end)

    return FormatPiece(name, find)


def heading(title: str) -> FormatPiece:
    """Require a line that is this title, after any number of `#` or within `**`."""
    if not title.strip() or "\n" in title:
        raise BadInput(f"heading: its title is {title!r}, but must be one line of text")

    def find(output: str) -> PieceSpan:
        spans, start = [], 0
        for line in output.split("\n"):
            if line.strip() and line.strip().strip("#*: ").strip() == title.strip():
                spans.append(PieceSpan(start, start + len(line)))
            start += len(line) + 1
        return spans[0] if len(spans) == 1 else PieceSpan(problem="more than once" if spans else "missing")

    return FormatPiece(title, find)


def _find(text: str, output: str) -> PieceSpan:
    start = output.find(text)
    if start < 0:
        return PieceSpan(problem="missing")
    if output.find(text, start + 1) >= 0:
        return PieceSpan(problem="more than once")
    return PieceSpan(start, start + len(text))


def check_format(*pieces: FormatPiece) -> Reward:
    """Give 1 if each piece occurs exactly once and in this order; `parts` has 1 or 0 for each piece."""
    names = [piece.name for piece in pieces]
    if not pieces or len(set(names)) < len(names):
        raise BadInput(f"check_format: the pieces are {names}, but there must be at least one, each with its own name")

    def score(_: Task, output: str) -> RewardResult:
        if len(output) > MAX_CHARACTERS:
            return RewardResult(0.0, f"the output is longer than {MAX_CHARACTERS} characters")
        spans = {piece.name: piece.find(output) for piece in pieces}
        parts = {name: float(not span.problem) for name, span in spans.items()}
        problems = [f"{name}: {span.problem}" for name, span in spans.items() if span.problem]
        if not problems:
            pairs = itertools.pairwise(spans.items())
            problems = [f"{name}: out of order" for (_, previous), (name, span) in pairs if span.start < previous.end]
        return RewardResult(0.0, problems[0], parts) if problems else RewardResult(1.0, "", parts)

    return Reward(score)


# JSON -----------------------------------------------------------------------------------------------------


def check_json(schema: Mapping[str, type | tuple[type, ...]], *, extra: bool = False) -> Reward:
    """Give 1 if the whole output is one JSON object with these keys and types; `extra` allows other keys."""
    types_of = {key: types if isinstance(types, tuple) else (types,) for key, types in schema.items()}
    for key, types in types_of.items():
        for type_ in types:
            if type_ not in TYPE_NAMES:
                known = "JSON knows str, int, float, bool, list, dict"
                raise BadInput(f"check_json: {key!r} has the type {type_!r}, but {known}")

    def score(_: Task, output: str) -> RewardResult:
        text = output.strip() if len(output) <= MAX_CHARACTERS else ""
        if text.startswith("```") and text.endswith("```") and "\n" in text:
            text = text[text.index("\n") : -3].strip()
        if not text:
            return RewardResult(0.0, "not JSON: empty or too long")
        try:
            value = strict_json(text, object_pairs_hook=_unique_keys)
        except (ValueError, RecursionError) as error:
            return RewardResult(0.0, f"not JSON: {str(error).partition(chr(10))[0][:80]}")
        if not isinstance(value, dict):
            return RewardResult(0.0, "JSON, but no object")
        parts = {key: float(key in value and _is_instance(value[key], types)) for key, types in types_of.items()}
        for key, types in types_of.items():
            if not parts[key]:
                expected = " or ".join(TYPE_NAMES[type_] for type_ in types)
                return RewardResult(0.0, f"{key!r} is {f'not {expected}' if key in value else 'missing'}", parts)
        others = [] if extra else [key for key in value if key not in types_of]
        return (
            RewardResult(0.0, f"{others[0][:40]!r} is not in the schema", parts)
            if others
            else RewardResult(1.0, "", parts)
        )

    return Reward(score)


def _is_instance(value: object, types: tuple[type, ...]) -> bool:
    """Whether a value has one of the types as JSON means them: a bool is no number, an int is also a float."""
    if isinstance(value, bool):
        return bool in types
    return isinstance(value, types) or (float in types and isinstance(value, int))


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        raise ValueError("a key appears twice")
    return mapping
