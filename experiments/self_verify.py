"""Train a model with its own judgement of its answers as reward, and plot whether they are right.

    python -m experiments.self_verify
    python -m experiments.self_verify --updates=200 --workdir=runs/long
    python -m experiments.self_verify --model=PATH --tasks=train.jsonl

    question -> answer -> "Is it a correct answer?" -> P("Yes") of the frozen starting model -> Flow-GRPO

No answer key is used in training. A matcher with the key scores each answer for the plot only, which shows mean
P("Yes") and the true accuracy on the same axes. While both rise, the model learns from its own judgement. If P("Yes")
rises and the accuracy does not, the judge is hacked; a line in the terminal reports it.

Without --model a small model is made and runs offline on any CPU: it imitates answers of which 45 % are right, and
verdicts on answers of which most are. With --model its own starting weights are the judge, and --tasks the questions.

Expected offline: within 40 updates the true accuracy rises from 35 to 65 or 70 %, P("Yes") from 50 to 80 %, and the gap
stays. The judge has only seen answers that are numbers of the question. So a run resumed with --updates=60 finds that
it believes a large number that was never mentioned: P("Yes") passes 90 %, the true accuracy falls back to 50 %, and the
warning appears.

At the end the table compares the start and the last update, which is what a run without an answer key would have, on
held-out questions. The same command resumes a run that was stopped.
"""

import json

from flowgrpo.recipes.self_verify_config import Config

from .cli import app
from .cli.recipes import define_recipe, run_command, run_of_flags

define_recipe("self_verify", Config, "runs/self_verify-SEED")

app.read_flags(__name__)

from flowgrpo.recipes.self_verify import draw_curves


def main() -> None:
    """Train, and draw both curves."""
    recipe, config, folder, options = run_of_flags()
    result = recipe.train(config, folder, **options)
    draw_curves(folder, title="P(Yes) of the frozen start as the reward")
    print(json.dumps(result))


if __name__ == "__main__":
    run_command(main)
