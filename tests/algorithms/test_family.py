"""One contract for every member of the family: the laws, the layouts, and what compilation must not change."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_cases import batch_of, everything_on, loss_and_slopes, make_case, members, metrics_of, scores_of, signal

import flowgrpo as fg
from flowgrpo.types import map_axis

MEMBERS = members()
FULL = MEMBERS | {f"{name}, all options": everything_on(name) for name in ("flow_grpo", "gspo", "ppo", "dpo")}
each_member = pytest.mark.parametrize("name", MEMBERS)
each_and_with_all_options = pytest.mark.parametrize("name", FULL)


def keepers(law: str):
    """Parametrise over the members that declare a law."""
    return pytest.mark.parametrize("name", [name for name, member in MEMBERS.items() if law in member.laws])


def assert_same(found, expected):
    """Assert equal loss and gradient, relative to the largest slope."""
    scale = np.abs(expected[1]).max()
    assert scale > 0
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[1], expected[1], rtol=0, atol=1e-6 * scale)


def advantages(name: str, trajectories: fg.Trajectories) -> np.ndarray:
    """Compute advantages from the outcomes alone: at the reference, where KL is 0, and without a penalty on length."""
    algorithm = fg.algorithms.dapo() if name == "dapo" else MEMBERS[name]
    return np.asarray(signal(algorithm)(trajectories.replace(logp_ref=trajectories.logp_old))[0])


# F3: the layout changes nothing -----------------------------------------------------------------------


@each_and_with_all_options
def test_F3_layouts_and_micro_batches_change_neither_loss_nor_gradient(name):
    """Shuffled, dealt to ranks, split at turns, one row per trajectory or turn; four parts after one first pass."""
    algorithm, case = FULL[name], make_case(11)
    whole = batch_of(algorithm, case.trajectories)
    expected = loss_and_slopes(algorithm, case, whole)
    order = np.random.default_rng(0).permutation(len(whole.tokens))
    for batch in (
        jax.tree.map(lambda x_rs: x_rs[order], whole),
        batch_of(algorithm, case.trajectories, row_length=16, rows=48, ranks=4, too_long="split"),
        batch_of(algorithm, case.trajectories, "by_trajectory"),
        batch_of(algorithm, case.trajectories, "by_turn"),
    ):
        assert_same(loss_and_slopes(algorithm, case, batch), expected)
    summed = algorithm.sequence_sums(whole, scores_of(case, whole).logp) if algorithm.sequence_sums else whole
    parts = [jax.tree.map(lambda x_rs, part=part: x_rs[part::4], summed) for part in range(4)]
    results = [loss_and_slopes(algorithm, case, part) for part in parts]
    assert_same([sum(column) for column in zip(*results, strict=True)], expected)
    found = [metrics_of(algorithm, case, part) for part in parts]
    for key, value in metrics_of(algorithm, case, whole).items():
        np.testing.assert_allclose(sum(part[key] for part in found), value, rtol=1e-4, atol=1e-5, err_msg=key)


# F1, F4, F8: statistics, and zero where there is nothing to learn -------------------------------------


@keepers("F1")
def test_F1_statistics_do_not_depend_on_the_number_of_turns(name):
    """Every turn twice: the same advantage at every turn of a trajectory."""
    trajectories = make_case(5).trajectories
    trajectories = trajectories.replace(turns=trajectories.turns & [True, True, False, False])
    twice = map_axis(trajectories, "t", lambda x, axis: np.take(x, [0, 0, 1, 1], axis))
    expected_nt = np.where(twice.turns, advantages(name, trajectories)[:, :1], 0.0)
    assert expected_nt.any()
    np.testing.assert_allclose(advantages(name, twice), expected_nt, rtol=1e-5, atol=1e-6)


@keepers("F4")
def test_F4_groups_of_equal_rewards_have_no_advantage(name):
    """0.91 for all, invalid members among them; `correct` is mixed, so that filters keep the groups."""
    trajectories = make_case(3).trajectories
    outcome_n = np.where(trajectories.valid, np.float32(0.91), np.nan)
    flat = trajectories.replace(outcome=outcome_n, correct=np.arange(len(outcome_n)) % 2 == 0)
    assert not advantages(name, flat).any()


@keepers("F8")
def test_F8_scaling_and_shifting_the_rewards_of_a_group_changes_nothing(name):
    trajectories = make_case(6).trajectories
    scale_n, shift_n = np.where(trajectories.group % 2 == 0, 7.0, 0.25), trajectories.group / 100
    moved = trajectories.replace(outcome=(trajectories.outcome * scale_n + shift_n).astype(np.float32))
    np.testing.assert_allclose(advantages(name, moved), advantages(name, trajectories), atol=2e-4)


SKIPPING = {name: member for name, member in MEMBERS.items() if member.skips_zero_advantage} | {
    "flow_grpo": fg.flow_grpo(beta=0.0)
}


@pytest.mark.parametrize("name", SKIPPING)
def test_F8_no_advantage_and_no_regulariser_give_no_gradient(name):
    """Weights are computed first; leaving idle trajectories out of the rows then changes nothing."""
    algorithm, case = SKIPPING[name], make_case(8)
    trajectories = case.trajectories
    same_n = trajectories.group == trajectories.group[0]
    trajectories = trajectories.replace(outcome=np.where(same_n & trajectories.valid, 0.5, trajectories.outcome))
    whole = batch_of(algorithm, trajectories)
    idle = whole.replace(advantage=np.zeros_like(whole.advantage))
    assert not loss_and_slopes(algorithm, case, idle)[1].any()
    skipped = batch_of(algorithm, trajectories, skip_no_signal=True)
    assert name != "flow_grpo" or (skipped.segments > 0).sum() < (whole.segments > 0).sum()
    assert_same(loss_and_slopes(algorithm, case, skipped), loss_and_slopes(algorithm, case, whole))


def test_F8_skips_zero_advantage_is_false_under_every_regulariser():
    assert set(SKIPPING) == {
        *("dr_grpo", "dapo", "gspo", "cispo", "rloo", "trloo", "reinforce_pp", "dpo", "flow_grpo"),
        *("opd", "opd_dead_only"),
    }
    assert fg.flow_grpo(beta=0.1, kl_in="reward").skips_zero_advantage
    for options in ({"beta": 0.1}, {"entropy_bonus": 0.1}, {"beta": jnp.float32(0.0)}):
        assert not fg.flow_grpo(**{"beta": 0.0, **options}).skips_zero_advantage
    assert not fg.dpo(entropy_bonus=0.1).skips_zero_advantage


# F6, F7: what is invalid or masked reaches nothing, and the ratio starts at one -----------------------


def spoiled(fields: dict, garbage: float, own) -> dict:
    """The fields that are there, with garbage wherever `own` is false."""
    given = {name: np.asarray(x) for name, x in fields.items() if x is not None}
    return {name: np.where(own, x, garbage).astype(x.dtype) for name, x in given.items()}


SCORED = ("logp_sampled", "logp_old", "logp_ref")


@pytest.mark.usefixtures("nan_allowed")
@each_and_with_all_options
def test_F6_garbage_in_masked_or_invalid_slots_changes_nothing(name):
    """NaN, infinity or 1e30: the same loss, the same gradient, both finite."""
    algorithm, clean = FULL[name], make_case(14, invalid=0.3, by_turn=name in ("gigpo", "mt_grpo", "trloo"))
    expected = loss_and_slopes(algorithm, clean, batch_of(algorithm, clean.trajectories))
    assert np.isfinite(expected[0])
    assert np.isfinite(expected[1]).all()
    clean_x, batch_names = clean.trajectories, (*SCORED, "advantage", "weight", "value_old", "target")
    valid_n = np.asarray(clean_x.valid)
    own_ntl = clean_x.chosen & valid_n[:, None, None]
    for garbage in (np.nan, np.inf, -np.inf, 1e30):
        dirty = spoiled({field: getattr(clean_x, field) for field in (*SCORED, "value")}, garbage, own_ntl)
        dirty |= spoiled({"outcome": clean_x.outcome}, garbage, valid_n)
        dirty |= spoiled({"reward": clean_x.reward}, garbage, clean_x.turns & valid_n[:, None])
        dirty |= spoiled({"last_value": clean_x.last_value}, garbage, valid_n & np.asarray(clean_x.bootstraps))
        batch = batch_of(algorithm, clean_x.replace(**dirty))
        own_rs = np.asarray(batch.chosen) & (np.asarray(batch.segments) > 0)
        batch = batch.replace(**spoiled({field: getattr(batch, field) for field in batch_names}, garbage, own_rs))
        said = {field: getattr(clean, field) for field in ("logp", "entropy", "value")}
        found = loss_and_slopes(algorithm, clean._replace(**spoiled(said, garbage, own_ntl)), batch)
        assert_same(found, expected)
        assert not found[1][~own_ntl].any()


@each_member
def test_F7_on_policy_gradient_is_the_plain_policy_gradient(name):
    """Nothing is clipped, and d loss / d log pi = - weight * advantage where the reference is the policy, too."""
    algorithm, case = MEMBERS[name], make_case(17)
    trajectories = case.trajectories.replace(logp_ref=case.trajectories.logp_old)
    batch, on_policy = batch_of(algorithm, trajectories), case._replace(logp=trajectories.logp_old)
    metrics = metrics_of(algorithm, on_policy, batch)
    assert metrics.get("clip_low_fraction", 0.0) == metrics.get("clip_high_fraction", 0.0) == 0.0
    if name != "dpo":
        np.testing.assert_allclose(metrics["ratio"], metrics["weight"], rtol=1e-6)
        expected_ntl = fg.batching.unpack(-batch.weight * batch.advantage, batch, case.logp.shape)
        slope_ntl = loss_and_slopes(algorithm, on_policy, batch)[1]
        np.testing.assert_allclose(slope_ntl, expected_ntl, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", ["flow_grpo", "ppo"])
def test_F2_excluding_segments_or_turns_keeps_the_other_weights(name):
    """`newest_segment_only` of two versions of the weights, and `last_turn_only`."""
    algorithm, trajectories = MEMBERS[name], make_case(11).trajectories
    version_ntl = np.broadcast_to(np.arange(4)[:, None] // 2, trajectories.tokens.shape)
    partly = signal(fg.algorithms.newest_segment_only(fg.algorithms.last_turn_only(algorithm)))
    (whole_adv, whole, _), (adv, newest, _) = (
        signal(algorithm)(trajectories),
        partly(trajectories.replace(version=version_ntl)),
    )
    spoke_ntl = np.where(trajectories.action_mask, version_ntl, -1)
    own_ntl = spoke_ntl == spoke_ntl.max(axis=(1, 2), keepdims=True)
    np.testing.assert_array_equal(newest, np.where(own_ntl, whole, 0.0))
    assert 0 < np.count_nonzero(newest) < np.count_nonzero(whole)
    final_nt = np.arange(4) == trajectories.turns.sum(axis=1, keepdims=True) - 1
    np.testing.assert_array_equal(adv, np.where(final_nt if adv.ndim == 2 else final_nt[:, :, None], whole_adv, 0))
    assert adv.any()


# Compilation -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "setting", "values"),
    [("flow_grpo", "clip_high", [0.1, 0.5]), ("kimi", "tau", [0.1, 1.0]), ("gigpo", "omega", [0.0, 1.0])],
)
def test_settings_can_be_vmapped(name, setting, values):
    """A number is not looked at with a Python `if`, so one program runs a whole sweep."""
    case, build = make_case(22), getattr(fg.algorithms, name)
    batch = batch_of(MEMBERS[name], case.trajectories)

    def run(value):
        algorithm = build(**{setting: value})
        return algorithm.loss(scores_of(case, batch), batch)[0] + algorithm.advantages(case.trajectories).max()

    swept = jax.jit(jax.vmap(run))(jnp.array(values, jnp.float32))
    np.testing.assert_allclose(swept, [run(value) for value in values], rtol=1e-5, atol=1e-6)
    assert swept[0] != swept[1]


# What members say of themselves -----------------------------------------------------------------------

NEEDS = {name: {"logp_ref"} for name in MEMBERS} | {name: set() for name in ("dr_grpo", "dapo", "cispo", "trloo")}
NEEDS |= {name: {"logp_old"} for name in ("gspo", "kimi")}
NEEDS |= {name: {"logp_ref", "value"} for name in ("ppo", "ppo_turns")}
BEFORE = {name: NEEDS[name] for name in ("rloo", "reinforce_pp", "ppo", "ppo_turns")}
BEFORE |= {name: NEEDS[name] for name in ("opd", "opd_dead_only")}


@each_member
def test_members_declare_what_they_need(name):
    algorithm, own = MEMBERS[name], name.removesuffix("_baseline").removesuffix("_turns").removesuffix("_dead_only")
    full, extra = everything_on(own), {"dpo": set(), "kimi": {"logp_old"}}.get(name, {"logp_old", "logp_ref"})
    refreshed = None if own == "opd" else 10  # its reference is the teacher
    assert algorithm.name == full.name == own
    assert (algorithm.needs, algorithm.needs_for_advantages) == (NEEDS[name], BEFORE.get(name, set()))
    assert full.needs == NEEDS[name] | extra | {"entropy"}
    assert (algorithm.reference_every, full.reference_every) == (None, refreshed)
    assert (algorithm.sequence_sums is not None, full.sequence_sums is not None) == (
        name in ("gspo", "kimi", "dpo"),
        True,
    )
    assert algorithm.minibatch_unit == ("group" if name == "dpo" else "trajectory")


PPO = {"gamma": 1.0, "lam": 0.95, "value_clip": 0.2, "value_coefficient": 0.5, "beta": 0.001, "kl_in": "reward"}
PUBLISHED = {
    "flow_grpo": {"clip_low": 0.2, "clip_high": 0.2, "beta": 0.001, "eps": 1e-6},
    "flow_grpo_released": {"clip_low": 0.2, "clip_high": 0.3, "beta": 0.001, "dual_clip": 3.0, "eps": 1e-6},
    "grpo": {"clip_low": 0.2, "clip_high": 0.2, "beta": 0.04, "eps": 1e-6},
    "dr_grpo": {"clip_low": 0.2, "clip_high": 0.2},
    "dapo": {"clip_low": 0.2, "clip_high": 0.28, "dynamic_sampling": True, "eps": 1e-6},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "eps": 1e-6},
    "cispo": {"clip_low": 1.0, "clip_high": 4.0, "eps": 1e-6},
    "reinforce_pp": {"clip_low": 0.2, "clip_high": 0.2, "gamma": 1.0, "baseline": None},
    "gigpo": {"omega": 1.0, "gamma": 0.95, "clip_low": 0.2, "clip_high": 0.2, "beta": 0.01, "eps": 1e-6},
    "mt_grpo": {"lam": 1.0, "clip_low": 0.2, "clip_high": 0.2, "beta": 0.04, "eps": 1e-6},
    "trloo": {"gamma": 1.0, "clip_low": 0.2, "clip_high": 0.2},
    "kimi": {"tau": 0.1},
    "ppo": {"estimator": fg.algorithms.token_gae, "clip_low": 0.2, "clip_high": 0.2, **PPO},
    "dpo": {"beta": 0.1},
    "opd": {"outcome": 0.0, "dead_only": False, "eps": 1e-6},
}


def test_defaults_are_the_published_settings():
    for name, published in PUBLISHED.items():
        parameters = inspect.signature(getattr(fg.algorithms, name)).parameters.values()
        assert {p.name: p.default for p in parameters if p.default is not p.empty} == published, name
