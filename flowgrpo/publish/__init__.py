"""What leaves a run: its planner as a model, with a card, and its trajectories as a page.

Modules:

    export      Read a run's settings and planner; write the planner as a model
    hub         Upload an exported folder to the Hugging Face Hub
    model_card  The model card of exported weights
    pages       The page of the trajectories that a run recorded
"""

import lazy_loader

# Imported on first use, since each imports everything that its kind of run needs.
__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submodules=("export", "hub", "model_card", "pages"))
