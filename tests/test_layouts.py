"""The plain layouts: one row per trajectory or per turn, compiled or not, with the tokens that `pack` has."""

from dataclasses import fields
from functools import cache
from typing import NamedTuple

import jax
import numpy as np
import pytest
from cases import PLAIN, make_turn, random_records, score

import flowgrpo as fg
from flowgrpo.layouts import filled

N, T, L = 6, 3, 8  # one shape for all seeds, so that each layout compiles once
SEEDS = range(4)
PLACE, UNPACK = jax.jit(fg.place), jax.jit(fg.unpack, static_argnums=2)
each_layout = pytest.mark.parametrize("layout", ["packed", *PLAIN])


class Learned(NamedTuple):
    trajectories: fg.Trajectories
    adv: np.ndarray  # n t l
    weights: np.ndarray  # n t l, nowhere 0, so that `pack` leaves no trajectory out

    @property
    def exists(self) -> np.ndarray:
        """Slots that hold a token -> bool_ntl."""
        length_nt = np.where(self.trajectories.turns, self.trajectories.length, 0)
        return np.arange(L) < length_nt[:, :, None]

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


def laid_out(layout: str, case: Learned, **more) -> fg.Batch:
    """The case in one of the three layouts, on the host."""
    batch = fg.pack(*case, row_length=T * L, **more) if layout == "packed" else PLAIN[layout](*case, **more)
    return jax.tree.map(np.asarray, batch)


def by_place(batch: fg.Batch, name: str, own_rs: np.ndarray) -> np.ndarray:
    """A field's values back at [n, t, l], NaN where there is none; `own` says which tokens to read."""
    out_ntl = np.full((N, T, L), np.nan)
    out_ntl[batch.trajectory[own_rs], batch.turn[own_rs], batch.slot[own_rs]] = getattr(batch, name)[own_rs]
    return out_ntl


def own_tokens(layout: str, batch: fg.Batch) -> np.ndarray:
    """Tokens that a row was made for: those of its own turn where there is a row per turn -> bool_rs."""
    real_rs = batch.segments > 0
    return real_rs & (batch.turn == np.arange(len(batch.turn))[:, None] % T) if layout == "by_turn" else real_rs


def assert_same_batch(found: fg.Batch, expected: fg.Batch):
    for item in fields(fg.Batch):
        left, right = getattr(found, item.name), getattr(expected, item.name)
        assert (left is None) == (right is None), item.name
        if left is not None:
            np.testing.assert_array_equal(left, right, err_msg=item.name)


# Content ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", PLAIN)
def test_every_token_has_what_it_has_when_packed_and_padding_says_so(layout):
    for case in map(learned, SEEDS):
        target = {"target": case.adv + 1}
        plain, packed = laid_out(layout, case, **target), laid_out("packed", case, **target)
        own_rs, packed_rs = own_tokens(layout, plain), packed.segments > 0
        assert own_rs.sum() == packed_rs.sum() == case.exists.sum(), "each token is there once"
        per_token = ("logp_sampled", "logp_old", "logp_ref", "value_old", "tokens", "positions", "chosen")
        for name in (*per_token, "group", "advantage", "weight", "target"):
            found_ntl, expected_ntl = by_place(plain, name, own_rs), by_place(packed, name, packed_rs)
            np.testing.assert_array_equal(found_ntl, expected_ntl, err_msg=name)
            assert (np.isfinite(found_ntl) == case.exists).all(), name
        padding_rs = plain.segments == 0
        assert padding_rs.any()
        assert all((getattr(plain, name)[padding_rs] == -1).all() for name in ("trajectory", "turn", "slot", "group"))
        assert not any(getattr(plain, name)[padding_rs].any() for name in per_token)


def test_tokens_see_each_other_as_when_packed():
    def segments_by_place(batch: fg.Batch) -> np.ndarray:
        row_rs = np.arange(len(batch.segments))[:, None]
        return by_place(batch.replace(segments=batch.segments + 1000 * row_rs), "segments", batch.segments > 0).ravel()

    for case in map(learned, SEEDS):
        plain, packed = (segments_by_place(laid_out(layout, case)) for layout in ("by_trajectory", "packed"))
        np.testing.assert_array_equal(plain[:, None] == plain[None, :], packed[:, None] == packed[None, :])


def assert_row_is(batch: fg.Batch, r: int, places: list):
    """The row has these tokens, in this order and numbered as they stand, and then padding."""
    columns = np.stack([batch.trajectory[r], batch.turn[r], batch.slot[r]], axis=1)
    np.testing.assert_array_equal(columns[: len(places)], np.array(places).reshape(-1, 3))
    assert (columns[len(places) :] == -1).all()
    assert (batch.segments[r] > 0).tolist() == [True] * len(places) + [False] * (T * L - len(places))


def test_a_row_per_trajectory_holds_it_in_order_and_one_per_turn_the_turns_before_it_where_the_context_appends():
    for case in map(learned, SEEDS):
        whole, by_turn = laid_out("by_trajectory", case), laid_out("by_turn", case)
        assert (whole.tokens.shape, by_turn.tokens.shape) == ((N, T * L), (N * T, T * L))
        for i in range(N):
            assert_row_is(whole, i, [(i, t, slot) for t, slot in zip(*np.nonzero(case.exists[i]), strict=True)])
        for i, t in np.argwhere(case.trajectories.turns):
            shown = range(t + 1) if case.trajectories.appends[i] else [t]
            places = [(i, u, slot) for u in shown for slot in np.flatnonzero(case.exists[i, u])]
            assert_row_is(by_turn, i * T + t, places)
        assert not by_turn.chosen[~case.trajectories.turns.ravel()].any()


def test_context_has_the_positions_and_the_segment_that_it_has_in_the_trajectory():
    rng = np.random.default_rng(0)
    turns = [make_turn(rng, 1, 2), make_turn(rng, 2, 2)]
    records = [fg.Trajectory(turns, 1.0, 0), fg.Trajectory(turns, 1.0, 0, appends=False)]
    case = (fg.collate(records), np.ones((2, 2)), np.ones((2, 2)))
    by_turn, by_trajectory = PLAIN["by_turn"](*case), PLAIN["by_trajectory"](*case)
    afresh, on = [[0, 1, 2, 0, 0, 0, 0], [0, 1, 2, 3, 0, 0, 0]], [[0, 1, 2, 0, 0, 0, 0], [0, 1, 2, 3, 4, 5, 6]]
    assert by_turn.positions[:, :7].tolist() == on + afresh
    assert by_trajectory.positions[:, :7].tolist() == [[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 0, 1, 2, 3]]
    assert by_trajectory.segments.tolist() == [[1] * 7 + [0], [1] * 3 + [2] * 4 + [0]]
    assert [len(set(row[row > 0].tolist())) for row in np.asarray(by_turn.segments)] == [1] * 4


@each_layout
def test_each_chosen_token_is_chosen_in_exactly_one_row_and_values_can_be_laid_out_and_gathered(layout):
    """`unpack` after `place` is the identity on chosen tokens, and 0 on context and padding."""
    for seed, case in enumerate(map(learned, SEEDS)):
        batch = laid_out(layout, case)
        times_ntl = np.zeros((N, T, L), int)
        np.add.at(times_ntl, tuple(x[batch.chosen] for x in (batch.trajectory, batch.turn, batch.slot)), 1)
        np.testing.assert_array_equal(times_ntl, case.chosen)
        assert not batch.weight[~batch.chosen].any()
        assert not batch.advantage[~batch.chosen].any()
        x_ntl = np.random.default_rng(seed).normal(size=(N, T, L)).astype(np.float32)
        found_ntl = UNPACK(PLACE(x_ntl, batch), batch, (N, T, L))
        np.testing.assert_array_equal(found_ntl, np.where(case.chosen, x_ntl, 0))
        tokens_rs = PLACE(case.trajectories.tokens, batch)
        np.testing.assert_array_equal(tokens_rs, batch.tokens)
        assert tokens_rs.dtype == np.int32
    emptied = batch.replace(segments=np.zeros_like(batch.segments))
    assert not UNPACK(np.ones(batch.tokens.shape, np.float32), emptied, (N, T, L)).any()


# What may be left out ---------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", PLAIN)
def test_advantages_of_turns_and_of_tokens_agree(layout):
    trajectories, adv_ntl, weight_ntl = learned(2)
    by_turn = {"adv": adv_ntl[:, :, 0], "weights": weight_ntl[:, :, 0], "target": adv_ntl[:, :, 1]}
    by_token = {name: np.repeat(x_nt[:, :, None], L, axis=2) for name, x_nt in by_turn.items()}
    assert_same_batch(PLAIN[layout](trajectories, **by_turn), PLAIN[layout](trajectories, **by_token))


@pytest.mark.parametrize("layout", PLAIN)
def test_what_was_not_scored_is_absent_and_logp_old_is_logp_sampled(layout):
    trajectories = learned(0).trajectories.replace(logp_old=None, logp_ref=None, value=None)
    batch = laid_out(layout, learned(0)._replace(trajectories=trajectories))
    np.testing.assert_array_equal(batch.logp_old, batch.logp_sampled)
    assert batch.logp_old.any()
    assert batch.logp_ref is batch.value_old is batch.target is None


@pytest.mark.parametrize("layout", PLAIN)
def test_axes_that_disagree_are_an_error(layout):
    trajectories, adv_ntl, weight_ntl = learned(0)
    with pytest.raises(fg.BadInput, match=r"^Trajectories.group has 5 on axis n, but tokens has 6"):
        PLAIN[layout](trajectories.replace(group=np.zeros(5, np.int32)), adv_ntl, weight_ntl)


def test_without_length_a_turn_ends_with_its_last_chosen_token():
    chosen_ntl = np.zeros((1, 3, 4), bool)
    chosen_ntl[0, 0, [0, 2]] = True
    chosen_ntl[0, 2, 1] = True
    trajectories = fg.collate([fg.Trajectory([make_turn(np.random.default_rng(0), 2, 2)] * 3, 1.0, 0)])
    trajectories = trajectories.replace(chosen=chosen_ntl)
    assert filled(trajectories.replace(length=None))[0].tolist() == [[3, 0, 2]]
    assert filled(trajectories)[0].tolist() == [[4, 4, 4]], "a length that is given stands"
    without_third = trajectories.replace(length=None, turns=np.array([[True, True, False]]))
    assert filled(without_third)[0].tolist() == [[3, 0, 0]], "a turn that does not exist has no tokens"


@each_layout
def test_without_length_and_appends_turns_end_with_their_last_chosen_token_and_all_contexts_append(layout):
    case = learned(2)
    chosen_ntl = case.chosen & (np.arange(L) < 4)  # so that turns have given tokens at their ends
    ends_nt = np.where(chosen_ntl, np.arange(1, L + 1), 0).max(axis=2)
    assert (ends_nt < case.trajectories.length).any()
    assert not case.trajectories.appends.all()
    trajectories = case.trajectories.replace(chosen=chosen_ntl)
    found = laid_out(layout, case._replace(trajectories=trajectories.replace(length=None, appends=None)))
    said = trajectories.replace(length=ends_nt, appends=np.ones(N, bool))
    assert_same_batch(found, laid_out(layout, case._replace(trajectories=said)))


@each_layout
def test_F6_what_is_past_a_turns_length_is_never_read(layout):
    case = learned(3)
    garbage = {"tokens": -7, "chosen": True, "version": -7}
    garbage |= dict.fromkeys(("logp_sampled", "logp_old", "logp_ref", "value"), np.nan)
    clean = {name: getattr(case.trajectories, name) for name in garbage}
    dirty = {name: np.where(case.exists, x, np.array(garbage[name], x.dtype)) for name, x in clean.items()}
    values = [np.where(case.chosen, x_ntl, np.nan).astype(np.float32) for x_ntl in case[1:]]
    found = laid_out(layout, Learned(case.trajectories.replace(**dirty), *values))
    assert_same_batch(found, laid_out(layout, case))
