"""Export the planner of a run as a model folder: in the Hugging Face format, or as GGUF for llama.cpp and Ollama.

    python -m experiments.export --workdir=runs/agentflow-0 --out=models/planner
    python -m experiments.export --workdir=runs/agentflow-0 --out=models/planner --which=last
    python -m experiments.export --workdir=runs/agentflow-0 --out=models/planner --format=gguf
    python -m experiments.export --workdir=runs/agentflow-0 --out=models/planner --format=gguf --gguf_type=q8_0
    python -m experiments.export --workdir=runs/agentflow-0 --out=models/adapter --adapter
    python -m experiments.export --workdir=runs/agentflow-0 --out=models/planner --push_to_hub=USER/NAME --private

Exports the best checkpoint (by validation), the last one, or the start of a run of quickstart, agentflow or
self_verify, which may still be running. An adapter is merged into its base, or written in PEFT's format by --adapter.
Of an actor and its critic, the actor is written. The planner of a quickstart has the vocabulary of its environment: its
folder is a small Llama with a tokenizer of whole words, and without a chat template. An existing model is replaced
atomically, with all its files; a folder with other files is refused. Takes seconds, plus the time to write the weights.
Prints the files written, and one JSON line.

--format=gguf writes planner.gguf, named as the folder, with the tokenizer and the chat template in it, and a Modelfile,
for Ollama: ollama create planner -f models/planner/Modelfile. Matrices are float16, or --gguf_type; q8_0 takes half the
space. The vocabulary of a quickstart can't be written as GGUF.

A model card is written with the weights, as README.md: base model, algorithm, settings, results, command, licence.
--push_to_hub uploads the folder to the Hugging Face Hub, with the token of HF_TOKEN or of `hf auth login`.
"""

import json
import shlex
from pathlib import Path

from absl import flags

from flowgrpo.training.names import CHECKPOINT_NAMES, GGUF_TYPES

from .cli import app
from .cli.help import flag_heading

flag_heading("Run")
_WHICH = flags.DEFINE_enum(
    "which", "best", CHECKPOINT_NAMES, "Checkpoint: best in validation, last, or the start of training."
)
_FORMAT = flags.DEFINE_enum(
    "format",
    "hf",
    ["hf", "gguf"],
    "Format: hf (config.json and safetensors), gguf (one file, for llama.cpp and Ollama).",
)
_GGUF_TYPE = flags.DEFINE_enum(
    "gguf_type", "f16", GGUF_TYPES, "Type of the matrices in GGUF; q8_0 has 8 bits and a scale for 32 of them."
)
_ADAPTER = flags.DEFINE_bool("adapter", False, "Write the adapter alone, in PEFT's format.")
_LICENCE = flags.DEFINE_string(
    "licence", None, "Of the weights, as the hub calls it, such as apache-2.0; by default that of the base model."
)
flag_heading("Files and resuming")
_WORKDIR = flags.DEFINE_string("workdir", None, "The folder of a run.", required=True)
_PUSH = flags.DEFINE_string("push_to_hub", None, "Upload the folder into this repository of the hub: USER/NAME.")
_PRIVATE = flags.DEFINE_bool("private", False, "Create the repository as private, if it does not exist.")
_OUT = flags.DEFINE_string("out", None, "The folder to write; a model in it is replaced.", required=True)

app.read_flags(__name__)

from flowgrpo.errors import BadInput
from flowgrpo.publish.export import export, export_adapter, export_gguf, has_chat_template
from flowgrpo.publish.hub import check_push, push_folder
from flowgrpo.training.next_steps import closing_message, command, list_contents


def main() -> None:
    """Write the folder."""
    folder, out, is_gguf = Path(_WORKDIR.value), Path(_OUT.value), _FORMAT.value == "gguf"
    if _ADAPTER.value and is_gguf:
        raise BadInput("--adapter is written in PEFT's format alone: leave it out, or --format=gguf")
    if _GGUF_TYPE.present and not is_gguf:
        raise BadInput(f"--gguf_type={_GGUF_TYPE.value} is of --format=gguf: add it")
    if _PUSH.value is not None:
        check_push(_PUSH.value)
    if is_gguf:
        written = export_gguf(folder, out, tensor_type=_GGUF_TYPE.value, which=_WHICH.value, licence=_LICENCE.value)
    else:
        write = export_adapter if _ADAPTER.value else export
        written = write(folder, out, which=_WHICH.value, licence=_LICENCE.value)
    print(f"{_WHICH.value} planner of {folder}, update {written['update']}")
    if _PUSH.value is not None:
        message = f"Update {written['update']}, by flowgrpo"
        written["url"] = push_folder(out, _PUSH.value, private=_PRIVATE.value, message=message)
        print(f"uploaded to {written['url']}")
    print(closing_message(f"written to {out}: {list_contents(out)}", _next_steps(out)))
    print(json.dumps(written))


def _next_steps(out: Path) -> list[tuple[str, str]]:
    """Each command that takes in what was written, and what it is for."""
    if _ADAPTER.value:
        return []
    name = out.resolve().name
    is_gguf = _FORMAT.value == "gguf"
    model = out / f"{name}.gguf" if is_gguf else out
    steps = [(command("chat", model=model), "talks to it")] if has_chat_template(model) else []
    if is_gguf:
        create = f"ollama create {shlex.quote(name)} -f {shlex.quote(str(out / 'Modelfile'))}"
        steps.append((create, f"takes it in, for ollama run {shlex.quote(name)}"))
    return steps


if __name__ == "__main__":
    app.run(main)
