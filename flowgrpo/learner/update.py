"""The update: from a batch of packed rows to the next learner state, in mini-batches and micro-batches.

    for each epoch, for each mini-batch m of M:   params <- optimizer(params,  grad  M * sum over tokens of m)

The algorithm's loss is a weighted sum over tokens whose weights were computed over the whole batch, so
micro-batches add up to the mini-batch (F3). A mini-batch's sum is multiplied by M and by nothing else: a token
weighs the same whatever its company, and the mean of the M gradients is the gradient of the batch. M counts the
mini-batches that hold a token with loss; an empty one takes no step. Tokens are scored by the function that scored them
when they were sampled, at the same temperature (F7).

Mini-batch m is the m-th block of rows. It must hold whole trajectories (whole groups for preference
pairs), which `check_mini_batches` verifies on the host: the plain layouts keep them together, and `pack` does with
`ranks` equal to the number of mini-batches wherever contexts are extended.

Gradient and optimizer state cover the `trainable` part of the parameters; the rest is frozen. Parameters kept in
float32 may be scored in another dtype: each scoring casts them first, and the gradient is that of the float32 values.
Only rows that carry loss are visited, in as many micro-batches as they fill; their number is data and not shape, so
batches of any fill share one program. A row may bring a prefix tree of its contexts; only the score looks into it.

Entry points, all pure: `make_update` builds an update, `make_score` the function that scores a batch, and `score_batch`
applies a score in micro-batches.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.lax import stop_gradient
from jax.typing import DTypeLike

from flowgrpo import masked
from flowgrpo.contracts import Algorithm, Policy, Scores
from flowgrpo.generate.sampler import logprobs
from flowgrpo.learner.diagnostics import (
    DEFAULT_DIAGNOSTICS,
    DiagnosticsSettings,
    batch_signal,
    metrics_of_sums,
    observe,
    sampler_sums,
)
from flowgrpo.learner.loss_scale import SMALLEST, ScaledState, adjust_scale
from flowgrpo.learner.state import LearnerState
from flowgrpo.models.trainable import ALL_PARAMS, TrainableSubset, cast
from flowgrpo.parallel.row_sharding import DeviceMesh, map_rows, row_devices, shard_rows, sum_rows
from flowgrpo.report.health import make_sampler_warning
from flowgrpo.types import BadInput, Batch, Metrics, Params, PyTree, check_range

Score = Callable[[Params, Batch], Scores]
Update = Callable[..., tuple[LearnerState, Metrics]]  # (state, batch, ref_params=None) -> (state, metrics)


@dataclass(frozen=True, kw_only=True)
class ScoreSettings:
    """How tokens are scored: as they were sampled (F7).

    Args:
        temperature: sampling temperature; may be traced.
        banned: token ids that the sampler can't choose; they are masked when scoring, too.
        chunk: tokens whose logits are in memory at once.
        compute_dtype: dtype to which all parameters are cast for scoring, and only there, so sample from
            `cast(params, compute_dtype)`. None: no cast.
    """

    temperature: float | Array = 1.0
    banned: tuple[int, ...] = ()
    chunk: int = 1024
    compute_dtype: DTypeLike | None = None


@dataclass(frozen=True, kw_only=True)
class UpdateSettings(ScoreSettings):
    """How a batch becomes optimizer steps. With `compute_dtype` float16 the optimizer must be `with_loss_scale`.

    Args:
        micro_rows: rows per micro-batch (per device of a mesh); bounds the memory of activations.
        epochs: passes over the batch.
        mini_batches: optimizer steps per epoch.
        rescore: whether `logp_old` is scored again before the first step; None: if the algorithm needs it.
        skip_no_signal: leave rows without an advantage out of gradient and metrics, if this is exact for the
            algorithm (F8, `Algorithm.skips_zero_advantage`).
        diagnostics: metrics besides those of the algorithm, and the warning about a sampler that disagrees; or None.
    """

    micro_rows: int = 16
    epochs: int = 1
    mini_batches: int = 1
    rescore: bool | None = None
    skip_no_signal: bool = False
    diagnostics: DiagnosticsSettings | None = DEFAULT_DIAGNOSTICS

    def __post_init__(self) -> None:
        check_range("UpdateSettings", "temperature", self.temperature, 0.0, exclusive=True)
        for name in ("micro_rows", "epochs", "mini_batches", "chunk"):
            check_range("UpdateSettings", name, getattr(self, name), 1, whole=True)


def make_update(
    policy: Policy,
    algorithm: Algorithm,
    optimizer: optax.GradientTransformation,
    settings: UpdateSettings = UpdateSettings(),
    *,
    score: Score | None = None,
    trainable: TrainableSubset = ALL_PARAMS,
) -> Update:
    """`update(state, batch, ref_params=None) -> (state, metrics)`, to be jitted or vmapped by its caller.

    Args:
        policy: the model; if it has a mesh, rows are sharded over its devices.
        algorithm: loss, and what must be scored for it.
        optimizer: of the trainable part.
        settings: an `UpdateSettings`.
        score: replaces the policy's `logprobs`, to add a critic's values (`critic.make_value_score`).
        trainable: the part of the parameters that moves; `init_learner` must have been given the same. `ref_params`
            are whole parameters.
    """
    if "value" in algorithm.needs and score is None:
        raise BadInput(f"make_update: {algorithm.name} needs a critic's values: pass a `score` that gives them")
    if score is None:
        score = make_score(
            policy,
            temperature=settings.temperature,
            banned=settings.banned,
            chunk=settings.chunk,
            compute_dtype=settings.compute_dtype,
        )
    else:
        score = in_dtype(score, settings.compute_dtype)
    warns = settings.diagnostics is not None and settings.diagnostics.warns
    return _Update(
        score=score,
        algorithm=algorithm,
        optimizer=optimizer,
        settings=settings,
        mesh=policy.mesh,
        trainable=trainable,
        warn=make_sampler_warning() if warns else None,
    )


class Trained(NamedTuple):
    """What an optimizer step changes."""

    part: Params  # the trainable part of the parameters
    optimizer_state: PyTree


@dataclass(frozen=True, eq=False)
class _Update:
    """`update(state, batch, ref_params)`; all fields are static."""

    score: Score
    algorithm: Algorithm
    optimizer: optax.GradientTransformation
    settings: UpdateSettings
    mesh: DeviceMesh
    trainable: TrainableSubset
    warn: Callable[[Any], None] | None  # about a sampler that disagrees with the learner

    def __call__(self, state: LearnerState, batch: Batch, ref_params: Params = None) -> tuple[LearnerState, Metrics]:
        """Score what the algorithm needs, then take one step per mini-batch and epoch."""
        algorithm, mini_batches = self.algorithm, self.settings.mini_batches
        dtype = self.settings.compute_dtype
        if dtype is not None and jnp.dtype(dtype) == jnp.float16 and not isinstance(state.optimizer, ScaledState):
            raise BadInput(
                "update: small gradients are lost in float16 without a loss scale: give init_learner and make_update "
                "learner.with_loss_scale(optimizer)"
            )
        rescore = self.settings.rescore
        if "logp_old" in algorithm.needs if rescore is None else rescore:
            batch = batch.replace(logp_old=self._score_batch(state.params, batch))
        if "logp_ref" in algorithm.needs and batch.logp_ref is None:
            if ref_params is None:
                raise BadInput(
                    f"update: {algorithm.name} needs Batch.logp_ref: score the batch first, or pass ref_params"
                )
            batch = score_reference(self.score, ref_params, batch, micro_rows=self.settings.micro_rows, mesh=self.mesh)

        block_r = mini_batch_of_rows(len(batch.tokens), mini_batches)
        live_m = jax.ops.segment_sum(batch.loss_mask.any(axis=1).astype(jnp.float32), block_r, mini_batches) > 0

        def step(trained: Trained, m: Array):
            return self.step(state, trained, keep_rows(batch, block_r == m), masked.count(live_m))

        # The carry holds the trainable part alone, so that frozen parameters are not copied.
        trained = Trained(self.trainable.split(state.params), state.optimizer)
        order = jnp.tile(jnp.arange(mini_batches), self.settings.epochs)
        trained, (metrics, taken, skipped) = jax.lax.scan(step, trained, order)
        new_state = state.replace(
            params=self.trainable.merge(state.params, trained.part),
            optimizer=trained.optimizer_state,
            version=state.version + taken.any().astype(jnp.int32),
            skipped=state.skipped + skipped.sum(dtype=jnp.int32),
        )
        signal = {} if self.settings.diagnostics is None else batch_signal(batch)
        metrics = _update_metrics(metrics, taken, skipped) | signal | {"live_tokens": masked.count(batch.loss_mask)}
        if self.warn is not None and "sampler_kl" in metrics and "correction" not in metrics:
            jax.debug.callback(self.warn, metrics["sampler_kl"])
        return new_state, metrics

    def step(self, state: LearnerState, trained: Trained, batch: Batch, scale: Array) -> tuple[Trained, tuple]:
        """One optimizer step on a mini-batch -> (trained, (metrics, taken, skipped)); `state` has what is frozen."""
        micro_rows = self.settings.micro_rows
        params = self.trainable.merge(state.params, trained.part)
        # Rows of different micro-batches can't sum over a sequence that they share.
        if self.algorithm.sequence_sums is not None and (len(batch.tokens) > micro_rows or self.mesh is not None):
            batch = self.algorithm.sequence_sums(batch, self._score_batch(params, batch))
        skips = self.settings.skip_no_signal and self.algorithm.skips_zero_advantage
        signal_rs = batch.loss_mask & (jnp.asarray(batch.advantage) != 0) if skips else batch.loss_mask
        optimizer_state = trained.optimizer_state
        loss_scale = optimizer_state.scale if isinstance(optimizer_state, ScaledState) else None
        shared = (params, scale if loss_scale is None else scale * loss_scale, state.version)
        (grads, loss, sums), largest = accumulate(
            self.gradient, shared, batch, signal_rs.any(axis=1), micro_rows, self.mesh
        )
        if loss_scale is not None:
            grads, loss = jax.tree.map(lambda x: x / loss_scale, (grads, loss))
        norm = optax.tree.norm(grads)
        live, finite = batch.loss_mask.any(), jnp.isfinite(loss) & jnp.isfinite(norm)
        taken = live & finite  # a zero gradient is a step too, for an optimizer with a memory
        skipped = live & ~finite
        trained = jax.lax.cond(taken, self.apply, lambda trained, _: trained, trained, grads)
        metrics = {"loss": loss, "grad_norm": norm, "sums": sums, "log_ratio_max": jnp.maximum(largest, 0.0)}
        if loss_scale is not None:
            # A gradient that a smaller scale may still save is an overflow, not a failed step.
            overflows = skipped & jnp.isfinite(loss) & (trained.optimizer_state.scale > SMALLEST)
            scaled = adjust_scale(trained.optimizer_state, taken, skipped)
            trained = trained._replace(optimizer_state=scaled)
            metrics["scale"] = {"overflows": overflows, "loss_scale": scaled.scale}
            skipped &= ~overflows
        return trained, (metrics, taken, skipped)

    def gradient(self, shared: tuple[Params, Array, Array], batch: Batch) -> tuple:
        """((gradient of the trainable part, loss, metric sums), largest log-ratio) of a micro-batch.

        Of several micro-batches the first three add up.
        """
        params, scale, version = shared

        def loss_of(part: Params) -> tuple:
            scores = self.score(self.trainable.merge(params, part), batch)
            loss, metrics = self.algorithm.loss(scores, batch)
            sums = {"means": metrics}
            if self.settings.diagnostics is not None:
                sums = observe(self.settings.diagnostics, self.algorithm, scores, batch, metrics)
                sums |= {} if batch.version is None else {"sampler": sampler_sums(scores, batch, version)}
            log_ratio_rs = masked.fill(scores.logp, batch.loss_mask) - masked.fill(batch.logp_sampled, batch.loss_mask)
            return scale * loss, (sums, stop_gradient(jnp.abs(log_ratio_rs).max()))

        (loss, (sums, largest)), grads = jax.value_and_grad(loss_of, has_aux=True)(self.trainable.split(params))
        return (jax.tree.map(lambda x: x.astype(jnp.float32), grads), loss, sums), largest

    def apply(self, trained: Trained, grads: PyTree) -> Trained:
        """Apply the optimizer to the trainable part."""
        grads = jax.tree.map(lambda x, param: x.astype(param.dtype), grads, trained.part)
        with jax.numpy_dtype_promotion("standard"):  # which optax is written for
            updates, optimizer_state = self.optimizer.update(grads, trained.optimizer_state, trained.part)
        return Trained(optax.apply_updates(trained.part, updates), optimizer_state)

    def _score_batch(self, params: Params, batch: Batch) -> Array:
        return score_batch(self.score, params, batch, micro_rows=self.settings.micro_rows, mesh=self.mesh)


def _update_metrics(metrics: dict, taken: Array, skipped: Array) -> Metrics:
    """Metrics of the steps taken; those of the sampler are from before the first step, the loss scale from the last."""
    scaled = {}
    if "scale" in metrics:
        scaled = {
            "overflows": masked.count(metrics["scale"]["overflows"]),
            "loss_scale": metrics["scale"]["loss_scale"][-1],
        }
    sums = jax.tree.map(lambda x_m: masked.sum(x_m, taken.reshape(-1, *(1,) * (x_m.ndim - 1)), axis=0), metrics)
    count = jnp.maximum(masked.count(taken), 1.0)
    first = jax.tree.map(lambda x_m: x_m[0], metrics["sums"].get("sampler"))
    sampler = {} if first is None else {"sampler_kl": first["kl"] / jnp.maximum(first["tokens"], 1.0)}
    return (
        metrics_of_sums(sums["sums"])
        | sampler
        | {
            "loss": sums["loss"] / count,
            "grad_norm": sums["grad_norm"] / count,
            "log_ratio_max": metrics["log_ratio_max"][0],
            "steps": masked.count(taken),
            "skipped": masked.count(skipped),
            **scaled,
        }
    )


# Micro-batches ----------------------------------------------------------------------------------------


class MicroBatches(NamedTuple):
    """The wanted rows of a batch, `size` at a time (i counts the slots of all micro-batches)."""

    row_i: Array  # row indices, the wanted ones first
    num_wanted: Array
    size: int

    @property
    def count(self) -> Array:
        """Number of micro-batches that hold a wanted row."""
        return (self.num_wanted + self.size - 1) // self.size


def split_rows(wanted_r: Array, size: int) -> MicroBatches:
    """The wanted rows, in their order, in micro-batches of at most `size`."""
    size = min(size, len(wanted_r))
    row_r = jnp.argsort(~wanted_r, stable=True)
    return MicroBatches(jnp.pad(row_r, (0, -len(row_r) % size)), wanted_r.sum(dtype=jnp.int32), size)


def take_micro_batch(batch: Batch, rows: MicroBatches, index) -> tuple[Batch, Array]:
    """Micro-batch number `index`, and the row of each of its slots; slots beyond the wanted rows hold padding, and
    their row is past the end."""
    row_i = jax.lax.dynamic_slice_in_dim(rows.row_i, index * rows.size, rows.size)
    real_i = index * rows.size + jnp.arange(rows.size) < rows.num_wanted
    part = jax.tree.map(lambda x_rs: jnp.asarray(x_rs)[row_i], batch)
    return keep_rows(part, real_i), jnp.where(real_i, row_i, len(batch.tokens))


def accumulate(
    function: Callable[[PyTree, Batch], tuple],
    shared: PyTree,
    batch: Batch,
    wanted_r: Array,
    size: int,
    mesh: DeviceMesh = None,
) -> tuple:
    """`function(shared, micro-batch)` over the wanted rows; it returns (what is summed, what is maximised).

    Each device of a mesh takes `size` rows at a time.
    """
    return sum_rows(partial(_accumulate, function, size * row_devices(mesh), mesh), mesh, shared, batch, wanted_r)


def _accumulate(function, size: int, mesh: DeviceMesh, shared, batch: Batch, wanted_r: Array) -> tuple:
    rows = split_rows(wanted_r, size)
    if rows.size == len(rows.row_i):  # one micro-batch: no second gradient is held as accumulator
        return function(shared, shard_rows(take_micro_batch(batch, rows, 0)[0], mesh))
    sums, largest = jax.eval_shape(function, shared, take_micro_batch(batch, rows, 0)[0])
    start = (
        jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums),
        jax.tree.map(lambda x: jnp.full(x.shape, -jnp.inf, x.dtype), largest),
    )

    def add(index, carry):
        sums, largest = function(shared, shard_rows(take_micro_batch(batch, rows, index)[0], mesh))
        return jax.tree.map(jnp.add, carry[0], sums), jax.tree.map(jnp.maximum, carry[1], largest)

    return jax.lax.fori_loop(0, rows.count, add, start)


def keep_rows(batch: Batch, mask_r: Array) -> Batch:
    """The batch with padding in place of all rows outside the mask."""
    return batch.replace(segments=jnp.where(mask_r[:, None], batch.segments, 0))


def mini_batch_of_rows(num_rows: int, mini_batches: int) -> Array:
    """The mini-batch of each row -> block_r."""
    return jnp.arange(num_rows) * mini_batches // num_rows


def check_mini_batches(batch: Batch, mini_batches: int, *, by: str = "trajectory") -> None:
    """Raise `BadInput` if a trajectory (with `by="group"` a group) has tokens in two mini-batches; on the host."""
    chosen_rs, id_rs = np.asarray(_chosen(batch)), np.asarray(getattr(batch, by))
    block_rs = np.broadcast_to(np.asarray(mini_batch_of_rows(len(id_rs), mini_batches))[:, None], id_rs.shape)
    pairs = np.unique(np.stack([id_rs[chosen_rs], block_rs[chosen_rs]], axis=1), axis=0)
    ids, counts = np.unique(pairs[:, 0], return_counts=True)
    if (counts > 1).any():
        raise BadInput(
            f"{by} {ids[counts > 1][0]} has tokens in {counts.max()} of {mini_batches} mini-batches: "
            f"pack with ranks={mini_batches}, use a plain layout, or take one mini-batch"
        )


# Scores -----------------------------------------------------------------------------------------------


def make_score(
    policy: Policy,
    *,
    temperature: float | Array = 1.0,
    banned: tuple[int, ...] = (),
    chunk: int = 1024,
    compute_dtype: DTypeLike | None = None,
) -> Score:
    """`logprobs` of the chosen tokens of a batch under the distribution they were sampled from, 0 elsewhere."""
    if compute_dtype is not None and policy.sharded is not None:
        policy, compute_dtype = policy.sharded.in_dtype(compute_dtype), None

    def score(params: Params, batch: Batch) -> Scores:
        return logprobs(
            policy,
            params,
            batch.tokens,
            batch.positions,
            batch.segments,
            tree=batch.tree,
            wanted=batch.chosen,
            temperature=temperature,
            banned=banned,
            chunk=chunk,
        )

    return in_dtype(score, compute_dtype)


def in_dtype(score: Score, dtype: DTypeLike | None) -> Score:
    """A score that casts its parameters to `dtype` first; None leaves them as they are."""
    return score if dtype is None else lambda params, batch: score(cast(params, dtype), batch)


def score_batch(score: Score, params: Params, batch: Batch, *, micro_rows: int = 16, mesh: DeviceMesh = None) -> Array:
    """Log-probabilities of the rows that hold a chosen token, in micro-batches -> logp_rs."""
    return score_rows(score, params, batch, _chosen(batch).any(axis=1), micro_rows, mesh)


def score_reference(
    score: Score, ref_params: Params, batch: Batch, *, micro_rows: int = 16, mesh: DeviceMesh = None
) -> Batch:
    """The batch with `logp_ref`."""
    return batch.replace(logp_ref=score_batch(score, ref_params, batch, micro_rows=micro_rows, mesh=mesh))


def score_rows(
    score: Score, params: Params, batch: Batch, wanted_r: Array, size: int, mesh: DeviceMesh = None
) -> Array:
    """Log-probabilities of the wanted rows, 0 in the others; no gradient -> logp_rs."""
    return map_rows(partial(_score_rows, score, size * row_devices(mesh), mesh), mesh, params, (batch, wanted_r))


def _score_rows(score: Score, size: int, mesh: DeviceMesh, params, pair: tuple[Batch, Array]) -> Array:
    batch, rows = pair[0], split_rows(pair[1], size)

    def fill(index, logp_rs):
        part, row_i = take_micro_batch(batch, rows, index)
        logp_is = jax.lax.stop_gradient(score(params, shard_rows(part, mesh)).logp).astype(jnp.float32)
        return logp_rs.at[row_i].set(logp_is, mode="drop")

    return jax.lax.fori_loop(0, rows.count, fill, jnp.zeros(batch.tokens.shape, jnp.float32))


def _chosen(batch: Batch) -> Array:
    """Chosen tokens, whether they carry loss or not."""
    return jnp.asarray(batch.chosen) & (jnp.asarray(batch.segments) > 0)
