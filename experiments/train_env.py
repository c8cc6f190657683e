"""Train a model on an environment of your own: a TRL-style class, gymnasium, textarena, or a server of OpenEnv.

    python -m experiments.train_env --model=PATH --env=trl:my_module:MyEnvironment
    python -m experiments.train_env --model=PATH --env=gymnasium:FrozenLake-v1 --instructions="Answer with a number."
    python -m experiments.train_env --model=PATH --env=textarena:Wordle-v0 --python=/other/venv/bin/python
    python -m experiments.train_env --model=PATH --env=openenv:ws://127.0.0.1:8000/ws

The environment lives in a process of its own, of --python where its packages would fight with these, and pays for its
episodes by itself. A TRL-style class has `reset`, public methods that are the model's tools, and `get_reward`; its
`reset` is given the fields of a line of --tasks, where there are some. Of the others each action is a step: the number
that stands last in it, or its words, as the environment's space of actions wants it. An observation that can't be had
in --env_seconds ends its episode, which then takes no part in training.

The work directory is that of every run (docs/checkpoints.md). The same command goes on where a run was stopped.
"""

import json

from flowgrpo.recipes.own_env_config import Config, preset

from .cli import app
from .cli.flags import chosen_run, define_config, define_run, given

define_config(Config)
define_run("runs/train_env-SEED")

app.read_flags(__name__)

from flowgrpo.recipes import own_env


def main() -> None:
    """Train."""
    config = preset(**given(Config))
    folder, options = chosen_run(f"runs/train_env-{config.seed}")
    print(json.dumps(own_env.train(config, folder, **options)))


if __name__ == "__main__":
    app.run(main, exact=True)
