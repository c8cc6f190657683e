"""Train an agent of your own, as it is: its requests to the API of OpenAI are answered by the model that is trained.

    python -m experiments.train_agent
    python -m experiments.train_agent --model=PATH --tasks=train.jsonl --agent="python my_agent.py"
    python -m experiments.train_agent --model=PATH --tasks=train.jsonl --agent=my_module:agent --reward=my_module:score
    python -m experiments.train_agent --model=PATH --tasks=train.jsonl --agent="./agent.sh {query}" --dry_run

After `pip install '.[agent,gateway]'`. An agent is a program, which is started for each trajectory, finds the model at
OPENAI_BASE_URL and its task on standard input (a line of JSON), and writes its answer; or a function of a task and a
base URL, in a process of its own. It may be written with the SDK of OpenAI, with any library over it, or with curl.

Each of its requests is a turn. The ids of what the model was told and said are those that were sampled: a request that
goes on where the last one ended appends to its context, and one that rewrites its history begins another. The outcome
is judged by the reward of the task's domain, by a function, or by the agent itself (POST BASE_URL/../reward).

Without --model everything is made here and runs offline on a CPU, on the tasks of `experiments.agentflow`, with an
agent that is written with the SDK of OpenAI (`pip install openai`).

The work directory is that of every run (docs/checkpoints.md). The same command goes on where a run was stopped.
"""

import json

from absl import flags

from flowgrpo.recipes.own_agent_config import Config, preset

from .cli import app
from .cli.flags import chosen_run, define_config, define_run, given
from .cli.help import flag_heading

define_config(Config)
flag_heading("What is run")
_DRY = flags.DEFINE_bool("dry_run", False, "Print rollouts of the first tasks, and stop.")
define_run("runs/train_agent-SEED")

app.read_flags(__name__)

from flowgrpo.recipes import own_agent


def main() -> None:
    """Train, or look."""
    config = preset(**given(Config))
    folder, options = chosen_run(f"runs/train_agent-{config.seed}")
    if _DRY.value:
        own_agent.rehearse(config, folder)
    else:
        print(json.dumps(own_agent.train(config, folder, **options)))


if __name__ == "__main__":
    app.run(main, exact=True)
