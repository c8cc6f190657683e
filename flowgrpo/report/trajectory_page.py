"""Trajectories on one self-contained HTML page: `write_viewer` writes it, `PageTrajectory` is one of them.

    write_viewer(trajectories, "rollouts.html", title="agentflow, seed 0")

The page lists trajectories with filters, shows the turns of one, or of two of the same task side by side, and colours
tokens by mask, log-probability, advantage, ratio or weight version. It loads nothing, which its content security policy
enforces; recorded text is data, and never parsed as HTML. Values that weren't recorded are None, and the page says so.
`rollout.trajectory_view` makes its trajectories from records.
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

from flowgrpo.files import make_folder, write_atomic
from flowgrpo.types import ENDINGS, BadInput, Status

QUANTITIES = ("logp", "advantage", "ratio", "version")  # that colour tokens, besides the mask
SURPRISE = 5.0  # end of the scale of -log p
PAGE = Path(__file__).parent / "page"
STYLES = ("style.css",)
SCRIPTS = ("data.js", "colours.js", "list.js", "tokens.js", "trajectory.js", "main.js")  # in this order
# Why a quantity is not available, by default.
UNAVAILABLE = {
    "logp": "no token here was chosen",
    "version": "no token here was chosen",
    "advantage": "no advantage was recorded with these trajectories",
    "ratio": "these tokens were not scored with other weights",
}


# Trajectories -----------------------------------------------------------------------------------------


class PageCall(NamedTuple):
    """A call of a tool or a role, and its answer."""

    kind: str  # "tool" or "role"
    name: str
    arguments: Mapping[str, Any]
    answer: str
    error: bool = False  # the policy's mistake
    failure: str = ""  # of the tool or role itself


@dataclass(frozen=True, eq=False)
class PageTurn:
    """One action in its context; arrays have an entry per token, and those of context tokens are ignored."""

    tokens: np.ndarray
    pieces: Sequence[str]  # the text of each token; joined, that of the turn
    chosen: np.ndarray
    logp: np.ndarray
    version: np.ndarray | int  # of the weights that sampled it
    tool: str = ""  # that was called
    error: bool = False
    reward: float | None = None
    calls: Sequence[PageCall] = ()  # that followed from the action
    advantage: np.ndarray | float | None = None
    ratio: np.ndarray | None = None  # exp(logp now - logp when it was sampled)


@dataclass(frozen=True, eq=False)
class PageTrajectory:
    """One trajectory with its task and its outcome."""

    task: str  # id; trajectories of the same task can be shown side by side
    query: str
    turns: Sequence[PageTurn]
    answers: Sequence[str] = ()  # gold
    domain: str = ""
    phase: str = ""  # "train", "test before", "test after"
    update: int | None = None
    group: int = 0
    sample: int = 0
    outcome: float | None = None
    correct: bool = False
    status: Status = Status.FINISHED
    reason: str = ""  # why it ended as it did
    output: str | None = None  # the answer at the end
    reward_reason: str = ""  # why the reward is what it is
    parts: Mapping[str, float] = field(default_factory=dict)  # of the reward
    seconds: float | None = None
    calls: Sequence[PageCall] = ()  # before the first turn


# The page ---------------------------------------------------------------------------------------------


def write_viewer(
    trajectories: Sequence[PageTrajectory],
    path: str | os.PathLike[str],
    *,
    title: str = "Trajectories",
    note: str = "",
    lacking: Mapping[str, str] | None = None,
    names: Mapping[str, str] | None = None,
) -> Path:
    """Write the page, atomically.

    Args:
        title: of the page.
        note: below the title.
        lacking: why a quantity is not available, such as {"ratio": "..."}.
        names: names of quantities, such as {"ratio": "π(update 40) / π(sampled)"}.
    """
    if not trajectories:
        raise BadInput("there is no trajectory to show: give at least one")
    data = page_columns(trajectories) | {"lacking": UNAVAILABLE | dict(lacking or {}), "names": dict(names or {})}
    target = Path(path)
    make_folder(target.parent)
    write_atomic(target, page(data | {"title": title, "note": note}))
    return target


def page(data: Mapping[str, Any]) -> str:
    """The HTML of the page with this data."""
    style, script = (
        "\n".join((PAGE / name).read_text(encoding="utf-8") for name in names) for names in (STYLES, SCRIPTS)
    )
    script = f"'use strict';\n(() => {{\n{script}\n}})();"
    parts = {
        "title": escape(data["title"].encode(errors="replace").decode()),  # lone surrogates are no UTF-8
        "policy": f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; base-uri 'none'",
        "style": style,
        "data": as_script(data),
        "script": script,
    }
    html = (PAGE / "page.html").read_text(encoding="utf-8")
    # One pass over the template, so that no text within a part is taken for a placeholder.
    pieces = html.split("@@")
    return "".join(piece if i % 2 == 0 else parts[piece] for i, piece in enumerate(pieces))


def as_script(data: object) -> str:
    """ASCII JSON for a script element, without `<`, so that no text can end the element."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


# Its data ---------------------------------------------------------------------------------------------


class ValueTable:
    """A table of distinct values; a call gives the index of a value."""

    def __init__(self) -> None:
        self.indices: dict[Any, int] = {}

    def __call__(self, value: Any) -> int:
        return self.indices.setdefault(value, len(self.indices))


def page_columns(trajectories: Sequence[PageTrajectory]) -> dict[str, Any]:
    """The data of a page, for JSON: tables of strings and of tokens, a column per field, packed tokens."""
    strings, tokens = ValueTable(), ValueTable()
    for n, trajectory in enumerate(trajectories):
        for t, turn in enumerate(trajectory.turns):
            _check_lengths(turn, f"trajectory {n}, turn {t}")
    details = [_encode_details(trajectory, strings, tokens) for trajectory in trajectories]
    fields: dict[str, list[Any]] = {}
    for name in ("task", "query", "domain", "phase"):
        fields[name] = [strings(getattr(trajectory, name)) for trajectory in trajectories]
    for name in ("update", "group", "sample", "correct"):
        fields[name] = [getattr(trajectory, name) for trajectory in trajectories]
    fields["outcome"] = [_finite(trajectory.outcome) for trajectory in trajectories]
    fields["seconds"] = [_finite(trajectory.seconds) for trajectory in trajectories]
    fields["status"] = [strings(trajectory.status.name) for trajectory in trajectories]
    fields["counts"] = [
        bool(ENDINGS[trajectory.status].counts and trajectory.outcome is not None) for trajectory in trajectories
    ]
    outputs = (trajectory.output for trajectory in trajectories)
    fields["output"] = [None if output is None else strings(output) for output in outputs]
    return {
        "fields": fields,
        "details": details,
        "endings": {status.name: ENDINGS[status].reason for status in Status},
        "vocabulary": {"ids": [i for i, _ in tokens.indices], "pieces": [piece for _, piece in tokens.indices]},
        "strings": list(strings.indices),
        "scales": scales(trajectories),
    }


def scales(trajectories: Sequence[PageTrajectory]) -> dict[str, float | None]:
    """End of the colour scale of each quantity; None if it is nowhere known.

    For advantages this is the 0.99 quantile of the absolute values, for ratios that of |log|.
    """
    turns = [turn for trajectory in trajectories for turn in trajectory.turns if np.any(turn.chosen)]
    by_turn = {
        name: [_of_chosen(turn, name) for turn in turns if getattr(turn, name) is not None] for name in QUANTITIES
    }
    values = {name: np.concatenate(arrays) for name, arrays in by_turn.items() if arrays}
    with np.errstate(all="ignore"):
        log_ratio = np.log(values.get("ratio", np.ones(0)))
    distances = {"advantage": np.abs(values.get("advantage", np.zeros(0))), "ratio": np.abs(log_ratio)}
    ends: dict[str, float | None] = {
        "logp": SURPRISE if "logp" in values else None,
        "version": float(values["version"].max()) if "version" in values else None,
    }
    for name, minimum in (("advantage", 1e-6), ("ratio", 0.01)):
        finite = distances[name][np.isfinite(distances[name])]
        ends[name] = max(float(np.quantile(finite, 0.99)), minimum) if finite.size else None
    return ends


def _encode_details(trajectory: PageTrajectory, strings: ValueTable, tokens: ValueTable) -> dict[str, Any]:
    """The part of a trajectory that the page reads when it is opened or counted."""

    def encode_call(call: PageCall) -> list[Any]:
        arguments = {
            str(name): value if isinstance(value, str) else repr(value) for name, value in call.arguments.items()
        }
        pairs = [[strings(name), strings(value)] for name, value in arguments.items()]
        answer = [strings(call.answer), bool(call.error), strings(call.failure)]
        return [strings(call.kind), strings(call.name), pairs, *answer]

    def encode_quantity(turn: PageTurn, name: str) -> float | str | None:
        """One number if all chosen tokens have it, their bytes otherwise; what isn't finite is in bytes only."""
        if getattr(turn, name) is None:
            return None
        values = _of_chosen(turn, name)
        if values.size and np.isfinite(values[0]) and (values == values[0]).all():
            return float(values[0])
        return _pack(values, "<f4")

    def encode_turn(turn: PageTurn) -> dict[str, Any]:
        indices = [tokens(pair) for pair in zip(np.asarray(turn.tokens).tolist(), turn.pieces, strict=True)]
        return {
            "tokens": _pack(indices, "<u4"),
            "chosen": _run_lengths(turn.chosen),
            "tool": strings(turn.tool),
            "error": bool(turn.error),
            "reward": _finite(turn.reward),
            "calls": [encode_call(call) for call in turn.calls],
            **{name: encode_quantity(turn, name) for name in QUANTITIES},
        }

    return {
        "answers": [strings(answer) for answer in trajectory.answers],
        "reason": strings(trajectory.reason),
        "reward_reason": strings(trajectory.reward_reason),
        "parts": {name: _finite(value) for name, value in trajectory.parts.items()},
        "calls": [encode_call(call) for call in trajectory.calls],
        "turns": [encode_turn(turn) for turn in trajectory.turns],
    }


def _of_chosen(turn: PageTurn, name: str) -> np.ndarray:
    """A quantity of the chosen tokens."""
    chosen_l = np.asarray(turn.chosen, bool)
    return np.broadcast_to(np.asarray(getattr(turn, name), np.float32), chosen_l.shape)[chosen_l]


def _pack(values: Any, dtype: str) -> str:
    return base64.b64encode(np.asarray(values).astype(dtype).tobytes()).decode()


def _run_lengths(chosen_l: np.ndarray) -> list[int]:
    """Lengths of alternating runs of context and chosen tokens: [0, 3] are three chosen tokens."""
    chosen_l = np.asarray(chosen_l, bool)
    ends = np.flatnonzero(np.diff(chosen_l, prepend=False, append=not chosen_l[-1] if chosen_l.size else True))
    return np.diff(ends, prepend=0).tolist()


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _check_lengths(turn: PageTurn, place: str) -> None:
    """Raise `BadInput` unless the arrays of a turn have the same length."""
    shapes = {name: np.shape(getattr(turn, name)) for name in ("tokens", "chosen", "logp")}
    shapes["pieces"] = (len(turn.pieces),)
    shapes |= {name: np.shape(x) for name in QUANTITIES if np.ndim(x := getattr(turn, name)) and x is not None}
    if len(set(shapes.values())) > 1:
        lengths = ", ".join(f"{name} {shape[0] if shape else 'none'}" for name, shape in shapes.items())
        raise BadInput(f"{place}: the lengths disagree: {lengths}")
