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

from flowgrpo.recipes.own_agent_config import Config

from .cli import app
from .cli.recipes import define_recipe, run_command

define_recipe("own_agent", Config, "runs/train_agent-SEED", dry_run=True)

app.read_flags(__name__)

if __name__ == "__main__":
    run_command()
