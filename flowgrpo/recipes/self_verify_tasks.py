"""A small model that answers questions and judges answers, neither of them well: the start of an offline run.

    make_start_model(folder, config)  ->  a model folder

Questions are generated: "Which is the largest of 37, 82, 14 and 60?" The model imitates answers, some of which are
right, and verdicts, most of which are, with exactly the prompts that the reward renders:

    question                                       ->  82, or another of the numbers
    "... Is it a correct answer to the question?"  ->  Yes or No

so that it starts with guesses, and judges better than it answers. No question of one split is in another.
"""

import shutil
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import numpy as np

from flowgrpo.agent.single_turn import single_turn
from flowgrpo.data.tasks import split_of
from flowgrpo.data.tokenizer import ChatTokenizer, guard, start_conversation
from flowgrpo.files import make_folder
from flowgrpo.learner.imitation import packed_imitation
from flowgrpo.models.hf import Model, load_model, save_model
from flowgrpo.recipes.offline_start import (
    check_start_settings,
    imitation_warm_start,
    phrase_pretokenizer,
    write_model,
    write_start_settings,
)
from flowgrpo.recipes.self_verify_config import Config
from flowgrpo.recipes.self_verify_config import preset as preset
from flowgrpo.report.progress import Progress
from flowgrpo.rewards.judge import ask_without_gold, shorten_quote
from flowgrpo.rollout.effects import no_effects
from flowgrpo.training.config import flat_settings
from flowgrpo.training.run_dir import START
from flowgrpo.training.warm_start import WarmStart, finish_warm_start, warm_start
from flowgrpo.types import Task, Trajectory, Turn

NUMBERS = range(10, 100)
NUMBERS_PER_QUESTION = 4  # numbers of a question
ROW_LENGTH = 64  # tokens of a row of the warm start
PATIENCE = 4  # validations of the imitation without improvement until it stops
VOCAB_SIZE = 2048  # enough for one token per fixed part of a prompt, which makes prompts of the judge ten times shorter
VALIDATION_QUESTIONS = 300  # questions of a validation
FIRST_SHOWN = 1_000_000  # index of the first question of the warm start; training starts at 0

MADE_WITH = (
    "seed",
    "imitated_accuracy",
    "judge_false_positives",
    "judge_false_negatives",
    "max_tokens",
    "warm_tasks",
    "warm_steps",
    "warm_rows",
    "warm_rate",
)

Random = np.random.Generator


# Questions ----------------------------------------------------------------------------------------------


def make_questions(seed: int, split: str, first: int, size: int) -> list[Task]:
    """Questions of a split; each depends on the seed and its number alone."""
    return [make_question(seed, split, number) for number in range(first, first + size)]


def make_question(seed: int, split: str, number: int) -> Task:
    """A question, redrawn until it belongs to the split."""
    for draw in count():
        task = _draw(np.random.default_rng([seed, number, draw]))
        if split_of(task.query) == split:
            return Task(f"{split}-{number}", task.query, task.answers, task.domain, task.metadata)
    raise AssertionError("the questions of a split have no end")


def _draw(random: Random) -> Task:
    numbers = [str(number) for number in random.choice(NUMBERS, NUMBERS_PER_QUESTION, replace=False)]
    query = f"Which is the largest of {', '.join(numbers[:-1])} and {numbers[-1]}?"
    return Task("", query, (max(numbers),), "largest", {"numbers": numbers})


def numbers_of(task: Task) -> list[str]:
    """Numbers in a question."""
    return list(task.metadata["numbers"])  # type: ignore[arg-type]


# Demonstrations -----------------------------------------------------------------------------------------


def draw_answer(task: Task, random: Random, accuracy: float) -> str:
    """Draw an answer: right with probability `accuracy`, else another of the numbers."""
    others = [number for number in numbers_of(task) if number != task.answers[0]]
    return task.answers[0] if random.random() < accuracy else str(random.choice(others))


def draw_verdict(task: Task, answer: str, random: Random, false_positives: float, false_negatives: float) -> str:
    """Draw a verdict, Yes or No, with these rates of errors for wrong and for right answers."""
    is_right = answer == task.answers[0]
    is_slip = random.random() < (false_negatives if is_right else false_positives)
    return "Yes" if is_right != is_slip else "No"


def judge_prompt(text: ChatTokenizer, task: Task, answer: str) -> tuple[int, ...]:
    """Prompt of the judge of `verifier_probability(text, ..., ask=ask_without_gold)`."""
    guarded = guard(text)
    content = ask_without_gold(task, shorten_quote(guarded, answer, 1024))
    return start_conversation(guarded, [{"role": "user", "content": content}]).tokens


def demonstrations(text: ChatTokenizer, tasks: Sequence[Task], config: Config) -> list[Trajectory]:
    """Two demonstrations per task: an answer, and a verdict on another answer."""
    env = single_turn(text, max_tokens=config.rollout.max_tokens)
    records = []
    for number, task in enumerate(tasks):
        random = np.random.default_rng([config.run.seed, number, len(tasks)])
        prompt = env.reset(None, task, no_effects)[1].tokens
        records.append(
            _record(text, prompt, draw_answer(task, random, config.warm_start.imitated_accuracy), len(records))
        )
        judged_answer = draw_answer(task, random, config.warm_start.imitated_accuracy)
        verdict = draw_verdict(
            task,
            judged_answer,
            random,
            config.warm_start.judge_false_positives,
            config.warm_start.judge_false_negatives,
        )
        records.append(_record(text, judge_prompt(text, task, judged_answer), verdict, len(records)))
    return records


def _record(text: ChatTokenizer, prompt: Sequence[int], words: str, group: int) -> Trajectory:
    reply = [*text.encode(words), text.stop_ids[0]]
    tokens = np.array([*prompt, *reply], np.int32)
    chosen = np.arange(len(tokens)) >= len(prompt)
    return Trajectory([Turn(tokens, chosen, np.zeros(len(tokens), np.float32))], 1.0, group, extends_context=False)


# The model ----------------------------------------------------------------------------------------------


def make_start_model(folder: Path, config: Config) -> None:
    """Write the model in `start/` of a run's folder, unless it exists, with a record of its settings.

    It appears when it is complete; an interrupted warm start is resumed.
    """
    settings = {name: value for name, value in flat_settings(config.to_json()).items() if name in MADE_WITH}
    start, unfinished = folder / START, folder / f".{START}"
    if start.exists():
        check_start_settings(start, settings)
        return
    make_folder(folder)
    shutil.rmtree(unfinished, ignore_errors=True)
    write_model(
        unfinished,
        tokenizer_texts(config.run.seed),
        seed=config.run.seed,
        pretokenizer=phrase_pretokenizer,
        vocab_size=VOCAB_SIZE,
    )
    model, progress = load_model(unfinished), Progress(config.warm_start.warm_steps)
    params = warm_start(
        verifier_imitation(model, config), folder, lambda step, loss: progress.show("warm start", step, {"loss": loss})
    )
    progress.end()
    save_model(unfinished, model._replace(params=params))
    write_start_settings(unfinished, settings)
    unfinished.replace(start)
    finish_warm_start(folder)


def tokenizer_texts(seed: int) -> Iterator[str]:
    """Yield the texts that the tokenizer is trained on: both kinds of prompts, and replies."""
    for task in make_questions(seed, "train", FIRST_SHOWN, 300):
        yield from (task.query, ask_without_gold(task, f"> {task.answers[0]}"), "user\n", "assistant\n", "Yes", "No")


def verifier_imitation(model: Model, config: Config) -> WarmStart:
    """Warm start by imitation of answers and verdicts."""
    questions = {
        "train": make_questions(config.run.seed, "train", FIRST_SHOWN, config.warm_start.warm_tasks),
        "validation": make_questions(config.run.seed, "validation", FIRST_SHOWN, VALIDATION_QUESTIONS),
    }
    rows = {
        name: packed_imitation(demonstrations(model.tokenizer, tasks, config), row_length=ROW_LENGTH)
        for name, tasks in questions.items()
    }
    return imitation_warm_start(rows, model, config.warm_start, seed=config.run.seed, patience=PATIENCE)
