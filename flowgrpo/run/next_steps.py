"""Closing message of a run: what it wrote, and what can be done with it, one command a line."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def ending(written: str, then: Sequence[tuple[str, str]]) -> str:
    """Format the closing message: what was written, and a line for each next step, a (command, what it is for)."""
    width = max((len(command) for command, _ in then), default=0)
    steps = [f"    {command:<{width}}  # {why}" for command, why in then]
    return "\n".join(["", written, *(["next:", *steps] if steps else [])])


def command(name: str, **values: Any) -> str:
    """The words of a command, as a shell takes them in a checkout and where the package was installed."""
    return " ".join([f"python -m flowgrpo {name}", *(f"--{key}={shlex.quote(str(x))}" for key, x in values.items())])


def contents(folder: Path) -> str:
    """List what lies in a folder, by name, with a slash behind folders; hidden files are left out."""
    paths = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    return ", ".join(f"{path.name}/" if path.is_dir() else path.name for path in paths)


def after_training(folder: Path, updates: int, *, evaluates: bool) -> str:
    """Compose the closing message of a run of reinforcement: what it wrote, and its next steps."""
    tested = [(command("evaluate", workdir=folder), "tests it on fresh tasks")] if evaluates else []
    return ending(
        f"written to {folder}: {contents(folder)}",
        [
            *tested,
            (command("view", workdir=folder), "shows its trajectories as a page"),
            (command("export", workdir=folder, out=folder / "model"), "writes the planner for transformers"),
            ("the same command with more --updates", f"goes on from update {updates}"),
        ],
    )
