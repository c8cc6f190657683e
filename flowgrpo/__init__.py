"""flowgrpo: train language-model agents that act over several turns with tools, by Flow-GRPO.

    tasks -> rollout -> Trajectories -> rewards -> advantages -> pack -> Batch -> update -> params

    import flowgrpo as fg

    fg.flow_grpo()                       the main names of all folders
    fg.algorithms.gae(...)               the other names of a folder, listed in its `__init__`
    fg.recipes.pure.train(...)           whole runs

Names are listed in `__init__.pyi`, and are imported on first use.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
