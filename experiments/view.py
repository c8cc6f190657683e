"""What a run's planner did, as one HTML page: every trajectory that was recorded, turn by turn and token by token.

    python -m experiments.view --workdir=runs/quickstart-lookup-0
    python -m experiments.view --workdir=runs/agentflow-0 --out=agentflow.html
    python -m experiments.view --workdir=runs/agentflow-0 --ratios=best

Reads `trajectories/` of a run of quickstart, agentflow, cluster or self_verify, which may still be going on, and writes
`trajectories.html` beside it, which opens in any browser without a network. Takes seconds. `--ratios` scores the
recorded tokens with the weights of a checkpoint, as training does, in a forward pass over all of them, and colours
them by π(checkpoint) / π(sampled).
"""

from pathlib import Path

from absl import flags

import flowgrpo as fg
from experiments import common
from experiments.planner_files import WHICH
from experiments.recorded import read_trajectories, speller_of
from experiments.recorded_ratios import ratios_of
from flowgrpo.learner.folder import RUN, read_run
from flowgrpo.report.viewer import viewer
from flowgrpo.rollout.shown import shown

_WORKDIR = flags.DEFINE_string("workdir", None, "The folder of a run.", required=True)
_OUT = flags.DEFINE_string("out", None, "The file to write; trajectories.html in the run's folder by default.")
_RATIOS = flags.DEFINE_enum("ratios", None, WHICH, "Score the tokens with this checkpoint, for ratios.")
_TOKENIZER = flags.DEFINE_string("tokenizer", None, "Folder or hub id of the tokenizer, where the run's own is gone.")

EXAMINED = "trajectories of an examination have none: nothing was learned from them"
UNSCORED = "give --ratios=best, last or start to score these tokens with the weights of a checkpoint"


def main() -> None:
    """Write the page."""
    folder = Path(_WORKDIR.value)
    if not (folder / RUN).exists():
        raise fg.BadInput(f"{folder} holds no run: {RUN} is missing; give the --workdir of one")
    settings = read_run(folder)["settings"]
    recorded = read_trajectories(folder)
    spell = speller_of(settings, folder, _TOKENIZER.value)
    ratios, names = [None] * len(recorded), {}
    if _RATIOS.value is not None:
        update, ratios = ratios_of(settings, folder, [one.played for one in recorded], _RATIOS.value)
        names = {"ratio": f"π({_RATIOS.value}, update {update}) / π(sampled)"}
    every = [
        shown(one.played, spell, phase=one.phase, update=one.update, advantages=one.advantages, ratios=ratio)
        for one, ratio in zip(recorded, ratios, strict=True)
    ]
    any_trained = any(one.update is not None for one in recorded)
    lacking = {"ratio": UNSCORED} | ({} if any_trained else {"advantage": EXAMINED})
    out = Path(_OUT.value) if _OUT.value else folder / "trajectories.html"
    note = f"{folder.resolve().name}, {settings.get('algorithm', 'flow_grpo')}, seed {settings['seed']}"
    viewer(every, out, title="Rollouts", note=note, lacking=lacking, names=names)
    print(f"{len(every)} trajectories of {folder}: {out}, {out.stat().st_size / 1e6:.1f} MB")
    print("open it in a browser; ? shows its keys")


if __name__ == "__main__":
    common.run(main)
