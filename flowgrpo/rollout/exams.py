"""Fresh tasks of an environment, and examinations on them.

    make_evaluation(env, policy, "test", tasks=256)  ->  evaluate(params, key)  ->  Evaluation

`make_exam` plays without counting: pure, to be jitted, or scanned and vmapped within a larger program.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array

from flowgrpo.contracts import Env, Policy
from flowgrpo.evaluation.metrics import Evaluation, compute_metrics
from flowgrpo.models.trainable import acting
from flowgrpo.rollout.compiled import make_rollout, repeat
from flowgrpo.types import Trajectories


def make_evaluation(
    env: Env, policy: Policy, split: str = "test", *, tasks: int = 256, samples: int = 1, temperature: float = 1.0
) -> Callable[[Any, Array], Evaluation]:
    """Build `evaluate(params, key)`: success with its interval, pass@k, turns and tools on fresh tasks of a split."""
    exam = jax.jit(make_exam(env, policy, split, tasks=tasks, samples=samples, temperature=temperature))
    ks = sorted({1, samples})
    return lambda params, key: evaluate_rollout(exam(acting(params), key), env, samples=samples, ks=ks)


def evaluate_rollout(trajectories: Trajectories, env: Env, *, samples: int = 1, ks: Sequence[int] = (1,)) -> Evaluation:
    """Compute the figures of a rollout of so many trajectories per task."""
    played = jax.device_get(trajectories)
    turns_nt = np.asarray(played.turns)
    errors_n = (np.asarray(played.error) & turns_nt).sum(axis=1)
    columns = (played.correct, turns_nt.sum(axis=1), errors_n, played.tool)
    return compute_metrics(
        *(np.asarray(x).reshape(-1, samples, *np.shape(x)[1:]) for x in columns), tools=env.tools, ks=ks
    )


def make_exam(
    env: Env,
    policy: Policy,
    split: str,
    *,
    tasks: int,
    samples: int = 1,
    temperature: float = 1.0,
):
    """`exam(params, key, version=0) -> Trajectories` on fresh tasks of a split; `version` is that of the parameters."""
    rollout = make_rollout(env, policy, temperature=temperature)

    def exam(params, key: Array, version=0) -> Trajectories:
        questions, keys, group_n = exam_trajectories(env, key, tasks, split, samples=samples)
        return rollout(params, questions, keys, group_n, version)

    return exam


def exam_trajectories(env: Env, key: Array, count: int, split: str, *, samples: int = 1) -> tuple[Any, Array, Array]:
    """The trajectories of an examination with this key -> (the task of each, its key, the number of its task)."""
    questions, group_n = repeat(examined(env, key, count, split), samples)
    return questions, jax.random.split(jax.random.split(key)[1], len(group_n)), group_n


def examined(env: Env, key: Array, count: int, split: str) -> Any:
    """Draw the tasks of an examination with this key; beside it in one program, they are drawn once."""
    return draw_tasks(env, jax.random.split(key)[0], count, split)


def draw_tasks(env: Env, key: Array, count: int, split: str) -> Any:
    """So many fresh tasks of a split."""
    return jax.vmap(partial(env.make_task, split=split))(jax.random.split(key, count))
