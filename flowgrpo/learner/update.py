"""The update: state and a batch flow in, the state after some optimizer steps and metrics flow out.

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
that of the float32 values. Everything here is pure, and nothing of the old state is needed afterwards, so that the
caller may donate it.
"""

from collections.abc import Callable
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
from flowgrpo.learner.micro import Score, accumulate, score_rows
from flowgrpo.learner.state import LearnerState
from flowgrpo.learner.trained import WHOLE, Trained
from flowgrpo.learner.watch import WATCH, Watch, batch_signal, observe, report
from flowgrpo.spread import Spread
from flowgrpo.types import BadInput, Batch, check_range

Update = Callable[..., tuple[LearnerState, Metrics]]  # (state, batch, ref_params=None) -> (state, metrics)


class Plan(NamedTuple):
    """How a batch is worked through; all static."""

    micro_rows: int
    epochs: int
    mini_batches: int
    rescores: bool  # logp_old is scored before the first step
    skips: bool  # rows without an advantage are not visited
    mesh: Spread  # the devices over which rows are dealt
    trained: Trained  # which part of the parameters moves
    watch: Watch | None  # what is told beside the algorithm's own metrics


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
    mesh: Spread = None,
    trained: Trained = WHOLE,
    compute_dtype: Any = None,
    watch: Watch | None = WATCH,
) -> Update:
    """`update(state, batch, ref_params=None) -> (state, metrics)`, to be jitted or vmapped by its caller.

    `rescore` says whether `logp_old` is scored anew before the first step; by default where the algorithm needs it.
    With `skip_no_signal` rows without an advantage are left out of gradient and metrics, where the algorithm says that
    this is exact (F8). `score` takes the place of the policy's `logprobs`, to add a critic's values. Over a `mesh` each
    device works through its share of the rows. `trained` says which part of the parameters moves; the state is one of
    `init_learner` with the same, and `ref_params` are whole parameters. With a `compute_dtype` all parameters are cast
    to it for scoring, and only there, so rollouts are to sample from `cast(params, compute_dtype)` (F7). `watch` says
    what is told beside the algorithm's metrics; `None` is nothing.
    """
    check_range("make_update", "temperature", temperature, 0.0, exclusive=True)
    whole = {"micro_rows": micro_rows, "epochs": epochs, "mini_batches": mini_batches, "chunk": chunk}
    for name, value in whole.items():
        check_range("make_update", name, value, 1, whole=True)
    if "value" in algorithm.needs and score is None:
        raise BadInput(f"make_update: {algorithm.name} needs a critic's values: pass a `score` that gives them")
    if score is None:
        score = make_score(policy, temperature=temperature, banned=banned, chunk=chunk)
    score = in_dtype(score, compute_dtype)
    rescores = "logp_old" in algorithm.needs if rescore is None else rescore
    skips = skip_no_signal and algorithm.skips
    plan = Plan(micro_rows, epochs, mini_batches, rescores, skips, mesh, trained, watch)
    return partial(_update, score=score, algorithm=algorithm, optimizer=optimizer, plan=plan)


def make_score(
    policy: Policy, *, temperature=1.0, banned: tuple[int, ...] = (), chunk: int = 1024, compute_dtype: Any = None
) -> Score:
    """`logprobs` of a batch under the distribution that was sampled from."""
    return in_dtype(partial(_score, policy=policy, temperature=temperature, banned=banned, chunk=chunk), compute_dtype)


def in_dtype(score: Score, dtype: Any) -> Score:
    """Make a score cast its parameters to `dtype` first; None leaves them as they are."""
    return score if dtype is None else partial(_score_in, score=score, dtype=dtype)


def _score(params, batch: Batch, *, policy: Policy, **settings) -> Scores:
    return logprobs(policy, params, batch.tokens, batch.positions, batch.segments, **settings)


def _score_in(params, batch: Batch, *, score: Score, dtype) -> Scores:
    return score(cast(params, dtype), batch)


def cast(params, dtype):
    """The parameters in another type of number, to compute with; gradients flow back in their own."""
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, params)


def score_batch(score: Score, params, batch: Batch, *, micro_rows: int = 16, mesh: Spread = None) -> Array:
    """Log-probabilities of the rows that hold a chosen token, in micro-batches -> logp_rs."""
    return score_rows(score, params, batch, _own(batch).any(axis=1), micro_rows, mesh)


def score_reference(score: Score, ref_params, batch: Batch, *, micro_rows: int = 16, mesh: Spread = None) -> Batch:
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


# The whole --------------------------------------------------------------------------------------------


def _update(state: LearnerState, batch: Batch, ref_params=None, *, score, algorithm, optimizer, plan):
    batch = _scored(state.params, batch, ref_params, score, algorithm, plan)
    block_r = _block(len(batch.tokens), plan.mini_batches)
    live_m = jax.ops.segment_sum(batch.live.any(axis=1).astype(jnp.float32), block_r, plan.mini_batches) > 0
    step = partial(_step, state.params, score=score, algorithm=algorithm, optimizer=optimizer, plan=plan)

    def take(moved, m):
        return step(moved, _only(batch, block_r == m), masked.count(live_m))

    # Only what moves is carried, so that what is frozen stays where it lies.
    moved = Moved(plan.trained.take(state.params), state.optimizer)
    order = jnp.tile(jnp.arange(plan.mini_batches), plan.epochs)
    (part, memory), (metrics, taken, skipped) = jax.lax.scan(take, moved, order)
    after = state.replace(
        params=plan.trained.put(state.params, part),
        optimizer=memory,
        version=state.version + taken.any().astype(jnp.int32),
        skipped=state.skipped + skipped.sum(dtype=jnp.int32),
    )
    told = {} if plan.watch is None else batch_signal(batch)
    return after, _summary(metrics, taken, skipped) | told | {"live_tokens": masked.count(batch.live)}


def _scored(params, batch: Batch, ref_params, score: Score, algorithm: Algorithm, plan: Plan) -> Batch:
    """The batch with the log-probabilities that its algorithm needs, from before the first step."""
    if plan.rescores:
        logp_old = score_batch(score, params, batch, micro_rows=plan.micro_rows, mesh=plan.mesh)
        batch = batch.replace(logp_old=logp_old)
    if "logp_ref" in algorithm.needs and batch.logp_ref is None:
        if ref_params is None:
            raise BadInput(f"update: {algorithm.name} needs Batch.logp_ref: score the batch first, or pass ref_params")
        batch = score_reference(score, ref_params, batch, micro_rows=plan.micro_rows, mesh=plan.mesh)
    return batch


def _block(num_rows: int, mini_batches: int) -> Array:
    """The mini-batch of each row -> block_r."""
    return jnp.arange(num_rows) * mini_batches // num_rows


def _only(batch: Batch, mine_r: Array) -> Batch:
    """The batch with padding in the place of all other rows."""
    return batch.replace(segments=jnp.where(mine_r[:, None], batch.segments, 0))


def _own(batch: Batch) -> Array:
    """Chosen tokens, whether they carry loss or not."""
    return jnp.asarray(batch.chosen) & (jnp.asarray(batch.segments) > 0)


# One step ---------------------------------------------------------------------------------------------


class Moved(NamedTuple):
    """The trained part of the parameters and the optimizer's memory, which a step changes."""

    part: Any  # of the parameters: what is trained
    memory: Any  # the optimizer's


def _step(params, moved: Moved, batch: Batch, scale: Array, *, score, algorithm, optimizer, plan: Plan):
    """One optimizer step on a mini-batch -> (moved, (metrics, taken, skipped)); `params` lend what is frozen."""
    params = plan.trained.put(params, moved.part)
    # Rows that are not seen together can't sum over a sequence that they share.
    if algorithm.sums is not None and (len(batch.tokens) > plan.micro_rows or plan.mesh is not None):
        logp = score_batch(score, params, batch, micro_rows=plan.micro_rows, mesh=plan.mesh)
        batch = algorithm.sums(batch, logp)
    signal_rs = batch.live & (jnp.asarray(batch.advantage) != 0) if plan.skips else batch.live
    slopes = partial(_slopes, score=score, algorithm=algorithm, plan=plan)
    (grads, loss, sums), largest = accumulate(
        slopes, (params, scale), batch, signal_rs.any(axis=1), plan.micro_rows, plan.mesh
    )
    norm = optax.tree.norm(grads)
    live, finite = batch.live.any(), jnp.isfinite(loss) & jnp.isfinite(norm)
    taken = live & finite  # a zero gradient is a step too, for an optimizer with a memory
    moved = jax.lax.cond(taken, partial(_apply, optimizer), _keep, moved, grads)
    metrics = {"loss": loss, "grad_norm": norm, "sums": sums, "log_ratio_max": jnp.maximum(largest, 0.0)}
    return moved, (metrics, taken, live & ~finite)


def _slopes(shared: tuple[Any, Array], batch: Batch, *, score: Score, algorithm: Algorithm, plan: Plan) -> tuple:
    """((gradient of the part, loss, sums), largest log-ratio) of a micro-batch; the first three add up."""
    params, scale = shared
    loss = partial(_loss, params=params, batch=batch, scale=scale, score=score, algorithm=algorithm, plan=plan)
    (loss, (sums, largest)), grads = jax.value_and_grad(loss, has_aux=True)(plan.trained.take(params))
    return (jax.tree.map(lambda x: x.astype(jnp.float32), grads), loss, sums), largest


def _loss(part, *, params, batch: Batch, scale: Array, score: Score, algorithm: Algorithm, plan: Plan) -> tuple:
    scores = score(plan.trained.put(params, part), batch)
    loss, metrics = algorithm.loss(scores, batch)
    seen = {"means": metrics} if plan.watch is None else observe(plan.watch, algorithm, scores, batch, metrics)
    log_ratio_rs = masked.fill(scores.logp, batch.live) - masked.fill(batch.logp_sampled, batch.live)
    return scale * loss, (seen, stop_gradient(jnp.abs(log_ratio_rs).max()))


def _apply(optimizer: optax.GradientTransformation, moved: Moved, grads) -> Moved:
    grads = jax.tree.map(lambda x, param: x.astype(param.dtype), grads, moved.part)
    with jax.numpy_dtype_promotion("standard"):  # which optax is written for
        updates, memory = optimizer.update(grads, moved.memory, moved.part)
    return Moved(optax.apply_updates(moved.part, updates), memory)


def _keep(moved: Moved, _grads) -> Moved:
    return moved


def _summary(metrics: dict, taken: Array, skipped: Array) -> Metrics:
    """The figures of the steps that were taken; the log-ratio is that before the first step."""
    sums = jax.tree.map(partial(_over_steps, taken_m=taken), metrics)
    count = jnp.maximum(masked.count(taken), 1.0)
    return report(sums["sums"]) | {
        "loss": sums["loss"] / count,
        "grad_norm": sums["grad_norm"] / count,
        "log_ratio_max": metrics["log_ratio_max"][0],
        "steps": masked.count(taken),
        "skipped": masked.count(skipped),
    }


def _over_steps(x_m: Array, taken_m: Array) -> Array:
    return masked.sum(x_m, taken_m.reshape(-1, *(1,) * (x_m.ndim - 1)), axis=0)
