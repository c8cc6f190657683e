"""The terminal chat, run as a command on a tiny random checkpoint."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from commands import run_module
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flowgrpo.models.hf import init_model, load_model, save_model
from flowgrpo.text import Conversation, add_action, add_messages, load_text, start

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
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
    save_model(path, model._replace(text=load_text(path)))
    return path


def command(folder, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "experiments.chat", f"--model={folder}", *arguments]


def run(folder, said: str, *arguments: str) -> subprocess.CompletedProcess:
    done = run_module(*command(folder, *arguments)[2:], said=said)
    assert done.returncode == 0, done.stderr
    return done


def test_a_pipe_gets_the_answers_alone_and_the_same_ones_again(folder):
    done = run(folder, "hello\n\nand now?\n", "--max_tokens=9")
    assert len(done.stdout) > 2
    assert not any(word in done.stdout for word in ("> ", "hello", *SPECIAL))
    assert run(folder, "hello\n\nand now?\n/quit\nnever\n", "--max_tokens=9").stdout == done.stdout
    assert run(folder, "hello\n\nand now?\n", "--max_tokens=9", "--seed=1").stdout != done.stdout


def greedy(model, conversation: Conversation, tokens: int) -> Conversation:
    """An answer by full forward passes over the whole conversation, without a cache."""
    allowed_v = np.arange(model.config.v) < model.text.vocab_size
    allowed_v[model.text.pad_id] = False
    ids = []
    while len(ids) < tokens and not (ids and ids[-1] in model.text.stop_ids):
        logits = model.policy.apply(model.params, np.array([[*conversation.tokens, *ids]]))[0][0, -1]
        ids.append(int(np.where(allowed_v, logits, -np.inf).argmax()))
    return add_action(conversation, ids)


def test_answers_are_those_of_the_whole_conversation_and_a_reset_forgets_it(folder):
    done = run(folder, "one\ntwo\n/reset\none\n", "--top_k=1", "--max_tokens=6", "--system=Be brief.")
    model = load_model(folder)
    first = start(model.text, [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"}])
    one = greedy(model, first, 6)
    second = add_messages(model.text, one, [{"role": "user", "content": "two"}])
    two = greedy(model, second, 6)
    said = [one.tokens[len(first.tokens) :], two.tokens[len(second.tokens) :], one.tokens[len(first.tokens) :]]
    words = [model.text.decode([i for i in ids if i not in model.text.stop_ids]) for ids in said]
    assert done.stdout == "".join(f"{word}\n" for word in words)


def test_a_full_conversation_is_said_and_ends_nothing(folder):
    done = run(folder, f"{'x' * 90}\nhi\n", "--context=60", "--max_tokens=500", "--top_p=0.9")
    assert "the conversation is full at 60 tokens" in done.stderr
    assert 0 < len(done.stdout) < 60


def test_ctrl_c_ends_the_answer_and_not_the_program(folder, tmp_path):
    """Where all logits are equal, the greedy answer is one token without end."""
    model = load_model(folder)
    save_model(tmp_path, model._replace(params=model.params | {"unembed": 0 * model.params["unembed"]}))
    arguments = command(tmp_path, "--top_k=1", "--max_tokens=20000", "--context=20100")
    pipe = subprocess.PIPE
    # Without a buffer, since `communicate` reads past it: what the first read took ahead would be lost.
    with subprocess.Popen(arguments, stdin=pipe, stdout=pipe, bufsize=0, cwd=ROOT) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"hello\n")
        said = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        said += process.communicate(b"/quit\n", timeout=120)[0]
    answer = said.decode()
    assert process.returncode == 0
    assert 1 <= answer.count("<|im_start|>") < 20_000
    assert answer.endswith(">\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model="], "--model is missing"),
        (["--model=/nowhere/at/all"], "/nowhere/at/all"),
        (["--temperature=0"], "--temperature=0.0 must be greater than 0; greedy is --top_k=1"),
        (["--top_k=65"], "--top_k=65 must be from 1 to 64"),
        (["--top_p=0"], "--top_p=0.0 must be greater than 0"),
        (["--max_tokens=0"], "--max_tokens=0 must be at least 1"),
    ],
)
def test_bad_flags_get_one_sentence_and_a_status(folder, arguments, words):
    done = run_module(*command(folder, *arguments)[2:])
    assert done.returncode == 1
    assert done.stdout == ""
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_folder_without_template_is_refused_before_anything_is_typed(folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for file in tmp_path.glob("*.jinja"):
        file.unlink()
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({k: v for k, v in json.loads(config.read_text()).items() if k != "chat_template"}))
    done = run_module(*command(tmp_path)[2:])
    assert done.returncode == 1
    assert "no chat template" in done.stderr
