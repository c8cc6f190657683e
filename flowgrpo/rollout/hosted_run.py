"""One hosted rollout under way, as the caller's thread runs it.

`HostedSettings` say how trajectories are rolled out, a `Width` how many at a time over all rollouts that share an
engine, and `HostedRun` plays and judges them. The other threads play one member or judge one group each, and only post
the result. Nothing here waits for a thread: what does not return in its time is left behind in a daemon thread, and the
reason says so (S3, S4).
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from typing import Any

from flowgrpo.contracts import Do, HostEnv, Reward, Scored
from flowgrpo.rollout.effects import (
    NOTHING,
    DeadlineStop,
    FiredDeadlines,
    deadline_stop_of,
    no_effects,
    note_deadline_stop,
    note_unjudged,
    unjudged,
)
from flowgrpo.rollout.judging import is_solved, judge_and_post
from flowgrpo.rollout.records import Hosted, Played, Unfinished, awaits_verdict, with_verdict
from flowgrpo.rollout.trajectory_thread import Member, Submit, play_member, tool_of
from flowgrpo.types import BadInput, Fate, Ledger, Status


class Width:
    """So many places; whoever finds none is woken when one is free, and asks again."""

    def __init__(self, places: int):
        if not places > 0:
            raise BadInput(f"width={places}, but must be greater than 0")
        self._free, self._lock = places, threading.Lock()
        self._waiting: dict[Callable[[], None], None] = {}  # in the order in which they asked

    def take(self, wake: Callable[[], None]) -> bool:
        """Take a place, or be woken once, from another thread, when there may be one."""
        with self._lock:
            if not self._free:
                self._waiting[wake] = None
                return False
            self._free -= 1
            return True

    def give(self) -> None:
        """Give a place back."""
        with self._lock:
            self._free += 1
            waiting, self._waiting = self._waiting, {}
        for wake in waiting:
            wake()


@dataclass(frozen=True)
class HostedSettings:
    """How trajectories are rolled out.

    do              effects of the environment
    reward          judges what the system answered; None: the outcome is the sum of what the environment paid
    solved          whether a verdict says that the task is solved
    by_turn         what the environment paid is paid turn by turn
    temperature     of sampling
    width           trajectories under way at most; rollouts that run at once over one engine share a `Width`
    deadline        seconds of a group from the start of its first member: members that wait for an effect then end
                    as TIMEOUT, those that wait for the engine are given back unfinished
    turn_deadline   seconds of what follows one action, and of the reset
    judges          threads that judge, a group each
    judge_deadline  seconds of a group's verdicts
    repeats         so many equal actions at the end of a trajectory end it as REPETITION
    fired           notes deadlines that fire; those of an earlier attempt stop the same trajectories at that place
    """

    env: HostEnv
    submit: Submit
    do: Do = no_effects
    reward: Reward | None = None
    solved: Callable[[Scored], bool] = is_solved
    by_turn: bool = False
    temperature: float = 1.0
    width: int | Width = 64
    deadline: float | None = None
    turn_deadline: float | None = None
    judges: int = 2
    judge_deadline: float = 600.0
    repeats: int | None = None
    fired: FiredDeadlines = NOTHING

    def __post_init__(self):
        for name in ("temperature", "deadline", "turn_deadline", "judges", "judge_deadline"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise BadInput(f"{name}={value}, but must be greater than 0")
        if not isinstance(self.width, Width):
            Width(self.width)  # which says where that can't be
        if self.repeats is not None and self.repeats < 2:
            raise BadInput(f"repeats={self.repeats}, but an action is repeated when it comes at least 2 times")


ANSWERING = 1.0  # seconds that a request which can no longer be cancelled is given to be answered


@dataclass(eq=False)
class MemberGroup:
    """Members that have one deadline and are judged together."""

    members: list[Member] = field(default_factory=list)
    left: int = 0  # members that have not yet ended
    ends_at: float | None = None
    has_fired: bool = False  # its deadline, in an earlier attempt: each member stops where it did
    to_judge: list[int] = field(default_factory=list)  # the indices of its members that await a verdict
    judged_since: float = 0.0

    @property
    def name(self) -> str:
        """For people."""
        return f"group {self.members[0].course.group}"


class HostedRun:
    """One rollout; `finish` runs it, `abandon` leaves everything behind that is still under way."""

    def __init__(
        self,
        settings: HostedSettings,
        members: list[Member],
        *,
        budget: int | None = None,
        on_done: Callable[[Played], None] | None = None,
        on_played: Callable[[Hosted], None] | None = None,
    ):
        """`_rollout` in `hosted` says what the last three mean."""
        if budget is not None and budget < 1:
            raise BadInput(f"budget={budget}, but a stretch has at least one token")
        self.settings, self.members, self.budget = settings, members, budget
        self.on_done, self.on_played = on_done, on_played
        self.width = settings.width if isinstance(settings.width, Width) else Width(settings.width)
        self.waiting = list(reversed(members))
        self.playing: set[Member] = set()
        self.groups: dict[int, MemberGroup] = {}
        self.ready: list[MemberGroup] = []  # to be judged
        self.judging: set[MemberGroup] = set()
        self.events: queue.SimpleQueue = queue.SimpleQueue()
        self.played: dict[int, Played] = {}
        self.unfinished: dict[int, Unfinished] = {}
        self.unused = 0  # tokens that were delivered too late to become a turn
        self.all_played = False  # and said so
        self.began = time.monotonic()
        self.seconds = {"rollout": 0.0, "playing": 0.0, "judging": 0.0}
        for member in members:
            group = self.groups.setdefault(member.course.group, MemberGroup())
            group.members.append(member)
            group.left += 1
            member.late = deadline_stop_of(settings.fired, member.course.key) if member.given is None else None
            group.has_fired |= member.late is not None and member.late.of_group

    def finish(self) -> Hosted:
        """Play and judge until nothing is left."""
        while self.waiting or self.playing or self.ready or self.judging:
            self._start()
            try:
                kind, what = self.events.get(timeout=self._patience())
            except queue.Empty:
                pass
            else:
                self._handle(kind, what)
            self._keep_deadlines()
            self._say_played()
        self._say_played()
        self.seconds["rollout"] = time.monotonic() - self.began
        return self._given()

    def _say_played(self) -> None:
        """Once, as soon as no trajectory is under way: the turns are there, if not all verdicts."""
        if self.all_played or self.waiting or self.playing:
            return
        self.all_played = True
        if self.on_played is not None:
            self.on_played(self._given())

    def _given(self) -> Hosted:
        return Hosted(
            played=tuple(self.played[index] for index in sorted(self.played)),
            unfinished=tuple(self.unfinished[index] for index in sorted(self.unfinished)),
            ledger=Ledger(self.unused, {Fate.DROPPED_CANCELLED: self.unused} if self.unused else {}),
            left_out=sum(not one.turns for one in self.played.values()),
            seconds=dict(self.seconds),
        )

    def pending(self) -> list[str]:
        """Describe in words what is under way, the longest first; may be called from any thread."""
        now = time.monotonic()
        # Copies, which are made at once: the rollout's own thread changes these while they are read.
        playing, judging = list(self.playing), list(self.judging)
        found = [(now - group.judged_since, f"the reward of {group.name}") for group in judging]
        for member in playing:
            call = member.call
            what = f"{call.kind} {call.name!r}" if call else {"ready": "engine"}.get(member.phase, member.phase)
            found.append((now - member.since, f"trajectory {member.course.group}.{member.course.sample} ({what})"))
        words = [f"{name} for {seconds:.0f} s" for seconds, name in sorted(found, key=lambda one: -one[0])]
        waiting = {"trajectories that have not started": self.waiting, "groups that are not judged yet": self.ready}
        return words + [f"{len(some)} {name}" for name, some in waiting.items() if some]

    def abandon(self) -> None:
        """Cancel what is under way; no thread changes or asks for anything from here on."""
        for member in list(self.playing):
            if member.stop() is not None and member.future is not None:
                member.future.cancel()
            self._leave(member)

    # Starting and ending ------------------------------------------------------------------------------

    def _start(self) -> None:
        """Members while there is width, groups to be judged while there are judges."""
        now, settings = time.monotonic(), self.settings
        while self.waiting and self.width.take(self._wake):
            member = self.waiting.pop()
            group = self.groups[member.course.group]
            self.playing.add(member)
            if member.late is not None and member.late.phase == "queued":
                self._stop_again(member)
                self._wake()  # since no thread will say that something has ended
                continue
            if settings.deadline is not None and group.ends_at is None and not group.has_fired:
                group.ends_at = now + settings.deadline
            member.started = now
            rest = (settings.submit, settings.do, settings.temperature, self.budget, settings.repeats)
            self._thread(f"{member.index}", play_member, member, *rest)
        while self.ready and len(self.judging) < settings.judges:
            group = self.ready.pop(0)
            group.judged_since = now
            self.judging.add(group)
            why = unjudged(settings.fired, self._keys(group))
            if why is not None:
                self._judged(group, [Scored(None, why)] * len(group.to_judge))
                self._wake()
                continue
            awaiting = [self.played[index] for index in group.to_judge]
            outputs = [one.output or "" for one in awaiting]
            self._thread("judge", judge_and_post, group, settings.reward, [one.task for one in awaiting], outputs)

    def _thread(self, name: str, target: Callable, *arguments) -> None:
        # A daemon, so that what hangs in it keeps no interpreter from ending.
        threading.Thread(
            target=target, args=(*arguments, self._post), name=f"flowgrpo-rollout-{name}", daemon=True
        ).start()

    def _post(self, kind: str, what: Any) -> None:
        self.events.put((kind, what))

    def _wake(self) -> None:
        self._post("woken", None)

    def _leave(self, member: Member) -> None:
        """It is not under way any more: its place, and its slot of the engine, are another's."""
        member.conversation.over = True
        if member in self.playing:
            self.playing.remove(member)
            self.width.give()

    def _handle(self, kind: str, what: Any) -> None:
        if kind == "failed":
            raise what
        if kind == "woken":
            return
        if kind == "late":
            self._stop_again(what)
            return
        if kind == "ended":
            self._leave(what)
            if what.phase == "held":
                self.unfinished[what.index] = what.course.unfinished(what.seconds)
            self._settle(what)
        else:
            group, verdicts = what
            if group in self.judging:  # or else its deadline has passed
                self._judged(group, verdicts)

    def _settle(self, member: Member) -> None:
        """A member has ended or is given back: judge its group where it was the last."""
        group = self.groups[member.course.group]
        self.seconds["playing"] = time.monotonic() - self.began
        group.left -= 1
        if member.index not in self.unfinished:
            played = member.course.played(by_turn=self.settings.by_turn, seconds=member.seconds)
            if self.settings.reward is not None and awaits_verdict(played):
                self.played[member.index] = played
                group.to_judge.append(member.index)
            else:
                self._record(member.index, played)
        if not group.left:
            group.ends_at = None
            group.to_judge.sort()
            if group.to_judge:
                self.ready.append(group)

    def _judged(self, group: MemberGroup, verdicts: Sequence[Scored]) -> None:
        self.judging.discard(group)
        self.seconds["judging"] += time.monotonic() - group.judged_since
        for index, scored in zip(group.to_judge, verdicts, strict=True):
            self._record(index, with_verdict(self.played[index], scored, self.settings.solved))

    def _keys(self, group: MemberGroup) -> list[list[int]]:
        return [list(self.played[index].key) for index in group.to_judge]

    def _record(self, index: int, played: Played) -> None:
        """The trajectory is complete."""
        self.played[index] = played
        if self.on_done is not None:
            self.on_done(played)

    # Deadlines ----------------------------------------------------------------------------------------

    def _patience(self) -> float | None:
        """Seconds until a deadline may fire; None where there is none."""
        settings, ends = self.settings, [group.ends_at for group in self.groups.values() if group.ends_at is not None]
        ends += [group.judged_since + settings.judge_deadline for group in self.judging]
        now = time.monotonic()
        if settings.turn_deadline is not None and self.playing:
            calls = [member.since for member in self.playing if member.phase in ("reset", "step")]
            # A call that begins while this thread waits ends later than any that is under way.
            ends.append(min(calls, default=now) + settings.turn_deadline)
        return max(min(ends) - now, 0.0) if ends else None

    def _keep_deadlines(self) -> None:
        """Stop what is late: calls of the environment, groups, verdicts."""
        now, settings = time.monotonic(), self.settings
        if settings.turn_deadline is not None:
            for member in list(self.playing):
                since = member.since
                if member.phase in ("reset", "step") and now >= since + settings.turn_deadline:
                    self._stop([member], f"the turn's {settings.turn_deadline:g} s", since)
        for group in self.groups.values():
            if group.ends_at is not None and now >= group.ends_at:
                group.ends_at = None
                self._stop(group.members, f"the group's {settings.deadline:g} s")
        for group in list(self.judging):
            if now >= group.judged_since + settings.judge_deadline:
                why = f"the reward did not return within {settings.judge_deadline:g} s"
                note_unjudged(settings.fired, self._keys(group), why)
                self._judged(group, [Scored(None, why)] * len(group.to_judge))

    def _stop(self, members: Sequence[Member], limit: str, since: float | None = None) -> None:
        """End those that wait for an effect; give back those that wait for the engine, or for their turn to start."""
        # All of them before anything else, so that none goes on while others are seen to.
        stopped = [(member, phase) for member in members if (phase := member.stop(since)) is not None]
        dropped = self._cancel([member for member, _ in stopped])
        for member, phase in stopped:
            calls = phase in ("reset", "step")
            late = DeadlineStop(
                turns=len(member.course.turns),
                phase=phase,
                effects=-1 if calls and member.call is None else len(member.course.log),
                of_group=since is None,
                reason=_reason(member, phase, limit) if calls else "",
                dropped=dropped.get(member, 0),
            )
            if member.given is None:
                note_deadline_stop(self.settings.fired, member.course.key, late)
            self._end_late(member, late)

    def _stop_again(self, member: Member) -> None:
        """A member has come to where a deadline stopped it before."""
        assert member.late is not None
        if member.stop() is not None:
            self._end_late(member, member.late)

    def _end_late(self, member: Member, late: DeadlineStop) -> None:
        """End a stopped member, or give it back unfinished where it was in no reset or step.

        A step that did not return, by itself or for a tool that the policy called, is the policy's doing (TIMEOUT);
        all else is not (TOOL_FAILURE, F5).
        """
        self.unused += late.dropped
        if late.phase in ("reset", "step"):
            own = late.phase == "step" and (member.call is None or member.call.kind == "tool")
            status = Status.TIMEOUT if own else Status.TOOL_FAILURE
            member.course.cut(status, late.reason, tool_of(member.call))
        else:
            whole = member.given if late.phase in ("queued", "resumed") else None
            self.unfinished[member.index] = whole or member.course.unfinished(member.seconds)
        self._leave(member)
        if member in self.waiting:
            self.waiting.remove(member)
        self._settle(member)

    def _cancel(self, members: Sequence[Member]) -> dict[Member, int]:
        """Cancel what stopped members wait for; tokens of what is delivered all the same, without what they had."""
        late = {one.future: one for one in members if one.future is not None and not one.future.cancel()}
        done = [future for future in wait(late, ANSWERING).done if future.exception() is None]
        return {late[future]: len(future.result().tokens) - len(late[future].begun) for future in done}


def _reason(member: Member, phase: str, limit: str) -> str:
    awaited = f"{member.call.kind} {member.call.name!r}" if member.call else f"the environment's {phase}"
    return f"{awaited} did not return within {limit}: left in the thread flowgrpo-rollout-{member.index}"
