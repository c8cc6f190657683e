"""Tokenizer and chat rendering: messages go in, token ids come out, and a conversation only ever appends (A5).

    load_text(folder) -> Text;   start -> Conversation;   add_action, add_messages: Conversation -> Conversation

All that the model sampled is kept as the ids that it sampled. What stands between two of its actions, the *glue*, is
what the template writes after a placeholder in the assistant's place, in a small conversation that holds nothing else:

    template([user, assistant: placeholder, *new messages]) = … placeholder glue

Only the glue is tokenised, so a template that strips, trims or re-orders earlier turns can't touch ours. A text that
the template tokenises to the same ids in one piece, where glue and action meet at special tokens, gets just those ids.

Special tokens that are spelled out inside a message (a tool's output, a user's query) become ordinary text: a tool
can't end its turn or begin another's. Messages of the role "assistant" are taken at their word.
"""

import json
import operator
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from flowgrpo.data.foreign_files import check_files, check_tokenizer
from flowgrpo.data.gguf_file import is_gguf, read_header
from flowgrpo.data.gguf_tokenizer import SPACE, build_tokenizer, generation_config
from flowgrpo.data.named_models import find_gguf
from flowgrpo.data.templates import ENDLESS, render
from flowgrpo.data.templates import start as start_rendering
from flowgrpo.files import parse_json
from flowgrpo.types import BadInput, first_line

Messages = Sequence[Mapping[str, Any]]  # each {"role": ..., "content": ...}, and what else the template reads
GENERATION_CONFIG = "generation_config.json"
HUB_FILES = ["*.json", "tokenizer*", "*.txt", "*.jinja", "*.model"]  # of a tokenizer

# Two Unicode noncharacters, which are never text: one breaks up special tokens, one stands for the assistant's words.
BREAK, PLACEHOLDER = "\ufdd0", "\ufdd1"
NOTHING = re.compile("(?!)")
LINE_END = re.compile("\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")  # whatever some reader takes for one
UNWRITTEN = re.compile("[\x7f-\x9f\u2028\u2029]")  # what JSON leaves as it is, though it is no letter


@dataclass(frozen=True, eq=False)
class Text:
    """A tokenizer with its chat template. `options` go to the template, e.g. `{"enable_thinking": False}`."""

    source: str  # folder, GGUF file or hub id, for messages
    tokenizer: Any  # of transformers
    special: re.Pattern[str]  # spells of the special tokens
    vocab_size: int  # ids the tokenizer knows; a model's embedding may have more rows
    stop_ids: tuple[int, ...] = ()  # each ends an assistant turn
    pad_id: int = 0  # no stop id, unless there is no other id
    options: Mapping[str, Any] = field(default_factory=dict)
    generation_config: bytes | None = None  # the file as it was found, for `save`

    @cached_property
    def added(self) -> Mapping[str, int]:
        """The added tokens, which the tokenizer takes 50 ms to list where it has Gemma's 6,384."""
        return self.tokenizer.get_added_vocab()

    @cached_property
    def control(self) -> Mapping[str, int]:
        """All added tokens but those of white space, which is words like any other: Gemma adds its ends of lines."""
        return {spelled: i for spelled, i in self.added.items() if spelled.replace(SPACE, " ").strip()}

    def encode(self, string: str) -> list[int]:
        """The ids of `string`; nothing is put before or after it, and special tokens that it spells out are found."""
        try:
            string.encode()
        except (AttributeError, UnicodeError) as error:
            raise BadInput(f"text to encode must be a valid Unicode string, but it is {string!r:.80}") from error
        try:
            return self.tokenizer.encode(string, add_special_tokens=False)
        except BaseException as error:
            if not _is_panic(error):
                raise
            raise BadInput(f"the tokenizer of {self.source} gives up on {string!r:.80}: {error!s:.200}") from error

    def decode(self, ids: Iterable[int]) -> str:
        """The string of `ids`, with special tokens spelled out and spaces left as they are."""
        known = _integers(ids, "ids to decode")
        if (i := max(known, default=0)) >= self.vocab_size:
            raise BadInput(f"id {i} can't be decoded: the tokenizer of {self.source} has ids below {self.vocab_size}")
        return self.tokenizer.decode(known, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def spoken(self, sampled: Iterable[int]) -> tuple[str, bool]:
        """The words of an action, without its stop token and ids that stand for no text; and whether it had one."""
        ids = [int(i) for i in sampled]
        whole = bool(ids) and ids[-1] in self.stop_ids
        return self.decode(i for i in (ids[:-1] if whole else ids) if i < self.vocab_size), whole

    def save(self, path: str | PathLike[str]) -> None:
        """Write tokenizer, template and generation config into the folder `path`, from which `load_text` reads them."""
        folder = Path(path)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.tokenizer.save_pretrained(folder)
            if self.generation_config is not None:
                (folder / GENERATION_CONFIG).write_bytes(self.generation_config)
        except OSError as error:
            raise BadInput(f"the tokenizer can't be saved in {path} ({error}): give a folder to write in") from error


@dataclass(frozen=True)
class Conversation:
    """The exact ids so far, and which of them the policy chose. A longer conversation begins with the shorter one."""

    tokens: tuple[int, ...]
    chosen: tuple[bool, ...]

    def extend(self, tokens: Sequence[int], chosen: bool) -> "Conversation":
        """This conversation with `tokens` after it, all of them chosen or none."""
        return Conversation(self.tokens + tuple(tokens), self.chosen + (chosen,) * len(tokens))


def start(text: Text, messages: Messages, tools: Sequence[Any] | None = None) -> Conversation:
    """The first prompt: `messages` (and the schemas of `tools`) as the template writes them, then its invitation."""
    return Conversation((), ()).extend(encode_marked(text, _render(text, (), messages, tools)), chosen=False)


def add_action(conversation: Conversation, sampled_ids: Iterable[int]) -> Conversation:
    """`conversation` with the sampled ids after it, as they are; a turn that was cut may be continued by another."""
    tokens = _integers(sampled_ids, "the ids of an action")
    if not tokens:
        raise BadInput("an action has no ids: it needs at least one, and a stop token alone is one")
    return conversation.extend(tokens, chosen=True)


def add_messages(text: Text, conversation: Conversation, messages: Messages) -> Conversation:
    """`conversation` with its last action closed, `messages` after it, and the invitation to the next action.

    The closing token is added, unchosen, only where the action was cut before it: after any of `stop_ids` it is not.
    """
    if not conversation.chosen or not conversation.chosen[-1]:
        raise BadInput("messages follow an action, and this conversation waits for one: add all messages in one call")
    glue = _glue(text, messages)
    tokens = encode_marked(text, glue)
    closing = _first_token(text, glue)
    if conversation.tokens[-1] in text.stop_ids and closing in text.stop_ids:
        tokens = tokens[tokens.index(closing) + 1 :]
    return conversation.extend(tokens, chosen=False)


def closing_id(text: Text) -> int | None:
    """The added token with which the template closes an assistant's turn, if it does so."""
    if not text.tokenizer.chat_template:
        return None
    return _first_token(text, _glue(text, [{"role": "user", "content": "x"}]))


def guard(text: Text) -> Text:
    """`text` that breaks up every control token in messages, also those like <think> that aren't marked as special."""
    return replace(text, special=any_of(text.control))


def any_of(spells: Iterable[str]) -> re.Pattern[str]:
    """The pattern of any of these strings, the longest first; of none, one that matches nothing."""
    return re.compile("|".join(map(re.escape, sorted(spells, key=len, reverse=True))) or NOTHING.pattern)


def split_all(text: Text) -> Text:
    """`text` that breaks up messages after every character: no control token is left, however it was spelled."""
    return replace(text, special=re.compile(r"[\s\S]"))


def load_text(path: str | PathLike[str], template: str | None = None, options: Mapping[str, Any] | None = None) -> Text:
    """The tokenizer of a model folder, GGUF file, or hub id; `template` (Jinja) replaces its chat template."""
    start_rendering()  # which takes as long as the tokenizer
    if (file := find_gguf(path)) is not None:
        metadata = read_header(file).metadata
        tokenizer, ends = build_tokenizer(file, metadata), generation_config(metadata)
    else:
        folder = _folder(path)
        tokenizer, ends = _load_tokenizer(str(path), folder), _read_generation_config(folder)
    if template is not None:
        tokenizer.chat_template = template
    text = Text(
        source=str(file or path),
        tokenizer=tokenizer,
        special=any_of(token.content for token in tokenizer.added_tokens_decoder.values() if token.special),
        vocab_size=max(tokenizer.get_vocab().values()) + 1,
        options=dict(options or {}),
        generation_config=ends,
    )
    text = replace(text, stop_ids=_find_stop_ids(text))
    return replace(text, pad_id=_find_pad_id(text))


def _integers(values: Iterable[Any], what: str) -> list[int]:
    """`values`, a list or an array of one axis, as Python integers of at least 0, or `BadInput` about `what`."""
    items = np.asarray(values).tolist() if hasattr(values, "__array__") else values
    try:
        found = [operator.index(item) for item in items]
    except TypeError as error:
        raise BadInput(f"{what} must be a flat list of integers, but they are {values!r:.80}") from error
    if min(found, default=0) < 0:
        raise BadInput(f"{what} must be at least 0, but one is {min(found)}")
    return found


# Data in a message ------------------------------------------------------------------------------------


def clean(string: str) -> str:
    """`string` as valid Unicode: lone surrogates become question marks, and the markers of this module go."""
    return string.encode("utf-8", "replace").decode().replace(BREAK, "").replace(PLACEHOLDER, "")


def mark(text: Text, string: str) -> str:
    """`string`, cleaned, with a `BREAK` in each control token that it spells; `text` is guarded."""
    return _mark(text.special, clean(string))


def encode_marked(text: Text, string: str) -> list[int]:
    """The ids of a string that is marked, or rendered from marked ones: what lies beside a `BREAK` is encoded apart."""
    return [i for piece in string.split(BREAK) for i in text.encode(piece)]


def control_ids(text: Text, ids: Iterable[int]) -> list[int]:
    """Those of the ids that are control tokens, which templates write and data must not."""
    control = frozenset(text.control.values())
    return [i for i in ids if i in control]


def write_plainly(
    text: Text, messages: Messages, write: Callable[[Text, Messages], tuple[int, ...]]
) -> tuple[int, ...]:
    """Tokenise messages by `write`; every character apart where it finds other control tokens than the template's.

    A tokenizer that folds case, say, finds control tokens that no pattern does.
    """
    tokens = write(text, messages)
    plain = write(text, [_with_content(message, "x") for message in messages])
    alike = control_ids(text, tokens) == control_ids(text, plain)
    return tokens if alike else write(split_all(text), messages)


def _with_content(message: Mapping[str, Any], content: str) -> Mapping[str, Any]:
    """The message with other words; those of an assistant stay, which are its own."""
    return message if message["role"] == "assistant" else {**message, "content": content}


def quote(string: str) -> str:
    """`string` with "> " before each of its lines, so that none of them passes for a line of ours."""
    return "> " + LINE_END.sub("\n> ", string)


def as_json(value: Any) -> str:
    """`value` in one line of JSON, whose strings end where they say; letters of all scripts stand as they are."""
    written = json.dumps(value, ensure_ascii=False)
    return UNWRITTEN.sub(lambda match: f"\\u{ord(match[0]):04x}", written)


def strict_json(text: str, **options: Any) -> Any:
    """Parse JSON by the letter, without NaN and infinity; `ValueError` for anything else."""
    return parse_json(text, parse_constant=_refuse_constant, **options)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


# Rendering --------------------------------------------------------------------------------------------


def _glue(text: Text, messages: Messages) -> str:
    """Render what the template writes between an assistant's words and its next ones, with `messages` between them."""
    before = ({"role": "user", "content": "x"}, {"role": "assistant", "content": PLACEHOLDER})
    _, found, glue = _render(text, before, messages).rpartition(PLACEHOLDER)
    if not found:
        raise _refusal(text, "assistant", "leaves out a message that others follow")
    return glue


def _render(text: Text, before: Messages, messages: Messages, tools: Sequence[Any] | None = None) -> str:
    """`before` and `messages` as the template writes them, `BREAK` inside specials; or `BadInput` naming the role."""
    _check_messages(messages)
    marked = [_mark_message(text, message) for message in messages]
    schemas = None if tools is None else [_mark(text.special, tool) for tool in tools]
    probes = [{**message, "content": f"zq{i}qz"} if _is_shown(message) else message for i, message in enumerate(marked)]
    chats = ([*before, *marked], [*before, *probes])
    (rendered, why), (probed, probe_why) = _apply(text, chats, [(0, None), (1, None)], schemas)
    if why in ENDLESS:
        fix = "put another chat_template.jinja there, or pass template= to load_text"
        raise BadInput(f"the chat template of {text.source} can't be rendered: {why}; {fix}")
    if why:
        # The first message with which the template says what it says of them all.
        def fails(size: int) -> bool:
            return _apply(text, chats[:1], [(0, len(before) + size)], schemas)[0][1] == why

        at = bisect_left(range(1, len(marked)), True, key=fails)
        raise _refusal(text, messages[at]["role"], f"can't render message {at} ({why})")
    seen = set(re.findall(r"zq\d+qz", probed))  # searched for once, however many messages there are
    for i, message in enumerate(messages):
        if not probe_why and _is_shown(message) and f"zq{i}qz" not in seen:
            raise _refusal(text, message["role"], f"leaves out message {i}")
    return rendered


def _refusal(text: Text, role: str, what: str) -> BadInput:
    """The error of a template that doesn't write what it is given."""
    fix = "give its content in a role and an order that the template knows, or pass another template= to load_text"
    return BadInput(f"the chat template of {text.source} {what}, which has the role {role!r}: {fix}")


def apply_template(
    text: Text, messages: Messages, tools: Sequence[Any] | None = None, *, invite: bool = True
) -> tuple[str, str]:
    """(rendered, ""), or ("", why the template refused)."""
    return _apply(text, (messages,), [(0, None)], tools, invite=invite)[0]


def _apply(
    text: Text,
    chats: Sequence[Messages],
    wanted: Sequence[tuple[int, int | None]],
    tools: Sequence[Any] | None,
    *,
    invite: bool = True,
) -> list[tuple[str, str]]:
    """Render beginnings of chats, `wanted` as (chat, how many messages), as `apply_template` does."""
    if not text.tokenizer.chat_template:
        fix = "take one that chats" if is_gguf(text.source) else "put a chat_template.jinja there"
        raise BadInput(
            f"{text.source} has no chat template: {fix}, or give one as chat_template, where that is a setting "
            "(template= of load_text)"
        )
    try:
        template = text.tokenizer.get_chat_template(None, tools)
    except Exception as error:  # of several templates, of which none is the default
        return [("", first_line(error))] * len(wanted)
    options = {**text.tokenizer.special_tokens_map, **text.options, "add_generation_prompt": invite, "tools": tools}
    # What is None is left out, as `apply_chat_template` of transformers does.
    plain = [[{key: x for key, x in message.items() if x is not None} for message in chat] for chat in chats]
    return [(written, _line(why)) for written, why in render(template, plain, wanted, options)]


def _line(why: str) -> str:
    """The first line of a reason, without its end."""
    return why.splitlines()[0].rstrip(".:") if why else ""


def _is_shown(message: Mapping[str, Any]) -> bool:
    """Say whether the message's content must show: it is text, and no calls beside it are shown instead."""
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


def _mark_message(text: Text, message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with its special tokens broken up, those of the assistant's own words excepted."""
    pattern = NOTHING if message["role"] == "assistant" else text.special
    return {key: value if key == "role" else _mark(pattern, value) for key, value in message.items()}


def _mark(pattern: re.Pattern[str], value: Any) -> Any:
    """`value` with `BREAK` after the first character of every match of `pattern`, in all strings that it holds."""
    if isinstance(value, str):
        clean = value.replace(BREAK, "").replace(PLACEHOLDER, "")
        return pattern.sub(lambda match: match[0][0] + BREAK + match[0][1:], clean)
    if isinstance(value, Mapping):
        return {key: _mark(pattern, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mark(pattern, item) for item in value]
    return value


# Loading ----------------------------------------------------------------------------------------------


def _folder(path: str | PathLike[str]) -> Path:
    """The folder of a tokenizer, its files looked at; names that can only be folders are never looked up on the hub."""
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


def _load_tokenizer(name: str, folder: Path) -> Any:
    """The tokenizer of transformers."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except BaseException as error:  # the readers of many formats, which raise whatever they like
        if not (isinstance(error, Exception) or _is_panic(error)):
            raise
        fix = "put its tokenizer.json and tokenizer_config.json there"
        why = _line(str(error).strip()) or type(error).__name__
        raise BadInput(f"no tokenizer can be read from {name} ({why}): {fix}") from error


def _is_panic(error: BaseException) -> bool:
    """Whether Rust gave up: that error is no `Exception`, and its class is nowhere to be imported from."""
    return type(error).__name__ == "PanicException"


def _read_generation_config(folder: Path) -> bytes | None:
    """The bytes of generation_config.json, or None where the model has none."""
    path = folder / GENERATION_CONFIG
    return path.read_bytes() if path.is_file() else None


def _find_stop_ids(text: Text) -> tuple[int, ...]:
    """The tokenizer's end of sequence, those of the generation config, and what the template closes a turn with."""
    found = [text.tokenizer.eos_token_id, *_configured_stop_ids(text), closing_id(text)]
    return tuple(dict.fromkeys(i for i in found if i is not None))


def _configured_stop_ids(text: Text) -> Iterator[int]:
    """The ids under `eos_token_id` of the generation config: one, several, or none."""
    if text.generation_config is None:
        return
    place = f"{GENERATION_CONFIG} of {text.source}"
    try:
        found = parse_json(text.generation_config).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise BadInput(f"{place} is not a JSON object ({first_line(error)}): fix it or remove it") from error
    for i in found if isinstance(found, list) else [] if found is None else [found]:
        if type(i) is not int or not 0 <= i < text.vocab_size:
            raise BadInput(f"eos_token_id in {place} is {i!r}: write ids that are below {text.vocab_size}")
        yield i


def _find_pad_id(text: Text) -> int:
    """The tokenizer's own padding, else a token that is named so, else one that text seldom holds; no stop id."""
    named = sorted(i for token, i in text.added.items() if "pad" in token.lower())
    seldom = [text.tokenizer.unk_token_id, *sorted(text.added.values(), reverse=True)]
    candidates = chain([text.tokenizer.pad_token_id, *named, *seldom], range(text.vocab_size))
    return next((i for i in candidates if i is not None and i not in text.stop_ids), text.stop_ids[0])


def _first_token(text: Text, string: str) -> int | None:
    """The id of the added token that `string` begins with, or None where it is ordinary text.

    White space before a control token doesn't count; where there is none, it may be an added token itself, as the end
    of a line is for Gemma.
    """
    for begun in (string.lstrip(), string):
        if matching := [token for token in text.added if begun.startswith(token)]:
            return text.added[max(matching, key=len)]
    return None
