"""The stages of an update after its rollout, as pure functions: scoring, advantages, packing, gradient steps.

    scored = stages.score_trajectories(state, trajectories)     only what the advantages read
    advantages = stages.compute_advantages(scored)              with weights, and targets of a critic
    batch = pack(scored, advantages)                            `stages.packer` makes the packing
    state, metrics = stages.update(state, batch)

`make_update_stages` binds them to a policy, an algorithm and an optimizer. `iteration.Iteration` jits each of them, and
`pure_env.fused_step` makes them one program. Prefixes that contexts share are computed once, if policy and critic can
do that (`hidden_tree`). `make_scorer` scores the reference and the critic in a stage of its own, before packing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from jax.sharding import Mesh, NamedSharding

from flowgrpo.batching.prefix_tree import make_packer
from flowgrpo.contracts import Algorithm, Policy
from flowgrpo.learner.critic import ValueModel, explained_variance, make_value_score, without_critic
from flowgrpo.learner.diagnostics import DiagnosticsSettings
from flowgrpo.learner.scoring import make_score_trajectories, make_score_trees
from flowgrpo.learner.state import LearnerState, init_learner
from flowgrpo.learner.update import ScoreSettings, UpdateSettings, make_update
from flowgrpo.models.trainable import ALL_PARAMS, TrainableSubset, actor_params, cast
from flowgrpo.parallel.row_sharding import REPLICATED
from flowgrpo.types import BadInput, Batch, Metrics, Params, Trajectories, check_range, map_axis


@dataclass(frozen=True)
class IterationSettings:
    """Sizes of an iteration; an update learns from `queries * samples` trajectories.

    Args:
        queries: tasks per update.
        samples: trajectories per task, the group size.
        oversample: rolls out this many times `queries`; the update takes `queries` groups, those with a signal first.
        temperature: of sampling, and of scoring what was sampled.
        micro_rows: rows that are scored together; fewer take less memory and give the same numbers.
        mini_batches: parts of the batch, each with a gradient step of its own.
        epochs: passes over the batch.
        min_decode_batch: fewest rows in which the last actions of a turn are decoded; None: as many as its first.
        compute_dtype: dtype to which parameters are cast where they are used; None: their own. float16 needs an
            optimizer `with_loss_scale`.
    """

    queries: int = 32
    samples: int = 8
    oversample: int = 1
    temperature: float = 1.0
    micro_rows: int = 16
    mini_batches: int = 1
    epochs: int = 1
    min_decode_batch: int | None = None
    compute_dtype: Any = None

    def __post_init__(self):
        for name in ("queries", "samples", "oversample", "micro_rows", "mini_batches", "epochs", "min_decode_batch"):
            check_range(
                "IterationSettings", name, getattr(self, name), 1, whole=True, optional=name == "min_decode_batch"
            )
        check_range("IterationSettings", "temperature", self.temperature, 0.0, exclusive=True)


class TrainState(struct.PyTreeNode):
    """Everything that changes from update to update, and that a checkpoint stores under these names."""

    learner: LearnerState
    reference: Params  # trainable part of the KL reference; `trainable.merge(learner.params, reference)` is all of it
    key: Array  # of the run; only folded, never consumed
    update: Array  # number of updates done, from which tasks and keys follow


def init_train_state(
    params: Params, optimizer, key: Array, *, reference: Params = None, trainable: TrainableSubset = ALL_PARAMS
) -> TrainState:
    """The state before the first update; the reference is a copy of the initial policy by default."""
    if reference is None:
        reference = jax.tree.map(jnp.copy, without_critic(trainable.split(params)))
    return TrainState(init_learner(params, optimizer, trainable), reference, key, jnp.int32(0))


class Advantages(NamedTuple):
    """What an algorithm computes from the trajectories of an update."""

    adv: Array
    weights: Array
    target: Array | None = None  # of the critic, if the algorithm has one


# (params, reference params, trajectories) -> the fields that were scored
Scorer = Callable[[Params, Params, Trajectories], Mapping[str, Any]]


class UpdateStages(NamedTuple):
    """The stages of an update after its rollout; pure functions, to be jitted by the caller."""

    algorithm: Algorithm
    trainable: TrainableSubset  # the parameters that the optimizer changes
    score_trajectories: Callable[[TrainState, Trajectories], Trajectories]  # adds what the advantages read
    compute_advantages: Callable[[Trajectories], Advantages]
    update: Callable[
        [TrainState, Batch], tuple[TrainState, Metrics]
    ]  # the caller replaces the reference when it is due
    packer: Callable[..., Callable[..., Batch]]  # `make_packer` with the settings of the update
    make_scorer: Callable[[Callable[..., Batch]], Scorer | None]  # packing -> `make_scorer` with these settings


def make_update_stages(
    policy: Policy,
    algorithm: Algorithm,
    optimizer,
    settings: IterationSettings,
    *,
    banned: tuple[int, ...],
    critic: ValueModel | None = None,
    trainable: TrainableSubset = ALL_PARAMS,
    slots: int | None = None,
) -> UpdateStages:
    """Make the stages after a rollout: scoring, advantages and update.

    Args:
        banned: tokens that the policy cannot sample.
        critic: value function, of algorithms with targets.
        trainable: subset of the parameters that the optimizer changes.
        slots: number of tokens of the longest trajectory; None: as many as the arrays hold.
    """
    if algorithm.targets is not None and critic is None:
        raise BadInput(f"{algorithm.name} needs a critic: pass one as critic=, such as critic.separate_network(...)")
    if algorithm.minibatch_unit == "group" and settings.mini_batches > 1:
        raise BadInput(f"{algorithm.name} needs its groups whole, and packing parts them: set mini_batches to 1")
    if "F4" in algorithm.laws and settings.samples == 1:
        raise BadInput(
            f"{algorithm.name} learns nothing from groups of one: IterationSettings.samples is 1, set it to 2 or more"
        )
    critic = None if algorithm.targets is None else critic
    update_settings = UpdateSettings(
        temperature=settings.temperature,
        banned=banned,
        micro_rows=settings.micro_rows,
        mini_batches=settings.mini_batches,
        epochs=settings.epochs,
        compute_dtype=settings.compute_dtype,
        diagnostics=DiagnosticsSettings(warns=False),  # `train_loop` warns, and a run does in warnings.jsonl
    )

    # What is scored before the advantages is scored once, for them and for the loss.
    scored_fields = algorithm.needs & {"logp_ref", "value"} if algorithm.needs_for_advantages else frozenset()
    scorer = None
    if scored_fields:
        scorer = make_score_trajectories(
            policy,
            needs=scored_fields,
            critic=critic,
            settings=update_settings,
            micro_rows=settings.micro_rows,
            slots=slots,
            hindsight=algorithm.hindsight,
        )
    value_score = None
    if critic is not None:
        value_score = make_value_score(policy, critic, temperature=settings.temperature, banned=banned)
    make_learner = partial(make_update, policy, algorithm, optimizer, score=value_score, trainable=trainable)
    learn_rows = make_learner(update_settings)
    learn_trees = make_learner(replace(update_settings, micro_rows=1))  # a tree is as long as a micro-batch

    def score_trajectories(state: TrainState, trajectories: Trajectories) -> Trajectories:
        if scorer is None:
            return trajectories
        params = state.learner.params
        return scorer(params, trainable.merge(params, state.reference), trajectories)

    def compute_advantages(trajectories: Trajectories) -> Advantages:
        adv = algorithm.advantages(trajectories)
        if settings.oversample > 1:  # keep at most `queries` groups, those with a signal first
            signal_n = (adv != 0).reshape(len(adv), -1).any(axis=1).reshape(-1, settings.samples).any(axis=1)
            rank_g = jnp.argsort(jnp.argsort(~signal_n, stable=True))
            taken_n = jnp.repeat(rank_g < settings.queries, settings.samples)
            # A trajectory without turns takes no part in statistics or loss.
            trajectories = trajectories.replace(turns=trajectories.turns & taken_n[:, None])
            adv = algorithm.advantages(trajectories)
        target = None if algorithm.targets is None else algorithm.targets(trajectories)
        return Advantages(adv, algorithm.weights(trajectories), target)

    def update(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        learn = learn_rows if batch.tree is None else learn_trees
        learner, metrics = learn(state.learner, batch, trainable.merge(state.learner.params, state.reference))
        return state.replace(learner=learner, update=state.update + 1), metrics | explained_variance(batch)

    packer = partial(
        make_packer, shares_prefixes(policy, critic), micro_rows=settings.micro_rows, ranks=settings.mini_batches
    )
    scorer_of = partial(make_scorer, policy, algorithm, settings, banned=banned, critic=critic, slots=slots)
    return UpdateStages(algorithm, trainable, score_trajectories, compute_advantages, update, packer, scorer_of)


def shares_prefixes(policy: Policy, critic: ValueModel | None = None) -> bool:
    """Whether rows that are packed on the host are trees, which policy and critic must both be able to read."""
    return policy.hidden_tree is not None and (critic is None or critic.reads_trees)


def rollout_params(params: Params, compute_dtype: Any) -> Params:
    """The actor's parameters in the dtype in which the update scores them, for rollouts to sample from (F7)."""
    return actor_params(params) if compute_dtype is None else cast(actor_params(params), compute_dtype)


# Scoring before packing -------------------------------------------------------------------------------


def make_scorer(
    policy: Policy,
    algorithm: Algorithm,
    settings: IterationSettings,
    packing: Callable[..., Batch],
    *,
    banned: tuple[int, ...],
    critic: ValueModel | None = None,
    slots: int | None = None,
) -> Scorer | None:
    """Scoring by reference and critic in a stage of its own, before packing; None if the algorithm needs neither.

    The update then reads no reference, which may be off the device meanwhile. The parameters are those of scoring
    within the update, to float tolerance.

    Args:
        packing: makes the batch of a reference that is scored alone, if that shares the prefixes of contexts.
        banned: tokens that the policy cannot sample.
        critic: value function, of algorithms with targets.
        slots: number of tokens of the longest trajectory.
    """
    needs = algorithm.needs & {"logp_ref", "value"}
    if not needs:
        return None
    scoring: dict[str, Any] = {
        "temperature": settings.temperature,
        "banned": banned,
        "compute_dtype": settings.compute_dtype,
    }
    if shares_prefixes(policy) and needs == {"logp_ref"}:
        score_trees = make_score_trees(policy, packing, **scoring)
        return lambda _params, reference, trajectories: {"logp_ref": score_trees(actor_params(reference), trajectories)}
    score_trajectories = make_score_trajectories(
        policy,
        needs=needs,
        critic=critic,
        settings=ScoreSettings(**scoring),
        micro_rows=settings.micro_rows,
        slots=slots,
    )
    # If there are several processes, each of them reads all results.
    mesh = policy.mesh
    replicated = NamedSharding(mesh, REPLICATED) if isinstance(mesh, Mesh) and mesh.is_multi_process else None
    score = jax.jit(
        partial(score_fields, score_trajectories=score_trajectories),
        static_argnames="by_turn",
        out_shardings=replicated,
    )
    return lambda params, reference, trajectories: score(
        params, reference, trajectories, by_turn=has_fresh_contexts(trajectories)
    )


def score_fields(params, reference, trajectories: Trajectories, *, score_trajectories, by_turn: bool) -> dict:
    """Score trajectories by reference and critic -> the fields that were scored.

    With `by_turn`, every turn is a row of its own: each of its contexts is rendered afresh, and none extends another.
    """
    turns_nt = jnp.asarray(trajectories.turns)
    scored = score_trajectories(params, reference, split_turns(trajectories) if by_turn else trajectories)
    scores = {"logp_ref": scored.logp_ref, "value": scored.value}
    fields = {name: x.reshape(trajectories.tokens.shape) for name, x in scores.items() if x is not None}
    if scored.last_value is None:
        return fields
    last_value_n = scored.last_value
    if by_turn:
        last_n = jnp.max(jnp.where(turns_nt, jnp.arange(turns_nt.shape[1])[None, :], 0), axis=1)
        last_value_n = jnp.take_along_axis(last_value_n.reshape(turns_nt.shape), last_n[:, None], axis=1)[:, 0]
    return fields | {"last_value": last_value_n}


def has_fresh_contexts(trajectories: Trajectories) -> bool:
    """Whether every turn of the valid trajectories has a context of its own, rendered afresh."""
    if trajectories.starts_context is None:
        return False
    extends_nt = np.asarray(trajectories.turns) & ~np.asarray(trajectories.starts_context)
    return not np.any(extends_nt[:, 1:].any(axis=1) & np.asarray(trajectories.valid))


def split_turns(trajectories: Trajectories) -> Trajectories:
    """Every turn as a trajectory of its own, all turns of the first before those of the second."""
    count, turns = trajectories.turns.shape
    split = map_axis(trajectories, "t", lambda x, _: jnp.asarray(x).reshape(count * turns, 1, *x.shape[2:]))
    return map_axis(
        split, "n", lambda x, _: x if len(x) == count * turns else jnp.repeat(jnp.asarray(x), turns, axis=0)
    )
