"""The code in an answer: of several fenced blocks, the one that the tests call and the earlier ones that it needs.

An answer often shows an example after its code, or its code in parts. The names that a block defines and uses are
determined in the sandbox, because parsing a model's text may take unbounded time; nothing of it is run there.
"""

import json
import re
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

MAX_BLOCKS = 64  # of an answer, the last ones
INPUT_CALLS = re.compile(r"\binput\s*\(|\bstdin\b|\bopen\s*\(\s*0\b")


class Block(NamedTuple):
    """A fenced block."""

    source: str
    defines: frozenset[str]  # names, at its top level
    uses: frozenset[str]  # names that are defined elsewhere
    acts: bool  # it does more than define names

    @property
    def reads(self) -> bool:
        return bool(INPUT_CALLS.search(self.source))


def find_blocks(output: str) -> list[str]:
    """Fenced blocks of Python, else all fenced blocks, else the whole output; the last fence may be open."""
    blocks: list[tuple[str, list[str]]] = []
    is_inside = False
    for line in output.splitlines(keepends=True):
        fence = line.strip()
        if fence.startswith("```") and (not is_inside or fence == "```"):
            is_inside = not is_inside
            if is_inside:
                blocks.append((fence[3:].strip().lower(), []))
        elif is_inside:
            blocks[-1][1].append(line)
    python = [lines for info, lines in blocks if info.split(" ")[0] in ("python", "py", "python3")]
    chosen = python or [lines for info, lines in blocks]
    return ["".join(lines) for lines in chosen[-MAX_BLOCKS:]] or [output]


def find_code(
    output: str, names: Callable[[], Collection[str]], describe: Callable[[Sequence[str]], list[Block | None]]
) -> str:
    """Find the code in an answer.

    Args:
        output: The answer.
        names: Returns the names that the tests call; none if they compare what the program prints.
        describe: Parses blocks; None for a block that is no Python.
    """
    sources = find_blocks(output)
    if len(sources) == 1:
        return sources[0]
    described = [block for block in describe(sources) if block is not None]
    if not described:
        return sources[-1]
    called_names, dependencies = frozenset(names()), _dependencies(described)
    chosen = _choose_by_names(described, called_names) if called_names else [_choose_program(described, dependencies)]
    return "\n".join(described[number].source for number in sorted(_with_dependencies(chosen, dependencies)))


def _choose_by_names(blocks: Sequence[Block], names: frozenset[str]) -> list[int]:
    """The last block that defines all names, else all that define some, else the last."""
    complete = [number for number, block in enumerate(blocks) if names <= block.defines]
    partial = [number for number, block in enumerate(blocks) if names & block.defines]
    return complete[-1:] or partial or [len(blocks) - 1]


def _choose_program(blocks: Sequence[Block], dependencies: Sequence[set[int]]) -> int:
    """The block that is the program: an example of another block reads no input, but needs that block."""
    acting = [number for number, block in enumerate(blocks) if block.acts]
    preferences = (
        [number for number in acting if blocks[number].reads],
        [
            number
            for number in acting
            if any(blocks[other].reads for other in _with_dependencies([number], dependencies))
        ],
        [number for number in acting if not dependencies[number]],
        acting or range(len(blocks)),
    )
    return next(numbers[-1] for numbers in preferences if numbers)


def _dependencies(blocks: Sequence[Block]) -> list[set[int]]:
    """For each block the earlier ones that define the names it uses, each in its latest definition."""
    latest: dict[str, int] = {}
    dependencies = []
    for number, block in enumerate(blocks):
        dependencies.append({latest[name] for name in block.uses if name in latest})
        latest |= dict.fromkeys(block.defines, number)
    return dependencies


def _with_dependencies(chosen: Sequence[int], dependencies: Sequence[set[int]]) -> set[int]:
    """The chosen blocks and those that they need, directly or through others."""
    needed, pending = set(), list(chosen)
    while pending:
        number = pending.pop()
        if number not in needed:
            needed.add(number)
            pending += dependencies[number]
    return needed


def read_blocks(sources: Sequence[str], output: str) -> list[Block | None]:
    """Parse the output of `describe_blocks`, a line for each block."""
    blocks: list[Block | None] = []
    for source, line in zip(sources, output.splitlines(), strict=False):
        description = json.loads(line)
        blocks.append(
            description and Block(source, frozenset(description[0]), frozenset(description[1]), description[2])
        )
    return blocks
