"""flowgrpo: train language-model agents that act over several turns with tools, by Flow-GRPO.

    tasks -> rollout -> Trajectories -> rewards -> advantages -> pack -> Batch -> update -> params

    import flowgrpo as fg

    fg.flow_grpo()                       the names that most scripts use
    fg.algorithms.gae(...)               the other names of a folder, listed in its `__init__`
    fg.recipes.pure.RECIPE.train(...)    whole runs

Names are listed in `__init__.pyi`, and are imported on first use. The first name of `fg` that needs JAX also configures
it as a script wants it, unless `fg.launch.configure` did, or the environment has FLOWGRPO_CONFIGURE=0; modules that are
imported by their own names configure nothing.
"""

import sys
from typing import Any

import lazy_loader

__version__ = "0.1.0"

_import_name, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    """A public name, imported on first use."""
    value = _import_name(name)
    if name != "launch" and "jax" in sys.modules:  # `launch` is how one configures otherwise
        from flowgrpo.launch import configure_by_default

        configure_by_default()
    return value
