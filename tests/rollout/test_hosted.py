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
    Do,
    Engine,
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
from flowgrpo.contracts import HostStep, Result, Said, Scored
from flowgrpo.rollout.hosted import hosted
from flowgrpo.rollout.hosted_run import Width
from flowgrpo.rollout.records import (
    Hosted,
    aborted,
    from_json,
    rollout_of,
    to_json,
    unfinished_from_json,
    unfinished_to_json,
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


def test_rollouts_that_share_a_width_have_so_many_trajectories_under_way_together(engine):
    """Also those that are abandoned give their places back."""
    width, under_way, most, lock = Width(3), set(), [], threading.Lock()

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
        hosted(make_env(), engine.submit, do=answer, width=width)(*works[0], on_done=lambda _: 1 / 0)
    rollout = hosted(make_env(), engine.submit, do=counted, width=width)
    with ThreadPoolExecutor(3) as pool:
        got = list(pool.map(lambda work: values(rollout(*work)), works))
    assert got == whole
    assert max(most) == 3


@pytest.mark.parametrize("appends", [True, False])
def test_E3_neither_width_nor_order_nor_company_changes_a_trajectory(engine, appends):
    work, env = tasks_of(6, 4), make_env(appends=appends)
    whole = values(run(engine, work, env=env))
    assert {len(one["turns"]) for one in whole} >= {1, 2, 4}
    assert values(run(engine, work, Do(seconds=0.002), env=env, width=1)) == whole
    order = np.random.default_rng(0).permutation(24)
    tasks, keys, groups = work
    mixed = run(engine, ([tasks[n] for n in order], keys[order], [groups[n] for n in order]), env=env, width=7)
    for n, one in zip(order, values(mixed), strict=True):
        assert one | {"sample": 0} == whole[n] | {"sample": 0}
    alone = run(engine, (tasks[5:6], keys[5:6], groups[5:6]), env=env)
    assert values(alone)[0] | {"sample": 1} == whole[5]


def test_the_keys_are_those_of_the_compiled_rollout(engine):
    """The environment's from fold_in(key, 0), that of turn t from fold_in(key, 1 + t)."""
    work = tasks_of(1, 3)
    got = run(engine, work)
    fold = [[jax.random.key_data(jax.random.fold_in(key, i)).tolist() for i in range(5)] for key in work[1]]
    for one, keys in zip(got.played, fold, strict=True):
        assert list(one.log[0].call.seed) == keys[0]
        assert {tuple(key) for key in keys[1 : 1 + len(one.turns)]} <= set(engine.asked)
    assert engine.asked.total() == sum(len(one.turns) for one in got.played)


def test_a_context_that_appends_says_what_was_sampled_and_a_fresh_one_is_a_new_sequence(engine):
    """A5: an exact token prefix, or every turn for itself."""
    whole, fresh = (run(engine, tasks_of(4, 2), env=make_env(appends=appends), width=1) for appends in (True, False))
    requests = iter(engine.requests)
    for one in whole.played:
        before, chosen = [], []
        for turn in one.turns:
            request, said = next(requests), int((~turn.chosen).sum())
            assert list(request.tokens) == before + turn.tokens[:said].tolist()
            assert list(request.chosen) == chosen + [False] * said
            before, chosen = before + turn.tokens.tolist(), chosen + turn.chosen.tolist()
    for one in fresh.played:
        for turn in one.turns:
            request = next(requests)
            assert (list(request.tokens), request.chosen) == (turn.tokens[~turn.chosen].tolist(), None)
    assert {one.appends for one in whole.played} == {True}
    assert {one.appends for one in fresh.played} == {False}


def test_A7_a_turn_may_begin_another_context_and_go_on_from_what_was_sampled_before(engine):
    """Its beginning is given as ids, with what was sampled among them; the action is this turn's alone."""
    env = make_env()

    def step(state, tokens, do):
        state, now = env.step(state, tokens, do)
        if now.done or len(state.actions) != 2:
            return state, now
        first = state.actions[0]  # rewritten: the second action is forgotten
        flags = [False, *[True] * len(first), False]
        return state, now._replace(said=Said([13, *first, 14], appends=False, chosen=flags, max_tokens=3, stop=("x",)))

    got = run(engine, tasks_of(6, 2), env=env._replace(step=step))
    long = [one for one in got.played if len(one.turns) > 2]
    assert long
    for one in long:
        assert [turn.begins for turn in one.turns] == [t == 2 for t in range(len(one.turns))]
        action = one.turns[0].tokens[one.turns[0].chosen].tolist()
        turn = one.turns[2]
        assert turn.tokens[~turn.chosen].tolist() == [13, *action, 14]
        request = next(r for r in engine.requests if list(r.tokens) == [13, *action, 14] and r.stop == ("x",))
        assert list(request.chosen) == [False, *[True] * len(action), False]
        assert request.max_tokens == 3
        again = from_json(to_json(one))
        assert [turn.begins for turn in again.turns] == [turn.begins for turn in one.turns]
        assert to_json(replay(env._replace(step=step), again)) == to_json(one)
    rollout = rollout_of(got.played, ("echo",), turns=TURNS)
    begins = [[t in (0, 2) and t < len(one.turns) for t in range(TURNS)] for one in got.played]
    assert rollout.begins.tolist() == begins


def test_turns_that_append_after_a_first_that_does_not_are_refused(engine):
    env, other = make_env(), make_env(appends=False)
    with pytest.raises(fg.BadInput, match="appends to its context in some turns, but not in the first"):
        run(engine, tasks_of(2, 2), env=other._replace(step=env.step))


# How trajectories end ---------------------------------------------------------------------------------


def calling(work, engine) -> list[int]:
    """Members whose first action calls the tool."""
    return [n for n, one in enumerate(run(engine, work).played) if one.tools[0] == "echo"]


def test_without_a_reward_the_outcome_is_what_was_paid(engine):
    def step(state, tokens, do):
        state, now = make_env().step(state, tokens, do)
        return state, now._replace(reward=0.25)

    env = make_env()._replace(step=step)
    work = tasks_of(6, 4)
    for by_turn in (False, True):
        got = run(engine, work, env=env, by_turn=by_turn)
        for one in got.played:
            assert one.outcome == 0.25 * len(one.turns)
            assert {turn.reward for turn in one.turns} == {0.25 if by_turn else None}
            finished = one.output is not None
            assert one.status == (Status.FINISHED if finished else Status.TURN_LIMIT)
            assert len(one.turns) == 4 or finished
        assert {True, False} == {one.correct for one in got.played}


def test_a_failure_of_the_world_ends_a_trajectory_that_does_not_count(engine):
    """F5: by the environment's word, and by the effect itself where the environment goes on."""
    env, work = make_env(), tasks_of(1, 6, seed=3)
    ill = calling(work, engine)[:2]
    first, second = (work[0][n].query for n in ill)
    lost = {
        first: lambda _: Result("", failure="the index is gone"),
        second: lambda _: Result("", failure="no network"),
    }

    def careless(state, tokens, do):
        following, now = env.step(state, tokens, do)
        ignores = state.task.query == second and now.status == Status.TOOL_FAILURE
        return following, now._replace(status=Status.FINISHED, output="fine") if ignores else now

    got = run(engine, work, Do(lost), env=env._replace(step=careless))
    assert [got.played[n].reason for n in ill] == ["the index is gone", "no network"]
    for n, one in enumerate(got.played):
        assert (one.status == Status.TOOL_FAILURE) == (n in ill)
        assert (one.outcome is None) == (n in ill)


@pytest.mark.parametrize("error", [ValueError("a bug"), SystemExit(3), RecursionError()])
def test_what_raises_in_a_tool_ends_its_own_trajectory_alone(engine, error):
    def raises(_):
        raise error

    work = tasks_of(2, 3, seed=5)
    whole, lost = values(run(engine, work)), calling(work, engine)[0]
    got = run(engine, work, Do({work[0][lost].query: raises}))
    for n, one in enumerate(values(got)):
        if n == lost:
            assert (one["status"], one["outcome"], one["tools"]) == ("ABORTED", None, ["echo"])
            assert f"step raised {type(error).__name__}" in one["reason"]
        else:
            assert one == whole[n]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (HostStep(None, False), "says nothing, but is not done"),
        (HostStep(Said(["word"]), False), "tokens are ids; encode words first"),
        (HostStep(None, True, reward=float("nan")), "paid nan"),
        (None, "step must give (state, HostStep(said, done)), and gave (State, NoneType)"),
        (HostStep(None, True, output=42), "give a Status and a string"),
        (HostStep(None, True, status="done"), "give a Status and a string"),
    ],
)
def test_a_step_that_gives_nonsense_is_a_bug_of_its_own_trajectory(engine, given, said):
    env = make_env()

    def step(state, tokens, do):
        return (state, given) if state.task.query == "0/0" else env.step(state, tokens, do)

    first, second = run(engine, tasks_of(1, 2), env=env._replace(step=step)).played
    assert first.status == Status.ABORTED
    assert said in first.reason
    assert second.status in (Status.FINISHED, Status.TURN_LIMIT)


def test_what_failed_before_its_first_turn_is_given_back_and_takes_no_part(engine):
    env = make_env()

    def reset(key, task, do):
        if task.query == "0/1":
            raise OSError("no such file")
        return env.reset(key, task, do)

    got = run(engine, tasks_of(1, 3), env=env._replace(reset=reset))
    assert (got.left_out, len(got.played)) == (1, 3)
    assert got.played[1].turns == ()
    assert got.played[1].reason == "reset raised OSError: no such file"
    valid_n = rollout_of(got.played, env.tools, turns=env.turns).valid
    assert valid_n.tolist() == [True, False, True]


def test_a_context_that_outgrows_the_engine_ends_with_the_token_limit():
    with Engine(longest=22) as engine:
        got = run(engine, tasks_of(6, 4))
    limited = [one for one in got.played if one.status == Status.TOKEN_LIMIT]
    assert 0 < len(limited) < 24
    assert all("must fit a slot of 22" in one.reason and one.outcome == 0.0 for one in limited)
    with Engine(longest=3) as engine:
        got = run(engine, tasks_of(1, 2))
    assert (got.left_out, [one.status for one in got.played]) == (2, [Status.TOKEN_LIMIT] * 2)


# Who is told ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("judged", [True, False])
def test_R1_all_turns_are_told_before_the_last_verdicts_are_there(engine, judged):
    """The reward waits until all have played is said, so that a rollout that said it afterwards would never end."""
    told, said, asked = threading.Event(), [], []

    def score(_, output):
        assert told.wait(60)
        return Scored(float(len(output) % 2))

    def on_played(so_far):
        said.append((so_far, asked[0]()))
        told.set()

    more = {"on_played": on_played, "on_start": asked.append}
    got = run(engine, tasks_of(3, 4), reward=fg.Reward(score) if judged else None, more=more)
    [(so_far, awaited)] = said
    turns = [[turn.tokens.tolist() for turn in one.turns] for one in got.played]
    assert [[turn.tokens.tolist() for turn in one.turns] for one in so_far.played] == turns
    assert [(one.group, one.sample) for one in so_far.played] == [(one.group, one.sample) for one in got.played]
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
    run(engine, work, Do({work[0][lost].query: held}), more=on_start)
    assert len(found) == 1


# Deadlines --------------------------------------------------------------------------------------------


def test_S3_a_group_goes_on_without_the_member_whose_tool_hangs(engine):
    work = tasks_of(2, 6, seed=1)
    whole, lost = values(run(engine, work)), calling(work, engine)[0]
    reward = fg.Reward(lambda _, output: Scored(float(len(output) > 0)))
    got = run(engine, work, Do({work[0][lost].query: hang}), deadline=LATE, reward=reward)
    late = got.played[lost]
    assert late.reason.startswith("tool 'echo' did not return within the group's 1 s: left in the thread")
    assert (late.status, late.outcome, late.output) == (Status.TIMEOUT, 0.0, None)
    assert (late.tools, late.errors) == (("echo",), (True,))
    assert len(got.played) == 12
    for n, one in enumerate(values(got)):
        if n != lost:
            assert one["turns"] == whole[n]["turns"]
            assert one["outcome"] == float(one["output"] is not None)


def test_F5_a_tool_that_hangs_is_the_policys_doing_and_a_role_or_a_reset_is_not(engine):
    """Each ends its own trajectory at the deadline of a turn, while the others go on through two places."""
    env, work = make_env(), tasks_of(1, 8, seed=1)
    tool, role = calling(work, engine)[:2]
    begin = next(n for n in range(8) if n not in (tool, role))

    def reset(key, task, do):
        return hang(task) if task is work[0][begin] else env.reset(key, task, do)

    def step(state, tokens, do):
        kind = "role" if state.task is work[0][role] else "tool"
        return env.step(state, tokens, lambda call: do(call._replace(kind=kind)))

    do = Do({work[0][n].query: hang for n in (tool, role)})
    got = run(engine, work, do, env=env._replace(reset=reset, step=step), turn_deadline=LATE, width=2)
    expected = {
        tool: ("tool 'echo'", Status.TIMEOUT, 0.0),
        role: ("role 'echo'", Status.TOOL_FAILURE, None),
        begin: ("the environment's reset", Status.TOOL_FAILURE, None),
    }
    for n, (who, status, outcome) in expected.items():
        assert got.played[n].reason.startswith(f"{who} did not return within the turn's 1 s")
        assert (got.played[n].status, got.played[n].outcome) == (status, outcome)
    others = {one.status for n, one in enumerate(got.played) if n not in expected}
    assert others <= {Status.FINISHED, Status.TURN_LIMIT}
    assert got.left_out == 1


def test_members_that_wait_for_the_engine_are_given_back_and_resumed_as_if_nothing_had_happened():
    """No effect is run twice, no turn is sampled twice, and nothing is lost in between (A6)."""
    work, do, calls = tasks_of(3, 4, seed=2), Do(seconds=0.01), Do()
    with Engine() as engine:
        whole, asked = values(run(engine, work, calls)), engine.asked
    with Engine(answers=18) as engine:  # five trajectories of up to four turns: one has ended by then
        first = run(engine, work, do, deadline=LATE, width=5)
        assert 0 < len(first.unfinished) < 12
        assert {len(one.turns) for one in first.unfinished} > {0}
        engine.hold(False)
        rest = run(engine, ((), (), ()), do, more={"unfinished": first.unfinished})
        assert not rest.unfinished
        both = {(one.group, one.sample): value(one) for one in (*first.played, *rest.played)}
        assert [both[g, s] for g in range(3) for s in range(4)] == whole
        assert do.calls == calls.calls
        assert engine.asked == asked
        assert set(asked.values()) == {1}


def test_unfinished_trajectories_and_new_ones_roll_out_together(engine):
    work = tasks_of(2, 2)
    engine.hold()
    first = run(engine, work, deadline=0.1)
    assert (len(first.unfinished), first.played) == (4, ())
    engine.hold(False)
    tasks, keys, groups = tasks_of(4, 2)
    later = run(engine, (tasks[4:], keys[4:], groups[4:]), more={"unfinished": first.unfinished})
    assert [(one.group, one.sample) for one in later.played] == [(g, s) for g in range(4) for s in range(2)]


def in_stretches(engine, work, do, budget: int, between=lambda: None, **settings) -> tuple[dict, list[Hosted]]:
    """Roll out in stretches of at most `budget` tokens a trajectory -> (records by (group, sample), all stretches)."""
    stretches, before = [run(engine, work, do, more={"budget": budget}, **settings)], {}
    while True:
        got = stretches[-1]
        now = {(one.group, one.sample): tokens_in(one.spoken) for one in got.unfinished}
        ended = {(one.group, one.sample): tokens_in(one.turns) for one in got.played}
        assert all(size - before.get(place, 0) == budget for place, size in now.items())
        assert all(size - before.get(place, 0) <= budget for place, size in ended.items())
        if not got.unfinished:
            break
        between()
        before, given = now, [unfinished_from_json(unfinished_to_json(one)) for one in got.unfinished]
        stretches.append(run(engine, ((), (), ()), do, more={"unfinished": given, "budget": budget}, **settings))
    return {(one.group, one.sample): value(one) for got in stretches for one in got.played}, stretches


@pytest.mark.parametrize("appends", [True, False])
@pytest.mark.parametrize("budget", [1, 2, 5, MOST + 1])
def test_E3_stretches_with_a_budget_come_to_what_one_rollout_would(budget, appends):
    """A stretch ends where the budget is used up; no token is sampled twice, and every effect runs once (A6)."""
    work, do, calls, env = tasks_of(3, 4, seed=2), Do(), Do(), make_env(appends=appends)
    with Engine() as engine:
        whole, asked, size = values(run(engine, work, calls, env=env)), engine.asked, engine.delivered
    with Engine() as engine:
        played, stretches = in_stretches(engine, work, do, budget, env=env)
    assert [played[g, s] for g in range(3) for s in range(4)] == whole
    assert do.calls == calls.calls
    assert (engine.asked, engine.delivered) == (asked, size)
    longest = max(tokens_in(one.turns) for got in stretches for one in got.played)
    assert len(stretches) == -(-longest // budget)
    assert any(one.begun for got in stretches for one in got.unfinished)


def test_the_tokens_of_an_action_that_was_cut_say_which_weights_chose_them():
    """Those of the context are of the weights that chose the first of them."""
    work, seen = tasks_of(2, 4, seed=2), set()
    with Engine() as engine:
        whole = values(run(engine, work))
    with Engine() as engine:
        played, _ = in_stretches(engine, work, Do(), 2, lambda: setattr(engine, "version", engine.version + 1))
    for now, one in zip([played[g, s] for g in range(2) for s in range(4)], whole, strict=True):
        said = 0
        for turn, other in zip(now["turns"], one["turns"], strict=True):
            size, said = len(turn["action"]), said + len(turn["action"])
            expected = [5 + at // 2 for at in range(said - size, said)]
            uniform = len(set(expected)) == 1
            assert turn["version"] == (expected[0] if uniform else [expected[0]] * len(turn["said"]) + expected)
            assert turn | {"version": 5} == other
            seen.add(len(set(expected)))
    assert seen > {1, 2}


def test_an_action_that_was_cut_and_waits_for_the_engine_at_a_deadline_is_given_back_as_it_was():
    """Tokens that the engine had sampled of its rest are dropped and counted, earlier ones not counted again (A6)."""
    work = tasks_of(2, 4, seed=2)
    with Engine() as engine:
        whole = values(run(engine, work))
        first = run(engine, work, more={"budget": 1})
        engine.hold()
        late = run(engine, ((), (), ()), deadline=0.1, more={"unfinished": first.unfinished})
        assert (late.played, late.ledger.generated) == ((), 0)
        given = [unfinished_to_json(replace(one, seconds=0.0)) for one in first.unfinished]
        assert [unfinished_to_json(replace(one, seconds=0.0)) for one in late.unfinished] == given
        engine.hold(False)
        rest = run(engine, ((), (), ()), more={"unfinished": late.unfinished})
        both = {(one.group, one.sample): value(one) for one in (*first.played, *rest.played)}
    assert [both[g, s] for g in range(2) for s in range(4)] == whole
    assert sum(tokens_in(one.spoken) for one in first.unfinished) == len(first.unfinished)


def test_an_action_that_was_cut_and_that_nobody_resumes_is_a_turn_that_can_be_replayed(engine):
    got = run(engine, tasks_of(2, 4, seed=2), more={"budget": MOST + 1})
    cut = [one for one in got.unfinished if one.begun and one.turns]
    assert len(cut) > 1
    for one in cut:
        played = aborted(one, "nobody goes on with it")
        assert len(played.turns) == len(played.tools) == len(played.errors) == len(one.turns) + 1
        assert tokens_in(played.turns) == tokens_in(one.spoken) == MOST + 1
        assert value(replay(make_env(), played)) == value(played)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tokens, _: tokens + [9] * 3, "the engine sampled [4-9] tokens where 1 were left: a budget needs one"),
        (lambda tokens, _: [1, *tokens[1:]], "did not go on with the action that was begun"),
        (lambda _, begun: begun, "answered without a token"),
    ],
)
def test_an_engine_that_can_not_cut_actions_is_refused(engine, change, words):
    """Or one that has no idea of what was begun."""
    first = run(engine, tasks_of(1, 3, seed=2), more={"budget": 1})
    given = [one for one in first.unfinished if one.begun]

    def submit(request):
        future, done = Future(), engine.submit(request).result()
        tokens = change(list(done.tokens), list(request.begun.tokens))
        logp, version = ([x[0]] * len(tokens) for x in (done.logp_sampled, done.version))
        future.set_result(done._replace(tokens=tokens, logp_sampled=logp, version=version))
        return future

    with pytest.raises(fg.BadInput, match=words):
        hosted(make_env(), submit, do=answer)((), (), (), unfinished=given, budget=1)


def test_an_action_that_was_begun_fits_what_is_said_before_it(engine):
    one = next(one for one in run(engine, tasks_of(1, 3, seed=2), more={"budget": 1}).unfinished if one.begun)
    other = replace(one, begun=one.begun._replace(said=(*one.begun.said, 4)))
    for bad in (other, replace(one, lens=(), log=())):
        with pytest.raises(fg.BadInput, match="says other tokens before the action that was begun"):
            run(engine, ((), (), ()), more={"unfinished": [bad]})
    with Engine(longest=MOST) as short, pytest.raises(fg.BadInput, match="must fit a slot"):
        run(short, ((), (), ()), more={"unfinished": [one]})


def test_a_policy_that_repeats_itself_is_stopped_before_its_action_is_carried_out(engine, monkeypatch):
    monkeypatch.setattr(hosted_cases, "sampled", lambda _: ([4, STOP], [-0.5, -0.5]))
    got = run(engine, tasks_of(1, 2), do := Do(), repeats=3)
    assert [one.status for one in got.played] == [Status.REPETITION] * 2
    assert [len(one.turns) for one in got.played] == [3, 3]
    assert all(one.reason == "the last 3 actions are the same" for one in got.played)
    assert all(one.outcome is not None for one in got.played)  # it counts (F5)
    assert sum(count for call, count in do.calls.items() if "echo" in call) == 4
    assert [one.status for one in run(engine, tasks_of(1, 2), Do()).played] == [Status.TURN_LIMIT] * 2


def test_A6_what_is_delivered_after_a_deadline_is_counted():
    """By an engine whose requests can no longer be cancelled."""
    delivered = []

    def submit(request):
        future = Future()
        future.set_running_or_notify_cancel()
        tokens, logp = sampled(request)
        done = fg.Completion(tokens, logp, [0] * len(tokens), "stop")
        threading.Timer(LATE + 0.3, lambda: (delivered.append(len(tokens)), future.set_result(done))).start()
        return future

    got = hosted(make_env(), submit, do=answer, deadline=LATE)(*tasks_of(1, 3))
    assert (len(got.unfinished), got.played) == (3, ())
    assert got.ledger.check().fates == {fg.Fate.DROPPED_CANCELLED: sum(delivered)}
    assert len(delivered) == 3


def test_a_record_that_does_not_fit_can_not_be_resumed(engine):
    with Engine(answers=3) as held:
        first = run(held, tasks_of(1, 4, seed=1), deadline=LATE, width=1)  # the third has two turns
    behind = next(one for one in first.unfinished if one.turns)
    other = replace(behind.task, query="9/9")
    with pytest.raises(fg.BadInput, match="the record has"):
        run(engine, ((), (), ()), more={"unfinished": [replace(behind, task=other)]})
    said = replace(behind.turns[0], tokens=behind.turns[0].tokens + 1)
    with pytest.raises(fg.BadInput, match="says other tokens before turn 0"):
        run(engine, ((), (), ()), more={"unfinished": [replace(behind, turns=(said, *behind.turns[1:]))]})
    with pytest.raises(fg.BadInput, match="are of no one trajectory"):
        run(engine, ((), (), ()), more={"unfinished": [replace(behind, lens=behind.lens[:-2])]})


# Rewards ----------------------------------------------------------------------------------------------


def full(_, output: str) -> Scored:
    """1 for an even sum, else a part."""
    return Scored(float(output != "" and int(output.split()[-1]) % 2 == 0) or 0.5)


def test_a_reward_judges_the_output_and_nothing_is_an_empty_one(engine):
    seen = []

    def score(task, output):
        seen.append((task.id, output))
        return full(task, output)

    got = run(engine, tasks_of(3, 4), reward=fg.Reward(score))
    for one in got.played:
        assert (one.task.id, one.output or "") in seen
        assert one.outcome == one.scored.value
        assert one.correct == (one.scored.value == 1.0)
    assert len(seen) == 12
    assert None in {one.output for one in got.played}
    lenient = run(engine, tasks_of(3, 4), reward=fg.Reward(full), solved=lambda scored: scored.value > 0)
    assert all(one.correct for one in lenient.played)


def test_R1_a_group_is_judged_while_others_still_play(engine):
    """The tool of the second group's members returns once the first group is judged."""
    done, judged, work = [], threading.Event(), tasks_of(2, 3, seed=1)

    def held(call):
        assert judged.wait(60)
        return answer(call)

    def on_done(one):
        done.append(one.group)
        if done == [0] * 3:
            judged.set()

    slow = Do({task.query: held for task in work[0][3:]})
    got = run(engine, work, slow, reward=fg.Reward(full), more={"on_done": on_done})
    assert done == [0] * 3 + [1] * 3
    assert any("echo" in one.tools for one in got.played[3:])
    assert got.seconds["rollout"] >= got.seconds["playing"] > 0


def broken(task, _):
    if task.query == "0/1":
        raise RuntimeError("no judge")
    return Scored(1.0)


def leaves(task, _):
    return sys.exit(3) if task.query == "0/1" else Scored(1.0)


@pytest.mark.parametrize(
    ("score", "said"),
    [
        (broken, "the reward raised RuntimeError: no judge"),
        (leaves, "the reward raised SystemExit: 3"),
        (lambda task, _: Scored(float("inf") if task.query == "0/1" else 1.0), "Scored: the value is inf; give a"),
        (lambda task, _: Scored(None, "unsure") if task.query == "0/1" else Scored(1.0), "unsure"),
        (lambda task, _: None if task.query == "0/1" else Scored(1.0), "which is no fg.Scored: return"),
    ],
)
def test_F5_a_verdict_that_fails_is_invalid_and_costs_no_other_its_own(engine, score, said):
    got = run(engine, tasks_of(2, 3), reward=fg.Reward(score))
    for n, one in enumerate(got.played):
        assert (one.status == Status.VERIFIER_FAILURE) == (n == 1)
        assert one.outcome == (None if n == 1 else 1.0)
        assert (said in one.reason) == (n == 1)


def test_a_reward_that_answers_for_another_number_is_invalid(engine):
    reward = fg.Reward(full, lambda tasks, _: [Scored(1.0)] * (len(tasks) + 1))
    got = run(engine, tasks_of(1, 2), reward=reward)
    assert {one.reason for one in got.played} == {"the reward gave 3 verdicts for 2 outputs"}


def test_R2_a_reward_that_hangs_is_invalid_after_its_deadline(engine):
    reward = fg.Reward(lambda task, _: hang(task) if task.query == "0/0" else Scored(1.0))
    got = run(engine, tasks_of(4, 2), reward=reward, judge_deadline=LATE, judges=1)
    assert [one.outcome for one in got.played] == [None] * 2 + [1.0] * 6
    assert got.played[0].reason == "the reward did not return within 1 s"


def test_what_does_not_count_is_not_judged(engine):
    judged = []
    reward = fg.Reward(lambda task, _: judged.append(task.query) or Scored(1.0))
    work = tasks_of(1, 4, seed=1)
    lost = work[0][calling(work, engine)[0]].query
    got = run(engine, work, Do({lost: lambda _: Result("", failure="gone")}), reward=reward)
    counted = {one.task.query for one in got.played if one.outcome is not None}
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
    return {"on_done": lambda _: 1 // 0}


@pytest.mark.parametrize(
    ("ill", "error", "said"),
    [
        (closed, fg.BadInput, "the engine is closed"),
        (closed_while_it_is_asked, fg.BadInput, "the engine is closed|keep it open"),
        (without_room, MemoryError, "no room"),
        (with_a_bug_where_trajectories_are_taken, ZeroDivisionError, "division"),
    ],
)
def test_S4_a_failure_of_the_engine_or_the_caller_is_said_and_nothing_hangs(engine, ill, error, said):
    more = ill(engine)
    with no_thread_is_left(), pytest.raises(error, match=said):
        run(engine, tasks_of(4, 4), width=5, more=more)


def test_an_interrupt_ends_the_rollout_at_once(engine):
    """While the engine is asked, and answers nothing."""
    engine.hold()

    def interrupt():
        until(lambda: len(engine.requests) == 16)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with no_thread_is_left(), pytest.raises(KeyboardInterrupt):
        run(engine, tasks_of(4, 4), width=16)
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
    got = run(engine, work, Do({task.query: hang for task in work[0]}), deadline=0.3)
print(sorted(one.status.name for one in got.played)[-1])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True, cwd="tests",
        env=os.environ | {"PYTHONPATH": f"{os.getcwd()}:{os.getcwd()}/tests"},
    )  # fmt: skip
    assert done.stdout.strip() == "TIMEOUT"


def test_while_one_waits_for_a_tool_the_others_go_on():
    """Four tools return only once all four were called, which takes four trajectories that are under way."""
    work = tasks_of(4, 4)
    with Engine() as engine:
        whole = run(engine, work)
        meeting = threading.Barrier(4)
        callers = [one.task.query for one in whole.played if "echo" in one.tools][:4]
        left = set(callers)

        def meet(call):
            if call.arguments["query"] in left:  # the first time
                left.discard(call.arguments["query"])
                meeting.wait(30)
            return answer(call)

        got = run(engine, work, Do(dict.fromkeys(callers, meet)))
    assert (len(callers), left) == (4, set())
    assert values(got) == values(whole)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"temperature": 0}, "temperature=0, but must be greater than 0"),
        ({"width": 0}, "width=0"),
        ({"deadline": -1}, "deadline=-1"),
        ({"judge_deadline": 0}, "judge_deadline=0"),
        ({"repeats": 1}, "repeats=1"),
    ],
)
def test_settings_out_of_range_are_refused(engine, settings, said):
    with pytest.raises(fg.BadInput, match=said):
        hosted(make_env(), engine.submit, **settings)


def test_work_that_does_not_fit_together_is_refused(engine):
    tasks, keys, groups = tasks_of(2, 2)
    for work in ((tasks[1:], keys, groups), (tasks, keys[1:], groups), (tasks, keys, groups[1:])):
        with pytest.raises(fg.BadInput, match="give one of each a trajectory"):
            run(engine, work)
    with pytest.raises(fg.BadInput, match="typed keys"):
        run(engine, (tasks, np.zeros((4, 2), np.uint32), groups))
    assert run(engine, ((), (), ())).played == ()


def test_A3_nothing_of_one_trajectory_reaches_another(engine):
    """With other neighbours, some of which fail or hang, each is what it is alone."""
    work = tasks_of(3, 4, seed=7)
    alone = values(run(engine, work, width=1))
    ill = {"0/0": hang, "1/2": lambda _: Result("", failure="gone"), "2/1": lambda _: 1 // 0}
    got = values(run(engine, work, Do(ill), turn_deadline=LATE))
    same = [one == other for one, other in zip(got, alone, strict=True)]
    assert [n for n, equal in enumerate(same) if not equal] == [
        n for n, task in enumerate(work[0]) if task.query in ill and alone[n]["tools"][0] == "echo"
    ]
