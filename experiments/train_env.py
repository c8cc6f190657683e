"""Train a model on an environment of your own: an `fg.TextEnv`, a TRL-style class, gymnasium, textarena, or OpenEnv.

    python -m experiments.train_env --model=PATH --env=my_module:Parcel --tasks=tasks.jsonl
    python -m experiments.train_env --model=PATH --env=trl:my_module:MyEnvironment
    python -m experiments.train_env --model=PATH --env=gymnasium:FrozenLake-v1 --instructions="Answer with a number."
    python -m experiments.train_env --model=PATH --env=textarena:Wordle-v0 --python=/other/venv/bin/python
    python -m experiments.train_env --model=PATH --env=openenv:ws://127.0.0.1:8000/ws

An `fg.TextEnv` is played in this process; its number of turns is that of the class, and a line of --tasks may have any
fields. Any other environment runs in a separate process, with --python if its packages conflict with these, and
computes its own rewards. A TRL-style class has `reset`, public methods that are the model's tools, and `get_reward`;
its `reset` gets the fields of a line of --tasks, if there are tasks. For the others each action is a step: its last
number, or its text, as the action space requires. If an observation takes longer than --env_seconds, the episode ends
and is not trained on.

The work directory is that of every run (docs/checkpoints.md). The same command resumes a run that was stopped.
"""

from flowgrpo.recipes.own_env_config import Config

from .cli import app
from .cli.recipes import define_recipe, run_command

define_recipe("own_env", Config, "runs/train_env-SEED")

app.read_flags(__name__)

if __name__ == "__main__":
    run_command()
