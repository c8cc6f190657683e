"""Hosted rollouts over the real engine: equal to the compiled rollout (E2), with the same bits in any batch (E3)."""

import threading
from functools import partial

import jax
import numpy as np
import pytest
from engine_cases import on_stretch
from hosted_cases import FakeTools, answer, check_sums, make_env, run, tasks_of, value, values
from tiny_models import BANNED, POLICY, tiny_params

import flowgrpo as fg
from flowgrpo.envs.arithmetic import arithmetic
from flowgrpo.envs.env import PAD
from flowgrpo.envs.lookup import lookup
from flowgrpo.envs.maze import maze
from flowgrpo.generate.engine import Engine, EngineSettings
from flowgrpo.generate.sampler import draw_margin, logprobs
from flowgrpo.models.config import DecoderConfig, Rope
from flowgrpo.models.decoder import make_policy
from flowgrpo.rollout.compiled import make_rollout, repeat
from flowgrpo.rollout.exams import draw_tasks
from flowgrpo.rollout.host_adapter import as_host, unstack
from flowgrpo.rollout.hosted import hosted
from flowgrpo.rollout.records import from_json, partial_from_json, partial_to_json, to_json, to_trajectories
from flowgrpo.rollout.replay import replay
from flowgrpo.training.pure_env import max_trajectory_tokens

pytestmark = pytest.mark.slow

ENVS = {
    "lookup": lookup,
    "arithmetic": arithmetic,
    "maze by turn": partial(maze, by_turn=True),
}
NEAR = 1e-4


class Listening:
    """An engine that keeps what it was asked and the futures of its answers."""

    def __init__(self, engine: Engine):
        self.engine, self.asked = engine, []

    def submit(self, request):
        future = self.engine.submit(request)
        self.asked.append((request, future))
        return future

    @property
    def heard(self) -> list:
        """(request, completion) of all that were answered."""
        return [(request, future.result()) for request, future in self.asked if not future.cancelled()]

    @property
    def delivered(self) -> int:
        return sum(len(got.tokens) - (len(asked.partial.tokens) if asked.partial else 0) for asked, got in self.heard)

    @property
    def lost(self):
        return self.engine.lost


# E2 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ENVS)
def test_E2_compiled_and_hosted_rollout_are_the_same(name, record_property):
    """Token for token, up to near-ties; then all else is equal too, and log-probabilities within 1e-5."""
    env = ENVS[name]()
    policy = make_policy(
        DecoderConfig(
            v=len(env.vocabulary), d=16, h=2, k=1, e=8, f=16, windows=(None,), ropes=(Rope(),), init_scale=0.4
        )
    )
    tasks, group_n = repeat(draw_tasks(env, jax.random.key(1), 16, "train"), 4)
    keys, params = jax.random.split(jax.random.key(3), 64), policy.init(jax.random.key(2))
    compiled = jax.device_get(jax.jit(make_rollout(env, policy))(params, tasks, keys, group_n))
    with Engine(
        policy, params, EngineSettings(slots=16, slot_length=max_trajectory_tokens(env) + 1, chunk=16, banned=(PAD,))
    ) as engine:
        heard = Listening(engine)
        rollout = hosted(as_host(env), heard.submit, by_turn=env.by_turn)
        got = rollout(unstack(tasks), keys, np.asarray(group_n))
        check_sums(heard, got)
    length = compiled.tokens.shape[2]
    mine = to_trajectories(got.trajectories, env.tools, turns=env.sizes.turns, length=length)
    parted_n = (mine.tokens != compiled.tokens).any(axis=(1, 2))
    for n in np.flatnonzero(parted_n):
        assert parting_margin(n, mine, compiled, keys, heard, policy, params) < NEAR
    record_property("parted", int(parted_n.sum()))
    print(f"{name}: {parted_n.sum()} of 64 trajectories part at a near-tie")
    compare(mine, compiled, ~parted_n)


def parting_margin(n: int, mine, compiled, keys, heard: Listening, policy, params) -> float:
    """Measure how near the first token in which trajectory n differs was to another one."""
    one, two = mine, compiled
    t, slot = np.argwhere(one.tokens[n] != two.tokens[n])[0]
    assert one.chosen[n, t, slot]
    key = jax.random.fold_in(keys[n], 1 + t)
    request, completion = next(pair for pair in heard.heard if pair[0].key == key)
    drawn = slot - int(one.chosen[n, t].argmax())
    tokens = np.array([*request.tokens, *completion.tokens[: drawn + 1]])
    return float(draw_margin(policy, params, tokens, key, drawn, banned=(PAD,)))


def compare(mine, compiled, same_n) -> None:
    one, two = mine, compiled
    for name in ("tokens", "chosen", "turns", "length", "correct", "status", "group", "by_turn", "version"):
        np.testing.assert_array_equal(getattr(one, name)[same_n], np.asarray(getattr(two, name))[same_n], name)
    for name in ("logp_sampled", "outcome", "reward"):
        np.testing.assert_allclose(getattr(one, name)[same_n], getattr(two, name)[same_n], atol=1e-5, err_msg=name)
    for name in ("tool", "error"):
        np.testing.assert_array_equal(getattr(mine, name)[same_n], getattr(compiled, name)[same_n], name)
    here_nt = one.turns & same_n[:, None]
    pairs = set(zip(one.anchor[here_nt].tolist(), two.anchor[here_nt].tolist(), strict=True))
    assert len(pairs) == len({mine for mine, _ in pairs}) == len({other for _, other in pairs})  # one to one
    assert (~one.turns[:, -1]).any() or two.turns[:, -1].all()


def test_E2_pure_environments_are_replayed_too():
    env = lookup()
    policy = make_policy(
        DecoderConfig(v=len(env.vocabulary), d=16, h=2, k=1, e=8, f=16, windows=(None,), ropes=(Rope(),))
    )
    tasks = unstack(draw_tasks(env, jax.random.key(1), 4, "train"))
    host = as_host(env)
    with Engine(
        policy,
        policy.init(jax.random.key(0)),
        EngineSettings(slots=4, slot_length=max_trajectory_tokens(env) + 1, banned=(PAD,)),
    ) as engine:
        got = hosted(host, engine.submit)(tasks, jax.random.split(jax.random.key(3), 4), range(4))
    for one in got.trajectories:
        again = replay(host, one)
        for mine, other in zip(again.turns, one.turns, strict=True):
            np.testing.assert_array_equal(mine.tokens, other.tokens)
            np.testing.assert_array_equal(mine.logp_sampled, other.logp_sampled)


# E3 ---------------------------------------------------------------------------------------------------

SHAPE = {"slots": 8, "slot_length": 128, "chunk": 16, "steps": 4, "banned": BANNED}


@pytest.fixture(scope="module")
def engine():
    with Engine(POLICY, tiny_params(), EngineSettings(**SHAPE)) as engine:
        yield engine


@pytest.mark.parametrize("extends_context", [True, False])
def test_E3_concurrency_order_and_occupancy_leave_the_same_bits(engine, extends_context):
    """Also where prefixes are found in one case and evicted in another: contexts append over 8 slots for 24."""
    tasks, keys, groups = work = tasks_of(6, 4)
    env = make_env(extends_context=extends_context)
    whole = values(run(Listening(engine), work, env=env, concurrency=24))
    assert values(run(Listening(engine), work, FakeTools(seconds=0.003), env=env, concurrency=1)) == whole
    order = np.random.default_rng(1).permutation(24)
    mixed = ([tasks[n] for n in order], keys[order], [groups[n] for n in order])
    for n, one in zip(
        order, values(run(Listening(engine), mixed, FakeTools(seconds=0.002), env=env, concurrency=5)), strict=True
    ):
        assert one | {"sample": 0} == whole[n] | {"sample": 0}


def test_F7_scoring_gives_what_the_hosted_rollout_recorded(engine):
    for extends_context in (True, False):
        got = run(Listening(engine), tasks_of(3, 4), env=make_env(extends_context=extends_context), temperature=0.7)
        trajectories = to_trajectories(got.trajectories, ("echo",), turns=4)
        ones = np.ones(trajectories.turns.shape, np.float32)
        batch = fg.pack(trajectories, ones, ones, row_length=128)
        scores = logprobs(
            POLICY, tiny_params(), batch.tokens, batch.positions, batch.segments, temperature=0.7, banned=BANNED
        )
        assert batch.chosen.sum() > 60
        np.testing.assert_allclose(np.where(batch.chosen, scores.logp - batch.logp_sampled, 0), 0, atol=1e-5)


def test_deadline_and_resumption_over_the_real_engine_leave_the_same_bits(engine):
    """A6 with what the engine itself calls lost: requests are cancelled while they decode and while they queue.

    The engine halts at two stretches until a deadline has passed, so that no machine is too fast or too slow for it.
    """
    whole, go_on = values(run(Listening(engine), tasks_of(6, 4))), threading.Semaphore(0)
    now, given, got, resumed = tasks_of(6, 4), (), {}, 0
    with Engine(POLICY, tiny_params(), EngineSettings(**SHAPE)) as halting:
        on_stretch(halting, lambda number, _: number in (3, 9) and go_on.acquire(timeout=60))
        for deadline in (1.0, 1.0, None):
            rest = run(Listening(halting), now, deadline=deadline, more={"unfinished": given})
            got |= {(one["group"], one["sample"]): one for one in values(rest)}
            now, given = ((), (), ()), rest.unfinished
            resumed += sum(bool(one.turns) for one in given)
            go_on.release()
        lost = halting.lost.check().generated
    assert [got[g, s] for g in range(6) for s in range(4)] == whole
    assert not given
    assert resumed  # with turns behind them
    assert lost


@pytest.mark.parametrize("extends_context", [True, False])
def test_E3_slices_over_the_real_engine_leave_the_same_bits(engine, extends_context):
    """Cut within actions and after them, their caches found or computed again."""
    work, env = tasks_of(4, 4), make_env(extends_context=extends_context)
    whole = values(run(Listening(engine), work, env=env))
    for budget, others in ((3, False), (4, True)):
        got = run(Listening(engine), work, env=env, more={"budget": budget})
        played, cut = list(got.trajectories), 0
        while got.unfinished:
            cut += sum(one.partial_action is not None for one in got.unfinished)
            if others:
                engine.generate([fg.contracts.Request([1, 2, i + 1], jax.random.key(i), 9) for i in range(9)])
            given = [partial_from_json(partial_to_json(one)) for one in got.unfinished]
            got = run(Listening(engine), ((), (), ()), env=env, more={"unfinished": given, "budget": budget})
            played += got.trajectories
        assert sorted(map(value, played), key=lambda one: (one["group"], one["sample"])) == whole
        assert cut > 16


def test_weight_versions_that_change_within_a_rollout_are_recorded():
    told = []
    with Engine(POLICY, tiny_params(), EngineSettings(**SHAPE)) as engine:

        def call_tool(call):
            told.append(call)
            if len(told) == 20:
                engine.update_weights(tiny_params(1), version=1)
            return answer(call)

        got = run(Listening(engine), tasks_of(4, 4), call_tool, concurrency=4)
    versions = {int(v) for one in got.trajectories for turn in one.turns for v in np.ravel(turn.version)}
    assert versions == {0, 1}
    for one in got.trajectories:
        assert value(from_json(to_json(one))) == value(one)
