"""A training loop of one's own: `Trainer` gives rollout, advantages and update as three calls.

    model = fg.load_model("path/or/hub-id", lora=16)
    trainer = fg.Trainer(model, env=fg.single_turn(reward=exact), algorithm=fg.flow_grpo(), optimizer=fg.adamw(1e-5))
    for tasks in fg.batches(train, 16):
        rollout = trainer.rollout(tasks, samples=8)
        metrics = trainer.update(rollout, trainer.advantages(rollout))
    trainer.model.save("out")

These are the stages of the runs of `train`: the same iteration, over the parts of the same recipe.
"""

import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import jax
import numpy as np
import optax

from flowgrpo.api.choice import Environment, RewardFunction, Subject, TaskSource
from flowgrpo.api.settings import Settings, choose_run
from flowgrpo.contracts import Algorithm, Tool
from flowgrpo.data.task_files import to_tasks
from flowgrpo.evaluation.metrics import Evaluation
from flowgrpo.gateway.agent_start import ExternalAgent
from flowgrpo.models.config import DecoderConfig
from flowgrpo.models.hf import Model
from flowgrpo.models.lora import LoraConfig
from flowgrpo.report.health import make_sampler_warning
from flowgrpo.training.checkpoints import Checkpoints
from flowgrpo.training.config import flat_settings
from flowgrpo.training.iteration import Rollout, to_numbers
from flowgrpo.training.language_model import check_outcomes
from flowgrpo.training.session import RolloutTrainable, initial_state, with_frozen, without_frozen
from flowgrpo.training.stages import Advantages, TrainState
from flowgrpo.training.warm_start import warm_start
from flowgrpo.types import BadInput, Params, PyTree


class Trainer:
    """Rollout, advantages and update over any environment and model; `state` is the train state.

    Args:
        model: a language model, as `load_model` takes or returns it; of a pure environment the `DecoderConfig` of a
            small one, by default one that fits.
        env: an `fg.Env` or its name, an `fg.TextEnv` class, an `fg.HostEnv`, a function (tokenizer) -> `fg.HostEnv`, or
            KIND:SPEC of an external one; see `train`.
        agent: instead of an environment, a command, or a function of a task and a base URL.
        algorithm: an `fg.Algorithm`, or its name.
        optimizer: an optax transformation with its learning rate, or a name.
        reward: judges outputs: an `fg.Reward`, a function (task, output) -> `fg.RewardResult`, or its MODULE:NAME.
        tools: functions with types and a docstring, or `Tool`s, of the agent system, for tasks without an environment.
        lora: trains an adapter of this rank, or with these settings; by default all parameters.
        tasks: from which `rollout` takes tasks if it is given none.
        folder: for what the rollouts write; by default a temporary one.
        settings: of the recipe by name, such as seed, max_tokens, context_tokens, temperature, slots, mesh, offload.
            Sizes that are not given follow from environment, model and devices.
    """

    def __init__(
        self,
        model: str | Path | Model | DecoderConfig | None = None,
        *,
        env: Environment | None = None,
        agent: ExternalAgent | None = None,
        algorithm: str | Algorithm = "flow_grpo",
        optimizer: str | optax.GradientTransformation | None = None,
        reward: RewardFunction | None = None,
        tools: Sequence[Tool | Callable[..., Any]] | None = None,
        lora: int | LoraConfig | None = None,
        tasks: TaskSource | None = None,
        folder: str | Path | None = None,
        **settings: Unpack[Settings],
    ):
        subject = Subject(
            env=env,
            tasks=tasks,
            agent=agent,
            model=model,
            algorithm=algorithm,
            optimizer=optimizer,
            reward=reward,
            tools=tools,
            lora=lora,
        )
        self._choice = choose_run(subject, settings, needs_tasks=False)
        recipe, config, objects = self._choice
        with ExitStack() as stack:
            path = Path(stack.enter_context(tempfile.TemporaryDirectory()) if folder is None else folder)
            parts = stack.enter_context(recipe.build(config, path, objects=objects))
            trainable = recipe.make_trainable(parts, path)
            self._close = weakref.finalize(self, stack.pop_all().close)
        assert isinstance(trainable, RolloutTrainable)  # as are those of all recipes that `choose` chooses
        self._trainable, self._iteration = trainable, trainable.iteration
        self._warn_of_sampler = make_sampler_warning()
        self._has_tasks = tasks is not None or recipe.name == "pure"
        self._has_outcomes = False  # a reward or environment that fails each time is refused at the first rollout
        params = self._trainable.prepare_params(self._trainable.init_params())
        self.state: TrainState = initial_state(self._trainable, params)

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close engine, environment and agents; also done when the trainer is garbage."""
        self._close()

    def warm_start(self, on_validation: Callable[[int, float], object] | None = None) -> None:
        """Start from an imitation of demonstrations, as runs of `train` on a pure environment do.

        Without it an untrained policy solves nothing, and has no signal to learn from. Settings: warm_steps, warm_rate,
        warm_rows.

        Args:
            on_validation: called with (step, loss) at each validation.
        """
        if self.updates:
            raise BadInput(f"a warm start comes before the first update, and {self.updates} are done")
        with tempfile.TemporaryDirectory() as folder:
            params = warm_start(self._trainable.warm_start(), Path(folder), on_validation or (lambda *_: None))
        self.state = initial_state(self._trainable, self._trainable.prepare_params(params))

    # One update -------------------------------------------------------------------------------------------

    def rollout(self, tasks: TaskSource | PyTree | int | None = None, samples: int | None = None) -> Rollout:
        """Sample `samples` trajectories of each task with the current parameters, and judge them.

        Args:
            tasks: a batch of tasks, as of `batches`; of a pure environment so many fresh ones, or a pytree of them.
                None: those that come next in the trainer's own order.
            samples: trajectories of each task, the group size; None: the setting.
        """
        roll_out = partial(self._trainable.roll_out, tasks=self._to_tasks(tasks), samples=samples)
        rollout = self._iteration.rollout(self.state, roll_out)
        if rollout.records and not self._has_outcomes:
            check_outcomes(rollout.records)
            self._has_outcomes = True
        return rollout

    def advantages(self, rollout: Rollout) -> Advantages:
        """The advantages of the algorithm, and the weights of all tokens, on the host."""
        return self._iteration.advantages(rollout)

    def update(self, rollout: Rollout, advantages: Advantages | np.ndarray | jax.Array) -> dict[str, Any]:
        """Take the gradient steps of a rollout -> metrics, as plain numbers.

        It warns once if the sampler's probabilities are not the learner's, as they must be under the same weights.

        Args:
            rollout: of the current parameters.
            advantages: those of `advantages`, or numbers of your own: one for each trajectory, turn or token.
        """
        if not isinstance(advantages, Advantages):
            own = np.asarray(advantages, np.float32)
            turns_nt = np.asarray(rollout.trajectories.turns)
            if own.shape == turns_nt.shape[:1]:
                own = np.broadcast_to(own[:, None], turns_nt.shape)
            if own.shape not in (turns_nt.shape, rollout.trajectories.tokens.shape):
                raise BadInput(
                    f"advantages have the shape {own.shape}: give one for each of {len(turns_nt)} trajectories, of "
                    f"their {turns_nt.shape[1]} turns, or of their tokens"
                )
            advantages = self.advantages(rollout)._replace(adv=own)
        self.state, metrics = self._iteration.update(self.state, rollout, advantages)
        numbers = {"update": self.updates, **to_numbers(metrics)}
        if "correction" not in numbers:
            self._warn_of_sampler(numbers.get("sampler_kl", 0.0))
        return numbers

    def step(self) -> dict[str, Any]:
        """One update on the tasks that come next: rollout, advantages, update -> its metrics."""
        rollout = self.rollout()
        return self.update(rollout, self.advantages(rollout))

    # Evaluation and parameters ----------------------------------------------------------------------------

    def evaluate(self, tasks: TaskSource | PyTree | int | None = None, samples: int = 1) -> Evaluation:
        """Success, tool errors and turns of the current parameters; `pass@samples` if there are several samples.

        Args:
            tasks: those that are rolled out; None: the validation tasks, of a pure environment fresh ones.
            samples: trajectories of each task.
        """
        return self._trainable.evaluate(self.params, self._to_tasks(tasks), samples)

    def _to_tasks(self, tasks: Any) -> Any:
        """Tasks as the recipe takes them."""
        if tasks is None and not self._has_tasks:
            raise BadInput("there are no tasks to roll out: pass some, as of fg.batches, or give the trainer tasks=")
        if tasks is None or self._choice.recipe.name == "pure":
            return tasks
        return to_tasks(tasks, any_fields=True).items

    @property
    def updates(self) -> int:
        """Number of updates done, which is also the number of the next batch of a loop that resumes."""
        return int(self.state.update)

    @property
    def params(self) -> Params:
        """The current parameters."""
        return self.state.learner.params

    @property
    def model(self) -> Model:
        """The model with the current parameters; `model.save(folder)` writes it."""
        return self._trainable.to_model(self.params)

    # Checkpoints ------------------------------------------------------------------------------------------

    def save(self, folder: str | Path, **extra: PyTree) -> None:
        """Write a checkpoint of the train state, and of `extra` trees by name, into a folder; atomic."""
        tree = {"run": without_frozen(self._trainable, self.state), "extra": extra}
        with Checkpoints(folder, keep=2) as checkpoints:
            checkpoints.save(self.updates, tree, {"settings": self._choice.config.to_json()})

    def restore(self, folder: str | Path) -> Mapping[str, PyTree] | None:
        """Restore the newest checkpoint of a folder, bit for bit -> its extra trees; None if there is no checkpoint."""
        checkpoints = Checkpoints(folder)
        update = checkpoints.latest()
        if update is None:
            return None
        saved, own = checkpoints.metadata(update).get("settings"), self._choice.config.to_json()
        if saved != own:
            one, other = flat_settings(saved or {}), flat_settings(own)
            names = ", ".join(sorted(name for name in one | other if one.get(name, ...) != other.get(name, ...)))
            raise BadInput(f"{folder} has checkpoints of a trainer with other settings ({names}): give another folder")
        template = jax.eval_shape(partial(without_frozen, self._trainable), self.state)
        saved = checkpoints.restore(update, {"run": template, "extra": ...})
        self.state = with_frozen(self._trainable, saved["run"])
        return saved["extra"]
