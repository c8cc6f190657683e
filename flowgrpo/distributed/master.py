"""The master: events of the workers flow in, calls to workers flow out, as the schedule says.

    Master(crew, plan, shape, makes, folder).run()

It owns the schedule's state and the replay buffer, both values, and holds references to trajectories and weights, which
go from worker to worker. Who is lost, silent or late is named, killed and replaced, and what it had to do is given to
another, under the same keys (E3). Checkpoints are the trainer's, and hold the master's memory: the schedule and what
was in the buffer. Where a trainer is lost, or the master itself, all goes on from there.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from flowgrpo import buffer, schedule
from flowgrpo.distributed.crew import Crew, Lost
from flowgrpo.distributed.event_log import EventLog
from flowgrpo.distributed.orders import Order, Slip, Stretch, pack_stretch, unpack_stretch
from flowgrpo.distributed.workers import Begun
from flowgrpo.schedule import REWARD, ROLLOUT, TRAIN, Command, Event, Plan, State
from flowgrpo.stuck import to_stderr
from flowgrpo.types import BadInput

STARTS = 3  # times that a worker may end while it starts
PULSE = 1.0  # seconds, at most, in which the master looks after deadlines
REFUSED_AFTER = 2  # times that a reward may be late with the same group


class Shape(NamedTuple):
    """How many workers there are, and their deadlines."""

    rollout: int = 1
    rewards: Mapping[str, int] = {REWARD: 1}  # by pool
    trainers: int = 1
    room: int = 4  # groups that a rollout worker plays at a time
    every: int = 10  # updates between examinations and checkpoints
    judge_seconds: float = 600.0
    silent_seconds: float = 120.0
    watch_seconds: float = 600.0

    def names(self) -> dict[str, str]:
        """All workers, with the pool of each."""
        named = {f"{TRAIN}-{i}": TRAIN for i in range(self.trainers)}
        named |= {f"{ROLLOUT}-{i}": ROLLOUT for i in range(self.rollout)}
        return named | {f"{pool}-{i}": pool for pool, count in self.rewards.items() for i in range(count)}


class Exams(NamedTuple):
    """How many tasks an examination has, by its name."""

    validation: int
    test: int


@dataclass
class Doing:
    """A call that is under way."""

    worker: str
    method: str
    since: float
    epoch: int
    group: int = -1
    ticket: int = -1
    share: int = -1  # of an examination
    data: Any = None  # a reference to what else it returns
    joint: "Joint | None" = None  # of a call that all trainers were given


@dataclass
class Joint:
    """A call of all trainers: it is answered when all have, by what the first one says."""

    left: int
    first: tuple[Doing, Any] | None = None


@dataclass
class Exam:
    """An examination that is under way, dealt out in shares."""

    kind: str
    shares: list[tuple[int, ...]]
    then: Callable[[list[Any]], None]
    played: dict[int, Any] = field(default_factory=dict)
    judged: dict[int, Any] = field(default_factory=dict)


@dataclass
class Seen:
    """What the master knows of a worker."""

    pid: int = -1
    host: str = ""
    there: bool = False
    starts: int = 0  # that failed, one after another
    heard: float = 0.0  # when it last answered
    told: float = 0.0  # when it was last spoken of
    words: list[str] = field(default_factory=list)  # what it was at
    tokens: int = 0
    groups: int = 0


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
        self.crew, self.plan, self.shape, self.exams, self.make = crew, plan, shape, exams, make
        self.tell, self.on_turn = tell, on_turn
        self.log = EventLog(folder / "events.jsonl")
        self.names = shape.names()
        self.seen = {name: Seen() for name in self.names}
        self.calls: dict[Any, Doing] = {}
        self.state, self.buffer = State(), buffer.EMPTY
        self.address = ""  # of the first trainer
        self.going = False  # the schedule has begun
        self.due = False  # an examination is, where the trainer stands
        self.epoch = 0  # counts the trainers' beginnings: calls of an earlier one mean nothing
        self.loads, self.weights, self.version = 0, None, -1
        self.exam: Exam | None = None
        self.late: dict[str, int] = {}  # what is judged, and how often that was too late
        self.rollout_pids: set[int] = set()
        self.slips: dict[int, Slip] = {}
        self.staleness: list[int] = []  # of every update: versions between its weights and its oldest token
        self.lost: list[str] = []
        self.result: dict[str, Any] | None = None

    def run(self) -> dict[str, Any]:
        """From the checkpoint, or the warm start, to the end."""
        with self.log:
            for name, pool in self.names.items():
                if pool == TRAIN:  # first, since they write what all begin with
                    self._hire(name)
            while self.result is None:
                for ref in self.crew.wait(list(self.calls), PULSE):
                    doing = self.calls.pop(ref, None)
                    if doing is not None:
                        self._answered(doing, ref)
                self._keep_deadlines()
                self.on_turn(self)
        return self.result

    # Calls and their answers --------------------------------------------------------------------------

    def _call(self, worker: str, method: str, *given: Any, returns: int = 1, **about: Any) -> None:
        refs = self.crew.call(worker, method, *given, returns=returns)
        data = refs[1] if returns == 2 else refs[1:]
        self.calls[refs[0]] = Doing(worker, method, time.monotonic(), self.epoch, data=data, **about)

    def _trainers(self, method: str, *given: Any, returns: int = 1) -> None:
        """The same call to all trainers, who are one: none gets the next before all have answered."""
        joint = Joint(self.shape.trainers)
        for name in (name for name, pool in self.names.items() if pool == TRAIN):
            self._call(name, method, *given, returns=returns, joint=joint)

    def _answered(self, doing: Doing, ref: Any) -> None:
        """A call has ended: do what follows from it."""
        seen = self.seen[doing.worker]
        try:
            value = self.crew.get(ref)
        except Lost as error:
            self._lose(doing.worker, f"has ended ({' '.join(str(error).split())[:160]})")
            return
        seen.heard = time.monotonic()
        if doing.joint is not None:
            joint = doing.joint
            joint.left -= 1
            joint.first = (doing, value) if doing.worker == f"{TRAIN}-0" else joint.first
            if joint.left or joint.first is None:
                return
            doing, value = joint.first
        getattr(self, f"_on_{doing.method}")(doing, value)

    def _on_about(self, doing: Doing, value: Mapping[str, Any]) -> None:
        """A worker has started."""
        seen, pool = self.seen[doing.worker], self.names[doing.worker]
        seen.pid, seen.host, seen.there, seen.starts = value["pid"], value["host"], True, 0
        self.log.write("started", worker=doing.worker, pid=seen.pid)
        if pool == TRAIN:
            if doing.worker == f"{TRAIN}-0":
                self.address = value["address"]
            if all(self.seen[name].there for name, other in self.names.items() if other == TRAIN):
                self._trainers("meet", self.address)
            return
        if self.weights is not None and pool == ROLLOUT:
            self._load(doing.worker)
        if self.going:
            self._join(doing.worker)
        self._examine_on()

    def _on_meet(self, doing: Doing, _: None) -> None:
        self._call(doing.worker, "open")

    def _on_open(self, doing: Doing, _: None) -> None:
        """The first trainer has written what all begin with: the others follow, and all workers while they begin."""
        others = [name for name, pool in self.names.items() if pool == TRAIN and name != f"{TRAIN}-0"]
        if doing.worker == f"{TRAIN}-0":
            for name in others:
                self._call(name, "open")
        if not any(one.method == "open" for one in self.calls.values()):
            self._trainers("begin")
            self._hire_the_rest()

    def _hire_the_rest(self) -> None:
        for name, seen in self.seen.items():
            if not seen.there and not seen.heard:
                self._hire(name)

    def _on_pending(self, doing: Doing, words: list[str]) -> None:
        self.seen[doing.worker].words = list(words)

    def _on_load(self, doing: Doing, _: int) -> None:
        """It has its weights."""

    # Beginning, and beginning again -------------------------------------------------------------------

    def _on_begin(self, _: Doing, begun: Begun) -> None:
        """The trainer stands somewhere: the schedule goes back there."""
        self.due, before = begun.due, self.state
        self.buffer, kept = buffer.EMPTY, {}
        state = State(version=begun.update)
        if begun.memory is not None:
            state = schedule.from_json(json.loads(begun.memory["schedule"]))
            kept = {int(number): unpack_stretch(text) for number, text in begun.memory["buffer"].items()}
        for number, stretch in kept.items():
            self.buffer = buffer.add(self.buffer, number, stretch, version=state.groups[number].began)
        self.state = schedule.resumed(state, kept, tickets=before.tickets)
        self.state = self.state._replace(duplicates=max(before.duplicates, state.duplicates))
        self.late = {}
        self.log.write("resumed", update=begun.update, tickets=self.state.tickets)
        self._trainers("weights", returns=2)

    def _on_weights(self, doing: Doing, version: int) -> None:
        """The weights that the run goes on with."""
        self._publish(doing.data, version)
        if self.due:
            self._examine("validation", self.exams.validation, self._validated)
        else:
            self._set_going()

    def _set_going(self) -> None:
        """Let the schedule begin, with all workers that are there."""
        self.going = True
        for name, pool in self.names.items():
            if pool != TRAIN and self.seen[name].there:
                self._join(name)
        self._end_when_over()

    def _end_when_over(self) -> None:
        """After the last update the trainer says what is to be tested."""
        if schedule.is_over(self.plan, self.state):
            self._trainers("candidates", returns=3)

    def _join(self, name: str) -> None:
        pool = self.names[name]
        if name not in self.state.workers:
            self._happened(Event("joined", name, pool=pool, room=self.shape.room if pool == ROLLOUT else 1))

    def _publish(self, weights: Any, version: int) -> None:
        """Weights are there: all rollout workers get them, by reference."""
        self.loads, self.weights, self.version = self.loads + 1, weights, version
        for name, pool in self.names.items():
            if pool == ROLLOUT and self.seen[name].there:
                self._load(name)

    def _load(self, name: str) -> None:
        self._call(name, "load", self.weights, self.version, self.loads)

    # The schedule -------------------------------------------------------------------------------------

    def _happened(self, event: Event) -> None:
        """Tell the schedule, and do what it says."""
        usual = Event._field_defaults
        said = {name: value for name, value in event._asdict().items() if value != usual.get(name)}
        self.log.write("event", event=said)
        self.state, commands = schedule.advance(self.plan, self.state, event)
        for command in commands:
            self._obey(command)

    def _obey(self, command: Command) -> None:
        about = {"group": command.groups[0], "ticket": command.ticket}
        number = command.groups[0]
        self.log.write(command.kind, groups=command.groups, version=command.version)
        if command.kind == "roll":
            begun = [self.buffer[number].item] if number in self.buffer else []
            order = Order("train", command.groups, self.loads, command.budget)
            self._call(command.worker, "play", order, *begun, returns=2, **about)
        elif command.kind == "judge":
            refused = self._refusal(f"group {number}")
            self._call(command.worker, "judge", self.buffer[number].item, refused, returns=2, **about)
        elif command.kind == "train":
            items, self.buffer = buffer.take(self.buffer, command.groups)
            oldest = [self.slips[n].oldest for n in command.groups if n in self.slips and self.slips[n].oldest >= 0]
            self.staleness += [self.version - min(oldest)] if oldest else []
            self._trainers("train", *items, returns=2)
        else:
            self.buffer = buffer.drop(self.buffer, command.groups)

    def _is_current(self, doing: Doing) -> bool:
        group = self.state.groups.get(doing.group)
        return group is not None and group.ticket == doing.ticket

    def _on_play(self, doing: Doing, slip: Slip) -> None:
        """A stretch has ended: the group goes on later, or is judged, or is ready."""
        seen = self.seen[doing.worker]
        seen.tokens, seen.groups = seen.tokens + slip.tokens, seen.groups + slip.whole
        if doing.share >= 0:
            if self.exam is not None and doing.epoch == self.epoch:
                self.exam.played[doing.share] = (doing.data, slip.pool)
                self._examine_on()
            return
        if self._is_current(doing):
            self.rollout_pids.add(slip.pid)
            self.slips[doing.group] = slip
            version = self.state.groups[doing.group].began
            self.buffer = buffer.add(self.buffer, doing.group, doing.data, version=version, whole=slip.whole)
        took = {"seconds": round(slip.seconds, 4), "lengths": slip.lengths, "whole": slip.whole}
        self.log.write("rolled", group=doing.group, pid=slip.pid, **took)
        kind = "rolled" if slip.whole else "cut"
        self._happened(Event(kind, doing.worker, doing.group, doing.ticket, pool=slip.pool))

    def _on_judge(self, doing: Doing, _: int) -> None:
        """Verdicts are there."""
        self.seen[doing.worker].groups += 1
        if doing.share >= 0:
            if self.exam is not None and doing.epoch == self.epoch:
                self.exam.judged[doing.share] = doing.data
                self._examine_on()
            return
        self.log.write("judged", group=doing.group, seconds=round(time.monotonic() - doing.since, 4))
        if self._is_current(doing):
            version = self.state.groups[doing.group].began
            self.buffer = buffer.add(self.buffer, doing.group, doing.data, version=version)
        self._happened(Event("judged", doing.worker, doing.group, doing.ticket))

    def _on_train(self, doing: Doing, figures: Mapping[str, Any]) -> None:
        """An update is made; the schedule hears of it when it is examined and saved, where that is due."""
        self.log.write("trained", version=figures["version"], seconds=round(time.monotonic() - doing.since, 4))
        trained = [number for number, group in self.state.groups.items() if group.phase == "training"]
        self.slips = {number: slip for number, slip in self.slips.items() if number not in trained}
        self._publish(doing.data, figures["version"])
        if figures["due"]:
            self._examine("validation", self.exams.validation, self._validated)
        else:
            self._happened(Event("trained"))
            self._end_when_over()

    # Examinations -------------------------------------------------------------------------------------

    def _examine(self, kind: str, tasks: int, then: Callable[[list[Any]], None]) -> None:
        """Deal the tasks of an examination out to all rollout workers."""
        count = min(self.shape.rollout, tasks)
        shares = [tuple(range(tasks))[i::count] for i in range(count)]
        self.exam = Exam(kind, shares, then)
        self._examine_on()

    def _examine_on(self) -> None:
        """Give out what nobody does yet: shares to play, shares to judge; and go on when all are there."""
        exam = self.exam
        if exam is None:
            return
        under_way = {(doing.method, doing.share) for doing in self.calls.values() if doing.epoch == self.epoch}
        for share, numbers in enumerate(exam.shares):
            if share in exam.judged:
                continue
            if share in exam.played and not exam.played[share][1]:
                exam.judged[share] = exam.played[share][0]
            elif share in exam.played and ("judge", share) not in under_way:
                worker = self._any(exam.played[share][1], share)
                if worker:
                    refused = self._refusal(f"share {share} of {exam.kind}")
                    self._call(worker, "judge", exam.played[share][0], refused, returns=2, share=share)
            elif share not in exam.played and ("play", share) not in under_way:
                worker = self._any(ROLLOUT, share)
                if worker:
                    self._call(worker, "play", Order(exam.kind, numbers, self.loads), returns=2, share=share)
        if len(exam.judged) == len(exam.shares):
            self.exam = None
            exam.then([exam.judged[share] for share in range(len(exam.shares))])

    def _any(self, pool: str, share: int) -> str:
        """A worker of the pool that is there; "" where none is."""
        there = [name for name, other in self.names.items() if other == pool and self.seen[name].there]
        return there[share % len(there)] if there else ""

    def _validated(self, judged: list[Any]) -> None:
        self._trainers("examined", self._memory(), *judged)

    def _memory(self) -> dict[str, Any]:
        """What a checkpoint holds of the master: the schedule after this update, and the trajectories in the buffer."""
        state = schedule.trained(self.state) if schedule.is_training(self.state) else self.state
        kept = [number for number, group in state.groups.items() if group.phase in ("ready", "held", "waiting")]
        held = {str(n): self._text(self.buffer[n].item) for n in kept if n in self.buffer}
        there = {number: text for number, text in held.items() if text}
        return {"schedule": json.dumps(schedule.to_json(state)), "buffer": there}

    def _text(self, item: Any) -> str:
        """A stretch as text; "" where the host that had it is gone, so that it is rolled out again."""
        try:
            return pack_stretch(item if isinstance(item, Stretch) else self.crew.get(item))
        except Lost:
            return ""

    def _on_examined(self, _: Doing, figures: Mapping[str, Any]) -> None:
        """Written down, and saved."""
        self.log.write("saved", update=figures["update"])
        if schedule.is_training(self.state):
            self._happened(Event("trained"))
            self._end_when_over()
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
            "lost": self.lost,
            "staleness": max(self.staleness, default=0),
        }
        self._trainers("finish", cluster, len(before), *before, *after)

    def _on_finish(self, _: Doing, result: dict[str, Any]) -> None:
        self.result = result

    # Faults -------------------------------------------------------------------------------------------

    def _hire(self, name: str) -> None:
        """Start a worker; what it says of itself shows that it is there."""
        self.seen[name].there, self.seen[name].heard = False, time.monotonic()
        threads = (self.shape.room if self.names[name] == ROLLOUT else 1) + 4
        self.crew.start(name, self.make(self.names[name], name), threads=threads)
        self._call(name, "about")

    def _lose(self, name: str, why: str) -> None:
        """A worker is gone: another takes its place. Where it trained, all trainers go back to the checkpoint."""
        seen, pool = self.seen[name], self.names[name]
        self.tell(f"{name} (process {seen.pid}) {why}: another takes its place")
        self.log.write("lost", worker=name, why=why)
        self.lost.append(name)
        seen.starts += not seen.there
        if seen.starts >= STARTS:
            raise BadInput(f"{name} has ended {STARTS} times while it started: {why}")
        gone = [other for other in self.names if self.names[other] == TRAIN] if pool == TRAIN else [name]
        self.calls = {ref: doing for ref, doing in self.calls.items() if doing.worker not in gone}
        for one in gone:
            self.crew.kill(one)
        if pool == TRAIN:
            self.epoch, self.exam, self.going = self.epoch + 1, None, False
            # Until the trainers stand somewhere again, whatever is answered is to an old ticket.
            self.state = State(version=self.state.version, tickets=self.state.tickets, duplicates=self.state.duplicates)
        for one in gone:
            self._hire(one)
        if name in self.state.workers:
            self._happened(Event("lost", name))
        self._examine_on()

    def _keep_deadlines(self) -> None:
        """Ask after everybody; end who is silent, and rewards that are late; name what takes long."""
        now = time.monotonic()
        asked = {doing.worker for doing in self.calls.values() if doing.method == "pending"}
        for name, seen in self.seen.items():
            if seen.there and name not in asked and now - seen.heard > PULSE:
                self._call(name, "pending")
        for doing in list(self.calls.values()):
            took, seen = now - doing.since, self.seen[doing.worker]
            if doing not in self.calls.values():
                continue  # of a worker that was lost meanwhile
            if doing.method == "pending" and took > self.shape.silent_seconds:
                self._lose(doing.worker, f"has been silent for {took:.0f} s{self._at(doing.worker)}")
            elif doing.method == "judge" and took > self.shape.judge_seconds:
                what = self._what(doing)
                self.late[what] = self.late.get(what, 0) + 1
                self._lose(doing.worker, f"has judged {what} for {took:.0f} s{self._at(doing.worker)}")
            elif took > self.shape.watch_seconds and now - seen.told > self.shape.watch_seconds:
                seen.told = now
                what = f"{doing.method} {self._what(doing)}".strip()
                self.tell(f"{doing.worker} (process {seen.pid}): {what} for {took:.0f} s{self._at(doing.worker)}")

    def _refusal(self, what: str) -> str:
        """Why this is not to be judged any more; "" where it is."""
        late = self.late.get(what, 0) >= REFUSED_AFTER
        return f"the reward did not return within {self.shape.judge_seconds:g} s" if late else ""

    def _what(self, doing: Doing) -> str:
        """What a call is about, for people."""
        if doing.group >= 0:
            return f"group {doing.group}"
        return f"share {doing.share} of {self.exam.kind}" if doing.share >= 0 and self.exam else ""

    def _at(self, name: str) -> str:
        words = self.seen[name].words
        return f", at {', '.join(words[:3])}" if words else ""
