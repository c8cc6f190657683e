"""Update a learner's state on a batch, in mini-batches and micro-batches.

    for each epoch, for each mini-batch m of M:   params <- optimizer(params,  grad  M * sum over tokens of m)

The algorithm's loss is a weighted sum over tokens whose weights were computed over the whole batch, so
micro-batches add up to the mini-batch (F3). A mini-batch's sum is multiplied by M and by nothing else: a token
weighs the same whatever its company, and the mean of the M gradients is the gradient of the batch. M counts the
mini-batches that hold a live token; an empty one takes no step. Tokens are scored by the function that scored them
when they were sampled, at the same temperature (F7).

Mini-batch m is the m-th block of rows. It must hold whole trajectories (whole groups for preference
pairs), which `check_mini_batches` looks at on the host: the plain layouts keep them together, and `pack` does with
`ranks` equal to the number of mini-batches wherever contexts append.

Gradient and optimizer are of the part of the parameters that is trained (`trained`), and the rest comes out as it went
in. What is kept in float32 may be scored in another type: each scoring casts the parameters first, and the gradient is
that of the float32 values. Only rows that are wanted are visited, in as many micro-batches as they fill; their number
is data and not shape, so that batches of any fill share one program. A row may bring a tree of its contexts, and is
then still a row: nothing here looks into it but the score. `make_update` makes an update, `make_score` the
function that scores a batch, and `score_batch` applies one in micro-batches. Everything here is pure.
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

from flowgrpo import masked
from flowgrpo.contracts import Algorithm, Metrics, Policy, Scores
from flowgrpo.generate.sampler import logprobs
from flowgrpo.learner.diagnostics import (
    WATCH,
    DiagnosticsSettings,
    batch_signal,
    metrics_of_sums,
    observe,
    sampler_sums,
)
from flowgrpo.learner.loss_scale import SMALLEST, ScaledMemory, adjust_scale
from flowgrpo.learner.state import LearnerState
from flowgrpo.models.trainable import WHOLE, Trained, cast
from flowgrpo.parallel.row_sharding import DeviceMesh, lay, map_rows, row_devices, sum_rows
from flowgrpo.report.health import make_sampler_warning
from flowgrpo.types import BadInput, Batch, check_range

Score = Callable[[Any, Batch], Scores]  # (params, batch) -> what they say of it


class Visit(NamedTuple):
    """Choose the rows to visit, `size` at a time (i counts the slots of all micro-batches)."""

    row_i: Array  # the wanted ones first
    wanted: Array  # how many they are
    size: int

    @property
    def trips(self) -> Array:
        """Say how many micro-batches hold a wanted row."""
        return (self.wanted + self.size - 1) // self.size


def visit(wanted_r: Array, size: int) -> Visit:
    """The wanted rows, in their order, in micro-batches of at most `size`."""
    size = min(size, len(wanted_r))
    row_r = jnp.argsort(~wanted_r, stable=True)
    return Visit(jnp.pad(row_r, (0, -len(row_r) % size)), wanted_r.sum(dtype=jnp.int32), size)


def accumulate(
    function: Callable[[Any, Batch], tuple], shared, batch: Batch, wanted_r: Array, size: int, mesh: DeviceMesh = None
) -> tuple:
    """`function(shared, micro-batch)` over the wanted rows: it gives (what is summed, what the largest is kept of).

    Each device of a mesh takes `size` rows at a time.
    """
    return sum_rows(partial(_accumulate, function, size * row_devices(mesh), mesh), mesh, shared, batch, wanted_r)


def _accumulate(function, size: int, mesh: DeviceMesh, shared, batch: Batch, wanted_r: Array) -> tuple:
    rows = visit(wanted_r, size)
    if rows.size == len(rows.row_i):  # then no second gradient is held, of what was added up so far
        return function(shared, lay(_take(batch, rows, 0)[0], mesh))
    sums, largest = jax.eval_shape(function, shared, _take(batch, rows, 0)[0])
    start = (
        jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums),
        jax.tree.map(lambda x: jnp.full(x.shape, -jnp.inf, x.dtype), largest),
    )

    def add(index, carry):
        more, other = function(shared, lay(_take(batch, rows, index)[0], mesh))
        return jax.tree.map(jnp.add, carry[0], more), jax.tree.map(jnp.maximum, carry[1], other)

    return jax.lax.fori_loop(0, rows.trips, add, start)


def score_rows(score: Score, params, batch: Batch, wanted_r: Array, size: int, mesh: DeviceMesh = None) -> Array:
    """Log-probabilities of the wanted rows, 0 in the others; no gradient -> logp_rs."""
    return map_rows(partial(_score_rows, score, size * row_devices(mesh), mesh), mesh, params, (batch, wanted_r))


def _score_rows(score: Score, size: int, mesh: DeviceMesh, params, pair: tuple[Batch, Array]) -> Array:
    batch, rows = pair[0], visit(pair[1], size)

    def fill(index, logp_rs):
        part, row_i = _take(batch, rows, index)
        logp_is = jax.lax.stop_gradient(score(params, lay(part, mesh)).logp).astype(jnp.float32)
        return logp_rs.at[row_i].set(logp_is, mode="drop")

    return jax.lax.fori_loop(0, rows.trips, fill, jnp.zeros(batch.tokens.shape, jnp.float32))


def _take(batch: Batch, rows: Visit, index) -> tuple[Batch, Array]:
    """Micro-batch number `index`, and where its rows stand; what only fills it up is padding, and stands outside."""
    row_i = jax.lax.dynamic_slice_in_dim(rows.row_i, index * rows.size, rows.size)
    real_i = index * rows.size + jnp.arange(rows.size) < rows.wanted
    part = jax.tree.map(lambda x_rs: jnp.asarray(x_rs)[row_i], batch)
    return _only(part, real_i), jnp.where(real_i, row_i, len(batch.tokens))


Update = Callable[..., tuple[LearnerState, Metrics]]  # (state, batch, ref_params=None) -> (state, metrics)


def make_update(
    policy: Policy,
    algorithm: Algorithm,
    optimizer: optax.GradientTransformation,
    *,
    temperature=1.0,
    banned: tuple[int, ...] = (),
    micro_rows: int = 16,
    epochs: int = 1,
    mini_batches: int = 1,
    rescore: bool | None = None,
    skip_no_signal: bool = False,
    chunk: int = 1024,
    score: Score | None = None,
    trained: Trained = WHOLE,
    compute_dtype: Any = None,
    watch: DiagnosticsSettings | None = WATCH,
) -> Update:
    """`update(state, batch, ref_params=None) -> (state, metrics)`, to be jitted or vmapped by its caller.

    `rescore` says whether `logp_old` is scored again before the first step; by default where the algorithm needs it.
    With `skip_no_signal` rows without an advantage are left out of gradient and metrics, where the algorithm says that
    this is exact (F8). `score` takes the place of the policy's `logprobs`, to add a critic's values. Where the policy
    has a mesh, each device works through its share of the rows. `trained` says which part of the parameters moves; the
    state is one of `init_learner` with the same, and `ref_params` are whole parameters. With a `compute_dtype` all
    parameters are cast to it for scoring, and only there, so rollouts are to sample from `cast(params, compute_dtype)`
    (F7); float16 wants an optimizer `with_loss_scale`. `watch` says what is told beside the algorithm's metrics, and
    whether a sampler that disagrees is warned of; `None` is nothing.
    """
    check_range("make_update", "temperature", temperature, 0.0, exclusive=True)
    whole = {"micro_rows": micro_rows, "epochs": epochs, "mini_batches": mini_batches, "chunk": chunk}
    for name, value in whole.items():
        check_range("make_update", name, value, 1, whole=True)
    if "value" in algorithm.needs and score is None:
        raise BadInput(f"make_update: {algorithm.name} needs a critic's values: pass a `score` that gives them")
    if score is None:
        score = make_score(policy, temperature=temperature, banned=banned, chunk=chunk, compute_dtype=compute_dtype)
    else:
        score = in_dtype(score, compute_dtype)
    return _Update(
        score=score,
        algorithm=algorithm,
        optimizer=optimizer,
        micro_rows=micro_rows,
        epochs=epochs,
        mini_batches=mini_batches,
        rescores="logp_old" in algorithm.needs if rescore is None else rescore,
        skips=skip_no_signal and algorithm.skips,
        mesh=policy.mesh,
        trained=trained,
        watch=watch,
        needs_scale=compute_dtype is not None and jnp.dtype(compute_dtype) == jnp.float16,
        warn=make_sampler_warning() if watch is not None and watch.warns else None,
    )


def make_score(
    policy: Policy, *, temperature=1.0, banned: tuple[int, ...] = (), chunk: int = 1024, compute_dtype: Any = None
) -> Score:
    """`logprobs` of the chosen tokens of a batch under the distribution that was sampled from, 0 at all others."""
    settings = {"temperature": temperature, "banned": banned, "chunk": chunk}
    if compute_dtype is not None and policy.settled is not None:
        policy, compute_dtype = policy.settled.in_dtype(compute_dtype), None

    def score(params, batch: Batch) -> Scores:
        rows = (batch.tokens, batch.positions, batch.segments)
        return logprobs(policy, params, *rows, tree=batch.tree, wanted=batch.chosen, **settings)

    return in_dtype(score, compute_dtype)


def in_dtype(score: Score, dtype: Any) -> Score:
    """Make a score cast its parameters to `dtype` first; None leaves them as they are."""
    return score if dtype is None else lambda params, batch: score(cast(params, dtype), batch)


def score_batch(score: Score, params, batch: Batch, *, micro_rows: int = 16, mesh: DeviceMesh = None) -> Array:
    """Log-probabilities of the rows that hold a chosen token, in micro-batches -> logp_rs."""
    return score_rows(score, params, batch, _own(batch).any(axis=1), micro_rows, mesh)


def score_reference(score: Score, ref_params, batch: Batch, *, micro_rows: int = 16, mesh: DeviceMesh = None) -> Batch:
    """The batch with `logp_ref`."""
    return batch.replace(logp_ref=score_batch(score, ref_params, batch, micro_rows=micro_rows, mesh=mesh))


def check_mini_batches(batch: Batch, mini_batches: int, *, by: str = "trajectory") -> None:
    """Raise `BadInput` where a trajectory (with `by="group"` a group) has tokens in two mini-batches; on the host."""
    own_rs, id_rs = np.asarray(_own(batch)), np.asarray(getattr(batch, by))
    block_rs = np.broadcast_to(np.asarray(_block(len(id_rs), mini_batches))[:, None], id_rs.shape)
    pairs = np.unique(np.stack([id_rs[own_rs], block_rs[own_rs]], axis=1), axis=0)
    ids, counts = np.unique(pairs[:, 0], return_counts=True)
    if (counts > 1).any():
        raise BadInput(
            f"{by} {ids[counts > 1][0]} has tokens in {counts.max()} of {mini_batches} mini-batches: "
            f"pack with ranks={mini_batches}, use a plain layout, or take one mini-batch"
        )


# The update -------------------------------------------------------------------------------------------


class Moved(NamedTuple):
    """The trained part of the parameters and the optimizer's memory, which a step changes."""

    part: Any  # of the parameters: what is trained
    memory: Any  # the optimizer's


@dataclass(frozen=True, eq=False)
class _Update:
    """How a batch is learned from; all static."""

    score: Score
    algorithm: Algorithm
    optimizer: optax.GradientTransformation
    micro_rows: int
    epochs: int
    mini_batches: int
    rescores: bool  # logp_old is scored before the first step
    skips: bool  # rows without an advantage are not visited
    mesh: DeviceMesh  # the devices over which rows are dealt
    trained: Trained  # which part of the parameters moves
    watch: DiagnosticsSettings | None  # what is told beside the algorithm's own metrics
    needs_scale: bool  # of the loss
    warn: Callable[[Any], None] | None  # of a sampler that disagrees

    def __call__(self, state: LearnerState, batch: Batch, ref_params=None) -> tuple[LearnerState, Metrics]:
        if self.needs_scale and not isinstance(state.optimizer, ScaledMemory):
            raise BadInput(
                "update: small gradients are lost in float16 without a loss scale: give init_learner and make_update "
                "learner.with_loss_scale(optimizer)"
            )
        batch = self.scored(state.params, batch, ref_params)
        block_r = _block(len(batch.tokens), self.mini_batches)
        live_m = jax.ops.segment_sum(batch.live.any(axis=1).astype(jnp.float32), block_r, self.mini_batches) > 0

        def take(moved: Moved, m: Array):
            return self.step(state, moved, _only(batch, block_r == m), masked.count(live_m))

        # Only what moves is carried, so that what is frozen stays where it lies.
        moved = Moved(self.trained.take(state.params), state.optimizer)
        order = jnp.tile(jnp.arange(self.mini_batches), self.epochs)
        (part, memory), (metrics, taken, skipped) = jax.lax.scan(take, moved, order)
        after = state.replace(
            params=self.trained.put(state.params, part),
            optimizer=memory,
            version=state.version + taken.any().astype(jnp.int32),
            skipped=state.skipped + skipped.sum(dtype=jnp.int32),
        )
        told = {} if self.watch is None else batch_signal(batch)
        figures = _summary(metrics, taken, skipped) | told | {"live_tokens": masked.count(batch.live)}
        if self.warn is not None and "sampler_kl" in figures and "correction" not in figures:
            jax.debug.callback(self.warn, figures["sampler_kl"])
        return after, figures

    def scored(self, params, batch: Batch, ref_params) -> Batch:
        """Add the log-probabilities that the algorithm needs, from before the first step."""
        sizes: dict[str, Any] = {"micro_rows": self.micro_rows, "mesh": self.mesh}
        if self.rescores:
            batch = batch.replace(logp_old=score_batch(self.score, params, batch, **sizes))
        if "logp_ref" in self.algorithm.needs and batch.logp_ref is None:
            if ref_params is None:
                needs = f"update: {self.algorithm.name} needs Batch.logp_ref"
                raise BadInput(f"{needs}: score the batch first, or pass ref_params")
            batch = score_reference(self.score, ref_params, batch, **sizes)
        return batch

    def step(self, state: LearnerState, moved: Moved, batch: Batch, scale: Array) -> tuple[Moved, tuple]:
        """One optimizer step on a mini-batch -> (moved, (metrics, taken, skipped)); `state` lends what is frozen."""
        params = self.trained.put(state.params, moved.part)
        # Rows that are not seen together can't sum over a sequence that they share.
        if self.algorithm.sums is not None and (len(batch.tokens) > self.micro_rows or self.mesh is not None):
            logp = score_batch(self.score, params, batch, micro_rows=self.micro_rows, mesh=self.mesh)
            batch = self.algorithm.sums(batch, logp)
        signal_rs = batch.live & (jnp.asarray(batch.advantage) != 0) if self.skips else batch.live
        lifted = moved.memory.scale if isinstance(moved.memory, ScaledMemory) else None
        given = (params, scale if lifted is None else scale * lifted, state.version)
        (grads, loss, sums), largest = accumulate(
            self.slopes, given, batch, signal_rs.any(axis=1), self.micro_rows, self.mesh
        )
        if lifted is not None:
            grads, loss = jax.tree.map(lambda x: x / lifted, (grads, loss))
        norm = optax.tree.norm(grads)
        live, finite = batch.live.any(), jnp.isfinite(loss) & jnp.isfinite(norm)
        taken = live & finite  # a zero gradient is a step too, for an optimizer with a memory
        skipped = live & ~finite
        moved = jax.lax.cond(taken, self.apply, lambda moved, _: moved, moved, grads)
        metrics = {"loss": loss, "grad_norm": norm, "sums": sums, "log_ratio_max": jnp.maximum(largest, 0.0)}
        if lifted is not None:
            moved, seen = _after_scaled(moved, taken, skipped, loss)
            metrics, skipped = metrics | {"scale": seen}, skipped & ~seen["overflows"]
        return moved, (metrics, taken, skipped)

    def slopes(self, shared: tuple[Any, Array, Array], batch: Batch) -> tuple:
        """((gradient of the part, loss, sums), largest log-ratio) of a micro-batch; the first three add up."""
        params, scale, version = shared

        def loss_of(part) -> tuple:
            scores = self.score(self.trained.put(params, part), batch)
            loss, metrics = self.algorithm.loss(scores, batch)
            seen = {"means": metrics}
            if self.watch is not None:
                seen = observe(self.watch, self.algorithm, scores, batch, metrics)
                seen |= {} if batch.version is None else {"sampler": sampler_sums(scores, batch, version)}
            log_ratio_rs = masked.fill(scores.logp, batch.live) - masked.fill(batch.logp_sampled, batch.live)
            return scale * loss, (seen, stop_gradient(jnp.abs(log_ratio_rs).max()))

        (loss, (sums, largest)), grads = jax.value_and_grad(loss_of, has_aux=True)(self.trained.take(params))
        return (jax.tree.map(lambda x: x.astype(jnp.float32), grads), loss, sums), largest

    def apply(self, moved: Moved, grads) -> Moved:
        """Let the optimizer move the trained part."""
        grads = jax.tree.map(lambda x, param: x.astype(param.dtype), grads, moved.part)
        with jax.numpy_dtype_promotion("standard"):  # which optax is written for
            updates, memory = self.optimizer.update(grads, moved.memory, moved.part)
        return Moved(optax.apply_updates(moved.part, updates), memory)


def _after_scaled(moved: Moved, taken: Array, skipped: Array, loss: Array) -> tuple[Moved, dict[str, Array]]:
    """Adjust the scale of the loss; a gradient that a smaller scale may still help is an overflow, and no failure."""
    overflows = skipped & jnp.isfinite(loss) & (moved.memory.scale > SMALLEST)
    memory = adjust_scale(moved.memory, taken, skipped)
    return moved._replace(memory=memory), {"overflows": overflows, "loss_scale": memory.scale}


OF_SCALES = {"overflows": masked.count, "loss_scale": lambda scale_m: scale_m[-1]}  # figures of scaled steps


def _block(num_rows: int, mini_batches: int) -> Array:
    """The mini-batch of each row -> block_r."""
    return jnp.arange(num_rows) * mini_batches // num_rows


def _only(batch: Batch, mine_r: Array) -> Batch:
    """The batch with padding in the place of all other rows."""
    return batch.replace(segments=jnp.where(mine_r[:, None], batch.segments, 0))


def _own(batch: Batch) -> Array:
    """Chosen tokens, whether they carry loss or not."""
    return jnp.asarray(batch.chosen) & (jnp.asarray(batch.segments) > 0)


def _summary(metrics: dict, taken: Array, skipped: Array) -> Metrics:
    """The figures of the steps that were taken; those of the sampler are before the first step, the scale the last."""
    scaled = {name: of(metrics["scale"][name]) for name, of in OF_SCALES.items()} if "scale" in metrics else {}
    sums = jax.tree.map(lambda x_m: masked.sum(x_m, taken.reshape(-1, *(1,) * (x_m.ndim - 1)), axis=0), metrics)
    count = jnp.maximum(masked.count(taken), 1.0)
    first = jax.tree.map(lambda x_m: x_m[0], metrics["sums"].get("sampler"))
    seen = {} if first is None else {"sampler_kl": first["kl"] / jnp.maximum(first["tokens"], 1.0)}
    return (
        metrics_of_sums(sums["sums"])
        | seen
        | {
            "loss": sums["loss"] / count,
            "grad_norm": sums["grad_norm"] / count,
            "log_ratio_max": metrics["log_ratio_max"][0],
            "steps": masked.count(taken),
            "skipped": masked.count(skipped),
            **scaled,
        }
    )
