"""One contract for every member of the family: the laws, the layouts, and what compilation must not change."""

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
PLAIN = fg.flow_grpo(beta=0.0)
REGULARISED = ("flow_grpo_released", "grpo", "kimi", "gigpo", "ppo", "ppo_turns", "reinforce_pp_baseline")
GARBAGE = [np.nan, np.inf, -np.inf, 1e30]
each_member = pytest.mark.parametrize("name", MEMBERS)


def assert_same(found, expected, tolerance=1e-6):
    """Assert equal loss and gradient, relative to the largest slope."""
    scale = np.abs(expected[1]).max()
    assert scale > 0
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[1], expected[1], rtol=0, atol=tolerance * scale)


# F3: the layout changes nothing -----------------------------------------------------------------------


@each_member
def test_F3_layouts_give_the_same_loss_and_gradient(name):
    """Packed, shuffled, dealt to ranks, split at turns, one row per trajectory or turn."""
    algorithm, case = everything_on(name), make_case(11)
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


@each_member
def test_F3_micro_batches_sum(name):
    """Four micro-batches, after one first pass over the whole: losses, gradients and metrics add up."""
    algorithm, case = everything_on(name), make_case(12)
    whole = batch_of(algorithm, case.trajectories)
    summed = algorithm.sums(whole, scores_of(case, whole).logp) if algorithm.sums else whole
    parts = [jax.tree.map(lambda x_rs: x_rs[part::4], summed) for part in range(4)]  # noqa: B023
    results = [loss_and_slopes(algorithm, case, part) for part in parts]
    assert_same([sum(column) for column in zip(*results, strict=True)], loss_and_slopes(algorithm, case, whole))
    found = [metrics_of(algorithm, case, part) for part in parts]
    for key, value in metrics_of(algorithm, case, whole).items():
        np.testing.assert_allclose(sum(part[key] for part in found), value, rtol=1e-4, atol=1e-5, err_msg=key)


@pytest.mark.parametrize("name", ["flow_grpo", "gspo", "dpo"])
def test_F3_eight_devices(name):
    """Rows sharded over eight devices: the same loss and gradient, sequences over several rows among them."""
    algorithm, case = everything_on(name), make_case(13)
    batch = batch_of(algorithm, case.trajectories, ranks=8)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    loss, slope_ntl, _ = loss_program(algorithm)(case, jax.device_put(padded(batch), rows))
    assert_same((loss, slope_ntl), loss_and_slopes(algorithm, case, batch))


# F4, F8: zero where there is nothing to learn ---------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, member in MEMBERS.items() if "F4" in member.keeps])
def test_F4_groups_of_equal_rewards_have_no_advantage(name):
    """0.91 for all, invalid members among them; `correct` is mixed, so that filters keep the groups."""
    algorithm = MEMBERS[name] if name != "rloo" else fg.rloo()
    trajectories = make_case(3).trajectories
    outcome_n = np.where(trajectories.valid, np.float32(0.91), np.nan)
    flat = trajectories.replace(outcome=outcome_n, correct=np.arange(len(outcome_n)) % 2 == 0)
    assert not np.asarray(algorithm.advantages(flat)).any()


@pytest.mark.parametrize("name", [name for name, member in MEMBERS.items() if "F1" in member.keeps])
def test_F1_statistics_do_not_depend_on_the_number_of_turns(name):
    """Every turn twice: the same advantage at every turn of a trajectory."""
    algorithm = {"dapo": fg.dapo(), "rloo": fg.rloo()}.get(name, MEMBERS[name])
    trajectories = make_case(5).trajectories
    adv_n = np.asarray(algorithm.advantages(trajectories))[:, 0]
    by_turn = ("tokens", "chosen", "logp_sampled", "version", "turns", "reward", "anchor", "length")
    fields = {f: np.repeat(getattr(trajectories, f), 2, axis=1) for f in (*by_turn, "logp_old", "logp_ref", "value")}
    doubled_nt = np.asarray(algorithm.advantages(trajectories.replace(**fields)))
    assert np.abs(adv_n).max() > 0
    exists_nt = np.repeat(trajectories.turns, 2, axis=1)
    np.testing.assert_allclose(doubled_nt, np.where(exists_nt, adv_n[:, None], 0.0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [name for name, member in MEMBERS.items() if "F8" in member.keeps])
def test_F8_scaling_and_shifting_the_rewards_of_a_group_changes_nothing(name):
    algorithm = fg.dapo() if name == "dapo" else MEMBERS[name]  # dapo's length punishment is not scaled
    trajectories = make_case(6).trajectories
    scale_n, shift_n = np.where(trajectories.group % 2 == 0, 7.0, 0.25), trajectories.group / 100
    moved = trajectories.replace(outcome=(trajectories.outcome * scale_n + shift_n).astype(np.float32))
    expected = np.asarray(algorithm.advantages(trajectories))
    assert np.abs(expected).max() > 0
    np.testing.assert_allclose(algorithm.advantages(moved), expected, atol=2e-4)


@each_member
def test_F8_zero_advantage_and_no_regulariser_give_a_zero_gradient(name):
    """Where a member says that it may be skipped, a batch without advantages has exactly no gradient."""
    case, algorithm = make_case(8), MEMBERS[name] if name != "flow_grpo" else PLAIN
    assert algorithm.skips == (name not in REGULARISED)
    if algorithm.skips:
        batch = batch_of(algorithm, case.trajectories)
        idle = batch.replace(advantage=np.zeros_like(batch.advantage))
        assert not loss_and_slopes(algorithm, case, idle)[1].any()


def test_F8_skips_is_false_under_every_regulariser():
    assert fg.flow_grpo(beta=0.0).skips
    assert fg.flow_grpo(beta=0.1, kl_in="reward").skips
    for options in ({"beta": 0.1}, {"entropy_bonus": 0.1}, {"beta": jnp.float32(0.0)}):
        assert not fg.flow_grpo(**{"beta": 0.0, **options}).skips


def test_F8_skipping_groups_without_signal_is_exact():
    """Weights are computed first; leaving idle trajectories out of the rows then changes nothing."""
    algorithm, case = PLAIN, make_case(21, groups=8, size=2)
    everything = batch_of(algorithm, case.trajectories)
    skipped = batch_of(algorithm, case.trajectories, skip_no_signal=True)
    assert (np.asarray(skipped.segments) > 0).sum() < (np.asarray(everything.segments) > 0).sum()
    assert_same(loss_and_slopes(algorithm, case, skipped), loss_and_slopes(algorithm, case, everything), 0.0)


# F5, F6: what is invalid or masked reaches nothing ----------------------------------------------------


def poisoned(case, value: float):
    """The case with `value` in every slot that is masked, past the end, or of an invalid trajectory."""
    trajectories = case.trajectories
    chosen_ntl = trajectories.chosen & np.asarray(trajectories.valid)[:, None, None]
    invalid_n = ~np.asarray(trajectories.valid)

    def spoil(x, mask):
        return np.where(mask, x, np.float32(value)).astype(np.float32)

    tokenwise = {
        f: spoil(getattr(trajectories, f), chosen_ntl) for f in ("logp_sampled", "logp_old", "logp_ref", "value")
    }
    spoiled = trajectories.replace(
        outcome=spoil(trajectories.outcome, ~invalid_n),
        reward=spoil(trajectories.reward, trajectories.turns & ~invalid_n[:, None]),
        last_value=spoil(trajectories.last_value, np.asarray(trajectories.valid & trajectories.bootstraps)),
        **tokenwise,
    )
    current = (spoil(x, chosen_ntl) for x in (case.logp, case.entropy, case.value))
    return type(case)(spoiled, *current)


def spoil_batch(batch: fg.Batch, value: float) -> fg.Batch:
    """The batch with `value` in every per-token field outside the chosen tokens."""
    own_rs = np.asarray(batch.chosen) & (np.asarray(batch.segments) > 0)
    names = ["logp_sampled", "logp_old", "logp_ref", "advantage", "weight", "value_old", "target"]
    present = {name: getattr(batch, name) for name in names if getattr(batch, name) is not None}
    return batch.replace(**{name: np.where(own_rs, x_rs, np.float32(value)) for name, x_rs in present.items()})


@pytest.mark.usefixtures("nan_allowed")
@each_member
@pytest.mark.parametrize("layout", ["packed", "by_trajectory"])
def test_F6_garbage_in_masked_or_invalid_slots_changes_nothing(name, layout):
    """NaN, infinity or 1e30: the same loss, the same gradient, both finite."""
    algorithm, clean = everything_on(name), make_case(14, invalid=0.3, by_turn=name == "gigpo")
    expected = loss_and_slopes(algorithm, clean, batch_of(algorithm, clean.trajectories, layout))
    untrained_ntl = ~(clean.trajectories.chosen & np.asarray(clean.trajectories.valid)[:, None, None])
    for value in GARBAGE:
        dirty = poisoned(clean, value)
        found = loss_and_slopes(algorithm, dirty, spoil_batch(batch_of(algorithm, dirty.trajectories, layout), value))
        assert np.isfinite(found[0])
        assert np.isfinite(found[1]).all()
        assert_same(found, expected)
        assert not found[1][untrained_ntl].any()


@pytest.mark.parametrize(
    "name",
    ["flow_grpo", "flow_grpo_released", "dr_grpo", "dapo", "rloo", "reinforce_pp_baseline", "gigpo", "ppo", "dpo"],
)
def test_F5_an_invalid_trajectory_might_as_well_not_be_there(name):
    """Advantages, weights and loss are those of the batch without it, and it is counted in the ledger."""
    algorithm, case = everything_on(name), make_case(21, invalid=0.3)
    keep_n = np.asarray(case.trajectories.valid)
    assert not keep_n.all()
    whole = batch_of(algorithm, case.trajectories)
    found = loss_and_slopes(algorithm, case, whole)
    # Trajectories that are nowhere: the same arrays, and no row that holds one.
    alone = jax.tree.map(lambda x: x[keep_n], case)
    rows = batch_of(algorithm, alone.trajectories, "by_trajectory")
    back = rows.replace(trajectory=np.flatnonzero(keep_n)[np.asarray(rows.trajectory)].astype(np.int32))
    assert_same(found, loss_and_slopes(algorithm, case, back))
    assert not found[1][~keep_n].any()
    weights = algorithm.weights(case.trajectories)
    ledger = fg.account(case.trajectories, weights, batch_of(algorithm, case.trajectories))
    assert ledger.fates[fg.Fate.MASKED_INVALID] == case.trajectories.chosen[~keep_n].sum() > 0


# F7: the ratio starts at one --------------------------------------------------------------------------


@each_member
def test_F7_at_the_behaviour_parameters_the_ratio_is_exactly_one(name):
    """Equal log-probabilities give ratio 1, nothing clipped, and the slope of the plain policy gradient."""
    algorithm, case = everything_on(name), make_case(16)
    batch = batch_of(algorithm, case.trajectories)
    at_start = case._replace(logp=np.asarray(case.trajectories.logp_old))
    metrics = metrics_of(algorithm, at_start, batch)
    if "ratio" in metrics:
        np.testing.assert_allclose(metrics["ratio"], metrics["weight"], rtol=1e-6)
    for key in ("clip_low_fraction", "clip_high_fraction"):
        assert metrics.get(key, 0.0) == 0.0


@pytest.mark.parametrize("name", ["flow_grpo", "flow_grpo_released", "dr_grpo", "gspo", "cispo"])
def test_F7_on_policy_every_member_has_the_plain_policy_gradient(name):
    """d loss / d log pi = - weight * advantage, whatever the clip, when behaviour and current policy are equal."""
    build = {"dr_grpo": lambda **o: fg.dr_grpo(max_tokens=20, **o)}.get(name, getattr(fg, name))
    algorithm, case = build(beta=0.0), make_case(17)
    batch = batch_of(algorithm, case.trajectories)
    on_policy = case._replace(logp=np.asarray(case.trajectories.logp_old))
    slope_ntl = loss_and_slopes(algorithm, on_policy, batch)[1]
    expected_ntl = fg.unpack(-batch.weight * batch.advantage, batch, case.logp.shape)
    np.testing.assert_allclose(slope_ntl, expected_ntl, rtol=1e-5, atol=1e-8)


# F2, F9: members differ where they say so -------------------------------------------------------------


def test_identity_flow_grpo_is_grpo_with_one_turn():
    """T = 1: the mean over turns is a mean over one."""
    case, pair = make_case(18, turns=1), (fg.flow_grpo(beta=0.04), fg.grpo(beta=0.04))
    assert_same(*(loss_and_slopes(member, case, batch_of(member, case.trajectories)) for member in pair))


def test_F9_the_released_variant_differs_from_the_paper():
    """Same batch, same clip: other advantages, other weights, another gradient."""
    case = make_case(19)
    paper = fg.flow_grpo(beta=0.0, clip_high=0.3, dual_clip=3.0)
    released = fg.flow_grpo_released(beta=0.0)
    slopes = [loss_and_slopes(a, case, batch_of(a, case.trajectories))[1] for a in (paper, released)]
    cosine = float((slopes[0] * slopes[1]).sum() / (np.linalg.norm(slopes[0]) * np.linalg.norm(slopes[1])))
    assert cosine < 0.99


def test_dapo_filters_on_unshaped_correctness_and_counts_what_it_discards():
    """All correct but of unequal length: shaping makes a spread, and the group is discarded all the same."""
    case = make_case(20, groups=2, invalid=0.0)
    first_n = case.trajectories.group == case.trajectories.group[0]
    correct_n = np.where(first_n, True, np.cumsum(~first_n) % 2 == 0)
    trajectories = case.trajectories.replace(correct=correct_n, outcome=correct_n.astype(np.float32))
    algorithm = fg.dapo(overlong=fg.Overlong(12, 10))
    shaped = fg.dapo(overlong=fg.Overlong(12, 10), dynamic_sampling=False)
    assert np.asarray(shaped.advantages(trajectories))[first_n].any()
    assert not np.asarray(algorithm.advantages(trajectories))[first_n].any()
    weights = algorithm.weights(trajectories)
    assert float(weights.sum()) == pytest.approx(1.0, abs=1e-5)
    ledger = fg.account(trajectories, weights, batch_of(algorithm, trajectories))
    assert ledger.fates[fg.Fate.MASKED_WEIGHTLESS] == trajectories.chosen[first_n].sum()


# Compilation ------------------------------------------------------------------------------------------


@each_member
def test_jit_equals_no_jit_and_traces_once(name):
    """Advantages, weights and loss; another batch of the same shape traces nothing again."""
    algorithm = MEMBERS[name]
    for case in (make_case(1, invalid=0.0), make_case(2, invalid=0.0)):
        adv, weights, _ = signal(algorithm)(case.trajectories)
        batch = batch_of(algorithm, case.trajectories, "by_trajectory")
        loss, _ = loss_and_slopes(algorithm, case, batch)
    np.testing.assert_allclose(adv, algorithm.advantages(case.trajectories), atol=1e-5)
    np.testing.assert_allclose(weights, algorithm.weights(case.trajectories), rtol=1e-5)
    np.testing.assert_allclose(loss, algorithm.loss(scores_of(case, batch), batch)[0], rtol=1e-4, atol=1e-6)
    programs = signal(algorithm)._cache_size(), loss_program(algorithm)._cache_size()
    again = make_case(3)
    loss_and_slopes(algorithm, again, batch_of(algorithm, again.trajectories))
    assert (signal(algorithm)._cache_size(), loss_program(algorithm)._cache_size()) == programs


@pytest.mark.parametrize(
    ("name", "setting", "values"),
    [("flow_grpo", "clip_high", [0.1, 0.2, 0.5]), ("kimi", "tau", [0.1, 1.0]), ("dpo", "beta", [0.1, 0.5])],
)
def test_settings_can_be_vmapped(name, setting, values):
    """A number is not looked at with a Python `if`, so one program runs a whole sweep."""
    case, build = make_case(22), getattr(fg, name)
    batch = batch_of(MEMBERS[name], case.trajectories, "by_trajectory")
    loss = jax.jit(lambda value: build(**{setting: value}).loss(scores_of(case, batch), batch)[0])
    swept = jax.vmap(loss)(jnp.array(values, jnp.float32))
    np.testing.assert_allclose(swept, [loss(value) for value in values], rtol=1e-5, atol=1e-6)
    assert len(set(np.asarray(swept).tolist())) == len(values)


def test_traced_weights_of_regularisers_can_be_swept():
    """Of KL and entropy, in the advantages as in the loss."""
    trajectories = make_case(22).trajectories
    swept = jax.vmap(lambda omega: fg.gigpo(omega=omega).advantages(trajectories))(jnp.array([0.0, 2.0]))
    np.testing.assert_allclose(swept[1], fg.gigpo(omega=2.0).advantages(trajectories), rtol=1e-5, atol=1e-6)
    assert not np.allclose(swept[0], swept[1])


@each_member
def test_low_precision_scores_are_read_as_float32(name):
    algorithm, case = MEMBERS[name], make_case(23)
    batch = batch_of(algorithm, case.trajectories)
    scores = jax.tree.map(lambda x: x.astype(jnp.bfloat16), scores_of(case, batch))
    loss, metrics = jax.eval_shape(algorithm.loss, scores, batch)
    assert {loss.dtype, *(value.dtype for value in metrics.values())} == {jnp.dtype(jnp.float32)}


@each_member
def test_members_say_what_they_need(name):
    algorithm, full = MEMBERS[name], everything_on(name)
    assert full.reference_every == 10
    assert algorithm.keeps <= {"F1", "F2", "F4", "F8"}
    assert full.needs >= {"entropy"}
    assert algorithm.needs <= {"logp_old", "logp_ref", "value", "entropy"}
    assert algorithm.name == {"reinforce_pp_baseline": "reinforce_pp", "ppo_turns": "ppo"}.get(name, name)


def test_mismatched_shapes_are_named():
    trajectories = make_case(0).trajectories
    with pytest.raises(fg.BadInput, match=r"Trajectories.outcome has 3 on axis n, but tokens has 12"):
        fg.flow_grpo().advantages(trajectories.replace(outcome=trajectories.outcome[:3]))


@pytest.mark.parametrize("name", ["flow_grpo", "gigpo", "ppo"])
def test_F2_what_older_weights_chose_is_left_out_and_changes_no_other_weight(name):
    algorithm, case = everything_on(name), make_case(11)
    trajectories = case.trajectories
    turns = trajectories.tokens.shape[1]
    version_ntl = np.broadcast_to(np.arange(turns)[None, :, None] // 2, trajectories.tokens.shape)
    trajectories = trajectories.replace(version=version_ntl)
    whole, newest = (np.asarray(x.weights(trajectories)) for x in (algorithm, fg.newest_segment_only(algorithm)))
    for i, actions_tl in enumerate(np.asarray(trajectories.actions)):
        spoke = version_ntl[i][actions_tl]
        own_tl = actions_tl & (version_ntl[i] == spoke.max(initial=-1))
        np.testing.assert_array_equal(newest[i], np.where(own_tl, whole[i], 0.0))
    assert 0 < np.count_nonzero(newest) < np.count_nonzero(whole)
    same = trajectories.replace(version=np.zeros_like(version_ntl))
    np.testing.assert_array_equal(fg.newest_segment_only(algorithm).weights(same), whole)


@pytest.mark.parametrize("name", ["flow_grpo", "gigpo", "ppo"])
def test_without_its_broadcast_only_the_last_turn_has_an_advantage(name):
    algorithm, case = everything_on(name), make_case(11)
    trajectories = case.trajectories
    whole, last = (np.asarray(x.advantages(trajectories)) for x in (algorithm, fg.last_turn_only(algorithm)))
    for i, turns_t in enumerate(np.asarray(trajectories.turns)):
        final = np.flatnonzero(turns_t)[-1:]
        np.testing.assert_array_equal(last[i, final], whole[i, final])
        assert not np.delete(last[i], final, axis=0).any()
    assert last.any()
