"""A small model that can do two things, neither of them well: answer questions, and judge answers.

make_start(folder, settings, tell)  ->  a model folder, the start of an offline run

Questions are made here, without a file: "Which is the largest of 37, 82, 14 and 60?" The model is shown answers of
which some are right, and verdicts of which most are, in the very prompt that the reward renders:

    question                                       ->  82, or another of the numbers
    "... Is it a correct answer to the question?"  ->  Yes or No

so that it begins with guesses, and judges better than it answers. No question of one split is in another.
"""

import shutil
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import numpy as np

from flowgrpo.agent.single_turn import question
from flowgrpo.data.tasks import split_of
from flowgrpo.data.tokenizer import Text, guard, start
from flowgrpo.files import make_folder
from flowgrpo.learner.imitation import packed_imitation
from flowgrpo.models.hf import Model, load_model, save_model
from flowgrpo.recipes.offline_start import check_made, note_made, phrases, warm_start_on, write_model
from flowgrpo.recipes.self_verify_config import Config
from flowgrpo.recipes.self_verify_config import preset as preset
from flowgrpo.report.progress import Progress
from flowgrpo.rewards.judge import ask_alone, shorten_quote
from flowgrpo.rollout.effects import no_effects
from flowgrpo.run.run_dir import START
from flowgrpo.run.warm_start import WarmStart, finish_warm_start, warm_start
from flowgrpo.types import Task, Trajectory, Turn

NUMBERS = range(10, 100)
LISTED = 4  # numbers of a question
ROW = 64  # tokens of a row of the warm start
PATIENCE = 4  # validations of the imitation that may bring nothing
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


def make_questions(seed: int, split: str, first: int, size: int) -> list[Task]:
    """Questions of a split, each of which depends on the seed and its number alone."""
    return [make_question(seed, split, number) for number in range(first, first + size)]


def make_question(seed: int, split: str, number: int) -> Task:
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
    content = ask_alone(task, shorten_quote(own, answer, 1024))
    return start(own, [{"role": "user", "content": content}]).tokens


def demonstrations(text: Text, tasks: Sequence[Task], config: Config) -> list[Trajectory]:
    """Two of each task: an answer to it, and a verdict on another answer."""
    env = question(text, max_tokens=config.max_tokens)
    records = []
    for number, task in enumerate(tasks):
        random = np.random.default_rng([config.seed, number, len(tasks)])
        asked = env.reset(None, task, no_effects)[1].tokens
        records.append(_record(text, asked, shown_answer(task, random, config.right), len(records)))
        judged = shown_answer(task, random, config.right)
        verdict = shown_verdict(task, judged, random, config.overlooked, config.doubted)
        records.append(_record(text, judge_prompt(text, task, judged), verdict, len(records)))
    return records


def _record(text: Text, prompt: Sequence[int], words: str, group: int) -> Trajectory:
    said = [*text.encode(words), text.stop_ids[0]]
    tokens = np.array([*prompt, *said], np.int32)
    chosen = np.arange(len(tokens)) >= len(prompt)
    return Trajectory([Turn(tokens, chosen, np.zeros(len(tokens), np.float32))], 1.0, group, appends=False)


# The model ----------------------------------------------------------------------------------------------


def make_start(folder: Path, config: Config) -> None:
    """The model in `start/` of a run's folder, unless it is there, with a note of what it was made with.

    It appears when it is whole; its warm start goes on where it was stopped.
    """
    made = {name: value for name, value in config.to_json().items() if name in MADE_WITH}
    start, beside = folder / START, folder / f".{START}"
    if start.exists():
        check_made(start, made)
        return
    make_folder(folder)
    shutil.rmtree(beside, ignore_errors=True)
    write_model(beside, texts(config.seed), seed=config.seed, cut=phrases, vocab_size=MOST)
    model, progress = load_model(beside), Progress(config.warm_steps)
    params = warm_start(
        verifier_imitation(model, config), folder, lambda step, loss: progress.show("warm start", step, {"loss": loss})
    )
    progress.end()
    save_model(beside, model._replace(params=params))
    note_made(beside, made)
    beside.replace(start)
    finish_warm_start(folder)


def texts(seed: int) -> Iterator[str]:
    """Yield the texts that the tokenizer is learned from: both kinds of prompts, and replies."""
    for task in make_questions(seed, "train", SHOWN_FROM, 300):
        yield from (task.query, ask_alone(task, f"> {task.answers[0]}"), "user\n", "assistant\n", "Yes", "No")


def verifier_imitation(model: Model, config: Config) -> WarmStart:
    """The imitation of answers and of verdicts."""
    shown = {
        "train": make_questions(config.seed, "train", SHOWN_FROM, config.warm_tasks),
        "validation": make_questions(config.seed, "validation", SHOWN_FROM, HELD),
    }
    rows = {
        name: packed_imitation(demonstrations(model.text, tasks, config), row_length=ROW)
        for name, tasks in shown.items()
    }
    return warm_start_on(rows, model, config, patience=PATIENCE)
