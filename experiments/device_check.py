"""Check whether the device that is there can be trusted, and how fast it is: a verdict in words, within ten minutes.

    python -m experiments.device_check --out=device.json
    python -m experiments.device_check --checks=ratio,packing
    python -m experiments.device_check --model=qwen2.5-1.5b --checks=decode,training

On a TPU, a GPU or a CPU. Guarding correctness: logits and one update against the host's CPU in float32; bits of a row
in other company (E3); log-probabilities of sampling against those of scoring (F7); packed rows against each sequence
alone (M2, F6), by every attention that trains there; a whole small run, whose success must rise. Measured: rates of
products and copies; decode, prefill and update of a published shape with random weights against these, and their memory
against the compiler's plan; whether two updates have the same bits.

Prints a table, a sentence for each failure with what to do, and one JSON line last; ends with status 1 where something
that guards correctness fails. A check that raises is an ERROR, and the others are made.
"""

import json
import sys
import time
from pathlib import Path

from absl import flags

from flowgrpo.recipes.names import CHECK_SIZES, CHECKS

from .cli import app
from .cli.help import flag_heading

flag_heading("What is run")
_CHECKS = flags.DEFINE_list("checks", list(CHECKS), f"Any of {', '.join(CHECKS)}.")
_MODEL = flags.DEFINE_string(
    "model", None, "Shape whose speed is measured, published or of a folder; by default what there is room for."
)
flag_heading("Sizes")
_SIZE = flags.DEFINE_enum("size", "full", CHECK_SIZES, "`small` shows on any CPU that everything runs.")
_STOP = flags.DEFINE_float("stop_after", 540.0, "Seconds after which no further check begins.", lower_bound=0.0)
flag_heading("Files and resuming")
_OUT = flags.DEFINE_string("out", None, "File for the JSON, written again after each check.")

app.read_flags(__name__)

import jax

from flowgrpo.files import make_folder, write_whole
from flowgrpo.recipes.device_checks import bench as benches
from flowgrpo.recipes.device_checks import figures, suite


def _record(bench: benches.Bench, lines: list[figures.CheckLine], begun: float) -> dict:
    """Everything that came out."""
    return {
        "device_check": f"{bench.device.platform} {bench.device.device_kind}",
        "trusted": not figures.failed(lines),
        "size": bench.size,
        "model": bench.model,
        "seconds": round(time.monotonic() - begun, 1),
        "lines": [figures.to_record(line) for line in lines],
    }


def main() -> None:
    """Run the checks, print the verdict and one JSON line."""
    suite.check_chosen(_CHECKS.value)
    path, begun = None if _OUT.value is None else Path(_OUT.value), time.monotonic()
    if path is not None:
        make_folder(path.parent)
    bench = benches.open_bench(_SIZE.value, _MODEL.value)

    def keep(lines: list[figures.CheckLine]) -> None:
        if path is not None:
            write_whole(path, json.dumps(_record(bench, lines, begun), indent=1))

    chosen = {name: check for name, check in suite.CHECKS.items() if name in _CHECKS.value}
    said = lambda words: print(words, file=sys.stderr, flush=True)  # noqa: E731
    with jax.default_device(bench.device):
        lines = suite.run_checks(bench, chosen, seconds=_STOP.value, said=said, kept=keep)
    print(figures.verdict_table(lines))
    print(f"\n{figures.verdict_words(lines)}\n")
    print(json.dumps(_record(bench, lines, begun)), flush=True)
    sys.exit(figures.failed(lines))


if __name__ == "__main__":
    app.run(main, exact=True)
