"""For tests of sessions: a run of a few numbers, whose steps donate their state, and which calls back at each stage."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from flowgrpo.evaluation.metrics import Evaluation, compute_metrics
from flowgrpo.learner.state import init_learner
from flowgrpo.training.config import RunConfig, RunSection, make_config, setting
from flowgrpo.training.session import EvaluatedTrainable, TestReport, Validation, validation_of
from flowgrpo.training.stages import TrainState
from flowgrpo.training.warm_start import WarmStart

OPTIMIZER = optax.adam(1e-2)


@dataclass(frozen=True, kw_only=True)
class TinySection(RunSection):
    """Settings of the tiny run."""

    updates: int = setting(5, "Updates.", may_change=True)
    warm_steps: int = setting(2, "Steps of imitation.")
    mesh: str = setting("data=8", "How devices are arranged.")


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """The one section of the tiny run."""

    run: TinySection


def init(key: jax.Array) -> dict:
    return {"w": jax.random.normal(key, (4, 3)), "b": jnp.zeros(3)}


class TinyTrainable(EvaluatedTrainable):
    """Calls `on_stage(stage, update)` where a run may be interrupted: warm start, rollout, learned, examine, test."""

    def __init__(self, on_stage: Callable[[str, int], None], config: Config):
        self.on_stage = on_stage
        key = jax.random.key(config.run.seed)
        super().__init__(
            "tiny", config, updates=config.run.updates, name="tiny", algorithm="none", optimizer=OPTIMIZER, key=key
        )

    def init_params(self) -> dict:
        return init(self.key)

    def warm_start(self) -> WarmStart:
        """Two steps that change nothing, and a loss that falls."""
        state = init_learner(self.init_params(), OPTIMIZER)
        losses = iter((1.0, 0.5))

        def step(state, _batch):
            self.on_stage("warm start", 0)
            return state, None

        return WarmStart(state, step, lambda first: range(first, 2), lambda _: next(losses), steps=2, every=2)

    def make_step(self):
        return partial(_step, self.on_stage)

    def validate(self, params) -> Validation:
        return validation_of(_evaluate(self.on_stage, params))

    def test(self, params, versions) -> TestReport:  # noqa: ARG002
        self.on_stage("test", 0)
        return TestReport([_evaluate(lambda *_: None, candidate) for candidate in params], "a table", {})


def tiny_work(on_stage: Callable[[str, int], None] = lambda _stage, _update: None, **settings) -> TinyTrainable:
    """The run with these settings."""
    return TinyTrainable(on_stage, make_config(Config, settings))


def _step(on_stage, state: TrainState) -> tuple[TrainState, dict]:
    update = int(state.update) + 1
    on_stage("rollout", update)
    state, loss = _learn(state)
    on_stage("learned", update)
    return state, {"loss": loss, "tokens": 3, "skipped": 0}


@partial(jax.jit, donate_argnums=0)
def _learn(state: TrainState) -> tuple[TrainState, jax.Array]:
    params = state.learner.params
    x_rd = jax.random.normal(jax.random.fold_in(state.key, state.update), (8, 4))
    loss, grads = jax.value_and_grad(lambda params: jnp.mean((x_rd @ params["w"] + params["b"][None]) ** 2))(params)
    with jax.numpy_dtype_promotion("standard"):
        changes, optimizer = OPTIMIZER.update(grads, state.learner.optimizer, params)
    learner = state.learner.replace(params=optax.apply_updates(params, changes), optimizer=optimizer)
    return state.replace(learner=learner, update=state.update + 1), loss


def _evaluate(on_stage, params) -> Evaluation:
    on_stage("examine", 0)
    fraction = float(jnp.abs(params["w"]).mean())
    return compute_metrics(np.arange(64)[:, None] < 64 * fraction / 2, np.ones((64, 1), int), np.zeros((64, 1), int))
