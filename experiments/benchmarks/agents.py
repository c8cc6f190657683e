"""What training brings a pretrained model: before and after on kinds of tasks that it never met, over seeds.

    python -m experiments.benchmarks.agents --model=smollm2 --tasks=word_problems --seeds=100,101,102
    python -m experiments.benchmarks.agents --parts=format --model=smollm2 --tasks=word_problems
    python -m experiments.benchmarks.agents --seeds=100 --agentflow="--updates=60 --lora_rank=32"

`train` runs `agentflow` once for each seed, and once more on the first with its rewards shuffled within groups, each in
a process of its own. The pretrained model (with its worked examples), the start of the reinforcement and the best
planner then do the same tasks, several times each: pass@1 with its interval, pass@k, the mean reward, the share of
actions in form, turns, minutes, memory. Ten tasks of the first seed are written out before and after, in
`…-trajectories.md`, and what validations saw is drawn, in `…-curves.svg`.

`format` is what each way into the form of an action costs and brings: instructions alone, worked examples, own
successes, an expert's demonstrations.

Runs in --folder that have ended are not run again, so a table that was stopped goes on.
"""

import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from absl import flags

from flowgrpo.recipes.agent_config import preset
from flowgrpo.recipes.names import TASK_SETS

from ..cli import app
from ..cli.help import flag_heading

PARTS = ("format", "train")
flag_heading("What is run")
_PARTS = flags.DEFINE_list("parts", ["train"], f"Which of {', '.join(PARTS)}, by commas.")
_MODEL = flags.DEFINE_string("model", "smollm2", "The model, as agentflow takes it.")
_SET = flags.DEFINE_string(
    "tasks", "word_problems", f"The tasks: {', '.join(TASK_SETS)}, or a file, as agentflow has it."
)
_SEEDS = flags.DEFINE_list("seeds", ["100", "101", "102"], "Seeds of the runs, by commas.")
_CONTROL = flags.DEFINE_bool("control", True, "Run the control with shuffled rewards, too.")
_MORE = flags.DEFINE_string(
    "agentflow", "", "More flags of agentflow, as one text, for all runs that have none of their own."
)
flag_heading("Sizes")
_TASKS = flags.DEFINE_integer("num_tasks", 64, "Test tasks of a measurement.", lower_bound=1)
_SAMPLES = flags.DEFINE_integer("samples", 8, "Trajectories of each.", lower_bound=1)
flag_heading("Files and resuming")
_FOLDER = flags.DEFINE_string("folder", "runs/agents", "Where the runs lie.")
_MEASURE = flags.DEFINE_string("measure", None, "Measure the planner of one run and end; what the other parts call.")

app.read_flags(__name__)

import jax

from flowgrpo.evaluation.metrics import Evaluation
from flowgrpo.files import write_whole
from flowgrpo.recipes import agent
from flowgrpo.recipes.agent_warm_start import obedience
from flowgrpo.recipes.export import read_config
from flowgrpo.recipes.hosted import compile_engines, examine, played_metrics
from flowgrpo.recipes.hosted_training import HostedWork
from flowgrpo.report.metrics import METRICS, TIMINGS, read_metrics
from flowgrpo.report.plots import curve, draw_line, frame, panels, save
from flowgrpo.report.progress import with_progress
from flowgrpo.report.tables import show_lines
from flowgrpo.rollout.records import Played
from flowgrpo.run.kill_series import result_of
from flowgrpo.run.run_dir import read_run
from flowgrpo.run.run_files import RESULT
from flowgrpo.run.session import open_session
from flowgrpo.types import BadInput

from .measuring import print_result, watch

MEASURED = "measured.json"  # in the folder of a run
SHOWN = 10  # tasks whose trajectories are written out
SEED = 1000  # of the sampling in a measurement
# Ways into the form of an action, as flags of agentflow.
WAYS = {
    "instructions": ("--examples=none", "--warm_start=none"),
    "examples": ("--warm_start=none",),
    "own successes": ("--warm_start=own",),
    "demonstrations": ("--warm_start=expert",),
}


# Measured -----------------------------------------------------------------------------------------------


def figures_of(played: list[Played], metrics: Evaluation) -> dict[str, Any]:
    """The figures of one planner on the tasks."""
    tokens = sum(int(turn.chosen.sum()) for each in played for turn in each.turns)
    prompt = [int((~each.turns[0].chosen).sum()) for each in played if each.turns]
    rewards = [each.outcome for each in played if each.outcome is not None]
    return {
        "pass@1": metrics.success,
        "low": metrics.success_low,
        "high": metrics.success_high,
        f"pass@{_SAMPLES.value}": metrics.passed[_SAMPLES.value],
        "reward": sum(rewards) / len(rewards),
        **obedience(played),
        "turns": metrics.turns,
        "action_tokens": tokens / len(played),
        "prompt_tokens": sum(prompt) / len(prompt),
    }


def measure(folder: Path) -> dict[str, Any]:
    """The start of the reinforcement and the best planner of a run on the test tasks; the records beside it."""
    config = read_config(folder)
    if not isinstance(config, agent.Config):
        raise BadInput(f"{folder} is a run of another command than agentflow")
    measured = {}
    with agent.open(config, folder) as setup:
        session = open_session(HostedWork(setup, read_run(folder)["recipe"]), folder)
        best, final = session.best_params()
        planners = {"start": session.start} | ({"best": final} if best else {})
        setup = compile_engines(setup)
        for name, params in planners.items():
            began = time.monotonic()
            key, first = jax.random.key(SEED), agent.FRESH
            samples, tasks = _SAMPLES.value, _TASKS.value
            hosted = examine(setup, params, key, "test", tasks=tasks, samples=samples, first=first)
            played = list(hosted.played)
            ks = sorted({1, samples})
            metrics = played_metrics(played, setup.env.tools, samples=samples, ks=ks)
            seconds = time.monotonic() - began
            measured[name] = figures_of(played, metrics) | {"seconds": seconds}
            measured[name]["trajectories"] = [
                {
                    "query": each.task.query,
                    "answer": each.task.answers[0],
                    "solved": bool(each.correct),
                    "text": setup.story(setup.exam_env, each),
                }
                for each in played[::samples][:SHOWN]
            ]
    if config.updates and not best:  # nothing was gained: the best planner is the start
        measured["best"] = measured["start"]
    return measured | {"best_update": best}


# Runs ---------------------------------------------------------------------------------------------------


def _watch(command: list[str]) -> float:
    """Run a command, which has to succeed -> the most GiB that it held."""
    ended = watch(command)
    if ended.status:
        raise BadInput(f"{shlex.join(command)} ended with {ended.status}: {ended.errors}")
    return ended.gib


def _folder_of(name: str) -> Path:
    return Path(_FOLDER.value) / f"{Path(_MODEL.value).name}-{Path(_SET.value).stem}-{name}".replace(" ", "-")


def run(name: str, *more: str) -> dict[str, Any]:
    """Run agentflow in a folder of that name, and measure it, unless that was done -> its figures."""
    folder = _folder_of(name)
    path = folder / MEASURED
    command = [sys.executable, "-m", "flowgrpo", "agentflow", f"--model={_MODEL.value}", f"--tasks={_SET.value}"]
    own = {flag.partition("=")[0] for flag in more}
    command += [f"--workdir={folder}", *more]
    command += [flag for flag in shlex.split(_MORE.value) if flag.partition("=")[0] not in own]
    asked = {
        "command": shlex.join(["python", "-m", "flowgrpo", *command[3:]]),
        "num_tasks": _TASKS.value,
        "samples": _SAMPLES.value,
    }
    if path.exists():
        figures = json.loads(path.read_text())
        for setting, value in asked.items():
            if figures.get(setting) != value:
                raise BadInput(
                    f"{path} was made with {setting} {figures.get(setting)}, not {value}: give another --folder"
                )
        return figures
    memory = None  # of a run that had ended before nothing is known
    if not (folder / RESULT).exists():
        memory = _watch(command)
    how = [f"--num_tasks={_TASKS.value}", f"--samples={_SAMPLES.value}", f"--measure={folder}"]
    _watch([sys.executable, "-m", "experiments.benchmarks.agents", *how])
    figures = json.loads((folder / "measuring.json").read_text())
    updates = [line["seconds"] for line in read_metrics(folder / TIMINGS) if line["phase"] == "train"]
    figures |= {
        **asked,
        "minutes": result_of(folder)["minutes"],
        "update_minutes": sum(updates) / 60,
        "gib": memory,
    }
    write_whole(path, json.dumps(figures, indent=1) + "\n")
    return figures


def _row(name: str, when: str, figures: dict[str, Any], run_figures: dict[str, Any]) -> dict[str, Any]:
    share = {key: round(100 * figures[key], 1) for key in ("pass@1", "low", "high", f"pass@{_SAMPLES.value}")}
    return {
        "run": name,
        "planner": when,
        **share,
        "reward": round(figures["reward"], 3),
        "obedience": round(100 * figures["obedience"], 1),
        "turns": round(figures["turns"], 2),
        "prompt_tokens": round(figures["prompt_tokens"]),
        "action_tokens": round(figures["action_tokens"], 1),
        "minutes": round(run_figures["minutes"], 1),
        "gib": run_figures["gib"] and round(run_figures["gib"], 1),
    }


SMALL_TESTS = ("--test_tasks=16", "--validation_tasks=16")  # of a run without updates, which is measured afterwards


def _name_of_way(way: str) -> str:
    """The run of a way into the form; with worked examples alone it is the pretrained model of both parts.

    By the first seed, of which its tasks are.
    """
    return f"{'pretrained' if way == 'examples' else f'format-{way}'}-{_SEEDS.value[0]}"


def run_way(way: str) -> dict[str, Any]:
    """Run a way into the form of an action, without reinforcement, and measure what it comes to."""
    return run(_name_of_way(way), *WAYS[way], "--updates=0", f"--seed={_SEEDS.value[0]}", *SMALL_TESTS)


def format_part() -> list[dict[str, Any]]:
    """A row for each way into the form of an action."""
    rows = []
    for way in with_progress("way", list(WAYS)):
        figures = run_way(way)
        rows.append(_row(way, "start", figures["start"], figures))
    return rows


def runs_of_training() -> dict[str, tuple[str, ...]]:
    """Name the runs of the seeds and the control, with the flags of each."""
    runs = {f"seed-{seed}": (f"--seed={seed}",) for seed in _SEEDS.value}
    first = _SEEDS.value[0]
    control = {f"control-{first}": (f"--seed={first}", "--control=shuffled_rewards")} if _CONTROL.value else {}
    return runs | control


def train_part() -> list[dict[str, Any]]:
    """Rows of the pretrained model, of each seed's start and best planner, and of the control."""
    pretrained = run_way("examples")
    rows = [_row("pretrained, examples", "start", pretrained["start"], pretrained)]
    for name, how in with_progress("run", list(runs_of_training().items())):
        figures = run(name, *how, "--test_tasks=16")
        rows += [_row(name, when, figures[when], figures) for when in ("start", "best")]
    return rows


def write_trajectories() -> None:
    """Ten tasks of the first seed, before and after: the pretrained model with its examples, and the best planner."""
    runs = [(_name_of_way("examples"), "start"), (f"seed-{_SEEDS.value[0]}", "best")]
    shown = [json.loads((_folder_of(name) / MEASURED).read_text())[when]["trajectories"] for name, when in runs]
    parts = [f"# {_SET.value} by {_MODEL.value}, before and after\n"]
    for before, after in zip(*shown, strict=True):
        ends = " → ".join("solved" if each["solved"] else "not solved" for each in (before, after))
        parts.append(f"## {before['query']}\n\n{ends}; the answer is {before['answer']}.\n")
        parts += [f"{name}:\n\n```\n{each['text']}\n```\n" for name, each in (("Before", before), ("After", after))]
    write_whole(_folder_of("trajectories").with_suffix(".md"), "\n".join(parts))


def draw_validations() -> None:
    """Success in validation over the updates, a line for each run."""
    figure, (axis,) = panels(f"{_MODEL.value}, {_SET.value}: success in validation", 1)
    for index, name in enumerate(runs_of_training()):
        draw_line(
            axis,
            index,
            name.replace("-", " "),
            *curve(list(read_metrics(_folder_of(name) / METRICS)), "validation", "success"),
        )
    frame(axis, "success rate", share=True)
    save(figure, _folder_of("curves").with_suffix(".svg"))


def main() -> None:
    """Measure one run, or make the tables."""
    if _MEASURE.value:
        folder = Path(_MEASURE.value)
        write_whole(folder / "measuring.json", json.dumps(measure(folder), indent=1) + "\n")
        return
    preset(model=_MODEL.value, tasks=_SET.value)  # which refuses what can't be run
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
