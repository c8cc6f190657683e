"""Check ragged records, and pad them to one `Trajectories` (`collate`)."""

from collections.abc import Sequence

import numpy as np

from flowgrpo.types import COUNTS, BadInput, Status, Trajectories, Trajectory, Turn


def collate(records: Sequence[Trajectory], *, turns: int | None = None, length: int | None = None) -> Trajectories:
    """Pad ragged records to one `Trajectories` (NumPy); raise `BadInput` for the first that can't be used.

    `turns` and `length` fix the sizes of the axes t and l; by default they are the largest that occur.
    """
    every_turn = _checked_turns(records)
    length_u, count_n = _lengths(records, every_turn), _turn_counts(records)
    exists_nt = np.arange(_axis_size("turns", turns, int(count_n.max()))) < count_n[:, None]
    length_nt = _placed(length_u, exists_nt)
    filled_ntl = np.arange(_axis_size("length", length, int(length_u.max()))) < length_nt[:, :, None]

    def column(name: str, kind: type) -> np.ndarray:
        every = np.concatenate([getattr(turn, name) for turn in every_turn])
        return _placed(every.astype(kind, copy=False), filled_ntl)

    chosen_ntl, logp_ntl = column("chosen", bool), column("logp_sampled", np.float32)
    _check_finite(chosen_ntl, logp_ntl)
    outcome_n = _outcomes(records)
    by_turn_n = np.array([record.turns[0].reward is not None for record in records], bool)
    paid_u = np.array([0.0 if turn.reward is None else turn.reward for turn in every_turn], np.float32)
    return Trajectories(
        tokens=column("tokens", np.int32),
        chosen=chosen_ntl,
        logp_sampled=logp_ntl,
        version=_placed(_versions(every_turn, length_u), filled_ntl),
        turns=exists_nt,
        reward=np.where(by_turn_n[:, None], _placed(paid_u, exists_nt), np.where(exists_nt, outcome_n[:, None], 0.0)),
        anchor=_placed(_numbered([turn.anchor for turn in every_turn]), exists_nt),
        outcome=outcome_n,
        correct=np.array([record.correct for record in records], bool),
        status=np.array([record.status for record in records], np.int32),
        group=_group_ids(records),
        length=length_nt.astype(np.int32),
        begins=_begins(records, every_turn, exists_nt),
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


def _check_finite(chosen_ntl: np.ndarray, logp_ntl: np.ndarray) -> None:
    """Raise `BadInput` for a chosen token without a finite log-probability."""
    broken_ntl = chosen_ntl & ~np.isfinite(logp_ntl)
    if broken_ntl.any():
        place = tuple(np.argwhere(broken_ntl)[0])
        raise BadInput(
            f"trajectory {place[0]}, turn {place[1]} has a chosen token (slot {place[2]}) whose log-probability is "
            f"{logp_ntl[place]}: it must be finite"
        )


def _lengths(records: Sequence[Trajectory], turns: Sequence[Turn]) -> np.ndarray:
    """The number of tokens of every turn, where it is not 0."""
    length_u = np.fromiter((len(turn.tokens) for turn in turns), np.int64, len(turns))
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


def _begins(records: Sequence[Trajectory], turns: Sequence[Turn], exists_nt: np.ndarray) -> np.ndarray:
    """Say which turns begin a context: the first, those that say so, and all where a trajectory does not append."""
    fresh_n = ~np.array([record.appends for record in records], bool)
    begins_nt = _placed(np.array([turn.begins for turn in turns], bool), exists_nt) | (fresh_n[:, None] & exists_nt)
    begins_nt[:, 0] = True
    return begins_nt


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
