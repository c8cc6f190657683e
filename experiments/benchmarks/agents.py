"""Effect of training on a pretrained model: before and after, on kinds of tasks not seen in training, over seeds.

    python -m experiments.benchmarks.agents --model=smollm2 --tasks=word_problems --seeds=100,101,102
    python -m experiments.benchmarks.agents --parts=format --model=smollm2 --tasks=word_problems
    python -m experiments.benchmarks.agents --seeds=100 --agentflow="--updates=60 --lora_rank=32"

`train` runs `agentflow` once for each seed, and once more for the first with its rewards shuffled within groups, each
in a new process. The pretrained model (with its worked examples), the start of the reinforcement phase and the best
planner are then evaluated on the same tasks, several times each: pass@1 with its interval, pass@k, the mean reward, the
fraction of formatted actions, turns, minutes, memory. Ten tasks of the first seed are written before and after, to
`…-trajectories.md`, and the validations are plotted, in `…-curves.svg`.

`format` compares ways to learn the action format: instructions alone, worked examples, own successes, an expert's
demonstrations.

Finished runs in --folder are not run again, so an interrupted table is resumed.
"""

import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from absl import flags

from flowgrpo.recipes.agent_config import preset
from flowgrpo.training.names import TASK_SETS

from ..cli import app
from ..cli.help import flag_heading

PARTS = ("format", "train")
flag_heading("Run")
_PARTS = flags.DEFINE_list("parts", ["train"], f"Any of {', '.join(PARTS)}, separated by commas.")
_MODEL = flags.DEFINE_string("model", "smollm2", "Model, as for agentflow.")
_SET = flags.DEFINE_string("tasks", "word_problems", f"Tasks: {', '.join(TASK_SETS)}, or a file, as for agentflow.")
_SEEDS = flags.DEFINE_list("seeds", ["100", "101", "102"], "Seeds of the runs, separated by commas.")
_CONTROL = flags.DEFINE_bool("control", True, "Run the control with shuffled rewards, too.")
_MORE = flags.DEFINE_string(
    "agentflow", "", "Further flags of agentflow, as one string, for all runs that don't set them themselves."
)
flag_heading("Sizes")
_TASKS = flags.DEFINE_integer("num_tasks", 64, "Test tasks of a measurement.", lower_bound=1)
_SAMPLES = flags.DEFINE_integer("samples", 8, "Trajectories of each task.", lower_bound=1)
flag_heading("Files and resuming")
_FOLDER = flags.DEFINE_string("folder", "runs/agents", "Folder of the runs.")
_MEASURE = flags.DEFINE_string("measure", None, "Measure the planner of one run and exit; used by the other parts.")

app.read_flags(__name__)

import jax

from flowgrpo.evaluation.metrics import Evaluation
from flowgrpo.files import write_atomic
from flowgrpo.publish.export import read_config
from flowgrpo.recipes import agent
from flowgrpo.recipes.agent_warm_start import format_compliance
from flowgrpo.report.metrics import METRICS, TIMINGS, read_metrics
from flowgrpo.report.plots import curve, draw_line, format_axis, make_panels, save_figure
from flowgrpo.report.progress import with_progress
from flowgrpo.report.tables import show_lines
from flowgrpo.rollout.records import RecordedTrajectory
from flowgrpo.training.hosted_training import HostedTrainable
from flowgrpo.training.kill_series import result_of
from flowgrpo.training.language_model import compile_engines, evaluate_trajectories, roll_out_split
from flowgrpo.training.run_dir import read_run
from flowgrpo.training.run_files import RESULT
from flowgrpo.training.session import open_session
from flowgrpo.types import BadInput

from .measuring import print_result, run_watched

MEASURED = "measured.json"  # in the folder of a run
SHOWN = 10  # tasks whose trajectories are written
SEED = 1000  # of the sampling in a measurement
# Ways to learn the action format, as flags of agentflow.
WAYS = {
    "instructions": ("--examples=none", "--warm_start=none"),
    "examples": ("--warm_start=none",),
    "own successes": ("--warm_start=own",),
    "demonstrations": ("--warm_start=expert",),
}


# Evaluation -----------------------------------------------------------------------------------------------


def figures_of(trajectories: list[RecordedTrajectory], metrics: Evaluation) -> dict[str, Any]:
    """Figures of one planner on the tasks."""
    tokens = sum(int(turn.chosen.sum()) for trajectory in trajectories for turn in trajectory.turns)
    prompt = [int((~trajectory.turns[0].chosen).sum()) for trajectory in trajectories if trajectory.turns]
    rewards = [trajectory.outcome for trajectory in trajectories if trajectory.outcome is not None]
    return {
        "pass@1": metrics.success,
        "low": metrics.success_low,
        "high": metrics.success_high,
        f"pass@{_SAMPLES.value}": metrics.pass_at_k[_SAMPLES.value],
        "reward": sum(rewards) / len(rewards),
        **format_compliance(trajectories),
        "turns": metrics.turns,
        "action_tokens": tokens / len(trajectories),
        "prompt_tokens": sum(prompt) / len(prompt),
    }


def measure(folder: Path) -> dict[str, Any]:
    """Evaluate the start of the reinforcement phase and the best planner of a run on test tasks."""
    config = read_config(folder)
    if not isinstance(config, agent.Config):
        raise BadInput(f"{folder} is a run of another command than agentflow")
    measured = {}
    with agent.build(config, folder) as setup:
        session = open_session(HostedTrainable(setup, read_run(folder)["recipe"]), folder)
        best, final = session.best_params()
        planners = {"start": session.start_params} | ({"best": final} if best else {})
        setup = compile_engines(setup)
        for name, params in planners.items():
            start = time.monotonic()
            key, first = jax.random.key(SEED), agent.FRESH
            samples, tasks = _SAMPLES.value, _TASKS.value
            hosted = roll_out_split(setup, params, key, "test", tasks=tasks, samples=samples, first=first)
            trajectories = list(hosted.trajectories)
            ks = sorted({1, samples})
            metrics = evaluate_trajectories(trajectories, setup.env.tools, samples=samples, ks=ks)
            seconds = time.monotonic() - start
            measured[name] = figures_of(trajectories, metrics) | {"seconds": seconds}
            measured[name]["trajectories"] = [
                {
                    "query": trajectory.task.query,
                    "answer": trajectory.task.answers[0],
                    "solved": bool(trajectory.correct),
                    "text": setup.format_trajectory(setup.eval_env, trajectory),
                }
                for trajectory in trajectories[::samples][:SHOWN]
            ]
    if config.run.updates and not best:  # no improvement: the best planner is the start
        measured["best"] = measured["start"]
    return measured | {"best_update": best}


# Runs ---------------------------------------------------------------------------------------------------


def _watch(command: list[str]) -> float:
    """Run a command, which must succeed -> its peak memory in GiB."""
    result = run_watched(command)
    if result.status:
        raise BadInput(f"{shlex.join(command)} ended with {result.status}: {result.errors}")
    return result.gib


def _folder_of(name: str) -> Path:
    return Path(_FOLDER.value) / f"{Path(_MODEL.value).name}-{Path(_SET.value).stem}-{name}".replace(" ", "-")


def run(name: str, *more: str) -> dict[str, Any]:
    """Run agentflow in the folder of `name` and measure it, unless that was done -> its figures."""
    folder = _folder_of(name)
    path = folder / MEASURED
    command = [sys.executable, "-m", "flowgrpo", "agentflow", f"--model={_MODEL.value}", f"--tasks={_SET.value}"]
    overridden = {flag.partition("=")[0] for flag in more}
    command += [f"--workdir={folder}", *more]
    command += [flag for flag in shlex.split(_MORE.value) if flag.partition("=")[0] not in overridden]
    settings = {
        "command": shlex.join(["python", "-m", "flowgrpo", *command[3:]]),
        "num_tasks": _TASKS.value,
        "samples": _SAMPLES.value,
    }
    if path.exists():
        figures = json.loads(path.read_text())
        for setting, value in settings.items():
            if figures.get(setting) != value:
                raise BadInput(
                    f"{path} was made with {setting} {figures.get(setting)}, not {value}: give another --folder"
                )
        return figures
    memory = None  # unknown for a run that had ended before
    if not (folder / RESULT).exists():
        memory = _watch(command)
    options = [f"--num_tasks={_TASKS.value}", f"--samples={_SAMPLES.value}", f"--measure={folder}"]
    _watch([sys.executable, "-m", "experiments.benchmarks.agents", *options])
    figures = json.loads((folder / "measuring.json").read_text())
    updates = [line["seconds"] for line in read_metrics(folder / TIMINGS) if line["phase"] == "train"]
    figures |= {
        **settings,
        "minutes": result_of(folder)["minutes"],
        "update_minutes": sum(updates) / 60,
        "gib": memory,
    }
    write_atomic(path, json.dumps(figures, indent=1) + "\n")
    return figures


def _row(name: str, planner: str, figures: dict[str, Any], run_figures: dict[str, Any]) -> dict[str, Any]:
    percentages = {key: round(100 * figures[key], 1) for key in ("pass@1", "low", "high", f"pass@{_SAMPLES.value}")}
    return {
        "run": name,
        "planner": planner,
        **percentages,
        "reward": round(figures["reward"], 3),
        "format_compliance": round(100 * figures["format_compliance"], 1),
        "turns": round(figures["turns"], 2),
        "prompt_tokens": round(figures["prompt_tokens"]),
        "action_tokens": round(figures["action_tokens"], 1),
        "minutes": round(run_figures["minutes"], 1),
        "gib": run_figures["gib"] and round(run_figures["gib"], 1),
    }


SMALL_TESTS = ("--test_tasks=16", "--validation_tasks=16")  # for a run without updates, which is measured afterwards


def _name_of_way(way: str) -> str:
    """Name of the run of a way; with worked examples only it is the pretrained model of both parts.

    It uses the first seed, which determines its tasks.
    """
    return f"{'pretrained' if way == 'examples' else f'format-{way}'}-{_SEEDS.value[0]}"


def run_way(way: str) -> dict[str, Any]:
    """Run a way to learn the action format, without reinforcement, and measure it."""
    return run(_name_of_way(way), *WAYS[way], "--updates=0", f"--seed={_SEEDS.value[0]}", *SMALL_TESTS)


def format_part() -> list[dict[str, Any]]:
    """A row for each way to learn the action format."""
    rows = []
    for way in with_progress("way", list(WAYS)):
        figures = run_way(way)
        rows.append(_row(way, "start", figures["start"], figures))
    return rows


def runs_of_training() -> dict[str, tuple[str, ...]]:
    """Names of the runs of the seeds and the control -> flags of each."""
    runs = {f"seed-{seed}": (f"--seed={seed}",) for seed in _SEEDS.value}
    first = _SEEDS.value[0]
    control = {f"control-{first}": (f"--seed={first}", "--control=shuffled_rewards")} if _CONTROL.value else {}
    return runs | control


def train_part() -> list[dict[str, Any]]:
    """Rows of the pretrained model, of each seed's start and best planner, and of the control."""
    pretrained = run_way("examples")
    rows = [_row("pretrained, examples", "start", pretrained["start"], pretrained)]
    for name, flags_of_run in with_progress("run", list(runs_of_training().items())):
        figures = run(name, *flags_of_run, "--test_tasks=16")
        rows += [_row(name, planner, figures[planner], figures) for planner in ("start", "best")]
    return rows


def write_trajectories() -> None:
    """Write ten tasks of the first seed by the pretrained model with its examples, and by the best planner."""
    runs = [(_name_of_way("examples"), "start"), (f"seed-{_SEEDS.value[0]}", "best")]
    records = [json.loads((_folder_of(name) / MEASURED).read_text())[planner]["trajectories"] for name, planner in runs]
    parts = [f"# {_SET.value} by {_MODEL.value}, before and after\n"]
    for before, after in zip(*records, strict=True):
        ends = " → ".join("solved" if record["solved"] else "not solved" for record in (before, after))
        parts.append(f"## {before['query']}\n\n{ends}; the answer is {before['answer']}.\n")
        parts += [f"{name}:\n\n```\n{record['text']}\n```\n" for name, record in (("Before", before), ("After", after))]
    write_atomic(_folder_of("trajectories").with_suffix(".md"), "\n".join(parts))


def draw_validations() -> None:
    """Plot the success rate in validation over the updates, a line for each run."""
    figure, (axis,) = make_panels(f"{_MODEL.value}, {_SET.value}: success in validation", 1)
    for index, name in enumerate(runs_of_training()):
        draw_line(
            axis,
            index,
            name.replace("-", " "),
            *curve(list(read_metrics(_folder_of(name) / METRICS)), "validation", "success"),
        )
    format_axis(axis, "success rate", is_fraction=True)
    save_figure(figure, _folder_of("curves").with_suffix(".svg"))


def main() -> None:
    """Measure one run, or make the tables."""
    if _MEASURE.value:
        folder = Path(_MEASURE.value)
        write_atomic(folder / "measuring.json", json.dumps(measure(folder), indent=1) + "\n")
        return
    preset(model=_MODEL.value, tasks=_SET.value)  # raises for settings that can't be run
    for part in _PARTS.value:
        if part not in PARTS:
            raise BadInput(f"--parts={','.join(_PARTS.value)} has {part!r}; choose from {', '.join(PARTS)}")
        rows = format_part() if part == "format" else train_part()
        if part == "train":
            write_trajectories()
            draw_validations()
        show_lines(rows)
        print_result("agents", part=part, model=_MODEL.value, tasks=_SET.value, rows=rows)


if __name__ == "__main__":
    app.run(main, exact=True)
