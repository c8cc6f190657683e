"""One contract for every member of the family: the laws, the layouts, and what compilation must not change."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    batch_of,
    everything_on,
    loss_and_slopes,
    loss_program,
    make_case,
    members,
    metrics_of,
    padded,
    scores_of,
    signal,
)

import flowgrpo as fg

MEMBERS = members()
UNSHAPED = MEMBERS | {"dapo": fg.dapo()}  # whose length punishment is no part of the outcome
FULL = MEMBERS | {f"{name}, all options": everything_on(name) for name in ("flow_grpo", "gspo", "ppo", "dpo")}
each_member = pytest.mark.parametrize("name", MEMBERS)
each_and_with_all_options = pytest.mark.parametrize("name", FULL)


def keepers(law: str):
    """Parametrise over the members that declare a law."""
    return pytest.mark.parametrize("name", [name for name, member in MEMBERS.items() if law in member.keeps])


def assert_same(found, expected, tolerance=1e-6):
    """Assert equal loss and gradient, relative to the largest slope."""
    scale = np.abs(expected[1]).max()
    assert scale > 0
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[1], expected[1], rtol=0, atol=tolerance * scale)


def advantages(name: str, trajectories: fg.Trajectories) -> np.ndarray:
    """What the outcomes alone give: at the reference, where KL is 0."""
    return np.asarray(signal(UNSHAPED[name])(trajectories.replace(logp_ref=trajectories.logp_old))[0])


# F3: the layout changes nothing -----------------------------------------------------------------------


@each_and_with_all_options
def test_F3_layouts_give_the_same_loss_and_gradient(name):
    """Packed, shuffled, dealt to ranks, split at turns, one row per trajectory or turn."""
    algorithm, case = FULL[name], make_case(11)
    trajectories = case.trajectories
    packed = batch_of(algorithm, trajectories)
    expected = loss_and_slopes(algorithm, case, packed)
    order = np.random.default_rng(0).permutation(len(packed.tokens))
    layouts = [
        jax.tree.map(lambda x_rs: x_rs[order], packed),
        batch_of(algorithm, trajectories, ranks=4),
        batch_of(algorithm, trajectories, row_length=16, rows=48, too_long="split"),
        batch_of(algorithm, trajectories, "by_trajectory"),
        batch_of(algorithm, trajectories, "by_turn"),
    ]
    for batch in layouts:
        assert_same(loss_and_slopes(algorithm, case, batch), expected)


@each_and_with_all_options
def test_F3_micro_batches_sum(name):
    """Four micro-batches, after one first pass over the whole: losses, gradients and metrics add up."""
    algorithm, case = FULL[name], make_case(12)
    whole = batch_of(algorithm, case.trajectories)
    summed = algorithm.sums(whole, scores_of(case, whole).logp) if algorithm.sums else whole
    parts = [jax.tree.map(lambda x_rs: x_rs[part::4], summed) for part in range(4)]  # noqa: B023
    results = [loss_and_slopes(algorithm, case, part) for part in parts]
    assert_same([sum(column) for column in zip(*results, strict=True)], loss_and_slopes(algorithm, case, whole))
    found = [metrics_of(algorithm, case, part) for part in parts]
    for key, value in metrics_of(algorithm, case, whole).items():
        np.testing.assert_allclose(sum(part[key] for part in found), value, rtol=1e-4, atol=1e-5, err_msg=key)


@pytest.mark.parametrize("name", ["gspo", "dpo"])
def test_F3_eight_devices(name):
    """Rows sharded over eight devices: the same loss and gradient, sequences over several rows among them."""
    algorithm, case = everything_on(name), make_case(13)
    batch = batch_of(algorithm, case.trajectories, ranks=8)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    loss, slope_ntl, _ = loss_program(algorithm)(case, jax.device_put(padded(batch), rows))
    assert_same((loss, slope_ntl), loss_and_slopes(algorithm, case, batch))


# F1, F4, F8: statistics, and zero where there is nothing to learn -------------------------------------


@keepers("F1")
def test_F1_statistics_do_not_depend_on_the_number_of_turns(name):
    """Every turn twice: the same advantage at every turn of a trajectory."""
    trajectories = make_case(5).trajectories
    trajectories = trajectories.replace(turns=trajectories.turns & [True, True, False, False])
    adv_n = advantages(name, trajectories)[:, 0]
    by_turn = ("tokens", "chosen", "logp_sampled", "version", "turns", "reward", "anchor", "length", "logp_old")
    twice = trajectories.replace(**{field: getattr(trajectories, field)[:, [0, 0, 1, 1]] for field in by_turn})
    assert np.abs(adv_n).max() > 0
    expected_nt = np.where(twice.turns, adv_n[:, None], 0.0)
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
    expected = advantages(name, trajectories)
    assert np.abs(expected).max() > 0
    np.testing.assert_allclose(advantages(name, moved), expected, atol=2e-4)


SKIPPING = {name: member for name, member in MEMBERS.items() if member.skips} | {"flow_grpo": fg.flow_grpo(beta=0.0)}


@pytest.mark.parametrize("name", SKIPPING)
def test_F8_no_advantage_and_no_regulariser_give_no_gradient_and_groups_without_signal_can_be_skipped(name):
    """Weights are computed first; leaving idle trajectories out of the rows then changes nothing."""
    algorithm, case = SKIPPING[name], make_case(8)
    trajectories = case.trajectories
    same_n = trajectories.group == trajectories.group[0]
    trajectories = trajectories.replace(outcome=np.where(same_n & trajectories.valid, 0.5, trajectories.outcome))
    whole = batch_of(algorithm, trajectories)
    idle = whole.replace(advantage=np.zeros_like(whole.advantage))
    assert not loss_and_slopes(algorithm, case, idle)[1].any()
    skipped = batch_of(algorithm, trajectories, skip_no_signal=True)
    if algorithm.name == "flow_grpo":
        assert (skipped.segments > 0).sum() < (whole.segments > 0).sum()
    assert_same(loss_and_slopes(algorithm, case, skipped), loss_and_slopes(algorithm, case, whole))


def test_F8_skips_is_false_under_every_regulariser():
    assert {"dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "dpo", "flow_grpo"} == set(SKIPPING)
    assert fg.flow_grpo(beta=0.1, kl_in="reward").skips
    for options in ({"beta": 0.1}, {"entropy_bonus": 0.1}, {"beta": jnp.float32(0.0)}):
        assert not fg.flow_grpo(**{"beta": 0.0, **options}).skips
    assert not fg.dpo(entropy_bonus=0.1).skips


# F5, F6: what is invalid or masked reaches nothing ----------------------------------------------------


def poisoned(case, value: float):
    """The case with `value` in every slot that is masked, past the end, or of an invalid trajectory."""
    trajectories = case.trajectories
    valid_n = np.asarray(trajectories.valid)
    chosen_ntl = trajectories.chosen & valid_n[:, None, None]

    def spoil(x, mask):
        return np.where(mask, x, np.float32(value)).astype(np.float32)

    spoiled = trajectories.replace(
        outcome=spoil(trajectories.outcome, valid_n),
        reward=spoil(trajectories.reward, trajectories.turns & valid_n[:, None]),
        last_value=spoil(trajectories.last_value, valid_n & np.asarray(trajectories.bootstraps)),
        **{f: spoil(getattr(trajectories, f), chosen_ntl) for f in ("logp_sampled", "logp_old", "logp_ref", "value")},
    )
    return type(case)(spoiled, *(spoil(x, chosen_ntl) for x in (case.logp, case.entropy, case.value)))


def spoil_batch(batch: fg.Batch, value: float) -> fg.Batch:
    """The batch with `value` in every per-token field outside the chosen tokens."""
    own_rs = np.asarray(batch.chosen) & (np.asarray(batch.segments) > 0)
    names = ("logp_sampled", "logp_old", "logp_ref", "advantage", "weight", "value_old", "target")
    present = {name: getattr(batch, name) for name in names if getattr(batch, name) is not None}
    return batch.replace(**{name: np.where(own_rs, x_rs, np.float32(value)) for name, x_rs in present.items()})


@pytest.mark.usefixtures("nan_allowed")
@each_and_with_all_options
@pytest.mark.parametrize("layout", ["packed", "by_trajectory"])
def test_F6_garbage_in_masked_or_invalid_slots_changes_nothing(name, layout):
    """NaN, infinity or 1e30: the same loss, the same gradient, both finite."""
    algorithm, clean = FULL[name], make_case(14, invalid=0.3, by_turn=name == "gigpo")
    expected = loss_and_slopes(algorithm, clean, batch_of(algorithm, clean.trajectories, layout))
    untrained_ntl = ~(clean.trajectories.chosen & np.asarray(clean.trajectories.valid)[:, None, None])
    for value in (np.nan, np.inf, -np.inf, 1e30):
        dirty = poisoned(clean, value)
        found = loss_and_slopes(algorithm, dirty, spoil_batch(batch_of(algorithm, dirty.trajectories, layout), value))
        assert np.isfinite(found[0])
        assert np.isfinite(found[1]).all()
        assert_same(found, expected)
        assert not found[1][untrained_ntl].any()


def test_F5_the_tokens_of_an_invalid_trajectory_are_counted():
    algorithm, trajectories = MEMBERS["flow_grpo"], make_case(21, invalid=0.3).trajectories
    weights = signal(algorithm)(trajectories)[1]
    ledger = fg.account(trajectories, weights, batch_of(algorithm, trajectories))
    invalid_n = ~np.asarray(trajectories.valid)
    assert ledger.fates[fg.Fate.MASKED_INVALID] == trajectories.chosen[invalid_n].sum() > 0


def test_dapo_filters_on_unshaped_correctness_and_counts_what_it_discards():
    """All correct but of unequal length: shaping makes a spread, and the group is discarded all the same."""
    algorithm, trajectories = MEMBERS["dapo"], make_case(20, invalid=0.0, length=10).trajectories
    first_n = trajectories.group == trajectories.group[0]
    correct_n = np.where(first_n, True, np.cumsum(~first_n) % 2 == 0)
    trajectories = trajectories.replace(correct=correct_n, outcome=correct_n.astype(np.float32))
    shaped = fg.dapo(overlong=fg.Overlong(20, 10), dynamic_sampling=False)
    assert np.asarray(signal(shaped)(trajectories)[0])[first_n].any()
    adv, weights, _ = signal(algorithm)(trajectories)
    assert not np.asarray(adv)[first_n].any()
    assert float(weights.sum()) == pytest.approx(1.0, abs=1e-5)
    ledger = fg.account(trajectories, weights, batch_of(algorithm, trajectories, rows=24))
    assert ledger.fates[fg.Fate.MASKED_WEIGHTLESS] == trajectories.chosen[first_n].sum()


# F7: the ratio starts at one --------------------------------------------------------------------------


@each_member
def test_F7_on_policy_the_ratio_is_one_and_the_gradient_the_plain_policy_gradient(name):
    """Nothing is clipped, and d loss / d log pi = - weight * advantage where the reference is the policy, too."""
    algorithm, case = MEMBERS[name], make_case(17)
    trajectories = case.trajectories.replace(logp_ref=case.trajectories.logp_old)
    batch, on_policy = batch_of(algorithm, trajectories), case._replace(logp=trajectories.logp_old)
    metrics = metrics_of(algorithm, on_policy, batch)
    assert metrics.get("clip_low_fraction", 0.0) == metrics.get("clip_high_fraction", 0.0) == 0.0
    if name != "dpo":
        np.testing.assert_allclose(metrics["ratio"], metrics["weight"], rtol=1e-6)
        expected_ntl = fg.unpack(-batch.weight * batch.advantage, batch, case.logp.shape)
        slope_ntl = loss_and_slopes(algorithm, on_policy, batch)[1]
        np.testing.assert_allclose(slope_ntl, expected_ntl, rtol=1e-5, atol=1e-8)


# Segments and turns that are left out -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["flow_grpo", "ppo"])
def test_F2_older_segments_and_earlier_turns_are_left_out_and_the_rest_keeps_its_weight_and_advantage(name):
    """`newest_segment_only` of two versions of the weights, and `last_turn_only`."""
    algorithm, trajectories = MEMBERS[name], make_case(11).trajectories
    version_ntl = np.broadcast_to(np.arange(4)[:, None] // 2, trajectories.tokens.shape)
    partly = signal(fg.newest_segment_only(fg.last_turn_only(algorithm)))
    whole_adv, whole, _ = map(np.asarray, signal(algorithm)(trajectories))
    adv, newest, _ = map(np.asarray, partly(trajectories.replace(version=version_ntl)))
    spoke_ntl = np.where(trajectories.actions, version_ntl, -1)
    own_ntl = spoke_ntl == spoke_ntl.max(axis=(1, 2), keepdims=True)
    np.testing.assert_array_equal(newest, np.where(own_ntl, whole, 0.0))
    assert 0 < np.count_nonzero(newest) < np.count_nonzero(whole)
    np.testing.assert_array_equal(partly(trajectories.replace(version=np.zeros_like(version_ntl)))[1], whole)
    for i, turns_t in enumerate(trajectories.turns):
        final = np.flatnonzero(turns_t)[-1:]
        np.testing.assert_array_equal(adv[i, final], whole_adv[i, final])
        assert not np.delete(adv[i], final, axis=0).any()
    assert adv.any()


# Compilation ------------------------------------------------------------------------------------------


@each_member
def test_another_batch_of_the_same_shape_traces_nothing_again(name):
    algorithm, sizes = MEMBERS[name], []
    for seed in (1, 2):
        case = make_case(seed)
        loss_and_slopes(algorithm, case, batch_of(algorithm, case.trajectories))
        sizes.append((signal(algorithm)._cache_size(), loss_program(algorithm)._cache_size()))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(
    ("name", "setting", "values"),
    [("flow_grpo", "clip_high", [0.1, 0.2, 0.5]), ("kimi", "tau", [0.1, 1.0]), ("dpo", "beta", [0.1, 0.5])],
)
def test_settings_can_be_vmapped(name, setting, values):
    """A number is not looked at with a Python `if`, so one program runs a whole sweep."""
    case, build = make_case(22), getattr(fg, name)
    batch = batch_of(MEMBERS[name], case.trajectories)

    def loss(value):
        return build(**{setting: value}).loss(scores_of(case, batch), batch)[0]

    swept = jax.jit(jax.vmap(loss))(jnp.array(values, jnp.float32))
    np.testing.assert_allclose(swept[-1], loss(values[-1]), rtol=1e-5, atol=1e-6)
    assert len(set(np.asarray(swept).tolist())) == len(values)


def test_settings_of_advantages_can_be_vmapped():
    trajectories = make_case(22).trajectories
    swept = jax.jit(jax.vmap(lambda omega: fg.gigpo(omega=omega).advantages(trajectories)))(jnp.array([0.0, 1.0]))
    np.testing.assert_allclose(swept[1], signal(MEMBERS["gigpo"])(trajectories)[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(swept[0], signal(MEMBERS["flow_grpo"])(trajectories)[0], rtol=1e-5, atol=1e-6)


@each_member
def test_low_precision_scores_are_read_as_float32(name):
    algorithm, case = MEMBERS[name], make_case(23)
    batch = batch_of(algorithm, case.trajectories)
    scores = jax.tree.map(lambda x: x.astype(jnp.bfloat16), scores_of(case, batch))
    loss, metrics = jax.eval_shape(algorithm.loss, scores, batch)
    assert {loss.dtype, *(value.dtype for value in metrics.values())} == {jnp.dtype(jnp.float32)}


# What members say of themselves -----------------------------------------------------------------------

NEEDS = {
    "flow_grpo": {"logp_ref"}, "flow_grpo_released": {"logp_ref"}, "grpo": {"logp_ref"}, "gspo": {"logp_old"},
    "rloo": {"logp_ref"}, "reinforce_pp": {"logp_ref"}, "reinforce_pp_baseline": {"logp_ref"}, "gigpo": {"logp_ref"},
    "kimi": {"logp_old"}, "ppo": {"logp_ref", "value"}, "ppo_turns": {"logp_ref", "value"}, "dpo": {"logp_ref"},
}  # fmt: skip
BEFORE = {"rloo": {"logp_ref"}, "reinforce_pp": {"logp_ref"}} | dict.fromkeys(("ppo", "ppo_turns"), NEEDS["ppo"])


@each_member
def test_members_say_what_they_need(name):
    algorithm, full = MEMBERS[name], everything_on(name)
    assert algorithm.name == {"reinforce_pp_baseline": "reinforce_pp", "ppo_turns": "ppo"}.get(name, name)
    assert (algorithm.needs, algorithm.before) == (NEEDS.get(name, set()), BEFORE.get(name, set()))
    extra = {"dpo": set(), "kimi": {"logp_old"}}.get(name, {"logp_old", "logp_ref"})
    assert full.needs == NEEDS.get(name, set()) | extra | {"entropy"}
    assert algorithm.reference_every is None
    assert full.reference_every == 10
    assert (algorithm.sums is not None) == (name in ("gspo", "kimi", "dpo"))
    assert full.sums is not None
    assert algorithm.keeps <= {"F1", "F2", "F4", "F8"}
    assert algorithm.whole == ("group" if name == "dpo" else "trajectory")


DEFAULTS = [
    ("flow_grpo", {"clip_low": 0.2, "clip_high": 0.2, "beta": 0.001, "eps": 1e-6}),
    ("flow_grpo_released", {"clip_low": 0.2, "clip_high": 0.3, "beta": 0.001, "dual_clip": 3.0, "eps": 1e-6}),
    ("grpo", {"clip_low": 0.2, "clip_high": 0.2, "beta": 0.04, "eps": 1e-6}),
    ("dr_grpo", {"clip_low": 0.2, "clip_high": 0.2}),
    ("dapo", {"clip_low": 0.2, "clip_high": 0.28, "dynamic_sampling": True, "eps": 1e-6}),
    ("gspo", {"clip_low": 3e-4, "clip_high": 4e-4, "eps": 1e-6}),
    ("cispo", {"clip_low": 1.0, "clip_high": 4.0, "eps": 1e-6}),
    ("reinforce_pp", {"clip_low": 0.2, "clip_high": 0.2, "gamma": 1.0, "baseline": None}),
    ("gigpo", {"omega": 1.0, "gamma": 0.95, "clip_low": 0.2, "clip_high": 0.2, "beta": 0.01, "eps": 1e-6}),
    ("kimi", {"tau": 0.1}),
    ("ppo", {"credit": fg.token_gae, "gamma": 1.0, "lam": 0.95, "clip_low": 0.2, "clip_high": 0.2, "value_clip": 0.2}
            | {"value_coefficient": 0.5, "beta": 0.001, "kl_in": "reward"}),
    ("dpo", {"beta": 0.1}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "published"), DEFAULTS, ids=[name for name, _ in DEFAULTS])
def test_defaults_are_the_published_settings(name, published):
    parameters = inspect.signature(getattr(fg, name)).parameters.values()
    assert {p.name: p.default for p in parameters if p.default is not p.empty} == published


def test_mismatched_shapes_are_named():
    trajectories = make_case(0).trajectories
    with pytest.raises(fg.BadInput, match=r"Trajectories.outcome has 3 on axis n, but tokens has 12"):
        fg.flow_grpo().advantages(trajectories.replace(outcome=trajectories.outcome[:3]))
