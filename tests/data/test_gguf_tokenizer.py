"""Tokenizers from GGUF metadata: ids equal those of the tokenizer that the file was made of (M5)."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from gguf_strings import CODE, SCRIPTS, WORDS, make_strings
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.integrations.gguf import gguf_tokenizer_mapping as theirs
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from flowgrpo.data.gguf_tokenizer import WORD_PATTERNS, build_tokenizer, generation_config
from flowgrpo.types import BadInput

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
FILE = Path("model.gguf")


def split(pattern: str):
    """Words by one expression, then bytes."""
    cut = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


WHOLE_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
OWN = {  # how the tokenizers that were published cut words
    "gpt-2": WHOLE_BYTES,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), WHOLE_BYTES]),
    "qwen2": split(PRETOKENIZE_REGEX),
    "llama-bpe": split(theirs._LLAMA3_SPLIT),
    "tekken": split(theirs._TEKKEN_SPLIT),
}


def train(cut) -> tuple[Tokenizer, dict]:
    """A small tokenizer, and the metadata of a file of it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = cut, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(WORDS), " 12 345 12\n\n\n", *SCRIPTS, *CODE] * 3, trainer)
    merges = [" ".join(pair) for pair in _merges(tokenizer)]
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*tokens, "[PAD500]"],
        "tokenizer.ggml.token_type": np.array([3 if token in SPECIAL else 1 for token in tokens] + [5], np.int32),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return tokenizer, metadata


def _merges(tokenizer: Tokenizer) -> list[list[str]]:

    return json.loads(tokenizer.to_str())["model"]["merges"]


@pytest.mark.parametrize("pre", OWN)
def test_M5_ids_of_bytes_are_those_of_the_tokenizer_itself(pre):
    tokenizer, metadata = train(OWN[pre])
    built = build_tokenizer(FILE, {**metadata, "tokenizer.ggml.pre": pre})
    for string in make_strings(300):
        ids = built.encode(string, add_special_tokens=False)
        assert ids == tokenizer.encode(string).ids, string
        assert built.decode(ids) == string
    assert len(built) == tokenizer.get_vocab_size()  # what fills up the embedding is no token
    with_bos = pre in ("llama-bpe", "tekken")
    assert built.encode("a") == [1] * with_bos + built.encode("a", add_special_tokens=False)


def sentencepiece(string: str, scores: dict[str, float], ids: dict[str, int]) -> list[int]:
    """Join the pair whose token has the best score, the leftmost first, until there is none; bytes for the rest."""
    parts = list(string.replace(" ", "\u2581"))
    while True:
        pairs = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in scores]
        if not pairs:
            break
        at = min(pairs)[1]
        parts[at : at + 2] = ["".join(parts[at : at + 2])]
    spelled = [[part] if part in ids else [f"<0x{byte:02X}>" for byte in part.encode()] for part in parts]
    return [ids[token] for tokens in spelled for token in tokens]


@pytest.mark.parametrize("prefix", [False, True])
def test_M5_ids_of_sentencepiece_are_those_of_its_scores(prefix):
    draw = np.random.default_rng(0)
    letters = [*"abcde\u2581", "é", "日"]
    words = {"".join(draw.choice(letters, draw.integers(2, 5))) for _ in range(150)}
    control, byte_tokens = ["<unk>", "<s>", "</s>"], [f"<0x{byte:02X}>" for byte in range(256)]
    ordered = draw.permutation(sorted(words)).tolist()
    tokens = [*control, *byte_tokens, *letters, *ordered]
    values = np.array([0.0] * (3 + 256) + [-1e3] * len(letters) + [-float(i) for i in range(len(ordered))], np.float32)
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": values,
        "tokenizer.ggml.token_type": np.array([2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259), np.int32),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": prefix,
    }
    built = build_tokenizer(FILE, metadata)
    scores = dict(zip(tokens[259:], values[259:].tolist(), strict=True))
    ids = {token: i for i, token in enumerate(tokens)}
    for _ in range(200):
        string = "".join(draw.choice([*"abcde ", "é", "日", "🎉", "z"], draw.integers(1, 15)))
        wanted = sentencepiece(" " * prefix + string, scores, ids)
        assert built.encode(string, add_special_tokens=False) == wanted, string
        assert built.decode(wanted) == string
    assert built.encode("a")[0] == 1  # SentencePiece begins a text, where the file says nothing


def test_a_saved_tokenizer_is_the_same_with_its_templates(tmp_path):
    from transformers import AutoTokenizer

    _, metadata = train(WHOLE_BYTES)
    templates = {"tokenizer.chat_template": "{{ messages[0].content }}", "tokenizer.chat_template.tool_use": "tools"}
    built = build_tokenizer(FILE, {**metadata, "tokenizer.ggml.pre": "gpt-2", **templates})
    built.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.chat_template == {"default": "{{ messages[0].content }}", "tool_use": "tools"}
    assert again.special_tokens_map == built.special_tokens_map
    string = "it's 12 <|im_end|> naïve"
    assert again.encode(string) == built.encode(string)
    ends = generation_config({**metadata, "tokenizer.ggml.eot_token_id": 0})
    assert json.loads(ends or b"{}")["eos_token_id"] == [2, 0]


BROKEN = {
    "holds no tokenizer": {"tokenizer.ggml.tokens": None},
    "tokenizer.ggml.model is 'bert', where gpt2": {"tokenizer.ggml.model": "bert"},
    "tokenizer.ggml.pre is 'klingon'": {"tokenizer.ggml.pre": "klingon"},
    "has no tokenizer.ggml.merges": {"tokenizer.ggml.merges": None},
    "merges holds 'ab', which is no two words": {"tokenizer.ggml.merges": ["ab"]},
    "its tokenizer can't be made": {"tokenizer.ggml.merges": ["zz yy"]},
    "eos_token_id is 9999, but there are 501 tokens": {"tokenizer.ggml.eos_token_id": 9999},
    "has no tokenizer.ggml.scores for 501 tokens": {"tokenizer.ggml.model": "llama"},
}


@pytest.mark.parametrize("message", BROKEN)
def test_a_tokenizer_that_cant_be_read_is_refused_by_field(message):
    _, metadata = train(WHOLE_BYTES)
    with pytest.raises(BadInput, match=r"model\.gguf") as error:
        build_tokenizer(FILE, {**metadata, **BROKEN[message]})
    assert message in str(error.value)
    assert set(OWN) <= set(WORD_PATTERNS)
