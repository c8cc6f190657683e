"""Schedules: their guarantees hold under every order of events, and no group is lost, doubled or stuck."""

import json
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flowgrpo.distributed import cluster_state, schedule
from flowgrpo.distributed.cluster_state import ClusterState
from flowgrpo.distributed.schedule import REWARD, ROLLOUT, Command, Event, Plan
from flowgrpo.types import BadInput

PLANS = {
    "sync": schedule.synchronous(4, 6),
    "sync with spare": schedule.synchronous(4, 6, spare=2),
    "one_step_off": schedule.one_step_off(4, 6),
    "async": schedule.asynchronous(4, 8, staleness=2),
    "async without": schedule.asynchronous(3, 6, staleness=0),
    "async far": schedule.asynchronous(2, 9, staleness=5),
    "partial": schedule.partial_rollouts(3, 8, budget=10, staleness=3, spare=3),
    "partial tight": schedule.partial_rollouts(2, 6, budget=10, staleness=1, spare=2),
}


class World:
    """Simulated workers that answer in random order, may be lost, and judge or don't."""

    def __init__(self, plan: Plan, seed: int, *, workers: int = 3, capacity: int = 2, losses: float = 0.0):
        self.plan, self.rng, self.losses = plan, random.Random(seed), losses
        self.state, self.pending, self.events = ClusterState(), [], []
        self.start_versions: dict[int, int] = {}  # by group: version that it was first rolled out with
        self.updates: list[tuple[int, tuple[int, ...]]] = []
        self.dropped: list[int] = []
        self.rolls: list[Command] = []
        for i in range(workers):
            self.send(Event("joined", f"{ROLLOUT}-{i}", pool=ROLLOUT, capacity=capacity))
        self.send(Event("joined", f"{REWARD}-0", pool=REWARD, capacity=1))

    def send(self, event: Event) -> None:
        self.events.append(event)
        self.state, commands = schedule.advance(self.plan, self.state, event)
        for command in commands:
            if command.kind == "roll":
                assert self.plan.budget is None or not cluster_state.is_training(self.state)
                self.rolls.append(command)
                self.start_versions.setdefault(command.groups[0], command.version)
            elif command.kind == "train":
                assert command.version == self.state.version == len(self.updates)
                self.updates.append((command.version, command.groups))
            elif command.kind == "drop":
                self.dropped += command.groups
        self.pending += [command for command in commands if command.kind != "drop"]

    def step(self) -> None:
        """A worker answers, or is lost and joins again."""
        if self.rng.random() < self.losses:
            name = self.rng.choice(sorted(self.state.workers))
            pool, capacity, _ = self.state.workers[name]
            self.send(Event("lost", name))
            self.send(Event("joined", name, pool=pool, capacity=capacity))
        command = self.pending.pop(self.rng.randrange(len(self.pending)))
        if command.kind == "train":
            self.send(Event("trained"))
        elif command.kind == "judge":
            self.send(Event("judged", command.worker, command.groups[0], command.ticket))
        elif command.budget is not None and self.rng.random() < 0.5:
            self.send(Event("cut", command.worker, command.groups[0], command.ticket))
        else:
            pool = self.rng.choice(["", REWARD])
            self.send(Event("rolled", command.worker, command.groups[0], command.ticket, pool=pool))

    def run(self, max_steps: int = 20_000) -> "World":
        for _ in range(max_steps):
            if schedule.is_over(self.plan, self.state):
                return self
            assert self.pending, f"nothing happens any more at {self.state}"
            self.step()
        raise AssertionError("it does not end")


def check_updates(world: World) -> None:
    """Every update has its groups, none of them twice or too late."""
    trained = [number for _, groups in world.updates for number in groups]
    assert [len(groups) for _, groups in world.updates] == [world.plan.queries] * world.plan.updates
    assert len(set(trained)) == len(trained)
    assert not set(trained) & set(world.dropped)
    staleness = [version - world.start_versions[number] for version, groups in world.updates for number in groups]
    assert 0 <= min(staleness) <= max(staleness) <= world.plan.staleness


@pytest.mark.parametrize("name", PLANS)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 4), st.sampled_from([0.0, 0.2]))
def test_S1_S4_every_group_is_trained_on_once_and_in_time(name, seed, workers, capacity, losses):
    plan = PLANS[name]
    world = World(plan, seed, workers=workers, capacity=capacity, losses=losses).run()
    check_updates(world)
    if plan.in_order:
        per_update = plan.queries + plan.spare
        assert all(number // per_update == version for version, groups in world.updates for number in groups)
        assert len(world.dropped) <= plan.updates * plan.spare
    else:
        trained = [number for _, groups in world.updates for number in groups]
        assert sorted(trained) == list(range(plan.updates * plan.queries))


def test_staleness_reaches_its_bound_and_duplicates_are_counted():
    world = World(schedule.asynchronous(8, 200, staleness=3), 1, workers=6, capacity=3, losses=0.02).run()
    check_updates(world)
    assert max(version - world.start_versions[number] for version, groups in world.updates for number in groups) == 3
    assert world.state.duplicates > 0


def test_only_with_a_budget_an_update_waits_for_rollouts():
    for name, waits in (("async", False), ("partial", True)):
        world = World(PLANS[name], 0, workers=3, capacity=4)
        for command in world.pending[: world.plan.queries]:
            world.send(Event("rolled", command.worker, command.groups[0], command.ticket))
        assert [command.kind for command in world.pending if command.kind != "roll"] == ([] if waits else ["train"])


@pytest.mark.parametrize("name", PLANS)
def test_S2_the_same_events_give_the_same_commands(name):
    world, state, updates = World(PLANS[name], 7, losses=0.1).run(), ClusterState(), []
    for event in world.events:
        state, commands = schedule.advance(world.plan, state, event)
        updates += [(command.version, command.groups) for command in commands if command.kind == "train"]
    assert (updates, state) == (world.updates, world.state)


def commands_of(plan: Plan, *events: tuple) -> list[list[tuple]]:
    """The commands after each event, as (kind, groups, version); worker `a` has a capacity of nine."""
    state, lists = ClusterState(), []
    for event in (("joined", "a"), *events):
        state, commands = schedule.advance(
            plan, state, Event(*event, pool=ROLLOUT if len(event) == 2 else "", capacity=9)
        )
        lists.append([(command.kind, command.groups, command.version) for command in commands])
    return lists


def test_synchronous_rollouts_wait_for_the_update_and_one_step_off_does_not():
    assert commands_of(schedule.synchronous(2, 2), ("rolled", "a", 1, 1), ("rolled", "a", 0, 0), ("trained",)) == [
        [("roll", (0,), 0), ("roll", (1,), 0)],
        [],
        [("train", (0, 1), 0)],
        [("roll", (2,), 1), ("roll", (3,), 1)],
    ]
    assert commands_of(schedule.one_step_off(1, 3), ("rolled", "a", 0, 0), ("trained",)) == [
        [("roll", (0,), 0), ("roll", (1,), 0)],
        [("train", (0,), 0)],
        [("roll", (2,), 1)],
    ]


def test_partial_rollouts_resume_with_later_weights_and_without_budget_when_due():
    world, by_group = World(PLANS["partial"], 3).run(), {}
    for command in world.rolls:
        by_group.setdefault(command.groups[0], []).append(command)
    assert any(commands[0].version < commands[-1].version for commands in by_group.values())
    for commands in by_group.values():
        for command in commands:
            assert (command.budget is None) == (commands[0].version + world.plan.staleness <= command.version)


def test_a_lost_worker_returns_its_groups_and_its_results_are_ignored():
    plan, state = schedule.synchronous(1, 1), ClusterState()
    state, (roll,) = schedule.advance(plan, state, Event("joined", "a", pool=ROLLOUT))
    state, commands = schedule.advance(plan, state, Event("lost", "a"))
    assert (commands, state.groups[0].phase) == ([], "waiting")
    state, (second_roll,) = schedule.advance(plan, state, Event("joined", "b", pool=ROLLOUT))
    assert second_roll.groups == (0,)
    assert second_roll.ticket != roll.ticket
    state, commands = schedule.advance(plan, state, Event("rolled", "a", 0, roll.ticket))
    assert (commands, state.duplicates) == ([], 1)
    state, (train,) = schedule.advance(plan, state, Event("rolled", "b", 0, second_roll.ticket))
    assert train == Command("train", (0,), version=0)


def test_reward_workers_get_groups_while_rollout_workers_are_busy():
    plan, state = schedule.synchronous(3, 1), ClusterState()
    for name, pool in (("judge", REWARD), ("roller", ROLLOUT)):
        state, commands = schedule.advance(plan, state, Event("joined", name, pool=pool))
    judging = []
    for _ in range(2):  # the second group waits for the judge, while the third keeps the roller busy
        (roll,) = (command for command in commands if command.kind == "roll")
        state, commands = schedule.advance(plan, state, Event("rolled", "roller", *roll.groups, roll.ticket, REWARD))
        judging += [command for command in commands if command.kind == "judge"]
    assert [command.groups for command in judging] == [(0,)]
    state, commands = schedule.advance(plan, state, Event("judged", "judge", 0, judging[0].ticket))
    assert [(command.kind, command.groups, command.worker) for command in commands] == [("judge", (1,), "judge")]


def test_groups_are_distributed_over_idle_workers():
    state = ClusterState()
    for name in "abc":
        state = cluster_state.add_worker(state, name, ROLLOUT, 2)
    _, commands = schedule.advance(schedule.synchronous(4, 1), state, Event("joined", "d", pool=REWARD))
    assert [command.worker for command in commands] == ["c", "b", "a", "c"]


@given(seed=st.integers(0, 10**6), name=st.sampled_from(sorted(PLANS)))
def test_counts_and_idle_workers_agree_with_the_state(seed, name):
    world = World(PLANS[name], seed, losses=0.2)
    for _ in range(40):
        if world.pending:
            world.step()
        phases = [group.phase for group in world.state.groups.values()]
        assert world.state.counts == {phase: phases.count(phase) for phase in set(phases)}
        for pool in (ROLLOUT, REWARD):
            workers = world.state.workers.items()
            idle = {name for name, worker in workers if worker.pool == pool and worker.busy < worker.capacity}
            assert sorted(world.state.idle.get(pool, ())) == sorted(idle)


@pytest.mark.parametrize("name", PLANS)
@given(seed=st.integers(0, 10**6))
@example(seed=128256)  # saved during an update that had dropped groups
def test_S1_a_schedule_resumes_from_its_checkpoint(name, seed):
    plan, world = PLANS[name], World(PLANS[name], seed)
    for _ in range(random.Random(seed).randrange(60)):
        if world.pending:
            world.step()
    saved = cluster_state.from_json(json.loads(json.dumps(cluster_state.to_json(world.state))))
    assert saved == world.state._replace(workers={}, idle={})
    available = [number for number in saved.groups if random.Random(seed + number).random() < 0.8]
    later = World(plan, seed + 100)
    later.updates = [(version, groups) for version, groups in world.updates if version < saved.version]
    later.start_versions, later.dropped, later.pending = world.start_versions, world.dropped, []
    later.state = cluster_state.resume(saved, available, next_ticket=1000)
    later.send(Event("joined", "new", pool=ROLLOUT, capacity=2))
    later.send(Event("joined", f"{REWARD}-0", pool=REWARD))
    check_updates(later.run())


def test_schedules_are_plans_and_refuse_bad_numbers():
    assert schedule.synchronous(1, 0) == Plan("sync", 1, 0, staleness=0, in_order=True, spare=0, budget=None)
    assert schedule.one_step_off(1, 3, spare=2) == Plan("one_step_off", 1, 3, 1, in_order=True, spare=2)
    assert schedule.asynchronous(1, 3) == Plan("async", 1, 3, staleness=2, in_order=False)
    assert schedule.partial_rollouts(1, 3, budget=1) == Plan("partial", 1, 3, staleness=4, in_order=False, budget=1)
    for make, message in (
        (lambda: schedule.synchronous(0, 1), "queries is 0"),
        (lambda: schedule.asynchronous(1, 1, staleness=-1), "staleness is -1"),
        (lambda: schedule.partial_rollouts(1, 1, budget=0), "budget is 0"),
    ):
        with pytest.raises(BadInput, match=message):
            make()
