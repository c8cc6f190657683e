"""Status table of a cluster, printed in the terminal at intervals from the state of its master."""

import sys
import time
from collections import Counter

from flowgrpo.distributed.master import Master
from flowgrpo.report.progress import Progress, clock_time

PHASES = ("waiting", "rolling", "held", "rolled", "judging", "ready", "training")


class StatusTable:
    """A callback of the master that prints the table every `seconds`."""

    def __init__(self, seconds: float):
        self._seconds, self._printed_at = seconds, time.monotonic()
        self._tokens: dict[str, int] = {}  # by worker, at the last table
        self._progress = Progress(0)

    def __call__(self, master: Master) -> None:
        """Print the table, if it is time."""
        now = time.monotonic()
        if now - self._printed_at < self._seconds:
            return
        version, updates = master.state.version, master.plan.updates
        is_running = master.is_scheduling and version < updates
        seconds_left = self._progress.seconds_left("train", version, updates) if is_running else None
        lines = ["", *status_lines(master, seconds_left), *self._worker_lines(master, now - self._printed_at)]
        print("\n".join(lines), file=sys.stderr, flush=True)
        self._printed_at = now

    def _worker_lines(self, master: Master, seconds: float) -> list[str]:
        """A line for each worker: utilization, tokens per second since the last table, and current work."""

        def percent(fraction: float | None) -> str:
            return "      -" if fraction is None else f"{fraction:7.0%}"

        work = {call.worker: f"{call.method} {call.subject}" for call in master.workers.calls.values() if call.subject}
        lines = [f"  {'worker':16}{'process':>9}{'CPU':>7}{'GPU':>7}{'tokens/s':>10}  at"]
        for name, status in master.workers.status.items():
            new_tokens = status.tokens - self._tokens.get(name, 0)
            self._tokens[name] = status.tokens
            at = work.get(name, "") if status.is_ready else "starting"
            utilization = f"{percent(status.cpu_utilization)}{percent(status.heartbeat.gpu_utilization)}"
            lines.append(f"  {name:16}{status.pid:>9}{utilization}{new_tokens / seconds:10.0f}  {at}".rstrip())
        return lines


def status_lines(master: Master, seconds_left: float | None = None) -> list[str]:
    """Progress of a run: queues, staleness, time left, and metrics of the last update."""
    state, plan, metrics = master.state, master.plan, master.last_metrics
    phases = Counter(group.phase for group in state.groups.values())
    queues = ", ".join(f"{phases[phase]} {phase}" for phase in PHASES if phases[phase]) or "nothing under way"
    staleness = Counter(state.version - group.start_version for group in state.groups.values())
    behind = ", ".join(f"{count} of {age}" for age, count in sorted(staleness.items())) or "none"
    time_left = "" if seconds_left is None else f"; {clock_time(seconds_left)} left"
    lines = [f"update {state.version} of {plan.updates} ({plan.name}): {queues}; versions behind: {behind}{time_left}"]
    if "zero_signal_groups" in metrics:
        zero_signal, success = metrics["zero_signal_groups"], metrics["success"]
        lines.append(f"  last update: success {success:.3f}, groups without a signal {zero_signal:.0%}")
    return lines
