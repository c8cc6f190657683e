"""Trajectories for tests of the viewer: two turns with a tool and an error, before and after training."""

import numpy as np

from flowgrpo.report.trajectory_page import PageCall, PageTrajectory, PageTurn
from flowgrpo.types import Status

# Soft hyphen, Hangul filler, a letter as a tag, zero width, variation selector, blank Braille, half a pair, backwards.
INVISIBLE = "\u00ad\u3164\U000e0041\u200b\ufe0f\u2800\ud800\u202e"
MARKUP = "</script><script>document.title='stolen'</script><img src=x onerror=\"document.title='stolen'\">"
HOSTILE = f"{MARKUP}{INVISIBLE}back"


def named(text: str) -> str:
    """The text as the page shows it: invisible characters are replaced by their codes."""
    return "".join(f"⟨U+{ord(c):04X}⟩" if c in INVISIBLE else c for c in text)


def make_turn(action: str, prompt: str = "say it\n", **fields) -> PageTurn:
    """A turn with a token per word; the i-th token of the action has log-probability -i."""
    pieces = [f"{word} " for word in prompt.split(" ")] + [f"{word} " for word in action.split(" ")]
    count, chosen_count = len(pieces), len(action.split(" "))
    chosen = np.arange(count) >= count - chosen_count
    logp = np.where(chosen, -np.cumsum(chosen) + 1.0, 0.0)
    defaults = {"tokens": 100 + np.arange(count), "pieces": pieces, "chosen": chosen, "logp": logp, "version": 3}
    return PageTurn(**{**defaults, **fields})


def make_trajectory(task: str = "t0", **fields) -> PageTrajectory:
    """A trajectory that calls a tool, meets an error, and answers."""
    call = PageCall("tool", "calculator", {"expression": "2 +"}, "it is not complete", error=True)
    turns = [make_turn("Tool: calculator 2 +", tool="calculator", error=True, calls=(call,)), make_turn("answer 5")]
    defaults = {"turns": turns, "query": f"what is {task}?", "answers": ("5",), "domain": "mathematics", "output": "5"}
    return PageTrajectory(task, **{**defaults, "outcome": 1.0, "correct": True, "seconds": 1.5, **fields})


def make_many() -> list[PageTrajectory]:
    """Six tasks before and after training, of which the last three are solved after; then eight of an update."""
    lost = {"outcome": 0.25, "correct": False, "output": "7"}
    before = [make_trajectory(f"t{n}", phase="test before", group=n, **lost) for n in range(6)]
    after = [make_trajectory(f"t{n}", phase="test after", group=n, **({} if n > 2 else lost)) for n in range(6)]
    code = {"domain": "code", "phase": "train", "update": 4}
    turns = [
        make_turn("print(2)", tool="python", advantage=0.5, ratio=np.full(3, 1.25)),
        make_turn(
            "a b c", error=True, advantage=np.full(5, -1.0), ratio=np.full(5, 0.8), version=np.array([3, 3, 3, 3, 4])
        ),
        make_turn("end", advantage=-1.0, ratio=np.ones(3)),
    ]
    learned = [make_trajectory("c0", sample=n, turns=turns, **code) for n in range(6)]
    failed = {"outcome": None, "correct": False, "status": Status.VERIFIER_FAILURE, "output": None}
    odd = make_trajectory("c1", query=HOSTILE, turns=[make_turn("x", prompt=HOSTILE)], **code, **failed)
    return [*before, *after, *learned, odd, make_trajectory("c2", turns=(), **code, **failed, reason="never began")]
