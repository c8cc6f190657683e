"""The two methods of `finetune`: what is learned from a file of conversations, and how good a model is at it."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import flowgrpo as fg
from flowgrpo.learner import written
from flowgrpo.learner.state import LearnerState
from flowgrpo.learner.update import make_score, make_update, score_batch
from flowgrpo.learner.warmstart import IMITATION
from flowgrpo.models.hf import Model


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
    rate: float  # learning rate, where none is given
    teach: Callable[..., tuple]  # (settings, model, optimizer, held) -> (step, examine)


def split(settings: Mapping[str, Any], examples: Sequence[Any]) -> Split:
    """Split examples into those to learn from and those held out, by the seed; too long ones are left out."""
    length = settings["max_tokens"]
    fitting = [example for example in examples if _longest(example) <= length]
    count = max(round(settings["held_out"] * len(fitting)), 1)
    if len(fitting) <= count:
        raise fg.BadInput(
            f"{settings['data']} has {len(fitting)} examples of at most {length} tokens, {count} of them held out: "
            "raise --max_tokens, or give more"
        )
    order = np.random.default_rng(settings["seed"]).permutation(len(fitting))
    held, learned = ([fitting[i] for i in np.sort(own)] for own in (order[:count], order[count:]))
    return Split(learned, held, len(examples) - len(fitting))


def lesson_of(settings: Mapping[str, Any], model: Model, held: Sequence[Any], optimizer) -> Lesson:
    """The lesson, examined on these."""
    method, size = METHODS[settings["method"]], settings["batch"]
    lay = partial(method.rows, row_length=settings["max_tokens"], rows=size * method.each)
    batches = [lay(held[i : i + size]) for i in range(0, len(held), size)]
    return Lesson(lay, *method.teach(settings, model, optimizer, batches))


def _computes(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Choose `compute_dtype`, in which the update computes; None where it is the float32 of the parameters."""
    return {"compute_dtype": None if settings["dtype"] == "float32" else settings["dtype"]}


def _longest(example: Any) -> int:
    """Tokens of its longest conversation."""
    both = (example,) if isinstance(example, fg.Trajectory) else example
    return max(written.tokens_of(record) for record in both)


# Imitation ----------------------------------------------------------------------------------------------


def _teach_demonstrations(settings: Mapping[str, Any], model: Model, optimizer, held: list[fg.Batch]) -> tuple:
    sizes, computes = {"micro_rows": settings["micro_rows"]}, _computes(settings)
    update = jax.jit(make_update(model.policy, IMITATION, optimizer, **sizes, **computes, watch=None))
    score = jax.jit(partial(score_batch, make_score(model.policy, **computes), **sizes))
    return partial(_imitate, update=update), partial(_mean_loss, score=score, held=held)


def _imitate(state: LearnerState, batch: fg.Batch, *, update) -> tuple[LearnerState, dict]:
    state, metrics = update(state, batch)
    return state, {"nll": metrics["loss"]} | {name: metrics[name] for name in ("grad_norm", "skipped")}


def _mean_loss(params, *, score, held: list[fg.Batch]) -> dict[str, float]:
    """The mean of -log p over all that is to be imitated."""
    total = count = 0.0
    for batch in held:
        own_rs = np.asarray(batch.live)
        total -= float(np.asarray(score(params, batch), np.float64)[own_rs].sum())
        count += float(own_rs.sum())
    return {"nll": total / count}


# Preferences --------------------------------------------------------------------------------------------


def _teach_preferences(settings: Mapping[str, Any], model: Model, optimizer, held: list[fg.Batch]) -> tuple:
    sizes, beta, computes = {"micro_rows": settings["micro_rows"]}, settings["beta"], _computes(settings)
    update = jax.jit(make_update(model.policy, fg.dpo(beta=beta), optimizer, **sizes, **computes, watch=None))
    score = jax.jit(partial(score_batch, make_score(model.policy, **computes), **sizes))
    known = [batch.replace(logp_ref=np.asarray(score(model.params, batch))) for batch in held]
    step = partial(_prefer, update=update, reference=jax.tree.map(jnp.copy, model.params))
    return step, partial(_preferences, score=score, held=known, beta=beta)


def _prefer(state: LearnerState, batch: fg.Batch, *, update, reference) -> tuple[LearnerState, dict]:
    state, metrics = update(state, batch, reference)
    figures = {name: metrics[name] for name in ("loss", "margin", "grad_norm", "skipped")}
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
    "sft": Method(written.read_demonstrations, written.demonstration_rows, 1, 1e-5, _teach_demonstrations),
    "dpo": Method(written.read_preferences, written.preference_rows, 2, 1e-6, _teach_preferences),
}
