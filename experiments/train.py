"""Train on whatever the flags name: an environment, an agent, or tasks that a reward judges.

    python -m experiments.train --env=maze --algorithm=ppo
    python -m experiments.train --env=my_module:my_env
    python -m experiments.train --env=my_module:Parcel --model=PATH --tasks=train.jsonl
    python -m experiments.train --tasks=train.jsonl --model=PATH --reward=my_module:score
    python -m experiments.train --tasks=train.jsonl --model=PATH --tools=calculator,my_module:look
    python -m experiments.train --agent="python my_agent.py" --tasks=train.jsonl --model=PATH
    python -m experiments.train --recipe=my_module

`fg.train` with flags. The recipe of the run follows from them, and with it all other flags: `--env=maze --help` lists
those of a pure environment. As in `fg.train`, sizes of a run with a model follow from the devices, too: on a CPU they
are small, whatever --help says.

    --env without --model      pure: a small planner is made and trained on one of the built-in environments, or on the
                               fg.Env that a function of yours returns (quickstart)
    --env with --model         own_env: an fg.TextEnv, TRL-style class, gymnasium, textarena or OpenEnv (train_env)
    --agent                    own_agent: a program or a function that calls the model (train_agent)
    --tasks                    own_env: one action answers a task, which --reward judges, or the reward of its domain
    --tasks with --tools       agent: the agent system with its tools (agentflow)
    --recipe=NAME or MODULE    that recipe, or the `RECIPE` of a module of yours

The work directory is that of every run (docs/checkpoints.md). The same command resumes a run that was stopped.
"""

from .cli import app
from .cli.choice import define_chosen_recipe
from .cli.recipes import run_command

define_chosen_recipe(__name__, "runs/train-SEED")

app.read_flags(__name__)

if __name__ == "__main__":
    run_command()
