"""The inference stage: what the reference and the critic say of trajectories, in every layout of their contexts."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_cases import make_case
from tiny_learner import BANNED, BIGRAMS, SETTINGS, TEMPERATURE, WIDTH, init

import flowgrpo as fg
from flowgrpo.batching.layouts import resolve_lengths
from flowgrpo.batching.prefix_tree import make_packer, pack_tree
from flowgrpo.learner.critic import separate_network, shared_trunk, with_critic
from flowgrpo.learner.scoring import make_score_trajectories, make_score_trees
from flowgrpo.learner.update import ScoreSettings
from flowgrpo.models.config import DecoderConfig
from flowgrpo.models.critic import Critic
from flowgrpo.models.trainable import ActorCritic

CONFIG = DecoderConfig(v=50, d=WIDTH, h=1, k=1, e=WIDTH, f=WIDTH, windows=(None,), ropes=(None,))  # type: ignore
NEEDS = frozenset({"logp_ref", "value"})


def apply_values(params, tokens, positions=None, segments=None):
    return BIGRAMS.hidden(params, tokens, positions, segments)[0] @ params["value"]


OWN = separate_network(BIGRAMS, Critic(init, apply_values))
SHARED = shared_trunk(BIGRAMS, CONFIG)


@cache
def params_of(kind: str) -> ActorCritic:
    valuation = {"own": OWN, "shared": SHARED}[kind]
    params = with_critic(valuation, jax.random.key(7), init(jax.random.key(8)))
    return params._replace(critic=params.critic | {"value": jax.random.normal(jax.random.key(9), (WIDTH,))})


REFERENCE = init(jax.random.key(10))


@cache
def score_trajectories(kind: str = "own", policy: fg.contracts.Policy = BIGRAMS, **settings):
    critic = {"own": OWN, "shared": SHARED}[kind]
    settings = {"critic": critic, "needs": NEEDS, "micro_rows": 5, **settings}
    scoring = SETTINGS | {name: settings.pop(name) for name in ("temperature", "compute_dtype") if name in settings}
    return jax.jit(make_score_trajectories(policy, settings=ScoreSettings(**scoring), **settings))


def bare(seed: int) -> fg.Trajectories:
    """Trajectories of unequal turns, with contexts that append and contexts that are fresh, unscored."""
    played = make_case(seed).trajectories
    # What an invalid one was paid is NaN, and passes through: these tests raise on what comes out of a program.
    paid = {"outcome": np.nan_to_num(played.outcome), "reward": np.nan_to_num(played.reward)}
    return played.replace(logp_old=None, logp_ref=None, value=None, last_value=None, **paid)


# In plain NumPy, one sequence at a time ---------------------------------------------------------------


def states(params, tokens):
    place_s = np.sin(np.arange(len(tokens), dtype=np.float32))
    return np.tanh((np.asarray(params["embed"])[tokens] + 0.1 * place_s[:, None]) @ np.asarray(params["mix"]))


def logp_after(params, tokens):
    logits_sv = states(params, tokens) @ np.asarray(params["unembed"]) / TEMPERATURE
    logits_sv[:, BANNED] = -np.inf
    return logits_sv - np.log(np.exp(logits_sv).sum(axis=1, keepdims=True))


def sequences(trajectories: fg.Trajectories, n: int) -> list[list[tuple[int, int]]]:
    """The (turn, slot) of every token, a list for each context."""
    length_nt, begins_nt = (np.asarray(x) for x in resolve_lengths(trajectories))
    found: list[list[tuple[int, int]]] = []
    for t in np.flatnonzero(trajectories.turns[n]):
        found += [[]] if begins_nt[n, t] else []
        found[-1] += [(int(t), i) for i in range(length_nt[n, t])]
    return found


def by_hand(params: ActorCritic, kind: str, trajectories: fg.Trajectories):
    """(logp_ref_ntl, value_ntl, last_value_n)."""
    trunk = params.critic if kind == "own" else params.policy
    logp_ntl, value_ntl = np.zeros(trajectories.tokens.shape), np.zeros(trajectories.tokens.shape)
    last_n = np.zeros(len(trajectories.group))
    for n in range(len(last_n)):
        for places in sequences(trajectories, n):
            tokens = np.array([trajectories.tokens[n, t, i] for t, i in places])
            value_s = states(trunk, tokens) @ np.asarray(params.critic["value"])
            logp_sv = logp_after(REFERENCE, tokens)
            for s, (t, i) in enumerate(places):
                if s and trajectories.chosen[n, t, i]:
                    logp_ntl[n, t, i], value_ntl[n, t, i] = logp_sv[s - 1, tokens[s]], value_s[s - 1]
            last_n[n] = value_s[-1]
    return logp_ntl, value_ntl, last_n


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["own", "shared"])
@pytest.mark.parametrize("seed", [0, 1])
def test_scores_equal_those_of_single_sequences(kind, seed):
    trajectories = bare(seed)
    assert trajectories.starts_context is not None
    assert 0 < trajectories.starts_context[:, 1:][trajectories.turns[:, 1:]].mean() < 1  # both kinds of contexts
    found = score_trajectories(kind)(params_of(kind), ActorCritic(REFERENCE, None), trajectories)
    logp_ntl, value_ntl, last_n = by_hand(params_of(kind), kind, trajectories)
    np.testing.assert_allclose(found.logp_ref, logp_ntl, atol=1e-5)
    np.testing.assert_allclose(found.value, value_ntl, atol=1e-5)
    np.testing.assert_allclose(found.last_value, last_n, atol=1e-5)


@pytest.mark.slow
def test_F3_micro_batches_and_devices_change_nothing():
    trajectories, params = bare(2), params_of("own")
    expected = score_trajectories()(params, REFERENCE, trajectories)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    for settings in ({"micro_rows": 1}, {"micro_rows": 64}, {"policy": BIGRAMS._replace(mesh=mesh)}):
        found = score_trajectories(**settings)(params, REFERENCE, trajectories)
        for name in ("logp_ref", "value", "last_value"):
            np.testing.assert_allclose(getattr(found, name), getattr(expected, name), atol=1e-5, err_msg=name)


def test_hindsight_scores_equal_those_after_the_hint():
    hint_nq = np.random.default_rng(0).integers(1, 50, (len(bare(3).group), 2))
    trajectories, params = bare(3).replace(hint=hint_nq), init(jax.random.key(8))
    scorer = score_trajectories(needs=frozenset({"logp_ref"}), critic=None, hindsight=True)
    found = scorer(None, params, trajectories)
    expected_ntl, told = np.zeros(trajectories.tokens.shape), 0
    for n in range(len(hint_nq)):
        for places in sequences(trajectories, n):
            hint = hint_nq[n] if places[0][0] == 0 else hint_nq[n, :0]
            tokens = np.array([*hint, *(trajectories.tokens[n, t, i] for t, i in places)])
            logp_sv, told = logp_after(params, tokens), told + len(hint)
            for s, (t, i) in enumerate(places, len(hint)):
                if s and trajectories.chosen[n, t, i]:
                    expected_ntl[n, t, i] = logp_sv[s - 1, tokens[s]]
    assert told == hint_nq.size
    np.testing.assert_allclose(found.logp_ref, expected_ntl, atol=1e-5)
    np.testing.assert_array_equal(found.hint, hint_nq)
    with pytest.raises(
        fg.BadInput, match=r"Trajectories\.hint is missing, and scoring in hindsight needs it: roll out"
    ):
        scorer(None, params, bare(3))


def test_only_needed_fields_are_scored():
    trajectories, params = bare(3), params_of("own")
    values = score_trajectories(needs=frozenset({"value"}))(params, None, trajectories)
    assert values.logp_ref is None
    assert values.value is not None
    reference = score_trajectories(needs=frozenset({"logp_ref", "logp_old"}), critic=None)(
        None, REFERENCE, trajectories
    )
    assert reference.value is None
    assert reference.last_value is None
    np.testing.assert_allclose(
        reference.logp_ref, score_trajectories()(params, REFERENCE, trajectories).logp_ref, atol=1e-6
    )


@pytest.mark.slow
def test_scores_reach_the_batch_in_every_layout():
    algorithm, trajectories = fg.ppo(beta=0.1), bare(4)
    scored = jax.device_get(score_trajectories()(params_of("own"), REFERENCE, trajectories))
    credit = (algorithm.advantages(scored), algorithm.weights(scored))
    target_ntl = algorithm.targets(scored)  # type: ignore[misc]
    packed = fg.pack(scored, *credit, row_length=48, target=target_ntl)
    plain = fg.batching.rows_by_trajectory(scored, *credit, target_ntl)
    for batch in (packed, plain):
        live_rs = np.asarray(batch.loss_mask)
        index = tuple(np.asarray(x)[live_rs] for x in (batch.trajectory, batch.turn, batch.slot))
        for name, x_ntl in (("logp_ref", scored.logp_ref), ("value_old", scored.value), ("target", target_ntl)):
            np.testing.assert_array_equal(np.asarray(getattr(batch, name))[live_rs], np.asarray(x_ntl)[index], name)


@pytest.mark.slow
@pytest.mark.usefixtures("nan_allowed")
def test_trajectories_longer_than_the_slots_are_nan():
    trajectories, params = bare(5), params_of("own")
    length_n = np.asarray(resolve_lengths(trajectories)[0]).sum(axis=1)
    expected = score_trajectories()(params, REFERENCE, trajectories)
    found = score_trajectories(slots=int(length_n.max()))(params, REFERENCE, trajectories)
    np.testing.assert_allclose(found.value, expected.value, atol=1e-6)
    np.testing.assert_allclose(found.last_value, expected.last_value, atol=1e-6)
    short = int(np.median(length_n))
    cut = score_trajectories(slots=short)(params, REFERENCE, trajectories)
    np.testing.assert_array_equal(np.isnan(cut.last_value), length_n > short)
    np.testing.assert_array_equal(np.isnan(cut.logp_ref).all(axis=(1, 2)), length_n > short)
    fits_n = length_n <= short
    np.testing.assert_allclose(cut.value[fits_n], expected.value[fits_n], atol=1e-6)


def test_M4_logits_are_never_materialised_as_a_whole():
    """Temporary memory, from the compiler: far below that of all tokens times the vocabulary."""
    vocabulary, trajectories = 32_768, bare(6)
    wide = fg.contracts.Policy(
        lambda _: {},
        lambda params, tokens, *_: (params["embed"][tokens], None),
        lambda params, states: states @ params["embed"].T,
    )
    params = {"embed": jax.ShapeDtypeStruct((vocabulary, WIDTH), jnp.float32)}
    program = jax.jit(make_score_trajectories(wide, needs={"logp_ref"}, settings=ScoreSettings(chunk=16), micro_rows=4))
    used = program.lower(None, params, trajectories).compile().memory_analysis().temp_size_in_bytes
    assert used < trajectories.tokens.size * vocabulary * 4 / 8


def test_values_need_a_critic():
    with pytest.raises(fg.BadInput, match="values are needed, but there is no critic: pass one"):
        make_score_trajectories(BIGRAMS, needs={"value"})


# On trees -----------------------------------------------------------------------------------------------


def test_F10_reference_scores_on_trees_equal_those_on_rows():
    played = bare(3)
    count, turns = played.turns.shape
    packing = make_packer(True, max_trajectory_tokens=48, trajectories=count, turns=turns, micro_rows=2)
    found_ntl = make_score_trees(BIGRAMS, packing, **SETTINGS)(REFERENCE, played)
    rows = jax.jit(make_score_trajectories(BIGRAMS, needs={"logp_ref"}, settings=ScoreSettings(**SETTINGS)))
    expected_ntl, actions_ntl = np.asarray(rows(None, REFERENCE, played).logp_ref), np.asarray(played.action_mask)
    np.testing.assert_allclose(found_ntl[actions_ntl], expected_ntl[actions_ntl], atol=1e-5)
    assert not found_ntl[~actions_ntl].any()
    dropping = partial(pack_tree, row_length=12, rows=2 * count * turns, too_long="drop")
    partly_ntl = make_score_trees(BIGRAMS, dropping, **SETTINGS)(REFERENCE, played)
    gone_n = np.isnan(partly_ntl).any(axis=(1, 2))
    assert 0 < gone_n.sum() < count
    assert np.isnan(partly_ntl[gone_n][actions_ntl[gone_n]]).all()
    np.testing.assert_allclose(partly_ntl[~gone_n], found_ntl[~gone_n], atol=1e-5)
