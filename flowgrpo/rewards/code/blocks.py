"""The code in an answer: of several fenced blocks, the one that the tests call, with what it needs of those before it.

An answer often shows an example after its code, or parts of the code one by one. Which names a block defines and uses
is found in the sandbox, because parsing what a model wrote may take any time; nothing of it is run there.
"""

import json
import re
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

MOST_BLOCKS = 64  # the last ones of an answer
READS = re.compile(r"\binput\s*\(|\bstdin\b|\bopen\s*\(\s*0\b")


class Block(NamedTuple):
    """A fenced block, the names that it defines at its top level and those that it takes from elsewhere."""

    source: str
    defines: frozenset[str]
    uses: frozenset[str]
    acts: bool  # it does more than define names

    @property
    def reads(self) -> bool:
        return bool(READS.search(self.source))


def find_blocks(output: str) -> list[str]:
    """Find the fenced blocks of Python, else all fenced blocks, else the whole; the last fence may be left open."""
    blocks: list[tuple[str, list[str]]] = []
    inside = False
    for line in output.splitlines(keepends=True):
        fence = line.strip()
        if fence.startswith("```") and (not inside or fence == "```"):
            inside = not inside
            if inside:
                blocks.append((fence[3:].strip().lower(), []))
        elif inside:
            blocks[-1][1].append(line)
    python = [lines for words, lines in blocks if words.split(" ")[0] in ("python", "py", "python3")]
    chosen = python or [lines for words, lines in blocks]
    return ["".join(lines) for lines in chosen[-MOST_BLOCKS:]] or [output]


def find_code(
    output: str, names: Callable[[], Collection[str]], describe: Callable[[Sequence[str]], list[Block | None]]
) -> str:
    """Find the code in an answer.

    Args:
        output: The answer.
        names: Gives the names that the tests call; none where they compare what the program prints.
        describe: Parses blocks; None stands for what is no Python.
    """
    sources = find_blocks(output)
    if len(sources) == 1:
        return sources[0]
    described = [block for block in describe(sources) if block is not None]
    if not described:
        return sources[-1]
    wanted, before = frozenset(names()), _blocks_before(described)
    chosen = _of_names(described, wanted) if wanted else [_of_program(described, before)]
    return "\n".join(described[number].source for number in sorted(_needed(chosen, before)))


def _of_names(blocks: Sequence[Block], wanted: frozenset[str]) -> list[int]:
    """Choose the last block that defines all names, else all that define some, else the last."""
    whole = [number for number, block in enumerate(blocks) if wanted <= block.defines]
    some = [number for number, block in enumerate(blocks) if wanted & block.defines]
    return whole[-1:] or some or [len(blocks) - 1]


def _of_program(blocks: Sequence[Block], before: Sequence[set[int]]) -> int:
    """Choose the block that is the program: an example of what stands in another one reads nothing, but needs it."""
    acting = [number for number, block in enumerate(blocks) if block.acts]
    preferences = (
        [number for number in acting if blocks[number].reads],
        [number for number in acting if any(blocks[other].reads for other in _needed([number], before))],
        [number for number in acting if not before[number]],
        acting or range(len(blocks)),
    )
    return next(numbers[-1] for numbers in preferences if numbers)


def _blocks_before(blocks: Sequence[Block]) -> list[set[int]]:
    """List for each block those before it that define what it uses, each name in its latest form."""
    latest: dict[str, int] = {}
    before = []
    for number, block in enumerate(blocks):
        before.append({latest[name] for name in block.uses if name in latest})
        latest |= dict.fromkeys(block.defines, number)
    return before


def _needed(chosen: Sequence[int], before: Sequence[set[int]]) -> set[int]:
    """Add to some blocks what they need, directly or through others."""
    needed, left = set(), list(chosen)
    while left:
        number = left.pop()
        if number not in needed:
            needed.add(number)
            left += before[number]
    return needed


def read_blocks(sources: Sequence[str], written: str) -> list[Block | None]:
    """Read what `describe_blocks` wrote about some blocks, line by line."""
    blocks: list[Block | None] = []
    for source, line in zip(sources, written.splitlines(), strict=False):
        made = json.loads(line)
        blocks.append(made and Block(source, frozenset(made[0]), frozenset(made[1]), made[2]))
    return blocks
