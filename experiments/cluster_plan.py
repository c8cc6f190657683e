"""Which schedule a cluster's settings mean."""

from collections.abc import Mapping
from typing import Any

from flowgrpo import schedule
from flowgrpo.types import BadInput

TAKES = {  # what means something to a schedule, beside the size of an update
    "sync": ("spare",),
    "one_step_off": ("spare",),
    "async": ("staleness",),
    "partial": ("staleness", "budget", "spare"),
}


def plan_of(settings: Mapping[str, Any]) -> schedule.Plan:
    """The schedule of these settings; `None` is no choice."""
    groups, updates, name = settings["queries"], settings["updates"], settings["schedule"]
    given = {key: settings[key] for key in ("staleness", "budget", "spare") if settings[key] is not None}
    for key in given:
        if key not in TAKES[name]:
            raise BadInput(f"--{key} means nothing to --schedule={name}: leave it out")
    if name == "partial":
        if "budget" not in given:
            raise BadInput("--schedule=partial needs --budget: tokens of a trajectory in one stretch")
        return schedule.partial_rollouts(groups, updates, **{"spare": groups} | given)
    makes = {"sync": schedule.synchronous, "one_step_off": schedule.one_step_off, "async": schedule.asynchronous}
    return makes[name](groups, updates, **given)
