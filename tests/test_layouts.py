"""The plain layouts: one row per trajectory or per turn, compiled or not, with the tokens that `pack` has."""

from functools import cache
from typing import NamedTuple

import jax
import numpy as np
import pytest
from cases import PLAIN, assert_same_batch, random_records, score

import flowgrpo as fg

N, T, L = 6, 3, 8  # one shape for all seeds, so that each layout compiles once
SEEDS = range(4)
PLACE, UNPACK = jax.jit(fg.place), jax.jit(fg.unpack, static_argnums=2)
each_plain = pytest.mark.parametrize("layout", PLAIN)
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
    trajectories, rng = score(fg.collate(records, turns=T, length=L), seed), np.random.default_rng(seed)
    if seed % 2:
        turns_nt = trajectories.turns & (rng.random((N, T)) < 0.6)
        turns_nt[:, 0] |= ~turns_nt.any(axis=1)
        trajectories = trajectories.replace(turns=turns_nt)
    adv_ntl, weight_ntl = rng.normal(size=(N, T, L)), rng.uniform(0.5, 1, (N, T, L))
    return Learned(trajectories, adv_ntl.astype(np.float32), weight_ntl.astype(np.float32))


def laid_out(layout: str, case: Learned, **more) -> fg.Batch:
    """The case in one of the three layouts, on the host."""
    batch = fg.pack(*case, row_length=T * L, **more) if layout == "packed" else PLAIN[layout](*case, **more)
    return jax.tree.map(np.asarray, batch)


def by_place(batch: fg.Batch, name: str, own_rs: np.ndarray) -> np.ndarray:
    """A field's values back at [n, t, l], NaN where there is none; `own` says which tokens to read."""
    out_ntl = np.full((N, T, L), np.nan)
    out_ntl[batch.trajectory[own_rs], batch.turn[own_rs], batch.slot[own_rs]] = getattr(batch, name)[own_rs]
    return out_ntl


# Content ----------------------------------------------------------------------------------------------


@each_plain
def test_every_token_has_what_it_has_when_packed_and_padding_says_so(layout):
    for case in map(learned, SEEDS):
        plain, packed = (laid_out(kind, case, target=case.adv + 1) for kind in (layout, "packed"))
        packed_rs, own_rs = packed.segments > 0, plain.segments > 0
        if layout == "by_turn":  # the turns before a row's own are context
            own_rs = own_rs & (plain.turn == np.arange(N * T)[:, None] % T)
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


@each_plain
def test_a_row_holds_a_trajectory_in_order_or_a_turn_after_those_before_it_where_the_context_appends(layout):
    """Places, positions and segments of a row; tokens of turns that are rendered afresh see none of the others."""
    for case in map(learned, SEEDS):
        batch, expected = laid_out(layout, case), []
        for i, t in np.ndindex(N, 1 if layout == "by_trajectory" else T):
            appends = case.trajectories.appends[i]
            shown = range(T) if layout == "by_trajectory" else range(t + 1) if appends else [t]
            exists = layout == "by_trajectory" or case.trajectories.turns[i, t]
            places = [(i, u, slot) for u in shown for slot in np.flatnonzero(case.exists[i, u])] if exists else []
            row = [(*one, at, 1) if appends else (*one, one[2], one[1] + 1) for at, one in enumerate(places)]
            expected.append(row + [(-1, -1, -1, 0, 0)] * (T * L - len(row)))
        found = np.stack([batch.trajectory, batch.turn, batch.slot, batch.positions, batch.segments], axis=-1)
        exists_r = np.ones(len(found), bool) if layout == "by_trajectory" else case.trajectories.turns.ravel()
        np.testing.assert_array_equal(found[exists_r], np.array(expected)[exists_r])
        assert not batch.chosen[~exists_r].any()


@each_layout
def test_each_chosen_token_is_chosen_in_exactly_one_row_and_values_can_be_laid_out_and_gathered(layout):
    """`unpack` after `place` is the identity on chosen tokens, and 0 on context and padding."""
    for case in map(learned, SEEDS):
        batch, times_ntl = laid_out(layout, case), np.zeros((N, T, L), int)
        np.add.at(times_ntl, tuple(x[batch.chosen] for x in (batch.trajectory, batch.turn, batch.slot)), 1)
        np.testing.assert_array_equal(times_ntl, case.chosen)
        assert not batch.weight[~batch.chosen].any()
        assert not batch.advantage[~batch.chosen].any()
        found_ntl = UNPACK(PLACE(case.adv, batch), batch, (N, T, L))
        np.testing.assert_array_equal(found_ntl, np.where(case.chosen, case.adv, 0))
        tokens_rs = PLACE(case.trajectories.tokens, batch)
        np.testing.assert_array_equal(tokens_rs, batch.tokens)
        assert tokens_rs.dtype == np.int32
    emptied = batch.replace(segments=np.zeros_like(batch.segments))
    assert not UNPACK(np.ones(batch.tokens.shape, np.float32), emptied, (N, T, L)).any()


# What may be left out ---------------------------------------------------------------------------------


@each_plain
def test_values_may_be_given_by_turn_and_what_was_not_scored_is_absent(layout):
    trajectories, adv_ntl, weight_ntl = learned(2)
    by_turn = {"adv": adv_ntl[:, :, 0], "weights": weight_ntl[:, :, 0], "target": adv_ntl[:, :, 1]}
    by_token = {name: np.repeat(x_nt[:, :, None], L, axis=2) for name, x_nt in by_turn.items()}
    assert_same_batch(PLAIN[layout](trajectories, **by_turn), PLAIN[layout](trajectories, **by_token))
    bare = PLAIN[layout](trajectories.replace(logp_old=None, logp_ref=None, value=None), adv_ntl, weight_ntl)
    np.testing.assert_array_equal(bare.logp_old, bare.logp_sampled)
    assert bare.logp_ref is bare.value_old is bare.target is None
    with pytest.raises(fg.BadInput, match=r"^Trajectories.group has 5 on axis n, but tokens has 6"):
        PLAIN[layout](trajectories.replace(group=np.zeros(5, np.int32)), adv_ntl, weight_ntl)


@each_layout
def test_without_length_and_appends_turns_end_with_their_last_chosen_token_and_all_contexts_append(layout):
    case = learned(3)
    chosen_ntl = case.trajectories.chosen & (np.arange(L) < 4)  # so that turns have given tokens at their ends
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
