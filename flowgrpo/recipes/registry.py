"""Constructors by name, for flags: algorithms, environments, optimizers, rewards, and what `MODULE:NAME` imports.

`make_algorithm`, `make_env`, `make_tool` and `make_reward` make one by its name; `DOMAINS` has the reward of each
domain, and `route_by_domain` is the reward that routes each task to that of its domain.
"""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import optax

import flowgrpo.algorithms as family
from flowgrpo.algorithms.options import Correction
from flowgrpo.contracts import Algorithm, Env, Reward, RewardResult, Tool
from flowgrpo.envs.arithmetic import DECEPTIVE, arithmetic
from flowgrpo.envs.lookup import lookup
from flowgrpo.envs.maze import maze
from flowgrpo.files import describe_error, import_named, pip_install
from flowgrpo.learner.adam8bit import scale_by_adam_8bit
from flowgrpo.learner.state import adamw, scale_by_adafactor
from flowgrpo.rewards.answers import symbolic
from flowgrpo.rewards.answers.game24 import game24
from flowgrpo.rewards.answers.match import answer
from flowgrpo.rewards.answers.numbers import rounded, within
from flowgrpo.rewards.answers.school import school
from flowgrpo.rewards.answers.similarity import plain_list, similarity
from flowgrpo.rewards.code.reward import code
from flowgrpo.rewards.combine import router
from flowgrpo.rewards.reasoning_gym import PRELOAD as REASONING_GYM
from flowgrpo.rewards.reasoning_gym import reasoning
from flowgrpo.rewards.vision.boxes import box_iou, count_match, point_in_box
from flowgrpo.rewards.vision.drawing import drawing_reward
from flowgrpo.sandbox import Limits, Sandbox
from flowgrpo.tools.schema import tool
from flowgrpo.training import names
from flowgrpo.training.names import ENV_IMPORT
from flowgrpo.types import BadInput, Task

ALGORITHMS = {name: getattr(family, name) for name in names.ALGORITHMS}

ENVIRONMENTS: dict[str, Callable[..., Env]] = {
    "lookup": lookup,
    "arithmetic": arithmetic,
    "maze": maze,
    # No planner here solves all tasks of these, so that the arms of a study can differ.
    "lookup_hard": partial(lookup, hops=(2, 2), relations=8, tools=8),
    "arithmetic_hard": partial(arithmetic, turns=9, flaws=DECEPTIVE),
    "maze_hard": partial(maze, width=5, turns=20),
}


def make_tool(name: str) -> Tool:
    """The tool that `MODULE:NAME` names: an `fg.contracts.Tool`, or a function with types and a docstring."""
    value = import_named(name, "tool")
    if isinstance(value, Tool):
        return value
    if not inspect.isfunction(value):
        raise BadInput(
            f"tool {name!r} is {value!r:.80}: name a function with types and a docstring, or an fg.contracts.Tool"
        )
    return tool(value)


def check_tools(tools: Sequence[Tool]) -> list[Tool]:
    """The tools, if each is an `fg.contracts.Tool`."""
    for value in tools:
        if not isinstance(value, Tool):
            raise BadInput(
                f"{value!r:.80} is no fg.contracts.Tool: make one of a function with types and a docstring, fg.tool"
            )
    return list(tools)


def make_reward(name: str, task: Task) -> Reward:
    """The reward that `MODULE:NAME` names: an `fg.Reward`, or a function (task, answer) -> fg.RewardResult.

    It is called once, for `task` and an empty answer, so that an error shows before training.
    """
    value = import_named(name, "reward")
    return check_reward(value if isinstance(value, Reward) else Reward(value), name, task)


def check_reward(reward: Reward, name: str, task: Task) -> Reward:
    """The reward, if it judges an empty answer to this task by an `fg.RewardResult`; `name` is for the message."""
    try:
        result: Any = reward.score(task, "")
    except (Exception, SystemExit) as error:  # the user's code
        result = error
    if not isinstance(result, RewardResult):
        raise BadInput(
            f"reward {name!r} came to {result!r:.200} for task {task.id!r} and an empty answer: name a function "
            "(task, answer) that returns fg.RewardResult(value), or fg.RewardResult(None, reason) if it cannot judge"
        )
    return reward


def make_env(name: str) -> Env:
    """The environment of that name, or what `MODULE:FUNCTION` returns; the module may be in the current folder."""
    if name in ENVIRONMENTS:
        return ENVIRONMENTS[name]()
    if ":" not in name:
        raise BadInput(f"environment {name!r} is unknown; choose from {', '.join(ENVIRONMENTS)}, or {ENV_IMPORT}")
    constructor = import_named(name, "environment")
    try:
        env = constructor() if callable(constructor) else constructor
    except (Exception, SystemExit) as error:  # the user's code
        raise BadInput(f"environment {name!r} can't be made: {describe_error(error)}; give {ENV_IMPORT}") from None
    if not isinstance(env, Env):
        raise BadInput(f"environment {name!r} gave {env!r:.80}, which is no fg.Env: give {ENV_IMPORT}")
    return env


OWN_CLIP = ("gspo", "cispo", "flow_grpo_released")  # their clip widths are on another scale than --clip_high
UNCLIPPED = ("rloo", "kimi", "dpo", "opd")
WITHOUT_BETA = ("kimi", "opd")


def make_algorithm(
    name: str,
    *,
    beta: float,
    clip_high: float,
    max_tokens: int,
    entropy_bonus: float = 0.0,
    correction: Correction | None = None,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> Algorithm:
    """The algorithm of that name, with those of these settings that it has; or that of MODULE:NAME, as it is.

    Args:
        beta: KL coefficient.
        clip_high: upper clip width; 0: the algorithm's own.
        max_tokens: largest number of tokens of a trajectory, by which Dr. GRPO divides.
        entropy_bonus: entropy coefficient.
        correction: importance weights for tokens of other weights or another engine.
        gamma, lam: discount factor and GAE lambda of ppo.
    """
    if ":" in name:
        value = import_named(name, "algorithm")
        algorithm = value() if inspect.isfunction(value) else value
        if not isinstance(algorithm, Algorithm):
            raise BadInput(f"algorithm {name!r} is {algorithm!r:.80}, which is no fg.Algorithm: make one, fg.algorithm")
        return algorithm
    if name not in ALGORITHMS:
        raise BadInput(f"algorithm {name!r} is unknown; choose from {', '.join(ALGORITHMS)}, or MODULE:NAME")
    options: dict[str, Any] = {} if name in WITHOUT_BETA else {"beta": beta}
    options |= {} if correction is None else {"correction": correction}
    options |= {"clip_high": clip_high} if clip_high and name not in (*OWN_CLIP, *UNCLIPPED) else {}
    options |= {"entropy_bonus": entropy_bonus} if entropy_bonus else {}
    options |= {"max_tokens": max_tokens} if name == "dr_grpo" else {}
    options |= {"gamma": gamma, "lam": lam} if name == "ppo" else {}
    return ALGORITHMS[name](**options)


OPTIMIZERS = {  # replacements of `optax.scale_by_adam`
    "adamw": optax.scale_by_adam,
    "adamw8bit": scale_by_adam_8bit,
    "adafactor": scale_by_adafactor,
}


def make_base_optimizer(name: str) -> optax.GradientTransformation:
    """The gradient transformation of that name, without learning rate and schedule."""
    if name not in OPTIMIZERS:
        raise BadInput(f"optimizer {name!r} is unknown; choose from {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]()


def decayed_adamw(
    rate: float,
    steps: int,
    decay_to: float,
    *,
    base: optax.GradientTransformation | None = None,
    matrices: Mapping[str, Any] | None = None,
) -> optax.GradientTransformation:
    """AdamW whose learning rate decays within `steps` gradient steps to `decay_to` times itself; at 1 it is constant.

    `base` replaces Adam; `matrices` are trained by Muon (see `adamw`).
    """
    if decay_to >= 1:
        return adamw(rate, base=base, matrices=matrices)
    return adamw(rate, decay_steps=steps, final_fraction=decay_to, base=base, matrices=matrices)


@dataclass(frozen=True, kw_only=True)
class RewardContext:
    """What rewards are made with: sandbox, time limit and numeric tolerance."""

    sandbox: Sandbox
    seconds: float = 5.0  # limit of one check
    tolerance: float | None = None  # relative, of numbers; None: each reward's own

    @property
    def close(self) -> Callable[..., bool]:
        """Whether a number is close enough to the gold answer."""
        return rounded if self.tolerance is None else within(relative=self.tolerance, absolute=self.tolerance)


class TaskDomain(NamedTuple):
    """The reward of a domain, the modules that its sandbox preloads, and the extra that it needs."""

    make: Callable[[RewardContext], Reward]
    preload: tuple[str, ...] = ()
    needs: str = ""  # a module that is not among the dependencies
    extra: str = ""


def _code(context: RewardContext) -> Reward:
    limits = Limits(seconds=context.seconds)
    return code(context.sandbox, limits=limits, tolerance=1e-6 if context.tolerance is None else context.tolerance)


def _mathematics(context: RewardContext) -> Reward:
    return symbolic.mathematics(context.sandbox.call, seconds=context.seconds, close=context.close)


_MATH = TaskDomain(_mathematics, symbolic.PRELOAD, "math_verify", "math")

DOMAINS: Mapping[str, TaskDomain] = {
    "answer": TaskDomain(lambda context: answer(close=context.close)),
    "math": _MATH,
    "mathematics": _MATH,
    "k12": TaskDomain(lambda context: school(close=context.close)),
    "game24": TaskDomain(lambda _: game24()),
    "reverse_text": TaskDomain(lambda _: similarity()),
    "alphabet_sort": TaskDomain(lambda _: similarity(power=4.0, spell=plain_list)),
    "code": TaskDomain(_code),
    "vision": TaskDomain(lambda _: box_iou()),
    "point": TaskDomain(lambda _: point_in_box()),
    "count": TaskDomain(lambda _: count_match()),
    "drawing": TaskDomain(lambda _: drawing_reward()),
    "reasoning_gym": TaskDomain(
        lambda context: reasoning(context.sandbox.call, seconds=context.seconds),
        REASONING_GYM,
        "reasoning_gym",
        "reasoning_gym",
    ),
}


def modules_to_preload(names: Collection[str]) -> tuple[str, ...]:
    """The modules that a sandbox for these domains preloads; raises `BadInput` if an extra is missing."""
    domains = [DOMAINS[name] for name in DOMAINS if name in names]
    for domain in domains:
        if message := _missing_extra(domain):
            raise BadInput(message)
    return tuple(dict.fromkeys(module for domain in domains for module in domain.preload))


def _missing_extra(domain: TaskDomain) -> str:
    """What to install before tasks of a domain can be judged; "" if nothing is missing."""
    if not domain.needs or find_spec(domain.needs) is not None:
        return ""
    return f"judging these tasks needs {domain.needs}: {pip_install(domain.extra)}"


def route_by_domain(context: RewardContext, *, default: str | None = None) -> Reward:
    """The reward that judges each task by its domain; `default` names the domain for tasks of an unknown one.

    A domain whose extra is missing raises only when one of its tasks is to be judged.
    """

    def make(domain: TaskDomain) -> Reward:
        if not (message := _missing_extra(domain)):
            return domain.make(context)

        def refuse(_task: Task, _output: str) -> RewardResult:
            raise BadInput(message)

        return Reward(refuse)

    rewards = {name: make(domain) for name, domain in DOMAINS.items()}
    return router(rewards, default=rewards[default] if default else None)
