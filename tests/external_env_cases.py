"""A TRL-style environment: a counter that is to be brought to a number, with ways to go wrong."""

import os
import time


class Counter:
    """Counts; paid where it ends at the target."""

    def reset(self, target: int = 3, **_) -> str:
        """Say what is to be done."""
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
        """Pay for the target."""
        return float(self.count == self.target)

    def _hidden(self) -> str:
        return "no tool"


class Broken:
    """Can't be reset."""

    def reset(self):
        """Fail."""
        raise RuntimeError("no licence")
