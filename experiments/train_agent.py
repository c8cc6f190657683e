"""Train an external agent without changing it: the trained model answers its OpenAI API requests.

    python -m experiments.train_agent
    python -m experiments.train_agent --model=PATH --tasks=train.jsonl --agent="python my_agent.py"
    python -m experiments.train_agent --model=PATH --tasks=train.jsonl --agent=my_module:agent --reward=my_module:score
    python -m experiments.train_agent --model=PATH --tasks=train.jsonl --agent="./agent.sh {query}" --dry_run

After `pip install '.[agent,gateway]'`. An agent is a program, which is started for each trajectory, finds the model at
OPENAI_BASE_URL and its task on standard input (a line of JSON), and writes its answer; or a function of a task and a
base URL, in a separate process. It may use the OpenAI SDK, any library on top of it, or curl.

Each request is a turn. Token ids are recorded as they were sampled: a request that continues the previous one extends
its context, and one that rewrites its history starts another. The outcome is judged by the reward of the task's domain,
by a function, or by the agent itself (POST BASE_URL/../reward).

Without --model everything is made here and runs offline on a CPU, on the tasks of `experiments.agentflow`, with an
agent that uses the OpenAI SDK (`pip install openai`).

The work directory is that of every run (docs/checkpoints.md). The same command resumes a run that was stopped.
"""

import json

from absl import flags

from flowgrpo.recipes.own_agent_config import Config, preset

from .cli import app
from .cli.flags import define_config, define_run, given_settings, run_options
from .cli.help import flag_heading

define_config(Config)
flag_heading("Run")
_DRY = flags.DEFINE_bool("dry_run", False, "Print rollouts of the first tasks, and exit.")
define_run("runs/train_agent-SEED")

app.read_flags(__name__)

from flowgrpo.recipes import own_agent


def main() -> None:
    """Train, or look."""
    config = preset(**given_settings(Config))
    folder, options = run_options(f"runs/train_agent-{config.seed}")
    if _DRY.value:
        own_agent.rehearse(config, folder)
    else:
        print(json.dumps(own_agent.train(config, folder, **options)))


if __name__ == "__main__":
    app.run(main, exact=True)
