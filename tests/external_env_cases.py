"""TRL-style environments: a counter that must reach a target, with tools that fail, and one that can't be reset."""

import os
import time


class Counter:
    """Counts; the reward is 1 if the final count is the target."""

    def reset(self, target: int = 3, **_) -> str:
        """State the goal."""
        self.count, self.target = 0, target
        return f"Count to {target}."

    def add(self, amount: int, note: str = "") -> str:
        """Add to the counter.

        Args:
            amount: how much
            note: why
        """
        self.count += amount
        return f"the count is {self.count}{note and ': '}{note}"

    def hang(self) -> str:
        """Never answer."""
        time.sleep(600)
        return ""

    def die(self) -> str:
        """End the process."""
        os._exit(5)

    def get_reward(self) -> float:
        """1 if the count is the target."""
        return float(self.count == self.target)

    def _hidden(self) -> str:
        return "no tool"


class Broken:
    """Can't be reset."""

    def reset(self):
        """Fail."""
        raise RuntimeError("no licence")
