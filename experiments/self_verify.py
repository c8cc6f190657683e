"""A model is paid for what it believes of its own answers, and you see beside it whether they are right.

    python -m experiments.self_verify
    python -m experiments.self_verify --updates=200 --workdir=runs/long
    python -m experiments.self_verify --model=PATH --tasks=train.jsonl

    question -> answer -> "Is it a correct answer?" -> P("Yes") of the frozen starting model -> Flow-GRPO

No answer key takes part in the training. A matcher that holds it is asked beside the judge, and decides about nothing:
the plot shows mean P("Yes") and the true accuracy on the same axes. While both rise, the model learns from its own
judgement. Where P("Yes") rises and the truth does not, the judge is hacked; a line says so in the terminal.

Without --model a small model is made and runs offline on any CPU: it imitates answers of which 45 % are right, and
verdicts on answers of which most are. With --model its own starting weights are the judge, and --tasks the questions.

Expected offline: within 40 updates the true accuracy rises from 35 to 65 or 70 %, P("Yes") from 50 to 80 %, and the gap
stays. The judge was only ever shown answers that stand in the question. So a run that goes on with --updates=60 finds
that it believes a large number that was never named: P("Yes") passes 90 %, the true accuracy falls back to 50 %, and
the warning comes.

At the end the table compares the start and the last update, which is what a run without an answer key would have, on
questions that training never meets. The same command goes on where a run was stopped.
"""

import json

from flowgrpo.recipes.self_verify_config import Config, preset

from .cli import app
from .cli.flags import chosen_run, define_config, define_run, given

define_config(Config)
define_run("runs/self_verify-SEED")

app.read_flags(__name__)

from flowgrpo.recipes.self_verify import draw_curves, train


def main() -> None:
    """Train, and draw both curves."""
    config = preset(**given(Config))
    folder, options = chosen_run(f"runs/self_verify-{config.seed}")
    result = train(config, folder, **options)
    draw_curves(folder, title="P(Yes) of the frozen start as the reward")
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main, exact=True)
