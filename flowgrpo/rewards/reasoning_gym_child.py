"""Scores of answers to tasks by reasoning-gym's verifiers, computed in a process that can be killed.

The warm interpreter of the sandbox loads this module once and is forked for every call. It imports nothing of flowgrpo.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Blank(ModuleType):
    """A module that has an empty class by whatever name it is asked for."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Undrawn:
    """Finder of blanks for what draws: a dependency imports it, it wants a home to write to; no verifier draws."""

    def find_spec(self, name: str, *_) -> ModuleSpec | None:
        """Answer Python's search for a module with a blank if it draws; None leaves it to other finders."""
        drawn = name.split(".")[0] in ("matplotlib", "mpl_toolkits")
        return ModuleSpec(name, self, is_package=True) if drawn else None  # type: ignore

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Blank(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing."""


def _warm() -> None:
    """Load reasoning-gym without what draws, so that a fork of this process has it."""
    sys.meta_path.insert(0, _Undrawn())  # type: ignore
    verify("chain_sum", {"size": 1, "seed": 0}, 0, "")


def verify(name: str, options: dict, index: int, answer: str) -> float:
    """Score how right an answer to a generated task is, from 0 to 1; the task is made again from its seed."""
    import reasoning_gym

    made = reasoning_gym.create_dataset(name, **options)
    entry = made[index]
    try:
        return float(made.score_answer(answer=answer, entry=entry))
    except Exception:  # a verifier that an answer breaks was not convinced by it
        return 0.0


if "flowgrpo.sandbox.zygote" in sys.modules:  # loaded to be forked, in a process of its own
    _warm()
