"""The dict that maps a domain to the constructor of its reward, and what such a constructor may use."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple

import flowgrpo as fg
from flowgrpo.contracts import Reward
from flowgrpo.rewards import reasoning, symbolic
from flowgrpo.rewards.answer import answer
from flowgrpo.rewards.code import code
from flowgrpo.rewards.drawing import drawing_reward
from flowgrpo.rewards.numbers import rounded, within
from flowgrpo.rewards.router import router
from flowgrpo.rewards.school import school
from flowgrpo.rewards.vision import box_iou, count, point_in_box
from flowgrpo.sandbox import Limits, Sandbox


@dataclass(frozen=True, kw_only=True)
class Means:
    """Sandbox, time limit and tolerance that rewards are made with."""

    sandbox: Sandbox
    seconds: float = 5.0  # of one check
    tolerance: float | None = None  # relative, of numbers; None: as each reward has it

    @property
    def close(self):
        """How near a number must be to the gold answer."""
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
    "code": Domain(_code),
    "vision": Domain(lambda _: box_iou()),
    "point": Domain(lambda _: point_in_box()),
    "count": Domain(lambda _: count()),
    "drawing": Domain(lambda _: drawing_reward()),
    "reasoning_gym": Domain(
        lambda means: reasoning.reasoning(means.sandbox.call, seconds=means.seconds),
        reasoning.PRELOAD,
        "reasoning_gym",
        "reasoning_gym",
    ),
}


def preload(names: Collection[str]) -> tuple[str, ...]:
    """The modules that a sandbox for some domains preloads; raises where an extra is missing."""
    used = [DOMAINS[name] for name in DOMAINS if name in names]
    for domain in used:
        if domain.needs and find_spec(domain.needs) is None:
            raise fg.BadInput(f"judging these tasks needs {domain.needs}: pip install 'flowgrpo[{domain.extra}]'")
    return tuple(dict.fromkeys(module for domain in used for module in domain.preload))


def route(means: Means, *, default: str | None = None) -> Reward:
    """The router over all domains; tasks of a domain that isn't known go to the reward of `default`."""
    made = {name: domain.make(means) for name, domain in DOMAINS.items()}
    return router(made, default=made[default] if default else None)
