"""Plot the metrics of a run.

    python -m experiments.plots --workdir=runs/agentflow-0
    python -m experiments.plots --workdir=runs/agentflow-0 --out=paper --format=png,svg

Reads `metrics.jsonl` and `timings.jsonl`, also of a run that is still running, and writes figures into `plots/` of the
run: learning curves, entropy and KL, histograms of ratios and advantages, turns, tools, speed, stages. Prints the files
written, and the figures left out with the reason. Equal metrics give equal bytes. Takes a few seconds.
"""

import json

from absl import flags

from flowgrpo.report.figures import FORMATS, draw_plots

from .cli import app
from .cli.help import flag_heading

flag_heading("Run")
_WORKDIR = flags.DEFINE_string("workdir", None, "The folder of the run.", required=True)
_OUT = flags.DEFINE_string("out", None, "Folder of the figures; plots/ in the folder of the run by default.")
_FORMAT = flags.DEFINE_list(
    "format", [FORMATS[0]], f"Formats of the figures, separated by commas: {', '.join(FORMATS)}."
)

app.read_flags(__name__)


def main() -> None:
    """Draw, and print what was drawn, with a JSON line."""
    written, left_out = draw_plots(str(_WORKDIR.value), _OUT.value, formats=_FORMAT.value)
    for path in written:
        print(f"written   {path}")
    for name, why in left_out.items():
        print(f"left out  {name}: {why}")
    print(json.dumps({"written": [str(path) for path in written], "left_out": left_out}))


if __name__ == "__main__":
    app.run(main)
