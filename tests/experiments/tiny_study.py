"""For tests of `compare`: the command with a study of a tiny planner, an arm of each kind of program."""

from experiments import arms, common, studies
from experiments.arms import Arm
from experiments.studies import STUDIES, Study
from flowgrpo import launch


def tiny() -> Study:
    """Say whether it runs. Expected: yes."""
    late = Arm(algorithm=studies.stale().arms["4 late, corrected"].algorithm, program=arms.stale(2))
    return Study(
        "Does it run?",
        "broadcast",
        {"broadcast": Arm(), "late": late, "imitates": Arm(program=arms.imitating(oracle=True))},
        settings={"updates": 2, "warm_steps": 2, "d": 32, "layers": 1, "queries": 2, "samples": 4, "warm_rows": 8},
        worlds={"lookup": {"hops": (1, 1)}},
    )


if __name__ == "__main__":
    STUDIES["tiny"] = tiny  # before the command defines its flags
    from experiments import compare

    common.run(compare.main, cpu_devices=launch.cores())
