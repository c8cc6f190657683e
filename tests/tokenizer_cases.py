"""Small tokenizers in the styles of the model families, with their chat templates."""

from dataclasses import dataclass

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

# The styles -------------------------------------------------------------------------------------------

TOOL_TURNS = """
  {%- elif message.role == "tool" %}
    {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{ "<|im_start|>user" }}{% endif %}
    {{- "\\n<tool_response>\\n" + message.content + "\\n</tool_response>" }}
    {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{ "<|im_end|>\\n" }}{% endif %}
"""
END_OF_CHATML = """{%- endif %}{% endfor %}{% if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}"""

QWEN25 = (
    """
{%- set system = messages[0].content if messages[0].role == "system" else "Be helpful." %}
{{- "<|im_start|>system\\n" + system }}
{%- if tools %}{{ "\\n<tools>" }}
  {%- for tool in tools %}{{ "\\n" + tool | tojson }}{% endfor %}{{ "\\n</tools>" }}{% endif %}
{{- "<|im_end|>\\n" }}
{%- for message in messages %}
  {%- if message.role in ["user", "assistant"] or (message.role == "system" and not loop.first) %}
    {{- "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>\\n" }}"""
    + TOOL_TURNS
    + END_OF_CHATML
)

QWEN3 = (
    """
{%- for message in messages %}
  {%- if message.role in ["user", "system"] %}
    {{- "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>\\n" }}
  {%- elif message.role == "assistant" %}
    {%- set said = message.content.split("</think>")[-1].lstrip("\\n") %}
    {{- "<|im_start|>assistant\\n" + said.strip() + "<|im_end|>\\n" }}"""
    + TOOL_TURNS
    + END_OF_CHATML
    + """{%- if add_generation_prompt and enable_thinking is defined and not enable_thinking %}
{{- "<think>\\n\\n</think>\\n\\n" }}{% endif %}"""
)

LLAMA3 = """{{- bos_token }}
{%- for message in messages %}
  {%- set role = "ipython" if message.role == "tool" else message.role %}
  {{- "<|start_header_id|>" + role + "<|end_header_id|>\\n\\n" }}
  {{- (message.tool_calls[0].function | tojson if message.tool_calls else message.content | trim) + "<|eot_id|>" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}{% endif %}"""

MISTRAL = """
{%- if messages[0].role == "system" %}{% set system = messages[0].content + "\\n\\n" %}{% set rest = messages[1:] %}
{%- else %}{% set system = "" %}{% set rest = messages %}{% endif %}
{{- bos_token }}
{%- for message in rest %}
  {%- if message.role in ["user", "assistant"] and (message.role == "user") != (loop.index0 % 2 == 0) %}
    {{- raise_exception("After the optional system message, roles must alternate user/assistant/user/...") }}
  {%- endif %}
  {%- if message.role == "user" %}{{ "[INST] " + (system if loop.last else "") + message.content + "[/INST]" }}
  {%- elif message.role == "assistant" %}{{ " " + message.content | trim + eos_token }}
  {%- elif message.role == "tool" %}{{ '[TOOL_RESULTS] {"content": ' + message.content | tojson + "}[/TOOL_RESULTS]" }}
  {%- else %}{{ raise_exception("Only user, assistant and tool roles are supported!") }}{% endif %}
{%- endfor %}"""

GEMMA = """{{- bos_token }}
{%- if messages[0].role == "system" %}{{ raise_exception("System role not supported") }}{% endif %}
{%- for message in messages %}
  {%- if (message.role == "user") != (loop.index0 % 2 == 0) %}
    {{- raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
  {%- endif %}
  {%- set role = "model" if message.role == "assistant" else message.role %}
  {{- "<start_of_turn>" + role + "\\n" + message.content | trim + "<end_of_turn>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<start_of_turn>model\\n" }}{% endif %}"""


@dataclass(frozen=True)
class Style:
    """A family: its template, its tokens, and by hand what stands between a closed action and the next one."""

    template: str
    special: tuple[str, ...]
    eos: str  # as the tokenizer has it
    closing: str  # as the template has it
    glue: str  # after the closing token, with {} for what the user says
    added: tuple[str, ...] = ()  # known to the tokenizer, but not special
    bos: str | None = None
    lead: str = ""  # what the template writes between the invitation and the assistant's words


CHATML = {
    "special": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "added": ("<think>", "</think>", "<tool_response>", "</tool_response>"),
    "eos": "<|endoftext|>",
    "closing": "<|im_end|>",
    "glue": "\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
}
HEADERS = ("<|pad|>", "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
LLAMA_GLUE = "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
INST = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
TURNS = ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>")
GEMMA_GLUE = "\n<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n"
STYLES = {
    "qwen2.5": Style(QWEN25, **CHATML),
    "qwen3": Style(QWEN3, **CHATML),
    "llama3": Style(LLAMA3, HEADERS, "<|end_of_text|>", "<|eot_id|>", LLAMA_GLUE, bos="<|begin_of_text|>"),
    "mistral": Style(MISTRAL, INST, "</s>", "</s>", "[INST] {}[/INST]", bos="<s>", lead=" "),
    "gemma": Style(GEMMA, TURNS, "<eos>", "<end_of_turn>", GEMMA_GLUE, bos="<bos>"),
}
NAMES = sorted(STYLES)
LINES = ["the capital of France is Paris", "the answer is the number of the line", "user assistant system tool"]


def says(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


USER = says("user", "the number?")


def fast(backend: Tokenizer, style: Style, template: str | None, **kinds) -> PreTrainedTokenizerFast:
    """A tokenizer of transformers around `backend`, with the tokens of `style`."""
    backend.add_special_tokens(list(style.special))
    backend.add_tokens(list(style.added))
    fields = {"eos_token": style.eos, **({"bos_token": style.bos} if style.bos else {}), **kinds}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **fields)
    tokenizer.chat_template = template
    return tokenizer


def byte_level() -> Tokenizer:
    """Byte-level BPE, trained on a few lines: it encodes every string, in one way of many."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(LINES, trainer)
    return backend


def render(text, messages, **options) -> list[int]:
    """Transformers' own way: the whole conversation as one string, tokenised at once."""
    return text.hf_tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **options)
