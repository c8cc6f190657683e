"""The terminal chat, run as a command on a tiny random checkpoint."""

import json
import shutil
import signal
import subprocess
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from commands import run_module
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from experiments import chat
from flowgrpo.data.tokenizer import Conversation, add_action, add_messages, load_tokenizer, start_conversation
from flowgrpo.models.hf import init_model, load_model, save_model
from tests.experiments.conftest import check_refused

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = """
{%- for message in messages %}{{ "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>\\n" }}
{%- endfor %}{% if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One id for every printable ASCII character, and a chat template."""
    names = [*SPECIAL, "<unk>", "\n", *map(chr, range(32, 127))]
    backend = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(SPECIAL)
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint whose embedding has more rows than the tokenizer has ids."""
    path = tmp_path_factory.mktemp("chat")
    make_tokenizer().save_pretrained(path)
    source = {"model_type": "qwen2", "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48}
    source |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": 2}
    source |= {"initializer_range": 0.4}  # wide, so that an answer depends on all that was said
    model = init_model({**source, "tie_word_embeddings": False}, jax.random.key(0))
    save_model(path, model._replace(tokenizer=load_tokenizer(path)))
    return path


def run(folder, said: str, *arguments: str) -> subprocess.CompletedProcess:
    done = run_module("experiments.chat", f"--model={folder}", *arguments, stdin=said)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
def test_a_pipe_gets_only_answers_reproducibly_until_the_conversation_is_full(folder):
    given = ("--context=60", "--max_tokens=9", "--top_p=0.9")
    done = run(folder, f"hello\n\nand?\n{'x' * 90}\n", *given)
    assert "the conversation is full at 60 tokens" in done.stderr
    assert 2 < len(done.stdout) < 60
    assert not any(word in done.stdout for word in ("> ", "hello", *SPECIAL))
    assert run(folder, "hello\n\nand?\n/quit\nnever\n", *given).stdout == done.stdout


def greedy(model, conversation: Conversation, tokens: int) -> Conversation:
    """Answer by full forward passes over the whole conversation, without a cache."""
    allowed_v = np.arange(model.config.v) < model.tokenizer.vocab_size
    allowed_v[model.tokenizer.pad_id] = False
    apply, ids = jax.jit(model.policy.apply), []
    while len(ids) < tokens and not (ids and ids[-1] in model.tokenizer.stop_ids):
        said = [*conversation.tokens, *ids]
        tokens_rs = np.array([said + [0] * (128 - len(said))])  # which nothing before it attends to
        ids.append(int(np.where(allowed_v, apply(model.params, tokens_rs)[0][0, len(said) - 1], -np.inf).argmax()))
    return add_action(conversation, ids)


@pytest.mark.slow
def test_answers_are_those_of_the_whole_conversation_and_a_reset_forgets_it(folder):
    done = run(folder, "one\ntwo\n/reset\none\n", "--top_k=1", "--max_tokens=6", "--system=Be brief.")
    model = load_model(folder)
    first = start_conversation(
        model.tokenizer, [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"}]
    )
    one = greedy(model, first, 6)
    second = add_messages(model.tokenizer, one, [{"role": "user", "content": "two"}])
    two = greedy(model, second, 6)
    said = [one.tokens[len(first.tokens) :], two.tokens[len(second.tokens) :], one.tokens[len(first.tokens) :]]
    words = [model.tokenizer.decode([i for i in ids if i not in model.tokenizer.stop_ids]) for ids in said]
    assert done.stdout == "".join(f"{word}\n" for word in words)


def test_ctrl_c_ends_the_answer_and_not_the_program(capsys):
    def answer(*_given):
        yield [3, 4]
        signal.raise_signal(signal.SIGINT)
        yield [5]
        pytest.fail("the answer went on")

    text = SimpleNamespace(stop_ids=(0,), decode=lambda ids: "".join(map(str, ids)))
    before = signal.getsignal(signal.SIGINT)
    assert chat.speak(SimpleNamespace(text=text, answer=answer), None, None, 9) == [3, 4, 5]
    assert capsys.readouterr().out == "345\n"
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.slow
def test_a_folder_without_template_is_refused_before_anything_is_typed(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.jinja"))
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({k: v for k, v in json.loads(config.read_text()).items() if k != "chat_template"}))
    check_refused(run_module("experiments.chat", f"--model={tmp_path}"), "no chat template")
