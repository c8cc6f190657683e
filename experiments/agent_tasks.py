"""The tasks of a run on the agent system: settings flow in, the draw of every split and numbered tasks flow out."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from experiments import offline_tasks
from experiments.hosted_setup import draw_from
from experiments.prompts import Draw
from flowgrpo.task_files import parse_fields, read_tasks
from flowgrpo.tasks import split_tasks
from flowgrpo.types import BadInput, Task

POOL = 512  # offline tasks that are met again and again, where tasks are chosen by what is known of them


class Source(NamedTuple):
    """The tasks of a run."""

    draw: Draw
    train: Callable[[], Sequence[Task]]  # those of training that have a number, in the order of their numbers
    domains: tuple[str, ...]


def tasks_of(settings: Mapping[str, Any]) -> Source:
    """Those of a file, or of the offline world, which never end: the first `POOL` of them have a number."""
    seed = settings["seed"]
    if settings["tasks"] is None:
        if settings["model"] is not None:
            raise BadInput("--model needs --tasks: a .jsonl or .parquet file of tasks, or reasoning_gym:NAME")
        names = tuple(settings["domains"].split(","))
        return Source(
            draw=lambda split, first, count: offline_tasks.make_tasks(seed, first, count, split, names),
            train=lambda: offline_tasks.make_tasks(seed, 0, POOL, "train", names),
            domains=names,
        )
    fields = parse_fields(settings.get("fields", []))
    read = read_tasks(settings["tasks"], fields=fields, domain=settings.get("domain"))
    return Source(
        draw=draw_from(read, seed),
        train=lambda: split_tasks(read)["train"].items,
        domains=tuple({task.domain for task in read}),
    )
