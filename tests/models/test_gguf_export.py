"""GGUF files that are written here: ours read back, transformers' and llama.cpp's load of them.

FLOWGRPO_LLAMA_CPP names a Python that has llama-cpp-python, where it is not to be beside the package.
"""

import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf_models import SOURCES, TEXTS, cut_tokenizer, packaged, sentencepiece, text_of, tiny_model
from tokenizer_cases import STYLES, byte_level, fast
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
from tokenizers import models as tokenizer_models

import flowgrpo as fg
from flowgrpo.data.gguf_file import read_header
from flowgrpo.data.gguf_tokenizer import WORD_PATTERNS, build_tokenizer
from flowgrpo.data.gguf_vocabulary import tokenizer_metadata
from flowgrpo.data.tokenizer import start_conversation
from flowgrpo.models.config import rope_frequencies
from flowgrpo.models.decoder import matrices
from flowgrpo.models.gguf_export import TENSOR_TYPES, save_gguf_folder
from flowgrpo.models.hf import load_model
from flowgrpo.models.quantised import quantise_layers
from flowgrpo.training.names import GGUF_TYPES
from flowgrpo.types import BadInput

PEER = Path(__file__).parent / "llama_cpp_peer.py"
LLAMA_CPP = os.environ.get("FLOWGRPO_LLAMA_CPP")
NAMES = sorted(SOURCES)


def bits(model) -> int:
    return sum(x.size for x in model.params.values())


@pytest.mark.parametrize("name", NAMES)
def test_M5_a_file_reads_back_as_the_written_model(name, tmp_path):
    """M5: parameters bit for bit in float32, the same tokens, the same shape, by our own reader."""
    model = tiny_model(name)
    fg.models.save_gguf(tmp_path / "x.gguf", model, tensor_type="f32", name="tiny")
    again = load_model(tmp_path / "x.gguf")
    assert replace(again.config, ropes=model.config.ropes) == model.config
    for ours, theirs in zip(model.config.ropes, again.config.ropes, strict=True):  # of Llama 3, fitted to its factors
        np.testing.assert_allclose(rope_frequencies(theirs, 16), rope_frequencies(ours, 16), rtol=1e-6)
    for parameter, written in model.params.items():
        shift = model.config.norm_offset if parameter.endswith("norm") else 0.0  # stored as 1 + w, which rounds
        off = np.abs(np.asarray(again.params[parameter]) - np.asarray(written)).max()
        assert off <= (1.2e-7 if shift else 0.0), parameter
    ours, theirs = model.tokenizer, again.tokenizer
    assert [theirs.encode(text) for text in TEXTS] == [ours.encode(text) for text in TEXTS]
    assert [theirs.decode(ours.encode(text)) for text in TEXTS] == [ours.decode(ours.encode(text)) for text in TEXTS]
    messages = [{"role": "user", "content": "the number?"}]
    assert start_conversation(theirs, messages) == start_conversation(ours, messages)
    assert theirs.stop_ids == ours.stop_ids
    assert read_header(tmp_path / "x.gguf").metadata["general.name"] == "tiny"


def test_M5_other_types_round_as_they_say(tmp_path):
    """M5: a matrix is off by half a step of its type, and what has one axis is not rounded."""
    model = tiny_model("qwen2")
    for tensor_type in TENSOR_TYPES:
        fg.models.save_gguf(tmp_path / "x.gguf", model, tensor_type=tensor_type)
        file = read_header(tmp_path / "x.gguf")
        stored = {tensor.kind.name.lower() for name, tensor in file.tensors.items() if len(tensor.shape) > 1}
        assert stored == {tensor_type}
        assert {tensor.kind.name for tensor in file.tensors.values() if len(tensor.shape) == 1} == {"F32"}
        again = load_model(tmp_path / "x.gguf", tokenizer=False)
        for parameter in ("q", "down", "embed", "norm", "q_bias"):
            written, read = (np.asarray(each.params[parameter]) for each in (model, again))
            largest = np.abs(written).max()
            step = {"f32": 0.0, "f16": 2.0**-11, "bf16": 2.0**-8, "q8_0": 0.5 / 127 + 2.0**-11}[tensor_type]
            step = 0.0 if parameter in ("norm", "q_bias") else step
            assert np.abs(read - written).max() <= step * largest, (tensor_type, parameter)
            assert step == 0.0 or np.abs(read - written).max() > 0


def test_rows_that_blocks_do_not_fill_are_float16(tmp_path):
    fg.models.save_gguf(tmp_path / "x.gguf", tiny_model("qwen3", intermediate_size=88), tensor_type="q8_0")
    kinds = {name: tensor.kind.name for name, tensor in read_header(tmp_path / "x.gguf").tensors.items()}
    assert (kinds["blk.0.ffn_down.weight"], kinds["blk.0.ffn_up.weight"]) == ("F16", "Q8_0")


# The vocabulary -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["smollm", "qwen2", "llama-bpe", "tekken", "default", "gpt-2"])
def test_the_pretokenizer_is_identified_by_its_behaviour(name):
    backend = cut_tokenizer(name)
    backend.model.ignore_merges = name in ("llama-bpe", "tekken")
    text = text_of(fast(backend, STYLES["qwen2.5"], None))
    assert tokenizer_metadata(text, 400)["tokenizer.ggml.pre"] == name


def test_published_forms_of_the_rules_are_found():
    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)])
    folded = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)" + WORD_PATTERNS["qwen2"][0].partition(")")[2]
    qwen = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(folded), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    for rule, name in ((digits, "smollm"), (qwen, "qwen2"), (pre_tokenizers.ByteLevel(False), "gpt-2")):
        backend = byte_level()
        backend.pre_tokenizer = rule
        words = tokenizer_metadata(text_of(fast(backend, STYLES["qwen2.5"], None)), 400)
        assert words["tokenizer.ggml.pre"] == name
        assert words["tokenizer.ggml.tokens"][-1] == "[PAD399]"


@pytest.mark.parametrize("prefix", [False, True])
def test_M5_sentencepiece_is_read_back_from_its_scores(prefix):
    """M5: the order of merges survives as scores, with a space before a text and without."""
    backend = sentencepiece()
    if prefix:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), backend.normalizer])
    tokenizer = fast(backend, STYLES["mistral"], None, unk_token="<unk>")
    words = tokenizer_metadata(text_of(tokenizer), 400)
    assert words["tokenizer.ggml.add_space_prefix"] is prefix
    again = build_tokenizer(Path("x.gguf"), words)
    for text in [*TEXTS, "x [INST] y</s>", " a"]:
        assert again.encode(text, add_special_tokens=False) == tokenizer.encode(text, add_special_tokens=False)


def broken(change) -> object:
    backend = byte_level()
    change(backend)
    return backend


def set_pre(backend, rule) -> None:
    backend.pre_tokenizer = rule


def set_normalizer(backend, rule) -> None:
    backend.normalizer = rule


NO_FORM = [
    (lambda: broken(lambda b: set_pre(b, pre_tokenizers.ByteLevel(True))), "by a rule that llama.cpp has no name for"),
    (lambda: broken(lambda b: set_pre(b, pre_tokenizers.Whitespace())), "by a rule that llama.cpp has no name for"),
    (lambda: broken(lambda b: set_normalizer(b, normalizers.Lowercase())), "changes text by Lowercase"),
    (lambda: Tokenizer(tokenizer_models.WordLevel({"a": 0, "?": 1}, unk_token="?")), "is a WordLevel, and GGUF has"),
]


@pytest.mark.parametrize(("make", "why"), NO_FORM, ids=[why for _, why in NO_FORM])
def test_a_tokenizer_without_a_form_is_one_sentence(make, why):
    text = text_of(fast(make(), STYLES["qwen2.5"], None))
    with pytest.raises(BadInput, match=f"the tokenizer of tiny .*{why}.*: export it as a folder"):
        tokenizer_metadata(text, 400)


def test_sentencepiece_that_splits_or_lacks_bytes_is_one_sentence():
    split = sentencepiece()
    split.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    with pytest.raises(BadInput, match="splits text before it merges"):
        tokenizer_metadata(text_of(fast(split, STYLES["gemma"], None)), 400)
    state = json.loads(sentencepiece().to_str())
    state["model"]["vocab"] = {token.replace("<0x41>", "<>"): i for token, i in state["model"]["vocab"].items()}
    with pytest.raises(BadInput, match="has no token <0x41>"):
        tokenizer_metadata(text_of(fast(Tokenizer.from_str(json.dumps(state)), STYLES["gemma"], None)), 400)


# The folder ---------------------------------------------------------------------------------------------


def test_a_folder_has_a_modelfile_and_is_replaced_whole(tmp_path):
    model, folder = tiny_model("qwen2"), tmp_path / "planner"
    for temperature in (0.7, 0.5):
        save_gguf_folder(folder, model, temperature=temperature, card="# Tiny\n")
        assert sorted(path.name for path in folder.iterdir()) == ["Modelfile", "README.md", "planner.gguf"]
        lines = (folder / "Modelfile").read_text().splitlines()
        assert lines[:2] == ["FROM ./planner.gguf", f"PARAMETER temperature {temperature}"]
        assert lines[2:4] == ['PARAMETER stop "<|endoftext|>"', 'PARAMETER stop "<|im_end|>"']
        assert len(lines) == 5
        assert lines[4].startswith('TEMPLATE """{{ if ne (index .Messages 0).Role "system" }}{{ "<|im_start|>system')
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(BadInput, match=r"holds notes.txt, which is no part of a GGUF model: name a new folder"):
        save_gguf_folder(folder, model)
    assert (folder / "planner.gguf").stat().st_size > bits(model)


@pytest.mark.parametrize("limit", [4096, 120_000])  # within the metadata, and within the tensors
def test_a_full_disk_keeps_the_old_file(tmp_path, limit):
    model, place = tiny_model("qwen2"), tmp_path / "x.gguf"
    fg.models.save_gguf(place, model)
    before = place.read_bytes()
    assert len(before) > limit
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(BadInput, match=r"x\.gguf could not be written \(File too large\): make room"):
            fg.models.save_gguf(place, model, tensor_type="f32")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert place.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["x.gguf"]


def test_what_can_not_be_written_is_one_sentence(tmp_path):
    model, place = tiny_model("qwen2"), tmp_path / "x.gguf"
    params = model.params

    def refuse(match: str, changed=model, **options) -> None:
        with pytest.raises(BadInput, match=match):
            fg.models.save_gguf(place, changed, **options)
        assert not place.exists()

    assert tuple(TENSOR_TYPES) == GGUF_TYPES
    refuse("not written as 'q4_k': choose one of f16, bf16, f32, q8_0", tensor_type="q4_k")
    refuse("type olmo2 has no name in GGUF: choose a llama, qwen2", model._replace(hf_config={"model_type": "olmo2"}))
    refuse("a model without a tokenizer", model._replace(tokenizer=None))
    refuse("holds numbers too large for f16: choose bf16", model._replace(params={**params, "q": params["q"] * 1e6}))
    missing = np.full(64, np.nan, np.float32)
    refuse("parameter norm holds NaN or infinity", model._replace(params={**params, "norm": missing}))
    refuse("q is quantised", model._replace(params=quantise_layers(params, matrices(model.config), kind="int8")))
    refuse("adds no o_bias in a qwen3", tiny_model("qwen3", attention_bias=True))
    refuse(
        r"by the root of 16, and the model by that of 20 \(query_pre_attn_scalar\)",
        tiny_model("gemma3", query_pre_attn_scalar=20),
    )
    place.write_text("notes")
    with pytest.raises(BadInput, match=r"x.gguf is there and is no GGUF file: name a new file"):
        fg.models.save_gguf(place, model)
    assert place.read_text() == "notes"


# Others -------------------------------------------------------------------------------------------------


def forward(model, prompt: list[int], answer: list[int]) -> tuple[np.ndarray, list[int]]:
    """Logits after the prompt, and the likeliest id after it and after each id of the answer but the last.

    An answer is greedy exactly where it is what this gives, which takes one pass over all of it.
    """
    tokens_rs = jnp.asarray([[*prompt, *answer]])
    positions_rs, real_rs = jnp.arange(tokens_rs.shape[1])[None], jnp.ones_like(tokens_rs)
    logits_sv = np.asarray(jax.jit(model.policy.apply)(model.params, tokens_rs, positions_rs, real_rs)[0])[0]
    return logits_sv[len(prompt) - 1], logits_sv[len(prompt) - 1 : -1].argmax(-1).tolist()


@cache
def real(name: str):
    """A model of a package, which is none of ours."""
    return load_model(packaged(name))


def prompts_of(model) -> list[list[int]]:
    if not model.tokenizer.hf_tokenizer.chat_template:  # of a base model
        bos = model.tokenizer.hf_tokenizer.bos_token_id
        return [[bos, *model.tokenizer.encode("The capital of France is")]]
    ask = "What is the capital of France?"
    return [list(start_conversation(model.tokenizer, [{"role": "user", "content": ask}]).tokens)]


def model_of(name: str):
    return tiny_model(name.removeprefix("tiny ")) if name.startswith("tiny ") else real(name)


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_M5_transformers_opens_the_export_and_answers_alike(name, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    model = real(name)
    fg.models.save_gguf(tmp_path / "x.gguf", model, tensor_type="f16")
    rounded = load_model(tmp_path / "x.gguf")
    peer = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="x.gguf", dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    peer.generation_config.eos_token_id = None  # never stops early
    for prompt in prompts_of(model):
        with torch.no_grad():
            theirs = peer(torch.tensor([prompt])).logits[0, -1].numpy()
            whole = peer.generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False)
        answer = whole[0, len(prompt) :].tolist()
        assert len(answer) == 30
        first, ours = forward(rounded, prompt, answer)
        assert np.abs(theirs - first).max() < 1e-4
        assert answer == ours


@pytest.mark.oracle
@pytest.mark.skipif(LLAMA_CPP is None, reason="llama.cpp: FLOWGRPO_LLAMA_CPP names a Python with llama-cpp-python")
@pytest.mark.parametrize("tensor_type", ["f16", "q8_0"])
@pytest.mark.parametrize("name", ["smollm2", "gemma3", *(f"tiny {name}" for name in NAMES)])
def test_M5_llama_cpp_opens_the_export_and_answers_alike(name, tensor_type, tmp_path):
    model = model_of(name)
    fg.models.save_gguf(tmp_path / "x.gguf", model, tensor_type=tensor_type)
    rounded = load_model(tmp_path / "x.gguf")
    prompts = prompts_of(model)
    wanted = json.dumps({"prompts": prompts, "texts": TEXTS[:-1], "count": 32})
    done = subprocess.run(
        [LLAMA_CPP or sys.executable, PEER, tmp_path / "x.gguf"],
        input=wanted,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = json.loads(done.stdout)
    assert theirs["tokens"] == [model.tokenizer.encode(text) for text in TEXTS[:-1]]
    for prompt, logits, answer in zip(prompts, theirs["logits"], theirs["answers"], strict=True):
        first, ours = forward(rounded, prompt, answer)
        print(name, tensor_type, "largest difference of logits", np.abs(np.asarray(logits) - first).max())
        if tensor_type == "f16":  # of q8_0, llama.cpp rounds the activations to 8 bits, too
            assert answer == ours
