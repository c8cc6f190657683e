"""The recipe of learning from a file of conversations: demonstrations to imitate (SFT), or preferences (DPO).

result = RECIPE.train(preset("sft", data="demonstrations.jsonl", model="models/small"), "runs/sft")
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from flowgrpo.algorithms.dpo import dpo
from flowgrpo.batching.prefix_tree import tree_sizes
from flowgrpo.contracts import Algorithm
from flowgrpo.learner import conversations
from flowgrpo.learner.imitation import IMITATION, packed_imitation
from flowgrpo.learner.loss_scale import optimizer_for
from flowgrpo.learner.state import LearnerState, adamw
from flowgrpo.learner.update import UpdateSettings, make_score, make_update, score_batch
from flowgrpo.models.attention_kernels import get_kernel
from flowgrpo.models.decoder import make_policy
from flowgrpo.models.hf import Model, load_model, save_model
from flowgrpo.models.trainable import cast
from flowgrpo.recipes.finetune_config import Config, DataSection, preset
from flowgrpo.recipes.recipe import NO_OBJECTS, Objects, Recipe, plain_build
from flowgrpo.training.checkpoints import params_sha256
from flowgrpo.training.next_steps import closing_message, command, list_contents
from flowgrpo.training.session import Session, Step, Trainable, Validation
from flowgrpo.training.stages import TrainState
from flowgrpo.types import BadInput, Batch, Metrics, Params, Trajectory

NAME = "finetune"
STEP_METRICS = ("grad_norm", "skipped", "overflows", "loss_scale")  # of a step, if it has them


class ExampleSplit(NamedTuple):
    """The examples of a file."""

    train: Sequence[Any]
    held_out: Sequence[Any]
    num_too_long: int  # that are left out


class Objective(NamedTuple):
    """What is learned from examples, as functions."""

    collate: Callable[[Sequence[Any]], Batch]  # examples of a step -> their batch, always of one shape
    step: Callable[[LearnerState, Batch], tuple[LearnerState, Metrics]]
    evaluate: Callable[[Params], dict[str, float]]  # metrics on the held-out examples, the loss first


class Method(NamedTuple):
    """A way to learn from examples."""

    read: Callable[..., list]  # (path, tokenizer) -> examples
    collate: Callable[..., Batch]
    conversations: int  # of an example
    make_functions: Callable[..., tuple]  # (config, model, optimizer, held-out batches) -> (step, evaluate)


def split_examples(data: DataSection, examples: Sequence[Any], *, seed: int) -> ExampleSplit:
    """Split examples into training and held-out ones, by the seed; too long ones are left out."""
    max_tokens = data.max_tokens
    fitting = []
    for example in examples:
        both = (example,) if isinstance(example, Trajectory) else example
        if max(conversations.tokens_of(conversation) for conversation in both) <= max_tokens:
            fitting.append(example)
    count = max(round(data.held_out * len(fitting)), 1)
    if len(fitting) <= count:
        raise BadInput(
            f"{data.data} has {len(fitting)} examples of at most {max_tokens} tokens, {count} of them held out: "
            "raise --max_tokens, or give more"
        )
    order = np.random.default_rng(seed).permutation(len(fitting))
    held_out, train = ([fitting[i] for i in np.sort(indices)] for indices in (order[:count], order[count:]))
    return ExampleSplit(train, held_out, len(examples) - len(fitting))


def make_objective(config: Config, model: Model, held_out: Sequence[Any], optimizer) -> Objective:
    """The objective of the method, evaluated on the held-out examples."""
    method, size = METHODS[config.learner.method], config.learner.batch
    sizes = {"row_length": config.data.max_tokens, "rows": size * method.conversations}
    if shares := model.policy.hidden_tree is not None:
        sizes = tree_sizes(config.data.max_tokens, size * method.conversations, micro_rows=config.learner.micro_rows)
    collate = partial(method.collate, **sizes, use_trees=shares)
    batches = [collate(held_out[i : i + size]) for i in range(0, len(held_out), size)]
    return Objective(collate, *method.make_functions(config, model, optimizer, batches))


def _jit_update_and_score(config: Config, model: Model, algorithm: Algorithm, optimizer) -> tuple[Callable, Callable]:
    """The update by an algorithm, and the scoring of a batch; both compute in the type of the Config."""
    compute_dtype: Any = None if config.model.dtype == "float32" else config.model.dtype  # None: that of the parameters
    # A tree is as long as a micro-batch.
    micro_rows = config.learner.micro_rows if model.policy.hidden_tree is None else 1
    settings = UpdateSettings(micro_rows=micro_rows, compute_dtype=compute_dtype, diagnostics=None)
    update = make_update(model.policy, algorithm, optimizer, settings)
    score = make_score(model.policy, compute_dtype=compute_dtype)
    return jax.jit(update), jax.jit(partial(score_batch, score, micro_rows=micro_rows))


def _sft_functions(config: Config, model: Model, optimizer, held_out: list[Batch]) -> tuple[Callable, Callable]:
    """Step and evaluation of imitation: the mean of -log p over the tokens to imitate."""
    update, score = _jit_update_and_score(config, model, IMITATION, optimizer)

    def step(state: LearnerState, batch: Batch) -> tuple[LearnerState, Metrics]:
        state, metrics = update(state, batch)
        return state, {"nll": metrics["loss"]} | {name: metrics[name] for name in STEP_METRICS if name in metrics}

    def evaluate(params: Params) -> dict[str, float]:
        total = count = 0.0
        for batch in held_out:
            mask_rs = np.asarray(batch.loss_mask)
            total -= float(np.asarray(score(params, batch), np.float64)[mask_rs].sum())
            count += float(mask_rs.sum())
        return {"nll": total / count}

    return step, evaluate


def _dpo_functions(config: Config, model: Model, optimizer, held_out: list[Batch]) -> tuple[Callable, Callable]:
    """Step and evaluation of DPO (Rafailov et al., 2023): loss, fraction of pairs ranked right, and mean margin."""
    beta = config.learner.beta
    update, score = _jit_update_and_score(config, model, dpo(beta=beta), optimizer)
    reference = jax.tree.map(jnp.copy, model.params)
    scored = [batch.replace(logp_ref=np.asarray(score(model.params, batch))) for batch in held_out]

    def step(state: LearnerState, batch: Batch) -> tuple[LearnerState, Metrics]:
        state, metrics = update(state, batch, reference)
        shown = {name: metrics[name] for name in ("loss", "margin", *STEP_METRICS) if name in metrics}
        return state, shown | {"preferred": metrics["accuracy"]}

    def evaluate(params: Params) -> dict[str, float]:
        margins = np.concatenate([beta * margins_of(batch, np.asarray(score(params, batch))) for batch in scored])
        preferred = (margins > 0) + 0.5 * (margins == 0)  # a tie counts half
        values = {"loss": np.logaddexp(0.0, -margins), "preferred": preferred, "margin": margins}
        return {name: float(value.mean()) for name, value in values.items()}

    return step, evaluate


def margins_of(batch: Batch, logp_rs: np.ndarray) -> np.ndarray:
    """For each pair, log p - log p_ref of the chosen conversation minus that of the rejected one."""
    mask_rs = np.asarray(batch.loss_mask)
    gain_m = (logp_rs.astype(np.float64) - np.asarray(batch.logp_ref))[mask_rs] * np.asarray(batch.advantage)[mask_rs]
    _, pair_m = np.unique(np.asarray(batch.group)[mask_rs], return_inverse=True)
    return np.bincount(pair_m, weights=gain_m)


METHODS = {
    "sft": Method(conversations.read_demonstrations, packed_imitation, 1, _sft_functions),
    "dpo": Method(conversations.read_preferences, conversations.preference_rows, 2, _dpo_functions),
}


class FinetuneParts(NamedTuple):
    """The parts of a run."""

    config: Config
    model: Model
    examples: ExampleSplit
    steps: int
    optimizer: optax.GradientTransformation
    objective: Objective


def build(config: Config, *, objects: Objects = NO_OBJECTS) -> FinetuneParts:
    """Read model and examples, and make the parts of a run."""
    objects.check(NAME)
    # Parameters are float32, since small steps would be lost in less; the policy computes in `dtype`.
    model = load_model(config.model.model, dtype="float32")
    policy = make_policy(model.config, dtype=config.model.dtype, attend=get_kernel(config.model.attention))
    model = model._replace(policy=policy)
    read = METHODS[config.learner.method].read
    examples = split_examples(config.data, read(config.data.data, model.tokenizer), seed=config.run.seed)
    steps = max(math.ceil(config.learner.epochs * len(examples.train) / config.learner.batch), 1)
    assert config.learner.learning_rate is not None  # set by the Config
    warmup_steps = steps // 20
    optimizer = adamw(config.learner.learning_rate, warmup_steps=warmup_steps, decay_steps=steps - warmup_steps)
    optimizer = optimizer_for(config.model.dtype, optimizer)
    objective = make_objective(config, model, examples.held_out, optimizer)
    return FinetuneParts(config, model, examples, steps, optimizer, objective)


class FinetuneTrainable(Trainable):
    """The stages of learning from examples; an update of the session is a gradient step."""

    keeps_start_params = False

    def __init__(self, parts: FinetuneParts):
        self.parts = parts
        config, examples = parts.config, parts.examples
        super().__init__(
            NAME,
            config,
            updates=parts.steps,
            name="conversations",
            algorithm=config.learner.method,
            optimizer=parts.optimizer,
            key=jax.random.key(config.run.seed),
        )
        self.counts = {
            "examples": len(examples.train),
            "held_out": len(examples.held_out),
            "left_out": examples.num_too_long,
        }
        self.progress.log(
            "{examples} examples, {held_out} held out, {left_out} left out as too long".format(**self.counts)
        )

    def init_params(self) -> Params:
        return self.parts.model.params

    def make_step(self) -> Step:
        return self._step

    def _step(self, state: TrainState) -> tuple[TrainState, dict[str, Any]]:
        examples, config, step = self.parts.examples.train, self.parts.config, int(state.update)
        (indices,) = batches(len(examples), config.learner.batch, config.run.seed, step, step + 1)
        batch = self.parts.objective.collate([examples[i] for i in indices])
        learner, metrics = self.parts.objective.step(state.learner, batch)
        tokens = (np.asarray(batch.segments) > 0).sum()
        return state.replace(learner=learner, update=state.update + 1), metrics | {"tokens": tokens}

    def metrics_line(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        return {"phase": "train"} | {name: x for name, x in metrics.items() if name not in ("skipped", "tokens")}

    def validate(self, params: Params) -> Validation:
        metrics = self.parts.objective.evaluate(params)
        loss = next(iter(metrics.values()))
        return Validation(-loss, metrics)

    def finish(self, session: Session, minutes: float) -> dict[str, Any]:
        """Write the model with the lowest held-out loss, and the result."""
        config, model, evaluate = self.parts.config, self.parts.model, self.parts.objective.evaluate
        best, params = session.best_params()
        save_model(session.folder / "model", model._replace(params=cast(params, config.model.dtype)))
        result = {
            "method": config.learner.method,
            **{f"{name}_before": value for name, value in evaluate(model.params).items()},
            **{f"{name}_after": value for name, value in evaluate(params).items()},
            **self.counts,
            "steps": self.parts.steps,
            "best_step": best,
            "seed": config.run.seed,
            "minutes": minutes,
            "params_sha256": params_sha256(params),
            "resumed_at": session.resumed_at,
        }
        session.write_result(result)
        self.progress.end()
        folder = session.folder
        next_steps = [
            (command("chat", model=folder / "model"), "talks to it"),
            (command("agentflow", model=folder / "model", tasks="TASKS"), "trains it inside the agent system"),
        ]
        print(closing_message(f"written to {folder}: {list_contents(folder)}", next_steps))
        return result


def batches(count: int, size: int, seed: int, first: int, steps: int) -> Iterator[Sequence[int]]:
    """Indices of the examples of steps `first` to `steps`: a new permutation in each epoch, end to end, stateless."""
    for step in range(first, steps):
        positions = np.arange(step * size, (step + 1) * size)
        epochs = sorted({int(position) // count for position in positions})
        orders = {epoch: np.random.default_rng([seed, epoch]).permutation(count) for epoch in epochs}
        yield [int(orders[position // count][position % count]) for position in positions.tolist()]


RECIPE = Recipe(
    name=NAME,
    command="finetune",
    Config=Config,
    preset=preset,
    build=plain_build(build),
    make_trainable=lambda parts, _folder: FinetuneTrainable(parts),
    exact=False,
)
