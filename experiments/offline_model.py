"""A small model with a tokenizer and a chat template of its own, made here: what runs offline begins with.

write_model(folder, texts, seed=0)  ->  a folder that `load_model` and transformers open
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from flowgrpo.learner.folder import differing
from flowgrpo.models.hf import init_model, save_model
from flowgrpo.text import load_text
from flowgrpo.types import BadInput

NOTE = "made_with.json"  # beside the model
START, END, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Cut = Callable[[], Any]  # a pre-tokenizer of the package tokenizers
SHAPE: Mapping[str, Any] = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 3, "head_dim": 32}


def words() -> Any:
    """Cuts text into words and single digits: numbers and names are copied piece by piece."""
    from tokenizers import pre_tokenizers

    digits, letters = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    return pre_tokenizers.Sequence([digits, letters])


def phrases() -> Any:
    """Cuts text at numbers only: a number is one token, and so is what often stands between two of them."""
    from tokenizers import Regex, pre_tokenizers

    numbers = pre_tokenizers.Split(Regex("[0-9]+"), "isolated")
    return pre_tokenizers.Sequence([numbers, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def write_tokenizer(folder: Path, texts: Iterable[str], *, cut: Cut = words, vocab_size: int = 1024) -> None:
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
    cut: Cut = words,
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
    try:
        there = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} can't be read ({error}): remove its folder, or choose another --workdir") from None
    if differences := differing(there, json.loads(json.dumps(made))):
        raise BadInput(f"{folder} was made otherwise: {'; '.join(differences)}. Choose another --workdir")
