"""A Modelfile for Ollama: what stands around each message is read off the chat template, where that is all it does."""

import json
import re

import pytest
from gguf_models import text_of
from tokenizer_cases import NAMES, STYLES, byte_level, fast, says

from flowgrpo.data.modelfile import go_template, infer_turn_format, write_modelfile
from flowgrpo.data.tokenizer import apply_template

CHATML = {role: (f"<|im_start|>{role}\n", "<|im_end|>\n") for role in ("user", "assistant", "system")}


def styled(name: str, template: str | None = None):
    text = text_of(fast(byte_level(), STYLES[name], STYLES[name].template))
    if template is not None:
        text.hf_tokenizer.chat_template = template
    return text


def run_go(template: str, messages: list[dict[str, str]]) -> str:
    """Carry out the few actions of Go's templates that are used: conditions, a range, strings and contents."""
    pieces = re.split(r"\{\{ (.*?) \}\}(?=\{\{ |$)", template)
    assert not any(pieces[::2]), "text stands in actions alone"
    actions = pieces[1::2]

    def block(at: int, message: dict[str, str] | None, runs: bool) -> tuple[str, int]:
        """What the actions from `at` on write, up to the `else` or `end` that closes them."""
        out = ""
        while at < len(actions) and not actions[at].startswith(("else", "end")):
            action, at = actions[at], at + 1
            if action == "range .Messages":
                written = [block(at, each, runs) for each in messages]
                out, at = out + "".join(part for part, _ in written), written[0][1] + 1
            elif action.startswith("if "):
                part, at = branches(action, at, message, runs)
                out += part
            elif runs:
                out += message["content"] if message and action == ".Content" else json.loads(action)
        return out, at

    def branches(action: str, at: int, message: dict[str, str] | None, runs: bool) -> tuple[str, int]:
        """What the first branch writes whose condition holds."""
        out, is_open = "", runs
        while True:
            operator, *_, value = action.removeprefix("else ").removeprefix("if ").split()
            role = message["role"] if message else messages[0]["role"]
            holds = (role == json.loads(value)) == (operator == "eq")
            part, at = block(at, message, is_open and holds)
            out, is_open = out + part, is_open and not holds
            action, at = actions[at], at + 1
            if action == "end":
                return out, at

    return block(0, None, True)[0]


def test_turn_format_of_chatml_by_hand():
    turns = infer_turn_format(styled("qwen2.5"))
    assert turns is not None
    assert turns.around == CHATML
    assert turns.lead == "<|im_start|>system\nBe helpful.<|im_end|>\n"
    assert turns.invitation == "<|im_start|>assistant\n"
    assert go_template(turns._replace(lead="", around={"user": CHATML["user"]})) == (
        '{{ range .Messages }}{{ if eq .Role "user" }}{{ "<|im_start|>user\\n" }}{{ .Content }}{{ "<|im_end|>\\n" }}'
        '{{ end }}{{ end }}{{ "<|im_start|>assistant\\n" }}'
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_go_template_renders_like_the_chat_template(name):
    text = styled(name)
    turns = infer_turn_format(text)
    assert turns is not None
    chats = [[says("user", "a {{ b }}"), says("assistant", 'says "c"'), says("user", "d")], [says("user", "alone")]]
    if "system" in turns.around:
        chats.append([says("system", "be kind"), *chats[0]])
    for chat in chats:
        written, why = apply_template(text, chat)
        assert not why
        assert turns.render(chat) == run_go(go_template(turns), chat) == written


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ loop.index }}{{ m.content }}\n{% endfor %}",  # counts
        "{% for m in messages %}{{ m.role }}:{{ m.content | upper }}\n{% endfor %}",  # changes what is said
        "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}{{ messages | length }}",  # counts at the end
        "{{ messages[-1].content }}",  # forgets
        "{{ raise_exception('no') }}",
        "",
    ],
)
def test_a_template_that_does_more_has_no_turn_format(template, tmp_path):
    text = styled("qwen2.5", template)
    assert infer_turn_format(text) is None
    write_modelfile(tmp_path / "Modelfile", text, "x.gguf")
    assert (
        tmp_path / "Modelfile"
    ).read_text() == 'FROM ./x.gguf\nPARAMETER stop "<|endoftext|>"\nPARAMETER stop "<|im_end|>"\n'
