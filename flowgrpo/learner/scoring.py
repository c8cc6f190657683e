"""Score trajectories under the reference and the critic, before advantages are computed.

    rollout -> Trajectories -> score_trajectories: logp_ref, value, last_value -> advantages -> pack -> Batch -> update

`value` stands before each chosen token and `last_value` after the last token of a trajectory, where a cut one
bootstraps. `pack` and the plain layouts carry what was scored into the batch. Trajectories are scored one a row, in
micro-batches, and never as a whole [row, token, vocabulary] (M4); contexts that are rendered afresh are segments of
their row. All of that is pure, to be jitted by the caller. Where the host may pack between programs,
`make_score_trees` scores the reference on trees, in which what contexts begin with alike is computed once.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from flowgrpo.batching.layouts import filled, rows_by_trajectory, unpack
from flowgrpo.contracts import Policy, Scores
from flowgrpo.learner.critic import Valuation
from flowgrpo.learner.update import Score, make_score, score_batch, score_rows
from flowgrpo.models.critic import before
from flowgrpo.models.trainable import acting, cast
from flowgrpo.parallel.row_sharding import DeviceMesh, replicated
from flowgrpo.types import AnyArray, BadInput, Batch, Trajectories

ScoreTrajectories = Callable[[Any, Any, Trajectories], Trajectories]  # (params, reference_params, trajectories)


def make_score_trajectories(
    policy: Policy,
    *,
    critic: Valuation | None = None,
    needs: Collection[str],
    temperature=1.0,
    banned: tuple[int, ...] = (),
    micro_rows: int = 16,
    chunk: int = 1024,
    slots: int | None = None,
    compute_dtype: Any = None,
    hindsight: bool = False,
) -> ScoreTrajectories:
    """Build `score_trajectories(params, reference_params, trajectories)`, which fills in what is in `needs`.

    `reference_params` are read for `logp_ref` only. `slots` are the tokens of the longest trajectory, by default all
    that there is room for; one that is longer gets NaN, so that it can't pass for scored. `compute_dtype` is that of
    the update. With `hindsight`, contexts begin with each trajectory's hint where `logp_ref` is scored.
    """
    if "value" in needs and critic is None:
        raise BadInput(
            "make_score_trajectories: values are needed, but there is no critic: pass one, such as own_network(...)"
        )
    if micro_rows < 1 or (slots is not None and slots < 1):
        raise BadInput(
            f"make_score_trajectories: micro_rows is {micro_rows} and slots {slots}, but both must be at least 1"
        )
    score = make_score(policy, temperature=temperature, banned=banned, chunk=chunk)
    return _TrajectoryScorer(frozenset(needs), score, critic, micro_rows, slots, compute_dtype, policy.mesh, hindsight)


@dataclass(frozen=True, eq=False)
class _TrajectoryScorer:
    needs: frozenset[str]
    score: Score
    critic: Valuation | None
    micro_rows: int
    slots: int | None
    compute_dtype: Any
    mesh: DeviceMesh
    hindsight: bool

    def __call__(self, params, reference_params, trajectories: Trajectories) -> Trajectories:
        if "logp_ref" in self.needs and self.hindsight:
            trajectories = trajectories.replace(logp_ref=self.in_hindsight(reference_params, trajectories))
            return replace(self, needs=self.needs - {"logp_ref"})(params, reference_params, trajectories)
        nothing_nt = jnp.zeros(trajectories.turns.shape, jnp.float32)
        whole = rows_by_trajectory(trajectories, nothing_nt, nothing_nt)
        batch = jax.tree.map(lambda x_rs: x_rs[:, : self.slots], whole)
        length_n = (whole.segments > 0).sum(axis=1)
        over_n = length_n > batch.tokens.shape[1]
        found, shape = {}, trajectories.tokens.shape
        if "logp_ref" in self.needs:
            logp_rs = self.rows(self.score, acting(reference_params), batch)
            found["logp_ref"] = _back(logp_rs, batch, shape, over_n)
        if "value" in self.needs:
            after_rs = self.rows(self.values, params, batch)
            found["value"] = _back(before(after_rs, batch.segments), batch, shape, over_n)
            last_n = jnp.take_along_axis(after_rs, jnp.maximum(length_n - 1, 0)[:, None], axis=1, mode="clip")[:, 0]
            found["last_value"] = jnp.where(over_n, jnp.nan, last_n)
        return trajectories.replace(**found)

    def in_hindsight(self, reference_params, trajectories: Trajectories) -> Array:
        """Score each token as the reference would have chosen it after the trajectory's hint -> logp_ntl."""
        told, size = with_hint(trajectories), hint_of(trajectories).shape[1]
        slots = None if self.slots is None else self.slots + size
        scorer = replace(self, slots=slots, needs=frozenset(("logp_ref",)), hindsight=False)
        logp_ntl = jnp.asarray(scorer(None, reference_params, told).logp_ref)
        first_nl = logp_ntl[:, 0, size:]
        return jnp.concatenate([first_nl[:, None], logp_ntl[:, 1:, :-size]], axis=1)

    def rows(self, score: Score, params, batch: Batch) -> Array:
        """Compute a score's `logp` for the rows that hold a chosen token, 0 in the others -> [r s]."""
        params = params if self.compute_dtype is None else cast(params, self.compute_dtype)
        chosen_r = jnp.asarray(batch.chosen & (batch.segments > 0)).any(axis=1)
        return score_rows(score, params, batch, chosen_r, self.micro_rows, self.mesh)

    def values(self, params, batch: Batch) -> Scores:
        """Compute the values after each token, in the place of log-probabilities."""
        assert self.critic is not None
        return Scores(logp=self.critic.look(params, batch.tokens, batch.positions, batch.segments)[1])


def make_score_trees(
    policy: Policy,
    packing: Callable[..., Batch],
    *,
    temperature=1.0,
    banned: tuple[int, ...] = (),
    chunk: int = 1024,
    compute_dtype: Any = None,
) -> Callable[[Any, Trajectories], np.ndarray]:
    """`score(params, trajectories) -> logp_ntl` of all chosen tokens, on the host; `packing` makes trees, a row a step.

    A trajectory that `packing` leaves out gets NaN, so that it can't pass for scored.
    """
    score = make_score(policy, temperature=temperature, banned=banned, chunk=chunk, compute_dtype=compute_dtype)
    # Every process reads all of it, where there are several.
    everywhere = replicated(policy.mesh) if isinstance(policy.mesh, Mesh) and policy.mesh.is_multi_process else None
    rows = jax.jit(partial(score_batch, score, micro_rows=1, mesh=policy.mesh), out_shardings=everywhere)

    def score_trajectories(params, trajectories: Trajectories) -> np.ndarray:
        trajectories = jax.device_get(trajectories)
        nothing_nt = np.zeros(trajectories.turns.shape, np.float32)
        batch = packing(trajectories, nothing_nt, nothing_nt + 1)
        logp_rs, own_rs = np.asarray(rows(params, batch)), np.asarray(batch.segments) > 0
        logp_ntl = np.where(trajectories.actions, np.nan, 0.0).astype(np.float32)
        logp_ntl[tuple(np.asarray(x)[own_rs] for x in (batch.trajectory, batch.turn, batch.slot))] = logp_rs[own_rs]
        return logp_ntl

    return score_trajectories


def hint_of(trajectories: Trajectories) -> Array:
    """Read the hints of trajectories; raise `BadInput` where they have none."""
    if trajectories.hint is None:
        raise BadInput("Trajectories.hint is missing, and scoring in hindsight needs it: roll out with hints=True")
    return jnp.asarray(trajectories.hint)


def with_hint(trajectories: Trajectories) -> Trajectories:
    """Begin the first context of each trajectory with its hint, in as many slots more a turn."""
    hint_nq = hint_of(trajectories)
    size = hint_nq.shape[1]

    def moved(x_ntl: AnyArray) -> Array:
        """Leave room for the hint before the first turn, and as much after each other one."""
        x_ntl = jnp.asarray(x_ntl)
        first_ntl = jnp.pad(x_ntl[:, :1], ((0, 0), (0, 0), (size, 0)))
        return jnp.concatenate([first_ntl, jnp.pad(x_ntl[:, 1:], ((0, 0), (0, 0), (0, size)))], axis=1)

    length_nt, _ = filled(trajectories)
    wide = {name: moved(getattr(trajectories, name)) for name in ("tokens", "chosen", "logp_sampled", "version")}
    wide["tokens"] = wide["tokens"].at[:, 0, :size].set(hint_nq)
    length_nt = jnp.asarray(length_nt).at[:, 0].add(size)
    return trajectories.replace(**wide, length=length_nt, logp_old=None, logp_ref=None, value=None, hint=None)


def _back(x_rs: Array, batch: Batch, shape: tuple[int, ...], over_n: Array) -> Array:
    """Per-token numbers in the trajectories' places -> x_ntl; NaN where a trajectory is longer than its row."""
    return jnp.where(over_n[:, None, None], jnp.nan, unpack(x_rs, batch, shape))
