"""Fixed sets of test tasks, one for each environment and difficulty, named by a hash of their content.

    panel_set("lookup_hard")                 the set: its tasks, the keys of its trajectories, its hash
    evaluate_panel(policy, params, names)    a planner's evaluation on these sets
    evaluate_run(config, folder)             those of a run's start and of its best planner

Results of two machines are comparable if the hashes are equal. They are checked against `HASHES` before any rollout: a
version of JAX that draws other random numbers is refused. What a policy then samples may still differ between
processors, in the last bits of its logits.
"""

import hashlib
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from flowgrpo.contracts import Env, Policy
from flowgrpo.evaluation.metrics import Evaluation
from flowgrpo.models.trainable import actor_params
from flowgrpo.recipes import pure
from flowgrpo.recipes.registry import ENVIRONMENTS
from flowgrpo.rollout.compiled import make_rollout
from flowgrpo.rollout.exams import evaluate_rollout, evaluation_inputs
from flowgrpo.training.session import open_session
from flowgrpo.types import BadInput, Params

SEED, TASKS, SPLIT = 2026, 512, "test"
HASHES = {
    "lookup": "847da11dad13",
    "arithmetic": "b1e8180dd23c",
    "maze": "add646f7432b",
    "lookup_hard": "eefe8bf4f826",
    "arithmetic_hard": "960e27d2966b",
    "maze_hard": "55d5c6093ddc",
}
# Names that enter the hash, of task fields that have another name by now.
HASHED_NAMES = {
    "arithmetic": {".is_pointer": ".points", ".values": ".holds"},
    "maze": {".identity": ".number"},
}


class PanelSet(NamedTuple):
    """A set of tasks, and the keys and groups of their trajectories."""

    name: str
    env: Env
    tasks: Any
    keys: Array
    group: Array
    digest: str

    @property
    def label(self) -> str:
        """The name with the hash, as results are cited."""
        return f"{self.name}@{self.digest}"


def panel_set(name: str) -> PanelSet:
    """The set of that name; raises `BadInput` if its content is not what it always was."""
    drawn = _draw(name)
    if drawn.digest != HASHES[name]:
        raise BadInput(
            f"the panel's set {name} is {HASHES[name]}, but what is drawn here is {drawn.digest}: this version of JAX "
            "draws other numbers, so results can't be compared; install the versions of requirements.lock"
        )
    return drawn


def draw_hashes() -> dict[str, str]:
    """The hash of each set as it is drawn here, by name."""
    return {name: _draw(name).digest for name in ENVIRONMENTS}


@cache
def _draw(name: str) -> PanelSet:
    env = ENVIRONMENTS[name]()
    tasks, keys, group_n = jax.jit(lambda key: evaluation_inputs(env, key, TASKS, SPLIT))(jax.random.key(SEED))
    return PanelSet(name, env, tasks, keys, group_n, content_hash(env, tasks, keys))


def content_hash(env: Env, tasks: Any, keys: Array) -> str:
    """Twelve digits of the SHA-256 of an environment's vocabulary and sizes, the arrays of tasks, and the keys."""
    digest = hashlib.sha256(repr((env.name, env.vocabulary, tuple(env.sizes))).encode())
    for path, leaf in [*jax.tree.leaves_with_path(tasks), ((), jax.random.key_data(keys))]:
        array = np.asarray(leaf)
        name = jax.tree_util.keystr(path)
        name = HASHED_NAMES.get(env.name, {}).get(name, name)
        digest.update(f"{name} {array.dtype.name} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"))).tobytes())
    return digest.hexdigest()[:12]


def panel_names(env: Env) -> list[str]:
    """The sets that a planner of this environment can solve: those with the same vocabulary and action size."""
    same = [
        name
        for name, make in ENVIRONMENTS.items()
        if (other := make()).vocabulary == env.vocabulary and other.sizes.action == env.sizes.action
    ]
    if not same:
        raise BadInput(f"the panel has no set with the vocabulary of {env.name}; it has {', '.join(ENVIRONMENTS)}")
    return same


def evaluate_panel(
    policy: Policy, params: Params, names: Iterable[str], *, temperature: float = 1.0
) -> dict[str, Evaluation]:
    """Evaluate a planner on sets of the panel, one trajectory a task -> evaluations by the set's label."""
    evaluations = {}
    for name in names:
        tasks = panel_set(name)
        rollout: Callable = jax.jit(make_rollout(tasks.env, policy, temperature=temperature))
        trajectories = rollout(actor_params(params), tasks.tasks, tasks.keys, tasks.group)
        evaluations[tasks.label] = evaluate_rollout(trajectories, tasks.env)
    return evaluations


def evaluate_run(config: pure.Config, folder: Path) -> tuple[int | None, dict[str, list[Evaluation]]]:
    """Evaluate a run's start and its best planner -> (the update of the best, both evaluations by set)."""
    setup = pure.build(config)
    names = panel_names(setup.env)
    session = open_session(pure.PureTrainable(setup), folder)
    best, best_params = session.best_params()
    session.progress.log(f"rolling out {len(names)} sets of {TASKS} tasks with the start, and with update {best}")
    before, after = (
        evaluate_panel(setup.policy, params, names, temperature=config.rollout.temperature)
        for params in (session.start_params, best_params)
    )
    return best, {label: [before[label], after[label]] for label in after}


def panel_table(evaluations: dict[str, list[Evaluation]]) -> str:
    """A table of before and after, with a line for each set."""
    head = f"{'set':36}{'warm start':>28}{'trained':>28}"
    lines = [
        f"{label:36}" + "".join(f"{f'{x.success:.1%} ({x.success_low:.1%} to {x.success_high:.1%})':>28}" for x in pair)
        for label, pair in evaluations.items()
    ]
    return "\n".join([head, *lines])
