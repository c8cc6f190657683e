"""Hosted rollouts: keys alone decide (E3), every token is accounted for (A6), nothing hangs or is dropped (S4)."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import hosted_cases
import jax
import numpy as np
import pytest
from hosted_cases import (
    MOST,
    STOP,
    TURNS,
    Engine,
    FakeTools,
    answer,
    hang,
    make_env,
    run,
    sampled,
    tasks_of,
    tokens_in,
    value,
    values,
)

import flowgrpo as fg
from flowgrpo.contracts import HostObservation, HostStep, Result, RewardResult
from flowgrpo.rollout.hosted import ConcurrencyLimit, hosted
from flowgrpo.rollout.records import (
    RolloutResult,
    abort,
    from_json,
    partial_from_json,
    partial_to_json,
    to_json,
    to_trajectories,
)
from flowgrpo.rollout.replay import replay
from flowgrpo.types import Status

LATE = 1.0  # a deadline for what hangs: seconds that everything else has, however busy the machine is
MANY = 60.0  # seconds after which a wait is a failure


@pytest.fixture
def engine():
    with Engine() as engine:
        yield engine


# Keys alone decide ------------------------------------------------------------------------------------


def test_rollouts_can_share_a_concurrency_limit(engine):
    """Also those that are abandoned give their places back."""
    width, under_way, most, lock = ConcurrencyLimit(3), set(), [], threading.Lock()

    def counted(call):
        me = threading.get_ident()
        with lock:
            under_way.add(me)
            most.append(len(under_way))
        time.sleep(0.002)
        with lock:
            under_way.discard(me)
        return answer(call)

    works = [tasks_of(3, 4, seed=seed) for seed in range(3)]
    whole = [values(run(engine, work)) for work in works]
    with pytest.raises(ZeroDivisionError):
        hosted(make_env(), engine.submit, call_tool=answer, concurrency=width)(*works[0], on_trajectory=lambda _: 1 / 0)
    rollout = hosted(make_env(), engine.submit, call_tool=counted, concurrency=width)
    with ThreadPoolExecutor(3) as pool:
        got = list(pool.map(lambda work: values(rollout(*work)), works))
    assert got == whole
    assert max(most) == 3


@pytest.mark.parametrize("extends_context", [True, False])
def test_E3_trajectories_are_independent_of_concurrency_order_and_batch(engine, extends_context):
    work, env = tasks_of(6, 4), make_env(extends_context=extends_context)
    whole = values(run(engine, work, env=env))
    assert {len(one["turns"]) for one in whole} >= {1, 2, 4}
    assert values(run(engine, work, FakeTools(seconds=0.002), env=env, concurrency=1)) == whole
    order = np.random.default_rng(0).permutation(24)
    tasks, keys, groups = work
    mixed = run(engine, ([tasks[n] for n in order], keys[order], [groups[n] for n in order]), env=env, concurrency=7)
    for n, one in zip(order, values(mixed), strict=True):
        assert one | {"sample": 0} == whole[n] | {"sample": 0}
    alone = run(engine, (tasks[5:6], keys[5:6], groups[5:6]), env=env)
    assert values(alone)[0] | {"sample": 1} == whole[5]


def test_the_keys_are_those_of_the_compiled_rollout(engine):
    """The environment's from fold_in(key, 0), that of turn t from fold_in(key, 1 + t)."""
    work = tasks_of(1, 3)
    got = run(engine, work)
    fold = [[jax.random.key_data(jax.random.fold_in(key, i)).tolist() for i in range(5)] for key in work[1]]
    for one, keys in zip(got.trajectories, fold, strict=True):
        assert list(one.log[0].call.seed) == keys[0]
        assert {tuple(key) for key in keys[1 : 1 + len(one.turns)]} <= set(engine.asked)
    assert engine.asked.total() == sum(len(one.turns) for one in got.trajectories)


def test_requests_of_extended_and_of_fresh_contexts(engine):
    """A5: an exact token prefix, or every turn for itself."""
    whole, fresh_context = (
        run(engine, tasks_of(4, 2), env=make_env(extends_context=extends_context), concurrency=1)
        for extends_context in (True, False)
    )
    requests = iter(engine.requests)
    for one in whole.trajectories:
        before, chosen = [], []
        for turn in one.turns:
            request, said = next(requests), int((~turn.chosen).sum())
            assert list(request.tokens) == before + turn.tokens[:said].tolist()
            assert list(request.chosen) == chosen + [False] * said
            before, chosen = before + turn.tokens.tolist(), chosen + turn.chosen.tolist()
    for one in fresh_context.trajectories:
        for turn in one.turns:
            request = next(requests)
            assert (list(request.tokens), request.chosen) == (turn.tokens[~turn.chosen].tolist(), None)
    assert {one.extends_context for one in whole.trajectories} == {True}
    assert {one.extends_context for one in fresh_context.trajectories} == {False}


def test_A7_a_turn_may_start_a_context_with_sampled_tokens(engine):
    """Its beginning is given as ids, with what was sampled among them; the action is this turn's alone."""
    env = make_env()

    def step(state, tokens, call_tool):
        state, now = env.step(state, tokens, call_tool)
        if now.done or len(state.actions) != 2:
            return state, now
        first = state.actions[0]  # rewritten: the second action is forgotten
        flags = [False, *[True] * len(first), False]
        return state, now._replace(
            observation=HostObservation(
                [13, *first, 14], extends_context=False, chosen=flags, max_tokens=3, stop=("x",)
            )
        )

    got = run(engine, tasks_of(6, 2), env=env._replace(step=step))
    long = [one for one in got.trajectories if len(one.turns) > 2]
    assert long
    for one in long:
        assert [turn.starts_context for turn in one.turns] == [t == 2 for t in range(len(one.turns))]
        action = one.turns[0].tokens[one.turns[0].chosen].tolist()
        turn = one.turns[2]
        assert turn.tokens[~turn.chosen].tolist() == [13, *action, 14]
        request = next(r for r in engine.requests if list(r.tokens) == [13, *action, 14] and r.stop == ("x",))
        assert list(request.chosen) == [False, *[True] * len(action), False]
        assert request.max_tokens == 3
        again = from_json(to_json(one))
        assert [turn.starts_context for turn in again.turns] == [turn.starts_context for turn in one.turns]
        assert to_json(replay(env._replace(step=step), again)) == to_json(one)
    rollout = to_trajectories(got.trajectories, ("echo",), turns=TURNS)
    starts_context = [[t in (0, 2) and t < len(one.turns) for t in range(TURNS)] for one in got.trajectories]
    assert rollout.starts_context.tolist() == starts_context


def test_extending_a_context_that_the_first_turn_did_not_is_refused(engine):
    env, other = make_env(), make_env(extends_context=False)
    with pytest.raises(fg.BadInput, match="extends its context in some turns, but not in the first"):
        run(engine, tasks_of(2, 2), env=other._replace(step=env.step))


# How trajectories end ---------------------------------------------------------------------------------


def calling(work, engine) -> list[int]:
    """Members whose first action calls the tool."""
    return [n for n, one in enumerate(run(engine, work).trajectories) if one.tools[0] == "echo"]


def test_without_a_reward_function_the_outcome_sums_the_environments_rewards(engine):
    def step(state, tokens, call_tool):
        state, now = make_env().step(state, tokens, call_tool)
        return state, now._replace(reward=0.25)

    env = make_env()._replace(step=step)
    work = tasks_of(6, 4)
    for by_turn in (False, True):
        got = run(engine, work, env=env, by_turn=by_turn)
        for one in got.trajectories:
            assert one.outcome == 0.25 * len(one.turns)
            assert {turn.reward for turn in one.turns} == {0.25 if by_turn else None}
            finished = one.output is not None
            assert one.status == (Status.FINISHED if finished else Status.TURN_LIMIT)
            assert len(one.turns) == 4 or finished
        assert {True, False} == {one.correct for one in got.trajectories}


def test_a_tool_failure_ends_a_trajectory_that_does_not_count(engine):
    """F5: by the environment's word, and by the effect itself where the environment goes on."""
    env, work = make_env(), tasks_of(1, 6, seed=3)
    ill = calling(work, engine)[:2]
    first, second = (work[0][n].query for n in ill)
    lost = {
        first: lambda _: Result("", failure="the index is gone"),
        second: lambda _: Result("", failure="no network"),
    }

    def careless(state, tokens, call_tool):
        following, now = env.step(state, tokens, call_tool)
        ignores = state.task.query == second and now.status == Status.TOOL_FAILURE
        return following, now._replace(status=Status.FINISHED, output="fine") if ignores else now

    got = run(engine, work, FakeTools(lost), env=env._replace(step=careless))
    assert [got.trajectories[n].reason for n in ill] == ["the index is gone", "no network"]
    for n, one in enumerate(got.trajectories):
        assert (one.status == Status.TOOL_FAILURE) == (n in ill)
        assert (one.outcome is None) == (n in ill)


@pytest.mark.parametrize("error", [ValueError("a bug"), SystemExit(3), RecursionError()])
def test_an_exception_in_a_tool_ends_its_own_trajectory_alone(engine, error):
    def raises(_):
        raise error

    work = tasks_of(2, 3, seed=5)
    whole, lost = values(run(engine, work)), calling(work, engine)[0]
    got = run(engine, work, FakeTools({work[0][lost].query: raises}))
    for n, one in enumerate(values(got)):
        if n == lost:
            assert (one["status"], one["outcome"], one["tools"]) == ("ABORTED", None, ["echo"])
            assert f"step raised {type(error).__name__}" in one["reason"]
        else:
            assert one == whole[n]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (HostStep(None, False), "gave no observation, but is not done"),
        (HostStep(HostObservation(["word"]), False), "tokens are ids; encode words first"),
        (HostStep(None, True, reward=float("nan")), "reward nan"),
        (None, "step must return (state, HostStep(observation, done)), and returned (State, NoneType)"),
        (HostStep(None, True, output=42), "give a Status and a string"),
        (HostStep(None, True, status="done"), "give a Status and a string"),
    ],
)
def test_a_step_that_breaks_the_contract_aborts_its_own_trajectory(engine, given, said):
    env = make_env()

    def step(state, tokens, call_tool):
        return (state, given) if state.task.query == "0/0" else env.step(state, tokens, call_tool)

    first, second = run(engine, tasks_of(1, 2), env=env._replace(step=step)).trajectories
    assert first.status == Status.ABORTED
    assert said in first.reason
    assert second.status in (Status.FINISHED, Status.TURN_LIMIT)


def test_a_trajectory_without_a_turn_does_not_count(engine):
    env = make_env()

    def reset(key, task, call_tool):
        if task.query == "0/1":
            raise OSError("no such file")
        return env.reset(key, task, call_tool)

    got = run(engine, tasks_of(1, 3), env=env._replace(reset=reset))
    assert (got.num_without_turns, len(got.trajectories)) == (1, 3)
    assert got.trajectories[1].turns == ()
    assert got.trajectories[1].reason == "reset raised OSError: no such file"
    valid_n = to_trajectories(got.trajectories, env.tools, turns=env.max_turns).valid
    assert valid_n.tolist() == [True, False, True]


def test_a_context_that_outgrows_the_engine_ends_with_the_token_limit():
    with Engine(longest=22) as engine:
        got = run(engine, tasks_of(6, 4))
    limited = [one for one in got.trajectories if one.status == Status.TOKEN_LIMIT]
    assert 0 < len(limited) < 24
    assert all("must fit a slot of 22" in one.reason and one.outcome == 0.0 for one in limited)
    with Engine(longest=3) as engine:
        got = run(engine, tasks_of(1, 2))
    assert (got.num_without_turns, [one.status for one in got.trajectories]) == (2, [Status.TOKEN_LIMIT] * 2)


# Who is told ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("judged", [True, False])
def test_R1_all_sampled_is_announced_before_the_last_rewards(engine, judged):
    """The reward waits until all have played is said, so that a rollout that said it afterwards would never end."""
    told, said, asked = threading.Event(), [], []

    def score(_, output):
        assert told.wait(60)
        return RewardResult(float(len(output) % 2))

    def on_all_sampled(so_far):
        said.append((so_far, asked[0]()))
        told.set()

    more = {"on_all_sampled": on_all_sampled, "on_start": asked.append}
    got = run(engine, tasks_of(3, 4), reward=fg.Reward(score) if judged else None, more=more)
    [(so_far, awaited)] = said
    turns = [[turn.tokens.tolist() for turn in one.turns] for one in got.trajectories]
    assert [[turn.tokens.tolist() for turn in one.turns] for one in so_far.trajectories] == turns
    assert [(one.group, one.sample) for one in so_far.trajectories] == [
        (one.group, one.sample) for one in got.trajectories
    ]
    assert any("group" in word for word in awaited) == judged
    assert asked[0]() == []


def test_what_a_rollout_waits_for_is_named(engine):
    """S3: the trajectory, what it waits for and since when."""
    work, seen = tasks_of(1, 6, seed=1), threading.Event()
    lost, found = calling(work, engine)[0], []

    def watch(pending):
        while not seen.wait(0.005):
            found[:] = [word for word in pending() if word.startswith(f"trajectory 0.{lost} (tool 'echo') for ")]
            if found:
                seen.set()

    def held(call):
        assert seen.wait(60)
        return answer(call)

    on_start = {"on_start": lambda pending: threading.Thread(target=watch, args=(pending,), daemon=True).start()}
    run(engine, work, FakeTools({work[0][lost].query: held}), more=on_start)
    assert len(found) == 1


# Deadlines --------------------------------------------------------------------------------------------


def test_S3_a_group_continues_without_a_trajectory_whose_tool_hangs(engine):
    work = tasks_of(2, 6, seed=1)
    whole, lost = values(run(engine, work)), calling(work, engine)[0]
    reward = fg.Reward(lambda _, output: RewardResult(float(len(output) > 0)))
    got = run(engine, work, FakeTools({work[0][lost].query: hang}), deadline=LATE, reward=reward)
    late = got.trajectories[lost]
    assert late.reason.startswith("tool 'echo' did not return within the group's 1 s: left in the thread")
    assert (late.status, late.outcome, late.output) == (Status.TIMEOUT, 0.0, None)
    assert (late.tools, late.errors) == (("echo",), (True,))
    assert len(got.trajectories) == 12
    for n, one in enumerate(values(got)):
        if n != lost:
            assert one["turns"] == whole[n]["turns"]
            assert one["outcome"] == float(one["output"] is not None)


def test_F5_a_hanging_tool_counts_but_a_role_or_reset_does_not(engine):
    """Each ends its own trajectory at the deadline of a turn, while the others go on through two places."""
    env, work = make_env(), tasks_of(1, 8, seed=1)
    tool, role = calling(work, engine)[:2]
    begin = next(n for n in range(8) if n not in (tool, role))

    def reset(key, task, call_tool):
        return hang(task) if task is work[0][begin] else env.reset(key, task, call_tool)

    def step(state, tokens, call_tool):
        kind = "role" if state.task is work[0][role] else "tool"
        return env.step(state, tokens, lambda call: call_tool(call._replace(kind=kind)))

    call_tool = FakeTools({work[0][n].query: hang for n in (tool, role)})
    got = run(engine, work, call_tool, env=env._replace(reset=reset, step=step), turn_deadline=LATE, concurrency=2)
    expected = {
        tool: ("tool 'echo'", Status.TIMEOUT, 0.0),
        role: ("role 'echo'", Status.TOOL_FAILURE, None),
        begin: ("the environment's reset", Status.TOOL_FAILURE, None),
    }
    for n, (who, status, outcome) in expected.items():
        assert got.trajectories[n].reason.startswith(f"{who} did not return within the turn's 1 s")
        assert (got.trajectories[n].status, got.trajectories[n].outcome) == (status, outcome)
    others = {one.status for n, one in enumerate(got.trajectories) if n not in expected}
    assert others <= {Status.FINISHED, Status.TURN_LIMIT}
    assert got.num_without_turns == 1


def test_trajectories_waiting_for_the_engine_are_returned_and_resumed():
    """No effect is run twice, no turn is sampled twice, and nothing is lost in between (A6)."""
    work, call_tool, calls = tasks_of(3, 4, seed=2), FakeTools(seconds=0.01), FakeTools()
    with Engine() as engine:
        whole, asked = values(run(engine, work, calls)), engine.asked
    with Engine(answers=18) as engine:  # five trajectories of up to four turns: one has ended by then
        first = run(engine, work, call_tool, deadline=LATE, concurrency=5)
        assert 0 < len(first.unfinished) < 12
        assert {len(one.turns) for one in first.unfinished} > {0}
        engine.hold(False)
        rest = run(engine, ((), (), ()), call_tool, more={"unfinished": first.unfinished})
        assert not rest.unfinished
        both = {(one.group, one.sample): value(one) for one in (*first.trajectories, *rest.trajectories)}
        assert [both[g, s] for g in range(3) for s in range(4)] == whole
        assert call_tool.calls == calls.calls
        assert engine.asked == asked
        assert set(asked.values()) == {1}


def test_unfinished_and_new_trajectories_roll_out_together(engine):
    work = tasks_of(2, 2)
    engine.hold()
    first = run(engine, work, deadline=0.1)
    assert (len(first.unfinished), first.trajectories) == (4, ())
    engine.hold(False)
    tasks, keys, groups = tasks_of(4, 2)
    later = run(engine, (tasks[4:], keys[4:], groups[4:]), more={"unfinished": first.unfinished})
    assert [(one.group, one.sample) for one in later.trajectories] == [(g, s) for g in range(4) for s in range(2)]


def in_slices(
    engine, work, call_tool, budget: int, between=lambda: None, **settings
) -> tuple[dict, list[RolloutResult]]:
    """Roll out in slices of at most `budget` tokens a trajectory -> (records by (group, sample), all slices)."""
    slices, before = [run(engine, work, call_tool, more={"budget": budget}, **settings)], {}
    while True:
        got = slices[-1]
        now = {(one.group, one.sample): tokens_in(one.all_turns) for one in got.unfinished}
        ended = {(one.group, one.sample): tokens_in(one.turns) for one in got.trajectories}
        assert all(size - before.get(place, 0) == budget for place, size in now.items())
        assert all(size - before.get(place, 0) <= budget for place, size in ended.items())
        if not got.unfinished:
            break
        between()
        before, given = now, [partial_from_json(partial_to_json(one)) for one in got.unfinished]
        slices.append(run(engine, ((), (), ()), call_tool, more={"unfinished": given, "budget": budget}, **settings))
    return {(one.group, one.sample): value(one) for got in slices for one in got.trajectories}, slices


@pytest.mark.parametrize("extends_context", [True, False])
@pytest.mark.parametrize("budget", [1, 2, 5, MOST + 1])
def test_E3_slices_with_a_token_budget_equal_one_rollout(budget, extends_context):
    """A slice ends where the budget is used up; no token is sampled twice, and every effect runs once (A6)."""
    work, call_tool, calls, env = (
        tasks_of(3, 4, seed=2),
        FakeTools(),
        FakeTools(),
        make_env(extends_context=extends_context),
    )
    with Engine() as engine:
        whole, asked, size = values(run(engine, work, calls, env=env)), engine.asked, engine.delivered
    with Engine() as engine:
        played, slices = in_slices(engine, work, call_tool, budget, env=env)
    assert [played[g, s] for g in range(3) for s in range(4)] == whole
    assert call_tool.calls == calls.calls
    assert (engine.asked, engine.delivered) == (asked, size)
    longest = max(tokens_in(one.turns) for got in slices for one in got.trajectories)
    assert len(slices) == -(-longest // budget)
    assert any(one.partial_action for got in slices for one in got.unfinished)


def test_tokens_of_a_cut_action_keep_their_weight_versions():
    """Those of the context are of the weights that chose the first of them."""
    work, seen = tasks_of(2, 4, seed=2), set()
    with Engine() as engine:
        whole = values(run(engine, work))
    with Engine() as engine:
        played, _ = in_slices(engine, work, FakeTools(), 2, lambda: setattr(engine, "version", engine.version + 1))
    for now, one in zip([played[g, s] for g in range(2) for s in range(4)], whole, strict=True):
        said = 0
        for turn, other in zip(now["turns"], one["turns"], strict=True):
            size, said = len(turn["action"]), said + len(turn["action"])
            expected = [5 + at // 2 for at in range(said - size, said)]
            uniform = len(set(expected)) == 1
            assert turn["version"] == (expected[0] if uniform else [expected[0]] * len(turn["context"]) + expected)
            assert turn | {"version": 5} == other
            seen.add(len(set(expected)))
    assert seen > {1, 2}


def test_a_deadline_returns_a_partial_action_unchanged():
    """Tokens that the engine had sampled of its rest are dropped and counted, earlier ones not counted again (A6)."""
    work = tasks_of(2, 4, seed=2)
    with Engine() as engine:
        whole = values(run(engine, work))
        first = run(engine, work, more={"budget": 1})
        engine.hold()
        late = run(engine, ((), (), ()), deadline=0.1, more={"unfinished": first.unfinished})
        assert (late.trajectories, late.ledger.generated) == ((), 0)
        given = [partial_to_json(replace(one, seconds=0.0)) for one in first.unfinished]
        assert [partial_to_json(replace(one, seconds=0.0)) for one in late.unfinished] == given
        engine.hold(False)
        rest = run(engine, ((), (), ()), more={"unfinished": late.unfinished})
        both = {(one.group, one.sample): value(one) for one in (*first.trajectories, *rest.trajectories)}
    assert [both[g, s] for g in range(2) for s in range(4)] == whole
    assert sum(tokens_in(one.all_turns) for one in first.unfinished) == len(first.unfinished)


def test_an_aborted_partial_action_is_a_turn_that_replays(engine):
    got = run(engine, tasks_of(2, 4, seed=2), more={"budget": MOST + 1})
    cut = [one for one in got.unfinished if one.partial_action and one.turns]
    assert len(cut) > 1
    for one in cut:
        played = abort(one, "nobody goes on with it")
        assert len(played.turns) == len(played.tools) == len(played.errors) == len(one.turns) + 1
        assert tokens_in(played.turns) == tokens_in(one.all_turns) == MOST + 1
        assert value(replay(make_env(), played)) == value(played)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tokens, _: tokens + [9] * 3, "the engine sampled [4-9] tokens where 1 were left: a budget needs one"),
        (lambda tokens, _: [1, *tokens[1:]], "did not continue the partial action"),
        (lambda _, begun: begun, "returned no token"),
    ],
)
def test_an_engine_that_can_not_cut_actions_is_refused(engine, change, words):
    """Or one that has no idea of what was begun."""
    first = run(engine, tasks_of(1, 3, seed=2), more={"budget": 1})
    given = [one for one in first.unfinished if one.partial_action]

    def submit(request):
        future, done = Future(), engine.submit(request).result()
        tokens = change(list(done.tokens), list(request.partial.tokens))
        logp, version = ([x[0]] * len(tokens) for x in (done.logp_sampled, done.version))
        future.set_result(done._replace(tokens=tokens, logp_sampled=logp, version=version))
        return future

    with pytest.raises(fg.BadInput, match=words):
        hosted(make_env(), submit, call_tool=answer)((), (), (), unfinished=given, budget=1)


def test_a_partial_action_must_fit_its_context(engine):
    one = next(one for one in run(engine, tasks_of(1, 3, seed=2), more={"budget": 1}).unfinished if one.partial_action)
    other = replace(one, partial_action=one.partial_action._replace(context=(*one.partial_action.context, 4)))
    for bad in (other, replace(one, effect_counts=(), log=())):
        with pytest.raises(fg.BadInput, match="other tokens before the partial action"):
            run(engine, ((), (), ()), more={"unfinished": [bad]})
    with Engine(longest=MOST) as short, pytest.raises(fg.BadInput, match="must fit a slot"):
        run(short, ((), (), ()), more={"unfinished": [one]})


def test_repeated_actions_end_a_trajectory_before_the_step(engine, monkeypatch):
    monkeypatch.setattr(hosted_cases, "sampled", lambda _: ([4, STOP], [-0.5, -0.5]))
    got = run(engine, tasks_of(1, 2), call_tool := FakeTools(), repetition_limit=3)
    assert [one.status for one in got.trajectories] == [Status.REPETITION] * 2
    assert [len(one.turns) for one in got.trajectories] == [3, 3]
    assert all(one.reason == "the last 3 actions are the same" for one in got.trajectories)
    assert all(one.outcome is not None for one in got.trajectories)  # it counts (F5)
    assert sum(count for call, count in call_tool.calls.items() if "echo" in call) == 4
    assert [one.status for one in run(engine, tasks_of(1, 2), FakeTools()).trajectories] == [Status.TURN_LIMIT] * 2


def test_A6_tokens_delivered_after_a_deadline_are_counted():
    """By an engine whose requests can no longer be cancelled."""
    delivered = []

    def submit(request):
        future = Future()
        future.set_running_or_notify_cancel()
        tokens, logp = sampled(request)
        done = fg.contracts.Completion(tokens, logp, [0] * len(tokens), "stop")
        threading.Timer(LATE + 0.3, lambda: (delivered.append(len(tokens)), future.set_result(done))).start()
        return future

    got = hosted(make_env(), submit, call_tool=answer, deadline=LATE)(*tasks_of(1, 3))
    assert (len(got.unfinished), got.trajectories) == (3, ())
    assert got.ledger.check().fates == {fg.types.Fate.DROPPED_CANCELLED: sum(delivered)}
    assert len(delivered) == 3


def test_a_record_that_does_not_fit_can_not_be_resumed(engine):
    with Engine(answers=3) as held:
        first = run(held, tasks_of(1, 4, seed=1), deadline=LATE, concurrency=1)  # the third has two turns
    behind = next(one for one in first.unfinished if one.turns)
    other = replace(behind.task, query="9/9")
    with pytest.raises(fg.BadInput, match="the record has"):
        run(engine, ((), (), ()), more={"unfinished": [replace(behind, task=other)]})
    said = replace(behind.turns[0], tokens=behind.turns[0].tokens + 1)
    with pytest.raises(fg.BadInput, match="other tokens before turn 0"):
        run(engine, ((), (), ()), more={"unfinished": [replace(behind, turns=(said, *behind.turns[1:]))]})
    with pytest.raises(fg.BadInput, match="are of no one trajectory"):
        run(engine, ((), (), ()), more={"unfinished": [replace(behind, effect_counts=behind.effect_counts[:-2])]})


# Rewards ----------------------------------------------------------------------------------------------


def full(_, output: str) -> RewardResult:
    """1 for an even sum, else a part."""
    return RewardResult(float(output != "" and int(output.split()[-1]) % 2 == 0) or 0.5)


def test_a_reward_scores_the_output_or_an_empty_text(engine):
    seen = []

    def score(task, output):
        seen.append((task.id, output))
        return full(task, output)

    got = run(engine, tasks_of(3, 4), reward=fg.Reward(score))
    for one in got.trajectories:
        assert (one.task.id, one.output or "") in seen
        assert one.outcome == one.reward_result.value
        assert one.correct == (one.reward_result.value == 1.0)
    assert len(seen) == 12
    assert None in {one.output for one in got.trajectories}
    lenient = run(engine, tasks_of(3, 4), reward=fg.Reward(full), is_solved=lambda scored: scored.value > 0)
    assert all(one.correct for one in lenient.trajectories)


def test_R1_a_group_is_judged_while_others_roll_out(engine):
    """The tool of the second group's members returns once the first group is judged."""
    done, judged, work = [], threading.Event(), tasks_of(2, 3, seed=1)

    def held(call):
        assert judged.wait(60)
        return answer(call)

    def on_trajectory(one):
        done.append(one.group)
        if done == [0] * 3:
            judged.set()

    slow = FakeTools({task.query: held for task in work[0][3:]})
    got = run(engine, work, slow, reward=fg.Reward(full), more={"on_trajectory": on_trajectory})
    assert done == [0] * 3 + [1] * 3
    assert any("echo" in one.tools for one in got.trajectories[3:])
    assert got.seconds["rollout"] >= got.seconds["playing"] > 0


def broken(task, _):
    if task.query == "0/1":
        raise RuntimeError("no judge")
    return RewardResult(1.0)


def leaves(task, _):
    return sys.exit(3) if task.query == "0/1" else RewardResult(1.0)


@pytest.mark.parametrize(
    ("score", "said"),
    [
        (broken, "the reward raised RuntimeError: no judge"),
        (leaves, "the reward raised SystemExit: 3"),
        (
            lambda task, _: RewardResult(float("inf") if task.query == "0/1" else 1.0),
            "RewardResult: the value is inf; give a",
        ),
        (lambda task, _: RewardResult(None, "unsure") if task.query == "0/1" else RewardResult(1.0), "unsure"),
        (lambda task, _: None if task.query == "0/1" else RewardResult(1.0), "which is no fg.RewardResult: return"),
    ],
)
def test_F5_a_failed_reward_result_is_invalid_alone(engine, score, said):
    got = run(engine, tasks_of(2, 3), reward=fg.Reward(score))
    for n, one in enumerate(got.trajectories):
        assert (one.status == Status.VERIFIER_FAILURE) == (n == 1)
        assert one.outcome == (None if n == 1 else 1.0)
        assert (said in one.reason) == (n == 1)


def test_a_wrong_number_of_reward_results_is_invalid(engine):
    reward = fg.Reward(full, lambda tasks, _: [RewardResult(1.0)] * (len(tasks) + 1))
    got = run(engine, tasks_of(1, 2), reward=reward)
    assert {one.reason for one in got.trajectories} == {"the reward gave 3 results for 2 outputs"}


def test_R2_a_reward_that_hangs_is_invalid_after_its_deadline(engine):
    reward = fg.Reward(lambda task, _: hang(task) if task.query == "0/0" else RewardResult(1.0))
    got = run(engine, tasks_of(4, 2), reward=reward, judge_deadline=LATE, judges=1)
    assert [one.outcome for one in got.trajectories] == [None] * 2 + [1.0] * 6
    assert got.trajectories[0].reason == "the reward did not return within 1 s"


def test_trajectories_that_do_not_count_are_not_judged(engine):
    judged = []
    reward = fg.Reward(lambda task, _: judged.append(task.query) or RewardResult(1.0))
    work = tasks_of(1, 4, seed=1)
    lost = work[0][calling(work, engine)[0]].query
    got = run(engine, work, FakeTools({lost: lambda _: Result("", failure="gone")}), reward=reward)
    counted = {one.task.query for one in got.trajectories if one.outcome is not None}
    assert set(judged) == counted == {task.query for task in work[0]} - {lost}


# The engine, the caller -------------------------------------------------------------------------------


def rollout_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("flowgrpo-rollout")]


def until(condition) -> None:
    """Wait until it holds."""
    ends = time.monotonic() + MANY
    while not condition():
        assert time.monotonic() < ends, "it never happened"
        time.sleep(0.005)


@contextmanager
def no_thread_is_left():
    before = len(rollout_threads())
    yield
    until(lambda: len(rollout_threads()) <= before)


def closed(engine: Engine) -> dict:
    engine.close()
    return {}


def closed_while_it_is_asked(engine: Engine) -> dict:
    engine.hold()
    threading.Thread(target=lambda: (until(lambda: engine.requests), engine.close())).start()
    return {}


def without_room(engine: Engine) -> dict:
    engine.failure = MemoryError("no room")
    return {}


def with_a_bug_where_trajectories_are_taken(_: Engine) -> dict:
    return {"on_trajectory": lambda _: 1 // 0}


@pytest.mark.parametrize(
    ("ill", "error", "said"),
    [
        (closed, fg.BadInput, "the engine is closed"),
        (closed_while_it_is_asked, fg.BadInput, "the engine is closed|keep it open"),
        (without_room, MemoryError, "no room"),
        (with_a_bug_where_trajectories_are_taken, ZeroDivisionError, "division"),
    ],
)
def test_S4_errors_of_engine_and_caller_are_raised_and_nothing_hangs(engine, ill, error, said):
    more = ill(engine)
    with no_thread_is_left(), pytest.raises(error, match=said):
        run(engine, tasks_of(4, 4), concurrency=5, more=more)


def test_an_interrupt_ends_the_rollout_at_once(engine):
    """While the engine is asked, and answers nothing."""
    engine.hold()

    def interrupt():
        until(lambda: len(engine.requests) == 16)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with no_thread_is_left(), pytest.raises(KeyboardInterrupt):
        run(engine, tasks_of(4, 4), concurrency=16)
    engine.hold(False)
    until(lambda: engine.lost.generated)  # what was cancelled while it decoded
    assert engine.lost.check()
    assert engine.delivered == 0


@pytest.mark.slow
def test_a_tool_that_never_returns_does_not_keep_the_interpreter():
    program = """
from hosted_cases import *
work = tasks_of(1, 4, seed=1)
with Engine() as engine:
    got = run(engine, work, FakeTools({task.query: hang for task in work[0]}), deadline=0.3)
print(sorted(one.status.name for one in got.trajectories)[-1])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True, cwd="tests",
        env=os.environ | {"PYTHONPATH": f"{os.getcwd()}:{os.getcwd()}/tests"},
    )  # fmt: skip
    assert done.stdout.strip() == "TIMEOUT"


def test_other_trajectories_run_while_one_waits_for_a_tool():
    """Four tools return only once all four were called, which takes four trajectories that are under way."""
    work = tasks_of(4, 4)
    with Engine() as engine:
        whole = run(engine, work)
        meeting = threading.Barrier(4)
        callers = [one.task.query for one in whole.trajectories if "echo" in one.tools][:4]
        left = set(callers)

        def meet(call):
            if call.arguments["query"] in left:  # the first time
                left.discard(call.arguments["query"])
                meeting.wait(30)
            return answer(call)

        got = run(engine, work, FakeTools(dict.fromkeys(callers, meet)))
    assert (len(callers), left) == (4, set())
    assert values(got) == values(whole)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"temperature": 0}, "temperature=0, but must be greater than 0"),
        ({"concurrency": 0}, "concurrency=0"),
        ({"deadline": -1}, "deadline=-1"),
        ({"judge_deadline": 0}, "judge_deadline=0"),
        ({"repetition_limit": 1}, "repetition_limit=1"),
    ],
)
def test_settings_out_of_range_are_refused(engine, settings, said):
    with pytest.raises(fg.BadInput, match=said):
        hosted(make_env(), engine.submit, **settings)


def test_tasks_keys_and_groups_of_different_lengths_are_refused(engine):
    tasks, keys, groups = tasks_of(2, 2)
    for work in ((tasks[1:], keys, groups), (tasks, keys[1:], groups), (tasks, keys, groups[1:])):
        with pytest.raises(fg.BadInput, match="give one of each a trajectory"):
            run(engine, work)
    with pytest.raises(fg.BadInput, match="typed keys"):
        run(engine, (tasks, np.zeros((4, 2), np.uint32), groups))
    assert run(engine, ((), (), ())).trajectories == ()


def test_A3_trajectories_are_independent_of_failures_of_others(engine):
    """With other neighbours, some of which fail or hang, each is what it is alone."""
    work = tasks_of(3, 4, seed=7)
    alone = values(run(engine, work, concurrency=1))
    ill = {"0/0": hang, "1/2": lambda _: Result("", failure="gone"), "2/1": lambda _: 1 // 0}
    got = values(run(engine, work, FakeTools(ill), turn_deadline=LATE))
    same = [one == other for one, other in zip(got, alone, strict=True)]
    assert [n for n, equal in enumerate(same) if not equal] == [
        n for n, task in enumerate(work[0]) if task.query in ill and alone[n]["tools"][0] == "echo"
    ]
