"""Closing message of a run: what it wrote, and what can be done with it, one command a line."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def ending(written: str, then: Sequence[tuple[str, str]]) -> str:
    """Format the closing message: what was written, and a line for each next step, a (command, what it is for)."""
    width = max((len(command) for command, _ in then), default=0)
    steps = [f"    {command:<{width}}  # {why}" for command, why in then]
    return "\n".join(["", written, *(["next:", *steps] if steps else [])])


def command(name: str, **values: Any) -> str:
    """The words of a command of `experiments`, as a shell takes them."""
    return " ".join([f"python -m experiments.{name}", *(f"--{key}={shlex.quote(str(x))}" for key, x in values.items())])


def contents(folder: Path) -> str:
    """List what lies in a folder, by name, with a slash behind folders; hidden files are left out."""
    paths = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    return ", ".join(f"{path.name}/" if path.is_dir() else path.name for path in paths)


def after_training(folder: Path, settings: Mapping[str, Any]) -> str:
    """Compose the closing message of a run of reinforcement: what it wrote, and its next steps."""
    tested = [(command("evaluate", workdir=folder), "tests it on fresh tasks")] if is_evaluated(settings) else []
    return ending(
        f"written to {folder}: {contents(folder)}",
        [
            *tested,
            (command("view", workdir=folder), "shows its trajectories as a page"),
            (command("export", workdir=folder, out=folder / "model"), "writes the planner for transformers"),
            ("the same command with more --updates", f"goes on from update {settings['updates']}"),
        ],
    )


def is_evaluated(settings: Mapping[str, Any]) -> bool:
    """Whether `evaluate` knows runs with such settings."""
    return "env" in settings or "exam_turns" in settings
