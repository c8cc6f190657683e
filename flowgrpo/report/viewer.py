"""Trajectories as one page to read: `Shown` flow in, an HTML file that needs nothing else flows out.

    viewer([shown(one, speller(text)) for one in played], "rollouts.html", title="agentflow, seed 0")

The page lists trajectories with filters, shows the turns of one, or of two of the same task side by side, and colours
every token by what is chosen: mask, log-probability, advantage, ratio, weight version. It loads nothing from anywhere,
and its policy for content forbids that; what was recorded is data to it, and is never read as HTML.
"""

import base64
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from flowgrpo.files import make_folder, write_whole
from flowgrpo.report.shown import Shown, columns
from flowgrpo.types import BadInput

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
    data = columns(shown) | {"lacking": LACKING | dict(lacking or {}), "names": dict(names or {})}
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
