"""What a run leaves: its folder, its metrics as arrays, its best planner as a model."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from flowgrpo.models.hf import Model
from flowgrpo.publish.export import trained_model
from flowgrpo.recipes.recipe import NO_OBJECTS, Objects, recipe_of
from flowgrpo.report.metrics import METRICS, read_metrics
from flowgrpo.training.config import RunConfig
from flowgrpo.training.session import TestReport


@dataclass(frozen=True)
class RunResult:
    """The result of a run; `print` shows its table, and `result["success_after"]` is an entry of result.json.

    Args:
        folder: of the run.
        values: entries of result.json.
        config: settings of the run.
        objects: that were handed to the run.
    """

    folder: Path
    values: dict[str, Any]
    config: RunConfig
    objects: Objects = NO_OBJECTS

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def __str__(self) -> str:
        return self.table

    @cached_property
    def metrics(self) -> dict[str, np.ndarray]:
        """Every metric of training by update, as an array; NaN for an update without it."""
        return self._columns("train")

    @cached_property
    def validation(self) -> dict[str, np.ndarray]:
        """Every metric of the validations, as an array; `update` is when they were."""
        return self._columns("validation")

    def _columns(self, phase: str) -> dict[str, np.ndarray]:
        lines = [line for line in read_metrics(self.folder / METRICS) if line.get("phase") == phase]
        names = dict.fromkeys(name for line in lines for name, value in line.items() if isinstance(value, int | float))
        return {name: np.array([line.get(name, np.nan) for line in lines]) for name in names}

    @property
    def table(self) -> str:
        """Success, tool errors and turns on the test tasks, before and after training."""
        rows = {"success": "success", "tool errors": "tool_error", "turns": "turns"}
        lines = [f"{'test tasks':16}{'before':>10}{'after':>10}"]
        for name, key in rows.items():
            cells = (self.values.get(f"{key}_{when}") for when in ("before", "after"))
            form = "{:.2f}" if name == "turns" else "{:.1%}"
            lines.append(f"{name:16}" + "".join(f"{'-' if x is None else form.format(x):>10}" for x in cells))
        return "\n".join([*lines, f"folder {self.folder}, best update {self.values.get('best_update')}"])

    @property
    def paths(self) -> dict[str, Path]:
        """The files and folders of the run, by name."""
        return {path.name: path for path in sorted(self.folder.iterdir()) if not path.name.startswith(".")}

    def evaluate(self, *, tasks: int = 1000, samples: int = 1, seed: int = 1000) -> TestReport:
        """Test the start and the best planner on fresh tasks; the report has both evaluations and their table.

        Args:
            tasks: number of test tasks, none of which is in the run's own table.
            samples: trajectories a task; above 1 the report has pass@k.
            seed: of sampling, and of tasks that are generated.
        """
        recipe = recipe_of(self.folder)
        sizes = {"tasks": tasks, "samples": samples, "seed": seed}
        return recipe.evaluate(self.config, self.folder, objects=self.objects, **sizes)[1]

    @cached_property
    def model(self) -> Model:
        """The planner of the best checkpoint, with its adapter if it has one; `model.save(folder)` writes it."""
        return trained_model(self.folder, objects=self.objects)
