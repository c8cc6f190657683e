"""Show the recorded trajectories of a run as one HTML page, turn by turn and token by token.

    python -m experiments.view --workdir=runs/quickstart-lookup-0
    python -m experiments.view --workdir=runs/agentflow-0 --out=agentflow.html
    python -m experiments.view --workdir=runs/agentflow-0 --ratios=best

Reads `trajectories/` of a run of quickstart, agentflow, cluster or self_verify, which may still be running, and writes
`trajectories.html` next to it, which opens in any browser without a network. Takes seconds. `--ratios` scores the
recorded tokens with the weights of a checkpoint, as training does, in a forward pass over all of them, and colours
them by π(checkpoint) / π(sampled).
"""

from pathlib import Path

from absl import flags

from flowgrpo.training.names import CHECKPOINT_NAMES

from .cli import app
from .cli.help import flag_heading

flag_heading("Run")
_WORKDIR = flags.DEFINE_string("workdir", None, "The folder of a run.", required=True)
_OUT = flags.DEFINE_string("out", None, "File to write; trajectories.html in the run's folder by default.")
_RATIOS = flags.DEFINE_enum(
    "ratios", None, CHECKPOINT_NAMES, "Color tokens by the ratio of this checkpoint to the sampler."
)
_TOKENIZER = flags.DEFINE_string("tokenizer", None, "Folder or hub id of the tokenizer, if the run's own is gone.")

app.read_flags(__name__)

from flowgrpo.publish.pages import write_page


def main() -> None:
    """Write the page."""
    folder = Path(_WORKDIR.value)
    out = Path(_OUT.value) if _OUT.value else folder / "trajectories.html"
    count = write_page(folder, out, ratios=_RATIOS.value, tokenizer=_TOKENIZER.value)
    print(f"{count} trajectories of {folder}: {out}, {out.stat().st_size / 1e6:.1f} MB")
    print("open it in a browser; ? shows its keys")


if __name__ == "__main__":
    app.run(main)
