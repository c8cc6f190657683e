"""What `docs/studies` publishes of a study: its runs, its plot, and the table in its page."""

import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from flowgrpo.files import read_json, write_atomic
from flowgrpo.launch import cpu_info
from flowgrpo.recipes.study import Study
from flowgrpo.recipes.study_tables import RunResults, draw_study, table, tabulate_study
from flowgrpo.report.metrics import read_metrics
from flowgrpo.report.plots import save_figure
from flowgrpo.training.run_dir import machine
from flowgrpo.types import BadInput

PUBLISHED = ("arm", "env", "seed", "updates", "success", "turns", "warnings")  # fields of a run's published line
BEGIN, END = "<!-- table -->", "<!-- end of table -->"
MACHINES = "machines.json"  # the machine of each study
WARNED, WARNED_END = "<!-- warnings -->", "<!-- end of warnings -->"  # in pages that have a place for them


def warning_table(study: Study, runs: RunResults, seeds: Sequence[int]) -> str:
    """A table of warnings: in how many runs of each arm, and the median of the update of the first one."""
    lines = ["| arm | warnings: runs of all, update in the median |", "|---|---|"]
    for arm in study.arms:
        warnings = [runs[arm, env, seed].get("warnings", {}) for env in study.worlds for seed in seeds]
        names = {name for run_warnings in warnings for name in run_warnings}
        updates = {name: [run_warnings[name] for run_warnings in warnings if name in run_warnings] for name in names}
        medians = sorted((float(np.median(values)), name, len(values)) for name, values in updates.items())
        cells = [f"`{name}` {count} of {len(warnings)}, {median:.0f}" for median, name, count in medians]
        lines.append(f"| {arm} | {'; '.join(cells) or 'none'} |")
    return "\n".join(lines)


def read_published(path: Path) -> dict[tuple[str, str, int], dict[str, Any]]:
    """Published runs by arm, environment and seed."""
    return {(line["arm"], line["env"], line["seed"]): line for line in read_metrics(path)}


def publish_study(docs: Path, name: str, study: Study, runs: RunResults, seeds: Sequence[int]) -> None:
    """Write a study's runs and plot into the documentation, and its tables into its page there."""
    page = docs / f"{name}.md"
    text = page.read_text() if page.exists() else ""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise BadInput(f"{page} must be a page with one line {BEGIN} and one {END} after it: the table goes between")
    rows = tabulate_study(study, runs, seeds)
    records = [runs[arm, env, seed] for arm in study.arms for env in study.worlds for seed in seeds]
    lines = [json.dumps({field: record[field] for field in PUBLISHED if field in record}) + "\n" for record in records]
    write_atomic(docs / f"{name}.jsonl", "".join(lines))
    save_figure(draw_study(study, rows, runs, seeds), docs / f"{name}.svg")
    machines = read_json(docs / MACHINES, "restore or remove it") if (docs / MACHINES).exists() else {}
    write_atomic(docs / MACHINES, json.dumps(machines | {name: processor_of_bits()}, indent=1, sort_keys=True) + "\n")
    text = insert_table(text, BEGIN, END, table(rows, study))
    write_atomic(
        page, insert_table(text, WARNED, WARNED_END, warning_table(study, runs, seeds)) if WARNED in text else text
    )


def processor_of_bits() -> str:
    """The processor, as far as a run's bits depend on it: device kind, generation, widest vectors, XLA's version.

    In virtual machines, generations of processors share a name, but XLA compiles for each in its own way.
    """
    cpu = cpu_info()
    generation = f"family {cpu['cpu family']}, model {cpu['model']}, " if "cpu family" in cpu else ""
    vectors = "AVX-512" if "avx512f" in cpu.get("flags", "").split() else "no AVX-512"
    return f"{machine()['device_kind']}, {generation}{vectors}, jaxlib {version('jaxlib')}"


def insert_table(text: str, begin: str, end: str, table: str) -> str:
    """The text with a table between the lines `begin` and `end`, in place of what was there."""
    before, after = text.split(begin)
    return f"{before}{begin}\n{table}\n{end}{after.split(end)[1]}"
