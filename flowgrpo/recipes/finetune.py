"""The recipe of learning from a file of conversations: demonstrations to imitate, or preferences by DPO.

result = train(Config(method="sft", data="demonstrations.jsonl", model="models/small"), "runs/sft")
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import flowgrpo as fg
from flowgrpo import loop
from flowgrpo.batching.prefix_tree import tree_sizes
from flowgrpo.learner import conversations
from flowgrpo.learner.imitation import IMITATION, packed_imitation
from flowgrpo.learner.loss_scale import optimizer_for
from flowgrpo.learner.state import LearnerState, make_optimizer
from flowgrpo.learner.update import make_score, make_update, score_batch
from flowgrpo.models.attention_kernels import attention_named
from flowgrpo.models.decoder import make_policy
from flowgrpo.models.hf import Model
from flowgrpo.models.trainable import cast
from flowgrpo.recipes.finetune_config import Config
from flowgrpo.run.checkpoints import params_sha256
from flowgrpo.run.next_steps import command, contents, ending
from flowgrpo.run.session import Session, Step, Validation, Work, run_session
from flowgrpo.run.time_budget import ENDLESS, TimeBudget

NAME = "finetune"
TOLD = ("grad_norm", "skipped", "overflows", "loss_scale")  # of a step, where there are such figures


class Split(NamedTuple):
    """The examples of a file."""

    learned: Sequence[Any]
    held: Sequence[Any]  # out, to see how good the model is
    left_out: int  # how many are too long


class Lesson(NamedTuple):
    """Functions that lay out the examples of a step, learn from them, and examine the parameters."""

    lay: Callable[[Sequence[Any]], fg.Batch]  # examples of a step -> their batch, always of one shape
    step: Callable[[LearnerState, fg.Batch], tuple[LearnerState, dict]]
    examine: Callable[[Any], dict[str, float]]  # parameters -> figures on what is held out, a loss first


class Method(NamedTuple):
    """One way to learn from examples."""

    read: Callable[..., list]  # (path, text) -> examples
    rows: Callable[..., fg.Batch]
    each: int  # conversations of an example
    teach: Callable[..., tuple]  # (settings, model, optimizer, held) -> (step, examine)


def split_examples(config: "Config", examples: Sequence[Any]) -> Split:
    """Split examples into those to learn from and those held out, by the seed; too long ones are left out."""
    length = config.max_tokens
    fitting = [example for example in examples if _longest(example) <= length]
    count = max(round(config.held_out * len(fitting)), 1)
    if len(fitting) <= count:
        raise fg.BadInput(
            f"{config.data} has {len(fitting)} examples of at most {length} tokens, {count} of them held out: "
            "raise --max_tokens, or give more"
        )
    order = np.random.default_rng(config.seed).permutation(len(fitting))
    held, learned = ([fitting[i] for i in np.sort(own)] for own in (order[:count], order[count:]))
    return Split(learned, held, len(examples) - len(fitting))


def lesson_of(config: "Config", model: Model, held: Sequence[Any], optimizer) -> Lesson:
    """The lesson, examined on these."""
    method, size = METHODS[config.method], config.batch
    sizes = {"row_length": config.max_tokens, "rows": size * method.each}
    if shares := model.policy.hidden_tree is not None:
        sizes = tree_sizes(config.max_tokens, size * method.each, micro_rows=config.micro_rows)
    lay = partial(method.rows, **sizes, shares=shares)
    batches = [lay(held[i : i + size]) for i in range(0, len(held), size)]
    return Lesson(lay, *method.teach(config, model, optimizer, batches))


def _longest(example: Any) -> int:
    """Tokens of its longest conversation."""
    both = (example,) if isinstance(example, fg.Trajectory) else example
    return max(conversations.tokens_of(record) for record in both)


def _programs(config: "Config", model: Model, algorithm: fg.Algorithm, optimizer) -> tuple[Callable, Callable]:
    """The update by an algorithm, and the scoring of a batch; both compute in the type of the Config."""
    computes: Any = None if config.dtype == "float32" else config.dtype  # None: that of the parameters
    micro_rows = config.micro_rows if model.policy.hidden_tree is None else 1  # a tree is as long as a micro-batch
    update = make_update(model.policy, algorithm, optimizer, micro_rows=micro_rows, compute_dtype=computes, watch=None)
    score = make_score(model.policy, compute_dtype=computes)
    return jax.jit(update), jax.jit(partial(score_batch, score, micro_rows=micro_rows))


# Imitation ----------------------------------------------------------------------------------------------


def _teach_demonstrations(config: "Config", model: Model, optimizer, held: list[fg.Batch]) -> tuple:
    update, score = _programs(config, model, IMITATION, optimizer)
    return partial(_imitate, update=update), partial(_mean_loss, score=score, held=held)


def _imitate(state: LearnerState, batch: fg.Batch, *, update) -> tuple[LearnerState, dict]:
    state, metrics = update(state, batch)
    return state, {"nll": metrics["loss"]} | {name: metrics[name] for name in TOLD if name in metrics}


def _mean_loss(params, *, score, held: list[fg.Batch]) -> dict[str, float]:
    """The mean of -log p over all that is to be imitated."""
    total = count = 0.0
    for batch in held:
        own_rs = np.asarray(batch.live)
        total -= float(np.asarray(score(params, batch), np.float64)[own_rs].sum())
        count += float(own_rs.sum())
    return {"nll": total / count}


# Preferences --------------------------------------------------------------------------------------------


def _teach_preferences(config: "Config", model: Model, optimizer, held: list[fg.Batch]) -> tuple:
    beta = config.beta
    update, score = _programs(config, model, fg.dpo(beta=beta), optimizer)
    known = [batch.replace(logp_ref=np.asarray(score(model.params, batch))) for batch in held]
    step = partial(_prefer, update=update, reference=jax.tree.map(jnp.copy, model.params))
    return step, partial(_preferences, score=score, held=known, beta=beta)


def _prefer(state: LearnerState, batch: fg.Batch, *, update, reference) -> tuple[LearnerState, dict]:
    state, metrics = update(state, batch, reference)
    figures = {name: metrics[name] for name in ("loss", "margin", *TOLD) if name in metrics}
    return state, figures | {"preferred": metrics["accuracy"]}


def _preferences(params, *, score, held: list[fg.Batch], beta: float) -> dict[str, float]:
    """DPO's loss, how often the margin is on the right side (a tie is half), and the margin, over all pairs."""
    margins = np.concatenate([beta * margins_of(batch, np.asarray(score(params, batch))) for batch in held])
    right = (margins > 0) + 0.5 * (margins == 0)
    figures = {"loss": np.logaddexp(0.0, -margins), "preferred": right, "margin": margins}
    return {name: float(values.mean()) for name, values in figures.items()}


def margins_of(batch: fg.Batch, logp_rs: np.ndarray) -> np.ndarray:
    """For each pair, how much more its chosen side has gained on the reference than its rejected side."""
    own_rs = np.asarray(batch.live)
    gain_m = (logp_rs.astype(np.float64) - np.asarray(batch.logp_ref))[own_rs] * np.asarray(batch.advantage)[own_rs]
    _, pair_m = np.unique(np.asarray(batch.group)[own_rs], return_inverse=True)
    return np.bincount(pair_m, weights=gain_m)


METHODS = {
    "sft": Method(conversations.read_demonstrations, packed_imitation, 1, _teach_demonstrations),
    "dpo": Method(conversations.read_preferences, conversations.preference_rows, 2, _teach_preferences),
}


class FinetuneParts(NamedTuple):
    """The parts of a run."""

    config: Config
    model: Model
    examples: Split
    steps: int
    optimizer: optax.GradientTransformation
    lesson: Lesson


def open(config: Config) -> FinetuneParts:
    """Read model and examples, and make the parts of a run."""
    # Parameters are float32, since small steps would be lost in less; the policy computes in the type that is given.
    model = fg.load_model(config.model, dtype="float32")
    policy = make_policy(model.config, dtype=config.dtype, attend=attention_named(config.attention))
    model = model._replace(policy=policy)
    examples = split_examples(config, METHODS[config.method].read(config.data, model.text))
    steps = max(math.ceil(config.epochs * len(examples.learned) / config.batch), 1)
    assert config.learning_rate is not None  # as the Config has it
    rising, rate = steps // 20, config.learning_rate
    plain = make_optimizer(learning_rate=rate, warmup_steps=rising, decay_steps=steps - rising)
    optimizer = optimizer_for(config.dtype, plain)
    return FinetuneParts(config, model, examples, steps, optimizer, lesson_of(config, model, examples.held, optimizer))


class FinetuneWork(Work):
    """The stages of learning from examples: an update is a step."""

    keeps_start = False

    def __init__(self, parts: FinetuneParts):
        self.parts = parts
        config = parts.config
        super().__init__(
            NAME,
            config,
            updates=parts.steps,
            name="conversations",
            algorithm=config.method,
            optimizer=parts.optimizer,
            key=jax.random.key(config.seed),
        )
        self.counts = {
            "examples": len(parts.examples.learned),
            "held_out": len(parts.examples.held),
            "left_out": parts.examples.left_out,
        }
        self.progress.say(
            "{examples} examples, {held_out} held out, {left_out} left out as too long".format(**self.counts)
        )

    def initial(self) -> Any:
        return self.parts.model.params

    def make_step(self) -> Step:
        return self._step

    def _step(self, run: loop.Run) -> tuple[loop.Run, dict[str, Any]]:
        examples, config, at = self.parts.examples.learned, self.parts.config, int(run.update)
        (chosen,) = batches(len(examples), config.batch, config.seed, at, at + 1)
        batch = self.parts.lesson.lay([examples[i] for i in chosen])
        learner, figures = self.parts.lesson.step(run.learner, batch)
        tokens = (np.asarray(batch.segments) > 0).sum()
        return run.replace(learner=learner, update=run.update + 1), figures | {"tokens": tokens}

    def line(self, figures: Mapping[str, Any]) -> dict[str, Any]:
        return {"phase": "train"} | {name: x for name, x in figures.items() if name not in ("skipped", "tokens")}

    def examine(self, params: Any) -> Validation:
        found = self.parts.lesson.examine(params)
        return Validation(-next(iter(found.values())), found)

    def finish(self, session: Session, minutes: float) -> dict[str, Any]:
        """Write the model with the lowest loss on what is held out, and the result."""
        config, model, examine = self.parts.config, self.parts.model, self.parts.lesson.examine
        best, params = session.best_params()
        fg.save_model(session.folder / "model", model._replace(params=cast(params, config.dtype)))
        result = {
            "method": config.method,
            **{f"{name}_before": value for name, value in examine(model.params).items()},
            **{f"{name}_after": value for name, value in examine(params).items()},
            **self.counts,
            "steps": self.parts.steps,
            "best_step": best,
            "seed": config.seed,
            "minutes": minutes,
            "params_sha256": params_sha256(params),
            "resumed_at": session.resumed_at,
        }
        session.write_result(result)
        self.progress.end()
        folder = session.folder
        steps = [
            (command("chat", model=folder / "model"), "talks to it"),
            (command("agentflow", model=folder / "model", tasks="TASKS"), "trains it inside the agent system"),
        ]
        print(ending(f"written to {folder}: {contents(folder)}", steps))
        return result


def train(
    config: Config,
    folder: str | Path,
    *,
    every: int = 50,
    resume: bool = True,
    loggers: Sequence[str] = (),
    budget: TimeBudget = ENDLESS,
) -> dict[str, Any]:
    """Train in a folder, or go on there -> the result; a validation and a checkpoint come `every` so many steps."""
    work = FinetuneWork(open(config))
    return run_session(work, Path(folder), every=every, resume=resume, loggers=loggers, budget=budget)


def batches(count: int, size: int, seed: int, first: int, steps: int) -> Iterator[Sequence[int]]:
    """The examples of each step from the `first` on: a new order in every epoch, end to end, without a state."""
    for step in range(first, steps):
        places = np.arange(step * size, (step + 1) * size)
        epochs = sorted({int(place) // count for place in places})
        orders = {epoch: np.random.default_rng([seed, epoch]).permutation(count) for epoch in epochs}
        yield [int(orders[place // count][place % count]) for place in places.tolist()]
