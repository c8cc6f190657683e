"""Workers of each kind: ordinary objects, which a crew puts into processes of their own.

    RolloutWorker   an engine and an agent system:   order -> stretch
    RewardWorker    rewards:                         stretch -> the same, judged

Both are made of functions that are passed in, the very ones that a single process runs. The third kind, which trains,
is whatever has the methods of `Trainer`. A worker may be killed at any moment: what it owns can be made again.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple, Protocol

from flowgrpo.contracts import Reward, Scored
from flowgrpo.distributed.orders import Order, Slip, Stretch, lengths, versions
from flowgrpo.distributed.pulse import Pulse, take_pulse
from flowgrpo.priorities import EMPTY, Known
from flowgrpo.rollout.judging import judge
from flowgrpo.rollout.records import Played, awaits_verdict, with_verdict
from flowgrpo.types import BadInput

LOADING = 600.0  # seconds that an order waits for its weights


class Player(NamedTuple):
    """Functions that a rollout worker is made of."""

    load: Callable[[Any, int], None]  # the trained part of the parameters, and their version
    play: Callable[[Order, Stretch, Callable[[Callable[[], list[str]]], None]], Stretch]  # (order, begun, on_start)
    pool: Callable[[Stretch], str]  # who judges it


class Judge(NamedTuple):
    """Parts that a reward worker is made of."""

    reward: Reward
    solved: Callable[[Scored], bool]


class RolloutWorker:
    """Plays what it is ordered to, several orders at a time over one engine."""

    def __init__(self, open_player: Callable[[], AbstractContextManager[Player]]):
        self._stack = ExitStack()
        self._player = self._stack.enter_context(open_player())
        self._loads, self._version, self._changed = 0, -1, threading.Condition()
        self._asked: dict[int, Callable[[], list[str]]] = {}
        self._orders = 0

    def about(self) -> dict[str, Any]:
        """Report the process id and the host of this worker."""
        return about()

    def load(self, params: Any, version: int, loads: int) -> int:
        """Use these weights from the next stretch of decoding on; the `loads`-th that came."""
        with self._changed:
            if loads > self._loads:  # or else newer ones were faster
                self._player.load(params, version)
                self._loads, self._version = loads, version
                self._changed.notify_all()
        return loads

    def play(self, order: Order, begun: Stretch | None = None) -> tuple[Slip, Stretch]:
        """The trajectories of an order, with those that had ended before."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._loads >= order.loaded, LOADING):
                raise BadInput(f"the weights of {order.kind} {order.numbers} did not come within {LOADING:g} s")
            self._orders += 1
            mine = self._orders
        begun = begun or Stretch()
        began = time.monotonic()
        try:
            stretch = self._player.play(order, begun, lambda pending: self._asked.update({mine: pending}))
        finally:
            self._asked.pop(mine, None)
        return self._slip(stretch, lengths(begun), time.monotonic() - began), stretch

    def _slip(self, stretch: Stretch, before: Mapping[tuple[int, int], int], seconds: float) -> Slip:
        """Summarise a stretch; `before` has the number of tokens of its trajectories that were there already."""
        whole = not stretch.unfinished
        return Slip(
            pid=os.getpid(),
            whole=whole,
            pool=self._player.pool(stretch) if whole and any(map(awaits_verdict, stretch.played)) else "",
            oldest=min(versions(stretch), default=self._version),
            reused=sum(before.values()),
            lengths=tuple(size - before.get(one, 0) for one, size in lengths(stretch).items()),
            seconds=round(seconds, 4),
        )

    def pulse(self) -> Pulse:
        """Report the state of this process, with the pending work of every order under way."""
        return take_pulse([word for ask in list(self._asked.values()) for word in ask()])


class RewardWorker:
    """Judges trajectories, group by group."""

    def __init__(self, open_judge: Callable[[], AbstractContextManager[Judge]]):
        self._stack = ExitStack()
        self._judge = self._stack.enter_context(open_judge())
        self._since: dict[int, tuple[float, str]] = {}
        self._calls = 0

    def about(self) -> dict[str, Any]:
        """Report the process id and the host of this worker."""
        return about()

    def judge(self, stretch: Stretch, refused: str = "") -> tuple[int, Stretch]:
        """The stretch with its verdicts; those that are `refused` have none, for this reason."""
        self._calls += 1
        mine = self._calls
        self._since[mine] = (time.monotonic(), f"the reward of task {stretch.played[0].task!r:.60}")
        try:
            verdicts = self._verdicts(stretch.played, refused)
        finally:
            del self._since[mine]
        judged = [with_verdict(one, verdicts[i], self._judge.solved) if i in verdicts else one
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
            said = [Scored(None, refused)] * len(own) if refused else judge(self._judge.reward, tasks, outputs)
            found |= dict(zip(own, said, strict=True))
        return found

    def pulse(self) -> Pulse:
        """Report the state of this process, with the judgements under way and their seconds so far."""
        now = time.monotonic()
        return take_pulse([f"{what} for {now - since:.0f} s" for since, what in list(self._since.values())])


class Begun(NamedTuple):
    """Position from which a trainer begins: that of its checkpoint, or of the warm start."""

    update: int
    due: bool  # an examination
    memory: Any  # of the master, from the checkpoint; None where there is none
    known: Known = EMPTY  # of the tasks, where they are chosen by that


class Trainer(Protocol):
    """Interface of a trainer; several of them make the same calls in the same order, as one `jax.distributed` group.

    Weights are the part of the parameters that is trained, on the host.
    """

    def about(self) -> dict[str, Any]:
        """Report the process id, the host and the `address` at which the others could meet this trainer."""
        ...

    def meet(self, address: str) -> None:
        """Become one of the group, the first of whom is at this address."""
        ...

    def open(self) -> None:
        """Make all parts; the first one does so before the others."""
        ...

    def begin(self) -> Begun:
        """From the checkpoint, or from the warm start."""
        ...

    def weights(self) -> tuple[int, Any]:
        """The version, and the weights of now."""
        ...

    def train(self, *stretches: Stretch) -> tuple[dict[str, Any], Any]:
        """One update: its figures, with what is `known` of its tasks from now on; and the weights after it."""
        ...

    def examined(self, memory: Any, *stretches: Stretch) -> dict[str, Any]:
        """The figures of an examination, written down; a checkpoint, which holds the master's memory too."""
        ...

    def candidates(self) -> tuple[int, Any, Any]:
        """Give how many weights the last examinations compare, those of the warm start, and the best ones."""
        ...

    def finish(self, cluster: Mapping[str, Any], count: int, *stretches: Stretch) -> dict[str, Any]:
        """Write the result, with the facts `cluster`; `count` stretches are of the warm start, the rest of the best."""
        ...

    def pulse(self) -> Pulse:
        """How it is."""
        ...


def about() -> dict[str, Any]:
    """The process and its host."""
    return {"pid": os.getpid(), "host": os.uname().nodename}
