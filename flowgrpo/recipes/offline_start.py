"""Make the model that the offline agent run begins with: its tokenizer, and its imitation of flawed demonstrations.

    write_start(folder, make_env, do, config)            tokenizer, configuration, random weights
    script_imitation(model, env, do, config)             the warm start on demonstrations of the real tools
    demonstrate_script(env, text, tasks, do, seed=0)     trajectories whose actions are to be imitated

A script knows what is right (`metadata["steps"]` and `["final"]`), and slips with the chances in `ScriptFlaws`: it
misreads the query (`metadata["misread"]`), names a tool that is wrong or doesn't exist, damages a command, forgets the
form, answers too early or wrongly. Most slips are of what to do. An answer after the last step is what the tools said,
in nine of ten cases, also after a misreading: a planner that never learned to copy has nothing that a reward could
strengthen. Nothing in a demonstration says which of its actions were slips. That is left to training.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import flowgrpo as fg
from flowgrpo.agent.action_forms import write_lines
from flowgrpo.contracts import Do, HostEnv
from flowgrpo.data.tokenizer import Text, load_text
from flowgrpo.files import read_json
from flowgrpo.learner.imitation import make_supervised, make_validation, packed_imitation
from flowgrpo.learner.state import init_learner, make_optimizer
from flowgrpo.models.decoder import matrices
from flowgrpo.models.hf import Model, init_model, save_model
from flowgrpo.models.trainable import WHOLE, Trained
from flowgrpo.recipes.agent_config import TaskConfig
from flowgrpo.recipes.hosted import HostedConfig
from flowgrpo.recipes.offline_tasks import LANDS, TOWNS, TRADES, WARES, make_tasks, passages
from flowgrpo.rollout.demonstrations import play_actions
from flowgrpo.run.run_dir import differing
from flowgrpo.run.run_files import NOTE
from flowgrpo.run.warm_start import WarmStart, no_warm_start
from flowgrpo.types import BadInput, Task, Trajectory

TOOLS = ("calculator", "python", "search")
STRANGERS = ("browser", "lookup", "solver")  # tools that don't exist
Random = np.random.Generator


@dataclass(frozen=True)
class ScriptFlaws:
    """How often the script slips."""

    wrong_tool: float = 0.18  # a step by another tool, or by one that doesn't exist
    damaged: float = 0.12  # a step whose command has lost something
    formless: float = 0.06  # an action without its form
    early: float = 0.2  # an answer before the last step
    misread: float = 0.35  # all steps and the answer of another query
    wrong_answer: float = 0.1  # at the end
    wrong_drawing: float = 0.60


def action(tool: str, context: str) -> str:
    """Write an action of a planner in its form."""
    return write_lines({"name": tool}, context)


def script(task: Task, random: Random, flaws: ScriptFlaws) -> Iterator[str]:
    """Yield the actions for a task, one after the other; the last is the answer."""
    steps, final = task.metadata["steps"], str(task.metadata["final"])
    if random.random() < flaws.misread:
        steps, final = task.metadata["misread"]  # type: ignore[misc]
    for tool, context in steps:  # type: ignore[union-attr]
        while random.random() < flaws.wrong_tool + flaws.damaged + flaws.formless:
            yield _slip(tool, context, random, flaws)
        if random.random() < flaws.early:
            yield action("answer", _wrong(final, task.domain, random))
            return
        yield action(tool, context)
    slips = random.random() < (flaws.wrong_answer if steps else flaws.wrong_drawing)
    yield action("answer", _wrong(final, task.domain, random) if slips else final)


def _slip(tool: str, context: str, random: Random, flaws: ScriptFlaws) -> str:
    """Make up a step that brings nothing."""
    chances = np.array([flaws.wrong_tool, flaws.damaged, flaws.formless])
    kind = random.choice(3, p=chances / chances.sum())
    if kind == 0:
        others = [name for name in (*TOOLS, *STRANGERS) if name != tool]
        return action(others[int(random.integers(len(others)))], context)
    if kind == 1:
        at = [i for i, letter in enumerate(context) if letter in "()'"] or [0]
        i = at[int(random.integers(len(at)))]
        return action(tool, context[:i] + context[i + 1 :])
    return context


def _wrong(final: str, domain: str, random: Random) -> str:
    """Make up an answer that is not this one."""
    if domain == "search":  # another name of the same kind
        own = next(names for names in (TOWNS, LANDS, TRADES, WARES) if final in names)
        others = [other for other in own if other != final]
        return others[int(random.integers(len(others)))]
    numbers = [i for i, letter in enumerate(final) if letter.isdigit()]
    i = numbers[int(random.integers(len(numbers)))]
    return final[:i] + str((int(final[i]) + int(random.integers(1, 10))) % 10) + final[i + 1 :]


# Played -------------------------------------------------------------------------------------------------


def demonstrate_script(
    env: HostEnv,
    text: Text,
    tasks: Sequence[Task],
    do: Do,
    *,
    seed: int,
    workers: int = 8,
) -> list[Trajectory]:
    """One trajectory a task, played with real tools; each depends on the seed and its task alone."""

    def played(number: int, task: Task) -> Trajectory:
        actions = script(task, np.random.default_rng([seed, number]), ScriptFlaws())
        return play_actions(env, text, do, task, actions, group=number)

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(played, range(len(tasks)), tasks))


START, END, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Cut = Callable[[], Any]  # a pre-tokenizer of the package tokenizers
SHAPE: Mapping[str, Any] = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 3, "head_dim": 32}
# A layer that sees a token and the three before it makes copying easy to learn: the layers above find what was said
# after the words that were written last.
COPYING: Mapping[str, Any] = SHAPE | {
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 4,
}


def _words() -> Any:
    """Cuts text into words and single digits: numbers and names are copied piece by piece."""
    from tokenizers import pre_tokenizers

    digits, letters = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    return pre_tokenizers.Sequence([digits, letters])


def phrases() -> Any:
    """Cuts text at numbers only: a number is one token, and so is what often stands between two of them."""
    from tokenizers import Regex, pre_tokenizers

    numbers = pre_tokenizers.Split(Regex("[0-9]+"), "isolated")
    return pre_tokenizers.Sequence([numbers, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def write_tokenizer(folder: Path, texts: Iterable[str], *, cut: Cut = _words, vocab_size: int = 1024) -> None:
    """Byte-pair encoding learned from these texts within the pieces of `cut`; any text can be written and read."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = cut()
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
    cut: Cut = _words,
    vocab_size: int = 1024,
) -> None:
    """Tokenizer, configuration and random weights."""
    write_tokenizer(folder, texts, cut=cut, vocab_size=vocab_size)
    text = load_text(folder)
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
    save_model(folder, model._replace(text=text))


# What it was made with ----------------------------------------------------------------------------------


def note_made(folder: Path, made: Mapping[str, Any]) -> None:
    """Write down the settings that a model was made with."""
    (folder / NOTE).write_text(json.dumps(made) + "\n")


def check_made(folder: Path, made: Mapping[str, Any]) -> None:
    """Raise `BadInput` where the model that is there was made with other settings."""
    path = folder / NOTE
    there = read_json(path, "remove its folder, or choose another --workdir")
    if differences := differing(there, json.loads(json.dumps(made))):
        raise BadInput(f"{folder} was made otherwise: {'; '.join(differences)}. Choose another --workdir")


FIRST = 400  # demonstrations from which the tokenizer is learned
ROOM = 4  # times as many tokens as the tokenizer that is learned from them needs
# Settings that what planner and tools say to each other depends on.
MADE_WITH = ("seed", "domains", "tools", "mcp", "turns", "rendering", "executor", "verifier", "generator", "analyst")
MADE_WITH += ("max_tokens", "context_tokens", "memory_tokens", "passages")
OF_OWN_AGENTS = "agent"  # likewise, where the agent is one's own
LENGTHS = ("max_tokens", "context_tokens", "memory_tokens")
PATIENCE = 6  # validations of the imitation that may bring nothing


def write_start(folder: Path, make_env: Callable[..., HostEnv], do: Do, config: TaskConfig) -> None:
    """Make the model folder, unless it is there; its tokenizer is learned from what planner and tools say.

    Their words depend on no tokenizer, but to write them down takes one: a first one, learned from the queries alone.
    The folder appears when it is whole. One that other settings made is refused.
    """
    made = {name: value for name, value in config.to_json().items() if name in (*MADE_WITH, OF_OWN_AGENTS)}
    if folder.exists():
        check_made(folder, made)
        return
    tasks = _tasks(config, "train", FIRST)
    queries = [task.query for task in tasks]
    first = folder.with_name(f".{folder.name}")
    write_model(first, queries, seed=config.seed)
    text = load_text(first)
    own = config.to_json()
    wide = replace(config, **{name: ROOM * own[name] for name in LENGTHS if name in own})
    env = make_env(text, turns=config.turns, config=wide)
    talks = demonstrate_script(env, text, tasks, do, seed=config.seed)
    entries = [f" {passage['title']}: {passage['text']}" for passage in passages()]
    beside = folder.with_name(f".{folder.name}-whole")
    shutil.rmtree(beside, ignore_errors=True)
    spoken = ["".join(text.decode(turn.tokens) for turn in talk.turns) for talk in talks]
    write_model(beside, [*queries, *spoken, *entries], seed=config.seed, shape=COPYING)
    note_made(beside, made)
    beside.replace(folder)
    shutil.rmtree(first)


def script_imitation(model: Model, env: HostEnv, do: Do, config: TaskConfig) -> WarmStart:
    """The imitation of demonstrations that comes before reinforcement; of no steps where the Config has none."""
    if not config.warm_steps:
        return no_warm_start(model.params)
    sizes = {"train": config.demonstrations, "validation": max(config.demonstrations // 10, 1)}
    records = {
        split: demonstrate_script(env, model.text, _tasks(config, split, size), do, seed=config.seed)
        for split, size in sizes.items()
    }
    rows = {split: packed_imitation(own, row_length=config.context_tokens) for split, own in records.items()}
    return warm_start_on(rows, model, config, patience=PATIENCE, micro_rows=config.micro_rows)


def warm_start_on(
    rows: Mapping[str, fg.Batch],
    model: Model,
    config: HostedConfig,
    *,
    patience: int,
    optimizer: optax.GradientTransformation | None = None,
    trained: Trained = WHOLE,
    every: int = 50,
    **sizes: int,
) -> WarmStart:
    """The imitation of these rows, validated on their part "validation"; by Muon where no optimizer is given."""
    optimizer = optimizer or make_optimizer(
        learning_rate=config.warm_rate,
        warmup_steps=20,
        decay_steps=config.warm_steps,
        matrices=matrices(model.config),
    )
    loss = jax.jit(make_validation(model.policy, banned=model.banned, **sizes))
    return WarmStart(
        state=init_learner(model.params, optimizer, trained),
        step=jax.jit(make_supervised(model.policy, optimizer, banned=model.banned, trained=trained, **sizes)),
        batches=lambda first: islice(shuffled_batches(rows["train"], config.warm_rows, config.seed), first, None),
        validate=lambda params: loss(params, rows["validation"]),
        steps=config.warm_steps,
        every=every,
        patience=patience,
        trained=trained,
    )


def shuffled_batches(rows: fg.Batch, size: int, seed: int) -> Iterator[fg.Batch]:
    """Rows in a new random order each time they are used up."""
    random, every = np.random.default_rng(seed), len(rows.tokens)
    size = min(size, every)
    while True:
        order = random.permutation(every)
        for start in range(0, every - size + 1, size):
            yield jax.tree.map(lambda x, chosen=order[start : start + size]: x[chosen], rows)


def _tasks(config: TaskConfig, split: str, size: int):
    names = config.domains.split(",")
    # Questions take the longest to learn, for what is copied there are names. Seeds are apart from those of training.
    return make_tasks(config.seed + 500_000, 0, size, split, [*names, *[name for name in names if name == "search"]])
