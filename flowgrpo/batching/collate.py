"""Check ragged records, and pad them to one `Trajectories` (`collate`)."""

from collections.abc import Sequence

import numpy as np

from flowgrpo.types import COUNTS, BadInput, Status, Trajectories, Trajectory, Turn


def collate(records: Sequence[Trajectory], *, turns: int | None = None, length: int | None = None) -> Trajectories:
    """Pad ragged records to one `Trajectories` (NumPy); raise `BadInput` for the first invalid one.

    `turns` and `length` fix the sizes of the axes t and l; by default the largest that occur.
    """
    all_turns = _checked_turns(records)
    length_u, count_n = _lengths(records, all_turns), _turn_counts(records)
    exists_nt = np.arange(_axis_size("turns", turns, int(count_n.max()))) < count_n[:, None]
    length_nt = _scatter(length_u, exists_nt)
    filled_ntl = np.arange(_axis_size("length", length, int(length_u.max()))) < length_nt[:, :, None]

    def column(name: str, dtype: type) -> np.ndarray:
        values = np.concatenate([getattr(turn, name) for turn in all_turns])
        return _scatter(values.astype(dtype, copy=False), filled_ntl)

    chosen_ntl, logp_ntl = column("chosen", bool), column("logp_sampled", np.float32)
    _check_finite(chosen_ntl, logp_ntl)
    outcome_n = _outcomes(records)
    by_turn_n = np.array([record.turns[0].reward is not None for record in records], bool)
    reward_u = np.array([0.0 if turn.reward is None else turn.reward for turn in all_turns], np.float32)
    return Trajectories(
        tokens=column("tokens", np.int32),
        chosen=chosen_ntl,
        logp_sampled=logp_ntl,
        version=_scatter(_versions(all_turns, length_u), filled_ntl),
        turns=exists_nt,
        reward=np.where(
            by_turn_n[:, None], _scatter(reward_u, exists_nt), np.where(exists_nt, outcome_n[:, None], 0.0)
        ),
        anchor=_scatter(_number([turn.anchor for turn in all_turns]), exists_nt),
        outcome=outcome_n,
        correct=np.array([record.correct for record in records], bool),
        status=np.array([record.status for record in records], np.int32),
        group=_group_ids(records),
        length=length_nt.astype(np.int32),
        starts_context=_starts_context(records, all_turns, exists_nt),
        by_turn=by_turn_n,
    )


# Checks -----------------------------------------------------------------------------------------------


def _checked_turns(records: Sequence[Trajectory]) -> list[Turn]:
    """All turns, concatenated, after the checks that need no tokens."""
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
    num_rewards_n = np.add.reduceat(np.array([turn.reward is not None for turn in turns]), first_n, dtype=np.int64)
    if ((num_rewards_n > 0) & (num_rewards_n < count_n)).any():
        i = int(((num_rewards_n > 0) & (num_rewards_n < count_n)).argmax())
        raise BadInput(
            f"trajectory {i} has a reward on {num_rewards_n[i]} of {count_n[i]} turns: give all a reward, or none"
        )
    return turns


def _check_endings(records: Sequence[Trajectory]) -> None:
    """Raise `BadInput` for an unknown status, or an outcome that does not fit the status."""
    status_n = np.array([record.status for record in records])
    if not np.isin(status_n, list(Status)).all():
        i = int((~np.isin(status_n, list(Status))).argmax())
        names = ", ".join(f"{status.name} {status.value}" for status in Status)
        raise BadInput(f"trajectory {i} has status {status_n[i]}, which is none of {names}")
    missing_n = COUNTS[status_n] & ~np.isfinite(_outcomes(records))
    if missing_n.any():
        i = int(missing_n.argmax())
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
    """Number of tokens of each turn; raises if one is 0."""
    length_u = np.fromiter((len(turn.tokens) for turn in turns), np.int64, len(turns))
    if (length_u == 0).any():
        raise BadInput(f"{_name_turn(records, int(length_u.argmin()))} has no tokens: leave the turn out")
    return length_u


def _versions(turns: list[Turn], length_u: np.ndarray) -> np.ndarray:
    """The weight version of each token, from one number per turn or per token."""
    columns = [np.broadcast_to(turn.version, size) for turn, size in zip(turns, length_u, strict=True)]
    return np.concatenate(columns).astype(np.int32)


def _name_turn(records: Sequence[Trajectory], u: int) -> str:
    """ "trajectory i, turn t" of the u-th turn."""
    ends = np.cumsum(_turn_counts(records))
    i = int(np.searchsorted(ends, u, side="right"))
    return f"trajectory {i}, turn {u - (int(ends[i - 1]) if i else 0)}"


# Columns ----------------------------------------------------------------------------------------------


def _turn_counts(records: Sequence[Trajectory]) -> np.ndarray:
    return np.fromiter((len(record.turns) for record in records), np.int64, len(records))


def _outcomes(records: Sequence[Trajectory]) -> np.ndarray:
    outcome_n = np.array([np.nan if record.outcome is None else record.outcome for record in records], np.float64)
    with np.errstate(over="ignore"):  # what overflows float32 becomes infinite, and is refused later
        return outcome_n.astype(np.float32)


def _starts_context(records: Sequence[Trajectory], turns: Sequence[Turn], exists_nt: np.ndarray) -> np.ndarray:
    """Whether a turn starts a context: the first, those marked, and all of a trajectory that extends none."""
    fresh_n = ~np.array([record.extends_context for record in records], bool)
    begins_nt = _scatter(np.array([turn.starts_context for turn in turns], bool), exists_nt) | (
        fresh_n[:, None] & exists_nt
    )
    begins_nt[:, 0] = True
    return begins_nt


def _scatter(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """`values` in the True slots of `mask`, in order; 0 elsewhere."""
    out = np.zeros(mask.shape, values.dtype)
    out[mask] = values
    return out


def _group_ids(records: Sequence[Trajectory]) -> np.ndarray:
    """The group ids, numbered if they need more than 32 bits."""
    groups = [int(record.group) for record in records]
    limits = np.iinfo(np.int32)
    if limits.min <= min(groups) and max(groups) <= limits.max:
        return np.array(groups, np.int32)
    return _number(groups)


def _number(values: Sequence[int]) -> np.ndarray:
    """Numbers from 0, equal exactly for equal values, which may be any integers (hashes)."""
    numbers: dict[int, int] = {}
    return np.array([numbers.setdefault(value, len(numbers)) for value in values], np.int32)


def _axis_size(name: str, size: int | None, needed: int) -> int:
    if size is not None and size < needed:
        raise BadInput(f"{name}={size}, but the records need {needed}")
    return needed if size is None else size
