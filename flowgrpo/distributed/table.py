"""Table of what a cluster is doing, printed in the terminal every so many seconds from the state of its master."""

import sys
import time
from collections import Counter

from flowgrpo.distributed.master import Master
from flowgrpo.report.progress import Progress, clock_time

PHASES = ("waiting", "rolling", "held", "rolled", "judging", "ready", "training")


class StatusTable:
    """Says what goes on when it is called and the last time was long ago."""

    def __init__(self, seconds: float):
        self._seconds, self._last = seconds, time.monotonic()
        self._tokens: dict[str, int] = {}
        self._progress = Progress(0)

    def __call__(self, master: Master) -> None:
        """Show the table, if it is time."""
        now = time.monotonic()
        if now - self._last < self._seconds:
            return
        version, updates = master.state.version, master.plan.updates
        left = self._progress.left("train", version, updates) if master.going and version < updates else None
        print(
            "\n".join(["", *status_lines(master, left), *self._workers(master, now - self._last)]),
            file=sys.stderr,
            flush=True,
        )
        self._last = now

    def _workers(self, master: Master, took: float) -> list[str]:
        """Format what each worker does, and how busy it is, a line each; tokens a second since the last table."""
        doing = {call.worker: f"{call.method} {call.what}" for call in master.workers.calls.values() if call.what}
        lines = [f"  {'worker':16}{'process':>9}{'CPU':>7}{'GPU':>7}{'tokens/s':>10}  at"]
        for name, seen in master.workers.seen.items():
            new = seen.tokens - self._tokens.get(name, 0)
            self._tokens[name] = seen.tokens
            at = doing.get(name, "") if seen.there else "starting"
            shares = f"{_share(seen.cpu)}{_share(seen.heartbeat.gpu)}"
            lines.append(f"  {name:16}{seen.pid:>9}{shares}{new / took:10.0f}  {at}".rstrip())
        return lines


def status_lines(master: Master, left: float | None = None) -> list[str]:
    """Format where the run stands: queues, staleness, the time `left` in seconds, and what the last update was like."""
    state, plan, figures = master.state, master.plan, master.figures
    phases = Counter(group.phase for group in state.groups.values())
    queues = ", ".join(f"{phases[phase]} {phase}" for phase in PHASES if phases[phase]) or "nothing under way"
    stale = Counter(state.version - group.began for group in state.groups.values())
    ages = ", ".join(f"{count} of {age}" for age, count in sorted(stale.items())) or "none"
    time_left = "" if left is None else f"; {clock_time(left)} left"
    lines = [f"update {state.version} of {plan.updates} ({plan.name}): {queues}; versions behind: {ages}{time_left}"]
    if "zero_signal_groups" in figures:
        dead, success = figures["zero_signal_groups"], figures["success"]
        lines.append(f"  last update: success {success:.3f}, groups without a signal {dead:.0%}")
    return lines


def _share(value: float | None) -> str:
    return "      -" if value is None else f"{value:7.0%}"
