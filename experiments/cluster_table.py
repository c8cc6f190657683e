"""What a cluster is doing, as a table in the terminal: the master flows in, lines flow out, every so many seconds."""

import os
import sys
import time
from collections import Counter

from flowgrpo.distributed.master import Master

PHASES = ("waiting", "rolling", "held", "rolled", "judging", "ready", "training")


class Table:
    """Says what goes on when it is called and the last time was long ago."""

    def __init__(self, seconds: float):
        self._seconds, self._last = seconds, time.monotonic()
        self._before: dict[str, tuple[int, float]] = {}

    def __call__(self, master: Master) -> None:
        """Show the table, if it is time."""
        now = time.monotonic()
        if now - self._last < self._seconds:
            return
        print(self.text(master, now - self._last), file=sys.stderr, flush=True)
        self._last = now

    def text(self, master: Master, took: float) -> str:
        """Queues, staleness, and what each worker does."""
        state, plan = master.state, master.plan
        phases = Counter(group.phase for group in state.groups.values())
        queues = ", ".join(f"{phases[phase]} {phase}" for phase in PHASES if phases[phase]) or "nothing under way"
        stale = Counter(state.version - group.began for group in state.groups.values())
        ages = ", ".join(f"{count} of {age}" for age, count in sorted(stale.items())) or "none"
        lines = [f"\nupdate {state.version} of {plan.updates} ({plan.name}): {queues}; versions behind: {ages}"]
        for name, seen in master.staff.seen.items():
            cpu = _cpu_seconds(seen.pid) if seen.there and seen.host == os.uname().nodename else None
            tokens, before = self._before.get(name, (0, 0.0))
            share = f"{(cpu - before) / took:6.0%}" if cpu is not None else "     -"
            self._before[name] = (seen.tokens, cpu or 0.0)
            calls = (call for call in master.staff.calls.values() if call.worker == name and call.method != "pending")
            at = next((f"{call.method} {call.what}" for call in calls), "") if seen.there else "starting"
            lines.append(
                f"  {name:16} pid {seen.pid:<8} {share} CPU {(seen.tokens - tokens) / took:8.0f} tokens/s  {at}"
            )
        return "\n".join(lines)


def _cpu_seconds(pid: int) -> float | None:
    """Processor time of a process of this machine so far; None where the system doesn't tell."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
