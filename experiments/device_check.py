"""Check whether the local device computes correctly, and how fast it is, within ten minutes.

    python -m experiments.device_check --out=device.json
    python -m experiments.device_check --checks=ratio,packing
    python -m experiments.device_check --model=qwen2.5-1.5b --checks=decode,training

On a TPU, a GPU or a CPU. Correctness: logits and one update against the host's CPU in float32; the bits of a row in
batches of other rows (E3); log-probabilities of sampling against those of scoring (F7); packed rows against each
sequence alone (M2, F6), for every attention kernel of the device; a whole small run, whose success must rise. Speed:
rates of products and copies; decode, prefill and update of a published shape with random weights against these, and
their memory against the compiler's plan; whether two updates are equal bit for bit.

Prints a table, a sentence for each failure with what to do, and one JSON line last; the status is 1 if a check of
correctness fails. A check that raises is an ERROR, and the others still run.
"""

import json
import sys
import time
from pathlib import Path

from absl import flags

from flowgrpo.training.names import CHECK_SIZES, CHECKS

from .cli import app
from .cli.help import flag_heading

flag_heading("Run")
_CHECKS = flags.DEFINE_list("checks", list(CHECKS), f"Any of {', '.join(CHECKS)}.")
_MODEL = flags.DEFINE_string(
    "model", None, "Shape whose speed is measured, published or of a folder; by default what there is room for."
)
flag_heading("Sizes")
_SIZE = flags.DEFINE_enum("size", "full", CHECK_SIZES, "Size of the checks; `small` runs on any CPU.")
_STOP = flags.DEFINE_float("stop_after", 540.0, "Seconds after which no further check starts.", lower_bound=0.0)
flag_heading("Files and resuming")
_OUT = flags.DEFINE_string("out", None, "File for the JSON, rewritten after each check.")

app.read_flags(__name__)

import jax

from flowgrpo.files import make_folder, write_atomic

from .device_checks import bench as benches
from .device_checks import figures, suite


def _record(bench: benches.Bench, lines: list[figures.CheckLine], started: float) -> dict:
    """Everything that came out."""
    return {
        "device_check": f"{bench.device.platform} {bench.device.device_kind}",
        "trusted": not figures.failed(lines),
        "size": bench.size,
        "model": bench.model,
        "seconds": round(time.monotonic() - started, 1),
        "lines": [figures.to_record(line) for line in lines],
    }


def main() -> None:
    """Run the checks, print the verdict and one JSON line."""
    suite.check_chosen(_CHECKS.value)
    path, started = None if _OUT.value is None else Path(_OUT.value), time.monotonic()
    if path is not None:
        make_folder(path.parent)
    bench = benches.make_bench(_SIZE.value, _MODEL.value)

    def on_line(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def on_lines(lines: list[figures.CheckLine]) -> None:
        if path is not None:
            write_atomic(path, json.dumps(_record(bench, lines, started), indent=1))

    chosen = {name: check for name, check in suite.CHECKS.items() if name in _CHECKS.value}
    with jax.default_device(bench.device):
        lines = suite.run_checks(bench, chosen, seconds=_STOP.value, on_line=on_line, on_lines=on_lines)
    print(figures.verdict_table(lines))
    print(f"\n{figures.verdict_lines(lines)}\n")
    print(json.dumps(_record(bench, lines, started)), flush=True)
    sys.exit(figures.failed(lines))


if __name__ == "__main__":
    app.run(main, exact=True)
