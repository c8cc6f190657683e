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
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
from absl import flags

from experiments import agentflow, common
from experiments.agent_setups import check_settings
from experiments.cluster_plan import TAKES, plan_of
from experiments.cluster_table import Table
from experiments.cluster_work import ANY, make_worker, pool_of
from experiments.headings import heading
from experiments.loggers import chosen_loggers
from flowgrpo.distributed.crew import RayCrew
from flowgrpo.distributed.master import Exams, Master
from flowgrpo.distributed.staff import Shape
from flowgrpo.learner.folder import begin_anew
from flowgrpo.priorities import Known, chosen
from flowgrpo.types import BadInput

heading("What is run")
_SCHEDULE = flags.DEFINE_enum("schedule", "sync", list(TAKES), "Who waits for whom.")
_STALENESS = flags.DEFINE_integer("staleness", None, "Versions at most, for async and partial.", lower_bound=0)
_BUDGET = flags.DEFINE_integer("budget", None, "Tokens of a trajectory in one stretch, for partial.", lower_bound=1)
_SPARE = flags.DEFINE_integer("spare", None, "Groups under way beyond those of an update.", lower_bound=0)
heading("The cluster")
_ROLLOUT = flags.DEFINE_integer("rollout_workers", 1, "Processes that roll out.", lower_bound=1)
_REWARDS = flags.DEFINE_list("reward_workers", [f"{ANY}=1"], "Processes that judge, by domain: any=1,code=4.")
_TRAINERS = flags.DEFINE_integer("trainer_workers", 1, "Processes that train, as one group.", lower_bound=1)
_ROOM = flags.DEFINE_integer("room", 4, "Groups that a rollout worker plays at a time.", lower_bound=1)
_ADDRESS = flags.DEFINE_string("address", None, "Of a Ray cluster, such as auto; without one, Ray runs here alone.")
_JUDGE = flags.DEFINE_float("judge_seconds", 600.0, "Of a group's reward, until its process is ended.", lower_bound=0.1)
_SILENT = flags.DEFINE_float("silent_seconds", 120.0, "Until a worker that says nothing is ended.", lower_bound=1.0)
_SHOWN = flags.DEFINE_float("table_seconds", 10.0, "Between two tables of what goes on.", lower_bound=0.5)
heading("Learning")
_CORRECTION = flags.DEFINE_float("correction", 2.0, "Bound of the correction for stale tokens; 0: none.", lower_bound=0)
_LEARN_FROM = flags.DEFINE_enum("learn_from", "all", ["all", "newest"], "Versions whose tokens are in the loss.")
heading("Devices and memory")
_ROLLOUT_GPUS = flags.DEFINE_float("rollout_gpus", 0.0, "GPUs of a rollout worker.", lower_bound=0.0)
_TRAINER_GPUS = flags.DEFINE_float("trainer_gpus", 0.0, "GPUs of a trainer.", lower_bound=0.0)
flags.adopt_module_key_flags(agentflow)


def read_settings() -> dict[str, Any]:
    """Those of `agentflow`, and what of the cluster its bits depend on."""
    settings = agentflow.chosen_settings()
    stale = _SCHEDULE.value != "sync"
    return settings | {
        "schedule": _SCHEDULE.value,
        "staleness": _STALENESS.value,
        "budget": _BUDGET.value,
        "spare": _SPARE.value,
        "correction": _CORRECTION.value if stale else 0.0,
        "learn_from": _LEARN_FROM.value,
        "reward_workers": _reward_workers(),
        "compilation_cache": flags.FLAGS["compilation_cache"].value,
        "trainer_workers": _TRAINERS.value,
        "deterministic": flags.FLAGS["deterministic"].value,
    }


def _reward_workers() -> dict[str, int]:
    found = {}
    for part in _REWARDS.value:
        domain, _, count = part.partition("=")
        if not (domain and count.isascii() and count.isdigit() and int(count)):
            raise BadInput(f"--reward_workers: {part!r} should be DOMAIN=COUNT, such as {ANY}=2")
        found[domain] = int(count)
    return {ANY: 1} | found


def check_trainers(settings: Mapping[str, Any]) -> None:
    """Raise `BadInput` where several trainers have no mesh of their number."""
    count, mesh = settings["trainer_workers"], settings["mesh"]
    if count > 1 and mesh != f"data={count}":
        raise BadInput(
            f"--trainer_workers={count} deals rows over so many processes, which hold all parameters each: "
            f"give --mesh=data={count}"
        )


def choose_task(known: Known, group: int, *, seed: int, count: int) -> int:
    """The number of a group's task, as a single process would choose it."""
    return chosen(known, seed, group, count)


def main() -> None:
    """Master a cluster."""
    jax.config.update("jax_platforms", "cpu")  # the master computes nothing
    settings, logged = read_settings(), chosen_loggers()
    folder = Path(flags.FLAGS["workdir"].value or f"runs/cluster-{settings['seed']}").absolute()
    plan = plan_of(settings)
    check_trainers(settings)
    source = check_settings(settings)
    if not flags.FLAGS["resume"].value:
        begin_anew(folder)
    shape = Shape(
        rollout=_ROLLOUT.value,
        rewards={pool_of(domain): count for domain, count in settings["reward_workers"].items()},
        trainers=settings["trainer_workers"],
        room=_ROOM.value,
        every=int(flags.FLAGS["checkpoint_every"].value or 1),
        judge_seconds=_JUDGE.value,
        silent_seconds=_SILENT.value,
        watch_seconds=settings["watch_seconds"],
    )
    exams = Exams(settings["validation_tasks"], settings["test_tasks"])
    opens = {"settings": settings, "folder": folder, "every": shape.every}
    make = partial(make_worker, **opens, loggers=logged)
    gpus = {"rollout": _ROLLOUT_GPUS.value, "train": _TRAINER_GPUS.value}
    choose = None
    if settings.get("prompts") == "hard":
        choose = partial(choose_task, seed=settings["seed"], count=len(source.train()))
    with RayCrew(_ADDRESS.value, gpus=gpus) as crew:
        result = Master(crew, plan, shape, exams, make, folder, choose=choose, on_turn=Table(_SHOWN.value)).run()
    print(json.dumps(result))


if __name__ == "__main__":
    common.run(main)
