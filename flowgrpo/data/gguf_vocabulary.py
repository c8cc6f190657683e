"""A tokenizer as the metadata of a GGUF file: tokens, merges, special tokens and chat template.

    tokenizer_metadata(tokenizer, size) -> {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", ...}

GGUF has a form for two kinds of tokenizers. Byte-level BPE ("gpt2") is a list of merges and the name of the rule that
splits text into words first. The rule itself is not in the file: llama.cpp knows it by name, so the name is inferred
from how the tokenizer splits `SAMPLES`. SentencePiece's BPE ("llama") has no merges: of all neighbours that make a
token, those with the highest score merge first.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from flowgrpo.data.gguf_tokenizer import CONTROL, IGNORES_MERGES, SPACE_MARK, UNUSED, USER_DEFINED, make_pretokenizer
from flowgrpo.data.tokenizer import ChatTokenizer, closing_id
from flowgrpo.types import BadInput

Metadata = dict[str, Any]  # str, bool, int, float, and lists of one of them

KEY = "tokenizer.ggml."
NORMAL, UNKNOWN, BYTE = 1, 2, 6  # of tokenizer.ggml.token_type, besides those of `gguf_tokenizer`
UNMERGED = -1000.0  # score of a token that no merge makes
# One name of llama.cpp for each of its rules that are supported here.
RULES = ("gpt-2", "smollm", "qwen2", "llama-bpe", "dbrx", "tekken", "default")
FIX = "export it as a folder, which keeps its tokenizer as it is"

# Texts that all rules split differently.
SAMPLES = (
    "I've told he'll, 'RE you sure? We'Ve  seen   it's a'lL don't",
    "3 33 333 3333 33333 in 2024, 1,234.5 x2y3 v1.0.10 \u0663\u0664 \u00bd\u00b2",
    "if (a<=b) {\n\t\treturn x[i]->y; // done\n}\r\n\r\n  \n   end\t \t.",
    "--- === !!?? ...(normal) $5 + 6 = 11 ~`^| /usr/bin/env #! a_b-c@d.e",
    "na\u00efve \u041d\u0435\u0449\u043e HTMLParser camelCase \u03b1\u03b2\u03b3 \u4f60\u597d\u4e16\u754c",
    "\u3053\u3093 \ud55c\uae00 \u0e44\u0e17\u0e22 \u0939\u093f\u0928\u094d\u0926\u0940 e\u0301 I\u2019m 5th \u2167",
    "\U0001f680 (emoji)\U0001f636\u200d\U0001f32b\ufe0f \u2705\n\n\n\nA\u00a0B \u3000 x ",
)


def tokenizer_metadata(tokenizer: ChatTokenizer, size: int) -> Metadata:
    """The keys `tokenizer.*` of a model with `size` embeddings; `BadInput` if GGUF has no form for the tokenizer."""
    backend = getattr(tokenizer.hf_tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise BadInput(
            f"the tokenizer of {tokenizer.source} is none of the package tokenizers, which GGUF needs: {FIX}"
        )
    state = json.loads(backend.to_str())
    kind = state["model"]["type"]
    if kind == "BPE" and state["model"]["byte_fallback"]:
        metadata = _sentencepiece(tokenizer, state, backend, size)
    elif kind == "BPE":
        metadata = _byte_level(tokenizer, state, backend, size)
    else:
        raise BadInput(f"the tokenizer of {tokenizer.source} is a {kind}, and GGUF has a form for BPE only: {FIX}")
    if len(set(metadata[KEY + "tokens"])) < size:
        raise BadInput(f"the tokenizer of {tokenizer.source} writes two tokens alike, which GGUF can't hold: {FIX}")
    template = tokenizer.hf_tokenizer.chat_template
    if isinstance(template, Mapping):  # several by name; a file has only one, the default
        template = template.get("default")
    return metadata | _special_ids(tokenizer, size) | ({"tokenizer.chat_template": template} if template else {})


# Byte-level BPE -----------------------------------------------------------------------------------------


def _byte_level(tokenizer: ChatTokenizer, state: Mapping[str, Any], backend: Any, size: int) -> Metadata:
    _check_normalizer(tokenizer, state["normalizer"], ("NFC",))
    tokens, types = _list_tokens(tokenizer, size)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in state["model"]["merges"]]
    return {
        KEY + "model": "gpt2",
        KEY + "pre": _rule_name(tokenizer, state, backend),
        KEY + "tokens": tokens,
        KEY + "token_type": types,
        KEY + "merges": merges,
    }


def _rule_name(tokenizer: ChatTokenizer, state: Mapping[str, Any], backend: Any) -> str:
    """The name of the rule that splits all samples into words as the tokenizer does.

    A rule also decides whether a word that is a token is taken whole. That makes no difference if each token is the
    result of a merge.
    """
    words = None if backend.pre_tokenizer is None else _split_samples(backend.pre_tokenizer)
    names = [name for name in RULES if words == _split_samples(make_pretokenizer(name))]
    ignores_merges = bool(state["model"].get("ignore_merges"))
    matching = [name for name in names if (name in IGNORES_MERGES) == ignores_merges]
    mergeable = {token for token in state["model"]["vocab"] if len(token) == 1} | set(_merged_tokens(state))
    if matching or (
        names and mergeable >= state["model"]["vocab"].keys() - tokenizer.hf_tokenizer.get_added_vocab().keys()
    ):
        return (matching or names)[0]
    raise BadInput(
        f"the tokenizer of {tokenizer.source} splits text into words by a rule that llama.cpp has no name for, among "
        f"{', '.join(RULES)}: {FIX}"
    )


def _split_samples(rule: Any) -> list[list[str]]:
    return [[word for word, _ in rule.pre_tokenize_str(sample)] for sample in SAMPLES]


def _merged_tokens(state: Mapping[str, Any]) -> dict[str, None]:
    """The tokens that merges make, in the order of preference."""
    pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in state["model"]["merges"])
    return dict.fromkeys("".join(pair) for pair in pairs)


# SentencePiece ------------------------------------------------------------------------------------------


def _sentencepiece(tokenizer: ChatTokenizer, state: Mapping[str, Any], backend: Any, size: int) -> Metadata:
    """Scores follow from the ranks of the merges; spaces are written as `SPACE_MARK`, and text is not split."""
    tokens, types = _list_tokens(tokenizer, size)
    id_of = {token: i for i, token in enumerate(tokens)}
    bytewise = [f"<0x{byte:02X}>" for byte in range(256)]
    if missing := [token for token in bytewise if token not in id_of]:
        raise BadInput(f"the tokenizer of {tokenizer.source} has no token {missing[0]}, which GGUF needs: {FIX}")
    scores = [0.0 if kind in (NORMAL, BYTE) else UNMERGED for kind in types]
    for rank, token in enumerate(_merged_tokens(state)):
        if token in id_of and types[id_of[token]] == NORMAL:
            scores[id_of[token]] = -float(rank)
    for token in bytewise:
        types[id_of[token]] = BYTE
    for i, kind in enumerate(types):
        if kind == USER_DEFINED:  # is recognised before spaces are replaced
            tokens[i] = tokens[i].replace(SPACE_MARK, " ")
    return {
        KEY + "model": "llama",
        KEY + "pre": "default",
        KEY + "tokens": tokens,
        KEY + "scores": scores,
        KEY + "token_type": types,
        KEY + "add_space_prefix": _adds_space(tokenizer, backend),
    }


def _adds_space(tokenizer: ChatTokenizer, backend: Any) -> bool:
    """Whether a space is put before a text; raises `BadInput` if the text is changed otherwise."""
    adds = set()
    for sample in ("a  b c", " a"):
        normal = backend.normalizer.normalize_str(sample) if backend.normalizer else sample
        words = (
            [normal]
            if backend.pre_tokenizer is None
            else [w for w, _ in backend.pre_tokenizer.pre_tokenize_str(normal)]
        )
        plain = sample.replace(" ", SPACE_MARK)
        if words not in ([plain], [SPACE_MARK + plain]):
            raise BadInput(
                f"the tokenizer of {tokenizer.source} splits text before it merges, which GGUF has no form for: {FIX}"
            )
        adds.add(words == [SPACE_MARK + plain])
    return True in adds  # some add it only if a text has none yet, but llama.cpp always does


# All kinds ----------------------------------------------------------------------------------------------


def _list_tokens(tokenizer: ChatTokenizer, size: int) -> tuple[list[str], list[int]]:
    """Token and type of each embedding: unused if it has no token. Tokens without an embedding are left out."""
    added = tokenizer.hf_tokenizer.added_tokens_decoder
    tokens, types = [f"[PAD{i}]" for i in range(size)], [UNUSED] * size
    for token, i in tokenizer.hf_tokenizer.get_vocab().items():
        if i < size:
            tokens[i], types[i] = token, NORMAL
    for i, token in added.items():
        if i < size:
            tokens[i], types[i] = token.content, CONTROL if token.special else USER_DEFINED
    unknown = tokenizer.hf_tokenizer.unk_token_id
    if unknown is not None and unknown < size and types[unknown] == NORMAL:
        types[unknown] = UNKNOWN
    return tokens, types


def _special_ids(tokenizer: ChatTokenizer, size: int) -> Metadata:
    """The special ids; the token that closes a turn in the template is `eot`, unless it is `eos`."""
    hf_tokenizer = tokenizer.hf_tokenizer
    ids = {
        "bos": hf_tokenizer.bos_token_id,
        "eos": hf_tokenizer.eos_token_id,
        "unknown": hf_tokenizer.unk_token_id,
        "padding": hf_tokenizer.pad_token_id,
    }
    others = [i for i in tokenizer.stop_ids if i != hf_tokenizer.eos_token_id]
    ids |= dict(zip(("eot", "eom"), sorted(others, key=lambda i: i != closing_id(tokenizer)), strict=False))
    plain = hf_tokenizer("x")["input_ids"]
    return {
        **{f"{KEY}{name}_token_id": i for name, i in ids.items() if i is not None and i < size},
        KEY + "add_bos_token": plain[:1] == [hf_tokenizer.bos_token_id],
        KEY + "add_eos_token": len(plain) > 1 and plain[-1:] == [hf_tokenizer.eos_token_id],
    }


def _check_normalizer(tokenizer: ChatTokenizer, normalizer: Mapping[str, Any] | None, harmless: Sequence[str]) -> None:
    """Raise `BadInput` for other normalizers than the harmless ones; llama.cpp never composes letters (NFC)."""
    parts = [] if normalizer is None else normalizer.get("normalizers", [normalizer])
    if harmful := [part["type"] for part in parts if part["type"] not in harmless]:
        raise BadInput(
            f"the tokenizer of {tokenizer.source} changes text by {harmful[0]}, which GGUF has no form for: {FIX}"
        )
