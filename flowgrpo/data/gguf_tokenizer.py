"""The tokenizer that a GGUF file's metadata describes, as one of transformers, by llama.cpp's rules.

    tokenizer.ggml.model "gpt2":  BPE over bytes; `pre` names the rule that splits text into words, `merges` join them
    tokenizer.ggml.model "llama": SentencePiece's BPE; the merge whose token has the best score comes first

The converter of transformers is not used: it splits words by GPT-2's rule if it does not know `pre`. For SmolLM2, whose
digits are words of their own, that gives other tokens for white space before numbers.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowgrpo.types import BadInput, first_line

CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # of tokenizer.ggml.token_type
SPACE_MARK = "\u2581"  # a space in tokens of SentencePiece

# llama.cpp's patterns for words, by tokenizer.ggml.pre; text that no pattern matches stays together.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_SUFFIXES = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _SUFFIXES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
_QWEN2 = _SUFFIXES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
WORD_PATTERNS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "jais", "phi-2"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "dbrx", "smaug-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"), (_QWEN2,)),
    "tekken": (_TEKKEN,),
    "default": _DEFAULT,
}
IGNORES_MERGES = frozenset(("llama3", "llama-v3", "llama-bpe", "falcon3", "tekken"))  # takes tokens whole
WITH_BOS = frozenset(("llama3", "llama-v3", "llama-bpe", "falcon3", "tekken"))  # if add_bos_token is missing


def build_tokenizer(path: Path, metadata: Mapping[str, Any]) -> Any:
    """The tokenizer, as one of transformers, with special tokens and chat templates; `path` is for messages."""
    from transformers import PreTrainedTokenizerFast

    tokens, model = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.model")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise BadInput(
            f"{path} holds no tokenizer (tokenizer.ggml.tokens): load it with tokenizer=False, or give "
            "a file that has one"
        )
    if model not in ("gpt2", "llama"):
        raise BadInput(
            f"{path}: tokenizer.ggml.model is {model!r:.40}, where gpt2 (BPE) and llama (SentencePiece) are read: "
            "give the model's Hugging Face folder"
        )
    build = _byte_level if model == "gpt2" else _sentencepiece
    try:
        backend = build(path, metadata, tokens)
        _add_tokens(backend, metadata, tokens)
        special = {name: _token(path, metadata, tokens, key) for name, key in SPECIAL.items()}
        _add_ends(backend, metadata, tokens, special)
        special = {name: token for name, token in special.items() if token is not None}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)
    except BadInput:
        raise
    except Exception as error:  # tokenizers raises bare ones, for example for merges of unknown words
        raise BadInput(f"{path}: its tokenizer can't be made ({first_line(error)}): convert the model again") from error
    tokenizer.chat_template = chat_templates(metadata)
    return tokenizer


SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def chat_templates(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    """The chat template, or all of them by name if there are several."""
    default = metadata.get("tokenizer.chat_template")
    prefix = "tokenizer.chat_template."
    named = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    named = {name: value for name, value in named.items() if isinstance(value, str)}
    if not named or not isinstance(default, str):
        return default if isinstance(default, str) else None
    return {"default": default, **named}


def generation_config(metadata: Mapping[str, Any]) -> bytes | None:
    """The bytes of a generation_config.json with the ids that end a text or a turn; None without such ids."""
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ids = list(dict.fromkeys(i for i in ends if type(i) is int))
    config = {"bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"), "eos_token_id": ids}
    config["pad_token_id"] = metadata.get("tokenizer.ggml.padding_token_id")
    present = {key: value for key, value in config.items() if value not in (None, [])}
    return (json.dumps(present, indent=2) + "\n").encode() if ids else None


def _token(path: Path, metadata: Mapping[str, Any], tokens: Sequence[str], name: str) -> str | None:
    """A special token, or None if the file names none."""
    i = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if i is None:
        return None
    if type(i) is not int or not 0 <= i < len(tokens):
        raise BadInput(
            f"{path}: tokenizer.ggml.{name}_token_id is {i!r:.40}, but there are {len(tokens)} tokens: convert it again"
        )
    return tokens[i]


def _types(metadata: Mapping[str, Any], tokens: Sequence[str]) -> list[int]:
    types = metadata.get("tokenizer.ggml.token_type")
    types = [] if types is None else [int(kind) for kind in types]
    return types + [1] * (len(tokens) - len(types))


# The two kinds ----------------------------------------------------------------------------------------


def _byte_level(path: Path, metadata: Mapping[str, Any], tokens: Sequence[str]) -> Any:
    """BPE over bytes, each written as one letter."""
    from tokenizers import Tokenizer, decoders, models

    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in WORD_PATTERNS:
        raise BadInput(
            f"{path}: tokenizer.ggml.pre is {pre!r:.40}, which is not known here; known are "
            f"{', '.join(WORD_PATTERNS)}: give the model's Hugging Face folder"
        )
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise BadInput(f"{path} has no tokenizer.ggml.merges, without which its words can't be made: convert it again")
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    if bad := next((merge for merge, pair in zip(merges, pairs, strict=True) if len(pair) != 2), None):
        raise BadInput(f"{path}: tokenizer.ggml.merges holds {bad!r:.40}, which is no two words: convert it again")
    # Embedding rows without a token have unused ones, such as [PAD151936], which are never text.
    kinds = _types(metadata, tokens)
    vocabulary: dict[str, int] = {}
    for i, (token, kind) in enumerate(zip(tokens, kinds, strict=False)):
        if kind != UNUSED:
            vocabulary.setdefault(token, i)
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre in IGNORES_MERGES))
    backend.pre_tokenizer = make_pretokenizer(pre)
    backend.decoder = decoders.ByteLevel()
    return backend


def make_pretokenizer(pre: str) -> Any:
    """The pre-tokenizer that splits text as llama.cpp does for this value of `pre`."""
    from tokenizers import Regex, pre_tokenizers

    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in WORD_PATTERNS[pre]]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentencepiece(path: Path, metadata: Mapping[str, Any], tokens: Sequence[str]) -> Any:
    """SentencePiece's BPE: of all pairs that make a token, the one with the best token is merged first."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        has = "no" if scores is None else len(scores)
        raise BadInput(f"{path} has {has} tokenizer.ggml.scores for {len(tokens)} tokens: convert the model again")
    # Some files write runs of spaces with real spaces. User-defined tokens are recognised whole: they merge first.
    vocabulary: dict[str, int] = {}
    for i, token in enumerate(tokens):
        vocabulary.setdefault(token if token.strip(" ") else SPACE_MARK * len(token), i)
    kinds = _types(metadata, tokens)

    def rank(item: tuple[str, int]) -> tuple[bool, float, int]:
        return (kinds[item[1]] != USER_DEFINED, -float(scores[item[1]]), item[1])

    best_first = sorted(vocabulary.items(), key=rank)
    merges = []
    for token, _ in best_first:
        pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
        pairs = [pair for pair in pairs if pair[0] in vocabulary and pair[1] in vocabulary]
        merges += sorted(pairs, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
    unknown = _token(path, metadata, tokens, "unknown")
    has_all_bytes = all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=has_all_bytes)
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    prepend = [normalizers.Prepend(SPACE_MARK)] if prefix else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", SPACE_MARK)])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _add_tokens(backend: Any, metadata: Mapping[str, Any], tokens: Sequence[str]) -> None:
    """Add the tokens that are recognised whole in a text: control tokens, which are special, and user-defined ones."""
    from tokenizers import AddedToken

    kinds, vocabulary = _types(metadata, tokens), backend.get_vocab(False)
    for kind in (CONTROL, USER_DEFINED):
        named = [
            token for token, own_kind in zip(tokens, kinds, strict=False) if own_kind == kind and token in vocabulary
        ]
        added = [AddedToken(token, normalized=False, special=kind == CONTROL) for token in dict.fromkeys(named)]
        (backend.add_special_tokens if kind == CONTROL else backend.add_tokens)(added)


def _add_ends(backend: Any, metadata: Mapping[str, Any], tokens: Sequence[str], special: Mapping[str, Any]) -> None:
    """Add the begin- and end-of-sequence tokens around a text if the file asks for it (with `add_special_tokens`)."""
    from tokenizers import processors

    is_byte_level = metadata["tokenizer.ggml.model"] == "gpt2"
    by_default = not is_byte_level or metadata.get("tokenizer.ggml.pre") in WITH_BOS
    bos = special["bos_token"] if metadata.get("tokenizer.ggml.add_bos_token", by_default) else None
    eos = special["eos_token"] if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    before, after = [f"{bos}:0"] * (bos is not None), [f"{eos}:0"] * (eos is not None)
    single = [*before, "$A:0", *after]
    steps: list[Any] = [processors.ByteLevel(trim_offsets=False)] if is_byte_level else []
    if len(single) > 1:
        ids = [(token, tokens.index(token)) for token in dict.fromkeys((bos, eos)) if token is not None]
        second = [part.replace("$A:0", "$B:0") for part in single]
        steps.append(processors.TemplateProcessing(single=single, pair=[*single, *second], special_tokens=ids))
    backend.post_processor = processors.Sequence(steps)
