"""The plain layouts: one row per trajectory or per turn, compiled or not, with the tokens that `pack` has."""

from dataclasses import fields
from functools import cache
from typing import NamedTuple

import jax
import numpy as np
import pytest
from cases import make_turn, random_records, score

import flowgrpo as fg
from flowgrpo.layouts import filled

N, T, L = 6, 3, 8  # one shape for all seeds, so that each layout compiles once
SEEDS = range(8)
PLAIN = {"by_trajectory": fg.rows_by_trajectory, "by_turn": fg.rows_by_turn}
COMPILED = {name: jax.jit(layout) for name, layout in PLAIN.items()}
COMPILED_PLACE = jax.jit(fg.place)
COMPILED_UNPACK = jax.jit(fg.unpack, static_argnums=2)


class Learned(NamedTuple):
    trajectories: fg.Trajectories
    adv: np.ndarray  # n t l
    weights: np.ndarray  # n t l, nowhere 0, so that `pack` leaves no trajectory out

    @property
    def exists(self) -> np.ndarray:
        """Slots that hold a token -> bool_ntl."""
        length_ntl = np.asarray(filled(self.trajectories)[0])[:, :, None]
        return np.arange(L) < length_ntl

    @property
    def chosen(self) -> np.ndarray:
        return self.trajectories.chosen & self.exists


@cache
def learned(seed: int) -> Learned:
    """Scored trajectories; those of odd seeds lack some turns in the middle."""
    records = random_records(seed, groups=2, size=3, turns=T, length=5)
    trajectories = score(fg.collate(records, turns=T, length=L), seed)
    rng = np.random.default_rng(seed)
    if seed % 2:
        turns_nt = trajectories.turns & (rng.random((N, T)) < 0.6)
        turns_nt[:, 0] |= ~turns_nt.any(axis=1)
        trajectories = trajectories.replace(turns=turns_nt)
    adv_ntl = rng.normal(size=(N, T, L)).astype(np.float32)
    return Learned(trajectories, adv_ntl, rng.uniform(0.5, 1, (N, T, L)).astype(np.float32))


def laid_out(layout: str, case: Learned) -> fg.Batch:
    """The case in one of the three layouts, on the host."""
    batch = fg.pack(*case, row_length=T * L) if layout == "packed" else COMPILED[layout](*case)
    return jax.tree.map(np.asarray, batch)


def by_place(batch: fg.Batch, name: str, own_rs: np.ndarray) -> np.ndarray:
    """A field's values back at [n, t, l], NaN where there is none; `own` says which tokens to read."""
    out_ntl = np.full((N, T, L), np.nan)
    out_ntl[batch.trajectory[own_rs], batch.turn[own_rs], batch.slot[own_rs]] = getattr(batch, name)[own_rs]
    return out_ntl


def own_tokens(layout: str, batch: fg.Batch) -> np.ndarray:
    """Tokens that a row was made for: those of its own turn where there is a row per turn -> bool_rs."""
    real_rs = batch.segments > 0
    if layout != "by_turn":
        return real_rs
    return real_rs & (batch.turn == np.arange(len(batch.turn))[:, None] % T)


def assert_same_batch(found: fg.Batch, expected: fg.Batch):
    for item in fields(fg.Batch):
        left, right = getattr(found, item.name), getattr(expected, item.name)
        assert (left is None) == (right is None), item.name
        if left is not None:
            np.testing.assert_array_equal(left, right, err_msg=item.name)


# Content ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", PLAIN)
def test_compiled_and_not_give_the_same_batch(layout):
    for seed in SEEDS[:2]:
        assert_same_batch(PLAIN[layout](*learned(seed)), COMPILED[layout](*learned(seed)))


@pytest.mark.parametrize("layout", PLAIN)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_token_has_what_it_has_when_packed(layout, seed):
    case = learned(seed)
    plain, packed = laid_out(layout, case), laid_out("packed", case)
    own_rs, packed_rs = own_tokens(layout, plain), packed.segments > 0
    assert own_rs.sum() == packed_rs.sum() == case.exists.sum(), "each token is there once"
    scored = ("logp_sampled", "logp_old", "logp_ref", "value_old")
    for name in ("tokens", "positions", "group", "chosen", "advantage", "weight", *scored):
        found_ntl, expected_ntl = by_place(plain, name, own_rs), by_place(packed, name, packed_rs)
        np.testing.assert_array_equal(found_ntl, expected_ntl, err_msg=name)
        assert (np.isfinite(found_ntl) == case.exists).all(), name


def segments_by_place(batch: fg.Batch) -> np.ndarray:
    """A number for the segment of each place of [n, t, l], end to end: equal for two tokens of one segment."""
    row_rs = np.arange(len(batch.segments))[:, None]
    return by_place(batch.replace(segments=batch.segments + 1000 * row_rs), "segments", batch.segments > 0).ravel()


@pytest.mark.parametrize("seed", SEEDS)
def test_tokens_see_each_other_as_when_packed(seed):
    plain, packed = (segments_by_place(laid_out(layout, learned(seed))) for layout in ("by_trajectory", "packed"))
    np.testing.assert_array_equal(plain[:, None] == plain[None, :], packed[:, None] == packed[None, :])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_row_per_trajectory_holds_it_in_order_with_padding_last(seed):
    case = learned(seed)
    batch = laid_out("by_trajectory", case)
    assert batch.tokens.shape == (N, T * L)
    for i in range(N):
        places = [(i, t, slot) for t, slot in zip(*np.nonzero(case.exists[i]), strict=True)]
        assert_row_is(batch, i, places)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_row_per_turn_shows_the_turns_before_it_where_the_context_appends(seed):
    case = learned(seed)
    batch = laid_out("by_turn", case)
    assert batch.tokens.shape == (N * T, T * L)
    for i, t in np.argwhere(case.trajectories.turns):
        shown = range(t + 1) if case.trajectories.appends[i] else [t]
        assert_row_is(batch, i * T + t, [(i, u, slot) for u in shown for slot in np.flatnonzero(case.exists[i, u])])
        own_s = batch.turn[i * T + t] == t
        assert not batch.chosen[i * T + t, ~own_s].any(), "the turns before are context"
        np.testing.assert_array_equal(batch.chosen[i * T + t, own_s], case.chosen[i, t, case.exists[i, t]])
    missing_r = ~case.trajectories.turns.ravel()
    assert not batch.chosen[missing_r].any()


def assert_row_is(batch: fg.Batch, r: int, places: list):
    """The row has these tokens, in this order and numbered as they stand, and then padding."""
    columns = np.stack([batch.trajectory[r], batch.turn[r], batch.slot[r]], axis=1)
    np.testing.assert_array_equal(columns[: len(places)], np.array(places).reshape(-1, 3))
    assert (columns[len(places) :] == -1).all()
    assert (batch.segments[r] > 0).tolist() == [True] * len(places) + [False] * (T * L - len(places))


def test_context_has_the_positions_and_the_segment_that_it_has_in_the_trajectory():
    rng = np.random.default_rng(0)
    turns = [make_turn(rng, 1, 2), make_turn(rng, 2, 2)]
    records = [fg.Trajectory(turns, 1.0, 0), fg.Trajectory(turns, 1.0, 0, appends=False)]
    case = (fg.collate(records), np.ones((2, 2)), np.ones((2, 2)))
    by_turn, by_trajectory = COMPILED["by_turn"](*case), COMPILED["by_trajectory"](*case)
    assert by_turn.positions[:, :7].tolist() == [
        [0, 1, 2, 0, 0, 0, 0],
        [0, 1, 2, 3, 4, 5, 6],
        [0, 1, 2, 0, 0, 0, 0],
        [0, 1, 2, 3, 0, 0, 0],
    ]
    assert by_trajectory.positions[:, :7].tolist() == [[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 0, 1, 2, 3]]
    assert by_trajectory.segments.tolist() == [[1] * 7 + [0], [1] * 3 + [2] * 4 + [0]]
    assert [len(set(row[row > 0].tolist())) for row in np.asarray(by_turn.segments)] == [1] * 4


@pytest.mark.parametrize("layout", ["packed", *PLAIN])
@pytest.mark.parametrize("seed", SEEDS)
def test_each_chosen_token_is_chosen_in_exactly_one_row(layout, seed):
    case = learned(seed)
    batch = laid_out(layout, case)
    times_ntl = np.zeros((N, T, L), int)
    np.add.at(times_ntl, tuple(x[batch.chosen] for x in (batch.trajectory, batch.turn, batch.slot)), 1)
    np.testing.assert_array_equal(times_ntl, case.chosen)
    assert not batch.weight[~batch.chosen].any()
    assert not batch.advantage[~batch.chosen].any()


@pytest.mark.parametrize("layout", PLAIN)
def test_padding_says_so_in_every_field(layout):
    batch = laid_out(layout, learned(0))
    padding_rs = batch.segments == 0
    assert padding_rs.any()
    for name in ("trajectory", "turn", "slot", "group"):
        assert (getattr(batch, name)[padding_rs] == -1).all(), name
    for name in ("tokens", "positions", "chosen", "logp_sampled", "logp_old", "logp_ref", "value_old"):
        assert not getattr(batch, name)[padding_rs].any(), name


@pytest.mark.parametrize("layout", PLAIN)
def test_advantages_of_turns_and_of_tokens_agree(layout):
    trajectories, adv_ntl, weight_ntl = learned(2)
    adv_nt, weight_nt = adv_ntl[:, :, 0], weight_ntl[:, :, 0]
    wide = [np.repeat(x_nt[:, :, None], L, axis=2) for x_nt in (adv_nt, weight_nt)]
    assert_same_batch(COMPILED[layout](trajectories, adv_nt, weight_nt), COMPILED[layout](trajectories, *wide))


@pytest.mark.parametrize("layout", PLAIN)
def test_what_was_not_scored_is_absent_and_logp_old_is_logp_sampled(layout):
    trajectories = learned(0).trajectories.replace(logp_old=None, logp_ref=None, value=None)
    batch = laid_out(layout, learned(0)._replace(trajectories=trajectories))
    np.testing.assert_array_equal(batch.logp_old, batch.logp_sampled)
    assert batch.logp_old.any()
    assert batch.logp_ref is batch.value_old is batch.target is None


@pytest.mark.parametrize("layout", PLAIN)
def test_axes_that_disagree_are_an_error_also_when_compiled(layout):
    trajectories, adv_ntl, weight_ntl = learned(0)
    for build in (PLAIN[layout], COMPILED[layout]):
        with pytest.raises(fg.BadInput, match=r"^Trajectories.group has 5 on axis n, but tokens has 6"):
            build(trajectories.replace(group=np.zeros(5, np.int32)), adv_ntl, weight_ntl)


# Place and unpack -------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["packed", *PLAIN])
@pytest.mark.parametrize("seed", SEEDS)
def test_place_then_unpack_is_the_identity_on_chosen_tokens(layout, seed):
    case = learned(seed)
    batch = laid_out(layout, case)
    x_ntl = np.random.default_rng(seed).normal(size=(N, T, L)).astype(np.float32)
    found_ntl = COMPILED_UNPACK(COMPILED_PLACE(x_ntl, batch), batch, (N, T, L))
    np.testing.assert_array_equal(found_ntl, np.where(case.chosen, x_ntl, 0))


@pytest.mark.parametrize("layout", ["packed", *PLAIN])
def test_place_lays_values_where_their_tokens_are(layout):
    case = learned(4)
    batch = laid_out(layout, case)
    np.testing.assert_array_equal(fg.place(case.trajectories.tokens, batch), batch.tokens)
    np.testing.assert_array_equal(fg.place(case.trajectories.logp_ref, batch), batch.logp_ref)
    assert fg.place(case.trajectories.tokens, batch).dtype == np.int32


def test_unpack_leaves_out_context_and_padding():
    batch = laid_out("by_turn", learned(0))
    found_ntl = COMPILED_UNPACK(np.ones(batch.tokens.shape, np.float32), batch, (N, T, L))
    np.testing.assert_array_equal(found_ntl, learned(0).chosen)
    emptied = batch.replace(segments=np.zeros_like(batch.segments))
    assert not COMPILED_UNPACK(np.ones(batch.tokens.shape, np.float32), emptied, (N, T, L)).any()


# Defaults ---------------------------------------------------------------------------------------------


def test_without_length_a_turn_ends_with_its_last_chosen_token():
    chosen_ntl = np.zeros((1, 3, 4), bool)
    chosen_ntl[0, 0, [0, 2]] = True
    chosen_ntl[0, 2, 1] = True
    trajectories = fg.collate([fg.Trajectory([make_turn(np.random.default_rng(0), 2, 2)] * 3, 1.0, 0)])
    trajectories = trajectories.replace(chosen=chosen_ntl)
    length_nt = filled(trajectories.replace(length=None))[0]
    assert length_nt.tolist() == [[3, 0, 2]]
    assert filled(trajectories)[0].tolist() == [[4, 4, 4]], "a length that is given stands"
    without_third = trajectories.replace(length=None, turns=np.array([[True, True, False]]))
    assert filled(without_third)[0].tolist() == [[3, 0, 0]], "a turn that does not exist has no tokens"


@pytest.mark.parametrize("layout", ["packed", *PLAIN])
def test_without_length_the_batch_is_that_of_the_turns_cut_after_their_last_chosen_token(layout):
    case = learned(1)
    trajectories, ends_nt = case.trajectories, np.zeros((N, T), np.int32)
    chosen_ntl = case.chosen & (np.arange(L) < 4)  # so that turns have given tokens at their ends
    for i, t, slot in np.argwhere(chosen_ntl):
        ends_nt[i, t] = slot + 1
    assert (ends_nt < trajectories.length).any()
    trajectories = trajectories.replace(chosen=chosen_ntl)
    found = laid_out(layout, case._replace(trajectories=trajectories.replace(length=None)))
    expected = laid_out(layout, case._replace(trajectories=trajectories.replace(length=ends_nt)))
    assert_same_batch(found, expected)


@pytest.mark.parametrize("layout", ["packed", *PLAIN])
def test_without_appends_all_contexts_append(layout):
    case = learned(2)
    assert not case.trajectories.appends.all()
    found = laid_out(layout, case._replace(trajectories=case.trajectories.replace(appends=None)))
    everywhere = case.trajectories.replace(appends=np.ones(N, bool))
    assert_same_batch(found, laid_out(layout, case._replace(trajectories=everywhere)))


@pytest.mark.parametrize("layout", ["packed", *PLAIN])
def test_F6_what_is_past_a_turns_length_is_never_read(layout):
    case = learned(3)
    garbage = {"tokens": -7, "chosen": True, "version": -7}
    garbage |= dict.fromkeys(("logp_sampled", "logp_old", "logp_ref", "value"), np.nan)
    clean = {name: getattr(case.trajectories, name) for name in garbage}
    dirty = {name: np.where(case.exists, x, np.array(garbage[name], x.dtype)) for name, x in clean.items()}
    values = [np.where(case.chosen, x_ntl, np.nan).astype(np.float32) for x_ntl in case[1:]]
    found = laid_out(layout, Learned(case.trajectories.replace(**dirty), *values))
    assert_same_batch(found, laid_out(layout, case))
