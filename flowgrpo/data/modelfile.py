"""A Modelfile, by which `ollama create NAME -f Modelfile` takes a GGUF file in.

It says where the file is, at which temperature the model was trained, what ends an answer, and the chat template in the
syntax of Go. Ollama knows the common templates by their Jinja text, which the GGUF holds, and renders any other one as
the bare prompt. So a template is written in Go whenever it can be: when each message is written as `before + content +
after`, by its role alone. Those strings are read off one rendering, and checked on others; where they don't fit,
nothing is written, and Ollama decides.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from flowgrpo.data.tokenizer import Text, apply_template

SYSTEM, USER, ANSWER, NEXT = "zq0qz", "zq1qz", "zq2qz", "zq3qz"  # contents of messages that a template may not change
Messages = Sequence[Mapping[str, str]]


class Turns(NamedTuple):
    """A chat template that writes each message by its role alone."""

    lead: str  # before a conversation that has no system message
    around: Mapping[str, tuple[str, str]]  # by role: before and after the content
    invitation: str  # after the last message

    def render(self, messages: Messages) -> str:
        """The conversation as the Go template writes it."""
        lead = "" if messages[0]["role"] == "system" else self.lead
        written = (self.around[m["role"]][0] + m["content"] + self.around[m["role"]][1] for m in messages)
        return lead + "".join(written) + self.invitation


def write_modelfile(path: Path, text: Text, weights: str, *, temperature: float | None = None) -> None:
    """Write the Modelfile of a GGUF file `weights` that lies beside it."""
    lines = [f"FROM ./{weights}"]
    if temperature is not None:
        lines.append(f"PARAMETER temperature {temperature:g}")
    for token in dict.fromkeys(text.decode([i]) for i in text.stop_ids):
        if not set(token) & {'"', "\n"}:  # which a Modelfile would need quoted; llama.cpp stops at eos and eot anyhow
            lines.append(f'PARAMETER stop "{token}"')
    turns = find_turns(text)
    if turns is not None:
        lines.append(f'TEMPLATE """{go_template(turns)}"""')
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def find_turns(text: Text) -> Turns | None:
    """The chat template as `Turns`, or None where it is none, or does more than write messages by their roles.

    A beginning-of-sequence token is left to the server, which puts it there as the GGUF tells it.
    """
    if not text.tokenizer.chat_template:
        return None
    chat = _messages(user=USER, assistant=ANSWER) + _messages(user=NEXT)
    rendered = _render(text, chat)
    if rendered is None or not _holds_once(rendered, USER, ANSWER, NEXT):
        return None
    lead, rest = rendered.split(USER)
    middle, rest = rest.split(ANSWER)
    turn, ending = rest.split(NEXT)
    # Between two messages stand the end of one and the beginning of the other: a shorter chat tells them apart.
    closed = _render(text, _messages(user=USER, assistant=ANSWER), invite=False)
    if closed is None or not closed.startswith(lead + USER + middle + ANSWER):
        return None
    after_answer = closed[len(lead + USER + middle + ANSWER) :]
    if not turn.startswith(after_answer):
        return None
    before_user = turn[len(after_answer) :]
    if not lead.endswith(before_user):
        return None
    alone = _render(text, _messages(user=USER), invite=False)
    if alone is None or not alone.startswith(lead + USER):
        return None
    after_user = alone[len(lead + USER) :]
    if not (middle.startswith(after_user) and ending.startswith(after_user)):
        return None
    around = {"user": (before_user, after_user), "assistant": (middle[len(after_user) :], after_answer)}
    lead, invitation = lead[: len(lead) - len(before_user)], ending[len(after_user) :]
    opened = _render(text, _messages(system=SYSTEM, user=USER), invite=False)
    if opened is not None and _holds_once(opened, SYSTEM, USER):
        before, after = opened.split(SYSTEM)
        if after.endswith(before_user + USER + after_user):
            around["system"] = (before, after.removesuffix(before_user + USER + after_user))
    turns = Turns(lead, around, invitation)
    return turns if _fits(text, turns) else None


def go_template(turns: Turns) -> str:
    """The template in one line of Go: strings stand in quotes, so that no white space is lost."""
    roles = [
        f'if eq .Role "{role}" }}}}{_quote(before)}{{{{ .Content }}}}{_quote(after)}{{{{ '
        for role, (before, after) in turns.around.items()
    ]
    lead = _quote(turns.lead)
    if lead and "system" in turns.around:
        lead = f'{{{{ if ne (index .Messages 0).Role "system" }}}}{lead}{{{{ end }}}}'
    return f"{lead}{{{{ range .Messages }}}}{{{{ {'else '.join(roles)}end }}}}{{{{ end }}}}{_quote(turns.invitation)}"


def _quote(string: str) -> str:
    """A string of JSON is one of Go, too."""
    return f"{{{{ {json.dumps(string, ensure_ascii=False)} }}}}" if string else ""


def _fits(text: Text, turns: Turns) -> bool:
    """Whether longer conversations are written as the template does, but for the token that begins a sequence."""
    several = _messages(user="one", assistant="two\nlines") + _messages(user="3 {x}", assistant="four.")
    chats = [[*several, *_messages(user="five")]]
    if "system" in turns.around:
        chats.append([*_messages(system="Be kind."), *chats[0]])
    return all(_render(text, chat) == turns.render(chat) for chat in chats)


def _messages(**contents: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in contents.items()]


def _render(text: Text, messages: Messages, *, invite: bool = True) -> str | None:
    """What the template writes, without the token that begins a sequence where the server adds it; None: it refuses."""
    written, why = apply_template(text, messages, invite=invite)
    return None if why else _without_bos(text, written)


def _without_bos(text: Text, written: str) -> str:
    bos: str | None = text.tokenizer.bos_token
    adds = text.tokenizer("x")["input_ids"][:1] == [text.tokenizer.bos_token_id]
    return written.removeprefix(bos) if bos and adds else written


def _holds_once(rendered: str, *markers: str) -> bool:
    places = [rendered.find(marker) for marker in markers]
    return places == sorted(places) and all(rendered.count(marker) == 1 for marker in markers)
