"""A tiny model that knows the words of word problems, an example of one, and an engine that says what it is told to."""

import json
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from flowgrpo.agent.action_forms import CALL_PLAN
from flowgrpo.contracts import Completion
from flowgrpo.data.tokenizer import Text
from flowgrpo.recipes.agent_config import Config, preset
from flowgrpo.recipes.offline_start import write_model
from flowgrpo.recipes.task_sets import WORD_PROBLEMS
from flowgrpo.types import Task

SHAPE = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
EXAMPLE = {
    "id": "cards",
    "query": "Lucy has 2 cards. She buys 3 more cards. How many cards does Lucy have now?",
    "answers": ["5"],
    "steps": [["calculator", "2 + 3"]],
    "final": "5",
}
SIZES: dict[str, Any] = {
    "lora_rank": 4,
    "max_tokens": 16,
    "context_tokens": 384,
    "slots": 8,
    "queries": 2,
    "samples": 2,
    "micro_rows": 2,
    "validation_tasks": 2,
    "test_tasks": 2,
    "warm_steps": 8,
    "warm_rows": 2,
    "warm_rate": 0.05,
    "demonstrations": 8,
}


@cache
def planner_folder(vocab_size: int = 800) -> Path:
    """A model folder with random weights, whose tokenizer knows the prompts."""
    folder = Path(mkdtemp(prefix="planner-")) / "model"
    queries = [task.query for task in WORD_PROBLEMS.draw(0, "train", 0, 40)]
    texts = [CALL_PLAN, WORD_PROBLEMS.instructions, *queries, "calculator(expression) answer(text) calculator(12 + 34)"]
    write_model(folder, texts * 2, seed=0, shape=SHAPE, vocab_size=vocab_size)
    return folder


def write_tasks(path: Path, *tasks) -> Path:
    """A task file of these records."""
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return path


def settings(folder: Path, **chosen: Any) -> Config:
    """Settings of a run on word problems, with one worked example."""
    examples = folder / "examples.jsonl"
    if "examples" not in chosen:
        write_tasks(examples, EXAMPLE)
    fixed = {"tasks": "word_problems", "examples": str(examples), "drop_examples": False, **SIZES}
    return preset(**{"model": str(planner_folder()), **fixed, **chosen})


def said_by(
    tasks: Sequence[Task],
    text: Text,
    speak: Callable[[Task, int], str | Sequence[int]],
    requests: list[Any] | None = None,
):
    """An engine's `submit` that says `speak(task, turn)`, words or ids with their stop token; it may list requests."""
    by_query = {task.query: task for task in tasks}
    queries = re.compile("|".join(map(re.escape, by_query)))

    def submit(request) -> Future:
        if requests is not None:
            requests.append(request)
        talk = text.decode(request.tokens)
        last = list(queries.finditer(talk))[-1]
        action = speak(by_query[last[0]], talk[last.end() :].count("<|im_start|>assistant") - 1)
        ids = [*text.encode(action), text.stop_ids[0]] if isinstance(action, str) else list(action)
        future = Future()
        future.set_result(Completion(ids, [-0.5] * len(ids), [0] * len(ids), "stop"))
        return future

    return submit
