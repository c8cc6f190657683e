"""Run a command of a folder by name, or list all with their docstrings, which are parsed without importing.

A command is a module with an `if __name__ == "__main__":`. One without a group is listed under "Others"; a test ensures
that there is none.
"""

import ast
import difflib
import runpy
import signal
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from flowgrpo import __version__

from .help import HELP, USAGE, page_width, shown_command

Groups = Mapping[str, Sequence[str]]
MARGIN = 14  # columns of the names
OTHERS = "Others"


def commands(folder: Path) -> dict[str, str]:
    """The docstrings of the commands in a folder, by name."""
    docs = {}
    for path in sorted(folder.glob("[!_]*.py")):
        tree = ast.parse(path.read_text())
        if any(isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'" for node in tree.body):
            docs[path.stem] = ast.get_docstring(tree) or ""
    return docs


def group_commands(names: Sequence[str], groups: Groups) -> dict[str, list[str]]:
    """The existing names by group, in its order, then the others."""
    by_title = {title: [name for name in members if name in names] for title, members in groups.items()}
    in_groups = {name for members in groups.values() for name in members}
    by_title[OTHERS] = [name for name in names if name not in in_groups]
    return {title: members for title, members in by_title.items() if members}


def listing_page(package: str, docs: Mapping[str, str], groups: Groups, *, width: int) -> str:
    """A line for each command, under the titles of their groups."""
    example = shown_command(f"python -m {package}.NAME --help")
    parts = [f"{example} says what a command does, what to expect of it, and its flags."]
    for title, names in group_commands(list(docs), groups).items():
        parts.append("\n".join([f"{title}:", *(_line(name, docs[name], width) for name in names)]))
    return "\n\n".join(parts)


def _line(name: str, doc: str, width: int) -> str:
    first, indent = doc.partition("\n")[0], " " * (2 + MARGIN)
    return textwrap.fill(first, width, initial_indent=f"  {name:<{MARGIN}}", subsequent_indent=indent)


def run_or_list(package: str, folder: Path, groups: Groups, arguments: Sequence[str], *, ending: str = "") -> int:
    """Run the command named by the first argument, with the others as its flags; without any, list all."""
    name, *rest = [*arguments, ""]
    docs = commands(folder)
    if name in docs or (name and (folder / name / "__main__.py").is_file()):  # a folder of commands
        sys.argv[1:] = rest[:-1]
        runpy.run_module(f"{package}.{name}", run_name="__main__", alter_sys=True)
        return 0
    if name == "--version":
        print(f"flowgrpo {__version__}")
        return 0
    if name and name not in HELP:
        print(f"{package.replace('.experiments', '')}: {_unknown(package, name, docs)}", file=sys.stderr)
        return USAGE
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it silently
    print("\n\n".join(filter(None, [listing_page(package, docs, groups, width=page_width()), shown_command(ending)])))
    return 0


def _unknown(package: str, word: str, docs: Mapping[str, str]) -> str:
    """One sentence with a suggestion for a word that names no command."""
    if word.startswith("-"):
        return f"{word} has no command before it: {shown_command(f'python -m {package}.NAME {word}')}"
    near = difflib.get_close_matches(word, docs, n=1)
    if near:
        return f"{word!r} is no command; did you mean {near[0]} ({shown_command(f'python -m {package}.{near[0]}')})?"
    return f"{word!r} is no command; without a name all are listed"
