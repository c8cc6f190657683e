"""Ragged records flow in, checked; flat arrays (for `pack`) or one padded `Trajectories` flow out."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flowgrpo.types import COUNTS, BadInput, Status, Trajectories, Trajectory, Turn


class Flat(NamedTuple):
    """Tokens of all turns end to end, in the order trajectory, turn, slot (m tokens, n trajectories)."""

    tokens: np.ndarray  # m, and so on to slot
    chosen: np.ndarray
    logp_sampled: np.ndarray
    trajectory: np.ndarray
    turn: np.ndarray
    slot: np.ndarray
    length: np.ndarray  # n t: slots of each turn
    appends: np.ndarray  # n
    group: np.ndarray  # n


def flatten(records: Sequence[Trajectory]) -> Flat:
    """The records as flat arrays; raise `BadInput` for the first that can't be used."""
    turns = _checked_turns(records)
    columns = {name: [getattr(turn, name) for turn in turns] for name in ("tokens", "chosen", "logp_sampled")}
    length_u = _lengths(records, columns["tokens"])
    count_n = _turn_counts(records)
    length_nt = _placed(length_u, np.arange(count_n.max()) < count_n[:, None])
    trajectory_m, turn_m, slot_m = token_index(length_nt)
    flat = Flat(
        tokens=np.concatenate(columns["tokens"]).astype(np.int32, copy=False),
        chosen=np.concatenate(columns["chosen"]).astype(bool, copy=False),
        logp_sampled=np.concatenate(columns["logp_sampled"]).astype(np.float32, copy=False),
        trajectory=trajectory_m,
        turn=turn_m,
        slot=slot_m,
        length=length_nt,
        appends=np.array([record.appends for record in records], bool),
        group=_group_ids(records),
    )
    broken_m = flat.chosen & ~np.isfinite(flat.logp_sampled)
    if broken_m.any():
        m = int(broken_m.argmax())
        raise BadInput(
            f"trajectory {flat.trajectory[m]}, turn {flat.turn[m]} has a chosen token (slot {flat.slot[m]}) "
            f"whose log-probability is {flat.logp_sampled[m]}: it must be finite"
        )
    return flat


def token_index(length_nt: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(trajectory, turn, slot) of every token, in that order, from the number of slots of each turn."""
    trajectory_u, turn_u = np.nonzero(length_nt)
    length_u = length_nt[trajectory_u, turn_u]
    start_u = np.cumsum(length_u) - length_u
    trajectory_m, turn_m, start_m = (np.repeat(x.astype(np.int32), length_u) for x in (trajectory_u, turn_u, start_u))
    return trajectory_m, turn_m, np.arange(len(start_m), dtype=np.int32) - start_m


def collate(records: Sequence[Trajectory], *, turns: int | None = None, length: int | None = None) -> Trajectories:
    """Pad ragged records to one `Trajectories` (NumPy), checking every one.

    `turns` and `length` fix the sizes of the axes t and l; by default they are the largest that occur.
    """
    flat = flatten(records)
    num_turns = _axis_size("turns", turns, flat.length.shape[1])
    num_slots = _axis_size("length", length, int(flat.length.max()))
    length_nt = np.pad(flat.length, ((0, 0), (0, num_turns - flat.length.shape[1])))
    every_turn = [turn for record in records for turn in record.turns]
    exists_nt = np.arange(num_turns) < np.array([[len(record.turns)] for record in records])
    filled_ntl = np.arange(num_slots) < length_nt[:, :, None]
    outcome_n = _outcomes(records)
    by_turn_n = np.array([record.turns[0].reward is not None for record in records], bool)
    paid_u = np.array([0.0 if turn.reward is None else turn.reward for turn in every_turn], np.float32)
    return Trajectories(
        tokens=_placed(flat.tokens, filled_ntl),
        chosen=_placed(flat.chosen, filled_ntl),
        logp_sampled=_placed(flat.logp_sampled, filled_ntl),
        version=_placed(_versions(every_turn, flat.length[flat.length > 0]), filled_ntl),
        turns=exists_nt,
        reward=np.where(by_turn_n[:, None], _placed(paid_u, exists_nt), np.where(exists_nt, outcome_n[:, None], 0.0)),
        anchor=_placed(_numbered([turn.anchor for turn in every_turn]), exists_nt),
        outcome=outcome_n,
        correct=np.array([record.correct for record in records], bool),
        status=np.array([record.status for record in records], np.int32),
        group=flat.group,
        length=length_nt.astype(np.int32),
        appends=flat.appends,
        by_turn=by_turn_n,
    )


# Checks -----------------------------------------------------------------------------------------------


def _checked_turns(records: Sequence[Trajectory]) -> list[Turn]:
    """All turns, end to end, after the checks that need no tokens."""
    if len(records) == 0:
        raise BadInput("there are no trajectories: a batch needs at least one")
    count_n = _turn_counts(records)
    if (count_n == 0).any():
        raise BadInput(
            f"trajectory {count_n.argmin()} has no turns: leave it out, or keep what was sampled before it ended"
        )
    _check_endings(records)
    turns = [turn for record in records for turn in record.turns]
    first_n = np.cumsum(count_n) - count_n
    paid_n = np.add.reduceat(np.array([turn.reward is not None for turn in turns]), first_n, dtype=np.int64)
    if ((paid_n > 0) & (paid_n < count_n)).any():
        i = int(((paid_n > 0) & (paid_n < count_n)).argmax())
        raise BadInput(f"trajectory {i} has a reward on {paid_n[i]} of {count_n[i]} turns: pay every turn, or none")
    return turns


def _check_endings(records: Sequence[Trajectory]) -> None:
    """Raise `BadInput` for a status that does not exist, or an outcome that does not fit its status."""
    status_n = np.array([record.status for record in records])
    if not np.isin(status_n, list(Status)).all():
        i = int((~np.isin(status_n, list(Status))).argmax())
        names = ", ".join(f"{status.name} {status.value}" for status in Status)
        raise BadInput(f"trajectory {i} has status {status_n[i]}, which is none of {names}")
    lacks_n = COUNTS[status_n] & ~np.isfinite(_outcomes(records))
    if lacks_n.any():
        i = int(lacks_n.argmax())
        raise BadInput(
            f"trajectory {i} is {Status(status_n[i]).name} but its outcome is {records[i].outcome}: give it a finite "
            "outcome, or the status of what went wrong (VERIFIER_FAILURE, TOOL_FAILURE, ABORTED)"
        )


def _lengths(records: Sequence[Trajectory], tokens: list) -> np.ndarray:
    """The number of tokens of every turn, where it is not 0."""
    length_u = np.fromiter(map(len, tokens), np.int64, len(tokens))
    if (length_u == 0).any():
        raise BadInput(f"{_place(records, int(length_u.argmin()))} has no tokens: leave the turn out")
    return length_u


def _versions(turns: list[Turn], length_u: np.ndarray) -> np.ndarray:
    """The weight version of every token, from one number a turn or one a token."""
    columns = [np.broadcast_to(turn.version, size) for turn, size in zip(turns, length_u, strict=True)]
    return np.concatenate(columns).astype(np.int32)


def _place(records: Sequence[Trajectory], u: int) -> str:
    """The name of the u-th turn of all."""
    ends = np.cumsum(_turn_counts(records))
    i = int(np.searchsorted(ends, u, side="right"))
    return f"trajectory {i}, turn {u - (int(ends[i - 1]) if i else 0)}"


# Columns ----------------------------------------------------------------------------------------------


def _turn_counts(records: Sequence[Trajectory]) -> np.ndarray:
    return np.fromiter((len(record.turns) for record in records), np.int64, len(records))


def _outcomes(records: Sequence[Trajectory]) -> np.ndarray:
    outcome_n = np.array([np.nan if record.outcome is None else record.outcome for record in records], np.float64)
    with np.errstate(over="ignore"):  # what float32 can't hold becomes infinite, and is then refused
        return outcome_n.astype(np.float32)


def _placed(flat: np.ndarray, where: np.ndarray) -> np.ndarray:
    """`flat` laid into the True slots of `where`, in order; 0 elsewhere."""
    out = np.zeros(where.shape, flat.dtype)
    out[where] = flat
    return out


def _group_ids(records: Sequence[Trajectory]) -> np.ndarray:
    """The group ids as they are, or numbered where they need more than 32 bits."""
    groups = [int(record.group) for record in records]
    limits = np.iinfo(np.int32)
    if limits.min <= min(groups) and max(groups) <= limits.max:
        return np.array(groups, np.int32)
    return _numbered(groups)


def _numbered(values: Sequence[int]) -> np.ndarray:
    """Numbers from 0, equal exactly where the values are, whatever integers (hashes) they are."""
    numbers: dict[int, int] = {}
    return np.array([numbers.setdefault(value, len(numbers)) for value in values], np.int32)


def _axis_size(name: str, given: int | None, needed: int) -> int:
    if given is not None and given < needed:
        raise BadInput(f"{name}={given}, but the records need {needed}")
    return needed if given is None else given
