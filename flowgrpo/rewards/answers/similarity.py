"""Similarity of an answer to gold: `similarity` is the matching fraction of the two texts, raised to a power.

    ratio = 2 M / (len(answer) + len(gold)),   M the characters in the blocks that both share (Ratcliff and Obershelp)

This is `difflib.SequenceMatcher.ratio`, the reward of the environments reverse-text (power 1) and alphabet-sort
(power 4) of verifiers and prime-rl. Only an answer that is exactly gold scores 1.
"""

from collections.abc import Callable
from difflib import SequenceMatcher

from flowgrpo.contracts import Reward, RewardResult
from flowgrpo.rewards.answers.extract import MAX_TAIL, find_answer
from flowgrpo.types import BadInput, Task

MAX_GOLD = MAX_TAIL  # characters, as of an answer: the time of the comparison grows with the product of the lengths


def plain_list(text: str) -> str:
    """Normalise a list separated by commas or newlines: `Bo ,Al.` is `bo, al`."""
    items = [item.strip(" .") for item in text.lower().replace("\n", ",").split(",")]
    return ", ".join(item for item in items if item)


def similarity(*, power: float = 1.0, spell: Callable[[str], str] = str.strip) -> Reward:
    """Similarity of the final answer to the most similar gold answer, raised to a power.

    Args:
        power: Above 1, a nearly right answer scores less; a right one still scores 1.
        spell: Normalises an answer and gold before they are compared, such as `plain_list`.
    """
    if not power > 0:
        raise BadInput(f"similarity: power is {power}, but must be above 0")

    def score(task: Task, output: str) -> RewardResult:
        golds = [spell(gold) for gold in task.answers if gold.strip()]
        if not golds:
            return RewardResult(None, f"task {task.id!r} has no gold answer: give it one")
        if max(map(len, golds)) > MAX_GOLD:
            return RewardResult(
                None, f"task {task.id!r}: a gold answer is longer than {MAX_GOLD} characters; shorten it"
            )
        found_answer = find_answer(output)
        answer = spell(found_answer.text)
        if not answer:
            return RewardResult(0.0, "no answer: the output is empty" if not output.strip() else "no answer was found")
        ratio = max(SequenceMatcher(None, answer, gold).ratio() for gold in golds)
        value = ratio**power
        return RewardResult(
            value, f"similarity {ratio:.3f}, in the {found_answer.source}: {answer[:60]!r}", {"similarity": ratio}
        )

    return Reward(score)
