"""A tokenizer with several spellings of Yes and No and a chat template, for the tests of model-based rewards."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizer_cases import STYLES, fast
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from flowgrpo.data.tokenizer import ChatTokenizer, load_tokenizer

SPELLINGS = ("Yes", " Yes", "yes", " yes", "YES", " YES", "No", " No", "no", " no", "NO")


@cache
def judge_text(style: str = "qwen2.5") -> ChatTokenizer:
    """A byte-level BPE tokenizer with one token for each of `SPELLINGS`."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([word for word in SPELLINGS for _ in range(9)], trainer)
    return _saved(backend, style)


@cache
def sly_text() -> ChatTokenizer:
    """A tokenizer like that of `judge_text` that also reads <TOOL> as the control token <tool>."""
    backend = Tokenizer.from_str(judge_text().hf_tokenizer.backend_tokenizer.to_str())
    backend.normalizer = normalizers.Lowercase()
    backend.add_tokens([AddedToken("<tool>", normalized=True)])
    return _saved(backend, "qwen2.5")


def _saved(backend: Tokenizer, style: str) -> ChatTokenizer:
    with TemporaryDirectory() as folder:
        fast(backend, STYLES[style], STYLES[style].template).save_pretrained(folder)
        return load_tokenizer(Path(folder))


def id_of(spelling: str, style: str = "qwen2.5") -> int:
    """The one id of a spelling."""
    (token,) = judge_text(style).encode(spelling)
    return token
