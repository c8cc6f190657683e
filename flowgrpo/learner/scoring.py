"""Scores of trajectories under the reference and the critic, before advantages are computed.

    rollout -> Trajectories -> score_trajectories: logp_ref, value, last_value -> advantages -> pack -> Batch -> update

`value` is the critic's before each chosen token, and `last_value` that after the last token of a trajectory, from which
a truncated one bootstraps. `pack` and the plain layouts carry the scores into the batch. `make_score_trajectories` is
pure, to be jitted by the caller: one trajectory a row, in micro-batches, never a whole [row, token, vocabulary] (M4);
contexts that are rendered afresh are segments of their row. If the host may pack between programs, `make_score_trees`
scores the reference on prefix trees, which compute shared prefixes once.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jax.typing import DTypeLike

from flowgrpo.batching.layouts import resolve_lengths, rows_by_trajectory, unpack
from flowgrpo.contracts import Policy, Scores
from flowgrpo.learner.critic import ValueModel
from flowgrpo.learner.update import Score, ScoreSettings, make_score, score_batch, score_rows
from flowgrpo.models.critic import values_before
from flowgrpo.models.trainable import actor_params, cast
from flowgrpo.parallel.row_sharding import DeviceMesh, replicated_sharding
from flowgrpo.types import AnyArray, BadInput, Batch, Params, Trajectories

ScoreTrajectories = Callable[[Params, Params, Trajectories], Trajectories]  # (params, reference_params, trajectories)


def make_score_trajectories(
    policy: Policy,
    *,
    needs: Collection[str],
    critic: ValueModel | None = None,
    settings: ScoreSettings = ScoreSettings(),  # noqa: B008
    micro_rows: int = 16,
    slots: int | None = None,
    hindsight: bool = False,
) -> ScoreTrajectories:
    """`score_trajectories(params, reference_params, trajectories)`, which fills in the fields in `needs`.

    Args:
        policy: the model; `reference_params` are parameters of it, read for `logp_ref` only.
        needs: of `logp_ref` and `value`, those to score; `last_value` comes with `value`.
        critic: gives the values.
        settings: a `ScoreSettings`, those of the update.
        micro_rows: trajectories per micro-batch.
        slots: tokens of the longest trajectory, by default all slots of the arrays; a longer one gets NaN, so that it
            can't pass for scored.
        hindsight: whether contexts begin with each trajectory's hint when `logp_ref` is scored.
    """
    if "value" in needs and critic is None:
        raise BadInput(
            "make_score_trajectories: values are needed, but there is no critic: pass one, as separate_network(...)"
        )
    score = make_score(policy, temperature=settings.temperature, banned=settings.banned, chunk=settings.chunk)
    return _TrajectoryScorer(
        frozenset(needs), score, critic, micro_rows, slots, settings.compute_dtype, policy.mesh, hindsight
    )


@dataclass(frozen=True, eq=False)
class _TrajectoryScorer:
    needs: frozenset[str]
    score: Score
    critic: ValueModel | None
    micro_rows: int
    slots: int | None
    compute_dtype: DTypeLike | None
    mesh: DeviceMesh
    hindsight: bool

    def __call__(self, params: Params, reference_params: Params, trajectories: Trajectories) -> Trajectories:
        if "logp_ref" in self.needs and self.hindsight:
            trajectories = trajectories.replace(logp_ref=self.score_in_hindsight(reference_params, trajectories))
            return replace(self, needs=self.needs - {"logp_ref"})(params, reference_params, trajectories)
        zeros_nt = jnp.zeros(trajectories.turns.shape, jnp.float32)
        rows = rows_by_trajectory(trajectories, zeros_nt, zeros_nt)
        batch = jax.tree.map(lambda x_rs: x_rs[:, : self.slots], rows)
        length_n = (rows.segments > 0).sum(axis=1)
        too_long_n = length_n > batch.tokens.shape[1]
        shape = trajectories.tokens.shape

        def to_trajectories(x_rs: Array) -> Array:
            """Per-token numbers in the trajectories' slots -> x_ntl; NaN for a trajectory longer than its row."""
            return jnp.where(too_long_n[:, None, None], jnp.nan, unpack(x_rs, batch, shape))

        scores: dict[str, Array] = {}
        if "logp_ref" in self.needs:
            scores["logp_ref"] = to_trajectories(self.score_rows(self.score, actor_params(reference_params), batch))
        if "value" in self.needs:
            value_after_rs = self.score_rows(self.values, params, batch)
            scores["value"] = to_trajectories(values_before(value_after_rs, batch.segments))
            last_r = jnp.maximum(length_n - 1, 0)[:, None]
            last_value_n = jnp.take_along_axis(value_after_rs, last_r, axis=1, mode="clip")[:, 0]
            scores["last_value"] = jnp.where(too_long_n, jnp.nan, last_value_n)
        return trajectories.replace(**scores)

    def score_in_hindsight(self, reference_params: Params, trajectories: Trajectories) -> Array:
        """Log-probability of each token under the reference after the trajectory's hint -> logp_ntl."""
        hinted, size = with_hint(trajectories), hint_of(trajectories).shape[1]
        slots = None if self.slots is None else self.slots + size
        scorer = replace(self, slots=slots, needs=frozenset(("logp_ref",)), hindsight=False)
        logp_ntl = jnp.asarray(scorer(None, reference_params, hinted).logp_ref)
        first_nl = logp_ntl[:, 0, size:]
        return jnp.concatenate([first_nl[:, None], logp_ntl[:, 1:, :-size]], axis=1)

    def score_rows(self, score: Score, params: Params, batch: Batch) -> Array:
        """`logp` of a score for the rows that hold a chosen token, 0 in the others -> [r s]."""
        params = params if self.compute_dtype is None else cast(params, self.compute_dtype)
        chosen_r = jnp.asarray(batch.chosen & (batch.segments > 0)).any(axis=1)
        return score_rows(score, params, batch, chosen_r, self.micro_rows, self.mesh)

    def values(self, params: Params, batch: Batch) -> Scores:
        """The values after each token, in the field `logp`."""
        assert self.critic is not None
        return Scores(logp=self.critic.values(params, batch.tokens, batch.positions, batch.segments)[1])


def make_score_trees(
    policy: Policy,
    packing: Callable[..., Batch],
    *,
    temperature: float | Array = 1.0,
    banned: tuple[int, ...] = (),
    chunk: int = 1024,
    compute_dtype: DTypeLike | None = None,
) -> Callable[[Params, Trajectories], np.ndarray]:
    """`score(params, trajectories) -> logp_ntl` of all chosen tokens, on the host, one row of trees a micro-batch.

    `packing(trajectories, adv, weights)` makes the trees (`batching.make_packer`). A trajectory that it leaves out gets
    NaN, so that it can't pass for scored.
    """
    score = make_score(policy, temperature=temperature, banned=banned, chunk=chunk, compute_dtype=compute_dtype)
    # With several processes, each of them reads the whole result.
    multi_process = isinstance(policy.mesh, Mesh) and policy.mesh.is_multi_process
    score_trees = jax.jit(
        partial(score_batch, score, micro_rows=1, mesh=policy.mesh),
        out_shardings=replicated_sharding(policy.mesh) if multi_process else None,
    )

    def score_trajectories(params, trajectories: Trajectories) -> np.ndarray:
        trajectories = jax.device_get(trajectories)
        zeros_nt = np.zeros(trajectories.turns.shape, np.float32)
        batch = packing(trajectories, zeros_nt, zeros_nt + 1)
        logp_rs, real_rs = np.asarray(score_trees(params, batch)), np.asarray(batch.segments) > 0
        index = tuple(np.asarray(x_rs)[real_rs] for x_rs in (batch.trajectory, batch.turn, batch.slot))
        logp_ntl = np.where(trajectories.action_mask, np.nan, 0.0).astype(np.float32)
        logp_ntl[index] = logp_rs[real_rs]
        return logp_ntl

    return score_trajectories


def hint_of(trajectories: Trajectories) -> Array:
    """Hints of the trajectories -> hint_nq; raise `BadInput` if they have none."""
    if trajectories.hint is None:
        raise BadInput("Trajectories.hint is missing, and scoring in hindsight needs it: roll out with hints=True")
    return jnp.asarray(trajectories.hint)


def with_hint(trajectories: Trajectories) -> Trajectories:
    """The trajectories with their hint before the first turn; each turn has as many more slots."""
    hint_nq = hint_of(trajectories)
    size = hint_nq.shape[1]

    def widen(x_ntl: AnyArray) -> Array:
        """Add slots for the hint before the first turn, and as many after each other turn."""
        x_ntl = jnp.asarray(x_ntl)
        first_ntl = jnp.pad(x_ntl[:, :1], ((0, 0), (0, 0), (size, 0)))
        return jnp.concatenate([first_ntl, jnp.pad(x_ntl[:, 1:], ((0, 0), (0, 0), (0, size)))], axis=1)

    length_nt, _ = resolve_lengths(trajectories)
    wide = {name: widen(getattr(trajectories, name)) for name in ("tokens", "chosen", "logp_sampled", "version")}
    wide["tokens"] = wide["tokens"].at[:, 0, :size].set(hint_nq)
    length_nt = jnp.asarray(length_nt).at[:, 0].add(size)
    return trajectories.replace(**wide, length=length_nt, logp_old=None, logp_ref=None, value=None, hint=None)
