"""The planner of a run as a model folder in the Hugging Face format, which transformers and inference servers open.

    python -m experiments.export --workdir=runs/agentflow-0 --out=models/planner
    python -m experiments.export --workdir=runs/agentflow-0 --out=models/planner --which=last
    python -m experiments.export --workdir=runs/agentflow-0 --out=models/adapter --adapter
    python -m experiments.export --workdir=runs/agentflow-0 --out=models/planner --push_to_hub=USER/NAME --private

Takes the checkpoint that was best in validation, the last one, or the start of a run of quickstart, agentflow or
self_verify, which may still be going on. An adapter is merged into its base, or written in PEFT's format by --adapter.
Of an actor and its critic, the actor is written. The planner of a quickstart speaks the words of its environment: its
folder is a small Llama with a tokenizer of whole words, and without a chat template. A model that is there already is
replaced, with all its files, when the new one is whole; a folder that holds anything else is refused. Takes seconds,
plus what it takes to write the weights. Prints what was written, and one JSON line.

A model card lies beside the weights, as README.md: base model, algorithm, settings, figures, command, licence.
--push_to_hub uploads the folder to the Hugging Face Hub, with the token of HF_TOKEN or of `hf auth login`.
"""

import json
from pathlib import Path

from absl import flags

from flowgrpo.recipes.names import WHICH

from .cli import app
from .cli.help import flag_heading

flag_heading("What is run")
_WHICH = flags.DEFINE_enum("which", "best", WHICH, "Best in validation, last, or the start of the training.")
_ADAPTER = flags.DEFINE_bool("adapter", False, "Write the adapter alone, in PEFT's format.")
_LICENCE = flags.DEFINE_string(
    "licence", None, "Of the weights, as the hub calls it, such as apache-2.0; by default that of the base model."
)
flag_heading("Files and resuming")
_WORKDIR = flags.DEFINE_string("workdir", None, "The folder of a run.", required=True)
_PUSH = flags.DEFINE_string("push_to_hub", None, "Upload the folder into this repository of the hub: USER/NAME.")
_PRIVATE = flags.DEFINE_bool("private", False, "Make the repository private, where it has to be made.")
_OUT = flags.DEFINE_string("out", None, "The folder to write; a model in it is replaced.", required=True)

app.read_flags(__name__)

from flowgrpo.recipes.export import can_chat, export, export_adapter
from flowgrpo.recipes.hub import check_push, push_folder
from flowgrpo.run.next_steps import command, contents, ending


def main() -> None:
    """Write the folder."""
    folder, out = Path(_WORKDIR.value), Path(_OUT.value)
    if _PUSH.value is not None:
        check_push(_PUSH.value)
    written = (export_adapter if _ADAPTER.value else export)(folder, out, which=_WHICH.value, licence=_LICENCE.value)
    print(f"{_WHICH.value} planner of {folder}, update {written['update']}")
    talks = not _ADAPTER.value and can_chat(out)
    if _PUSH.value is not None:
        message = f"Update {written['update']}, by flowgrpo"
        written["url"] = push_folder(out, _PUSH.value, private=_PRIVATE.value, message=message)
        print(f"uploaded to {written['url']}")
    print(ending(f"written to {out}: {contents(out)}", [(command("chat", model=out), "talks to it")] if talks else []))
    print(json.dumps(written))


if __name__ == "__main__":
    app.run(main)
