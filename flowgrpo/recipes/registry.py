"""Names of members for flags: a dict from name to constructor for each family, and what `MODULE:NAME` imports.

`make_algorithm`, `make_env`, `make_tool` and `make_reward` build a member by its name; `DOMAINS` has the reward of each
domain, and `route` the router over all of them.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import optax

import flowgrpo as fg
from flowgrpo.algorithms.options import Correction
from flowgrpo.contracts import Reward
from flowgrpo.envs.arithmetic import DECEPTIVE
from flowgrpo.files import failure, import_named, pip_install
from flowgrpo.learner.adam8bit import scale_by_adam_8bit
from flowgrpo.learner.state import make_optimizer, scale_by_adafactor
from flowgrpo.recipes import names
from flowgrpo.recipes.names import BY_IMPORT
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

ALGORITHMS = {name: getattr(fg.algorithms, name) for name in names.ALGORITHMS}

ENVIRONMENTS: dict[str, Callable[..., fg.Env]] = {
    "lookup": fg.lookup,
    "arithmetic": fg.arithmetic,
    "maze": fg.maze,
    # Of these no planner here makes everything right, so that arms of a study can differ.
    "lookup_hard": partial(fg.lookup, hops=(2, 2), relations=8, tools=8),
    "arithmetic_hard": partial(fg.arithmetic, turns=9, flaws=DECEPTIVE),
    "maze_hard": partial(fg.maze, width=5, turns=20),
}


def make_tool(name: str) -> fg.Tool:
    """The tool that `MODULE:NAME` names: a `fg.Tool`, or a function with types and a docstring."""
    found = import_named(name, "tool")
    if isinstance(found, fg.Tool):
        return found
    if not inspect.isfunction(found):
        raise fg.BadInput(f"tool {name!r} is {found!r:.80}: name a function with types and a docstring, or a fg.Tool")
    return fg.tool(found)


def make_reward(name: str, task: fg.Task) -> fg.Reward:
    """The reward of `MODULE:NAME`: a `fg.Reward`, or a function (task, answer) -> fg.Scored, tried on a task."""
    found = import_named(name, "reward")
    reward = found if isinstance(found, fg.Reward) else fg.Reward(found)
    try:
        said: Any = reward.score(task, "")
    except (Exception, SystemExit) as error:  # a function of the user's
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
    constructor = import_named(name, "environment")
    try:
        env = constructor() if callable(constructor) else constructor
    except (Exception, SystemExit) as error:  # a function of the user's
        raise fg.BadInput(f"environment {name!r} can't be made: {failure(error)}; give {BY_IMPORT}") from None
    if not isinstance(env, fg.Env):
        raise fg.BadInput(f"environment {name!r} gave {env!r:.80}, which is no fg.Env: give {BY_IMPORT}")
    return env


OWN_CLIP = ("gspo", "cispo", "flow_grpo_released")  # whose bounds are of another kind than a preset's
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
    **more: float,
) -> fg.Algorithm:
    """The member of that name with what a preset says, as far as it has such a setting; `more` is for ppo."""
    if name not in ALGORITHMS:
        raise fg.BadInput(f"algorithm {name!r} is unknown; choose from {', '.join(ALGORITHMS)}")
    options: dict[str, Any] = {} if name in WITHOUT_BETA else {"beta": beta}
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


def falling_optimizer(rate: float, steps: int, share: float, **kind: Any) -> optax.GradientTransformation:
    """An optimizer whose rate falls within so many steps to a share of it; a share of 1 leaves it as it is."""
    fall = {"decay_steps": steps, "final_share": share} if share < 1 else {}
    return make_optimizer(learning_rate=rate, **fall, **kind)


@dataclass(frozen=True, kw_only=True)
class Means:
    """Sandbox, time limit and tolerance that rewards are made with."""

    sandbox: Sandbox
    seconds: float = 5.0  # of one check
    tolerance: float | None = None  # relative, of numbers; None: as each reward has it

    @property
    def close(self):
        """Say how near a number must be to the gold answer."""
        return rounded if self.tolerance is None else within(relative=self.tolerance, absolute=self.tolerance)


class Domain(NamedTuple):
    """A reward of a domain, the modules that its sandbox preloads, and the extra that it needs."""

    make: Callable[[Means], Reward]
    preload: tuple[str, ...] = ()
    needs: str = ""  # a module that isn't among the dependencies
    extra: str = ""


def _code(means: Means) -> Reward:
    limits = Limits(seconds=means.seconds)
    return code(means.sandbox, limits=limits, tolerance=1e-6 if means.tolerance is None else means.tolerance)


def _mathematics(means: Means) -> Reward:
    return symbolic.mathematics(means.sandbox.call, seconds=means.seconds, close=means.close)


_MATH = Domain(_mathematics, symbolic.PRELOAD, "math_verify", "math")

DOMAINS: Mapping[str, Domain] = {
    "answer": Domain(lambda means: answer(close=means.close)),
    "math": _MATH,
    "mathematics": _MATH,
    "k12": Domain(lambda means: school(close=means.close)),
    "game24": Domain(lambda _: game24()),
    "reverse_text": Domain(lambda _: similarity()),
    "alphabet_sort": Domain(lambda _: similarity(power=4.0, spell=plain_list)),
    "code": Domain(_code),
    "vision": Domain(lambda _: box_iou()),
    "point": Domain(lambda _: point_in_box()),
    "count": Domain(lambda _: count_match()),
    "drawing": Domain(lambda _: drawing_reward()),
    "reasoning_gym": Domain(
        lambda means: reasoning(means.sandbox.call, seconds=means.seconds),
        REASONING_GYM,
        "reasoning_gym",
        "reasoning_gym",
    ),
}


def preload(names: Collection[str]) -> tuple[str, ...]:
    """The modules that a sandbox for some domains preloads; raises where an extra is missing."""
    used = [DOMAINS[name] for name in DOMAINS if name in names]
    for domain in used:
        if missing := _missing(domain):
            raise fg.BadInput(missing)
    return tuple(dict.fromkeys(module for domain in used for module in domain.preload))


def _missing(domain: Domain) -> str:
    """What to install before tasks of a domain can be judged; "" where everything is here."""
    if not domain.needs or find_spec(domain.needs) is not None:
        return ""
    return f"judging these tasks needs {domain.needs}: {pip_install(domain.extra)}"


def route(means: Means, *, default: str | None = None) -> Reward:
    """The router over all domains; tasks of a domain that isn't known go to the reward of `default`.

    The domains whose extra is missing are in the way of no other: they raise where a task of theirs is to be judged.
    """

    def make(domain: Domain) -> Reward:
        if not (missing := _missing(domain)):
            return domain.make(means)

        def score(_task: fg.Task, _output: str) -> fg.Scored:
            raise fg.BadInput(missing)

        return Reward(score)

    made = {name: make(domain) for name, domain in DOMAINS.items()}
    return router(made, default=made[default] if default else None)
