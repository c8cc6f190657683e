"""Closing message of a run: what it wrote, and what can be done with it, one command a line."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def closing_message(written: str, next_steps: Sequence[tuple[str, str]]) -> str:
    """Format the closing message: what was written, and a line for each next step, a (command, purpose)."""
    width = max((len(command) for command, _ in next_steps), default=0)
    steps = [f"    {command:<{width}}  # {purpose}" for command, purpose in next_steps]
    return "\n".join(["", written, *(["next:", *steps] if steps else [])])


def command(name: str, **flags: Any) -> str:
    """A command line with these flags, for a shell, in a checkout or with the package installed."""
    return " ".join([f"python -m flowgrpo {name}", *(f"--{key}={shlex.quote(str(x))}" for key, x in flags.items())])


def list_contents(folder: Path) -> str:
    """Names of the files in a folder, sorted, folders with a slash; hidden files are left out."""
    paths = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    return ", ".join(f"{path.name}/" if path.is_dir() else path.name for path in paths)


def training_message(folder: Path, updates: int, *, can_evaluate: bool, can_export: bool = True) -> str:
    """The closing message of a reinforcement run: what it wrote, and its next steps by commands.

    Args:
        folder: of the run.
        updates: that it has made.
        can_evaluate: whether the command `evaluate` can test it.
        can_export: whether the commands `view` and `export` can read its planner.
    """
    evaluate = [(command("evaluate", workdir=folder), "tests it on fresh tasks")] if can_evaluate else []
    read = [
        (command("view", workdir=folder), "shows its trajectories as a page"),
        (command("export", workdir=folder, out=folder / "model"), "writes the planner for transformers"),
    ]
    return closing_message(
        f"written to {folder}: {list_contents(folder)}",
        [
            *evaluate,
            *(read if can_export else []),
            ("the same command with more --updates, or call with more updates=", f"resumes from update {updates}"),
        ],
    )
