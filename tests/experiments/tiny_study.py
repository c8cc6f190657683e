"""For tests of `compare`: the command with a study of a tiny planner, an arm of each kind of program."""

from functools import partial

from experiments.cli import app
from flowgrpo import launch
from flowgrpo.recipes import studies, study_arms
from flowgrpo.recipes.studies import STUDIES, Study
from flowgrpo.recipes.study_arms import Arm


def tiny() -> Study:
    """Say whether it runs. Expected: yes."""
    late = Arm(
        algorithm=studies.stale().arms["4 late, corrected"].algorithm, program=partial(study_arms.stale_sampler, lag=2)
    )
    return Study(
        "Does it run?",
        "broadcast",
        {"broadcast": Arm(), "late": late, "imitates": Arm(program=partial(study_arms.imitating, oracle=True))},
        changes={"updates": 2, "warm_steps": 2, "d": 32, "layers": 1, "queries": 2, "samples": 4, "warm_rows": 8},
        worlds={"lookup": {"hops": (1, 1)}},
    )


if __name__ == "__main__":
    STUDIES["tiny"] = tiny  # before the command defines its flags
    from experiments import compare

    app.run(compare.main, cpu_devices=launch.cores())
