"""A cluster in virtual time: how long things take flows in, how busy everybody is flows out; the schedule is real.

    figures = simulate(plan, Costs(...), workers=1000, room=4, seed=0)

Nothing runs: every command of `schedule.advance` becomes an event after as long as it would have taken, and time jumps
from one to the next. So ten thousand workers fit on a laptop, and what a schedule would do there can be seen before
anybody pays for it.
"""

import heapq
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from flowgrpo.distributed import schedule
from flowgrpo.distributed.cluster_state import ClusterState
from flowgrpo.distributed.schedule import REWARD, ROLLOUT, Command, Event, Plan


class Costs(NamedTuple):
    """How long things take, in seconds; and how long trajectories are, in tokens."""

    lengths: Callable[[np.random.Generator], np.ndarray]  # of the trajectories of a group
    token_seconds: float  # of a trajectory's token, while its worker's room is taken
    judge_seconds: Callable[[np.random.Generator], float]  # of a group
    train_seconds: float  # of an update
    overhead_seconds: float = 0.0  # of a stretch, beside its tokens: prefill, messages
    master_seconds: float = 0.0  # of an event: what one master can't do in parallel


class Figures(NamedTuple):
    """Measurements of a simulated run; its seconds are of virtual time."""

    seconds: float
    updates: int
    events: int
    utilisation: float  # share of the rollout workers' room that was taken
    training: float  # share of the time in which the trainer worked
    master: float  # share of the time in which the master worked
    staleness: float  # versions, in the mean over groups
    stalest: int
    iteration_seconds: float  # median, from update to update
    longest_seconds: float  # median over updates of what its longest trajectory took by itself
    reused: float  # share of tokens that trajectories which went on had from before their last stretch


def simulate(plan: Plan, costs: Costs, *, workers: int, room: int = 1, judges: int = 1, seed: int = 0) -> Figures:
    """The whole run of a plan on so many workers."""
    return _World(plan, costs, np.random.default_rng(seed)).run(workers, room, judges)


class _World:
    """Virtual time, and what is under way in it."""

    def __init__(self, plan: Plan, costs: Costs, random: np.random.Generator):
        self.plan, self.costs, self.random = plan, costs, random
        self.state, self.now, self.free_at = ClusterState(), 0.0, 0.0  # of the master
        self.coming: list[tuple[float, int, Event]] = []
        self.count, self.events = 0, 0
        self.lengths: dict[int, np.ndarray] = {}
        self.done: dict[int, np.ndarray] = {}  # tokens of each trajectory of a group that was cut
        self.busy, self.trained, self.tokens, self.reused = 0.0, 0.0, 0, 0
        self.ends: list[float] = []
        self.longest: list[float] = []
        self.late: list[int] = []

    def run(self, workers: int, room: int, judges: int) -> Figures:
        """To the last update."""
        for index in range(judges):
            self._happened(Event("joined", f"{REWARD}-{index}", pool=REWARD))
        for index in range(workers):
            self._happened(Event("joined", f"{ROLLOUT}-{index}", pool=ROLLOUT, room=room))
        while not schedule.is_over(self.plan, self.state):
            self.now, _, event = heapq.heappop(self.coming)
            if event.kind == "trained":
                self.ends.append(self.now)
            self._happened(event)
        total = max(self.now, 1e-12)
        return Figures(
            seconds=self.now,
            updates=len(self.ends),
            events=self.events,
            utilisation=self.busy / (total * workers * room),
            training=self.trained / total,
            master=self.events * self.costs.master_seconds / total,
            staleness=float(np.mean(self.late)),
            stalest=max(self.late),
            iteration_seconds=float(np.median(np.diff([0.0, *self.ends]))),
            longest_seconds=float(np.median(self.longest)),
            reused=self.reused / max(self.tokens, 1),
        )

    def _happened(self, event: Event) -> None:
        """The master takes events one after another."""
        self.events += 1
        self.free_at = max(self.free_at, self.now) + self.costs.master_seconds
        self.state, commands = schedule.advance(self.plan, self.state, event)
        for command in commands:
            took, after = self._do(command)
            if after is not None:
                self.count += 1
                heapq.heappush(self.coming, (self.free_at + took, self.count, after))

    def _do(self, command: Command) -> tuple[float, Event | None]:
        """Say how long a command takes, and what will have happened then."""
        number = command.groups[0]
        if command.kind == "train":
            self.trained += self.costs.train_seconds
            own = [self.lengths.pop(group) for group in command.groups]
            self.longest.append(float(max(length.max() for length in own)) * self.costs.token_seconds)
            self.late += [self.state.version - self.state.groups[group].began for group in command.groups]
            return self.costs.train_seconds, Event("trained")
        if command.kind == "judge":
            return self.costs.judge_seconds(self.random), Event("judged", command.worker, number, command.ticket)
        if command.kind == "drop":
            return 0.0, None
        return self._roll(command, number)

    def _roll(self, command: Command, number: int) -> tuple[float, Event]:
        if number not in self.lengths:
            self.lengths[number] = self.costs.lengths(self.random)
        lengths = self.lengths[number]
        before = self.done.get(number, np.zeros_like(lengths))
        left = lengths - before
        stretch = left if command.budget is None else np.minimum(left, command.budget)
        took = float(stretch.max()) * self.costs.token_seconds + self.costs.overhead_seconds
        self.busy += took
        self.tokens += int(stretch.sum())
        self.done[number] = before + stretch
        if np.any(self.done[number] < lengths):
            return took, Event("cut", command.worker, number, command.ticket)
        self.reused += int(before[before < lengths].sum())
        self.done.pop(number)
        return took, Event("rolled", command.worker, number, command.ticket, pool=REWARD)
