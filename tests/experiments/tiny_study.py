"""For tests of `compare`: the command with a study of a tiny planner, an arm of each kind of program."""

from functools import partial

import flowgrpo as fg
from experiments.cli import app
from experiments.studies import studies, study_arms
from experiments.studies.studies import STUDIES
from flowgrpo import launch
from flowgrpo.recipes.study import Arm, Study
from flowgrpo.training import names


def tiny() -> Study:
    """Say whether it runs. Expected: yes."""
    late = Arm(
        algorithm=studies.stale().arms["4 late, capped"].algorithm, program=partial(study_arms.stale_sampler, lag=2)
    )
    taught = Arm(algorithm=fg.algorithms.opd, program=partial(study_arms.distil_teacher, steps=1, oracle=True))
    hindsight = Arm(algorithm=fg.algorithms.sdpo, env={"hints": 0.0}, eval_env={"hints": 0.0})
    watched = Arm(program=partial(study_arms.scheduled_bonus, bonus=0.01, last=0))
    return Study(
        "Does it run?",
        "broadcast",
        {"broadcast": watched, "late": late, "taught": taught, "in hindsight": hindsight},
        changes={
            "updates": 2,
            "warm_steps": 2,
            "model_dim": 32,
            "layers": 1,
            "queries": 2,
            "samples": 4,
            "warm_rows": 8,
        },
        worlds={"lookup": {"hops": (1, 1), "hints": 0.5}},
    )


if __name__ == "__main__":
    STUDIES["tiny"], names.STUDIES = tiny, (*names.STUDIES, "tiny")  # before the command defines its flags
    from experiments import compare

    app.run(compare.main, cpu_devices=launch.num_cores())
