"""Data types of a run: tasks and ragged records on the host, `Trajectories` and `Batch` as pytrees.

    tasks -> rollout -> Trajectories -> rewards -> advantages -> pack -> Batch -> update

Axis letters; kernels and the sampler define a few of their own where they use them. A local or an argument ends in
its axes (`logp_rs`); a field of a pytree carries them in its annotation.

    n trajectory    t turn        l token of a turn's context + action
    g group         r row         s position in a row
    u position in a row's tree: the tokens of its contexts, shared prefixes once
    q token of a hint
    d model         h head        k kv-head (and a recorded token, in top-k support)
    e head-dim      f ffn         v vocabulary
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from functools import wraps
from numbers import Integral, Real
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Bool, Float, Int

from flowgrpo.errors import BadInput as BadInput

T = TypeVar("T")
AnyArray = jax.Array | np.ndarray  # NumPy on the host, jax.Array where it is compiled
JSON: TypeAlias = Any  # what json.loads returns
PyTree: TypeAlias = Any  # arrays in any nesting that jax.tree can walk
Params: TypeAlias = PyTree  # parameters of a model, an adapter or a critic
Metrics: TypeAlias = dict[str, Any]  # name -> number, or a scalar array that has not been read yet


def check_range(
    owner: str,
    name: str,
    value: Any,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    exclusive: bool = False,
    whole: bool = False,
    optional: bool = False,
) -> None:
    """Raise `BadInput` unless `value` is a finite number in [low, high], or in (low, high] if `exclusive`.

    With `whole` it must be an integer; with `optional` None passes. A bool is no number. Arrays pass, since they may be
    traced.
    """
    if isinstance(value, jax.Array | np.ndarray) or (optional and value is None):
        return
    kinds: Any = Integral if whole else Real
    is_number = isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value)
    if is_number and (value > low if exclusive else value >= low) and value <= high:
        return
    kind = "" if is_number else "a whole number" if whole else "a finite number"
    lower = f"{'greater than' if exclusive else 'at least'} {low:g}" if low > -math.inf else ""
    upper = f"and at most {high:g}" if high < math.inf else ""
    raise BadInput(f"{owner}: {name} is {value!r}, but must be {' '.join(filter(None, (kind, lower, upper)))}")


def first_line(error: Exception) -> str:
    """The first line of an error's message, or the name of its type; for a one-sentence reason."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")


def check_names(owner: str, names: Collection[str], known: Collection[str]) -> None:
    """Raise `BadInput` if one of the names of options is not known."""
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise BadInput(f"{owner} has no option {', '.join(unknown)}; it takes {', '.join(known)}")


def checked(cls: type[T]) -> type[T]:
    """Class decorator: a NamedTuple calls its method `check`, which raises `BadInput`, whenever an instance is made.

    `_replace` is included.
    """
    named_tuple: Any = cls
    new = named_tuple.__new__

    @wraps(new)
    def construct(cls, *values, **fields):
        instance = new(cls, *values, **fields)
        instance.check()
        return instance

    named_tuple.__new__, named_tuple._make = construct, classmethod(lambda cls, values: cls(*values))
    return cls


# How a trajectory ends --------------------------------------------------------------------------------


class Status(IntEnum):
    """How a trajectory ended."""

    FINISHED = 0
    TURN_LIMIT = 1
    TOKEN_LIMIT = 2
    TIMEOUT = 3
    REPETITION = 4
    TOOL_FAILURE = 5
    VERIFIER_FAILURE = 6
    ABORTED = 7


class Ending(NamedTuple):
    """Consequences of a status for its trajectory, and the reason."""

    counts: bool  # takes part in statistics and loss (F5)
    bootstraps: bool  # truncated: a critic's value replaces the rest of the return
    reason: str


ENDINGS: Mapping[Status, Ending] = {
    Status.FINISHED: Ending(True, False, "the policy or the environment ended it"),
    Status.TURN_LIMIT: Ending(True, True, "the policy used up its turns; scored as it is"),
    Status.TOKEN_LIMIT: Ending(True, True, "the policy used up its tokens; scored as it is"),
    Status.TIMEOUT: Ending(True, False, "what the policy started did not return in time"),
    Status.REPETITION: Ending(True, False, "the policy repeated itself and was stopped"),
    Status.TOOL_FAILURE: Ending(False, False, "a tool's infrastructure failed; not the policy's doing"),
    Status.VERIFIER_FAILURE: Ending(False, False, "the reward could not be computed"),
    Status.ABORTED: Ending(False, False, "cancelled from outside"),
}

# By number, for arrays of status.
COUNTS = np.array([ENDINGS[status].counts for status in Status])
BOOTSTRAPS = np.array([ENDINGS[status].bootstraps for status in Status])


# Ragged records of a host rollout --------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A query with its gold answers."""

    id: str
    query: str
    answers: tuple[str, ...]
    domain: str
    metadata: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self):
        if isinstance(self.answers, str):
            raise BadInput(f"Task: the answers of {self.id!r} are {self.answers!r}; give a tuple: ({self.answers!r},)")


@dataclass(frozen=True, eq=False)
class Turn:
    """One action of the policy after its context: context tokens first, then those that the policy chose.

    If the turn extends a context, `tokens` has only what it added; if it starts one, the whole context. `reward` is
    that of this turn; None if there is an outcome only.
    """

    tokens: np.ndarray
    chosen: np.ndarray
    logp_sampled: np.ndarray
    version: np.ndarray | int = 0
    reward: float | None = None
    anchor: int = 0
    starts_context: bool = False  # a new context, within a trajectory that extends contexts

    def __post_init__(self):
        sizes = [len(self.tokens), len(self.chosen), len(self.logp_sampled)]
        if not isinstance(self.version, int) and np.ndim(self.version):
            sizes.append(np.size(self.version))
        if sizes.count(sizes[0]) < len(sizes):
            names = ("tokens", "chosen", "logp_sampled", "version")
            lengths = ", ".join(f"{name} {size}" for name, size in zip(names, sizes, strict=False))
            raise BadInput(f"Turn: the lengths disagree: {lengths}; give each one entry per token")
        check_range("Turn", "reward", self.reward, optional=True)


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One episode: its turns, and its outcome (None if there is no valid reward)."""

    turns: Sequence[Turn]
    outcome: float | None
    group: int
    correct: bool = False
    status: Status = Status.FINISHED
    extends_context: bool = True  # False: every turn starts a context


# The two pytrees --------------------------------------------------------------------------------------


class Trajectories(struct.PyTreeNode):
    """n trajectories of up to t turns of up to l tokens, padded; slots past `length` are never read."""

    tokens: Int[AnyArray, "n t l"]
    chosen: Bool[AnyArray, "n t l"]  # the policy chose this token
    logp_sampled: Float[AnyArray, "n t l"]  # under the distribution it was sampled from
    version: Int[AnyArray, "n t l"]  # of the weights that sampled the token
    turns: Bool[AnyArray, "n t"]  # which turns exist
    reward: Float[AnyArray, "n t"]
    anchor: Int[AnyArray, "n t"]  # equal for equal states before the turn (GiGPO)
    outcome: Float[AnyArray, "n"]
    correct: Bool[AnyArray, "n"]  # the task is solved; before any reward shaping
    status: Int[AnyArray, "n"]  # a Status; ENDINGS has those that count
    group: Int[AnyArray, "n"]
    length: Int[AnyArray, "n t"] | None = None  # filled slots; None: a turn ends with its last chosen token
    starts_context: Bool[AnyArray, "n t"] | None = None  # None: only the first turn does
    by_turn: Bool[AnyArray, "n"] | None = None  # `reward` was given turn by turn; None: outcome only
    tool: Int[AnyArray, "n t"] | None = None  # index of the tool that was called; -1 if none was
    error: Bool[AnyArray, "n t"] | None = None  # the action was malformed, or its call refused
    logp_old: Float[AnyArray, "n t l"] | None = None  # rescored by the learner, if it was
    logp_ref: Float[AnyArray, "n t l"] | None = None  # under the reference
    value: Float[AnyArray, "n t l"] | None = None  # the critic, before the token
    last_value: Float[AnyArray, "n"] | None = None  # the critic, after the last turn
    hint: Int[AnyArray, "n q"] | None = None  # tokens that a teacher reads before the first turn

    @property
    def valid(self) -> Bool[jax.Array, "n"]:
        """Trajectories that take part in statistics and loss (F5)."""
        counts_n = jnp.asarray(COUNTS)[self.status]
        finite_n = np.isfinite(self.outcome) if isinstance(self.outcome, np.ndarray) else jnp.isfinite(self.outcome)
        return counts_n & finite_n & self.acted.any(axis=1)

    @property
    def action_mask(self) -> Bool[jax.Array, "n t l"]:
        """The chosen tokens of existing turns, up to their length: `chosen` without slots that are never read."""
        actions_ntl = jnp.asarray(self.chosen) & jnp.asarray(self.turns)[:, :, None]
        if self.length is None:
            return actions_ntl
        return actions_ntl & (jnp.arange(actions_ntl.shape[2])[None, None, :] < jnp.asarray(self.length)[:, :, None])

    @property
    def acted(self) -> Bool[jax.Array, "n t"]:
        """Whether a turn has a chosen token: those are counted by T_i (F2)."""
        return self.action_mask.any(axis=2)

    @property
    def bootstraps(self) -> Bool[jax.Array, "n"]:
        """Truncated trajectories, whose return is completed by a critic's value."""
        return jnp.asarray(BOOTSTRAPS)[self.status]


class PrefixTree(NamedTuple):
    """The contexts of each row as a tree: u distinct tokens, shared prefixes once, in depth-first order.

    A token attends to those whose subtree it is in: query i sees key j iff j <= i < ends[j]. So plain segments are the
    tree in which the subtree of every token ends with its segment.
    """

    tokens: Int[AnyArray, "r u"]
    positions: Int[AnyArray, "r u"]  # depth: the token's position in all its contexts
    ends: Int[AnyArray, "r u"]  # one past the last token of its subtree; 0 is padding
    predecessor: Int[AnyArray, "r s"]  # node whose hidden state predicts a row's token; -1: none


class Batch(struct.PyTreeNode):
    """r packed rows of s tokens: the input of an update, per token.

    (trajectory, turn, slot) is the token's index in `Trajectories`; all three, and `group`, are -1 on padding.
    `logp` of any kind at s is that of the token at s, given those before it.

    Without a tree, rows contain whole segments, context and chosen tokens. With one, a row contains only the tokens
    that are scored, from slot 0 on, each occurrence of a chosen token once; their contexts are in the row's tree, and
    `segments` numbers the contexts of the row from 1.
    """

    tokens: Int[AnyArray, "r s"]
    positions: Int[AnyArray, "r s"]
    segments: Int[AnyArray, "r s"]  # tokens attend within their segment; 0 is padding
    trajectory: Int[AnyArray, "r s"]
    turn: Int[AnyArray, "r s"]
    slot: Int[AnyArray, "r s"]
    group: Int[AnyArray, "r s"]
    chosen: Bool[AnyArray, "r s"]
    logp_sampled: Float[AnyArray, "r s"]
    logp_old: Float[AnyArray, "r s"]
    advantage: Float[AnyArray, "r s"]
    weight: Float[AnyArray, "r s"]  # of the token in the loss; 0: no part
    logp_ref: Float[AnyArray, "r s"] | None = None
    value_old: Float[AnyArray, "r s"] | None = None
    target: Float[AnyArray, "r s"] | None = None  # the critic's
    sequence_sum: Float[AnyArray, "r s"] | None = None  # of log-ratios over the token's sequence (first pass)
    sequence_count: Float[AnyArray, "r s"] | None = None  # number of chosen tokens of that sequence
    correction: Float[AnyArray, "r s"] | None = None  # sequence-level pi_old / mu, capped
    version: Int[AnyArray, "r s"] | None = None  # of the weights that chose the token
    tree_tokens: Int[AnyArray, "r u"] | None = None  # the fields of the `PrefixTree`
    tree_positions: Int[AnyArray, "r u"] | None = None
    tree_ends: Int[AnyArray, "r u"] | None = None
    predecessor: Int[AnyArray, "r s"] | None = None

    @property
    def tree(self) -> PrefixTree | None:
        """The contexts of the rows, if they share prefixes; None for plain rows."""
        tokens, positions, ends, predecessor = self.tree_tokens, self.tree_positions, self.tree_ends, self.predecessor
        if tokens is None or positions is None or ends is None or predecessor is None:
            return None
        return PrefixTree(tokens, positions, ends, predecessor)

    @property
    def loss_mask(self) -> Bool[jax.Array, "r s"]:
        """Tokens that carry loss: chosen, not padding, and of non-zero weight."""
        return jnp.asarray(self.chosen) & (jnp.asarray(self.segments) > 0) & (jnp.asarray(self.weight) != 0)


Tree = TypeVar("Tree", Trajectories, Batch)


def check_axes(tree: Trajectories | Batch) -> None:
    """Raise `BadInput` unless every axis letter has one size over all fields of `tree`."""
    values = {item.name: (_axes_of(item.type), getattr(tree, item.name)) for item in fields(tree)}
    _check_sizes(f"{type(tree).__name__}.", values)


def map_axis(tree: Tree, axis: str, change: Callable[[AnyArray, int], AnyArray]) -> Tree:
    """Apply `change(array, position of the axis)` to every field with this axis: cut, pad, repeat or reorder it.

    `map_axis(trajectories, "t", lambda x, position: np.repeat(x, 2, position))` repeats every turn. Fields are found by
    their annotations, so that none is forgotten.
    """
    axes = {item.name: _axes_of(item.type) for item in fields(tree)}
    if not any(axis in letters for letters in axes.values()):
        known = " ".join(dict.fromkeys(letter for letters in axes.values() for letter in letters))
        raise BadInput(f"{type(tree).__name__} has no axis {axis!r}; choose from {known}")
    arrays = {name: getattr(tree, name) for name, letters in axes.items() if axis in letters}
    changed = {name: change(x, axes[name].index(axis)) for name, x in arrays.items() if x is not None}
    return tree.replace(**changed)


def check_shared_axes(function: str, **arrays: AnyArray) -> None:
    """Raise `BadInput` unless every axis letter has one size over all arguments, whose names end in their axes:
    `check_shared_axes("f", outcome_n=..., turns_nt=...)`."""
    _check_sizes(f"{function}: ", {name: (tuple(name.rsplit("_", 1)[1]), value) for name, value in arrays.items()})


def _check_sizes(owner: str, values: Mapping[str, tuple[tuple[str, ...], AnyArray | None]]) -> None:
    """Raise `BadInput` for a wrong rank, for sizes that disagree, or for an empty axis."""
    seen: dict[str, tuple[int, str]] = {}
    for name, (axes, value) in values.items():
        if value is None:
            continue
        shape = np.shape(value)
        if len(axes) != len(shape):
            raise BadInput(f"{owner}{name} has shape {shape}, but its axes are ({', '.join(axes)})")
        for axis, size in zip(axes, shape, strict=True):
            first_size, first_name = seen.setdefault(axis, (size, name))
            if size != first_size:
                raise BadInput(f"{owner}{name} has {size} on axis {axis}, but {first_name} has {first_size}")
        if 0 in shape:
            raise BadInput(f"{owner}{name} has shape {shape}: there is nothing on axis {axes[shape.index(0)]}")


def _axes_of(annotation) -> tuple[str, ...]:
    """Axis letters of `Float[AnyArray, "n t"]`, also with `| None`."""
    options = getattr(annotation, "__args__", (annotation,))
    return next(tuple(option.dim_str.split()) for option in options if hasattr(option, "dim_str"))


# Token ledger -------------------------------------------------------------------------------------------


class Fate(IntEnum):
    """Fate of a generated token (A6): trained, masked or dropped."""

    TRAINED = 0
    MASKED_INVALID = 1  # its trajectory has no valid reward (F5)
    MASKED_WEIGHTLESS = 2  # weight 0 in a valid trajectory: filtered group, excluded segment
    DROPPED_TOO_LONG = 3  # its trajectory fits no row
    DROPPED_NO_SIGNAL = 4  # skipped because its gradient is exactly zero (F8)
    DROPPED_AFTER_STOP = 5  # decoded past the end of its turn
    DROPPED_CANCELLED = 6  # its request was cancelled before it became a turn


@dataclass(frozen=True)
class Ledger:
    """Number of generated tokens, by fate. Ledgers add; `check` verifies law A6."""

    generated: int = 0
    fates: Mapping[Fate, int] = field(default_factory=dict)

    def __add__(self, other: "Ledger") -> "Ledger":
        keys = [fate for fate in Fate if fate in self.fates or fate in other.fates]
        fates = {fate: self.fates.get(fate, 0) + other.fates.get(fate, 0) for fate in keys}
        return Ledger(self.generated + other.generated, fates)

    def check(self) -> "Ledger":
        """This ledger; raises if generated and accounted tokens differ."""
        accounted = sum(self.fates.values())
        if accounted != self.generated or min(self.fates.values(), default=0) < 0:
            parts = ", ".join(f"{fate.name.lower()} {count}" for fate, count in self.fates.items())
            raise AssertionError(f"{self.generated} tokens were generated, but {accounted} are accounted for: {parts}")
        return self
