"""The plain layouts: one row per trajectory or per turn, compiled or not, with the tokens that `pack` has."""

import itertools
from collections import defaultdict
from functools import cache
from typing import NamedTuple

import jax
import numpy as np
import pytest
from family_cases import PLAIN, assert_same_batch, random_records, score

import flowgrpo as fg

N, T, L = 6, 3, 8  # one shape for all seeds, so that each layout compiles once
SEEDS = range(4)
PLACE, UNPACK = jax.jit(fg.batching.place), jax.jit(fg.batching.unpack, static_argnums=2)
each_plain = pytest.mark.parametrize("layout", PLAIN)
each_layout = pytest.mark.parametrize("layout", ["packed", "trees", *PLAIN])


class Learned(NamedTuple):
    trajectories: fg.Trajectories
    adv: np.ndarray  # n t l
    weights: np.ndarray  # n t l, nowhere 0, so that `pack` leaves no trajectory out

    @property
    def exists(self) -> np.ndarray:
        """Slots that hold a token -> bool_ntl."""
        return np.arange(L) < np.where(self.trajectories.turns, self.trajectories.length, 0)[:, :, None]

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
    return Learned(trajectories, *rng.uniform(0.5, 1, (2, N, T, L)).astype(np.float32))


def laid_out(layout: str, case: Learned, **more) -> fg.Batch:
    """The case in one of the four layouts, on the host."""
    packing = {"packed": fg.pack, "trees": fg.batching.pack_tree}.get(layout)
    batch = PLAIN[layout](*case, **more) if packing is None else packing(*case, row_length=T * L, **more)
    return jax.tree.map(np.asarray, batch)


@each_plain
def test_rows_hold_a_trajectory_or_a_turn_after_its_context(layout):
    """Places, positions and segments; tokens of turns that are rendered afresh see none of the others."""
    by_turn = layout == "by_turn"
    for case in map(learned, SEEDS):
        batch, expected = laid_out(layout, case), []
        exists_r = case.trajectories.turns.ravel() if by_turn else np.ones(N, bool)
        for r in np.flatnonzero(exists_r):
            i, t = divmod(r, T) if by_turn else (r, T - 1)
            context_t = np.cumsum(case.trajectories.starts_context[i])
            shown = [u for u in range(t + 1) if not by_turn or context_t[u] == context_t[t]]
            places = [(i, u, slot) for u in shown for slot in np.flatnonzero(case.exists[i, u])]
            position = defaultdict(itertools.count)  # within each context
            row = [(*one, next(position[context_t[one[1]]]), context_t[one[1]]) for one in places]
            expected.append(row + [(-1, -1, -1, 0, 0)] * (T * L - len(row)))
        found = np.stack([batch.trajectory, batch.turn, batch.slot, batch.positions, batch.segments], axis=-1)
        np.testing.assert_array_equal(found[exists_r], expected)
        assert not batch.chosen[~exists_r].any()


@each_layout
def test_each_chosen_token_is_in_one_row_with_its_values(layout):
    """`unpack` after `place` is the identity on chosen tokens, and 0 on context and padding."""
    for case in map(learned, SEEDS):
        batch, times_ntl, x = laid_out(layout, case, target=case.adv + 1), np.zeros((N, T, L), int), case.trajectories
        np.add.at(times_ntl, tuple(x[batch.chosen] for x in (batch.trajectory, batch.turn, batch.slot)), 1)
        np.testing.assert_array_equal(times_ntl, case.chosen)
        values = {name: getattr(x, name) for name in ("tokens", "logp_sampled", "logp_old", "logp_ref")}
        for name, x_ntl in (values | {"value_old": x.value}).items():
            np.testing.assert_array_equal(PLACE(x_ntl, batch), getattr(batch, name), err_msg=name)
        for name, x_ntl in {"advantage": case.adv, "weight": case.weights, "target": case.adv + 1}.items():
            expected_rs = np.where(batch.chosen, PLACE(x_ntl, batch), 0)
            np.testing.assert_array_equal(getattr(batch, name), expected_rs, err_msg=name)
        real_rs = batch.segments > 0
        np.testing.assert_array_equal(batch.group, np.where(real_rs, x.group[batch.trajectory], -1))
        found_ntl = UNPACK(PLACE(case.adv, batch), batch, (N, T, L))
        np.testing.assert_array_equal(found_ntl, np.where(case.chosen, case.adv, 0))
    emptied = batch.replace(segments=np.zeros_like(batch.segments))
    assert not UNPACK(np.ones(batch.tokens.shape, np.float32), emptied, (N, T, L)).any()


@each_plain
def test_values_may_be_by_turn_and_unscored_fields_are_absent(layout):
    trajectories, adv_ntl, weight_ntl = learned(2)
    by_turn = {"adv": adv_ntl[:, :, 0], "weights": weight_ntl[:, :, 0], "target": adv_ntl[:, :, 1]}
    by_token = {name: np.repeat(x_nt[:, :, None], L, axis=2) for name, x_nt in by_turn.items()}
    bare = PLAIN[layout](trajectories.replace(logp_old=None, logp_ref=None, value=None), **by_turn)
    expected = PLAIN[layout](trajectories, **by_token)
    assert_same_batch(bare, expected.replace(logp_old=bare.logp_sampled, logp_ref=None, value_old=None))
    with pytest.raises(fg.BadInput, match=r"^Trajectories.group has 5 on axis n, but tokens has 6"):
        PLAIN[layout](trajectories.replace(group=np.zeros(5, np.int32)), adv_ntl, weight_ntl)


@each_layout
def test_without_lengths_turns_end_with_their_last_chosen_token(layout):
    case = learned(3)
    chosen_ntl = case.trajectories.chosen & (np.arange(L) < 4)  # so that turns have given tokens at their ends
    ends_nt = np.where(chosen_ntl, np.arange(1, L + 1), 0).max(axis=2)
    trajectories = case.trajectories.replace(chosen=chosen_ntl)
    found = laid_out(layout, case._replace(trajectories=trajectories.replace(length=None, starts_context=None)))
    said = trajectories.replace(length=ends_nt, starts_context=np.zeros((N, T), bool))
    assert_same_batch(found, laid_out(layout, case._replace(trajectories=said)))


@each_layout
def test_F6_slots_past_a_turns_length_are_never_read(layout):
    case = learned(3)
    garbage = {"tokens": -7, "chosen": True, "version": -7}
    garbage |= dict.fromkeys(("logp_sampled", "logp_old", "logp_ref", "value"), np.nan)
    clean = {name: getattr(case.trajectories, name) for name in garbage}
    dirty = {name: np.where(case.exists, x, np.array(garbage[name], x.dtype)) for name, x in clean.items()}
    values = [np.where(case.chosen, x_ntl, np.nan).astype(np.float32) for x_ntl in case[1:]]
    found = laid_out(layout, Learned(case.trajectories.replace(**dirty), *values))
    assert_same_batch(found, laid_out(layout, case))
