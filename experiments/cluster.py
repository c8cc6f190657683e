"""The agent system, trained by a cluster: a master, and workers that roll out, judge and train, over Ray.

    python -m experiments.cluster --rollout_workers=2 --reward_workers=any=2
    python -m experiments.cluster --schedule=async --staleness=2 --updates=20
    python -m experiments.cluster --schedule=partial --budget=64
    python -m experiments.cluster --address=auto --model=PATH --tasks=train.jsonl --rollout_gpus=1 --trainer_gpus=4

The flags are those of `experiments.agentflow`, and the shape of the cluster. On one machine it starts a Ray of its own;
with --address it joins a cluster, whose hosts must share the work directory. Needs the extra [ray].

    sync            as `experiments.agentflow`, to the bit, whoever plays and judges
    one_step_off    the groups of an update are rolled out during the one before it
    async           rollouts never wait; no group is learned from more than --staleness versions after it began
    partial         trajectories are cut after --budget tokens, within an action too, and go on after the update

Any process may be killed at any moment. A worker that is lost, silent or late is named and replaced, and its work is
given to another under the same keys; after a trainer, or the master itself, all goes on from the last checkpoint. Where
schedules overlap, trajectories may be older than the weights that they change: ratios are then taken to what the
trainer itself says of them, and their mismatch with what was sampled from is corrected (--correction). Where several
versions spoke in one trajectory, --learn_from=newest leaves out of the loss what all but the newest of them chose.

Beside what a run of `agentflow` leaves, the work directory has `events.jsonl`, what happened in order, and `batches/`,
the trajectories of every update: `python -m experiments.replay WORKDIR` makes the same updates from them again.
"""

import json

from absl import flags

from flowgrpo.recipes.cluster_config import Config, preset

from .cli import app
from .cli.flags import chosen_run, define_config, define_run, given
from .cli.help import flag_heading

define_config(Config)
flag_heading("The cluster")
_ADDRESS = flags.DEFINE_string("address", None, "Of a Ray cluster, such as auto; without one, Ray runs here alone.")
_SHOWN = flags.DEFINE_float("table_seconds", 10.0, "Between two tables of what goes on.", lower_bound=0.5)
flag_heading("Devices and memory")
_ROLLOUT_GPUS = flags.DEFINE_float("rollout_gpus", 0.0, "GPUs of a rollout worker.", lower_bound=0.0)
_TRAINER_GPUS = flags.DEFINE_float("trainer_gpus", 0.0, "GPUs of a trainer.", lower_bound=0.0)
define_run("runs/cluster-SEED")

app.read_flags(__name__)

import jax

from flowgrpo.distributed.ray_backend import RayBackend
from flowgrpo.distributed.table import StatusTable
from flowgrpo.recipes.cluster import Launched, train


def main() -> None:
    """Master a cluster."""
    jax.config.update("jax_platforms", "cpu")  # the master computes nothing
    config = preset(**given(Config))
    folder, options = chosen_run(f"runs/cluster-{config.seed}")
    deterministic, exact = (flags.FLAGS[name].value for name in ("deterministic", "exact"))
    launched = Launched(app.compilation_cache(), bool(deterministic), exact is not False)
    gpus = {"rollout": _ROLLOUT_GPUS.value, "train": _TRAINER_GPUS.value}
    with RayBackend(_ADDRESS.value, gpus=gpus) as backend:
        result = train(config, folder, backend=backend, launched=launched, on_turn=StatusTable(_SHOWN.value), **options)
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main, exact=True)
