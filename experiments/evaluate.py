"""Evaluate a run's planner before and after training: success on fresh test tasks, tool errors, turns.

    python -m experiments.evaluate --workdir=runs/quickstart-lookup-0
    python -m experiments.evaluate --workdir=runs/quickstart-lookup-0 --seed=7 --num_tasks=2000 --samples=8
    python -m experiments.evaluate --workdir=runs/quickstart-lookup-0 --panel

Rolls out the warm start and the best checkpoint (by validation) of a run of quickstart or agentflow on the same
held-out tasks. Prints a table and one JSON line, with `pass@k` if there are several samples per task.

With `--panel` the tasks are those of the panel: fixed sets, an easy and a hard one of each environment, named by a hash
of their content and equal on every machine. A planner is evaluated on all sets with its vocabulary.
"""

import json
from pathlib import Path
from typing import Any

from absl import flags

from .cli import app
from .cli.help import flag_heading

flag_heading("Run")
_SEED = flags.DEFINE_integer("seed", 1000, "Seed of tasks and sampling.")
_PANEL = flags.DEFINE_bool(
    "panel", False, "Play the fixed sets of the panel, once each task; no other flag counts then."
)
flag_heading("Sizes")
_TASKS = flags.DEFINE_integer("num_tasks", 1000, "Number of test tasks.", lower_bound=1)
_SAMPLES = flags.DEFINE_integer("samples", 1, "Number of trajectories per task.", lower_bound=1)
flag_heading("Files and resuming")
_WORKDIR = flags.DEFINE_string("workdir", None, "The folder of a run.", required=True)

app.read_flags(__name__)

from flowgrpo.publish.export import read_config
from flowgrpo.recipes import panel, pure
from flowgrpo.recipes.recipe import recipe_of
from flowgrpo.training.config import RunConfig
from flowgrpo.types import BadInput


def print_panel(config: RunConfig, folder: Path) -> None:
    """Play the panel, print the table and one JSON line."""
    if not isinstance(config, pure.Config):
        raise BadInput(f"--panel has sets of the pure environments, and {folder} is a run of another kind")
    best, found = panel.evaluate_run(config, folder)
    print(panel.panel_table(found))
    figures = {label: {"before": before.success, "after": after.success} for label, (before, after) in found.items()}
    print(json.dumps({"best_update": best, "panel": figures}))


def main() -> None:
    """Evaluate, print the table and one JSON line."""
    folder, samples = Path(_WORKDIR.value), _SAMPLES.value
    config = read_config(folder)
    if _PANEL.value:
        print_panel(config, folder)
        return
    sizes: dict[str, Any] = {"seed": _SEED.value, "tasks": _TASKS.value, "samples": samples}
    best, tested = recipe_of(folder).evaluate(config, folder, **sizes)
    print(tested.summary)
    names = {"success": "success", "tool_errors": "tool_error", "turns": "turns"}
    names |= {f"pass@{k}": f"pass@{k}" for k in sorted({1, samples})}
    result = {"best_update": best, **sizes}
    for when, one in zip(("before", "after"), tested.evaluations, strict=True):
        figures = one.metrics()
        result |= {f"{name}_{when}": figures[field] for field, name in names.items() if field in figures}
    print(json.dumps(result | tested.results))


if __name__ == "__main__":
    app.run(main, exact=True)
