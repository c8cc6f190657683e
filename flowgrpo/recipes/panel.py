"""Fixed sets of test tasks, one of each environment and difficulty, named by a hash of what is in them.

    panel_set("lookup_hard")                 the set: its tasks, the keys of its trajectories, its hash
    play_panel(policy, params, names)        a planner's figures on these sets
    evaluate_run(config, folder)             those of a run's start and of its best planner

Figures of two machines can be held against each other where the hashes are equal. They are checked against `HASHES`
before anything is played: a version of JAX that draws other numbers is refused. What a policy then samples may still
differ in the last bits of its logits from processor to processor.
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
from flowgrpo.models.trainable import acting
from flowgrpo.recipes import pure
from flowgrpo.recipes.registry import ENVIRONMENTS
from flowgrpo.rollout.compiled import make_rollout
from flowgrpo.rollout.exams import evaluate_rollout, exam_trajectories
from flowgrpo.types import BadInput

SEED, TASKS, SPLIT = 2026, 512, "test"
HASHES = {
    "lookup": "847da11dad13",
    "arithmetic": "b1e8180dd23c",
    "maze": "add646f7432b",
    "lookup_hard": "eefe8bf4f826",
    "arithmetic_hard": "960e27d2966b",
    "maze_hard": "55d5c6093ddc",
}


class PanelSet(NamedTuple):
    """One set: tasks with an entry each, and what their trajectories follow from."""

    name: str
    env: Env
    tasks: Any
    keys: Array
    group: Array
    digest: str

    @property
    def label(self) -> str:
        """Name the set with its hash, as figures are cited."""
        return f"{self.name}@{self.digest}"


def panel_set(name: str) -> PanelSet:
    """Draw the set of that name, and check that it holds what it always held."""
    one = _draw(name)
    if one.digest != HASHES[name]:
        raise BadInput(
            f"the panel's set {name} is {HASHES[name]}, but what is drawn here is {one.digest}: this version of JAX "
            "draws other numbers, so figures can't be held against others'; install the versions of requirements.lock"
        )
    return one


def draw_hashes() -> dict[str, str]:
    """Hash what is drawn here, by the name of the set."""
    return {name: _draw(name).digest for name in ENVIRONMENTS}


@cache
def _draw(name: str) -> PanelSet:
    env = ENVIRONMENTS[name]()
    tasks, keys, group_n = jax.jit(lambda key: exam_trajectories(env, key, TASKS, SPLIT))(jax.random.key(SEED))
    return PanelSet(name, env, tasks, keys, group_n, content_hash(env, tasks, keys))


def content_hash(env: Env, tasks: Any, keys: Array) -> str:
    """Hash an environment's words and sizes, the arrays of tasks, and the keys: twelve digits of SHA-256."""
    digest = hashlib.sha256(repr((env.name, env.words, tuple(env.sizes))).encode())
    for path, leaf in [*jax.tree.leaves_with_path(tasks), ((), jax.random.key_data(keys))]:
        array = np.asarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype.name} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"))).tobytes())
    return digest.hexdigest()[:12]


def panel_names(env: Env) -> list[str]:
    """Name the sets that a planner of this environment can play: those with the same words and actions."""
    same = [
        name
        for name, make in ENVIRONMENTS.items()
        if (other := make()).words == env.words and other.sizes.action == env.sizes.action
    ]
    if not same:
        raise BadInput(f"the panel has no set in the words of {env.name}; it has {', '.join(ENVIRONMENTS)}")
    return same


def play_panel(policy: Policy, params: Any, names: Iterable[str], *, temperature: float = 1.0) -> dict[str, Evaluation]:
    """Play sets of the panel with a planner, once each task -> its figures by the set's label."""
    found = {}
    for name in names:
        one = panel_set(name)
        rollout: Callable = jax.jit(make_rollout(one.env, policy, temperature=temperature))
        played = rollout(acting(params), one.tasks, one.keys, one.group)
        found[one.label] = evaluate_rollout(played, one.env)
    return found


def evaluate_run(config: pure.Config, folder: Path) -> tuple[int | None, dict[str, list[Evaluation]]]:
    """Play a run's start and its best planner -> (the update of the best, by set the figures of both)."""
    setup = pure.open(config)
    names = panel_names(setup.env)
    session = pure.open_session(pure.PureWork(setup), folder)
    best, final = session.best_params()
    session.progress.say(f"playing {len(names)} sets of {TASKS} tasks with the start, and with update {best}")
    before, after = (
        play_panel(setup.policy, one, names, temperature=config.temperature) for one in (session.start, final)
    )
    return best, {label: [before[label], after[label]] for label in after}


def panel_table(found: dict[str, list[Evaluation]]) -> str:
    """Tabulate before and after, a line a set."""
    head = f"{'set':36}{'warm start':>28}{'trained':>28}"
    lines = [
        f"{label:36}" + "".join(f"{f'{x.success:.1%} ({x.success_low:.1%} to {x.success_high:.1%})':>28}" for x in both)
        for label, both in found.items()
    ]
    return "\n".join([head, *lines])
