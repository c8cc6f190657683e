"""What a run shows in a notebook: one live bar while it lasts, and pictures.

    display = kernel_display()      publishes to the cell; None outside of a Jupyter kernel
    bar = LiveBar(display)
    bar.draw(12, 150, "train  12/150  success 0.54")

A kernel has IPython loaded, so nothing is imported or required elsewhere.
"""

import base64
import html
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

SECONDS = 0.2  # between two drawings of a bar: a browser is slower than an update of a small model

Display = Callable[..., Any]  # IPython.display.display


def kernel_display() -> Display | None:
    """IPython's `display` in a Jupyter kernel; None in a terminal, a script or a plain IPython shell."""
    ipython = sys.modules.get("IPython")
    if ipython is None or getattr(ipython.get_ipython(), "kernel", None) is None:
        return None
    return import_module("IPython.display").display


class LiveBar:
    """A bar with a line of text, at one place of a cell's output."""

    def __init__(self, display: Display, *, clock: Callable[[], float] = time.monotonic):
        self._display, self._clock = display, clock
        self._handle: Any = None  # of the display, from the first drawing on
        self._drawn_at = 0.0
        self._pending: dict[str, str] | None = None  # the newest drawing, if it has not been shown

    def draw(self, done: int, total: int, text: str) -> None:
        """Show `text` beside a bar of which `done` of `total` is full; not sooner than `SECONDS` after the last one."""
        bar = f'<progress value="{done}" max="{max(total, 1)}" style="width:12em"></progress>'
        line = f"<code>{html.escape(text)}</code>"
        self._pending = {"text/html": f"{bar} {line}", "text/plain": text}
        if self._handle is None or done >= total or self._clock() - self._drawn_at >= SECONDS:
            self.flush()

    def flush(self) -> None:
        """Show the newest drawing now."""
        if self._pending is None:
            return
        if self._handle is None:
            self._handle = self._display(self._pending, raw=True, display_id=True)
        else:
            self._handle.update(self._pending, raw=True)
        self._drawn_at, self._pending = self._clock(), None


def show_picture(path: str | Path) -> None:
    """Show a PNG file below the cell; nothing outside of a Jupyter kernel."""
    display = kernel_display()
    if display is not None:
        picture = base64.b64encode(Path(path).read_bytes()).decode()
        display({"image/png": picture, "text/plain": str(path)}, raw=True)
