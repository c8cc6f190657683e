"""Workers of each kind: ordinary objects, which a backend puts into processes of their own.

    RolloutWorker   an engine and an agent system:   order -> stretch
    RewardWorker    rewards:                         stretch -> the same, judged

Both are made of functions that are passed in, the very ones that a single process runs. The third kind, which trains,
is `recipes.cluster_trainer.ClusterTrainer`; several of them make the same calls in the same order, as one
`jax.distributed` group. A worker may be killed at any moment: what it owns can be made again.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple

from flowgrpo.contracts import Reward, Scored
from flowgrpo.data.task_sampling import EMPTY, Known
from flowgrpo.distributed.messages import Order, Stretch, StretchSummary, lengths, versions
from flowgrpo.distributed.worker_pool import Heartbeat, take_heartbeat
from flowgrpo.rollout.judging import is_solved, judge_outputs
from flowgrpo.rollout.records import Played, awaits_verdict, with_verdict
from flowgrpo.types import BadInput

LOADING = 600.0  # seconds that an order waits for its weights


class Player(NamedTuple):
    """Functions that a rollout worker is made of."""

    load: Callable[[Any, int], None]  # the trained part of the parameters, and their version
    play: Callable[[Order, Stretch, Callable[[Callable[[], list[str]]], None]], Stretch]  # (order, begun, on_start)
    pool: Callable[[Stretch], str]  # who judges it


class RolloutWorker:
    """Plays what it is ordered to, several orders at a time over one engine."""

    def __init__(self, open_player: Callable[[], AbstractContextManager[Player]]):
        self._stack = ExitStack()
        self._player = self._stack.enter_context(open_player())
        self._loads, self._version, self._changed = 0, -1, threading.Condition()
        self._asked: dict[object, Callable[[], list[str]]] = {}  # by the order that is under way

    def about(self) -> dict[str, Any]:
        """Report the process id and the host of this worker."""
        return process_and_host()

    def load(self, params: Any, version: int, loads: int) -> int:
        """Use these weights from the next stretch of decoding on; the `loads`-th that came."""
        with self._changed:
            if loads > self._loads:  # or else newer ones were faster
                self._player.load(params, version)
                self._loads, self._version = loads, version
                self._changed.notify_all()
        return loads

    def play(self, order: Order, begun: Stretch | None = None) -> tuple[StretchSummary, Stretch]:
        """The trajectories of an order, with those that had ended before."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._loads >= order.loaded, LOADING):
                raise BadInput(f"the weights of {order.kind} {order.numbers} did not come within {LOADING:g} s")
        begun, began, mine = begun or Stretch(), time.monotonic(), object()
        try:
            stretch = self._player.play(order, begun, lambda pending: self._asked.update({mine: pending}))
        finally:
            self._asked.pop(mine, None)
        return self._slip(stretch, lengths(begun), time.monotonic() - began), stretch

    def _slip(self, stretch: Stretch, before: Mapping[tuple[int, int], int], seconds: float) -> StretchSummary:
        """Summarise a stretch; `before` has the number of tokens of its trajectories that were there already."""
        whole = not stretch.unfinished
        return StretchSummary(
            pid=os.getpid(),
            whole=whole,
            pool=self._player.pool(stretch) if whole and any(map(awaits_verdict, stretch.played)) else "",
            oldest=min(versions(stretch), default=self._version),
            reused=sum(before.values()),
            lengths=tuple(size - before.get(one, 0) for one, size in lengths(stretch).items()),
            seconds=round(seconds, 4),
        )

    def heartbeat(self) -> Heartbeat:
        """Report the state of this process, with the pending work of every order under way."""
        return take_heartbeat([word for ask in list(self._asked.values()) for word in ask()])


class RewardWorker:
    """Judges trajectories, group by group."""

    def __init__(self, open_reward: Callable[[], AbstractContextManager[Reward]]):
        self._stack = ExitStack()
        self._reward = self._stack.enter_context(open_reward())
        self._since: dict[object, tuple[float, str]] = {}  # by the call that is under way

    def about(self) -> dict[str, Any]:
        """Report the process id and the host of this worker."""
        return process_and_host()

    def judge(self, stretch: Stretch, refused: str = "") -> tuple[int, Stretch]:
        """The stretch with its verdicts; those that are `refused` have none, for this reason."""
        mine = object()
        self._since[mine] = (time.monotonic(), f"the reward of task {stretch.played[0].task!r:.60}")
        try:
            verdicts = self._verdicts(stretch.played, refused)
        finally:
            del self._since[mine]
        judged = [with_verdict(one, verdicts[i], is_solved) if i in verdicts else one
                  for i, one in enumerate(stretch.played)]  # fmt: skip
        return os.getpid(), Stretch(tuple(judged))

    def _verdicts(self, played: Sequence[Played], refused: str) -> dict[int, Scored]:
        """Score the trajectories that await a verdict, a group at once; each `Scored` by the trajectory's index."""
        groups: dict[int, list[int]] = {}
        for index, one in enumerate(played):
            if awaits_verdict(one):
                groups.setdefault(one.group, []).append(index)
        found: dict[int, Scored] = {}
        for own in groups.values():
            tasks, outputs = [played[i].task for i in own], [played[i].output or "" for i in own]
            said = [Scored(None, refused)] * len(own) if refused else judge_outputs(self._reward, tasks, outputs)
            found |= dict(zip(own, said, strict=True))
        return found

    def heartbeat(self) -> Heartbeat:
        """Report the state of this process, with the judgements under way and their seconds so far."""
        now = time.monotonic()
        return take_heartbeat([f"{what} for {now - since:.0f} s" for since, what in list(self._since.values())])


class TrainerStart(NamedTuple):
    """Position from which a trainer begins: that of its checkpoint, or of the warm start."""

    update: int
    due: bool  # an examination
    memory: Any  # of the master, from the checkpoint; None where there is none
    known: Known = EMPTY  # of the tasks, where they are chosen by that


def process_and_host() -> dict[str, Any]:
    """The process and its host."""
    return {"pid": os.getpid(), "host": os.uname().nodename}
