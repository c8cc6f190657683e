"""The master of a cluster: it turns news of the workers into events, and the schedule's commands into calls.

    Master(backend, plan, settings, make_worker, folder).run()

The master owns the schedule's state and the replay buffer, both immutable values. It holds references to trajectories
and weights, which go from worker to worker. A worker that is lost, silent or late is reported, killed and replaced, and
its work is given to another under the same random keys (E3). The trainers write checkpoints, which include the master's
state: the schedule, and what was in the buffer. If a trainer or the master itself is lost, the run resumes from the
last checkpoint.
"""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flowgrpo.data.task_sampling import NO_RATES, SuccessRates
from flowgrpo.distributed import cluster_state, schedule
from flowgrpo.distributed.cluster_state import ClusterState, is_training
from flowgrpo.distributed.eval_shares import Evaluator
from flowgrpo.distributed.event_log import EventLog
from flowgrpo.distributed.messages import RolloutJob, RolloutSlice, SliceSummary, pack_slice, unpack_slice, versions
from flowgrpo.distributed.ray_backend import Backend, WorkerLost
from flowgrpo.distributed.schedule import ROLLOUT, TRAIN, Command, Event, Plan
from flowgrpo.distributed.worker_pool import CallFields, ClusterSettings, PendingCall, WorkerGone, WorkerPool
from flowgrpo.distributed.workers import TrainerStart
from flowgrpo.report.watchdog import print_to_stderr
from flowgrpo.training.time_budget import OutOfTime
from flowgrpo.types import JSON

FIRST_TRAINER = f"{TRAIN}-0"  # it writes the model that all workers start with


class Master:
    """One run of a cluster; `run` returns the trainer's result."""

    def __init__(
        self,
        backend: Backend,
        plan: Plan,
        settings: ClusterSettings,
        make_worker: Callable[[str, str], Callable[[], Any]],
        folder: Path,
        *,
        choose_task: Callable[[SuccessRates, int], int] | None = None,
        notify: Callable[[str], None] = print_to_stderr,
        on_iteration: Callable[["Master"], None] = lambda _: None,
    ):
        """Start nothing yet; `run` does.

        Args:
            backend: starts and calls the workers.
            plan: the schedule.
            settings: number of workers, deadlines, sizes of evaluations, time budget.
            make_worker: (pool, name) -> a function that makes the worker, called in the worker's own process.
            folder: of the run, for the event log.
            choose_task: (success rates, group) -> index of the group's task; None: it follows from the group.
            notify: prints a line for people.
            on_iteration: called after each turn of the master's loop.
        """
        self.backend, self.plan, self.settings = backend, plan, settings
        self.choose_task, self.notify, self.on_iteration = choose_task, notify, on_iteration
        self.log = EventLog(folder / "events.jsonl")
        self.workers = WorkerPool(backend, settings, make_worker, self.log, notify)
        self.evaluator = Evaluator(self.workers)
        self.state, self.buffer = ClusterState(), cluster_state.EMPTY_BUFFER
        self.trainer_address = ""  # of the first trainer
        self.is_scheduling = False  # whether the schedule is running
        self.eval_due = False  # at the trainers' position
        self.loads, self.weights, self.version = 0, None, -1  # how often weights were published, and the newest
        self.success_rates: SuccessRates = NO_RATES  # of the tasks, up to the current weights
        self.new_success_rates: SuccessRates = NO_RATES  # those that the update under way has changed
        self.tasks: dict[int, int] = {}  # index of each group's task, if tasks are chosen
        self.last_metrics: Mapping[str, Any] = {}  # of the last update
        self.rollout_pids: set[int] = set()
        self.staleness = 0  # largest number of versions between an update's weights and its oldest token
        self.result: dict[str, JSON] | None = None

    def run(self) -> dict[str, JSON]:
        """Run from the checkpoint, or from the warm start, to the end."""
        with self.log:
            self.workers.launch(self.workers.workers_of(TRAIN))
            while self.result is None:
                for news in self.workers.poll():
                    if isinstance(news, WorkerGone):
                        self._replace(news)
                    else:
                        handler = getattr(self, f"_on_{news.call.method}")  # one for each method of a worker
                        handler(news.call, news.value)
                self.on_iteration(self)
        return self.result

    def _replace(self, gone: WorkerGone) -> None:
        """Replace a worker. If it is a trainer, all trainers go back to the checkpoint.

        Rollout workers are replaced then too: their groups must be rolled out again, and nobody else may write into
        the effect log of the same group.
        """
        self.workers.record_loss(gone)
        is_trainer = self.workers.pools[gone.worker] == TRAIN
        if is_trainer:
            self.evaluator.cancel()
            self.is_scheduling = False
            # Until the trainers have started again, every result is for an old ticket.
            self.state = ClusterState(
                version=self.state.version, next_ticket=self.state.next_ticket, duplicates=self.state.duplicates
            )
        launched = [name for name in self.workers.workers_of(ROLLOUT) if self.workers.status[name].is_launched]
        self.workers.replace([*self.workers.workers_of(TRAIN), *launched] if is_trainer else [gone.worker])
        if gone.worker in self.state.workers:
            self._advance(Event("lost", gone.worker))
        self.evaluator.dispatch()

    # Start and resume ---------------------------------------------------------------------------------

    def _on_describe(self, call: PendingCall, description: Mapping[str, JSON]) -> None:
        """A worker has started."""
        name, pool = call.worker, self.workers.pools[call.worker]
        self.workers.mark_ready(name, description)
        if pool == TRAIN:
            self.trainer_address = description["address"] if name == FIRST_TRAINER else self.trainer_address
            if len(self.workers.ready(TRAIN)) == self.settings.trainer_workers:
                self.workers.call_trainers("join_group", self.trainer_address)
            return
        if self.weights is not None and pool == ROLLOUT:
            self._load(name)
        if self.is_scheduling:
            self._join(name)
        self.evaluator.dispatch()

    def _on_join_group(self, _: PendingCall, __: None) -> None:
        self.workers.call(FIRST_TRAINER, "build")

    def _on_build(self, call: PendingCall, _: None) -> None:
        """The first trainer has written the start model: the other trainers build, then all other workers start."""
        if call.worker == FIRST_TRAINER:
            for name in self.workers.workers_of(TRAIN)[1:]:
                self.workers.call(name, "build")
        if not any(other.method == "build" for other in self.workers.calls.values()):
            self.workers.call_trainers("start")
            self.workers.launch([name for name, status in self.workers.status.items() if not status.is_launched])

    def _on_start(self, _: PendingCall, start: TrainerStart) -> None:
        """The trainers have restored their checkpoint: restore the schedule and the buffer to the same update."""
        self.eval_due, self.success_rates, self.tasks = start.eval_due, start.success_rates, {}
        state, slices, before = ClusterState(version=start.update), {}, self.state
        if start.master_state is not None:
            saved = start.master_state
            state = cluster_state.from_json(json.loads(saved["schedule"]))
            slices = {int(number): unpack_slice(text) for number, text in saved["buffer"].items()}
            self.tasks = {int(number): task for number, task in saved["tasks"].items()}
            seen = json.loads(saved["seen"])
            self.rollout_pids |= set(seen["rollout_pids"])
            self.staleness = seen["staleness"]
        self.buffer = cluster_state.EMPTY_BUFFER
        for number, rollout_slice in slices.items():
            oldest = min(versions(rollout_slice), default=state.groups[number].start_version)
            self.buffer = cluster_state.add_to_buffer(self.buffer, number, rollout_slice, version=oldest)
        state = state._replace(duplicates=max(before.duplicates, state.duplicates))
        self.state = cluster_state.resume(state, slices, next_ticket=before.next_ticket)
        self.workers.late_rewards.clear()
        self.log.write("resumed", update=start.update, tickets=self.state.next_ticket)
        self.workers.call_trainers("weights", returns=2)

    def _on_weights(self, call: PendingCall, version: int) -> None:
        """The weights that the run starts or resumes with."""
        self._publish(call.data, version)
        if self.eval_due:
            self._validate()
        else:
            self._start_schedule()

    def _start_schedule(self) -> None:
        """Let all workers that have started join the schedule."""
        self.is_scheduling = True
        for name, pool in self.workers.pools.items():
            if pool != TRAIN and self.workers.status[name].is_ready:
                self._join(name)
        self._finish_if_over()

    def _join(self, name: str) -> None:
        pool = self.workers.pools[name]
        if name not in self.state.workers:
            capacity = self.settings.worker_capacity if pool == ROLLOUT else 1
            self._advance(Event("joined", name, pool=pool, capacity=capacity))

    # Weights ------------------------------------------------------------------------------------------

    def _publish(self, weights: Any, version: int) -> None:
        """Send new weights to all rollout workers, by reference."""
        self.loads, self.weights, self.version = self.loads + 1, weights, version
        for name in self.workers.ready(ROLLOUT):
            self._load(name)

    def _load(self, name: str) -> None:
        self.workers.call(name, "load", self.weights, self.version, self.loads)

    def _on_load(self, _: PendingCall, __: int) -> None:
        """Nothing: jobs name the weights that they wait for."""

    # The schedule -------------------------------------------------------------------------------------

    def _advance(self, event: Event) -> None:
        """Log an event, advance the schedule by it, and carry out its commands."""
        defaults = Event._field_defaults
        fields = {name: value for name, value in event._asdict().items() if value != defaults.get(name)}
        self.log.write("event", event=fields)
        self.state, commands = schedule.advance(self.plan, self.state, event)
        for command in commands:
            self.log.write(command.kind, groups=command.groups, version=command.version)
            self._execute(command)

    def _execute(self, command: Command) -> None:
        number = command.groups[0]
        subject = f"group {number}"
        fields: CallFields = {"subject": subject, "group": number, "ticket": command.ticket}
        if command.kind == "roll":
            previous = [self.buffer[number].item] if number in self.buffer else []
            if self.choose_task is not None and number not in self.tasks:
                self.tasks[number] = self.choose_task(self.success_rates, number)
            job = RolloutJob("train", command.groups, self.loads, command.budget, self.tasks.get(number))
            self.workers.call(command.worker, "roll_out", job, *previous, returns=2, **fields)
        elif command.kind == "judge":
            args = (self.buffer[number].item, self.workers.refusal(subject))
            self.workers.call(command.worker, "judge", *args, returns=2, **fields)
        elif command.kind == "train":
            groups, self.buffer = cluster_state.take_groups(self.buffer, command.groups)
            self.staleness = max(self.staleness, self.version - min(group.version for group in groups))
            self.tasks = {group: task for group, task in self.tasks.items() if group in self.state.groups}
            self.workers.call_trainers("train", *(group.item for group in groups), returns=2)
        else:
            self.buffer = cluster_state.drop_groups(self.buffer, command.groups)

    def _store(self, call: PendingCall, version: int) -> None:
        """Put a call's slice into the buffer, unless its group is gone or was assigned again meanwhile."""
        group = self.state.groups.get(call.group)
        if group is not None and group.ticket == call.ticket:
            self.buffer = cluster_state.add_to_buffer(self.buffer, call.group, call.data, version=version)

    def _on_roll_out(self, call: PendingCall, summary: SliceSummary) -> None:
        """A slice was rolled out: its group is resumed later, or judged, or ready."""
        self.workers.status[call.worker].tokens += sum(summary.lengths)
        if call.evaluation is not None:
            self.evaluator.add_rollout(call, summary.pool)
            return
        self.rollout_pids.add(summary.pid)
        self._store(call, summary.oldest)
        self.log.write("rolled", group=call.group, **summary._asdict())
        kind = "rolled" if summary.whole else "cut"
        self._advance(Event(kind, call.worker, call.group, call.ticket, pool=summary.pool))

    def _on_judge(self, call: PendingCall, _: int) -> None:
        """A slice was judged."""
        if call.evaluation is not None:
            self.evaluator.add_judged(call)
            return
        self.log.write("judged", group=call.group, seconds=round(time.monotonic() - call.started_at, 4))
        self._store(call, self.version)
        self._advance(Event("judged", call.worker, call.group, call.ticket))

    def _on_train(self, call: PendingCall, metrics: Mapping[str, Any]) -> None:
        """An update was made; the schedule advances once it is validated and saved, if that is due."""
        seconds = round(time.monotonic() - call.started_at, 4)
        self.log.write("trained", version=metrics["version"], seconds=seconds)
        self.last_metrics = metrics
        self._publish(call.data, metrics["version"])
        self.new_success_rates = metrics["known"]
        if self.settings.time_budget.is_over():
            self.workers.call_trainers("save", self._to_checkpoint())
        elif metrics["due"]:
            self._validate()
        else:
            self._finish_update()

    def _finish_update(self) -> None:
        """Advance the schedule; tasks of groups that start from here on are chosen by what this update has shown."""
        self.success_rates = {**self.success_rates, **self.new_success_rates}
        self._advance(Event("trained"))
        self._finish_if_over()

    def _finish_if_over(self) -> None:
        """After the last update, ask the trainers for the parameters to test."""
        if schedule.is_over(self.plan, self.state):
            self.workers.call_trainers("test_params", returns=3)

    # Evaluations and checkpoints ----------------------------------------------------------------------

    def _validate(self) -> None:
        """Validate the current weights, and save."""

        def on_done(slices: list[Any]) -> None:
            self.workers.call_trainers("record_evaluation", self._to_checkpoint(), *slices)

        self.evaluator.start("validation", self.settings.validation_tasks, self.loads, on_done)

    def _to_checkpoint(self) -> dict[str, JSON]:
        """The master's part of a checkpoint: schedule after this update, buffer, tasks, facts for the result."""

        def to_text(item: Any) -> str:
            try:
                return pack_slice(item if isinstance(item, RolloutSlice) else self.backend.get(item))
            except WorkerLost:  # the host that had it is gone: the group will be rolled out again
                return ""

        state = cluster_state.finish_update(self.state) if is_training(self.state) else self.state
        texts = {str(number): to_text(self.buffer[number].item) for number in state.groups if number in self.buffer}
        buffer = {number: text for number, text in texts.items() if text}
        tasks = {str(number): self.tasks[number] for number in state.groups if number in self.tasks}
        seen = {"rollout_pids": sorted(self.rollout_pids), "staleness": self.staleness}
        schedule_text = json.dumps(cluster_state.to_json(state))
        return {"schedule": schedule_text, "buffer": buffer, "tasks": tasks, "seen": json.dumps(seen)}

    def _on_record_evaluation(self, call: PendingCall, metrics: Mapping[str, Any]) -> None:
        """A validation was recorded, and a checkpoint saved."""
        self._on_save(call, metrics["update"])
        if is_training(self.state):
            self._finish_update()
        elif not self.is_scheduling:
            self._start_schedule()

    def _on_save(self, _: PendingCall, update: int) -> None:
        """A checkpoint of this update was saved: stop here if the time budget is over."""
        self.log.write("saved", update=update)
        budget = self.settings.time_budget
        if budget.is_over():
            message = f"the time budget of {budget.text} is over: saved at update {update}"
            self.notify(f"{message}; the same command resumes from there")
            raise OutOfTime

    def _on_test_params(self, call: PendingCall, _: int) -> None:
        """Test the parameters before and after training on the same tasks."""
        params_before, params_after = call.data

        def on_tested_before(slices_before: list[Any]) -> None:
            self._publish(params_after, self.state.version)
            self.evaluator.start(
                "test-after",
                self.settings.test_tasks,
                self.loads,
                lambda slices_after: self._finish(slices_before, slices_after),
            )

        self._publish(params_before, 0)
        self.evaluator.start("test-before", self.settings.test_tasks, self.loads, on_tested_before)

    def _finish(self, slices_before: list[Any], slices_after: list[Any]) -> None:
        cluster = {
            "rollout_pids": sorted(self.rollout_pids),
            "duplicates": self.state.duplicates,
            "lost": self.workers.lost,
            "staleness": self.staleness,
        }
        self.workers.call_trainers("finish", cluster, len(slices_before), *slices_before, *slices_after)

    def _on_finish(self, _: PendingCall, result: dict[str, JSON]) -> None:
        self.result = result
