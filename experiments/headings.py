"""Under which words a flag stands in --help: each one that is defined after `heading(words)`, up to the next of these.

heading("Sizes")
_QUERIES = flags.DEFINE_integer("queries", 32, "Queries of an update.", lower_bound=1)
"""

from collections.abc import Sequence

from absl import flags

HEADINGS = (  # in the order of --help
    "What is run",
    "The agents",
    "The cluster",
    "Sizes",
    "Learning",
    "Sampling",
    "Costs",
    "Devices and memory",
    "Files and resuming",
    "Every command",
)
_begun: list[tuple[str, int]] = []  # the words, and how many flags there were


def heading(words: str) -> None:
    """Let the flags that are defined from here on stand under these words, which are one of `HEADINGS`."""
    if words not in HEADINGS:
        raise ValueError(f"{words!r} is none of the headings: {', '.join(HEADINGS)}")
    _begun.append((words, len(flags.FLAGS)))


def under_headings(chosen: Sequence[flags.Flag]) -> dict[str, list[flags.Flag]]:
    """These flags by their heading, both in the order of --help; a flag without a heading is an error."""
    place = {name: number for number, name in enumerate(flags.FLAGS)}
    found: dict[str, list[flags.Flag]] = {words: [] for words in HEADINGS}
    for flag in sorted(chosen, key=lambda flag: place[flag.name]):
        found[next(words for words, first in reversed(_begun) if first <= place[flag.name])].append(flag)
    return {words: group for words, group in found.items() if group}
