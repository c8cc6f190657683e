"""A cluster's run from its record: events and trajectories flow in, the parameters that follow from them flow out."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.cluster_trainer import ClusterTrainer
from experiments.same_run import result_of
from flowgrpo import schedule, under_way
from flowgrpo.distributed.event_log import read_events
from flowgrpo.distributed.orders import Stretch
from flowgrpo.learner.checkpoint import params_sha256
from flowgrpo.learner.folder import START
from flowgrpo.rollout.records import from_json
from flowgrpo.types import BadInput


def replay_run(folder: Path, settings: Mapping[str, Any], plan: schedule.Plan) -> dict[str, Any]:
    """Its updates again -> what came of them, and whether that is what the run had come to."""
    batches = sorted((folder / "batches").glob("*.jsonl"))
    if not batches:
        raise BadInput(f"{folder} has no batches/: give the work directory of a cluster's run")
    events = replay_schedule(folder / "events.jsonl", plan)
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / START).symlink_to((folder / START).absolute())
        trainer = ClusterTrainer(
            {**settings, "reward_workers": {}, "compilation_cache": None, "trainer_workers": 1},
            Path(scratch),
            every=10**9,
        )
        trainer.open()
        trainer.begin()
        for path in batches:
            figures, _ = trainer.train(Stretch(tuple(from_json(line) for line in path.read_text().splitlines())))
            print(f"update {figures['update']} of {len(batches)}: success {figures['success']:.3f}", flush=True)
        sha = params_sha256(trainer.session.run.learner.params)
        trainer.close()
    there = result_of(folder)["params_sha256"]
    return {"updates": len(batches), "events": events, "params_sha256": sha, "there": there, "same": sha == there}


def replay_schedule(path: Path, plan: schedule.Plan) -> int:
    """The events through the schedule again, which must give the updates that were made; how many there were.

    Where the run went back to a checkpoint, the schedule did too: its state then is not in the log, and the events from
    there on are taken up where the log says with which groups.
    """
    state, there, again, count = under_way.State(), [], [], 0
    for line in read_events(path):
        if line["what"] == "resumed" and (line["update"] or count):
            return count  # checked as far as one process went
        if line["what"] == "event":
            count += 1
            state, commands = schedule.advance(plan, state, schedule.Event(**line["event"]))
            again += [list(command.groups) for command in commands if command.kind == "train"]
        elif line["what"] == "train":
            there.append(line["groups"])
    if again[: len(there)] != there:
        raise BadInput(f"{path} tells of other updates than its events lead to: it was written by another version")
    return count
