"""The master: news of the workers flow in, calls to workers flow out, as the schedule says.

    Master(backend, plan, shape, make, folder).run()

It owns the schedule's state and the replay buffer, both values, and holds references to trajectories and weights, which
go from worker to worker. Who is lost, silent or late is named, ended and replaced, and what it had to do is given to
another, under the same keys (E3). Checkpoints are the trainer's, and hold the master's memory: the schedule and what
was in the buffer. Where a trainer is lost, or the master itself, all goes on from there.
"""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flowgrpo.data.task_sampling import EMPTY, Known
from flowgrpo.distributed import cluster_state, schedule
from flowgrpo.distributed.cluster_state import ClusterState, from_json, is_training, resumed, to_json, trained
from flowgrpo.distributed.eval_shares import Examiner
from flowgrpo.distributed.event_log import EventLog
from flowgrpo.distributed.messages import Order, Stretch, StretchSummary, pack_stretch, unpack_stretch, versions
from flowgrpo.distributed.ray_backend import Backend, Lost
from flowgrpo.distributed.schedule import ROLLOUT, TRAIN, Command, Event, Plan
from flowgrpo.distributed.worker_pool import PendingCall, PoolShape, WorkerGone, WorkerPool
from flowgrpo.distributed.workers import TrainerStart
from flowgrpo.report.watchdog import to_stderr
from flowgrpo.run.time_budget import ENDLESS, OutOfTime, TimeBudget

FIRST = f"{TRAIN}-0"  # who writes what all begin with
GO_ON = "the same command goes on from there"


class Master:
    """One run of a cluster; `run` returns the trainer's result."""

    def __init__(
        self,
        backend: Backend,
        plan: Plan,
        shape: PoolShape,
        make: Callable[[str, str], Callable[[], Any]],
        folder: Path,
        *,
        choose: Callable[[Known, int], int] | None = None,
        tell: Callable[[str], None] = to_stderr,
        on_turn: Callable[["Master"], None] = lambda _: None,
        budget: TimeBudget = ENDLESS,
    ):
        """`make(pool, name)` gives what makes a worker in its process; `on_turn` is called again and again.

        `choose(known, group)` gives the number of a group's task, where that depends on what is known of the tasks.
        The budget is looked at after updates and examinations.
        """
        self.backend, self.plan, self.shape, self.choose, self.on_turn = backend, plan, shape, choose, on_turn
        self.tell, self.budget = tell, budget
        self.log = EventLog(folder / "events.jsonl")
        self.workers = WorkerPool(backend, shape, make, self.log, tell)
        self.examiner = Examiner(self.workers)
        self.state, self.buffer = ClusterState(), cluster_state.EMPTY
        self.address = ""  # of the first trainer
        self.going = False  # the schedule has begun
        self.due = False  # an examination is, where the trainer stands
        self.loads, self.weights, self.version = 0, None, -1
        self.known: Known = EMPTY  # of the tasks, by the weights of now
        self.learned: Known = EMPTY  # of them by the update that is being made
        self.tasks: dict[int, int] = {}  # the number of each group's task, where they are chosen
        self.figures: Mapping[str, Any] = {}  # of the last update
        self.rollout_pids: set[int] = set()
        self.staleness = 0  # versions between the weights of an update and its oldest token, at most
        self.result: dict[str, Any] | None = None

    def run(self) -> dict[str, Any]:
        """From the checkpoint, or the warm start, to the end."""
        with self.log:
            self.workers.launch(self.workers.of(TRAIN))
            while self.result is None:
                for news in self.workers.news():
                    if isinstance(news, WorkerGone):
                        self._lose(news)
                    else:
                        getattr(self, f"_on_{news.doing.method}")(news.doing, news.value)
                self.on_turn(self)
        return self.result

    def _lose(self, gone: WorkerGone) -> None:
        """Another takes the place of a worker. Where it trained, all trainers go back to the checkpoint.

        Rollout workers are replaced then too: what they play is to be played again, and nobody else may write into
        the journal what the same group hears.
        """
        self.workers.lose(gone)
        trains = self.workers.names[gone.worker] == TRAIN
        if trains:
            self.examiner.stop()
            self.going = False
            # Until the trainers stand somewhere again, whatever is answered is to an old ticket.
            self.state = ClusterState(
                version=self.state.version, tickets=self.state.tickets, duplicates=self.state.duplicates
            )
        players = [name for name in self.workers.of(ROLLOUT) if self.workers.seen[name].launched]
        self.workers.replace([*self.workers.of(TRAIN), *players] if trains else [gone.worker])
        if gone.worker in self.state.workers:
            self._happened(Event("lost", gone.worker))
        self.examiner.go_on()

    # Beginning, and beginning again -------------------------------------------------------------------

    def _on_about(self, doing: PendingCall, about: Mapping[str, Any]) -> None:
        """A worker has started."""
        name, pool = doing.worker, self.workers.names[doing.worker]
        self.workers.started(name, about)
        if pool == TRAIN:
            self.address = about["address"] if name == FIRST else self.address
            if len(self.workers.there(TRAIN)) == self.shape.trainers:
                self.workers.call_trainers("meet", self.address)
            return
        if self.weights is not None and pool == ROLLOUT:
            self._load(name)
        if self.going:
            self._join(name)
        self.examiner.go_on()

    def _on_meet(self, _: PendingCall, __: None) -> None:
        self.workers.call(FIRST, "open")

    def _on_open(self, doing: PendingCall, _: None) -> None:
        """The first trainer has written what all begin with: the others follow, and all workers while they begin."""
        if doing.worker == FIRST:
            for name in self.workers.of(TRAIN)[1:]:
                self.workers.call(name, "open")
        if not any(one.method == "open" for one in self.workers.calls.values()):
            self.workers.call_trainers("begin")
            self.workers.launch([name for name, seen in self.workers.seen.items() if not seen.launched])

    def _on_begin(self, _: PendingCall, begun: TrainerStart) -> None:
        """The trainer stands somewhere: the schedule goes back there."""
        self.due, self.known, self.tasks, before = begun.due, begun.known, {}, self.state
        state, kept = ClusterState(version=begun.update), {}
        if begun.memory is not None:
            state = from_json(json.loads(begun.memory["schedule"]))
            kept = {int(number): unpack_stretch(text) for number, text in begun.memory["buffer"].items()}
            self.tasks = {int(number): task for number, task in begun.memory["tasks"].items()}
            seen = json.loads(begun.memory["seen"])
            self.rollout_pids |= set(seen["rollout_pids"])
            self.staleness = seen["staleness"]
        self.buffer = cluster_state.EMPTY
        for number, stretch in kept.items():
            spoke = min(versions(stretch), default=state.groups[number].began)
            self.buffer = cluster_state.add(self.buffer, number, stretch, version=spoke)
        state = state._replace(duplicates=max(before.duplicates, state.duplicates))
        self.state = resumed(state, kept, tickets=before.tickets)
        self.workers.late.clear()
        self.log.write("resumed", update=begun.update, tickets=self.state.tickets)
        self.workers.call_trainers("weights", returns=2)

    def _on_weights(self, doing: PendingCall, version: int) -> None:
        """The weights that the run goes on with."""
        self._publish(doing.data, version)
        if self.due:
            self._validate()
        else:
            self._set_going()

    def _set_going(self) -> None:
        """Let the schedule begin, with all workers that are there."""
        self.going = True
        for name, pool in self.workers.names.items():
            if pool != TRAIN and self.workers.seen[name].there:
                self._join(name)
        self._end_when_over()

    def _join(self, name: str) -> None:
        pool = self.workers.names[name]
        if name not in self.state.workers:
            self._happened(Event("joined", name, pool=pool, room=self.shape.room if pool == ROLLOUT else 1))

    # Weights ------------------------------------------------------------------------------------------

    def _publish(self, weights: Any, version: int) -> None:
        """Weights are there: all rollout workers get them, by reference."""
        self.loads, self.weights, self.version = self.loads + 1, weights, version
        for name in self.workers.there(ROLLOUT):
            self._load(name)

    def _load(self, name: str) -> None:
        self.workers.call(name, "load", self.weights, self.version, self.loads)

    def _on_load(self, _: PendingCall, __: int) -> None:
        """It has its weights."""

    # The schedule -------------------------------------------------------------------------------------

    def _happened(self, event: Event) -> None:
        """Tell the schedule, and do what it says."""
        usual = Event._field_defaults
        said = {name: value for name, value in event._asdict().items() if value != usual.get(name)}
        self.log.write("event", event=said)
        self.state, commands = schedule.advance(self.plan, self.state, event)
        for command in commands:
            self.log.write(command.kind, groups=command.groups, version=command.version)
            self._obey(command)

    def _obey(self, command: Command) -> None:
        number = command.groups[0]
        about = {"returns": 2, "what": f"group {number}", "group": number, "ticket": command.ticket}
        if command.kind == "roll":
            begun = [self.buffer[number].item] if number in self.buffer else []
            if self.choose is not None and number not in self.tasks:
                self.tasks[number] = self.choose(self.known, number)
            order = Order("train", command.groups, self.loads, command.budget, self.tasks.get(number))
            self.workers.call(command.worker, "play", order, *begun, **about)
        elif command.kind == "judge":
            given = (self.buffer[number].item, self.workers.refusal(about["what"]))
            self.workers.call(command.worker, "judge", *given, **about)
        elif command.kind == "train":
            kept, self.buffer = cluster_state.take_groups(self.buffer, command.groups)
            self.staleness = max(self.staleness, self.version - min(one.version for one in kept))
            self.tasks = {group: task for group, task in self.tasks.items() if group in self.state.groups}
            self.workers.call_trainers("train", *(one.item for one in kept), returns=2)
        else:
            self.buffer = cluster_state.drop(self.buffer, command.groups)

    def _keep(self, doing: PendingCall, version: int) -> None:
        """Put a call's stretch into the buffer, unless its group is gone or was given out again meanwhile."""
        group = self.state.groups.get(doing.group)
        if group is not None and group.ticket == doing.ticket:
            self.buffer = cluster_state.add(self.buffer, doing.group, doing.data, version=version)

    def _on_play(self, doing: PendingCall, slip: StretchSummary) -> None:
        """A stretch has ended: the group goes on later, or is judged, or is ready."""
        self.workers.seen[doing.worker].tokens += sum(slip.lengths)
        if doing.exam is not None:
            self.examiner.take_played(doing, slip.pool)
            return
        self.rollout_pids.add(slip.pid)
        self._keep(doing, slip.oldest)
        self.log.write("rolled", group=doing.group, **slip._asdict())
        kind = "rolled" if slip.whole else "cut"
        self._happened(Event(kind, doing.worker, doing.group, doing.ticket, pool=slip.pool))

    def _on_judge(self, doing: PendingCall, _: int) -> None:
        """Verdicts are there."""
        if doing.exam is not None:
            self.examiner.take_judged(doing)
            return
        self.log.write("judged", group=doing.group, seconds=round(time.monotonic() - doing.since, 4))
        self._keep(doing, self.version)
        self._happened(Event("judged", doing.worker, doing.group, doing.ticket))

    def _on_train(self, doing: PendingCall, figures: Mapping[str, Any]) -> None:
        """An update is made; the schedule hears of it when it is examined and saved, where that is due."""
        self.log.write("trained", version=figures["version"], seconds=round(time.monotonic() - doing.since, 4))
        self.figures = figures
        self._publish(doing.data, figures["version"])
        self.learned = figures["known"]
        if self.budget.is_over():
            self.workers.call_trainers("save", self._memory())
        elif figures["due"]:
            self._validate()
        else:
            self._updated()

    def _updated(self) -> None:
        """The schedule goes on; what begins from here on is chosen by what this update has shown."""
        self.known = {**self.known, **self.learned}
        self._happened(Event("trained"))
        self._end_when_over()

    def _end_when_over(self) -> None:
        """After the last update the trainer says what is to be tested."""
        if schedule.is_over(self.plan, self.state):
            self.workers.call_trainers("candidates", returns=3)

    # Examinations -------------------------------------------------------------------------------------

    def _validate(self) -> None:
        """Examine the weights of now, and save."""

        def validated(judged: list[Any]) -> None:
            self.workers.call_trainers("examined", self._memory(), *judged)

        self.examiner.begin("validation", self.shape.validation_tasks, self.loads, validated)

    def _memory(self) -> dict[str, Any]:
        """Collect the master's part of a checkpoint: schedule after this update, buffer, tasks, the result's facts."""
        state = trained(self.state) if is_training(self.state) else self.state
        held = {str(number): self._text(self.buffer[number].item) for number in state.groups if number in self.buffer}
        there = {number: text for number, text in held.items() if text}
        tasks = {str(number): self.tasks[number] for number in state.groups if number in self.tasks}
        seen = {"rollout_pids": sorted(self.rollout_pids), "staleness": self.staleness}
        return {"schedule": json.dumps(to_json(state)), "buffer": there, "tasks": tasks, "seen": json.dumps(seen)}

    def _text(self, item: Any) -> str:
        """A stretch as text; "" where the host that had it is gone, so that it is rolled out again."""
        try:
            return pack_stretch(item if isinstance(item, Stretch) else self.backend.get(item))
        except Lost:
            return ""

    def _on_examined(self, _: PendingCall, figures: Mapping[str, Any]) -> None:
        """Written down, and saved."""
        self._on_save(_, figures["update"])
        if is_training(self.state):
            self._updated()
        elif not self.going:
            self._set_going()

    def _on_save(self, _: PendingCall, update: int) -> None:
        """There is a checkpoint of this update: the place to end where no time is left."""
        self.log.write("saved", update=update)
        if self.budget.is_over():
            self.tell(f"the time budget of {self.budget.words} is over: saved at update {update}; {GO_ON}")
            raise OutOfTime

    def _on_candidates(self, doing: PendingCall, _: int) -> None:
        """The weights before and after, which are tested on the same tasks."""
        before, after = doing.data

        def tested_before(first: list[Any]) -> None:
            self._publish(after, self.state.version)
            self.examiner.begin(
                "test-after", self.shape.test_tasks, self.loads, lambda second: self._finish(first, second)
            )

        self._publish(before, 0)
        self.examiner.begin("test-before", self.shape.test_tasks, self.loads, tested_before)

    def _finish(self, before: list[Any], after: list[Any]) -> None:
        cluster = {
            "rollout_pids": sorted(self.rollout_pids),
            "duplicates": self.state.duplicates,
            "lost": self.workers.lost,
            "staleness": self.staleness,
        }
        self.workers.call_trainers("finish", cluster, len(before), *before, *after)

    def _on_finish(self, _: PendingCall, result: dict[str, Any]) -> None:
        self.result = result
