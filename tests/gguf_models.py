"""Small random models of GGUF's architectures, each with a tokenizer of its family's kind, and those of packages."""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from model_cases import GEMMA3, LLAMA3, make_source
from tiny_models import random_params
from tokenizer_cases import LINES, STYLES, byte_level, fast
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from flowgrpo.data.gguf_tokenizer import WORD_PATTERNS
from flowgrpo.data.named_models import NAMED_MODELS, find_gguf
from flowgrpo.data.tokenizer import ChatTokenizer, closing_id, match_any
from flowgrpo.models.decoder import make_policy
from flowgrpo.models.families import decoder_config, text_model_config
from flowgrpo.models.hf import Model

WIDE = {"vocab_size": 352, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
WIDE |= {"num_key_value_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 256}
WINDOWED = {"query_pre_attn_scalar": 16, "sliding_window": 8, "num_hidden_layers": 7, "rms_norm_eps": 1e-6}
SOURCES = {
    "llama": make_source("llama", WIDE, rope_theta=5e5, rope_scaling=LLAMA3, tie_word_embeddings=False),
    "qwen2": make_source("qwen2", WIDE, rope_theta=1e6, tie_word_embeddings=True),
    "qwen3": make_source("qwen3", WIDE, rope_parameters={"rope_type": "default", "rope_theta": 1e6}, head_dim=32),
    "gemma3": make_source("gemma3_text", WIDE, GEMMA3, WINDOWED, num_key_value_heads=1),
}
SOURCES["gemma3"]["rope_scaling"] = None
STYLE_OF = {"llama": "llama3", "qwen2": "qwen2.5", "qwen3": "qwen3", "gemma3": "gemma"}
TEXTS = [
    "Hello world, it's 12345 apples; don't you SEE?",
    "def f(x):\n\treturn x+1\n\n\n  done  \r\n",
    "na\u00efve \u041d\u0435\u0449\u043e \u4f60\u597d \U0001f680 \u0939\u093f\u0928\u094d\u0926\u0940",
    "  the capital of France   is Paris ",
    "",
]


def packaged(name: str) -> Path:
    """The file of a model that comes as a package; without the package the test is skipped."""
    if not all(find_spec(module) for module, _ in NAMED_MODELS[name].parts):
        # [oracle] has Gemma's package alone: SmolLM2's compiles llama.cpp, and no extra can say --no-deps.
        pytest.skip(f"{name} is not installed: {NAMED_MODELS[name].install}")
    file = find_gguf(name)
    assert file is not None
    return file


def cut_tokenizer(name: str) -> Tokenizer:
    """Byte-level BPE that cuts words as llama.cpp does under a name."""
    backend = byte_level()
    cuts = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in WORD_PATTERNS[name]]
    end = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, end])
    return backend


def sentencepiece() -> Tokenizer:
    """BPE over letters in which spaces are visible, and what is unknown is written in bytes."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.train_from_iterator(LINES, trainers.BpeTrainer(vocab_size=60, show_progress=False))
    state = json.loads(backend.to_str())
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *state["model"]["vocab"]]
    state["model"] |= {"vocab": {word: i for i, word in enumerate(words)}, "byte_fallback": True, "unk_token": "<unk>"}
    backend = Tokenizer.from_str(json.dumps(state))
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def make_text(name: str) -> ChatTokenizer:
    """A tokenizer of the family's kind, with its template."""
    style = STYLES[STYLE_OF[name]]
    cuts = {"llama": "llama-bpe", "qwen2": "qwen2", "qwen3": "qwen2"}
    backend = sentencepiece() if name == "gemma3" else cut_tokenizer(cuts[name])
    more = {"unk_token": "<unk>", "pad_token": "<pad>"} if name == "gemma3" else {}
    return text_of(fast(backend, style, style.template, **more))


def text_of(tokenizer) -> ChatTokenizer:
    """A `ChatTokenizer` around a tokenizer of transformers."""
    special = match_any(token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    size = max(tokenizer.get_vocab().values()) + 1
    text = ChatTokenizer("tiny", tokenizer, special, size)
    ends = (tokenizer.eos_token_id, closing_id(text))
    return replace(text, stop_ids=tuple(dict.fromkeys(i for i in ends if i is not None)))


def tiny_model(name: str, **changes) -> Model:
    """A model in which no two parameters are alike; `changes` are of its config.json."""
    source = text_model_config(SOURCES[name] | changes)
    config = decoder_config(source)
    return Model(make_policy(config), random_params(config), make_text(name), config, source)
