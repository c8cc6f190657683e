"""The warm start of the offline agent run: a small model is made, and imitates flawed demonstrations of the real tools.

write_start(folder, make_env, do, settings)              tokenizer, configuration, random weights
warm_start(model, env, do, settings, tell)  ->  parameters at the lowest validation loss
"""

import shutil
from collections.abc import Callable, Iterator, Mapping
from itertools import count, islice
from pathlib import Path
from typing import Any

import jax
import numpy as np

import flowgrpo as fg
from experiments.offline_demos import demonstrate
from experiments.offline_model import check_made, note_made, write_model
from experiments.offline_tasks import make_tasks, passages
from flowgrpo.contracts import Do, HostEnv
from flowgrpo.learner.state import init_learner, make_optimizer
from flowgrpo.learner.warmstart import make_supervised, make_validation, packed_imitation, train_to_minimum
from flowgrpo.models.decoder import matrices
from flowgrpo.models.hf import Model
from flowgrpo.text import Text, load_text
from flowgrpo.types import Trajectory

FIRST = 400  # demonstrations from which the tokenizer is learned
ROOM = 4  # times as many tokens as the tokenizer that is learned from them needs
# Settings that what planner and tools say to each other depends on.
MADE_WITH = ("seed", "domains", "tools", "mcp", "turns", "rendering", "executor", "verifier", "generator", "analyst")
MADE_WITH += ("max_tokens", "context_tokens", "memory_tokens", "passages")
ASKED_EVERY, PATIENCE = 50, 6  # steps between two validations; how many may bring nothing


def write_start(folder: Path, make_env: Callable[..., HostEnv], do: Do, settings: Mapping[str, Any]) -> None:
    """The model folder, unless it is there: its tokenizer is learned from what planner and tools say to each other.

    What they say depends on no tokenizer, but to write it down takes one: a first one, learned from the queries alone.
    The folder appears when it is whole. One that other settings made is refused.
    """
    made = {name: settings[name] for name in MADE_WITH}
    if folder.exists():
        check_made(folder, made)
        return
    tasks = _tasks(settings, "train", FIRST)
    queries = [task.query for task in tasks]
    first = folder.with_name(f".{folder.name}")
    write_model(first, queries, seed=settings["seed"])
    text = load_text(first)
    wide = dict(settings) | {name: ROOM * settings[name] for name in ("max_tokens", "context_tokens", "memory_tokens")}
    env = make_env(text, turns=settings["turns"], settings=wide)
    talks = demonstrate(env, text, tasks, do, seed=settings["seed"])
    entries = [f" {passage['title']}: {passage['text']}" for passage in passages()]
    beside = folder.with_name(f".{folder.name}-whole")
    shutil.rmtree(beside, ignore_errors=True)
    write_model(beside, [*queries, *(_spoken(text, talk) for talk in talks), *entries], seed=settings["seed"])
    note_made(beside, made)
    beside.replace(folder)
    shutil.rmtree(first)


def warm_start(
    model: Model,
    env: HostEnv,
    do: Do,
    settings: Mapping[str, Any],
    tell: Callable[[int, float], None],
) -> Any:
    """Parameters at the lowest validation loss of imitation, which `tell` hears of; without steps, the model's own."""
    if not settings["warm_steps"]:
        return model.params
    rows = {split: _rows(model, env, do, settings, split, size) for split, size in _sizes(settings).items()}
    steps = settings["warm_steps"]
    optimizer = make_optimizer(
        learning_rate=settings["warm_rate"], warmup_steps=20, decay_steps=steps, matrices=matrices(model.config)
    )
    sizes = {"banned": model.banned, "micro_rows": settings["micro_rows"]}
    step = jax.jit(make_supervised(model.policy, optimizer, **sizes))
    loss = jax.jit(make_validation(model.policy, **sizes))
    asked = count(0, ASKED_EVERY)

    def validate(params) -> jax.Array:
        value = loss(params, rows["validation"])
        tell(next(asked), float(value))
        return value

    batches = islice(_batches(rows["train"], settings["warm_rows"], settings["seed"]), steps)
    state = init_learner(model.params, optimizer)
    return train_to_minimum(state, batches, step, validate, every=ASKED_EVERY, patience=PATIENCE)[0].params


def _sizes(settings: Mapping[str, Any]) -> dict[str, int]:
    return {"train": settings["demonstrations"], "validation": max(settings["demonstrations"] // 10, 1)}


def _rows(model: Model, env: HostEnv, do: Do, settings: Mapping[str, Any], split: str, size: int) -> fg.Batch:
    records = demonstrate(env, model.text, _tasks(settings, split, size), do, seed=settings["seed"])
    return packed_imitation(records, row_length=settings["context_tokens"])


def _batches(rows: fg.Batch, size: int, seed: int) -> Iterator[fg.Batch]:
    """Rows in a new random order each time they are used up."""
    random, every = np.random.default_rng(seed), len(rows.tokens)
    size = min(size, every)
    while True:
        order = random.permutation(every)
        for start in range(0, every - size + 1, size):
            yield jax.tree.map(lambda x, chosen=order[start : start + size]: x[chosen], rows)


def _tasks(settings: Mapping[str, Any], split: str, size: int):
    names = settings["domains"].split(",")
    # Questions take the longest to learn, for what is copied there are names. Seeds are apart from those of training.
    return make_tasks(
        settings["seed"] + 500_000, 0, size, split, [*names, *[name for name in names if name == "search"]]
    )


def _spoken(text: Text, talk: Trajectory) -> str:
    return "".join(text.decode(turn.tokens) for turn in talk.turns)
