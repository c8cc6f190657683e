"""The staged system: the numbers of the loop, whatever lies where; rewards beside the reference; a watch."""

import re
import threading
import time
from dataclasses import replace
from functools import cache, partial
from inspect import getclosurevars

import jax
import numpy as np
import pytest
import tiny_learner
from family_cases import make_case
from tiny_env import tiny_env
from tiny_learner import BIGRAMS, SETTINGS

import flowgrpo as fg
from flowgrpo import loop
from flowgrpo.contracts import Scored
from flowgrpo.envs.env import PAD
from flowgrpo.generate.engine import Engine
from flowgrpo.learner.critic import own_network, with_critic
from flowgrpo.learner.scoring import make_score_trajectories
from flowgrpo.learner.state import make_optimizer
from flowgrpo.models.config import DecoderConfig, Rope
from flowgrpo.models.critic import Critic, make_critic
from flowgrpo.models.decoder import make_policy
from flowgrpo.models.trainable import WHOLE, actor_critic
from flowgrpo.parallel.offload import DEVICE, DISK, HOST, Residency, place_of, places
from flowgrpo.report.watchdog import StageWatchdog
from flowgrpo.rollout.compiled import repeat
from flowgrpo.rollout.exams import draw_tasks
from flowgrpo.rollout.host_adapter import as_host, unstack
from flowgrpo.rollout.hosted import hosted
from flowgrpo.rollout.records import Hosted, rollout_of
from flowgrpo.staged import (
    RolloutCallbacks,
    _score_trajectories,
    _Staged,
    compiled_rollout,
    hosted_rollout,
    is_fresh,
    make_staged,
    turn_by_turn,
)
from flowgrpo.types import Status, Trajectories, check_axes

pytestmark = pytest.mark.slow

ENV = tiny_env(rounds=1)
CONFIG = DecoderConfig(v=len(ENV.words), d=16, h=2, k=1, e=8, f=16, windows=(None,), ropes=(Rope(),), init_scale=0.3)
POLICY = make_policy(CONFIG)
CRITIC = own_network(POLICY, make_critic(CONFIG))
OPTIMIZER = make_optimizer(learning_rate=0.01)
SIZES = loop.Settings(queries=4, samples=4, micro_rows=8)
ALGORITHMS = {
    "plain": fg.flow_grpo(beta=0.0),
    "reference": fg.flow_grpo(beta=0.05, reference_every=2),
    "critic": fg.ppo(beta=0.05),
}


def kinds(name: str) -> dict:
    return {"critic": CRITIC, "trained": actor_critic()} if name == "critic" else {"trained": WHOLE}


@cache
def iteration(name: str) -> loop.Iteration:
    return loop.make_iteration(ENV, POLICY, ALGORITHMS[name], OPTIMIZER, SIZES, **kinds(name))


def start(name: str) -> loop.Run:
    params = POLICY.init(jax.random.key(0))
    params = with_critic(CRITIC if name == "critic" else None, jax.random.key(1), params)
    return loop.start_run(params, OPTIMIZER, jax.random.key(100), trained=kinds(name)["trained"])


@cache
def expected(name: str) -> list[tuple[loop.Run, dict]]:
    """Three updates of the plain loop."""
    step = loop.three_programs(iteration(name))
    return list(loop.train_loop(step, start(name), 3))


@cache
def programs(name: str, moves: bool) -> _Staged:
    """A step, whose programs are compiled once for all tests."""
    step = make_staged(
        POLICY,
        ALGORITHMS[name],
        OPTIMIZER,
        SIZES,
        compiled_rollout(iteration(name).rollout),
        banned=(PAD,),
        tools=len(ENV.tools),
        longest=loop.longest(ENV),
        trajectories=SIZES.queries * SIZES.samples,
        residency=Residency(places(HOST if moves else DEVICE)),
        **kinds(name),
    )
    assert isinstance(step, _Staged)
    return step


def staged(name: str, residency: Residency, **parts):
    moves = residency.table["optimizer"]["rollout"] != DEVICE
    return replace(programs(name, moves), residency=residency, **parts)


def trained(name: str, place: str, folder, updates: int = 3, **parts) -> list[tuple[loop.Run, dict]]:
    with Residency(places(place), folder=folder) as residency:
        steps = loop.train_loop(staged(name, residency, **parts), start(name), updates)
        return [(jax.tree.map(np.array, values(run)), metrics) for run, metrics in steps]


def values(run: loop.Run):
    return run.replace(key=None)


def leaves(run: loop.Run) -> list:
    return jax.tree.leaves((run.learner, run.reference, run.update))


@pytest.mark.parametrize("place", [DEVICE, HOST, DISK])
def test_without_a_reference_the_staged_system_gives_the_bits_of_the_loop(place, tmp_path):
    for (run, figures), (other, others) in zip(trained("plain", place, tmp_path), expected("plain"), strict=True):
        for x, y in zip(leaves(run), leaves(other), strict=True):
            np.testing.assert_array_equal(x, y)
        for name, value in others.items():
            assert figures[name] == value, name


@pytest.mark.parametrize("name", ["reference", "critic"])
def test_what_is_scored_before_packing_gives_the_parameters_of_the_loop(name, tmp_path):
    runs = trained(name, HOST, tmp_path)
    for (run, figures), (other, others) in zip(runs, expected(name), strict=True):
        for x, y in zip(leaves(run), leaves(other), strict=True):
            np.testing.assert_allclose(x, y, rtol=0, atol=1e-6)
        assert figures["kl"] == pytest.approx(others["kl"], abs=1e-6)
    assert runs[0][1]["kl"] == pytest.approx(0, abs=1e-9)
    assert runs[1][1]["kl"] > 1e-6


def test_models_lie_where_the_table_has_them_and_the_programs_are_compiled_once():
    parts = programs("reference", True)
    rollout = getclosurevars(parts.roll_out).nonlocals["rollout"]
    assert parts.score_trajectories is not None
    score_trees = getclosurevars(parts.score_trajectories).nonlocals["score_trees"]
    compiled: list = [getclosurevars(score_trees).nonlocals["rows"], parts.credit, parts.train, parts.describe, rollout]
    with Residency(places(HOST)) as residency:
        run, moved, sizes = start("reference"), {}, []
        for _ in range(4):
            run, metrics = staged("reference", residency)(run)
            sizes.append([program._cache_size() for program in compiled])
            assert place_of(run.learner.params) == DEVICE
            assert place_of(run.learner.optimizer) == place_of(run.reference) == HOST
            moved = metrics["timings"]["moves"]
        assert sizes == [sizes[0]] * 4
        assert set(moved) == {"device to host", "host to device"}
        size = sum(x.nbytes for x in jax.tree.leaves(run.learner.optimizer))
        more = sum(x.nbytes for x in jax.tree.leaves(run.reference))
        assert moved["host to device"]["bytes"] == size + more
        assert moved["device to host"]["bytes"] in (size, size + more)  # the reference, where it was replaced


def test_timings_say_of_every_stage_how_long_it_took_and_what_it_held(tmp_path):
    *_, (_, metrics) = trained("reference", HOST, tmp_path, 1, release=lambda: 123)
    timings = metrics["timings"]
    stages = ("rollout", "inference", "credit", "pack", "train")
    assert all(timings[f"{name}_seconds"] > 0 for name in (*stages, "rewards"))
    assert sum(timings[f"{name}_seconds"] for name in stages) <= timings["iteration_seconds"]
    assert set(timings["device_bytes"]) == set(stages)
    assert timings["device_bytes_by"] == "live arrays at the ends of stages"
    assert timings["freed_bytes"] == 123
    assert 0.3 < metrics["fill_rate"] <= 1.0


# Hosted rollouts --------------------------------------------------------------------------------------------


HOSTED = as_host(ENV)


def answering(state, tokens, do):
    """The last action is the answer, which a reward has to judge."""
    state, now = HOSTED.step(state, tokens, do)
    return state, now._replace(output=" ".join(map(str, tokens)) if now.done else None, reward=None)


def play(run: loop.Run, engine: Engine, **callbacks) -> Hosted:
    keys = jax.random.split(jax.random.fold_in(run.key, run.update))
    tasks, group_n = repeat(draw_tasks(ENV, keys[0], SIZES.queries, "train"), SIZES.samples)
    engine.swap(run.learner.params, int(run.learner.version))
    reward = fg.Reward(lambda _, output: Scored(float(output.startswith("2"))))
    rollout = hosted(HOSTED._replace(step=answering), engine.submit, reward=reward, width=8)
    return rollout(unstack(tasks), jax.random.split(keys[1], len(group_n)), group_n, **callbacks)


def dense(played: Hosted) -> Trajectories:
    return rollout_of(played.played, ENV.tools, turns=HOSTED.turns)


def test_a_hosted_rollout_is_trained_to_the_bits_of_the_loop_though_its_engine_is_released():
    """Judged by a reward of text; three updates, after each of which the slots are destroyed."""
    one = iteration("plain")
    learning = loop.Learning(one.score_trajectories, one.credit, one.update, one.packer)
    shapes = {"tools": len(ENV.tools), "samples": SIZES.samples, "longest": loop.longest(ENV), "trajectories": 16}
    learn = loop.make_learn(learning, ALGORITHMS["plain"], **shapes)
    sizes = {"slots": 8, "slot_length": loop.longest(ENV) + 8, "chunk": 8, "steps": 4, "banned": (PAD,)}
    freed = []
    with Engine(POLICY, start("plain").learner.params, **sizes) as engine, Residency(places(HOST)) as residency:

        def release() -> int:
            freed.append(engine.release())
            return freed[-1]

        plays = hosted_rollout(partial(play, engine=engine), dense)
        step = staged("plain", residency, roll_out=plays, release=release)
        runs = [
            (jax.tree.map(np.array, values(run)), figures) for run, figures in loop.train_loop(step, start("plain"), 3)
        ]
        plain = list(loop.train_loop(lambda run: learn(run, dense(play(run, engine))), start("plain"), 3))
    assert len(freed) == 3
    assert min(freed) > 0
    for (one, figures), (other, others) in zip(runs, plain, strict=True):
        for x, y in zip(leaves(one), leaves(other), strict=True):
            np.testing.assert_array_equal(x, y)
        assert 0 < figures["outcome"] == others["outcome"]


# Rewards on the host ----------------------------------------------------------------------------------------


def by_length(trajectories: fg.Trajectories, seconds: float = 0.0) -> list[Scored]:
    """A reward of the number of turns."""
    time.sleep(seconds)
    return [Scored(float(1 / (1 + turns.sum()))) for turns in trajectories.turns]


def test_R1_the_reference_scores_while_groups_are_judged(tmp_path):
    """The verdicts wait for the inference stage to have begun, so that one after the other would never end."""
    begun = threading.Event()

    def verdict(trajectories):
        assert begun.wait(60)
        return by_length(trajectories)

    def release() -> int:
        begun.set()
        return 0

    roll_out = compiled_rollout(iteration("reference").rollout, verdict)
    *_, (_, metrics) = trained("reference", HOST, tmp_path, 1, roll_out=roll_out, release=release)
    assert 0 < metrics["outcome"] < 1


def test_a_reward_on_the_host_gives_what_the_same_reward_gives_in_the_program(tmp_path):
    def judge(trajectories, _key):
        return trajectories.replace(outcome=1.0 / (1.0 + trajectories.turns.sum(axis=1).astype(np.float32)))

    inside = loop.make_iteration(ENV, POLICY, ALGORITHMS["plain"], OPTIMIZER, SIZES, judge=judge)
    one, two = compiled_rollout(inside.rollout), compiled_rollout(iteration("plain").rollout, by_length)
    runs = [trained("plain", HOST, tmp_path, 2, roll_out=roll_out) for roll_out in (one, two)]
    for (one, _), (other, _) in zip(*runs, strict=True):
        for x, y in zip(leaves(one), leaves(other), strict=True):
            np.testing.assert_allclose(x, y, rtol=0, atol=1e-6)


def test_S3_a_reward_that_hangs_is_named_and_costs_its_group_alone():
    said: list[str] = []

    def verdict(trajectories):
        if trajectories.group[0] == 2:
            time.sleep(600)
        return by_length(trajectories)

    watch = StageWatchdog(0.3, tell=said.append)
    roll_out = compiled_rollout(iteration("plain").rollout, verdict, deadline=1.0)
    with Residency(places(DEVICE)) as residency:
        _, metrics = staged("plain", residency, roll_out=roll_out, watch=watch)(start("plain"))
    assert float(metrics["invalid"]) == SIZES.samples
    assert any("rewards for" in sentence and "the reward of group 2 for" in sentence for sentence in said)
    assert said[0].startswith("update 1 has taken ")


def test_what_a_reward_cannot_say_takes_no_part():
    def verdict(trajectories):
        if trajectories.group[0] == 0:
            raise ValueError("no idea")
        if trajectories.group[0] == 1:
            return [Scored(1.0)]
        return [Scored(None, "no idea"), *by_length(trajectories)[1:]]

    played = []
    told = RolloutCallbacks(played.append, lambda _: None)
    solved = {"solved": lambda scored: scored.value > 0.5}  # which is asked of those that have a value
    rolled = compiled_rollout(iteration("plain").rollout, verdict, judges=1, **solved)(start("plain"), told)
    trajectories = rolled.trajectories
    assert len(played) == 1
    invalid = [*range(8), 8, 12]
    assert np.flatnonzero(trajectories.status == Status.VERIFIER_FAILURE).tolist() == invalid
    assert np.flatnonzero(~np.isfinite(trajectories.outcome)).tolist() == invalid
    np.testing.assert_array_equal(np.asarray(trajectories.valid), ~np.isin(np.arange(16), invalid))


def test_a_rollout_that_does_not_say_when_all_have_played_is_refused():
    plays = compiled_rollout(iteration("plain").rollout)

    def silent(run, told):
        return plays(run, told._replace(played=lambda _: None))

    with Residency(places(DEVICE)) as residency, pytest.raises(fg.BadInput, match="did not say that all have played"):
        staged("plain", residency, roll_out=silent)(start("plain"))


# Contexts that are rendered afresh --------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
def test_turns_that_are_rendered_afresh_are_scored_alone_to_the_same_numbers(seed):
    played = make_case(seed).trajectories
    paid = {"outcome": np.nan_to_num(played.outcome), "reward": np.nan_to_num(played.reward)}
    fresh = played.replace(
        begins=np.ones(played.turns.shape, bool), logp_old=None, logp_ref=None, value=None, last_value=None, **paid
    )
    critic = own_network(
        BIGRAMS, Critic(tiny_learner.init, lambda params, *given: BIGRAMS.hidden(params, *given)[0].sum(axis=-1))
    )
    params = with_critic(critic, jax.random.key(1), tiny_learner.init(jax.random.key(0)))
    score_trajectories = make_score_trajectories(
        BIGRAMS, critic=critic, needs={"logp_ref", "value"}, micro_rows=5, **SETTINGS
    )
    whole, apart = (
        jax.jit(partial(_score_trajectories, score_trajectories=score_trajectories, apart=apart))(
            params, params.policy, fresh
        )
        for apart in (False, True)
    )
    assert set(whole) == {"logp_ref", "value", "last_value"}
    for name, x in whole.items():
        assert np.abs(x).max() > 0
        np.testing.assert_allclose(apart[name], x, atol=1e-5, err_msg=name)


def test_turns_apart_repeat_what_a_trajectory_has_once():
    played = make_case(0).trajectories
    played = played.replace(outcome=np.nan_to_num(played.outcome), reward=np.nan_to_num(played.reward))
    count, turns = played.turns.shape
    hint_nq = np.arange(2 * count).reshape(count, 2)
    apart = turn_by_turn(played.replace(hint=hint_nq))
    check_axes(apart)
    np.testing.assert_array_equal(apart.hint, np.repeat(hint_nq, turns, axis=0))
    np.testing.assert_array_equal(apart.tokens[:, 0], np.asarray(played.tokens).reshape(count * turns, -1))


def test_an_aborted_trajectory_has_no_say_in_how_contexts_are_rendered():
    played = make_case(0).trajectories
    count = len(played.group)
    one = np.arange(count) == 3
    fresh_nt = np.ones(played.turns.shape, bool)
    but_one_nt, played = fresh_nt & ~one[:, None], played.replace(turns=fresh_nt)
    whole, aborted = (np.where(one, status, Status.FINISHED) for status in (Status.FINISHED, Status.TOOL_FAILURE))
    assert is_fresh(played.replace(begins=fresh_nt, status=whole))
    assert is_fresh(played.replace(begins=but_one_nt, status=aborted))
    assert not is_fresh(played.replace(begins=but_one_nt, status=whole))
    assert not is_fresh(played.replace(begins=None))


# The watch --------------------------------------------------------------------------------------------------


def test_S3_the_watch_names_open_stages_and_what_they_wait_for_again_and_again():
    said, twice = [], threading.Event()

    def tell(sentence):
        said.append(sentence)
        if len(said) == 2:
            twice.set()

    watch = StageWatchdog(0.05, tell=tell)
    with watch.iteration(7), watch.stage("rollout"):
        watch.ask(lambda: [f"trajectory {i}" for i in range(10)])
        assert twice.wait(60)
    awaited = r"it waits for trajectory 0, trajectory 1, .* and 2 more"
    assert re.fullmatch(rf"update 7 has taken \d+ s: rollout for \d+ s; {awaited}", said[-1])
    with pytest.raises(fg.BadInput, match="give more than 0, or None"):
        StageWatchdog(0.0)
