"""The master: news of the workers flow in, calls to workers flow out, as the schedule says.

    Master(crew, plan, shape, exams, make, folder).run()

It owns the schedule's state and the replay buffer, both values, and holds references to trajectories and weights, which
go from worker to worker. Who is lost, silent or late is named, ended and replaced, and what it had to do is given to
another, under the same keys (E3). Checkpoints are the trainer's, and hold the master's memory: the schedule and what
was in the buffer. Where a trainer is lost, or the master itself, all goes on from there.
"""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flowgrpo import buffer, schedule
from flowgrpo.distributed.crew import Crew, Lost
from flowgrpo.distributed.event_log import EventLog
from flowgrpo.distributed.exam import Exam, deal
from flowgrpo.distributed.orders import Order, Slip, Stretch, pack_stretch, unpack_stretch, versions
from flowgrpo.distributed.staff import Doing, Gone, Shape, Staff
from flowgrpo.distributed.workers import Begun
from flowgrpo.schedule import ROLLOUT, TRAIN, Command, Event, Plan
from flowgrpo.stuck import to_stderr
from flowgrpo.under_way import State, from_json, is_training, resumed, to_json, trained

FIRST = f"{TRAIN}-0"  # who writes what all begin with


class Exams(NamedTuple):
    """How many tasks an examination has, by its name."""

    validation: int
    test: int


class Master:
    """One run of a cluster; `run` returns the trainer's result."""

    def __init__(
        self,
        crew: Crew,
        plan: Plan,
        shape: Shape,
        exams: Exams,
        make: Callable[[str, str], Callable[[], Any]],
        folder: Path,
        *,
        tell: Callable[[str], None] = to_stderr,
        on_turn: Callable[["Master"], None] = lambda _: None,
    ):
        """`make(pool, name)` gives what makes a worker in its process; `on_turn` is called again and again."""
        self.crew, self.plan, self.shape, self.exams, self.on_turn = crew, plan, shape, exams, on_turn
        self.log = EventLog(folder / "events.jsonl")
        self.staff = Staff(crew, shape, make, self.log, tell)
        self.state, self.buffer = State(), buffer.EMPTY
        self.address = ""  # of the first trainer
        self.going = False  # the schedule has begun
        self.due = False  # an examination is, where the trainer stands
        self.loads, self.weights, self.version = 0, None, -1
        self.exam: Exam | None = None
        self.rollout_pids: set[int] = set()
        self.staleness = 0  # versions between the weights of an update and its oldest token, at most
        self.result: dict[str, Any] | None = None

    def run(self) -> dict[str, Any]:
        """From the checkpoint, or the warm start, to the end."""
        with self.log:
            self.staff.hire(self.staff.of(TRAIN))
            while self.result is None:
                for news in self.staff.news():
                    if isinstance(news, Gone):
                        self._lose(news)
                    else:
                        getattr(self, f"_on_{news.doing.method}")(news.doing, news.value)
                self.on_turn(self)
        return self.result

    def _lose(self, gone: Gone) -> None:
        """Another takes the place of a worker. Where it trained, all trainers go back to the checkpoint.

        Rollout workers are replaced then too: what they play is to be played again, and nobody else may write into
        the journal what the same group hears.
        """
        self.staff.lose(gone)
        trains = self.staff.names[gone.worker] == TRAIN
        if trains:
            self.exam, self.going = None, False
            # Until the trainers stand somewhere again, whatever is answered is to an old ticket.
            self.state = State(version=self.state.version, tickets=self.state.tickets, duplicates=self.state.duplicates)
        players = [name for name in self.staff.of(ROLLOUT) if self.staff.seen[name].hired]
        self.staff.replace([*self.staff.of(TRAIN), *players] if trains else [gone.worker])
        if gone.worker in self.state.workers:
            self._happened(Event("lost", gone.worker))
        self._examine_on()

    # Beginning, and beginning again -------------------------------------------------------------------

    def _on_about(self, doing: Doing, about: Mapping[str, Any]) -> None:
        """A worker has started."""
        name, pool = doing.worker, self.staff.names[doing.worker]
        self.staff.started(name, about)
        if pool == TRAIN:
            self.address = about["address"] if name == FIRST else self.address
            if len(self.staff.there(TRAIN)) == self.shape.trainers:
                self.staff.call_trainers("meet", self.address)
            return
        if self.weights is not None and pool == ROLLOUT:
            self._load(name)
        if self.going:
            self._join(name)
        self._examine_on()

    def _on_meet(self, _: Doing, __: None) -> None:
        self.staff.call(FIRST, "open")

    def _on_open(self, doing: Doing, _: None) -> None:
        """The first trainer has written what all begin with: the others follow, and all workers while they begin."""
        if doing.worker == FIRST:
            for name in self.staff.of(TRAIN)[1:]:
                self.staff.call(name, "open")
        if not any(one.method == "open" for one in self.staff.calls.values()):
            self.staff.call_trainers("begin")
            self.staff.hire([name for name, seen in self.staff.seen.items() if not seen.hired])

    def _on_begin(self, _: Doing, begun: Begun) -> None:
        """The trainer stands somewhere: the schedule goes back there."""
        self.due, before = begun.due, self.state
        state, kept = State(version=begun.update), {}
        if begun.memory is not None:
            state = from_json(json.loads(begun.memory["schedule"]))
            kept = {int(number): unpack_stretch(text) for number, text in begun.memory["buffer"].items()}
        self.buffer = buffer.EMPTY
        for number, stretch in kept.items():
            spoke = min(versions(stretch), default=state.groups[number].began)
            self.buffer = buffer.add(self.buffer, number, stretch, version=spoke)
        state = state._replace(duplicates=max(before.duplicates, state.duplicates))
        self.state = resumed(state, kept, tickets=before.tickets)
        self.staff.late.clear()
        self.log.write("resumed", update=begun.update, tickets=self.state.tickets)
        self.staff.call_trainers("weights", returns=2)

    def _on_weights(self, doing: Doing, version: int) -> None:
        """The weights that the run goes on with."""
        self._publish(doing.data, version)
        if self.due:
            self._validate()
        else:
            self._set_going()

    def _set_going(self) -> None:
        """Let the schedule begin, with all workers that are there."""
        self.going = True
        for name, pool in self.staff.names.items():
            if pool != TRAIN and self.staff.seen[name].there:
                self._join(name)
        self._end_when_over()

    def _join(self, name: str) -> None:
        pool = self.staff.names[name]
        if name not in self.state.workers:
            self._happened(Event("joined", name, pool=pool, room=self.shape.room if pool == ROLLOUT else 1))

    # Weights ------------------------------------------------------------------------------------------

    def _publish(self, weights: Any, version: int) -> None:
        """Weights are there: all rollout workers get them, by reference."""
        self.loads, self.weights, self.version = self.loads + 1, weights, version
        for name in self.staff.there(ROLLOUT):
            self._load(name)

    def _load(self, name: str) -> None:
        self.staff.call(name, "load", self.weights, self.version, self.loads)

    def _on_load(self, doing: Doing, _: int) -> None:
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
            order = Order("train", command.groups, self.loads, command.budget)
            self.staff.call(command.worker, "play", order, *begun, **about)
        elif command.kind == "judge":
            given = (self.buffer[number].item, self.staff.refusal(about["what"]))
            self.staff.call(command.worker, "judge", *given, **about)
        elif command.kind == "train":
            kept, self.buffer = buffer.take(self.buffer, command.groups)
            self.staleness = max(self.staleness, self.version - min(one.version for one in kept))
            self.staff.call_trainers("train", *(one.item for one in kept), returns=2)
        else:
            self.buffer = buffer.drop(self.buffer, command.groups)

    def _keep(self, doing: Doing, version: int) -> None:
        """What was made of a group is in the buffer, unless another was asked for it meanwhile."""
        group = self.state.groups.get(doing.group)
        if group is not None and group.ticket == doing.ticket:
            self.buffer = buffer.add(self.buffer, doing.group, doing.data, version=version)

    def _on_play(self, doing: Doing, slip: Slip) -> None:
        """A stretch has ended: the group goes on later, or is judged, or is ready."""
        self.staff.seen[doing.worker].tokens += sum(slip.lengths)
        if doing.exam is not None:
            doing.exam.take_played(doing.share, doing.data, slip.pool)
            self._examine_on()
            return
        self.rollout_pids.add(slip.pid)
        self._keep(doing, slip.oldest)
        self.log.write("rolled", group=doing.group, **slip._asdict())
        kind = "rolled" if slip.whole else "cut"
        self._happened(Event(kind, doing.worker, doing.group, doing.ticket, pool=slip.pool))

    def _on_judge(self, doing: Doing, _: int) -> None:
        """Verdicts are there."""
        if doing.exam is not None:
            doing.exam.judged[doing.share] = doing.data
            self._examine_on()
            return
        self.log.write("judged", group=doing.group, seconds=round(time.monotonic() - doing.since, 4))
        self._keep(doing, self.version)
        self._happened(Event("judged", doing.worker, doing.group, doing.ticket))

    def _on_train(self, doing: Doing, figures: Mapping[str, Any]) -> None:
        """An update is made; the schedule hears of it when it is examined and saved, where that is due."""
        self.log.write("trained", version=figures["version"], seconds=round(time.monotonic() - doing.since, 4))
        self._publish(doing.data, figures["version"])
        if figures["due"]:
            self._validate()
        else:
            self._updated()

    def _updated(self) -> None:
        self._happened(Event("trained"))
        self._end_when_over()

    def _end_when_over(self) -> None:
        """After the last update the trainer says what is to be tested."""
        if schedule.is_over(self.plan, self.state):
            self.staff.call_trainers("candidates", returns=3)

    # Examinations -------------------------------------------------------------------------------------

    def _examine(self, kind: str, tasks: int, then: Callable[[list[Any]], None]) -> None:
        self.exam = deal(kind, tasks, self.shape.rollout, then)
        self._examine_on()

    def _examine_on(self) -> None:
        """Give out what nobody does yet; and go on when all is judged."""
        exam = self.exam
        if exam is None:
            return
        under_way = {doing.share for doing in self.staff.calls.values() if doing.exam is exam}
        for share, method in exam.left():
            pool = ROLLOUT if method == "play" else exam.pools[share]
            there = self.staff.there(pool)
            if share in under_way or not there:
                continue
            what = exam.name(share)
            if method == "play":
                given: tuple = (Order(exam.kind, exam.shares[share], self.loads),)
            else:
                given = (exam.played[share], self.staff.refusal(what))
            about = {"returns": 2, "what": what, "exam": exam, "share": share}
            self.staff.call(there[share % len(there)], method, *given, **about)
        if exam.is_over():
            self.exam = None
            exam.then(exam.stretches())

    def _validate(self) -> None:
        """Examine the weights of now, and save."""

        def validated(judged: list[Any]) -> None:
            self.staff.call_trainers("examined", self._memory(), *judged)

        self._examine("validation", self.exams.validation, validated)

    def _memory(self) -> dict[str, Any]:
        """What a checkpoint holds of the master: the schedule after this update, and the trajectories in the buffer."""
        state = trained(self.state) if is_training(self.state) else self.state
        held = {str(number): self._text(self.buffer[number].item) for number in state.groups if number in self.buffer}
        there = {number: text for number, text in held.items() if text}
        return {"schedule": json.dumps(to_json(state)), "buffer": there}

    def _text(self, item: Any) -> str:
        """A stretch as text; "" where the host that had it is gone, so that it is rolled out again."""
        try:
            return pack_stretch(item if isinstance(item, Stretch) else self.crew.get(item))
        except Lost:
            return ""

    def _on_examined(self, _: Doing, figures: Mapping[str, Any]) -> None:
        """Written down, and saved."""
        self.log.write("saved", update=figures["update"])
        if is_training(self.state):
            self._updated()
        elif not self.going:
            self._set_going()

    def _on_candidates(self, doing: Doing, _: int) -> None:
        """The weights before and after, which are tested on the same tasks."""
        before, after = doing.data

        def tested_before(first: list[Any]) -> None:
            self._publish(after, self.state.version)
            self._examine("test-after", self.exams.test, lambda second: self._finish(first, second))

        self._publish(before, 0)
        self._examine("test-before", self.exams.test, tested_before)

    def _finish(self, before: list[Any], after: list[Any]) -> None:
        cluster = {
            "rollout_pids": sorted(self.rollout_pids),
            "duplicates": self.state.duplicates,
            "lost": self.staff.lost,
            "staleness": self.staleness,
        }
        self.staff.call_trainers("finish", cluster, len(before), *before, *after)

    def _on_finish(self, _: Doing, result: dict[str, Any]) -> None:
        self.result = result
