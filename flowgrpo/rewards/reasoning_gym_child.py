"""reasoning-gym's verifiers, in a process that can be killed: `verify`.

The warm interpreter of the sandbox loads this module once and is forked for every call. It imports nothing of flowgrpo.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType


class _StubModule(ModuleType):
    """A module with an empty class for every name."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _PlottingStubs:
    """Import hook with stubs for plotting libraries, which a dependency imports and no verifier calls.

    They would need a home directory to write to.
    """

    def find_spec(self, name: str, *_) -> ModuleSpec | None:
        """Stub of a plotting library; None for other modules leaves them to other finders."""
        is_plotting = name.split(".")[0] in ("matplotlib", "mpl_toolkits")
        return ModuleSpec(name, self, is_package=True) if is_plotting else None  # type: ignore

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """A stub has no code."""


def _warm() -> None:
    """Load reasoning-gym without plotting libraries, so that forks of this process have it."""
    sys.meta_path.insert(0, _PlottingStubs())  # type: ignore
    verify("chain_sum", {"size": 1, "seed": 0}, 0, "")


def verify(name: str, options: dict, index: int, answer: str) -> float:
    """Score of an answer to a generated task, from 0 to 1; the task is generated again from its seed."""
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(name, **options)
    entry = dataset[index]
    try:
        return float(dataset.score_answer(answer=answer, entry=entry))
    except Exception:  # an answer that breaks its verifier is wrong
        return 0.0


if "flowgrpo.sandbox.zygote" in sys.modules:  # preloaded by the sandbox, to be forked
    _warm()
