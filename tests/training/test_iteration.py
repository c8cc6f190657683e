"""The staged iteration: the numbers of the loop, wherever models are; rewards beside the reference; a watchdog."""

import re
import threading
import time
from copy import copy
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
from flowgrpo.contracts import RewardResult
from flowgrpo.envs.env import PAD
from flowgrpo.generate.engine import Engine, EngineSettings
from flowgrpo.learner.critic import separate_network, with_critic
from flowgrpo.learner.scoring import make_score_trajectories
from flowgrpo.learner.state import adamw
from flowgrpo.learner.update import ScoreSettings
from flowgrpo.models.config import DecoderConfig, Rope
from flowgrpo.models.critic import Critic, make_critic
from flowgrpo.models.decoder import make_policy
from flowgrpo.models.trainable import ALL_PARAMS, actor_critic
from flowgrpo.parallel.offload import DEVICE, DISK, HOST, HostOffloader, place_of, placement_table
from flowgrpo.report.watchdog import StageWatchdog
from flowgrpo.rollout.compiled import repeat
from flowgrpo.rollout.exams import draw_tasks
from flowgrpo.rollout.host_adapter import as_host, unstack
from flowgrpo.rollout.hosted import hosted
from flowgrpo.rollout.records import RolloutResult, to_trajectories
from flowgrpo.training.iteration import (
    Iteration,
    Rollout,
    RolloutCallbacks,
    RolloutShape,
    Staging,
    compiled_rollout,
    hosted_rollout,
    train_loop,
)
from flowgrpo.training.pure_env import PureStages, make_stages, max_trajectory_tokens, split_step
from flowgrpo.training.stages import (
    IterationSettings,
    TrainState,
    has_fresh_contexts,
    init_train_state,
    score_fields,
    split_turns,
)
from flowgrpo.types import Status, Trajectories, check_axes

pytestmark = pytest.mark.slow

ENV = tiny_env(rounds=1)
CONFIG = DecoderConfig(
    v=len(ENV.vocabulary), d=16, h=2, k=1, e=8, f=16, windows=(None,), ropes=(Rope(),), init_scale=0.3
)
POLICY = make_policy(CONFIG)
CRITIC = separate_network(POLICY, make_critic(CONFIG))
OPTIMIZER = adamw(0.01)
SIZES = IterationSettings(queries=4, samples=4, micro_rows=8)
ALGORITHMS = {
    "plain": fg.flow_grpo(beta=0.0),
    "reference": fg.flow_grpo(beta=0.05, reference_every=2),
    "critic": fg.ppo(beta=0.05),
}


def trained_models(name: str) -> dict:
    return {"critic": CRITIC, "trainable": actor_critic()} if name == "critic" else {"trainable": ALL_PARAMS}


@cache
def stages_of(name: str) -> PureStages:
    return make_stages(ENV, POLICY, ALGORITHMS[name], OPTIMIZER, SIZES, **trained_models(name))


def start(name: str) -> TrainState:
    params = POLICY.init(jax.random.key(0))
    params = with_critic(CRITIC if name == "critic" else None, jax.random.key(1), params)
    return init_train_state(params, OPTIMIZER, jax.random.key(100), trainable=trained_models(name)["trainable"])


@cache
def expected(name: str) -> list[tuple[TrainState, dict]]:
    """Three updates of the plain loop."""
    step = split_step(stages_of(name))
    return list(train_loop(step, start(name), 3))


@cache
def programs(name: str, moves: bool) -> Iteration:
    """An iteration, whose programs are compiled once for all tests."""
    stages = stages_of(name)
    shape = RolloutShape(
        tools=len(ENV.tools),
        samples=SIZES.samples,
        trajectories=SIZES.queries * SIZES.samples,
        max_trajectory_tokens=max_trajectory_tokens(ENV),
    )
    staging = Staging(offloader=HostOffloader(placement_table(HOST if moves else DEVICE)), scores_ahead=True)
    return Iteration(compiled_rollout(stages.rollout), stages.update, shape, staging)


def staged(name: str, offloader: HostOffloader, *, roll_out=None, release=None, watch=None) -> Iteration:
    """The same programs with other parts."""
    iteration = copy(programs(name, offloader.table["optimizer"]["rollout"] != DEVICE))
    iteration.staging = replace(iteration.staging, offloader=offloader, release=release)
    iteration.roll_out = iteration.roll_out if roll_out is None else roll_out
    iteration.watch = StageWatchdog() if watch is None else watch
    return iteration


def trained(name: str, place: str, folder, updates: int = 3, **parts) -> list[tuple[TrainState, dict]]:
    with HostOffloader(placement_table(place), folder=folder) as offloader:
        steps = train_loop(staged(name, offloader, **parts), start(name), updates)
        return [(jax.tree.map(np.array, without_key(state)), metrics) for state, metrics in steps]


def without_key(state: TrainState):
    return state.replace(key=None)


def leaves(state: TrainState) -> list:
    return jax.tree.leaves((state.learner, state.reference, state.update))


@pytest.mark.parametrize("place", [DEVICE, HOST, DISK])
def test_staged_step_without_reference_equals_the_loop_bit_for_bit(place, tmp_path):
    for (state, metrics), (expected_state, expected_metrics) in zip(
        trained("plain", place, tmp_path), expected("plain"), strict=True
    ):
        for x, y in zip(leaves(state), leaves(expected_state), strict=True):
            np.testing.assert_array_equal(x, y)
        for name, value in expected_metrics.items():
            assert name == "timings" or metrics[name] == value, name


@pytest.mark.parametrize("name", ["reference", "critic"])
def test_scoring_before_packing_gives_the_parameters_of_the_loop(name, tmp_path):
    runs = trained(name, HOST, tmp_path)
    for (state, metrics), (expected_state, expected_metrics) in zip(runs, expected(name), strict=True):
        for x, y in zip(leaves(state), leaves(expected_state), strict=True):
            np.testing.assert_allclose(x, y, rtol=0, atol=1e-6)
        assert metrics["kl"] == pytest.approx(expected_metrics["kl"], abs=1e-6)
    assert runs[0][1]["kl"] == pytest.approx(0, abs=1e-9)
    assert runs[1][1]["kl"] > 1e-6


def test_models_are_where_the_table_says_and_programs_compile_once():
    parts = programs("reference", True)
    rollout = getclosurevars(parts.roll_out).nonlocals["rollout"]
    assert parts._scorer is not None
    score_trees = getclosurevars(parts._scorer).nonlocals["score_trees"]
    compiled: list = [
        getclosurevars(score_trees).nonlocals["score_trees"],
        parts._compute_advantages,
        parts._train,
        parts._metrics_of(parts.shape.tools, parts.shape.samples),
        rollout,
    ]
    with HostOffloader(placement_table(HOST)) as offloader:
        state, moved, sizes = start("reference"), {}, []
        for _ in range(4):
            state, metrics = staged("reference", offloader)(state)
            sizes.append([program._cache_size() for program in compiled])
            assert place_of(state.learner.params) == DEVICE
            assert place_of(state.learner.optimizer) == place_of(state.reference) == HOST
            moved = metrics["timings"]["moves"]
        assert sizes == [sizes[0]] * 4
        assert set(moved) == {"device to host", "host to device"}
        size = sum(x.nbytes for x in jax.tree.leaves(state.learner.optimizer))
        more = sum(x.nbytes for x in jax.tree.leaves(state.reference))
        assert moved["host to device"]["bytes"] == size + more
        assert moved["device to host"]["bytes"] in (size, size + more)  # the reference, where it was replaced


def test_timings_report_seconds_and_memory_of_every_stage(tmp_path):
    *_, (_, metrics) = trained("reference", HOST, tmp_path, 1, release=lambda: 123)
    timings = metrics["timings"]
    stages = ("rollout", "inference", "advantages", "pack", "train")
    assert all(timings[f"{name}_seconds"] > 0 for name in (*stages, "rewards"))
    assert sum(timings[f"{name}_seconds"] for name in stages) <= timings["iteration_seconds"]
    assert set(timings["device_bytes"]) == set(stages)
    assert timings["device_bytes_by"] == "live arrays at the ends of stages"
    assert timings["freed_bytes"] == 123
    assert 0.3 < metrics["fill_rate"] <= 1.0


# Hosted rollouts --------------------------------------------------------------------------------------------


HOSTED = as_host(ENV)


def answering(state, tokens, call_tool):
    """The last action is the answer, which a reward has to judge."""
    state, now = HOSTED.step(state, tokens, call_tool)
    return state, now._replace(output=" ".join(map(str, tokens)) if now.done else None, reward=None)


def roll_out(state: TrainState, engine: Engine, **callbacks) -> RolloutResult:
    keys = jax.random.split(jax.random.fold_in(state.key, state.update))
    tasks, group_n = repeat(draw_tasks(ENV, keys[0], SIZES.queries, "train"), SIZES.samples)
    engine.update_weights(state.learner.params, int(state.learner.version))
    reward = fg.Reward(lambda _, output: RewardResult(float(output.startswith("2"))))
    rollout = hosted(HOSTED._replace(step=answering), engine.submit, reward=reward, concurrency=8)
    return rollout(unstack(tasks), jax.random.split(keys[1], len(group_n)), group_n, **callbacks)


def to_arrays(result: RolloutResult) -> Trajectories:
    return to_trajectories(result.trajectories, ENV.tools, turns=HOSTED.max_turns)


def test_hosted_rollout_with_released_engine_equals_the_loop_bit_for_bit():
    """Judged by a reward of text; three updates, after each of which the slots are destroyed."""
    unstaged = split_step(stages_of("plain"))

    def train_step(state: TrainState, trajectories: Trajectories):
        rollout = Rollout(trajectories)
        return unstaged.update(state, rollout, unstaged.advantages(rollout))

    sizes = {"slots": 8, "slot_length": max_trajectory_tokens(ENV) + 8, "chunk": 8, "steps": 4, "banned": (PAD,)}
    freed = []
    with (
        Engine(POLICY, start("plain").learner.params, EngineSettings(**sizes)) as engine,
        HostOffloader(placement_table(HOST)) as offloader,
    ):

        def release() -> int:
            freed.append(engine.release())
            return freed[-1]

        rollout = hosted_rollout(partial(roll_out, engine=engine), to_arrays)
        step = staged("plain", offloader, roll_out=rollout, release=release)
        runs = [
            (jax.tree.map(np.array, without_key(state)), metrics)
            for state, metrics in train_loop(step, start("plain"), 3)
        ]
        plain = list(train_loop(lambda state: train_step(state, to_arrays(roll_out(state, engine))), start("plain"), 3))
    assert len(freed) == 3
    assert min(freed) > 0
    for (state, metrics), (expected_state, expected_metrics) in zip(runs, plain, strict=True):
        for x, y in zip(leaves(state), leaves(expected_state), strict=True):
            np.testing.assert_array_equal(x, y)
        assert 0 < metrics["outcome"] == expected_metrics["outcome"]


# Rewards on the host ----------------------------------------------------------------------------------------


def by_length(trajectories: fg.Trajectories, seconds: float = 0.0) -> list[RewardResult]:
    """A reward of the number of turns."""
    time.sleep(seconds)
    return [RewardResult(float(1 / (1 + turns.sum()))) for turns in trajectories.turns]


def test_R1_the_reference_scores_while_groups_are_judged(tmp_path):
    """The rewards wait until the inference stage has started, so that one after the other would never end."""
    started = threading.Event()

    def reward(trajectories):
        assert started.wait(60)
        return by_length(trajectories)

    def release() -> int:
        started.set()
        return 0

    rollout = compiled_rollout(stages_of("reference").rollout, reward)
    *_, (_, metrics) = trained("reference", HOST, tmp_path, 1, roll_out=rollout, release=release)
    assert 0 < metrics["outcome"] < 1


def test_host_reward_equals_the_same_reward_inside_the_program(tmp_path):
    def judge(trajectories, _key):
        return trajectories.replace(outcome=1.0 / (1.0 + trajectories.turns.sum(axis=1).astype(np.float32)))

    inside = make_stages(ENV, POLICY, ALGORITHMS["plain"], OPTIMIZER, SIZES, judge=judge)
    one, two = compiled_rollout(inside.rollout), compiled_rollout(stages_of("plain").rollout, by_length)
    runs = [trained("plain", HOST, tmp_path, 2, roll_out=rollout) for rollout in (one, two)]
    for (one, _), (other, _) in zip(*runs, strict=True):
        for x, y in zip(leaves(one), leaves(other), strict=True):
            np.testing.assert_allclose(x, y, rtol=0, atol=1e-6)


def test_S3_hanging_reward_is_named_and_invalidates_only_its_group():
    sentences: list[str] = []

    def reward(trajectories):
        if trajectories.group[0] == 2:
            time.sleep(600)
        return by_length(trajectories)

    watch = StageWatchdog(0.3, on_stuck=sentences.append)
    rollout = compiled_rollout(stages_of("plain").rollout, reward, deadline=1.0)
    with HostOffloader(placement_table(DEVICE)) as offloader:
        _, metrics = staged("plain", offloader, roll_out=rollout, watch=watch)(start("plain"))
    assert float(metrics["invalid"]) == SIZES.samples
    assert any("rewards for" in sentence and "the reward of group 2 for" in sentence for sentence in sentences)
    assert sentences[0].startswith("update 1 has taken ")


def test_groups_without_reward_take_no_part():
    def reward(trajectories):
        if trajectories.group[0] == 0:
            raise ValueError("no idea")
        if trajectories.group[0] == 1:
            return [RewardResult(1.0)]
        return [RewardResult(None, "no idea"), *by_length(trajectories)[1:]]

    sampled = []
    callbacks = RolloutCallbacks(sampled.append, lambda _: None)
    rollout = compiled_rollout(
        stages_of("plain").rollout,
        reward,
        judges=1,
        is_solved=lambda result: result.value > 0.5,  # called for results with a value only
    )
    trajectories = rollout(start("plain"), callbacks).trajectories
    assert len(sampled) == 1
    invalid = [*range(8), 8, 12]
    assert np.flatnonzero(trajectories.status == Status.VERIFIER_FAILURE).tolist() == invalid
    assert np.flatnonzero(~np.isfinite(trajectories.outcome)).tolist() == invalid
    np.testing.assert_array_equal(np.asarray(trajectories.valid), ~np.isin(np.arange(16), invalid))


def test_rollout_that_never_calls_on_all_sampled_is_refused():
    rollout = compiled_rollout(stages_of("plain").rollout)

    def silent(state, callbacks):
        return rollout(state, callbacks._replace(on_all_sampled=lambda _: None))

    with (
        HostOffloader(placement_table(DEVICE)) as offloader,
        pytest.raises(fg.BadInput, match="on_all_sampled"),
    ):
        staged("plain", offloader, roll_out=silent)(start("plain"))


# Contexts that are rendered afresh --------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
def test_fresh_contexts_scored_turn_by_turn_give_the_same_numbers(seed):
    trajectories = make_case(seed).trajectories
    paid = {"outcome": np.nan_to_num(trajectories.outcome), "reward": np.nan_to_num(trajectories.reward)}
    fresh = trajectories.replace(
        starts_context=np.ones(trajectories.turns.shape, bool),
        logp_old=None,
        logp_ref=None,
        value=None,
        last_value=None,
        **paid,
    )
    critic = separate_network(
        BIGRAMS, Critic(tiny_learner.init, lambda params, *given: BIGRAMS.hidden(params, *given)[0].sum(axis=-1))
    )
    params = with_critic(critic, jax.random.key(1), tiny_learner.init(jax.random.key(0)))
    score_trajectories = make_score_trajectories(
        BIGRAMS, critic=critic, needs={"logp_ref", "value"}, micro_rows=5, settings=ScoreSettings(**SETTINGS)
    )
    whole, split = (
        jax.jit(partial(score_fields, score_trajectories=score_trajectories, by_turn=by_turn))(
            params, params.policy, fresh
        )
        for by_turn in (False, True)
    )
    assert set(whole) == {"logp_ref", "value", "last_value"}
    for name, x in whole.items():
        assert np.abs(x).max() > 0
        np.testing.assert_allclose(split[name], x, atol=1e-5, err_msg=name)


def test_split_turns_repeats_fields_of_the_trajectory():
    trajectories = make_case(0).trajectories
    trajectories = trajectories.replace(
        outcome=np.nan_to_num(trajectories.outcome), reward=np.nan_to_num(trajectories.reward)
    )
    count, turns = trajectories.turns.shape
    hint_nq = np.arange(2 * count).reshape(count, 2)
    split = split_turns(trajectories.replace(hint=hint_nq))
    check_axes(split)
    np.testing.assert_array_equal(split.hint, np.repeat(hint_nq, turns, axis=0))
    np.testing.assert_array_equal(split.tokens[:, 0], np.asarray(trajectories.tokens).reshape(count * turns, -1))


def test_fresh_contexts_are_decided_by_valid_trajectories_alone():
    trajectories = make_case(0).trajectories
    count = len(trajectories.group)
    fourth_n = np.arange(count) == 3
    fresh_nt = np.ones(trajectories.turns.shape, bool)
    but_one_nt, trajectories = fresh_nt & ~fourth_n[:, None], trajectories.replace(turns=fresh_nt)
    whole, aborted = (np.where(fourth_n, status, Status.FINISHED) for status in (Status.FINISHED, Status.TOOL_FAILURE))
    assert has_fresh_contexts(trajectories.replace(starts_context=fresh_nt, status=whole))
    assert has_fresh_contexts(trajectories.replace(starts_context=but_one_nt, status=aborted))
    assert not has_fresh_contexts(trajectories.replace(starts_context=but_one_nt, status=whole))
    assert not has_fresh_contexts(trajectories.replace(starts_context=None))


# The watch --------------------------------------------------------------------------------------------------


def test_S3_watchdog_repeatedly_names_open_stages_and_what_they_await():
    sentences, twice = [], threading.Event()

    def on_stuck(sentence):
        sentences.append(sentence)
        if len(sentences) == 2:
            twice.set()

    watch = StageWatchdog(0.05, on_stuck=on_stuck)
    with watch.iteration(7), watch.stage("rollout"):
        watch.add_pending(lambda: [f"trajectory {i}" for i in range(10)])
        assert twice.wait(60)
    awaited = r"it waits for trajectory 0, trajectory 1, .* and 2 more"
    assert re.fullmatch(rf"update 7 has taken \d+ s: rollout for \d+ s; {awaited}", sentences[-1])
    with pytest.raises(fg.BadInput, match="give more than 0"):
        StageWatchdog(0.0)
