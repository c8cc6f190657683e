"""Simulation of a cluster in virtual time, with the real schedule: costs in, utilization and staleness out.

    result = simulate(plan, Costs(...), workers=1000, capacity=4, seed=0)

Nothing runs: every command of `schedule.advance` becomes an event after as long as it would have taken, and time jumps
from one event to the next. So ten thousand workers fit on a laptop, and a schedule can be tried before paying for it.
"""

import heapq
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from flowgrpo.distributed import schedule
from flowgrpo.distributed.cluster_state import ClusterState
from flowgrpo.distributed.schedule import REWARD, ROLLOUT, Command, Event, Plan


class Costs(NamedTuple):
    """Durations in seconds, and lengths of trajectories in tokens."""

    lengths: Callable[[np.random.Generator], np.ndarray]  # of the trajectories of a group
    token_seconds: float  # of a token of a trajectory
    judge_seconds: Callable[[np.random.Generator], float]  # of a group
    train_seconds: float  # of an update
    overhead_seconds: float = 0.0  # of a slice, besides its tokens: prefill, messages
    master_seconds: float = 0.0  # of an event, which the master handles one after another


class SimulationResult(NamedTuple):
    """Measurements of a simulated run; seconds are of virtual time."""

    seconds: float
    updates: int
    events: int
    rollout_utilization: float  # fraction of the rollout workers' capacity
    training: float  # fraction of the time in which the trainer worked
    master: float  # fraction of the time in which the master worked
    staleness: float  # mean over groups, in versions
    max_staleness: int
    iteration_seconds: float  # median time from update to update
    longest_seconds: float  # median over updates of the time of its longest trajectory alone
    reused: float  # fraction of tokens that resumed trajectories had before their last slice


def simulate(
    plan: Plan, costs: Costs, *, workers: int, capacity: int = 1, judges: int = 1, seed: int = 0
) -> SimulationResult:
    """Simulate the whole run of a plan.

    Args:
        plan: the schedule.
        costs: durations and lengths.
        workers: number of rollout workers.
        capacity: number of groups that a rollout worker works on at a time.
        judges: number of reward workers.
        seed: of the random durations and lengths.
    """
    return _Simulation(plan, costs, np.random.default_rng(seed)).run(workers, capacity, judges)


class _Simulation:
    """Virtual time, and what is under way in it."""

    def __init__(self, plan: Plan, costs: Costs, rng: np.random.Generator):
        self.plan, self.costs, self.rng = plan, costs, rng
        self.state, self.now = ClusterState(), 0.0
        self.master_free_at = 0.0
        self.queue: list[tuple[float, int, Event]] = []  # (time, order, event)
        self.num_scheduled, self.num_events = 0, 0
        self.lengths: dict[int, np.ndarray] = {}  # by group: tokens of each trajectory
        self.done: dict[int, np.ndarray] = {}  # by group that was cut: tokens of each trajectory so far
        self.rollout_seconds, self.train_seconds, self.tokens, self.reused = 0.0, 0.0, 0, 0
        self.update_times: list[float] = []
        self.longest_seconds: list[float] = []  # by update
        self.staleness: list[int] = []  # by group

    def run(self, workers: int, capacity: int, judges: int) -> SimulationResult:
        """Run to the last update."""
        for index in range(judges):
            self._advance(Event("joined", f"{REWARD}-{index}", pool=REWARD))
        for index in range(workers):
            self._advance(Event("joined", f"{ROLLOUT}-{index}", pool=ROLLOUT, capacity=capacity))
        while not schedule.is_over(self.plan, self.state):
            self.now, _, event = heapq.heappop(self.queue)
            if event.kind == "trained":
                self.update_times.append(self.now)
            self._advance(event)
        total = max(self.now, 1e-12)
        return SimulationResult(
            seconds=self.now,
            updates=len(self.update_times),
            events=self.num_events,
            rollout_utilization=self.rollout_seconds / (total * workers * capacity),
            training=self.train_seconds / total,
            master=self.num_events * self.costs.master_seconds / total,
            staleness=float(np.mean(self.staleness)),
            max_staleness=max(self.staleness),
            iteration_seconds=float(np.median(np.diff([0.0, *self.update_times]))),
            longest_seconds=float(np.median(self.longest_seconds)),
            reused=self.reused / max(self.tokens, 1),
        )

    def _advance(self, event: Event) -> None:
        """Handle an event when the master is free, and schedule the events that its commands lead to."""
        self.num_events += 1
        self.master_free_at = max(self.master_free_at, self.now) + self.costs.master_seconds
        self.state, commands = schedule.advance(self.plan, self.state, event)
        for command in commands:
            seconds, result = self._execute(command)
            if result is not None:
                self.num_scheduled += 1
                heapq.heappush(self.queue, (self.master_free_at + seconds, self.num_scheduled, result))

    def _execute(self, command: Command) -> tuple[float, Event | None]:
        """(duration of a command, the event at its end)."""
        number = command.groups[0]
        if command.kind == "train":
            self.train_seconds += self.costs.train_seconds
            lengths = [self.lengths.pop(group) for group in command.groups]
            longest = float(max(group_lengths.max() for group_lengths in lengths))
            self.longest_seconds.append(longest * self.costs.token_seconds)
            self.staleness += [self.state.version - self.state.groups[group].start_version for group in command.groups]
            return self.costs.train_seconds, Event("trained")
        if command.kind == "judge":
            return self.costs.judge_seconds(self.rng), Event("judged", command.worker, number, command.ticket)
        if command.kind == "drop":
            return 0.0, None
        if number not in self.lengths:
            self.lengths[number] = self.costs.lengths(self.rng)
        lengths = self.lengths[number]
        before = self.done.get(number, np.zeros_like(lengths))
        remaining = lengths - before
        new_tokens = remaining if command.budget is None else np.minimum(remaining, command.budget)
        seconds = float(new_tokens.max()) * self.costs.token_seconds + self.costs.overhead_seconds
        self.rollout_seconds += seconds
        self.tokens += int(new_tokens.sum())
        self.done[number] = before + new_tokens
        if np.any(self.done[number] < lengths):
            return seconds, Event("cut", command.worker, number, command.ticket)
        self.reused += int(before[before < lengths].sum())
        self.done.pop(number)
        return seconds, Event("rolled", command.worker, number, command.ticket, pool=REWARD)
