"""A small model that can do two things, neither of them well: answer questions, and judge answers.

make_start(folder, settings, tell)  ->  a model folder, the start of an offline run

Questions are made here, without a file: "Which is the largest of 37, 82, 14 and 60?" The model is shown answers of
which some are right, and verdicts of which most are, in the very prompt that the reward renders:

    question                                       ->  82, or another of the numbers
    "... Is it a correct answer to the question?"  ->  Yes or No

so that it begins with guesses, and judges better than it answers. No question of one split is in another.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import jax
import numpy as np

import flowgrpo as fg
from experiments.offline_model import check_made, note_made, phrases, write_model
from flowgrpo.agent.question import question
from flowgrpo.effects import no_effects
from flowgrpo.learner.state import init_learner, make_optimizer
from flowgrpo.learner.warmstart import make_supervised, make_validation, packed_imitation, train_to_minimum
from flowgrpo.models.decoder import matrices
from flowgrpo.models.hf import Model, load_model, save_model
from flowgrpo.rewards.judge import ask_alone
from flowgrpo.rewards.prompts import shorten
from flowgrpo.tasks import split_of
from flowgrpo.text import Text, guard, start
from flowgrpo.types import Task, Trajectory, Turn

NUMBERS = range(10, 100)
LISTED = 4  # numbers of a question
ROW = 64  # tokens of a row of the warm start
ASKED_EVERY, PATIENCE = 50, 4  # steps between two validations; how many may bring nothing
MOST = 2048  # ids of the tokenizer, which writes the fixed parts of prompts as one: a judge reads a tenth as much
HELD = 300  # questions kept back for the validation
SHOWN_FROM = 1_000_000  # the first question that the warm start shows; training begins with 0

MADE_WITH = (
    "seed",
    "right",
    "overlooked",
    "doubted",
    "max_tokens",
    "warm_tasks",
    "warm_steps",
    "warm_rows",
    "warm_rate",
)

Random = np.random.Generator


# Questions ----------------------------------------------------------------------------------------------


def make_tasks(seed: int, split: str, first: int, size: int) -> list[Task]:
    """Questions of a split, each of which depends on the seed and its number alone."""
    return [make_task(seed, split, number) for number in range(first, first + size)]


def make_task(seed: int, split: str, number: int) -> Task:
    """One question; drawn again until it belongs to the split."""
    for draw in count():
        task = _draw(np.random.default_rng([seed, number, draw]))
        if split_of(task.query) == split:
            return Task(f"{split}-{number}", task.query, task.answers, task.domain, task.metadata)
    raise AssertionError("the questions of a split have no end")


def _draw(random: Random) -> Task:
    numbers = [str(number) for number in random.choice(NUMBERS, LISTED, replace=False)]
    query = f"Which is the largest of {', '.join(numbers[:-1])} and {numbers[-1]}?"
    return Task("", query, (max(numbers),), "largest", {"numbers": numbers})


def numbers_of(task: Task) -> list[str]:
    """The numbers that a question names."""
    return list(task.metadata["numbers"])  # type: ignore[arg-type]


# What is shown ------------------------------------------------------------------------------------------


def shown_answer(task: Task, random: Random, right: float) -> str:
    """An answer that is right with this chance, and otherwise another of the numbers."""
    others = [number for number in numbers_of(task) if number != task.answers[0]]
    return task.answers[0] if random.random() < right else str(random.choice(others))


def shown_verdict(task: Task, answer: str, random: Random, overlooked: float, doubted: float) -> str:
    """Yes or No; wrong answers are overlooked, and right ones doubted, with these chances."""
    right = answer == task.answers[0]
    slips = random.random() < (doubted if right else overlooked)
    return "Yes" if right != slips else "No"


def judge_prompt(text: Text, task: Task, answer: str) -> tuple[int, ...]:
    """The ids that `verifier_probability(text, ..., ask=ask_alone)` puts before its judge."""
    own = guard(text)
    content = ask_alone(task, shorten(own, answer, 1024))
    return start(own, [{"role": "user", "content": content}]).tokens


def demonstrations(text: Text, tasks: Sequence[Task], settings: Mapping[str, Any]) -> list[Trajectory]:
    """Two of each task: an answer to it, and a verdict on another answer."""
    env = question(text, max_tokens=settings["max_tokens"])
    chances = {name: settings[name] for name in ("overlooked", "doubted")}
    records = []
    for number, task in enumerate(tasks):
        random = np.random.default_rng([settings["seed"], number, len(tasks)])
        asked = env.reset(None, task, no_effects)[1].tokens
        records.append(_record(text, asked, shown_answer(task, random, settings["right"]), len(records)))
        judged = shown_answer(task, random, settings["right"])
        verdict = shown_verdict(task, judged, random, **chances)
        records.append(_record(text, judge_prompt(text, task, judged), verdict, len(records)))
    return records


def _record(text: Text, prompt: Sequence[int], words: str, group: int) -> Trajectory:
    said = [*text.encode(words), text.stop_ids[0]]
    tokens = np.array([*prompt, *said], np.int32)
    chosen = np.arange(len(tokens)) >= len(prompt)
    return Trajectory([Turn(tokens, chosen, np.zeros(len(tokens), np.float32))], 1.0, group, appends=False)


# The model ----------------------------------------------------------------------------------------------


def make_start(folder: Path, settings: Mapping[str, Any], tell: Callable[[int, float], None]) -> None:
    """The model folder, unless it is there; it appears when it is whole, with a note of what it was made with."""
    made = {name: settings[name] for name in MADE_WITH}
    if folder.exists():
        check_made(folder, made)
        return
    beside = folder.with_name(f".{folder.name}")
    shutil.rmtree(beside, ignore_errors=True)
    write_model(beside, texts(settings["seed"]), seed=settings["seed"], cut=phrases, vocab_size=MOST)
    model = load_model(beside)
    save_model(beside, model._replace(params=warm_start(model, settings, tell)))
    note_made(beside, made)
    beside.replace(folder)


def texts(seed: int) -> Iterator[str]:
    """Yield the texts that the tokenizer is learned from: both kinds of prompts, and replies."""
    for task in make_tasks(seed, "train", SHOWN_FROM, 300):
        yield from (task.query, ask_alone(task, f"> {task.answers[0]}"), "user\n", "assistant\n", "Yes", "No")


def warm_start(model: Model, settings: Mapping[str, Any], tell: Callable[[int, float], None]) -> Any:
    """Parameters at the lowest validation loss of imitation, which `tell` hears of."""
    seed, steps = settings["seed"], settings["warm_steps"]
    shown = {
        "train": make_tasks(seed, "train", SHOWN_FROM, settings["warm_tasks"]),
        "validation": make_tasks(seed, "validation", SHOWN_FROM, HELD),
    }
    rows = {
        name: packed_imitation(demonstrations(model.text, tasks, settings), row_length=ROW)
        for name, tasks in shown.items()
    }
    optimizer = make_optimizer(
        learning_rate=settings["warm_rate"], warmup_steps=20, decay_steps=steps, matrices=matrices(model.config)
    )
    step = jax.jit(make_supervised(model.policy, optimizer, banned=model.banned))
    validate = partial(
        _validate, loss=jax.jit(make_validation(model.policy, banned=model.banned)), rows=rows["validation"], tell=tell
    )
    batches = islice(_batches(rows["train"], settings["warm_rows"], seed), steps)
    state = init_learner(model.params, optimizer)
    asked = partial(validate, count(0, ASKED_EVERY))
    return train_to_minimum(state, batches, step, asked, every=ASKED_EVERY, patience=PATIENCE)[0].params


def _validate(steps: Iterator[int], params, *, loss, rows: fg.Batch, tell: Callable[[int, float], None]) -> jax.Array:
    value = loss(params, rows)
    tell(next(steps), float(value))
    return value


def _batches(rows: fg.Batch, size: int, seed: int) -> Iterator[fg.Batch]:
    """Rows in a new random order each time they are used up."""
    random, every = np.random.default_rng(seed), len(rows.tokens)
    while True:
        order = random.permutation(every)
        for first in range(0, every - size + 1, size):
            yield jax.tree.map(lambda x, taken=order[first : first + size]: x[taken], rows)
