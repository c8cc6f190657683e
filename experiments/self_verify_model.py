"""The small model of an offline run of `self_verify`: a tokenizer that writes the fixed parts of its prompts as one id.

write_phrase_model(folder, texts, seed=0)  ->  a folder that `load_model` and transformers open

Words between two numbers are one token where the texts have them often, and a number is one token. The prompt of a
judge is then a tenth as long as under a tokenizer of words, and imitation of it as much cheaper.
"""

from collections.abc import Iterable
from pathlib import Path

import jax

from experiments.offline_model import END, PAD, START, TEMPLATE
from flowgrpo.models.hf import init_model, save_model
from flowgrpo.text import load_text

D, HEAD = 96, 32
MOST = 2048  # ids of the tokenizer


def write_phrase_tokenizer(folder: Path, texts: Iterable[str]) -> None:
    """Byte-pair encoding learned from these texts, in which only numbers are apart from what is around them."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    numbers = pre_tokenizers.Split(Regex("[0-9]+"), "isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([numbers, letters])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=MOST, special_tokens=[PAD, START, END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START],
        chat_template=TEMPLATE,
    ).save_pretrained(folder)


def write_phrase_model(folder: Path, texts: Iterable[str], *, seed: int, layers: int = 3) -> None:
    """Tokenizer, configuration and random weights."""
    write_phrase_tokenizer(folder, texts)
    text = load_text(folder)
    source = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": text.vocab_size,
        "hidden_size": D,
        "intermediate_size": 2 * D,
        "num_hidden_layers": layers,
        "head_dim": HEAD,
        "num_attention_heads": D // HEAD,
        "num_key_value_heads": D // HEAD,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "initializer_range": 0.05,
        "eos_token_id": text.stop_ids[0],
        "pad_token_id": text.pad_id,
    }
    save_model(folder, init_model(source, jax.random.key(seed))._replace(text=text))
