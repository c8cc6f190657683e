"""The commands of a folder: their docstrings flow in, read and not imported, a page or a sentence flows out.

A command is a module with an `if __name__ == "__main__":`. One that is in no group is listed under "Others"; a test
sees to it that there is none.
"""

import ast
import difflib
import signal
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from .help import USAGE, page_width

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
    parts = [f"python -m {package}.NAME --help says what a command does, what to expect of it, and its flags."]
    for title, names in grouped(list(docs), groups).items():
        parts.append("\n".join([f"{title}:", *(_line(name, docs[name], width) for name in names)]))
    return "\n\n".join(parts)


def _line(name: str, doc: str, width: int) -> str:
    first, indent = doc.partition("\n")[0], " " * (2 + MARGIN)
    return textwrap.fill(first, width, initial_indent=f"  {name:<{MARGIN}}", subsequent_indent=indent)


def listing(package: str, folder: Path, groups: Groups, arguments: Sequence[str], *, ending: str = "") -> int:
    """Print all commands, or what a named one does -> the status; an unknown name is answered with the nearest one."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a word
    docs = commands(folder)
    names = [word for word in arguments if word not in ("--help", "-h")]
    unknown = [name for name in names if name not in docs]
    if unknown:
        print(f"{package}: {_unknown(package, unknown[0], names, docs)}", file=sys.stderr)
        return USAGE
    for name in names:
        print(f"{docs[name]}\n\nIts flags: python -m {package}.{name} --help")
    if not names:
        print("\n\n".join(filter(None, [listing_page(package, docs, groups, width=page_width()), ending])))
    return 0


def _unknown(package: str, word: str, names: Sequence[str], docs: Mapping[str, str]) -> str:
    """Say what to call in the place of a word that names no command."""
    if word.startswith("-"):
        named = next((name for name in names if name in docs), "NAME")
        return f"{word} is a flag, and this lists commands: python -m {package}.{named} {word}"
    near = difflib.get_close_matches(word, docs, n=1)
    hint = f"; did you mean {near[0]} (python -m {package}.{near[0]})?" if near else f": python -m {package} lists them"
    return f"{word!r} is none of its commands{hint}"
