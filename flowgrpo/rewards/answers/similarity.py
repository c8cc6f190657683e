"""Similarity of an answer to gold: `similarity` pays how much of the two texts is alike, raised to a power.

    ratio = 2 M / (len(answer) + len(gold)),   M the characters in the blocks that both share (Ratcliff and Obershelp)

As `difflib.SequenceMatcher` computes it, and as the environments reverse-text (power 1) and alphabet-sort (power 4) of
verifiers and prime-rl pay it. Only an answer that is exactly gold is paid 1.
"""

from collections.abc import Callable
from difflib import SequenceMatcher

from flowgrpo.contracts import Reward, Scored
from flowgrpo.rewards.answers.extract import LOOK, find_answer
from flowgrpo.types import BadInput, Task

MOST = LOOK  # characters of gold, as of an answer: the comparison's time grows with their product


def plain_list(text: str) -> str:
    """Write the items of a list, which commas or lines part, as one text that is compared: `Bo ,Al.` is `bo, al`."""
    items = [item.strip(" .") for item in text.lower().replace("\n", ",").split(",")]
    return ", ".join(item for item in items if item)


def similarity(*, power: float = 1.0, spell: Callable[[str], str] = str.strip) -> Reward:
    """Give the similarity of the final answer to the gold answer that is nearest, raised to a power.

    Args:
        power: above 1 what is nearly right is paid less, and what is right still 1.
        spell: writes an answer, and gold, as the text that is compared, such as `plain_list`.
    """
    if not power > 0:
        raise BadInput(f"similarity: power is {power}, but must be above 0")

    def score(task: Task, output: str) -> Scored:
        golds = [spell(gold) for gold in task.answers if gold.strip()]
        if not golds:
            return Scored(None, f"task {task.id!r} has no gold answer: give it one")
        if max(map(len, golds)) > MOST:
            return Scored(None, f"task {task.id!r}: a gold answer is longer than {MOST} characters; shorten it")
        found = find_answer(output)
        answer = spell(found.text)
        if not answer:
            return Scored(0.0, "no answer: the output is empty" if not output.strip() else "no answer was found")
        ratio = max(SequenceMatcher(None, answer, gold).ratio() for gold in golds)
        value = ratio**power
        return Scored(value, f"similarity {ratio:.3f}, in the {found.where}: {answer[:60]!r}", {"similarity": ratio})

    return Reward(score)
