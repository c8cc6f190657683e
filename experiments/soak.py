"""Kill a run at random moments, restart it each time, and compare the result with an undisturbed run (S1).

    python -m experiments.soak --experiment=quickstart --kills=30
    python -m experiments.soak --experiment=agentflow --kills=30 --signal=TERM
    python -m experiments.soak --experiment=agentflow --kills=5 --arguments='--updates=2 --queries=2'
    python -m experiments.soak --experiment=cluster --kills=20

First the experiment runs twice undisturbed, in small sizes; the second run measures how long each stage takes, and
verifies that two undisturbed runs are equal. Then a third one is killed: during startup, warm start, rollouts and
updates, evaluations, while writing a checkpoint, in the final test. At the end the metrics, the result, and every leaf
of the last checkpoint (parameters, optimizer, keys, counters) are compared with those of the first, bit for bit.

In a cluster every kind of process is killed in turn by SIGKILL, including the master; metrics, parameters, and the
trajectories of every update are compared. Also reported: the seconds until the process was replaced, and until rollouts
resumed (`cluster_kills`).

Prints a line for each kill, a table, and one JSON line; the status is 1 if anything differs. The moments follow from
--seed. 30 kills of the quickstart take about 8 minutes on two cores, of the agent run about 12.
"""

import json
import shlex
import sys
from pathlib import Path

from absl import flags

from flowgrpo import launch

from .cli import app
from .cli.help import flag_heading

SMALL = {  # sizes that are large enough for a gradient
    "quickstart": "--updates=8 --warm_steps=300 --queries=8 --samples=6 --test_tasks=64 --checkpoint_every=2",
    "agentflow": "--updates=6 --warm_steps=250 --demonstrations=600 --queries=4 --samples=4 --test_tasks=24 "
    "--slots=16 --checkpoint_every=2",
    "train_agent": "--updates=6 --warm_steps=250 --demonstrations=600 --queries=4 --samples=4 --test_tasks=24 "
    "--slots=16 --checkpoint_every=2",
    "cluster": "--updates=40 --warm_steps=250 --demonstrations=600 --queries=4 --samples=4 --test_tasks=24 "
    "--slots=16 --checkpoint_every=2 --rollout_workers=2 --reward_workers=any=2",
    "self_verify": "--updates=6 --queries=4 --samples=4 --test_tasks=32 --checkpoint_every=2",
}
flag_heading("Run")
_EXPERIMENT = flags.DEFINE_enum("experiment", "quickstart", list(SMALL), "Experiment to run.")
_KILLS = flags.DEFINE_integer("kills", 30, "Number of kills.", lower_bound=1)
_SIGNAL = flags.DEFINE_enum("signal", "KILL", ["KILL", "TERM", "INT"], "Signal to kill with.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the moments of the kills.")
_ARGUMENTS = flags.DEFINE_string(
    "arguments", "", "Flags of the experiment that replace the small sizes, as one string."
)
flag_heading("Files and resuming")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the runs; runs/soak-EXPERIMENT by default.")

app.read_flags(__name__)

from flowgrpo.distributed.kill_series import run_cluster_soak
from flowgrpo.training.kill_series import run_soak
from flowgrpo.types import BadInput


def main() -> None:
    """Run the soak, and print its result."""
    name = _EXPERIMENT.value
    base = Path(_WORKDIR.value or f"runs/soak-{name}")
    cache = base / "compiled" if app.compilation_cache() in (None, launch.USER) else app.compilation_cache()
    arguments = shlex.split(_ARGUMENTS.value)
    replaced = {word.partition("=")[0] for word in arguments}
    sizes = [word for word in shlex.split(SMALL[name]) if word.partition("=")[0] not in replaced]
    command = [sys.executable, "-m", f"{__package__}.{name}", f"--compilation_cache={cache}", *sizes, *arguments]
    if name == "cluster":
        if _SIGNAL.value != "KILL":
            raise BadInput(
                f"--signal={_SIGNAL.value} is not supported for a cluster, whose processes are killed: leave it out"
            )
        figures = {"wrong_starts": []} | run_cluster_soak(command, base, kills=_KILLS.value, seed=_SEED.value)
    else:
        figures = run_soak(command, base, kills=_KILLS.value, seed=_SEED.value, name=_SIGNAL.value)
    print(json.dumps({"experiment": name} | figures))
    wrong = [*figures["differences"], *figures["wrong_starts"]]
    if wrong:
        sys.exit(f"{app.command_name()}: the run that was killed differs: {', '.join(wrong)}")


if __name__ == "__main__":
    app.run(main)
