"""Train the agent system on a cluster: a master, and workers that roll out, judge and train, over Ray.

    python -m experiments.cluster --rollout_workers=2 --reward_workers=any=2
    python -m experiments.cluster --schedule=async --staleness=2 --updates=20
    python -m experiments.cluster --schedule=partial --segment_tokens=64
    python -m experiments.cluster --address=auto --model=PATH --tasks=train.jsonl --rollout_gpus=1 --trainer_gpus=4

The flags are those of `experiments.agentflow`, and those of the cluster. On one machine it starts its own Ray; with
--address it joins a cluster, whose hosts must share the work directory. Needs the extra [ray].

    sync            as `experiments.agentflow`, bit for bit, for any number of workers
    one_step_off    the groups of an update are rolled out during the previous update
    async           rollouts never wait; no group is trained more than --staleness versions after it started
    partial         trajectories are paused after --segment_tokens tokens, also within an action, and resume after the
                    update

Any process may be killed at any moment. A worker that is lost, silent or late is named and replaced, and its jobs are
given to another with the same keys; after the loss of a trainer or of the master everything resumes from the last
checkpoint. With overlapping schedules trajectories may be older than the weights that they train: ratios are then taken
to log-probabilities rescored by the trainer, and the mismatch with the sampler is corrected (--correction). If several
versions sampled one trajectory, --loss_versions=newest trains only on the tokens of the newest.

Besides the files of a run of `agentflow`, the work directory has `events.jsonl`, the events in order, and `batches/`,
the trajectories of every update: `python -m experiments.replay WORKDIR` repeats the updates from them.
"""

import json

from absl import flags

from flowgrpo.recipes.cluster_config import Config

from .cli import app
from .cli.help import flag_heading
from .cli.recipes import define_recipe, run_command, run_of_flags

define_recipe("cluster", Config, "runs/cluster-SEED")
flag_heading("Cluster")
_ADDRESS = flags.DEFINE_string(
    "address", None, "Address of a Ray cluster, such as auto; by default Ray runs on this machine alone."
)
_TABLE_SECONDS = flags.DEFINE_float("table_seconds", 10.0, "Seconds between two status tables.", lower_bound=0.5)
flag_heading("Devices and memory")
_ROLLOUT_GPUS = flags.DEFINE_float("rollout_gpus", 0.0, "GPUs per rollout worker.", lower_bound=0.0)
_TRAINER_GPUS = flags.DEFINE_float("trainer_gpus", 0.0, "GPUs per trainer.", lower_bound=0.0)

app.read_flags(__name__)

import jax

from flowgrpo.distributed.ray_backend import RayBackend
from flowgrpo.distributed.table import StatusTable
from flowgrpo.recipes.cluster import RECIPE, LaunchSettings


def main() -> None:
    """Run the master of a cluster."""
    jax.config.update("jax_platforms", "cpu")  # the master computes nothing
    _, config, folder, options = run_of_flags()
    deterministic, exact = (flags.FLAGS[name].value for name in ("deterministic", "exact"))
    launch_settings = LaunchSettings(app.compilation_cache(), bool(deterministic), exact is not False)
    gpus = {"rollout": _ROLLOUT_GPUS.value, "train": _TRAINER_GPUS.value}
    with RayBackend(_ADDRESS.value, gpus=gpus) as backend:
        result = RECIPE.train(
            config,
            folder,
            backend=backend,
            launch_settings=launch_settings,
            on_iteration=StatusTable(_TABLE_SECONDS.value),
            **options,
        )
    print(json.dumps(result))


if __name__ == "__main__":
    run_command(main)
