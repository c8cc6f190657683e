"""Replay the updates of a cluster's run from its records; they must give the same parameters (S2).

    python -m experiments.replay runs/cluster-0
    python -m experiments.replay runs/cluster-0/events.jsonl --compilation_cache=runs/cache

Every schedule can be replayed, asynchronous ones too: which groups an update used, and which weights sampled them,
depended on timing, and is recorded in `events.jsonl` and `batches/`. The events go through the schedule again, which
must give the same updates; the trajectories go through the trainer again, from the warm start on. Prints a line for
each update and one JSON line; the status is 1 if the parameters differ.
"""

import json
import sys
from pathlib import Path

from absl import flags

from flowgrpo.recipes.cluster_config import schedule_of

from .cli import app
from .cli.help import flag_heading

flag_heading("Run")
_ROOT = flags.DEFINE_string("run", None, "Work directory of the run, or its events.jsonl; --run may be omitted.")

if __name__ == "__main__" and len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
    sys.argv[1] = f"--run={sys.argv[1]}"
app.read_flags(__name__)

from flowgrpo.recipes.cluster import read_cluster_config
from flowgrpo.recipes.cluster_trainer import replay_run
from flowgrpo.types import BadInput


def main() -> None:
    """Replay, and compare."""
    given = Path(_ROOT.value or "")
    folder = given.parent if given.name == "events.jsonl" else given
    if _ROOT.value is None:
        raise BadInput("name the work directory of a cluster's run: --run=RUN")
    config = read_cluster_config(folder)
    figures = replay_run(folder, config, schedule_of(config))
    print(json.dumps(figures))
    if not figures["same"]:
        sys.exit(f"{app.command_name()}: {folder} comes to other parameters when it is replayed")


if __name__ == "__main__":
    app.run(main, exact=True)
