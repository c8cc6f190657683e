"""A tiny model with the vocabulary of word problems, an example task, and an engine with scripted actions."""

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
from flowgrpo.data.tokenizer import ChatTokenizer
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
    """A model folder with random weights, whose tokenizer was learned from the prompts."""
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
    defaults = {"tasks": "word_problems", "examples": str(examples), "drop_examples": False, **SIZES}
    return preset(**{"model": str(planner_folder()), **defaults, **chosen})


def scripted_submit(
    tasks: Sequence[Task],
    text: ChatTokenizer,
    speak: Callable[[Task, int], str | Sequence[int]],
    requests: list[Any] | None = None,
):
    """An engine's `submit` that answers with `speak(task, turn)`, text or ids with a stop token.

    Requests are appended to `requests`, if it is a list.
    """
    by_query = {task.query: task for task in tasks}
    queries = re.compile("|".join(map(re.escape, by_query)))

    def submit(request) -> Future:
        if requests is not None:
            requests.append(request)
        prompt = text.decode(request.tokens)
        last = list(queries.finditer(prompt))[-1]
        action = speak(by_query[last[0]], prompt[last.end() :].count("<|im_start|>assistant") - 1)
        ids = [*text.encode(action), text.stop_ids[0]] if isinstance(action, str) else list(action)
        future = Future()
        future.set_result(Completion(ids, [-0.5] * len(ids), [0] * len(ids), "stop"))
        return future

    return submit
