"""How good a run's planner is, before and after: sampled success on fresh test tasks, tool errors, turns.

    python -m experiments.evaluate --workdir=runs/quickstart-lookup-0
    python -m experiments.evaluate --workdir=runs/quickstart-lookup-0 --seed=7 --num_tasks=2000 --samples=8

Opens the run's checkpoints, and lets the warm start and the checkpoint that was best in validation do the same tasks,
of kinds that neither has seen. Prints a table and one JSON line, with `pass@k` where there are several samples a task;
in seconds.
"""

import json
from pathlib import Path

import jax
from absl import flags

import flowgrpo as fg
from experiments import common, setups
from experiments.plays import right_tool_share
from experiments.pure_work import judge, play_test, pure_work
from experiments.session import Session, report
from flowgrpo import launch
from flowgrpo.learner.folder import RUN

_WORKDIR = flags.DEFINE_string("workdir", None, "The folder of a run.", required=True)
_SEED = flags.DEFINE_integer("seed", 1000, "Seed of the tasks and of the sampling.")
_TASKS = flags.DEFINE_integer("num_tasks", 1000, "Test tasks.", lower_bound=1)
_SAMPLES = flags.DEFINE_integer("samples", 1, "Trajectories of each task.", lower_bound=1)


def open_session(folder: Path) -> tuple[Session, setups.Setup]:
    """The run in a folder, where it stands."""
    path = folder / RUN
    if not path.exists():
        raise fg.BadInput(f"{folder} holds no run: {RUN} is missing; give the --workdir of a quickstart")
    setup = setups.build(json.loads(path.read_text())["settings"])
    session = Session(pure_work(setup), folder)
    if not session.restore():
        raise fg.BadInput(f"{folder} has no checkpoint yet: let the run go on")
    return session, setup


def main() -> None:
    """Evaluate, print the table and one JSON line."""
    session, setup = open_session(Path(_WORKDIR.value))
    best, final = session.best_params()
    key, env, samples = jax.random.key(_SEED.value), setup.env, _SAMPLES.value
    rollouts = play_test(setup, (session.start, final), key, tasks=_TASKS.value, samples=samples)
    ks = sorted({1, samples})
    before, after = (judge(rollout, env, samples=samples, ks=ks) for rollout in rollouts)
    print(report(before, after, [right_tool_share(env, rollout) for rollout in rollouts]))
    names = {"success": "success", "tool_errors": "tool_error", "turns": "turns"} | {
        f"pass@{k}": f"pass@{k}" for k in ks
    }
    result = {"best_update": best, "seed": _SEED.value, "tasks": _TASKS.value, "samples": samples}
    for when, figures in (("before", before.figures()), ("after", after.figures())):
        result |= {f"{name}_{when}": figures[field] for field, name in names.items() if field in figures}
    print(json.dumps(result))


if __name__ == "__main__":
    common.run(main, cpu_devices=launch.cores())
