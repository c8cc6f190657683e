"""Schedules: every order of events keeps their promises, and nothing is lost, doubled or stuck."""

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
    """Workers that answer in any order, may be lost, and judge what they please."""

    def __init__(self, plan: Plan, seed: int, *, workers: int = 3, room: int = 2, losses: float = 0.0):
        self.plan, self.random, self.losses = plan, random.Random(seed), losses
        self.state, self.open, self.events = ClusterState(), [], []
        self.began: dict[int, int] = {}  # the version that a group was first rolled out with
        self.learned: list[tuple[int, tuple[int, ...]]] = []
        self.dropped: list[int] = []
        self.rolls: list[Command] = []
        for i in range(workers):
            self.tell(Event("joined", f"{ROLLOUT}-{i}", pool=ROLLOUT, room=room))
        self.tell(Event("joined", f"{REWARD}-0", pool=REWARD, room=1))

    def tell(self, event: Event) -> None:
        self.events.append(event)
        self.state, commands = schedule.advance(self.plan, self.state, event)
        for command in commands:
            if command.kind == "roll":
                assert self.plan.budget is None or not cluster_state.is_training(self.state)
                self.rolls.append(command)
                self.began.setdefault(command.groups[0], command.version)
            elif command.kind == "train":
                assert command.version == self.state.version == len(self.learned)
                self.learned.append((command.version, command.groups))
            elif command.kind == "drop":
                self.dropped += command.groups
        self.open += [command for command in commands if command.kind != "drop"]

    def step(self) -> None:
        """Some worker answers, or is lost and comes again."""
        if self.random.random() < self.losses:
            name = self.random.choice(sorted(self.state.workers))
            pool, room, _ = self.state.workers[name]
            self.tell(Event("lost", name))
            self.tell(Event("joined", name, pool=pool, room=room))
        command = self.open.pop(self.random.randrange(len(self.open)))
        if command.kind == "train":
            self.tell(Event("trained"))
        elif command.kind == "judge":
            self.tell(Event("judged", command.worker, command.groups[0], command.ticket))
        elif command.budget is not None and self.random.random() < 0.5:
            self.tell(Event("cut", command.worker, command.groups[0], command.ticket))
        else:
            pool = self.random.choice(["", REWARD])
            self.tell(Event("rolled", command.worker, command.groups[0], command.ticket, pool=pool))

    def run(self, most: int = 20_000) -> "World":
        for _ in range(most):
            if schedule.is_over(self.plan, self.state):
                return self
            assert self.open, f"nothing happens any more at {self.state}"
            self.step()
        raise AssertionError("it does not end")


def check_learned(world: World) -> None:
    """Every update has its groups, none of them twice or too late."""
    learned = [number for _, groups in world.learned for number in groups]
    assert [len(groups) for _, groups in world.learned] == [world.plan.queries] * world.plan.updates
    assert len(set(learned)) == len(learned)
    assert not set(learned) & set(world.dropped)
    late = [version - world.began[number] for version, groups in world.learned for number in groups]
    assert 0 <= min(late) <= max(late) <= world.plan.staleness


@pytest.mark.parametrize("name", PLANS)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 4), st.sampled_from([0.0, 0.2]))
def test_S1_S4_every_group_is_learned_from_once_and_none_too_late(name, seed, workers, room, losses):
    plan = PLANS[name]
    world = World(plan, seed, workers=workers, room=room, losses=losses).run()
    check_learned(world)
    if plan.in_order:
        births = plan.queries + plan.spare
        assert all(number // births == version for version, groups in world.learned for number in groups)
        assert len(world.dropped) <= plan.updates * plan.spare
    else:
        learned = [number for _, groups in world.learned for number in groups]
        assert sorted(learned) == list(range(plan.updates * plan.queries))


def test_staleness_meets_its_bound_and_answers_of_the_lost_are_counted():
    world = World(schedule.asynchronous(8, 200, staleness=3), 1, workers=6, room=3, losses=0.02).run()
    check_learned(world)
    assert max(version - world.began[number] for version, groups in world.learned for number in groups) == 3
    assert world.state.duplicates > 0


def test_an_update_waits_for_what_still_rolls_only_where_rollouts_are_cut():
    for name, waits in (("async", False), ("partial", True)):
        world = World(PLANS[name], 0, workers=3, room=4)
        for command in world.open[: world.plan.queries]:
            world.tell(Event("rolled", command.worker, command.groups[0], command.ticket))
        assert [command.kind for command in world.open if command.kind != "roll"] == ([] if waits else ["train"])


@pytest.mark.parametrize("name", PLANS)
def test_S2_the_same_events_give_the_same_commands(name):
    world, state, again = World(PLANS[name], 7, losses=0.1).run(), ClusterState(), []
    for event in world.events:
        state, commands = schedule.advance(world.plan, state, event)
        again += [(command.version, command.groups) for command in commands if command.kind == "train"]
    assert (again, state) == (world.learned, world.state)


def commands_of(plan: Plan, *events: tuple) -> list[list[tuple]]:
    """List the commands after each event, as (kind, groups, version); worker `a` has room for nine."""
    state, found = ClusterState(), []
    for event in (("joined", "a"), *events):
        state, commands = schedule.advance(plan, state, Event(*event, pool=ROLLOUT if len(event) == 2 else "", room=9))
        found.append([(command.kind, command.groups, command.version) for command in commands])
    return found


def test_synchronous_rollouts_wait_for_the_update_and_those_one_step_off_do_not():
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


def test_partial_rollouts_go_on_with_later_weights_and_have_no_budget_when_they_are_due():
    world, by_group = World(PLANS["partial"], 3).run(), {}
    for command in world.rolls:
        by_group.setdefault(command.groups[0], []).append(command)
    assert any(one[0].version < one[-1].version for one in by_group.values())
    for commands in by_group.values():
        for command in commands:
            assert (command.budget is None) == (commands[0].version + world.plan.staleness <= command.version)


def test_a_worker_that_is_lost_gives_its_groups_back_and_is_not_believed_later():
    plan, state = schedule.synchronous(1, 1), ClusterState()
    state, (roll,) = schedule.advance(plan, state, Event("joined", "a", pool=ROLLOUT))
    state, none = schedule.advance(plan, state, Event("lost", "a"))
    assert (none, state.groups[0].phase) == ([], "waiting")
    state, (again,) = schedule.advance(plan, state, Event("joined", "b", pool=ROLLOUT))
    assert again.groups == (0,)
    assert again.ticket != roll.ticket
    state, none = schedule.advance(plan, state, Event("rolled", "a", 0, roll.ticket))
    assert (none, state.duplicates) == ([], 1)
    state, (train,) = schedule.advance(plan, state, Event("rolled", "b", 0, again.ticket))
    assert train == Command("train", (0,), version=0)


def test_who_judges_is_given_work_however_busy_those_who_roll_out_are():
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


def test_groups_are_dealt_out_among_the_workers_as_they_become_free():
    state = ClusterState()
    for name in "abc":
        state = cluster_state.joined(state, name, ROLLOUT, 2)
    _, commands = schedule.advance(schedule.synchronous(4, 1), state, Event("joined", "d", pool=REWARD))
    assert [command.worker for command in commands] == ["c", "b", "a", "c"]


@given(seed=st.integers(0, 10**6), name=st.sampled_from(sorted(PLANS)))
def test_what_is_counted_is_what_is_there(seed, name):
    world = World(PLANS[name], seed, losses=0.2)
    for _ in range(40):
        if world.open:
            world.step()
        phases = [group.phase for group in world.state.groups.values()]
        assert world.state.counts == {phase: phases.count(phase) for phase in set(phases)}
        for pool in (ROLLOUT, REWARD):
            room = {n for n, one in world.state.workers.items() if one.pool == pool and one.busy < one.room}
            assert sorted(world.state.idle.get(pool, ())) == sorted(room)


@pytest.mark.parametrize("name", PLANS)
@given(seed=st.integers(0, 10**6))
@example(seed=128256)  # saved while an update that had dropped groups was made
def test_S1_a_schedule_goes_on_from_what_was_saved(name, seed):
    plan, world = PLANS[name], World(PLANS[name], seed)
    for _ in range(random.Random(seed).randrange(60)):
        if world.open:
            world.step()
    saved = cluster_state.from_json(json.loads(json.dumps(cluster_state.to_json(world.state))))
    assert saved == world.state._replace(workers={}, idle={})
    kept = [number for number in saved.groups if random.Random(seed + number).random() < 0.8]
    later = World(plan, seed + 100)
    later.learned = [(version, groups) for version, groups in world.learned if version < saved.version]
    later.began, later.dropped, later.open = world.began, world.dropped, []
    later.state = cluster_state.resumed(saved, kept, tickets=1000)
    later.tell(Event("joined", "new", pool=ROLLOUT, room=2))
    later.tell(Event("joined", f"{REWARD}-0", pool=REWARD))
    check_learned(later.run())


def test_schedules_are_what_they_say_down_to_the_smallest_and_refuse_less():
    assert schedule.synchronous(1, 0) == Plan("sync", 1, 0, staleness=0, in_order=True, spare=0, budget=None)
    assert schedule.one_step_off(1, 3, spare=2) == Plan("one_step_off", 1, 3, 1, in_order=True, spare=2)
    assert schedule.asynchronous(1, 3) == Plan("async", 1, 3, staleness=2, in_order=False)
    assert schedule.partial_rollouts(1, 3, budget=1) == Plan("partial", 1, 3, staleness=4, in_order=False, budget=1)
    for make, says in (
        (lambda: schedule.synchronous(0, 1), "queries is 0"),
        (lambda: schedule.asynchronous(1, 1, staleness=-1), "staleness is -1"),
        (lambda: schedule.partial_rollouts(1, 1, budget=0), "budget is 0"),
    ):
        with pytest.raises(BadInput, match=says):
            make()
