"""Evaluation of a policy on fresh tasks of a pure environment.

    make_evaluation(env, policy, "test", tasks=256)  ->  evaluate(params, key)  ->  Evaluation

`make_evaluation_rollout` is its rollout without the metrics: pure, to be jitted, or scanned and vmapped within a larger
program.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import numpy as np
from jax import Array

from flowgrpo.contracts import Env, Policy
from flowgrpo.evaluation.metrics import Evaluation, compute_metrics
from flowgrpo.models.trainable import actor_params
from flowgrpo.rollout.compiled import make_rollout, repeat
from flowgrpo.types import Params, PyTree, Trajectories


def make_evaluation(
    env: Env, policy: Policy, split: str = "test", *, tasks: int = 256, samples: int = 1, temperature: float = 1.0
) -> Callable[[Params, Array], Evaluation]:
    """`evaluate(params, key)`: success with its interval, pass@k, turns and tools on fresh tasks of a split.

    Args:
        env: the environment.
        policy: the policy.
        split: of the tasks.
        tasks: number of tasks.
        samples: trajectories of each task, for pass@samples.
        temperature: of sampling.
    """
    rollout = jax.jit(
        make_evaluation_rollout(env, policy, split, tasks=tasks, samples=samples, temperature=temperature)
    )
    ks = sorted({1, samples})
    return lambda params, key: evaluate_rollout(rollout(actor_params(params), key), env, samples=samples, ks=ks)


def evaluate_rollout(trajectories: Trajectories, env: Env, *, samples: int = 1, ks: Sequence[int] = (1,)) -> Evaluation:
    """The evaluation of a rollout with `samples` trajectories per task."""
    on_host = jax.device_get(trajectories)
    turns_nt = np.asarray(on_host.turns)
    errors_n = (np.asarray(on_host.error) & turns_nt).sum(axis=1)
    columns = (on_host.correct, turns_nt.sum(axis=1), errors_n, on_host.tool)
    return compute_metrics(
        *(np.asarray(x).reshape(-1, samples, *np.shape(x)[1:]) for x in columns), tools=env.tools, ks=ks
    )


def make_evaluation_rollout(
    env: Env, policy: Policy, split: str, *, tasks: int, samples: int = 1, temperature: float = 1.0
) -> Callable[..., Trajectories]:
    """`rollout(params, key, version=0) -> Trajectories` on fresh tasks; `version` is that of the parameters."""
    rollout = make_rollout(env, policy, temperature=temperature)

    def evaluation_rollout(params: Params, key: Array, version=0) -> Trajectories:
        repeated_tasks, keys, group_n = evaluation_inputs(env, key, tasks, split, samples=samples)
        return rollout(params, repeated_tasks, keys, group_n, version)

    return evaluation_rollout


def evaluation_inputs(env: Env, key: Array, count: int, split: str, *, samples: int = 1) -> tuple[PyTree, Array, Array]:
    """Inputs of an evaluation's rollout: (task of each trajectory, its key, index of its task)."""
    tasks, group_n = repeat(evaluation_tasks(env, key, count, split), samples)
    return tasks, jax.random.split(jax.random.split(key)[1], len(group_n)), group_n


def evaluation_tasks(env: Env, key: Array, count: int, split: str) -> PyTree:
    """The tasks of an evaluation with this key; within one program, XLA draws them once."""
    return draw_tasks(env, jax.random.split(key)[0], count, split)


def draw_tasks(env: Env, key: Array, count: int, split: str) -> PyTree:
    """Draw `count` tasks of `split`."""
    return jax.vmap(partial(env.make_task, split=split))(jax.random.split(key, count))
