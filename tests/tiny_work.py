"""For tests of sessions: a run of a few numbers, whose steps donate their state, and which asks what to do where."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.session import Tested, Work
from flowgrpo import loop
from flowgrpo.evaluate import Evaluation, evaluate

OPTIMIZER = optax.adam(1e-2)
SETTINGS = {"updates": 5, "warm_steps": 2, "seed": 0, "control": "none", "mesh": "data=8"}


def init(key: jax.Array) -> dict:
    return {"w": jax.random.normal(key, (4, 3)), "b": jnp.zeros(3)}


def tiny_work(at: Callable[[str, int], None] = lambda _stage, _update: None, **settings) -> Work:
    """`at(stage, update)` is called where a run may be interrupted: warm start, rollout, learned, examine, test."""
    chosen = SETTINGS | settings
    key = jax.random.key(chosen["seed"])
    return Work(
        name="tiny",
        algorithm="none",
        settings=chosen,
        optimizer=OPTIMIZER,
        key=key,
        place=lambda tree: tree,
        blank=partial(init, key),
        warm_start=partial(_warm_start, at, key),
        make_step=lambda: partial(_step, at),
        line=lambda figures: {"phase": "train"} | figures,
        examine=partial(_examine, at),
        test=partial(_test, at),
    )


def _warm_start(at, key: jax.Array, tell) -> dict:
    tell(0, 1.0)
    at("warm start", 0)
    tell(2, 0.5)
    return init(key)


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
    return evaluate(np.arange(64)[:, None] < 64 * share / 2, np.ones((64, 1), int), np.zeros((64, 1), int))


def _test(at, params) -> Tested:
    at("test", 0)
    return Tested([_examine(lambda *_: None, one) for one in params], "a table", {})
