"""Compare algorithms over environments and seeds, with confidence intervals.

    python -m experiments.compare --study=credit
    python -m experiments.compare --study=clip --num_seeds=32 --workdir=runs/clip
    python -m experiments.compare --study=credit --arms=broadcast,GiGPO --updates=200
    python -m experiments.compare --study=credit --arms=GiGPO --seed=3 --check=docs/studies

A study is a question with a few arms (`experiments/studies/studies.py`); --study=MODULE:FUNCTION runs one that a
function of yours returns. All arms start from the same warm-started planners, seed by seed, and are evaluated on the
same test tasks; each arm is one program over all of its seeds, sharded over the local devices. The score is the success
on test tasks after the last update: its interquartile mean over the seeds, with a 95 % interval of a stratified
bootstrap, and the probability that a run beats one of the baseline (rliable's method).

The work directory gets `runs.jsonl` (a line for each arm, environment and seed, with its curve), `table.jsonl`,
`table.md`, `curves.png`, `curves.svg` and a summary, `index.html`. The same command resumes: finished arms are kept,
and with a larger --num_seeds only the new seeds are run. `docs/studies` has the published results;
`--check=docs/studies` repeats one seed of an arm, and compares it with them.

Runs on any CPU, offline. Expected of `--study=credit` with its 16 seeds: the table in the README, after 48 minutes
of one core.
"""

import inspect
import json
import time
from pathlib import Path

from absl import flags

from flowgrpo import launch
from flowgrpo.training.names import STUDIES

from .cli import app
from .cli.flags import define_stop_after, stop_after
from .cli.help import flag_heading

flag_heading("Run")
_STUDY = flags.DEFINE_string("study", "credit", f"The study to run: {', '.join(STUDIES)}, or MODULE:FUNCTION of yours.")
_ARMS = flags.DEFINE_list(
    "arms", None, 'Some of the study\'s arms, by commas, in "quotes" where a name has one; all by default.'
)
_SEED = flags.DEFINE_integer("seed", 0, "The first seed.", lower_bound=0)
flag_heading("Sizes")
_SEEDS = flags.DEFINE_integer("num_seeds", 16, "Number of seeds of every arm.", lower_bound=1)
_UPDATES = flags.DEFINE_integer("updates", None, "Updates of every run; by default those of the study.", lower_bound=1)
_WARM = flags.DEFINE_integer("warm_steps", None, "Steps of imitation; by default those of the study.", lower_bound=1)
_EVERY = flags.DEFINE_integer("examine_every", 10, "Updates between two evaluations.", lower_bound=1)
_TASKS = flags.DEFINE_integer("test_tasks", 256, "Test tasks of an evaluation.", lower_bound=1)
flag_heading("Devices and memory")
_LANES = flags.DEFINE_integer(
    "lanes", None, "Seeds vmapped on a device; by default 1 on a CPU, else all.", lower_bound=1
)
flag_heading("Files and resuming")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the results; runs/compare-STUDY by default.")
_PUBLISH = flags.DEFINE_string(
    "publish", None, "Folder of pages, as docs/studies, that gets the runs, the picture and the table, too."
)
_CHECK = flags.DEFINE_string(
    "check", None, "Folder of published runs: run --seed of one arm again, the baseline by default, and compare."
)
_UNTIL = flags.DEFINE_integer("until", None, "With --check: number of updates after which to stop.", lower_bound=1)
_RESUME = flags.DEFINE_bool("resume", True, "Resume from the work directory; --noresume starts over.")
define_stop_after()

app.read_flags(__name__)


from flowgrpo.recipes import compare
from flowgrpo.recipes.study import Study
from flowgrpo.recipes.study_tables import WRITTEN, table, tabulate_study, write_study
from flowgrpo.report.metrics import plain_json
from flowgrpo.training.run_dir import delete_run, run_folder
from flowgrpo.types import BadInput

from .studies import study_pages
from .studies.studies import chosen_arms, find_study


def check(study: Study, folder: Path) -> None:
    """Run one seed of one arm again, and hold its curve against the published one; raise where it is another."""
    path, seed = folder / f"{_STUDY.value}.jsonl", _SEED.value
    arm, env = next(iter(_ARMS.value or [study.baseline])), next(iter(study.worlds))
    runs = study_pages.read_published(path) if path.exists() else {}
    if (arm, env, seed) not in runs:
        raise BadInput(f"--check={folder}: {path} has no run of {arm} with seed {seed}")
    found = compare.rerun_seed(study, arm, env, seed, until=_UNTIL.value)
    published = runs[arm, env, seed]["success"][: len(found)]
    print(json.dumps({"study": _STUDY.value, "arm": arm, "seed": seed, "published": published, "found": found}))
    if found != published:
        raise BadInput(f"{path}: {arm}, seed {seed}, came out differently; bits are those of a processor and of jaxlib")


def main() -> None:
    """Run what is missing, make the table and the page."""
    began, budget = time.monotonic(), stop_after()
    make_study = find_study(_STUDY.value)
    study = chosen_arms(make_study(), _ARMS.value)
    if _CHECK.value:
        check(study, Path(_CHECK.value))
        return
    folder = Path(_WORKDIR.value or f"runs/compare-{_STUDY.value.replace(':', '-')}")
    asked = {"updates": _UPDATES.value, "warm_steps": _WARM.value}
    chosen = {name: value for name, value in asked.items() if value is not None}
    lanes = _LANES.value or compare.default_lanes()
    own = {"every": _EVERY.value, "tasks": _TASKS.value, "lanes": lanes}
    identity = {"study": _STUDY.value, "chosen": chosen, **own, "changes": dict(study.changes)}
    files = (compare.RUNS, *WRITTEN)
    if not _RESUME.value:
        delete_run(folder, extra_files=files)
    seeds = range(_SEED.value, _SEED.value + _SEEDS.value)
    with run_folder(folder, "compare", identity, extra_files=files):
        runs = compare.run_study(study, folder, seeds=seeds, chosen=chosen, budget=budget, **own)
        rows = tabulate_study(study, runs, seeds)
        expected = inspect.getdoc(make_study) or ""
        command = f"python -m experiments.compare --study={_STUDY.value}"
        write_study(folder, study, rows, runs, seeds, expected=expected, command=command)
        if _PUBLISH.value:
            study_pages.publish_study(Path(_PUBLISH.value), _STUDY.value, study, runs, seeds)
    print(f"{study.question}  {(time.monotonic() - began) / 60:.1f} minutes\n\n{table(rows, study)}")
    names = f"table.jsonl, table.md, curves.png, curves.svg, {compare.RUNS}"
    print(f"\nwritten to {folder}: {names}; open {folder / 'index.html'}")
    print(json.dumps(plain_json(rows)))


if __name__ == "__main__":
    app.run(main, cpu_devices=launch.num_cores())
