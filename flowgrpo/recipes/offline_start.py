"""The start model of the offline agent run: its tokenizer, and its imitation of flawed demonstrations.

    write_start_model(folder, make_env, call_tool, config)      tokenizer, configuration, random weights
    script_imitation(model, env, call_tool, config)             warm start on demonstrations with the real tools
    demonstrate_script(env, text, tasks, call_tool, seed=0)     trajectories whose actions are imitated

A script knows the right actions (`metadata["steps"]` and `["final"]`) and deviates with the probabilities in
`ScriptFlaws`: it misreads the query (`metadata["misread"]`), calls a tool that is wrong or doesn't exist, damages a
context, omits the action format, answers too early or wrongly. Most flaws are wrong decisions. In nine of ten cases the
answer after the last step is what the tools returned, also after a misreading: a planner that never learned to copy has
nothing that a reward could reinforce. Nothing in a demonstration marks its flawed actions; training has to find them.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from flowgrpo.agent.action_forms import write_lines
from flowgrpo.contracts import HostEnv, ToolRunner
from flowgrpo.data.tokenizer import ChatTokenizer, load_tokenizer
from flowgrpo.files import read_json
from flowgrpo.learner.imitation import make_supervised, make_validation, packed_imitation
from flowgrpo.learner.state import adamw, init_learner
from flowgrpo.models.decoder import matrices
from flowgrpo.models.hf import Model, init_model, save_model
from flowgrpo.models.trainable import ALL_PARAMS, TrainableSubset
from flowgrpo.recipes.agent_config import OfflineConfig
from flowgrpo.recipes.offline_tasks import LANDS, TOWNS, TRADES, WARES, make_tasks, passages
from flowgrpo.renamed import SETTINGS, current_names
from flowgrpo.rollout.demonstrations import play_actions
from flowgrpo.training.config import flat_settings
from flowgrpo.training.run_dir import list_differences
from flowgrpo.training.run_files import NOTE
from flowgrpo.training.settings import WarmStartSection
from flowgrpo.training.warm_start import WarmStart, no_warm_start
from flowgrpo.types import BadInput, Batch, Task, Trajectory

TOOLS = ("calculator", "python", "search")
UNKNOWN_TOOLS = ("browser", "lookup", "solver")  # names of tools that don't exist
Random = np.random.Generator


@dataclass(frozen=True)
class ScriptFlaws:
    """Probabilities of the script's flaws."""

    wrong_tool: float = 0.18  # a step calls another tool, or one that doesn't exist
    damaged_context: float = 0.12  # a step lacks a character of its context
    unformatted: float = 0.06  # an action without the action format
    early_answer: float = 0.2  # an answer before the last step
    misread: float = 0.35  # all steps and the answer of another query
    wrong_answer: float = 0.1  # of the answer at the end
    wrong_drawing: float = 0.60  # of the answer of a task without steps


def action(tool: str, context: str) -> str:
    """An action of a planner in the action format."""
    return write_lines({"name": tool}, context)


def script(task: Task, random: Random, flaws: ScriptFlaws) -> Iterator[str]:
    """Yield the actions for a task; the last is the answer."""
    steps, final = task.metadata["steps"], str(task.metadata["final"])
    if random.random() < flaws.misread:
        steps, final = task.metadata["misread"]  # type: ignore[misc]
    for tool, context in steps:  # type: ignore[union-attr]
        while random.random() < flaws.wrong_tool + flaws.damaged_context + flaws.unformatted:
            yield _slip(tool, context, random, flaws)
        if random.random() < flaws.early_answer:
            yield action("answer", _wrong(final, task.domain, random))
            return
        yield action(tool, context)
    is_wrong = random.random() < (flaws.wrong_answer if steps else flaws.wrong_drawing)
    yield action("answer", _wrong(final, task.domain, random) if is_wrong else final)


def _slip(tool: str, context: str, random: Random, flaws: ScriptFlaws) -> str:
    """A flawed step."""
    chances = np.array([flaws.wrong_tool, flaws.damaged_context, flaws.unformatted])
    kind = random.choice(3, p=chances / chances.sum())
    if kind == 0:
        others = [name for name in (*TOOLS, *UNKNOWN_TOOLS) if name != tool]
        return action(others[int(random.integers(len(others)))], context)
    if kind == 1:
        positions = [index for index, letter in enumerate(context) if letter in "()'"] or [0]
        index = positions[int(random.integers(len(positions)))]
        return action(tool, context[:index] + context[index + 1 :])
    return context


def _wrong(final: str, domain: str, random: Random) -> str:
    """A wrong answer that looks like the right one."""
    if domain == "search":  # another name of the same kind
        names = next(names for names in (TOWNS, LANDS, TRADES, WARES) if final in names)
        others = [other for other in names if other != final]
        return others[int(random.integers(len(others)))]
    numbers = [i for i, letter in enumerate(final) if letter.isdigit()]
    i = numbers[int(random.integers(len(numbers)))]
    return final[:i] + str((int(final[i]) + int(random.integers(1, 10))) % 10) + final[i + 1 :]


# Demonstrations -----------------------------------------------------------------------------------------


def demonstrate_script(
    env: HostEnv,
    text: ChatTokenizer,
    tasks: Sequence[Task],
    call_tool: ToolRunner,
    *,
    seed: int,
    workers: int = 8,
) -> list[Trajectory]:
    """One trajectory per task, with real tools; each depends on the seed, its index and its task alone."""

    def play(number: int, task: Task) -> Trajectory:
        actions = script(task, np.random.default_rng([seed, number]), ScriptFlaws())
        return play_actions(env, text, call_tool, task, actions, group=number)

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(play, range(len(tasks)), tasks))


# The tokenizer and the model ----------------------------------------------------------------------------

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Pretokenizer = Callable[[], Any]  # makes a pre-tokenizer of the package tokenizers
SHAPE: Mapping[str, Any] = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 3, "head_dim": 32}
# A first layer that sees a token and the three before it makes copying easy to learn: later layers find what followed
# the last written words earlier in the context.
COPYING_SHAPE: Mapping[str, Any] = SHAPE | {
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 4,
}


def word_pretokenizer() -> Any:
    """Split text into words and single digits, so that numbers and names are copied piece by piece."""
    from tokenizers import pre_tokenizers

    digits, letters = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    return pre_tokenizers.Sequence([digits, letters])


def phrase_pretokenizer() -> Any:
    """Split text at numbers only: a number can be one token, and so can a frequent phrase between numbers."""
    from tokenizers import Regex, pre_tokenizers

    numbers = pre_tokenizers.Split(Regex("[0-9]+"), "isolated")
    return pre_tokenizers.Sequence([numbers, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def write_tokenizer(
    folder: Path, texts: Iterable[str], *, pretokenizer: Pretokenizer = word_pretokenizer, vocab_size: int = 1024
) -> None:
    """Write a byte-level BPE tokenizer learned from `texts`, within the pieces of `pretokenizer`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pretokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START],
        chat_template=TEMPLATE,
    )
    fast.save_pretrained(folder)


def write_model(
    folder: Path,
    texts: Iterable[str],
    *,
    seed: int,
    shape: Mapping[str, Any] = SHAPE,
    pretokenizer: Pretokenizer = word_pretokenizer,
    vocab_size: int = 1024,
) -> None:
    """Write a model folder: tokenizer, configuration and random weights."""
    write_tokenizer(folder, texts, pretokenizer=pretokenizer, vocab_size=vocab_size)
    text = load_tokenizer(folder)
    heads = shape["hidden_size"] // shape["head_dim"]
    source = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": text.vocab_size,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "initializer_range": 0.05,
        "eos_token_id": text.stop_ids[0],
        "pad_token_id": text.pad_id,
        **shape,
    }
    model = init_model(source, jax.random.key(seed))
    save_model(folder, model._replace(tokenizer=text))


# Settings of the start model ----------------------------------------------------------------------------


def write_start_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Record the settings that a start model was made with."""
    (folder / NOTE).write_text(json.dumps(settings) + "\n")


def check_start_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Raise `BadInput` if the start model in a folder was made with other settings."""
    path = folder / NOTE
    saved = current_names(read_json(path, "remove its folder, or choose another --workdir"), SETTINGS)
    if differences := list_differences(saved, json.loads(json.dumps(settings))):
        raise BadInput(f"{folder} was made otherwise: {'; '.join(differences)}. Choose another --workdir")


TOKENIZER_DEMONSTRATIONS = 400  # demonstrations that the tokenizer is trained on
BUDGET_FACTOR = 4  # the draft tokenizer needs more tokens for the same text than the final one
# Settings that the texts of planner and tools depend on.
MADE_WITH = ("seed", "domains", "tools", "mcp", "turns", "rendering", "executor", "verifier", "generator", "analyst")
MADE_WITH += ("max_tokens", "context_tokens", "memory_tokens", "search_top_k")
OWN_AGENT_SETTING = "agent"  # likewise, for an external agent
TOKEN_BUDGETS = ("max_tokens", "context_tokens", "memory_tokens")
PATIENCE = 6  # validations of the imitation without improvement until it stops


def write_start_model(
    folder: Path, make_env: Callable[..., HostEnv], call_tool: ToolRunner, config: OfflineConfig
) -> None:
    """Write the model folder, unless it exists; its tokenizer is trained on the texts of planner and tools.

    These texts depend on no tokenizer, but recording them needs one: a draft, trained on the queries only. The folder
    appears when it is complete. Raises `BadInput` if it was made with other settings.
    """
    values = flat_settings(config.to_json())
    settings = {name: value for name, value in values.items() if name in (*MADE_WITH, OWN_AGENT_SETTING)}
    if folder.exists():
        check_start_settings(folder, settings)
        return
    tasks = _tasks(config, "train", TOKENIZER_DEMONSTRATIONS)
    queries = [task.query for task in tasks]
    draft = folder.with_name(f".{folder.name}")
    write_model(draft, queries, seed=config.run.seed)
    text = load_tokenizer(draft)
    wide_config = config.replace(**{name: BUDGET_FACTOR * values[name] for name in TOKEN_BUDGETS if name in values})
    env = make_env(text, turns=config.rollout.turns, config=wide_config)
    records = demonstrate_script(env, text, tasks, call_tool, seed=config.run.seed)
    entries = [f" {passage['title']}: {passage['text']}" for passage in passages()]
    unfinished = folder.with_name(f".{folder.name}-whole")
    shutil.rmtree(unfinished, ignore_errors=True)
    conversations = ["".join(text.decode(turn.tokens) for turn in record.turns) for record in records]
    write_model(unfinished, [*queries, *conversations, *entries], seed=config.run.seed, shape=COPYING_SHAPE)
    write_start_settings(unfinished, settings)
    unfinished.replace(folder)
    shutil.rmtree(draft)


def script_imitation(model: Model, env: HostEnv, call_tool: ToolRunner, config: OfflineConfig) -> WarmStart:
    """Warm start: imitation of demonstrations before reinforcement learning; of no steps if the Config has none."""
    if not config.warm_start.warm_steps:
        return no_warm_start(model.params)
    sizes = {"train": config.warm_start.demonstrations, "validation": max(config.warm_start.demonstrations // 10, 1)}
    records = {
        split: demonstrate_script(env, model.tokenizer, _tasks(config, split, size), call_tool, seed=config.run.seed)
        for split, size in sizes.items()
    }
    rows = {split: packed_imitation(records[split], row_length=config.rollout.context_tokens) for split in sizes}
    return imitation_warm_start(
        rows, model, config.warm_start, seed=config.run.seed, patience=PATIENCE, micro_rows=config.learner.micro_rows
    )


def imitation_warm_start(
    rows: Mapping[str, Batch],
    model: Model,
    settings: WarmStartSection,
    *,
    seed: int,
    patience: int,
    optimizer: optax.GradientTransformation | None = None,
    trainable: TrainableSubset = ALL_PARAMS,
    every: int = 50,
    micro_rows: int = 16,
) -> WarmStart:
    """Warm start by imitation of rows of tokens.

    Args:
        rows: Rows of the splits "train" and "validation".
        model: Model that imitates.
        settings: Learning rate, number of steps and rows per step.
        seed: Of the order of the rows.
        patience: Validations without improvement until it stops.
        optimizer: Muon with warm-up and decay by default.
        trainable: Subset of the parameters that is trained.
        every: Steps between two validations.
        micro_rows: Rows per forward pass.
    """
    optimizer = optimizer or adamw(
        learning_rate=settings.warm_rate,
        warmup_steps=20,
        decay_steps=settings.warm_steps,
        matrices=matrices(model.config),
    )
    loss = jax.jit(make_validation(model.policy, banned=model.banned, micro_rows=micro_rows))
    return WarmStart(
        state=init_learner(model.params, optimizer, trainable),
        step=jax.jit(
            make_supervised(model.policy, optimizer, banned=model.banned, trainable=trainable, micro_rows=micro_rows)
        ),
        batches=lambda first: islice(shuffled_batches(rows["train"], settings.warm_rows, seed), first, None),
        validate=lambda params: loss(params, rows["validation"]),
        steps=settings.warm_steps,
        every=every,
        patience=patience,
        trainable=trainable,
    )


def shuffled_batches(rows: Batch, size: int, seed: int) -> Iterator[Batch]:
    """Yield batches of rows without end, in a new random order each epoch."""
    random, count = np.random.default_rng(seed), len(rows.tokens)
    size = min(size, count)
    while True:
        order = random.permutation(count)
        for start in range(0, count - size + 1, size):
            yield jax.tree.map(lambda x, indices=order[start : start + size]: x[indices], rows)


def _tasks(config: OfflineConfig, split: str, size: int):
    names = config.tasks.domains.split(",")
    # "search" twice: its questions take longest to learn, since names are copied. The seeds differ from training's.
    return make_tasks(
        config.run.seed + 500_000, 0, size, split, [*names, *[name for name in names if name == "search"]]
    )
