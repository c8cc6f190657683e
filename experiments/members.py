"""The dicts that map a flag's value to a constructor: one for each family."""

import inspect
import os
import sys
from importlib import import_module
from typing import Any

import optax

import flowgrpo as fg
from flowgrpo.algorithms.options import Correction
from flowgrpo.learner.optimizers import scale_by_adafactor
from flowgrpo.learner.quantised import scale_by_adam_8bit

ALGORITHMS = {
    "flow_grpo": fg.flow_grpo,
    "flow_grpo_released": fg.flow_grpo_released,
    "grpo": fg.grpo,
    "dr_grpo": fg.dr_grpo,
    "dapo": fg.dapo,
    "gspo": fg.gspo,
    "cispo": fg.cispo,
    "rloo": fg.rloo,
    "reinforce_pp": fg.reinforce_pp,
    "gigpo": fg.gigpo,
    "kimi": fg.kimi,
    "ppo": fg.ppo,
    "dpo": fg.dpo,
}

ENVIRONMENTS = {
    "lookup": fg.lookup,
    "arithmetic": fg.arithmetic,
    "maze": fg.maze,
}

BY_IMPORT = "MODULE:FUNCTION, which is called without arguments and gives a fg.Env"


def imported(name: str, what: str) -> Any:
    """Import what `MODULE:NAME` names; the module may lie in the current folder. `what` it is, a message says."""
    module, _, own = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return getattr(import_module(module), own)
    except Exception as error:  # a module of the user's, which may raise anything
        why = str(error) if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: {error}"
        where = "its module lies in the current folder, or where Python looks"
        raise fg.BadInput(f"{what} {name!r} can't be imported: {why} (MODULE:NAME; {where})") from None


def make_tool(name: str) -> fg.Tool:
    """The tool that `MODULE:NAME` names: a `fg.Tool`, or a function with types and a docstring."""
    found = imported(name, "tool")
    if isinstance(found, fg.Tool):
        return found
    if not inspect.isfunction(found):
        raise fg.BadInput(f"tool {name!r} is {found!r:.80}: name a function with types and a docstring, or a fg.Tool")
    return fg.tool(found)


def make_reward(name: str, task: fg.Task) -> fg.Reward:
    """The reward of `MODULE:NAME`: a `fg.Reward`, or a function (task, answer) -> fg.Scored, tried on a task."""
    found = imported(name, "reward")
    reward = found if isinstance(found, fg.Reward) else fg.Reward(found)
    try:
        said: Any = reward.score(task, "")
    except Exception as error:  # a function of the user's
        said = error
    if not isinstance(said, fg.Scored):
        raise fg.BadInput(
            f"reward {name!r} came to {said!r:.200} for task {task.id!r} and an empty answer: name a function "
            "(task, answer) that returns fg.Scored(value), or fg.Scored(None, reason) where it can't judge"
        )
    return reward


def make_env(name: str) -> fg.Env:
    """The environment of that name, or what `module:function` gives; the module may lie in the current folder."""
    if name in ENVIRONMENTS:
        return ENVIRONMENTS[name]()
    if ":" not in name:
        raise fg.BadInput(f"environment {name!r} is unknown; choose from {', '.join(ENVIRONMENTS)}, or {BY_IMPORT}")
    constructor = imported(name, "environment")
    env = constructor() if callable(constructor) else constructor
    if not isinstance(env, fg.Env):
        raise fg.BadInput(f"environment {name!r} gave {env!r:.80}, which is no fg.Env: give {BY_IMPORT}")
    return env


OWN_CLIP = ("gspo", "cispo", "flow_grpo_released")  # whose bounds are of another kind than a preset's
UNCLIPPED = ("rloo", "kimi", "dpo")


def make_algorithm(
    name: str,
    *,
    beta: float,
    clip_high: float,
    max_tokens: int,
    entropy_bonus: float = 0.0,
    correction: Correction | None = None,
    **more: float,
) -> fg.Algorithm:
    """The member of that name with what a preset says, as far as it has such a setting; `more` is for ppo."""
    if name not in ALGORITHMS:
        raise fg.BadInput(f"algorithm {name!r} is unknown; choose from {', '.join(ALGORITHMS)}")
    options: dict[str, Any] = {} if name == "kimi" else {"beta": beta}
    options |= {} if correction is None else {"correction": correction}
    options |= {"clip_high": clip_high} if clip_high and name not in (*OWN_CLIP, *UNCLIPPED) else {}
    options |= {"entropy_bonus": entropy_bonus} if entropy_bonus else {}
    options |= {"max_tokens": max_tokens} if name == "dr_grpo" else {}
    return ALGORITHMS[name](**options, **(more if name == "ppo" else {}))


OPTIMIZERS = {  # what stands in the place of AdamW's moments
    "adamw": optax.scale_by_adam,
    "adamw8bit": scale_by_adam_8bit,
    "adafactor": scale_by_adafactor,
}


def base_of(name: str) -> optax.GradientTransformation:
    """The optimizer of that name, without rate and schedule."""
    if name not in OPTIMIZERS:
        raise fg.BadInput(f"optimizer {name!r} is unknown; choose from {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]()
