"""Tokenizer and chat rendering: messages go in, token ids come out, and a conversation only ever appends (A5).

    load_tokenizer(folder) -> ChatTokenizer
    start_conversation(tokenizer, messages) -> Conversation
    add_action, add_messages: Conversation -> Conversation

Sampled ids stay as they were sampled. The text between two actions, the *glue*, is what the template writes after a
placeholder for the assistant's message, in a small conversation of its own:

    template([user, assistant: placeholder, *new messages]) = … placeholder glue

Only the glue is tokenised, so a template that strips, trims or re-orders earlier turns can't touch ours. If glue and
action meet at special tokens, the ids are those of the whole conversation, rendered and tokenised at once.

Special tokens that are spelled out inside a message (a tool's output, a user's query) become ordinary text: a tool
can't end its turn or start another one. Messages of the role "assistant" are taken literally.
"""

import json
import operator
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from flowgrpo.data.foreign_files import check_files, check_tokenizer
from flowgrpo.data.gguf_file import is_gguf, read_header
from flowgrpo.data.gguf_tokenizer import SPACE_MARK, build_tokenizer, generation_config
from flowgrpo.data.named_models import find_gguf
from flowgrpo.data.templates import ENDLESS, render
from flowgrpo.data.templates import start as start_rendering
from flowgrpo.files import parse_json
from flowgrpo.types import JSON, BadInput, first_line

Messages = Sequence[Mapping[str, JSON]]  # each {"role": ..., "content": ...}, and other keys that the template reads
GENERATION_CONFIG = "generation_config.json"
HUB_FILES = ["*.json", "tokenizer*", "*.txt", "*.jinja", "*.model"]  # of a tokenizer

# Two Unicode noncharacters, which are never text: one breaks up special tokens, one is the assistant's placeholder.
BREAK, PLACEHOLDER = "\ufdd0", "\ufdd1"
NOTHING = re.compile("(?!)")
LINE_END = re.compile("\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")  # whatever any reader takes for one
UNWRITTEN = re.compile("[\x7f-\x9f\u2028\u2029]")  # which JSON leaves as they are, though they are no letters


@dataclass(frozen=True, eq=False)
class ChatTokenizer:
    """A tokenizer with its chat template. `options` go to the template, e.g. `{"enable_thinking": False}`."""

    source: str  # folder, GGUF file or hub id, for messages
    hf_tokenizer: Any  # of transformers
    special: re.Pattern[str]  # texts of the special tokens
    vocab_size: int  # number of ids of the tokenizer; a model's embedding may have more rows
    stop_ids: tuple[int, ...] = ()  # each ends an assistant turn
    pad_id: int = 0  # not a stop id, unless there is no other id
    options: Mapping[str, JSON] = field(default_factory=dict)
    generation_config: bytes | None = None  # the bytes of the file, for `save`

    @cached_property
    def added(self) -> Mapping[str, int]:
        """The added tokens; cached, since listing Gemma's 6,384 takes 50 ms."""
        return self.hf_tokenizer.get_added_vocab()

    @cached_property
    def control(self) -> Mapping[str, int]:
        """The added tokens that are not white space, which is ordinary text: Gemma adds its line breaks."""
        return {token: i for token, i in self.added.items() if token.replace(SPACE_MARK, " ").strip()}

    def encode(self, string: str) -> list[int]:
        """The ids of `string`, without any before or after; special tokens that it spells out are recognised."""
        try:
            string.encode()
        except (AttributeError, UnicodeError) as error:
            raise BadInput(f"text to encode must be a valid Unicode string, but it is {string!r:.80}") from error
        try:
            return self.hf_tokenizer.encode(string, add_special_tokens=False)
        except BaseException as error:
            if not _is_panic(error):
                raise
            raise BadInput(f"the tokenizer of {self.source} gives up on {string!r:.80}: {error!s:.200}") from error

    def decode(self, ids: Iterable[int]) -> str:
        """The string of `ids`, with special tokens spelled out and spaces left as they are."""
        tokens = _integers(ids, "ids to decode")
        if (i := max(tokens, default=0)) >= self.vocab_size:
            raise BadInput(f"id {i} can't be decoded: the tokenizer of {self.source} has ids below {self.vocab_size}")
        return self.hf_tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def decode_action(self, sampled: Iterable[int]) -> tuple[str, bool]:
        """(text of an action without its stop token and ids beyond the vocabulary, whether it had a stop token)."""
        ids = [int(i) for i in sampled]
        has_stop = bool(ids) and ids[-1] in self.stop_ids
        return self.decode(i for i in (ids[:-1] if has_stop else ids) if i < self.vocab_size), has_stop

    def save(self, path: str | PathLike[str]) -> None:
        """Write tokenizer, template and generation config into a folder for `load_tokenizer`."""
        folder = Path(path)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.hf_tokenizer.save_pretrained(folder)
            if self.generation_config is not None:
                (folder / GENERATION_CONFIG).write_bytes(self.generation_config)
        except OSError as error:
            raise BadInput(f"the tokenizer can't be saved in {path} ({error}): give a folder to write in") from error


@dataclass(frozen=True)
class Conversation:
    """The exact ids so far, and which of them the policy sampled. It only ever grows at its end."""

    tokens: tuple[int, ...]
    chosen: tuple[bool, ...]

    def extend(self, tokens: Sequence[int], chosen: bool) -> "Conversation":
        """This conversation with `tokens` appended, all of them chosen or none."""
        return Conversation(self.tokens + tuple(tokens), self.chosen + (chosen,) * len(tokens))


def start_conversation(
    tokenizer: ChatTokenizer, messages: Messages, tools: Sequence[JSON] | None = None
) -> Conversation:
    """The first prompt: `messages` (and schemas of `tools`) as the template writes them, with its generation prompt."""
    return Conversation((), ()).extend(encode_marked(tokenizer, _render(tokenizer, (), messages, tools)), chosen=False)


def add_action(conversation: Conversation, sampled_ids: Iterable[int]) -> Conversation:
    """`conversation` with the sampled ids appended, as they are; a second call continues an action that was cut."""
    tokens = _integers(sampled_ids, "the ids of an action")
    if not tokens:
        raise BadInput("an action has no ids: it needs at least one, and a stop token alone is one")
    return conversation.extend(tokens, chosen=True)


def add_messages(tokenizer: ChatTokenizer, conversation: Conversation, messages: Messages) -> Conversation:
    """`conversation` with its last action closed, `messages` appended, and the next generation prompt.

    The closing token is added, as not chosen, only if the action was cut before it: not after any of `stop_ids`.
    """
    if not conversation.chosen or not conversation.chosen[-1]:
        raise BadInput("messages follow an action, and this conversation waits for one: add all messages in one call")
    glue = _glue(tokenizer, messages)
    tokens = encode_marked(tokenizer, glue)
    closing = _leading_added_token(tokenizer, glue)
    if conversation.tokens[-1] in tokenizer.stop_ids and closing in tokenizer.stop_ids:
        tokens = tokens[tokens.index(closing) + 1 :]
    return conversation.extend(tokens, chosen=False)


def closing_id(tokenizer: ChatTokenizer) -> int | None:
    """The added token with which the template closes an assistant's turn, if any."""
    if not tokenizer.hf_tokenizer.chat_template:
        return None
    return _leading_added_token(tokenizer, _glue(tokenizer, [{"role": "user", "content": "x"}]))


def guard(tokenizer: ChatTokenizer) -> ChatTokenizer:
    """A tokenizer that breaks up all control tokens in messages, also those like <think> that aren't marked special."""
    return replace(tokenizer, special=match_any(tokenizer.control))


def match_any(strings: Iterable[str]) -> re.Pattern[str]:
    """Pattern of any of these strings, the longest first; without strings it matches nothing."""
    return re.compile("|".join(map(re.escape, sorted(strings, key=len, reverse=True))) or NOTHING.pattern)


def break_all(tokenizer: ChatTokenizer) -> ChatTokenizer:
    """A tokenizer that breaks up messages after every character, so that no control token can be left."""
    return replace(tokenizer, special=re.compile(r"[\s\S]"))


def load_tokenizer(
    path: str | PathLike[str], template: str | None = None, options: Mapping[str, JSON] | None = None
) -> ChatTokenizer:
    """The tokenizer of a model folder, GGUF file, or hub id.

    Args:
        path: folder, file or id.
        template: chat template in Jinja, instead of the model's own.
        options: variables for the template, such as `{"enable_thinking": False}`.
    """
    start_rendering()  # starting that process takes as long as loading the tokenizer
    if (file := find_gguf(path)) is not None:
        metadata = read_header(file).metadata
        hf_tokenizer, config = build_tokenizer(file, metadata), generation_config(metadata)
    else:
        folder = _local_folder(path)
        hf_tokenizer, config = _load_hf_tokenizer(str(path), folder), None
        if (folder / GENERATION_CONFIG).is_file():
            config = (folder / GENERATION_CONFIG).read_bytes()
    if template is not None:
        hf_tokenizer.chat_template = template
    tokenizer = ChatTokenizer(
        source=str(file or path),
        hf_tokenizer=hf_tokenizer,
        special=match_any(token.content for token in hf_tokenizer.added_tokens_decoder.values() if token.special),
        vocab_size=max(hf_tokenizer.get_vocab().values()) + 1,
        options=dict(options or {}),
        generation_config=config,
    )
    tokenizer = replace(tokenizer, stop_ids=_find_stop_ids(tokenizer))
    # The tokenizer's own padding, else a token that is named so, else one that is rare in text; not a stop id.
    named = sorted(i for token, i in tokenizer.added.items() if "pad" in token.lower())
    rare = [hf_tokenizer.unk_token_id, *sorted(tokenizer.added.values(), reverse=True)]
    candidates = chain([hf_tokenizer.pad_token_id, *named, *rare], range(tokenizer.vocab_size))
    pad_id = next((i for i in candidates if i is not None and i not in tokenizer.stop_ids), tokenizer.stop_ids[0])
    return replace(tokenizer, pad_id=pad_id)


def _integers(values: Iterable[Any], name: str) -> list[int]:
    """`values`, a list or a one-dimensional array, as Python integers of at least 0; else `BadInput` with `name`."""
    items = np.asarray(values).tolist() if hasattr(values, "__array__") else values
    try:
        integers = [operator.index(item) for item in items]
    except TypeError as error:
        raise BadInput(f"{name} must be a flat list of integers, but they are {values!r:.80}") from error
    if min(integers, default=0) < 0:
        raise BadInput(f"{name} must be at least 0, but one is {min(integers)}")
    return integers


# Data in a message ------------------------------------------------------------------------------------


def clean(string: str) -> str:
    """`string` as valid Unicode: lone surrogates become question marks, and this module's markers are removed."""
    return string.encode("utf-8", "replace").decode().replace(BREAK, "").replace(PLACEHOLDER, "")


def mark(tokenizer: ChatTokenizer, string: str) -> str:
    """`string`, cleaned, with a `BREAK` in each control token that it spells out; `tokenizer` is guarded."""
    return _mark(tokenizer.special, clean(string))


def encode_marked(tokenizer: ChatTokenizer, string: str) -> list[int]:
    """The ids of a marked string, or of one rendered from them: the parts between breaks are encoded apart."""
    return [i for piece in string.split(BREAK) for i in tokenizer.encode(piece)]


def control_ids(tokenizer: ChatTokenizer, ids: Iterable[int]) -> list[int]:
    """The ids that are control tokens, which templates write and data must not."""
    control = frozenset(tokenizer.control.values())
    return [i for i in ids if i in control]


def tokenize_safely(
    tokenizer: ChatTokenizer, messages: Messages, write: Callable[[ChatTokenizer, Messages], tuple[int, ...]]
) -> tuple[int, ...]:
    """Tokenise messages by `write`; character by character if they have control tokens that the template has not.

    A tokenizer that folds case, for example, recognises control tokens that no pattern finds.
    """
    tokens = write(tokenizer, messages)
    # The same messages with harmless contents; an assistant's own message stays.
    harmless = [message if message["role"] == "assistant" else {**message, "content": "x"} for message in messages]
    is_safe = control_ids(tokenizer, tokens) == control_ids(tokenizer, write(tokenizer, harmless))
    return tokens if is_safe else write(break_all(tokenizer), messages)


def quote(string: str) -> str:
    """`string` with "> " before each line, so that none can pass for a line of ours."""
    return "> " + LINE_END.sub("\n> ", string)


def to_json_line(value: JSON) -> str:
    """`value` in one line of JSON; letters of all scripts are written as they are, other line breaks are escaped."""
    line = json.dumps(value, ensure_ascii=False)
    return UNWRITTEN.sub(lambda match: f"\\u{ord(match[0]):04x}", line)


def strict_json(
    text: str,
    *,
    parse_float: Callable[[str], float] = float,
    object_pairs_hook: Callable[[list[tuple[str, JSON]]], JSON] | None = None,
) -> JSON:
    """Parse strict JSON, without NaN and infinity; raises `ValueError` for anything else. Hooks as in `json.loads`."""

    def refuse_constant(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    hooks = {"parse_constant": refuse_constant, "parse_float": parse_float, "object_pairs_hook": object_pairs_hook}
    return parse_json(text, **hooks)


# Rendering --------------------------------------------------------------------------------------------


def _glue(tokenizer: ChatTokenizer, messages: Messages) -> str:
    """What the template writes between two messages of the assistant, with `messages` between them."""
    before = ({"role": "user", "content": "x"}, {"role": "assistant", "content": PLACEHOLDER})
    _, placeholder, glue = _render(tokenizer, before, messages).rpartition(PLACEHOLDER)
    if not placeholder:
        raise _refusal(tokenizer, "assistant", "leaves out a message that others follow")
    return glue


def _render(tokenizer: ChatTokenizer, before: Messages, messages: Messages, tools: Sequence[JSON] | None = None) -> str:
    """`before` and `messages` as the template writes them, with breaks inside special tokens of the messages."""
    _check_messages(messages)
    marked = [
        {
            # An assistant's own message is taken literally.
            key: value
            if key == "role"
            else _mark(NOTHING if message["role"] == "assistant" else tokenizer.special, value)
            for key, value in message.items()
        }
        for message in messages
    ]
    schemas = None if tools is None else [_mark(tokenizer.special, tool) for tool in tools]
    probes = [{**message, "content": f"zq{i}qz"} if _is_shown(message) else message for i, message in enumerate(marked)]
    chats = ([*before, *marked], [*before, *probes])
    (rendered, why), (probed, probe_why) = _apply(tokenizer, chats, [(0, None), (1, None)], schemas)
    if why in ENDLESS:
        fix = "put another chat_template.jinja there, or pass template= to load_tokenizer"
        raise BadInput(f"the chat template of {tokenizer.source} can't be rendered: {why}; {fix}")
    if why:
        # The first message with which the template fails as it does with all of them.
        def fails(size: int) -> bool:
            return _apply(tokenizer, chats[:1], [(0, len(before) + size)], schemas)[0][1] == why

        at = bisect_left(range(1, len(marked)), True, key=fails)
        raise _refusal(tokenizer, messages[at]["role"], f"can't render message {at} ({why})")
    rendered_probes = set(re.findall(r"zq\d+qz", probed))  # searched for once, however many messages there are
    for i, message in enumerate(messages):
        if not probe_why and _is_shown(message) and f"zq{i}qz" not in rendered_probes:
            raise _refusal(tokenizer, message["role"], f"leaves out message {i}")
    return rendered


def _refusal(tokenizer: ChatTokenizer, role: str, what: str) -> BadInput:
    """The error for a template that fails or leaves out a message."""
    fix = "give its content in a role and an order that the template knows, or pass another template= to load_tokenizer"
    return BadInput(f"the chat template of {tokenizer.source} {what}, which has the role {role!r}: {fix}")


def apply_template(
    tokenizer: ChatTokenizer, messages: Messages, tools: Sequence[JSON] | None = None, *, invite: bool = True
) -> tuple[str, str]:
    """(rendered, ""), or ("", why the template refused)."""
    return _apply(tokenizer, (messages,), [(0, None)], tools, invite=invite)[0]


def _apply(
    tokenizer: ChatTokenizer,
    chats: Sequence[Messages],
    wanted: Sequence[tuple[int, int | None]],
    tools: Sequence[JSON] | None,
    *,
    invite: bool = True,
) -> list[tuple[str, str]]:
    """Render prefixes of chats, `wanted` as (chat, number of messages), as `apply_template` does."""
    if not tokenizer.hf_tokenizer.chat_template:
        fix = "take one that chats" if is_gguf(tokenizer.source) else "put a chat_template.jinja there"
        raise BadInput(
            f"{tokenizer.source} has no chat template: {fix}, or give one as chat_template, if that is a setting "
            "(template= of load_tokenizer)"
        )
    try:
        template = tokenizer.hf_tokenizer.get_chat_template(None, tools)
    except Exception as error:  # there are several templates, and none is the default
        return [("", first_line(error))] * len(wanted)
    options = {
        **tokenizer.hf_tokenizer.special_tokens_map,
        **tokenizer.options,
        "add_generation_prompt": invite,
        "tools": tools,
    }
    # Values that are None are left out, as `apply_chat_template` of transformers does.
    plain = [[{key: x for key, x in message.items() if x is not None} for message in chat] for chat in chats]
    return [(rendered, _first_line(why)) for rendered, why in render(template, plain, wanted, options)]


def _first_line(why: str) -> str:
    """The first line of a reason, without its punctuation."""
    return why.splitlines()[0].rstrip(".:") if why else ""


def _is_shown(message: Mapping[str, JSON]) -> bool:
    """Whether the message's content must be rendered: it is text, and there are no tool calls to render instead."""
    return isinstance(message.get("content"), str) and message["content"].strip() != "" and "tool_calls" not in message


def _check_messages(messages: Messages) -> None:
    """Raise `BadInput` unless there are messages, each with a role and with content or tool calls."""
    if isinstance(messages, str | Mapping) or not messages:
        raise BadInput(f"messages must be a list of at least one {{'role': ..., 'content': ...}}, not {messages!r:.80}")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise BadInput(f"message {i} has no role: write {{'role': 'user', 'content': ...}}, not {message!r:.80}")
        if not isinstance(message.get("content"), str | list | tuple) and not message.get("tool_calls"):
            raise BadInput(f"message {i} of role {message['role']!r} has no content: give it a string")


def _mark(pattern: re.Pattern[str], value: JSON) -> JSON:
    """`value` with `BREAK` after the first character of every match of `pattern`, in all strings inside it."""
    if isinstance(value, str):
        without_markers = value.replace(BREAK, "").replace(PLACEHOLDER, "")
        return pattern.sub(lambda match: match[0][0] + BREAK + match[0][1:], without_markers)
    if isinstance(value, Mapping):
        return {key: _mark(pattern, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mark(pattern, item) for item in value]
    return value


# Loading ----------------------------------------------------------------------------------------------


def _local_folder(path: str | PathLike[str]) -> Path:
    """The local folder of a tokenizer, its files checked. What can only be a path is never looked up on the hub."""
    name, folder = str(path), Path(path)
    is_hub_id = re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) and not Path(folder.parts[0]).exists()
    if not (name and folder.is_dir()):
        if not is_hub_id:
            raise BadInput(
                f"there is no model folder {name}: give one with a tokenizer.json, or a hub id such as 'a/b'"
            )
        import huggingface_hub

        try:
            folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=HUB_FILES))
        except Exception as error:  # offline, unknown, gated: each has its own class
            why = first_line(error)
            raise BadInput(f"no tokenizer can be read from {name} ({why}): give a folder instead") from error
    check_files(folder)
    check_tokenizer(folder)
    return folder


def _load_hf_tokenizer(name: str, folder: Path) -> Any:
    """The folder's tokenizer, by transformers."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except BaseException as error:  # readers of many formats, which may raise anything
        if not (isinstance(error, Exception) or _is_panic(error)):
            raise
        fix = "put its tokenizer.json and tokenizer_config.json there"
        why = _first_line(str(error).strip()) or type(error).__name__
        raise BadInput(f"no tokenizer can be read from {name} ({why}): {fix}") from error


def _is_panic(error: BaseException) -> bool:
    """Whether it is a panic of Rust, which is no `Exception`, and whose class can't be imported."""
    return type(error).__name__ == "PanicException"


def _find_stop_ids(tokenizer: ChatTokenizer) -> tuple[int, ...]:
    """The tokenizer's end of sequence, the ids of the generation config, and the token that closes a turn."""
    configured = []
    if tokenizer.generation_config is not None:
        place = f"{GENERATION_CONFIG} of {tokenizer.source}"
        try:
            eos = parse_json(tokenizer.generation_config).get("eos_token_id")
        except (ValueError, AttributeError) as error:
            raise BadInput(f"{place} is not a JSON object ({first_line(error)}): fix it or remove it") from error
        configured = eos if isinstance(eos, list) else [] if eos is None else [eos]
        for i in configured:
            if type(i) is not int or not 0 <= i < tokenizer.vocab_size:
                raise BadInput(f"eos_token_id in {place} is {i!r}: write ids that are below {tokenizer.vocab_size}")
    ids = [tokenizer.hf_tokenizer.eos_token_id, *configured, closing_id(tokenizer)]
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def _leading_added_token(tokenizer: ChatTokenizer, string: str) -> int | None:
    """Id of the added token with which `string` starts, or None if it starts with ordinary text.

    White space before a control token is skipped; otherwise it may be an added token itself, as a line break is for
    Gemma.
    """
    for candidate in (string.lstrip(), string):
        if matching := [token for token in tokenizer.added if candidate.startswith(token)]:
            return tokenizer.added[max(matching, key=len)]
    return None
