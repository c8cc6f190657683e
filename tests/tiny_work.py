"""For tests of sessions: a run of a few numbers, whose steps donate their state, and which asks what to do where."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from flowgrpo import loop
from flowgrpo.evaluation.metrics import Evaluation, compute_metrics
from flowgrpo.learner.state import init_learner
from flowgrpo.run.config import TrainingConfig, setting
from flowgrpo.run.session import Tested, TestedWork, Validation, validation_of
from flowgrpo.run.warm_start import WarmStart

OPTIMIZER = optax.adam(1e-2)


@dataclass(frozen=True, kw_only=True)
class Config(TrainingConfig):
    """Settings of the tiny run."""

    updates: int = setting(5, "Updates.", may_differ=True)
    warm_steps: int = setting(2, "Steps of imitation.")
    mesh: str = setting("data=8", "How devices are arranged.")


def init(key: jax.Array) -> dict:
    return {"w": jax.random.normal(key, (4, 3)), "b": jnp.zeros(3)}


class TinyWork(TestedWork):
    """`at(stage, update)` is called where a run may be interrupted: warm start, rollout, learned, examine, test."""

    def __init__(self, at: Callable[[str, int], None], config: Config):
        self.at = at
        key = jax.random.key(config.seed)
        own = {"name": "tiny", "algorithm": "none", "optimizer": OPTIMIZER, "key": key}
        super().__init__("tiny", config, updates=config.updates, **own)

    def initial(self) -> dict:
        return init(self.key)

    def warm_start(self) -> WarmStart:
        """Two steps that change nothing, and a loss that falls."""
        state = init_learner(self.initial(), OPTIMIZER)
        losses = iter((1.0, 0.5))

        def step(state, _batch):
            self.at("warm start", 0)
            return state, None

        return WarmStart(state, step, lambda first: range(first, 2), lambda _: next(losses), steps=2, every=2)

    def make_step(self):
        return partial(_step, self.at)

    def examine(self, params) -> Validation:
        return validation_of(_examine(self.at, params))

    def test(self, params, versions) -> Tested:  # noqa: ARG002
        return _test(self.at, params)


def tiny_work(at: Callable[[str, int], None] = lambda _stage, _update: None, **settings) -> TinyWork:
    """The run with these settings."""
    return TinyWork(at, Config(**settings))


def _step(at, run: loop.Run) -> tuple[loop.Run, dict]:
    update = int(run.update) + 1
    at("rollout", update)
    run, loss = _learn(run)
    at("learned", update)
    return run, {"loss": loss, "tokens": 3, "skipped": 0}


@partial(jax.jit, donate_argnums=0)
def _learn(run: loop.Run) -> tuple[loop.Run, jax.Array]:
    params = run.learner.params
    x_rd = jax.random.normal(jax.random.fold_in(run.key, run.update), (8, 4))
    loss, grads = jax.value_and_grad(lambda params: jnp.mean((x_rd @ params["w"] + params["b"][None]) ** 2))(params)
    with jax.numpy_dtype_promotion("standard"):
        changes, memory = OPTIMIZER.update(grads, run.learner.optimizer, params)
    learner = run.learner.replace(params=optax.apply_updates(params, changes), optimizer=memory)
    return run.replace(learner=learner, update=run.update + 1), loss


def _examine(at, params) -> Evaluation:
    at("examine", 0)
    share = float(jnp.abs(params["w"]).mean())
    return compute_metrics(np.arange(64)[:, None] < 64 * share / 2, np.ones((64, 1), int), np.zeros((64, 1), int))


def _test(at, params) -> Tested:
    at("test", 0)
    return Tested([_examine(lambda *_: None, one) for one in params], "a table", {})
