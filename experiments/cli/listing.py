"""The commands of a folder: run the one that is named, or list all by their docstrings, which are read, not imported.

A command is a module with an `if __name__ == "__main__":`. One that is in no group is listed under "Others"; a test
sees to it that there is none.
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
    """The docstrings of the commands in a folder, by their names."""
    found = {}
    for path in sorted(folder.glob("[!_]*.py")):
        tree = ast.parse(path.read_text())
        if any(isinstance(node, ast.If) and _asks_for_main(node.test) for node in tree.body):
            found[path.stem] = ast.get_docstring(tree) or ""
    return found


def _asks_for_main(test: ast.expr) -> bool:
    return ast.unparse(test) == "__name__ == '__main__'"


def grouped(names: Sequence[str], groups: Groups) -> dict[str, list[str]]:
    """The names that are there by their group, in its order, and the others."""
    found = {title: [name for name in members if name in names] for title, members in groups.items()}
    placed = {name for members in groups.values() for name in members}
    found[OTHERS] = [name for name in names if name not in placed]
    return {title: members for title, members in found.items() if members}


def listing_page(package: str, docs: Mapping[str, str], groups: Groups, *, width: int) -> str:
    """A line for each command, under the titles of their groups."""
    example = shown_command(f"python -m {package}.NAME --help")
    parts = [f"{example} says what a command does, what to expect of it, and its flags."]
    for title, names in grouped(list(docs), groups).items():
        parts.append("\n".join([f"{title}:", *(_line(name, docs[name], width) for name in names)]))
    return "\n\n".join(parts)


def _line(name: str, doc: str, width: int) -> str:
    first, indent = doc.partition("\n")[0], " " * (2 + MARGIN)
    return textwrap.fill(first, width, initial_indent=f"  {name:<{MARGIN}}", subsequent_indent=indent)


def run_or_list(package: str, folder: Path, groups: Groups, arguments: Sequence[str], *, ending: str = "") -> int:
    """Run the command that the first argument names, with the others as its flags; list all where there is none."""
    name, *rest = [*arguments, ""]
    docs = commands(folder)
    if name in docs or (name and (folder / name / "__main__.py").is_file()):  # which lists others
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
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a word
    print("\n\n".join(filter(None, [listing_page(package, docs, groups, width=page_width()), shown_command(ending)])))
    return 0


def _unknown(package: str, word: str, docs: Mapping[str, str]) -> str:
    """Say what to call in the place of a word that names no command."""
    if word.startswith("-"):
        return f"{word} has no command before it: {shown_command(f'python -m {package}.NAME {word}')}"
    near = difflib.get_close_matches(word, docs, n=1)
    if near:
        return f"{word!r} is no command; did you mean {near[0]} ({shown_command(f'python -m {package}.{near[0]}')})?"
    return f"{word!r} is no command; without a name all are listed"
