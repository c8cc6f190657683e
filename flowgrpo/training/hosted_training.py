"""Training on a host environment: `HostedTrainable`, the stages of such a run for a `Session`.

The rollout of an `Iteration` is hosted: the engine gets the new weights, the trajectories of all groups run at once,
and the reference scores while the last of them are judged. The setting `offload` says where a stage keeps
the models that it does not use: "none" leaves them on the device; "host" and "disk" move them, and drop the engine's
cache after each rollout. An iteration that takes longer than `watch_seconds` reports what it waits for. The tasks of an
update follow from its number, and keys from `fold_in(seed, update)`, so a resumed run equals one that never stopped
(S1).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flowgrpo.evaluation.metrics import Evaluation, repetition
from flowgrpo.models.hf import Model
from flowgrpo.models.trainable import ALL_PARAMS
from flowgrpo.report.progress import Progress
from flowgrpo.rewards.combine import SECOND_CHECK
from flowgrpo.rollout.compiled import shuffled_rewards
from flowgrpo.rollout.effects import EffectLog
from flowgrpo.rollout.records import RecordedTrajectory, RolloutResult
from flowgrpo.training import language_model
from flowgrpo.training.checkpoints import Checkpoints
from flowgrpo.training.iteration import Iteration, RollOut, Rollout, RolloutCallbacks, RolloutShape, Staging
from flowgrpo.training.language_model import (
    ADVANTAGES,
    HostedConfig,
    HostedSetup,
    compile_engines,
    finalize_rollout,
    group_by_domain,
    record_effects,
    roll_out_tasks,
    to_arrays,
    with_outcome,
    write_advantages,
    write_trajectories,
)
from flowgrpo.training.session import (
    RolloutTrainable,
    Step,
    TestReport,
    Trainable,
    Validation,
    train_line,
    validation_of,
)
from flowgrpo.training.stages import Advantages, TrainState, make_update_stages
from flowgrpo.training.warm_start import WarmStart
from flowgrpo.types import BadInput, Metrics, Params, PyTree, Status, Task


def hosted_trainable(
    recipe: str, make: Callable[[HostedSetup, str], Trainable] | None = None
) -> Callable[[HostedSetup, Path | None], Trainable]:
    """`make_trainable(setup, folder)` of a recipe; engines are compiled first, unless the run is only read.

    `make` makes the stages from the parts and the recipe's name; None: a `HostedTrainable`.
    """

    def make_trainable(setup: HostedSetup, folder: Path | None) -> Trainable:
        setup = setup if folder is None else compile_engines(setup)
        return (make or HostedTrainable)(setup, recipe)

    return make_trainable


class HostedTrainable(RolloutTrainable):
    """Rollouts over one engine, judged while others are sampled; evaluations on tasks that training never sees.

    Answers of tools, other roles and rewards are recorded until a checkpoint covers them, so that a run which is killed
    in a rollout gets the same answers when it is resumed.
    """

    def __init__(self, setup: HostedSetup, recipe: str):
        journal = EffectLog(setup.folder / "journal", _last_checkpoint(setup.folder))
        progress = setup.progress or Progress(setup.config.run.updates)
        self.setup = setup._replace(
            call_tool=journal.wrap_tools(setup.call_tool),
            reward=None if setup.reward is None else journal.wrap_reward(setup.reward),
            journal=journal,
            progress=progress,
        )
        self.subset, self.extra_state = setup.planner.trainable, setup.task_sampler
        self.offloads_models = setup.config.devices.offload != "none"
        super().__init__(
            recipe,
            setup.config,
            updates=setup.config.run.updates,
            name=setup.name,
            algorithm=setup.algorithm.name,
            optimizer=setup.optimizer,
            key=run_key(setup),
            progress=progress,
        )

    def place(self, tree: PyTree) -> PyTree:
        return self.setup.planner.to_mesh(tree)

    def init_params(self) -> Params:
        return jax.tree.map(jnp.copy, self.setup.planner.params)

    def frozen_params(self) -> Params:
        return self.setup.planner.params

    def warm_start(self) -> WarmStart:
        return self.setup.warm_start(self.setup)

    @cached_property
    def iteration(self) -> Iteration:
        # An adapter's base is also the start's, so it is not donated; the rest of such a run is small.
        return make_hosted_iteration(self.setup, self.roll_out, donates=self.subset is ALL_PARAMS)

    def make_step(self) -> Step:
        return self.iteration

    def metrics_line(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        return train_line(metrics, tools=self.setup.env.tools)

    def validate(self, params: Params) -> Validation:
        return validation_of(language_model.validate(self.setup, eval_key(self.setup, "validation"), params))

    def test(self, params: Sequence[Params], versions: Sequence[int]) -> TestReport:
        return language_model.test(self.setup, eval_key(self.setup, "test"), params, versions)

    def roll_out(
        self,
        state: TrainState,
        callbacks: RolloutCallbacks,
        tasks: Sequence[Task] | None = None,
        samples: int | None = None,
    ) -> Rollout:
        """Roll out all groups of an update at once; or of these tasks, `samples` trajectories each.

        The engine's token counts depend on timing, so they are timings.
        """
        setup, engine, update = self.setup, self.setup.engine, int(state.update)
        lost, recomputed, prefilled = engine.lost, engine.recomputed.tokens, engine.prefilled
        engine.update_weights(setup.planner.to_engine(state.learner.params), int(state.learner.version))
        if setup.journal is not None:
            setup.journal.delete_before(_last_checkpoint(setup.folder))
        with record_effects(setup, "train", update + 1):
            result = roll_out_tasks(
                setup,
                setup.env,
                training_tasks(setup, update) if tasks is None else tasks,
                _rollout_and_control_keys(state.key, update)[0],
                samples=samples or setup.sizes.samples,
                on_all_sampled=lambda sampled: callbacks.on_all_sampled(to_arrays(setup, sampled)),
                on_start=callbacks.on_start,
            )
        if setup.progress is not None:
            setup.progress.step("learn", 0, 1)
        timings = {
            "judging_seconds": result.seconds["judging"],
            **{
                f"engine_{fate.name.lower()}": count - lost.fates.get(fate, 0)
                for fate, count in engine.lost.fates.items()
            },
            "engine_recomputed": engine.recomputed.tokens - recomputed,
            "prompt_tokens": engine.prefilled.prompt_tokens - prefilled.prompt_tokens,
            "prefilled_tokens": engine.prefilled.computed - prefilled.computed,
        }
        rollout = to_judged_rollout(setup, state, result, timings)
        if tasks is None and samples is None:
            return rollout
        count = len(rollout.records)
        shape = rollout_shape(setup)._replace(samples=samples or setup.sizes.samples, trajectories=count)
        return rollout._replace(shape=shape)

    def evaluate(self, params: Params, tasks: Sequence[Task] | None = None, samples: int = 1) -> Evaluation:
        setup, key = self.setup, eval_key(self.setup, "validation")
        if tasks is None:
            tasks = setup.tasks("validation", 0, setup.config.evaluation.validation_tasks)
        setup.engine.update_weights(setup.planner.to_engine(params), 0)
        result = roll_out_tasks(setup, setup.eval_env, tasks, key, samples=samples, stage="evaluation")
        ks = sorted({1, samples})
        return language_model.evaluate_trajectories(result.trajectories, setup.env.tools, samples=samples, ks=ks)

    def to_model(self, params: Params) -> Model:
        model, lora = self.setup.model, self.setup.planner.lora
        if lora is None:
            return model._replace(params=params)
        return model.with_adapter(lora, params.adapter)


def run_key(setup: HostedSetup) -> jax.Array:
    """The key of training, from which each update's keys are derived."""
    return jax.random.split(jax.random.key(setup.config.run.seed), 3)[0]


def eval_key(setup: HostedSetup, split: str) -> jax.Array:
    """The key of the evaluations on a split."""
    return jax.random.split(jax.random.key(setup.config.run.seed), 3)[("run", "validation", "test").index(split)]


# Training -----------------------------------------------------------------------------------------------


def make_hosted_iteration(setup: HostedSetup, roll_out: RollOut, *, donates: bool = False) -> Iteration:
    """The iteration of a run, whose trajectories come from `roll_out`.

    With `donates` the update overwrites parameters and optimizer state of the state that it is given.
    """
    sizes, config, planner, algorithm = setup.sizes, setup.config, setup.planner, setup.algorithm
    stages = make_update_stages(
        planner.policy,
        algorithm,
        setup.optimizer,
        sizes,
        banned=setup.model.banned,
        trainable=planner.trainable,
        slots=config.rollout.context_tokens,
    )
    staging = Staging(
        offloader=setup.offloader,
        release=setup.engine.release,  # its cache is useless under new weights
        scores_ahead=True,
        donates=donates,
        watch_seconds=config.run.watch_seconds,
    )
    return Iteration(roll_out, stages, rollout_shape(setup), staging)


def rollout_shape(setup: HostedSetup) -> RolloutShape:
    """Sizes of the rollout of an update."""
    sizes, config = setup.sizes, setup.config
    return RolloutShape(
        tools=len(setup.env.tools),
        samples=sizes.samples,
        trajectories=sizes.queries * sizes.oversample * sizes.samples,
        max_trajectory_tokens=config.rollout.context_tokens,
        turns=1 if config.rollout.rendering == "append" else setup.env.max_turns,
    )


def training_tasks(setup: HostedSetup, update: int) -> list[Task]:
    """The tasks of an update, one for each group."""
    if setup.task_sampler is not None:
        return setup.task_sampler.tasks(update)
    count = setup.sizes.queries * setup.sizes.oversample
    return setup.tasks("train", update * count, count)


def to_judged_rollout(
    setup: HostedSetup, state: TrainState, result: RolloutResult, timings: Mapping[str, Any] = {}
) -> Rollout:
    """An update's rollout as arrays, with metrics by domain; the first groups are written to trajectories/."""
    update, trajectories = int(state.update), finalize_rollout(result).trajectories  # in the order of the arrays
    check_prompts_fit(setup.config, update, trajectories)
    if update == 0:
        setup.check_first_rollout(trajectories)
    rollout, judged = to_arrays(setup, result), with_outcome(trajectories)
    if setup.config.run.control == "shuffled_rewards":
        control_key = _rollout_and_control_keys(state.key, update)[1]
        rollout = jax.device_get(shuffled_rewards(rollout, control_key, samples=setup.sizes.samples))

    recorded = [i for i, trajectory in enumerate(trajectories) if trajectory.group < setup.config.run.recorded_groups]
    path = setup.folder / "trajectories" / f"{update + 1:06d}.jsonl"
    write_trajectories(path, [trajectories[i] for i in recorded])

    def on_advantages(advantages: Advantages) -> None:
        rows = np.asarray(advantages.adv)[np.array(recorded, int)]
        write_advantages(path.with_suffix(ADVANTAGES), [trajectories[i] for i in recorded], rows)

    metrics: Metrics = {
        f"success_{name}": float(np.mean([trajectory.correct for trajectory in domain]))
        for name, domain in group_by_domain(judged).items()
    }
    metrics |= repetition(judged) | second_check_metrics(judged) | setup.rollout_metrics(judged)
    metrics |= {f"tokens_{fate.name.lower()}": count for fate, count in result.ledger.fates.items()}
    if setup.task_sampler is None:
        metrics |= setup.task_metrics(update)
    else:
        metrics |= setup.task_sampler.record_results(update, trajectories)
    return Rollout(rollout, trajectories, metrics, timings, on_advantages)


def check_prompts_fit(config: HostedConfig, update: int, trajectories: Sequence[RecordedTrajectory]) -> None:
    """Raise `BadInput` if no prompt of an update leaves room for an action: there is nothing to learn from."""
    if trajectories and all(
        trajectory.status == Status.TOKEN_LIMIT and not trajectory.turns for trajectory in trajectories
    ):
        raise BadInput(
            f"--context_tokens={config.rollout.context_tokens} holds none of the prompts of update {update + 1} with "
            f"an action of --max_tokens={config.rollout.max_tokens}: raise it, or lower --max_tokens"
        )


def second_check_metrics(trajectories: Sequence[RecordedTrajectory]) -> dict[str, float]:
    """Mean of a held-out second check, and the gap between reward and check, where both exist; {} if none has both."""
    pairs = [
        (trajectory.reward_result.parts[SECOND_CHECK], trajectory.outcome)
        for trajectory in trajectories
        if trajectory.reward_result is not None and SECOND_CHECK in trajectory.reward_result.parts
    ]
    if not pairs:
        return {}
    check_n, outcome_n = np.array(pairs).T
    return {SECOND_CHECK: float(check_n.mean()), "gap": float((outcome_n - check_n).mean())}


def _rollout_and_control_keys(key: jax.Array, update: int) -> jax.Array:
    """Two keys of an update: its trajectories sample from the first, a control experiment from the second."""
    return jax.random.split(jax.random.fold_in(key, update))


def group_keys(key: jax.Array, update: int, index: int, *, groups: int, samples: int) -> jax.Array:
    """The keys of one group of an update, equal to those in a rollout of all groups."""
    keys = jax.random.split(_rollout_and_control_keys(key, update)[0], groups * samples)
    return keys[index * samples : (index + 1) * samples]


def _last_checkpoint(folder: Path) -> int:
    """The update from whose checkpoint a run in this folder would resume; 0 if there is none."""
    return Checkpoints(folder).latest() or 0
