"""Chat templates for models that come without one, by name, or as a file of Jinja.

    read_template("gemma"), read_template("mine.jinja") -> the template

A base model has rarely seen the control tokens of its tokenizer: `plain` uses only the end-of-sequence token, and
`lines` not even that: an answer is one line, and ends with it if a line break is a token of its own, as for Gemma.
After six worked examples and no training 97 % of Gemma 3 270M's actions are well-formed with `lines`, and 4 % with
`plain`. Both prompt for an answer with a whole line: a space at its end would be a token of its own in the prompt, and
part of a word in the examples. In both, turns are separated by text that a tool could write, too.
"""

from pathlib import Path

from flowgrpo.types import BadInput

TEMPLATES = {
    "chatml": (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "gemma": (
        "{{ bos_token }}{% for message in messages %}<start_of_turn>"
        "{{ 'model' if message.role == 'assistant' else message.role }}\n{{ message.content }}<end_of_turn>\n"
        "{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
    "lines": (
        "{{ bos_token }}{% for message in messages %}{% if message.role == 'assistant' %}>>>\n{% endif %}"
        "{{ message.content }}\n{% endfor %}{% if add_generation_prompt %}>>>\n{% endif %}"
    ),
    "plain": (
        "{{ bos_token }}{% for message in messages %}"
        "{% if message.role == 'assistant' %}>>>\n{{ message.content }}{{ eos_token }}\n"
        "{% else %}{{ message.content }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}>>>\n{% endif %}"
    ),
}


def read_template(name: str) -> str:
    """The template of this name, or in this file."""
    if name in TEMPLATES:
        return TEMPLATES[name]
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        fix = f"give a file of Jinja, or one of {', '.join(TEMPLATES)}"
        raise BadInput(f"the chat template {name} can't be read ({why}): {fix}") from None
