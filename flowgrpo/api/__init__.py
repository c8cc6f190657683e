"""The two entrances of a script: a whole run in one call, and a training loop of one's own.

Modules:

    choice    Which recipe, settings and objects the arguments of a script stand for
    result    What a run leaves: its folder, its metrics as arrays, its best planner as a model
    settings  Settings by name, and those that follow from environment, model and devices
    train     `train`: a whole run in one call, from objects or names
    trainer   `Trainer`: rollout, advantages and update as three calls, over any environment and model
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, submod_attrs={"result": ["RunResult"], "train": ["train"], "trainer": ["Trainer"]}
)
