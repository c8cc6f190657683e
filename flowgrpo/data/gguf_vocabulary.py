"""A tokenizer as the metadata of a GGUF file: its tokens, how they merge, which of them are special, its template.

    vocabulary(text, size) -> {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", ...}

Two kinds of tokenizer have a form there. Byte-level BPE ("gpt2") is a list of merges and the name of a rule that splits
text into words first. The rule itself is not in the file: llama.cpp has it by its name, so the name is found by what
the tokenizer does to `SAMPLES`. SentencePiece's BPE ("llama") has no merges: of two neighbours that make up a token,
those go first whose token has the highest score.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from flowgrpo.data.gguf_tokenizer import CONTROL, SPACE, UNUSED, USER_DEFINED, WHOLE, cut_words
from flowgrpo.data.tokenizer import Text, closing_id
from flowgrpo.types import BadInput

Metadata = dict[str, Any]  # str, bool, int, float, and lists of one of them

KEY = "tokenizer.ggml."
NORMAL, UNKNOWN, BYTE = 1, 2, 6  # of tokenizer.ggml.token_type, beside those of `gguf_tokenizer`
UNMERGED = -1000.0  # score of a token that no merge makes
# One of llama.cpp's names for each rule that it has, of those that are read here.
RULES = ("gpt-2", "smollm", "qwen2", "llama-bpe", "dbrx", "tekken", "default")
ELSE = "export it as a folder, which keeps its tokenizer as it is"

# Texts that the rules for words split differently from one another.
SAMPLES = (
    "I've told he'll, 'RE you sure? We'Ve  seen   it's a'lL don't",
    "3 33 333 3333 33333 in 2024, 1,234.5 x2y3 v1.0.10 \u0663\u0664 \u00bd\u00b2",
    "if (a<=b) {\n\t\treturn x[i]->y; // done\n}\r\n\r\n  \n   end\t \t.",
    "--- === !!?? ...(normal) $5 + 6 = 11 ~`^| /usr/bin/env #! a_b-c@d.e",
    "na\u00efve \u041d\u0435\u0449\u043e HTMLParser camelCase \u03b1\u03b2\u03b3 \u4f60\u597d\u4e16\u754c",
    "\u3053\u3093 \ud55c\uae00 \u0e44\u0e17\u0e22 \u0939\u093f\u0928\u094d\u0926\u0940 e\u0301 I\u2019m 5th \u2167",
    "\U0001f680 (emoji)\U0001f636\u200d\U0001f32b\ufe0f \u2705\n\n\n\nA\u00a0B \u3000 x ",
)


def vocabulary(text: Text, size: int) -> Metadata:
    """The keys `tokenizer.*` of a model with `size` embeddings; `BadInput` for a tokenizer that has no such form."""
    backend = getattr(text.tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise BadInput(f"the tokenizer of {text.source} is none of the package tokenizers, which GGUF needs: {ELSE}")
    state = json.loads(backend.to_str())
    kind = state["model"]["type"]
    if kind == "BPE" and state["model"]["byte_fallback"]:
        words = _sentencepiece(text, state, backend, size)
    elif kind == "BPE":
        words = _byte_level(text, state, backend, size)
    else:
        raise BadInput(f"the tokenizer of {text.source} is a {kind}, and GGUF has a form for BPE only: {ELSE}")
    if len(set(words[KEY + "tokens"])) < size:
        raise BadInput(f"the tokenizer of {text.source} writes two tokens alike, which GGUF can't hold: {ELSE}")
    template = text.tokenizer.chat_template
    if isinstance(template, Mapping):  # several by name, of which files of one template take the default
        template = template.get("default")
    return words | _special(text, size) | ({"tokenizer.chat_template": template} if template else {})


# Byte-level BPE -----------------------------------------------------------------------------------------


def _byte_level(text: Text, state: Mapping[str, Any], backend: Any, size: int) -> Metadata:
    _check_normalizer(text, state["normalizer"], ("NFC",))
    tokens, types = _list_tokens(text, size)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in state["model"]["merges"]]
    return {
        KEY + "model": "gpt2",
        KEY + "pre": _rule_name(text, state, backend),
        KEY + "tokens": tokens,
        KEY + "token_type": types,
        KEY + "merges": merges,
    }


def _rule_name(text: Text, state: Mapping[str, Any], backend: Any) -> str:
    """The name of the rule that cuts all samples into words as the tokenizer does.

    A rule also says whether a word that is a token is taken whole. Where each token is what some merge makes, merging
    comes to the same.
    """
    words = None if backend.pre_tokenizer is None else _cut_samples(backend.pre_tokenizer)
    names = [name for name in RULES if words == _cut_samples(cut_words(name))]
    is_whole = bool(state["model"].get("ignore_merges"))
    alike = [name for name in names if (name in WHOLE) == is_whole]
    letters_and_made = {token for token in state["model"]["vocab"] if len(token) == 1} | set(_made(state))
    if alike or (
        names and letters_and_made >= state["model"]["vocab"].keys() - text.tokenizer.get_added_vocab().keys()
    ):
        return (alike or names)[0]
    raise BadInput(
        f"the tokenizer of {text.source} cuts text into words by a rule that llama.cpp has no name for, among "
        f"{', '.join(RULES)}: {ELSE}"
    )


def _cut_samples(rule: Any) -> list[list[str]]:
    return [[word for word, _ in rule.pre_tokenize_str(sample)] for sample in SAMPLES]


def _made(state: Mapping[str, Any]) -> dict[str, None]:
    """What merges make, in the order in which they are preferred."""
    pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in state["model"]["merges"])
    return dict.fromkeys("".join(pair) for pair in pairs)


# SentencePiece ------------------------------------------------------------------------------------------


def _sentencepiece(text: Text, state: Mapping[str, Any], backend: Any, size: int) -> Metadata:
    """Merges in the order of their ranks give scores; spaces are written as `SPACE`, and text is not split."""
    tokens, types = _list_tokens(text, size)
    number = {token: i for i, token in enumerate(tokens)}
    bytewise = [f"<0x{byte:02X}>" for byte in range(256)]
    if missing := [token for token in bytewise if token not in number]:
        raise BadInput(f"the tokenizer of {text.source} has no token {missing[0]}, which GGUF needs: {ELSE}")
    scores = [0.0 if kind in (NORMAL, BYTE) else UNMERGED for kind in types]
    for rank, token in enumerate(_made(state)):
        if token in number and types[number[token]] == NORMAL:
            scores[number[token]] = -float(rank)
    for token in bytewise:
        types[number[token]] = BYTE
    for i, kind in enumerate(types):
        if kind == USER_DEFINED:  # is looked for before spaces are replaced
            tokens[i] = tokens[i].replace(SPACE, " ")
    return {
        KEY + "model": "llama",
        KEY + "pre": "default",
        KEY + "tokens": tokens,
        KEY + "scores": scores,
        KEY + "token_type": types,
        KEY + "add_space_prefix": _adds_space(text, backend),
    }


def _adds_space(text: Text, backend: Any) -> bool:
    """Whether a space is put before a text, of which nothing else may become but spaces that are written otherwise."""
    puts = set()
    for sample in ("a  b c", " a"):
        normal = backend.normalizer.normalize_str(sample) if backend.normalizer else sample
        words = (
            [normal]
            if backend.pre_tokenizer is None
            else [w for w, _ in backend.pre_tokenizer.pre_tokenize_str(normal)]
        )
        plain = sample.replace(" ", SPACE)
        if words not in ([plain], [SPACE + plain]):
            raise BadInput(
                f"the tokenizer of {text.source} splits text before it merges, which GGUF has no form for: {ELSE}"
            )
        puts.add(words == [SPACE + plain])
    return True in puts  # some put it before a text alone that has none yet, where llama.cpp always does


# All kinds ----------------------------------------------------------------------------------------------


def _list_tokens(text: Text, size: int) -> tuple[list[str], list[int]]:
    """Each embedding's token and type; what has no token is unused, and tokens without an embedding are left out."""
    added = text.tokenizer.added_tokens_decoder
    tokens, types = [f"[PAD{i}]" for i in range(size)], [UNUSED] * size
    for token, i in text.tokenizer.get_vocab().items():
        if i < size:
            tokens[i], types[i] = token, NORMAL
    for i, token in added.items():
        if i < size:
            tokens[i], types[i] = token.content, CONTROL if token.special else USER_DEFINED
    unknown = text.tokenizer.unk_token_id
    if unknown is not None and unknown < size and types[unknown] == NORMAL:
        types[unknown] = UNKNOWN
    return tokens, types


def _special(text: Text, size: int) -> Metadata:
    """The special ids: what ends a turn in the template is `eot`, where it isn't `eos` already."""
    tokenizer = text.tokenizer
    ids = {
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
        "unknown": tokenizer.unk_token_id,
        "padding": tokenizer.pad_token_id,
    }
    others = [i for i in text.stop_ids if i != tokenizer.eos_token_id]
    ids |= dict(zip(("eot", "eom"), sorted(others, key=lambda i: i != closing_id(text)), strict=False))
    plain = tokenizer("x")["input_ids"]
    return {
        **{f"{KEY}{name}_token_id": i for name, i in ids.items() if i is not None and i < size},
        KEY + "add_bos_token": plain[:1] == [tokenizer.bos_token_id],
        KEY + "add_eos_token": len(plain) > 1 and plain[-1:] == [tokenizer.eos_token_id],
    }


def _check_normalizer(text: Text, normalizer: Mapping[str, Any] | None, harmless: Sequence[str]) -> None:
    """Raise `BadInput` for what changes text first; that llama.cpp composes no letters is known of all of them."""
    parts = [] if normalizer is None else normalizer.get("normalizers", [normalizer])
    if strange := [part["type"] for part in parts if part["type"] not in harmless]:
        raise BadInput(
            f"the tokenizer of {text.source} changes text by {strange[0]}, which GGUF has no form for: {ELSE}"
        )
