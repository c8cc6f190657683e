"""Show trajectories on one HTML page that needs nothing else; `viewer` writes it, `Shown` is one trajectory of it.

    viewer([shown(one, speller(text)) for one in played], "rollouts.html", title="agentflow, seed 0")

The page lists trajectories with filters, shows the turns of one, or of two of the same task side by side, and colours
tokens by mask, log-probability, advantage, ratio or weight version. It loads nothing, and its content policy forbids
that; recorded text is data to it and never read as HTML. What wasn't recorded is None, and the page says so.
"""

import base64
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flowgrpo.files import make_folder, write_whole
from flowgrpo.types import ENDINGS, BadInput, Status

QUANTITIES = ("logp", "advantage", "ratio", "version")  # by which tokens can be coloured, beside whether chosen
SURPRISE = 5.0  # a log-probability below minus this is shown like it
PAGE = Path(__file__).parent / "page"
STYLES = ("style.css",)
SCRIPTS = ("data.js", "colours.js", "list.js", "tokens.js", "trajectory.js", "main.js")  # one after the other
# Why tokens can't be coloured by a quantity, where nothing better is known.
LACKING = {
    "logp": "no token here was chosen",
    "version": "no token here was chosen",
    "advantage": "no advantage was recorded with these trajectories",
    "ratio": "these tokens were not scored with other weights",
}


# Trajectories -----------------------------------------------------------------------------------------


class ShownCall(NamedTuple):
    """One call to the world, a tool or a role: what was asked, and what it answered."""

    kind: str  # "tool" or "role"
    name: str
    asked: Mapping[str, Any]
    answer: str
    error: bool = False  # the caller's doing
    failure: str = ""  # the world's own


@dataclass(frozen=True, eq=False)
class ShownTurn:
    """One action in its context; all arrays have an entry a token, of which those of context tokens aren't read."""

    tokens: np.ndarray
    pieces: Sequence[str]  # the text of each token; together, that of the turn
    chosen: np.ndarray
    logp: np.ndarray
    version: np.ndarray | int  # of the weights that chose it
    tool: str = ""  # that was called
    error: bool = False
    reward: float | None = None  # paid for this turn
    calls: Sequence[ShownCall] = ()  # what followed from the action
    advantage: np.ndarray | float | None = None
    ratio: np.ndarray | None = None  # exp(logp now - logp when it was sampled)


@dataclass(frozen=True, eq=False)
class Shown:
    """One trajectory with its task and its verdict."""

    task: str  # which task it is: trajectories of one can be seen side by side
    query: str
    turns: Sequence[ShownTurn]
    answers: Sequence[str] = ()  # gold
    domain: str = ""
    phase: str = ""  # what it was played for: "train", "test before", "test after"
    update: int | None = None
    group: int = 0
    sample: int = 0
    reward: float | None = None
    correct: bool = False
    status: Status = Status.FINISHED
    reason: str = ""  # why it ended as it did
    output: str | None = None  # what the system answered in the end
    verdict: str = ""  # what the reward said of its value
    parts: Mapping[str, float] = field(default_factory=dict)  # of the reward
    seconds: float | None = None
    calls: Sequence[ShownCall] = ()  # before the first turn


# The page ---------------------------------------------------------------------------------------------


def viewer(
    shown: Sequence[Shown],
    path: str | os.PathLike[str],
    *,
    title: str = "Trajectories",
    note: str = "",
    lacking: Mapping[str, str] | None = None,
    names: Mapping[str, str] | None = None,
) -> Path:
    """Write the page, whole or not at all.

    `note` stands below the title. `lacking` says why a quantity isn't there ("ratio": "..."), and `names` what it is
    called ("ratio": "π(update 40) / π(sampled)").
    """
    if not shown:
        raise BadInput("there is no trajectory to show: give at least one")
    data = page_columns(shown) | {"lacking": LACKING | dict(lacking or {}), "names": dict(names or {})}
    target = Path(path)
    make_folder(target.parent)
    write_whole(target, page(data | {"title": title, "note": note}))
    return target


def page(data: Mapping[str, Any]) -> str:
    """The page around its data."""
    style, script = (
        "\n".join((PAGE / name).read_text(encoding="utf-8") for name in names) for names in (STYLES, SCRIPTS)
    )
    script = f"'use strict';\n(() => {{\n{script}\n}})();"
    parts = {
        "title": escape(data["title"].encode(errors="replace").decode()),  # a lone surrogate is no UTF-8
        "policy": f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; base-uri 'none'",
        "style": style,
        "data": as_script(data),
        "script": script,
    }
    html = (PAGE / "page.html").read_text(encoding="utf-8")
    # In one pass over the template, so that nothing within a part is taken for a place of another.
    pieces = html.split("@@")
    return "".join(piece if i % 2 == 0 else parts[piece] for i, piece in enumerate(pieces))


def as_script(data: object) -> str:
    """JSON of ASCII that can stand in a script element: whatever it holds, no `<` ends it."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


# Its data ---------------------------------------------------------------------------------------------


class ValueTable:
    """Values by number: each is kept once."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}

    def __call__(self, value: Any) -> int:
        return self.numbers.setdefault(value, len(self.numbers))


def page_columns(shown: Sequence[Shown]) -> dict[str, Any]:
    """All that a page needs, as JSON holds it: tables of strings and of tokens, a column a field, packed tokens."""
    strings, tokens = ValueTable(), ValueTable()
    for number, one in enumerate(shown):
        for turn_number, turn in enumerate(one.turns):
            _check(turn, f"trajectory {number}, turn {turn_number}")
    details = [_detail(one, strings, tokens) for one in shown]
    fields = {name: [strings(getattr(one, name)) for one in shown] for name in ("task", "query", "domain", "phase")}
    fields |= {name: [getattr(one, name) for one in shown] for name in ("update", "group", "sample", "correct")}
    fields |= {
        "reward": [_finite(one.reward) for one in shown],
        "seconds": [_finite(one.seconds) for one in shown],
        "status": [strings(one.status.name) for one in shown],
        "counts": [bool(ENDINGS[one.status].counts and one.reward is not None) for one in shown],
        "output": [None if one.output is None else strings(one.output) for one in shown],
    }
    return {
        "fields": fields,
        "details": details,
        "endings": {status.name: ENDINGS[status].why for status in Status},
        "vocabulary": {"ids": [i for i, _ in tokens.numbers], "pieces": [piece for _, piece in tokens.numbers]},
        "strings": list(strings.numbers),
        "scales": scales(shown),
    }


def scales(shown: Sequence[Shown]) -> dict[str, float | None]:
    """Compute where the colour scale of each quantity ends; None where it is nowhere known.

    For advantages this is the 0.99 quantile of the absolute values, for ratios that of |log|.
    """
    turns = [turn for one in shown for turn in one.turns if np.any(turn.chosen)]
    given = {name: [_chosen(turn, name) for turn in turns if getattr(turn, name) is not None] for name in QUANTITIES}
    found = {name: np.concatenate(parts) for name, parts in given.items() if parts}
    with np.errstate(all="ignore"):
        log_ratio = np.log(found.get("ratio", np.ones(0)))
    reaches = {"advantage": np.abs(found.get("advantage", np.zeros(0))), "ratio": np.abs(log_ratio)}
    ends: dict[str, float | None] = {
        "logp": SURPRISE if "logp" in found else None,
        "version": float(found["version"].max()) if "version" in found else None,
    }
    for name, least in (("advantage", 1e-6), ("ratio", 0.01)):
        finite = reaches[name][np.isfinite(reaches[name])]
        ends[name] = max(float(np.quantile(finite, 0.99)), least) if finite.size else None
    return ends


def _detail(one: Shown, strings: ValueTable, tokens: ValueTable) -> dict[str, Any]:
    """Encode the part of a trajectory that the page reads once it is opened, or is counted."""
    return {
        "answers": [strings(answer) for answer in one.answers],
        "reason": strings(one.reason),
        "verdict": strings(one.verdict),
        "parts": {name: _finite(value) for name, value in one.parts.items()},
        "calls": [_call(call, strings) for call in one.calls],
        "turns": [_turn(turn, strings, tokens) for turn in one.turns],
    }


def _turn(turn: ShownTurn, strings: ValueTable, tokens: ValueTable) -> dict[str, Any]:
    numbers = [tokens(pair) for pair in zip(np.asarray(turn.tokens).tolist(), turn.pieces, strict=True)]
    known = {name: None if getattr(turn, name) is None else _chosen(turn, name) for name in QUANTITIES}
    return {
        "tokens": _packed(numbers, "<u4"),
        "chosen": _runs(turn.chosen),
        "tool": strings(turn.tool),
        "error": bool(turn.error),
        "reward": _finite(turn.reward),
        "calls": [_call(call, strings) for call in turn.calls],
        **{name: None if own is None else _one_or_packed(own) for name, own in known.items()},
    }


def _call(call: ShownCall, strings: ValueTable) -> list[Any]:
    asked = {str(name): value if isinstance(value, str) else repr(value) for name, value in call.asked.items()}
    pairs = [[strings(name), strings(value)] for name, value in asked.items()]
    ends = [strings(call.answer), bool(call.error), strings(call.failure)]
    return [strings(call.kind), strings(call.name), pairs, *ends]


def _chosen(turn: ShownTurn, name: str) -> np.ndarray:
    """A quantity of the chosen tokens alone."""
    chosen_l = np.asarray(turn.chosen, bool)
    return np.broadcast_to(np.asarray(getattr(turn, name), np.float32), chosen_l.shape)[chosen_l]


def _one_or_packed(values: np.ndarray) -> float | str | None:
    """One number where all are that, their bytes otherwise; what isn't finite travels in bytes only."""
    if values.size and np.isfinite(values[0]) and (values == values[0]).all():
        return float(values[0])
    return _packed(values, "<f4")


def _packed(values: Any, kind: str) -> str:
    return base64.b64encode(np.asarray(values).astype(kind).tobytes()).decode()


def _runs(chosen_l: np.ndarray) -> list[int]:
    """Lengths of alternating runs, the first of context: [0, 3] are three chosen tokens."""
    chosen_l = np.asarray(chosen_l, bool)
    ends = np.flatnonzero(np.diff(chosen_l, prepend=False, append=not chosen_l[-1] if chosen_l.size else True))
    return np.diff(ends, prepend=0).tolist()


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _check(turn: ShownTurn, place: str) -> None:
    """Raise `BadInput` unless the columns of a turn are of one length."""
    own = {name: np.shape(getattr(turn, name)) for name in ("tokens", "chosen", "logp")} | {
        "pieces": (len(turn.pieces),)
    }
    own |= {name: np.shape(x) for name in QUANTITIES if np.ndim(x := getattr(turn, name)) and x is not None}
    if len(set(own.values())) > 1:
        found = ", ".join(f"{name} {shape[0] if shape else 'none'}" for name, shape in own.items())
        raise BadInput(f"{place}: the lengths disagree: {found}")
