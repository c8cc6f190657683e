"""A Modelfile, with which `ollama create NAME -f Modelfile` imports a GGUF file.

It has the path of the file, the temperature at which the model was trained, the stop tokens, and the chat template in
the syntax of Go. Ollama knows the common templates by their Jinja text, which is in the GGUF, and renders any other one
as the bare prompt. So a template is written in Go whenever possible: when each message is rendered as `before + content
+ after`, by its role alone. Those strings are inferred from one rendering, and checked on others; if they don't fit, no
template is written, and Ollama decides.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from flowgrpo.data.tokenizer import ChatTokenizer, apply_template

SYSTEM, USER, ANSWER, NEXT = "zq0qz", "zq1qz", "zq2qz", "zq3qz"  # contents of probe messages
Messages = Sequence[Mapping[str, str]]


class TurnFormat(NamedTuple):
    """A chat template that renders each message by its role alone."""

    lead: str  # before a conversation that has no system message
    around: Mapping[str, tuple[str, str]]  # by role: before and after the content
    invitation: str  # after the last message

    def render(self, messages: Messages) -> str:
        """The conversation as the Go template renders it."""
        lead = "" if messages[0]["role"] == "system" else self.lead
        written = (self.around[m["role"]][0] + m["content"] + self.around[m["role"]][1] for m in messages)
        return lead + "".join(written) + self.invitation


def write_modelfile(path: Path, tokenizer: ChatTokenizer, weights: str, *, temperature: float | None = None) -> None:
    """Write the Modelfile of a GGUF file `weights` in the same folder."""
    lines = [f"FROM ./{weights}"]
    if temperature is not None:
        lines.append(f"PARAMETER temperature {temperature:g}")
    for token in dict.fromkeys(tokenizer.decode([i]) for i in tokenizer.stop_ids):
        if not set(token) & {'"', "\n"}:  # these would need quoting; llama.cpp stops at eos and eot anyhow
            lines.append(f'PARAMETER stop "{token}"')
    turns = infer_turn_format(tokenizer)
    if turns is not None:
        lines.append(f'TEMPLATE """{go_template(turns)}"""')
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def infer_turn_format(tokenizer: ChatTokenizer) -> TurnFormat | None:
    """The chat template as `TurnFormat`; None if there is none, or it does more than render messages by their roles.

    A beginning-of-sequence token is left to the server, which adds it as the GGUF says.
    """
    if not tokenizer.hf_tokenizer.chat_template:
        return None
    chat = _messages(user=USER, assistant=ANSWER) + _messages(user=NEXT)
    rendered = _render(tokenizer, chat)
    if rendered is None or not _has_once_in_order(rendered, USER, ANSWER, NEXT):
        return None
    lead, rest = rendered.split(USER)
    middle, rest = rest.split(ANSWER)
    turn, ending = rest.split(NEXT)
    # Between two contents are the end of one message and the start of the next: a shorter chat tells them apart.
    closed = _render(tokenizer, _messages(user=USER, assistant=ANSWER), invite=False)
    if closed is None or not closed.startswith(lead + USER + middle + ANSWER):
        return None
    after_answer = closed[len(lead + USER + middle + ANSWER) :]
    if not turn.startswith(after_answer):
        return None
    before_user = turn[len(after_answer) :]
    if not lead.endswith(before_user):
        return None
    alone = _render(tokenizer, _messages(user=USER), invite=False)
    if alone is None or not alone.startswith(lead + USER):
        return None
    after_user = alone[len(lead + USER) :]
    if not (middle.startswith(after_user) and ending.startswith(after_user)):
        return None
    around = {"user": (before_user, after_user), "assistant": (middle[len(after_user) :], after_answer)}
    lead, invitation = lead[: len(lead) - len(before_user)], ending[len(after_user) :]
    opened = _render(tokenizer, _messages(system=SYSTEM, user=USER), invite=False)
    if opened is not None and _has_once_in_order(opened, SYSTEM, USER):
        before, after = opened.split(SYSTEM)
        if after.endswith(before_user + USER + after_user):
            around["system"] = (before, after.removesuffix(before_user + USER + after_user))
    turns = TurnFormat(lead, around, invitation)
    return turns if _fits(tokenizer, turns) else None


def go_template(turns: TurnFormat) -> str:
    """The template in one line of Go, with quoted strings, so that no white space is lost."""
    roles = [
        f'if eq .Role "{role}" }}}}{_quote(before)}{{{{ .Content }}}}{_quote(after)}{{{{ '
        for role, (before, after) in turns.around.items()
    ]
    lead = _quote(turns.lead)
    if lead and "system" in turns.around:
        lead = f'{{{{ if ne (index .Messages 0).Role "system" }}}}{lead}{{{{ end }}}}'
    return f"{lead}{{{{ range .Messages }}}}{{{{ {'else '.join(roles)}end }}}}{{{{ end }}}}{_quote(turns.invitation)}"


def _quote(string: str) -> str:
    """A string literal; JSON's are valid in Go."""
    return f"{{{{ {json.dumps(string, ensure_ascii=False)} }}}}" if string else ""


def _fits(tokenizer: ChatTokenizer, turns: TurnFormat) -> bool:
    """Whether longer conversations are rendered as by the template, without the beginning-of-sequence token."""
    several = _messages(user="one", assistant="two\nlines") + _messages(user="3 {x}", assistant="four.")
    chats = [[*several, *_messages(user="five")]]
    if "system" in turns.around:
        chats.append([*_messages(system="Be kind."), *chats[0]])
    return all(_render(tokenizer, chat) == turns.render(chat) for chat in chats)


def _messages(**contents: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in contents.items()]


def _render(tokenizer: ChatTokenizer, messages: Messages, *, invite: bool = True) -> str | None:
    """The template's rendering, without a beginning-of-sequence token that the server adds; None if it fails."""
    rendered, why = apply_template(tokenizer, messages, invite=invite)
    if why:
        return None
    bos: str | None = tokenizer.hf_tokenizer.bos_token
    is_added = tokenizer.hf_tokenizer("x")["input_ids"][:1] == [tokenizer.hf_tokenizer.bos_token_id]
    return rendered.removeprefix(bos) if bos and is_added else rendered


def _has_once_in_order(rendered: str, *markers: str) -> bool:
    places = [rendered.find(marker) for marker in markers]
    return places == sorted(places) and all(rendered.count(marker) == 1 for marker in markers)
