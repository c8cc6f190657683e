"""How good a run's planner is, before and after: sampled success on fresh test tasks, tool errors, turns.

    python -m experiments.evaluate --workdir=runs/quickstart-lookup-0
    python -m experiments.evaluate --workdir=runs/quickstart-lookup-0 --seed=7 --num_tasks=2000 --samples=8

Opens the checkpoints of a run of quickstart or agentflow, and lets the warm start and the checkpoint that was best in
validation do the same tasks, of kinds that neither has seen. Prints a table and one JSON line, with `pass@k` where
there are several samples a task.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from absl import flags

import flowgrpo as fg
from experiments import agent_setups, common, setups
from experiments.headings import heading
from experiments.hosted_exam import compare_before_after, examine
from experiments.hosted_work import hosted_work
from experiments.pure_work import judge, play_test, pure_work
from experiments.session import Tested, open_session
from experiments.session_files import report
from flowgrpo.learner.folder import RUN
from flowgrpo.report.progress import counted

FIRST = 1 << 20  # test tasks of an agent run from this one on: others than those of its own table
heading("What is run")
_SEED = flags.DEFINE_integer("seed", 1000, "Seed of the tasks and of the sampling.")
heading("Sizes")
_TASKS = flags.DEFINE_integer("num_tasks", 1000, "Test tasks.", lower_bound=1)
_SAMPLES = flags.DEFINE_integer("samples", 1, "Trajectories of each task.", lower_bound=1)
heading("Files and resuming")
_WORKDIR = flags.DEFINE_string("workdir", None, "The folder of a run.", required=True)


def main() -> None:
    """Evaluate, print the table and one JSON line."""
    folder = Path(_WORKDIR.value)
    path = folder / RUN
    if not path.exists():
        raise fg.BadInput(
            f"{folder} holds no run: {RUN} is missing; give the --workdir of a quickstart or an agentflow"
        )
    settings = json.loads(path.read_text())["settings"]
    best, tested = _evaluation(settings, folder)(settings, folder)
    print(tested.words)
    samples, ks = _SAMPLES.value, _ks()
    names = {"success": "success", "tool_errors": "tool_error", "turns": "turns"} | {
        f"pass@{k}": f"pass@{k}" for k in ks
    }
    result = {"best_update": best, "seed": _SEED.value, "tasks": _TASKS.value, "samples": samples}
    for when, one in zip(("before", "after"), tested.figures, strict=True):
        figures = one.figures()
        result |= {f"{name}_{when}": figures[field] for field, name in names.items() if field in figures}
    print(json.dumps(result | tested.more))


def _evaluation(settings: Mapping[str, Any], folder: Path):
    """How a run with such settings is evaluated."""
    if "env" in settings:
        return evaluate_pure
    if "exam_turns" in settings:
        return evaluate_agent
    raise fg.BadInput(f"{folder} is a run of another command, whose own result.json says how it did")


def _ks() -> list[int]:
    return sorted({1, _SAMPLES.value})


def evaluate_pure(settings: Mapping[str, Any], folder: Path) -> tuple[int | None, Tested]:
    """Of a run on a pure environment: the best update, and how it and the warm start do."""
    setup = setups.build(dict(settings))
    session = open_session(pure_work(setup), folder)
    best, final = session.best_params()
    env, samples = setup.env, _SAMPLES.value
    key = jax.random.key(_SEED.value)
    session.progress.say(f"playing {_TASKS.value} test tasks with the start, and with update {best}")
    rollouts = play_test(setup, (session.start, final), key, tasks=_TASKS.value, samples=samples)
    before, after = (judge(rollout, env, samples=samples, ks=_ks()) for rollout in rollouts)
    return best, Tested([before, after], report(before, after), {})


def evaluate_agent(settings: Mapping[str, Any], folder: Path) -> tuple[int | None, Tested]:
    """Evaluate a run on the agent system: the best update, and how it and the warm start do, by domain, too."""
    with agent_setups.open_setup(settings, folder) as setup:
        session = open_session(hosted_work(setup), folder)
        best, final = session.best_params()
        key, samples = jax.random.key(_SEED.value), _SAMPLES.value
        sizes = {"tasks": _TASKS.value, "samples": samples, "first": FIRST}
        played = [examine(setup, one, key, "test", **sizes).played for one in counted("play", (session.start, final))]
        return best, compare_before_after(setup, played, samples=samples, ks=_ks())


if __name__ == "__main__":
    common.run(main)
