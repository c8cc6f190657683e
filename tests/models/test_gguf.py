"""GGUF files of random models are read exactly (M5), and invalid files are refused with the reason."""

import sys

import numpy as np
import pytest
from gguf_cases import CASES, TYPES, gguf_model, rope_factors, write_gguf
from tokenizers import pre_tokenizers

from flowgrpo.data import gguf_file, named_models
from flowgrpo.data.named_models import ModelPackage
from flowgrpo.models import free_memory, gguf, hf
from flowgrpo.models.config import Rope, rope_frequencies
from flowgrpo.models.decoder import parameters
from flowgrpo.models.families import checkpoint_tensors, decoder_config, file_shape, from_file, text_model_config
from flowgrpo.models.gguf import fit_llama3
from flowgrpo.types import BadInput


def assert_holds(actual: hf.Model, expected: dict[str, np.ndarray], dtype="float32"):
    """The parameters are those of the tensors."""
    for parameter, tensor in checkpoint_tensors(actual.config).items():
        axes = parameters(actual.config)[parameter].axes
        for layer in range(actual.config.num_layers) if axes.startswith("n") else [None]:
            value = actual.params[parameter] if layer is None else actual.params[parameter][layer]
            wanted = from_file(expected[tensor.name.format(n=layer)], tensor, axes.removeprefix("n"), actual.config)
            np.testing.assert_array_equal(value, wanted.astype(value.dtype), err_msg=parameter)
            assert value.dtype == dtype


@pytest.mark.parametrize("name", CASES)
def test_M5_gguf_of_each_architecture_equals_its_folder(tmp_path, name):
    model = gguf_model(name)
    expected = write_gguf(tmp_path / "model.gguf", model)
    again = hf.load_model(tmp_path / "model.gguf", tokenizer=False)
    assert again.config == model.config
    assert_holds(again, expected)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3"])
def test_M5_weights_of_each_tensor_type_are_decoded(tmp_path, name, kind):
    expected = write_gguf(tmp_path / "model.gguf", gguf_model(name), kind)
    again = hf.load_model(tmp_path / "model.gguf", tokenizer=False, dtype="bfloat16")
    assert_holds(again, expected, "bfloat16")


def read(path, **settings):
    return hf.load_model(path, tokenizer=False, **settings)


def test_rope_factors_of_llama3_give_its_settings_back():
    for low, high, length in [(1.0, 4.0, 8192), (1.0, 4.0, 64), (2.0, 3.0, 128)]:
        rope = Rope(theta=1e4, kind="llama3", factor=8.0, low_factor=low, high_factor=high, original_length=length)
        fitted = fit_llama3(rope_factors(rope, 64), 1e4, 64)
        names = ("factor", "low_factor", "high_factor", "original_length")
        again = Rope(theta=1e4, kind="llama3", **dict(zip(names, fitted.values(), strict=True)))
        np.testing.assert_allclose(rope_frequencies(again, 64), rope_frequencies(rope, 64), rtol=2e-5)
    with pytest.raises(BadInput, match="does not follow the rule of Llama 3"):
        fit_llama3(np.linspace(1, 8, 32), 1e4, 64)


@pytest.mark.parametrize("name", [name for name in CASES if name != "mistral"])
def test_the_tables_are_inverse_to_each_other(name):
    model = gguf_model(name)
    config = model.config
    metadata = gguf.to_metadata(model.hf_config, config, 256)
    architecture = metadata["general.architecture"]
    shapes = {name.format(n=n): (config.v,) for name in gguf.tensor_names(config).values() for n in range(2)}
    factors = gguf.rope_factors(config)
    source = gguf.from_metadata(metadata, shapes, factors)
    assert decoder_config(text_model_config(source)) == config
    for parameter, tensor in checkpoint_tensors(config).items():
        array = np.random.default_rng(0).normal(size=file_shape(tensor, config))
        stored = gguf.to_gguf(array, parameter, config, architecture)
        np.testing.assert_allclose(gguf.from_gguf(stored, parameter, config, architecture), array, atol=1e-12)


def test_a_name_is_a_path_then_a_package_then_hub_id(tmp_path, monkeypatch):
    packages = tmp_path / "packages"
    model = gguf_model("llama")
    for module in ("one", "parts_a", "parts_b"):
        (packages / module).mkdir(parents=True)
        (packages / module / "__init__.py").write_text("raise RuntimeError('imported')")
    expected = write_gguf(packages / "one" / "small.gguf", model)
    data = (packages / "one" / "small.gguf").read_bytes()
    (packages / "parts_a" / "x.part00").write_bytes(data[:1000])
    (packages / "parts_b" / "x.part01").write_bytes(data[1000:])
    parts = ModelPackage("pip install two", (("parts_a", "*.part00"), ("parts_b", "*.part01")), "whole.gguf")
    named = {
        "one": ModelPackage("pip install one", (("one", "*.gguf"),), ""),
        "two": parts,
        "none": ModelPackage("pip install none", (("no", ""),), ""),
    }
    monkeypatch.setattr(named_models, "NAMED_MODELS", named)
    monkeypatch.syspath_prepend(packages)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        assert_holds(read(name), expected)
    assert (tmp_path / "cache/flowgrpo/models/whole.gguf").read_bytes() == data
    with pytest.raises(BadInput, match=r"the model none is in a package that is not installed: pip install none"):
        read("none")
    (tmp_path / "one").mkdir()
    with pytest.raises(BadInput, match=r"one/config\.json is missing"):
        read("one")


def test_a_model_larger_than_memory_is_refused_before_reading(tmp_path, monkeypatch):
    write_gguf(tmp_path / "model.gguf", gguf_model("llama"))
    size = sum(value.nbytes for value in read(tmp_path / "model.gguf").params.values())
    fixes = [(0.6, "load it in dtype bfloat16"), (0.4, "quantised to int8"), (0.01, "take a model of at most")]
    for part, fix in fixes:
        monkeypatch.setattr(free_memory, "free_bytes", lambda part=part: int(part * size))
        with pytest.raises(BadInput, match=rf"model\.gguf: its parameters take .* in float32, and .* free: .*{fix}"):
            read(tmp_path / "model.gguf")
    monkeypatch.setattr(free_memory, "free_bytes", lambda: int(0.6 * size))
    read(tmp_path / "model.gguf", dtype="bfloat16")
    hf.save_model(tmp_path / "folder", gguf_model("llama"))
    with pytest.raises(BadInput, match=r"folder: its parameters take"):
        read(tmp_path / "folder")


def test_free_memory_is_the_least_of_system_and_container(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 100 kB\nMemAvailable: 50 kB\n")
    assert free_memory.host_free_bytes(meminfo, tmp_path) == 50 * 1024
    for name, text in {"memory.max": "30000", "memory.current": "20000", "memory.stat": "inactive_file 5000\n"}.items():
        (tmp_path / name).write_text(text)
    assert free_memory.host_free_bytes(meminfo, tmp_path) == 15000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory.host_free_bytes(meminfo, tmp_path) == 50 * 1024


# What is wrong with a file ------------------------------------------------------------------------------


def test_a_cut_file_is_refused_wherever_it_is_cut(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, gguf_model("qwen2"))
    data = path.read_bytes()
    cuts = [0, 3, 20, 30, 100, 700, len(data) // 2, len(data) - 64]
    for cut in cuts:
        path.write_bytes(data[:cut])
        with pytest.raises(BadInput, match=r"model\.gguf (is cut|is no GGUF file).*copy the file again"):
            read(path)


@pytest.mark.parametrize(
    ("at", "new", "message"),
    [
        (0, b"PK\3\4", r"is no GGUF file: it begins with b'PK"),
        (4, b"\1\0\0\0", "is of version 1, and only versions 2 and 3 can be read"),
        (4, b"\0\0\0\3", "has its bytes in the order of big-endian machines"),
        (8, b"\xff" * 8, "claims .* tensors, more than"),
        (24, b"\xff" * 8, "is cut within its header"),
    ],
)
def test_an_invalid_header_is_refused(tmp_path, at, new, message):
    path = tmp_path / "model.gguf"
    write_gguf(path, gguf_model("qwen2"))
    data = bytearray(path.read_bytes())
    data[at : at + len(new)] = new
    path.write_bytes(data)
    with pytest.raises(BadInput, match=message):
        read(path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "mamba"}, r"model\.gguf: general.architecture is 'mamba', which is not supported"),
        ({"qwen2.block_count": None}, r"model\.gguf: qwen2.block_count is missing in its metadata"),
        ({"qwen2.block_count": 3}, r"blk\.2\.attn_norm\.weight is missing"),
        ({"qwen2.block_count": "two"}, r"model\.gguf: num_hidden_layers is 'two', but must be a whole number"),
        ({"qwen2.attention.head_count": 3}, "qwen2.attention.head_count is 3, which does not divide"),
        ({"qwen2.attention.value_length": 16}, "value_length is 16, but its keys have 64 numbers"),
        ({"qwen2.expert_count": 8}, "mixture of experts is not supported"),
        ({"qwen2.rope.scaling.type": "longrope"}, "rope.scaling.type is 'longrope', which is not supported"),
        ({"qwen2.rope.dimension_count": 32}, "rotates whole heads, of 64"),
        ({"general.alignment": 24}, "general.alignment is 24, but must be a power of two"),
    ],
)
def test_invalid_metadata_are_refused_by_field(tmp_path, metadata, message):
    write_gguf(tmp_path / "model.gguf", gguf_model("qwen2"))
    header = gguf_file.read_header(tmp_path / "model.gguf")
    write_gguf(tmp_path / "model.gguf", gguf_model("qwen2"), metadata=metadata)
    with pytest.raises(BadInput, match=message):
        read(tmp_path / "model.gguf")
    assert header.metadata["general.architecture"] == "qwen2"


@pytest.mark.parametrize(
    ("tensor", "data", "message"),
    [
        ("blk_1_attn_q_weight", np.zeros((0,), np.float32), r"1 wrong: blk\.1\.attn_q\.weight is missing"),
        ("output_norm_weight", np.zeros((48,), np.float32), r"output_norm\.weight has shape \[48\] and not \[256\]"),
        ("blk_0_ffn_up_weight", np.full((256, 256), np.nan, np.float32), r"ffn_up\.weight \(F32\) holds NaN"),
    ],
)
def test_tensors_that_contradict_the_metadata_are_refused_by_name(tmp_path, tensor, data, message):
    write_gguf(tmp_path / "model.gguf", gguf_model("qwen2"), **{tensor: data})
    with pytest.raises(BadInput, match=message):
        read(tmp_path / "model.gguf")


def test_a_non_finite_scale_is_refused_by_its_tensor(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, gguf_model("llama"), "Q8_0")
    tensor = gguf_file.read_header(path).tensors["blk.0.ffn_down.weight"]
    data = bytearray(path.read_bytes())
    data[tensor.offset : tensor.offset + 2] = np.float16(np.inf).tobytes()
    path.write_bytes(data)
    with pytest.raises(BadInput, match=r"ffn_down\.weight \(Q8_0\) holds NaN or infinity, from the scale of a block"):
        read(path)


def test_an_unknown_tensor_type_is_refused_by_tensor_and_number(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, gguf_model("llama"))
    data = path.read_bytes()
    at = data.index(b"token_embd.weight") + len("token_embd.weight") + 4 + 16
    for kind, name in ((99, "99"), (26, "I32")):
        path.write_bytes(data[:at] + kind.to_bytes(4, "little") + data[at + 4 :])
        with pytest.raises(BadInput, match=rf"token_embd\.weight is of the type {name}, .*Q8_0"):
            read(path)


def test_errors_for_parts_a_missing_file_and_a_missing_package(tmp_path, monkeypatch):
    write_gguf(tmp_path / "big-00002-of-00003.gguf", gguf_model("llama"))
    with pytest.raises(
        BadInput, match=r"is part 2 of 3: join them by `llama-gguf-split --merge big-00001-of-00003.gguf"
    ):
        read(tmp_path / "big-00002-of-00003.gguf")
    with pytest.raises(BadInput, match=r"nowhere\.gguf does not exist: give a GGUF file"):
        read("nowhere.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(BadInput, match=r"package gguf, which is not installed: pip install"):
        read(tmp_path / "big-00002-of-00003.gguf")


def test_a_file_without_tokenizer_or_chat_template(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, gguf_model("llama"))
    assert read(path).tokenizer is None
    with pytest.raises(BadInput, match=r"model\.gguf holds no tokenizer .*tokenizer=False"):
        hf.load_model(path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.eos_token_id": 256}
    words |= {"tokenizer.ggml.tokens": [*alphabet, "<end>"], "tokenizer.ggml.merges": ["a b"]}
    words |= {"tokenizer.ggml.token_type": [1] * 256 + [3]}
    words["tokenizer.ggml.tokens"].append("ab")
    write_gguf(path, gguf_model("llama"), metadata=words)
    model = hf.load_model(path)
    assert model.tokenizer.encode("abc<end>") == [257, alphabet.index("c"), 256]
    assert model.tokenizer.stop_ids == (256,)
    assert model.banned == tuple(sorted({model.tokenizer.pad_id, *range(258, 300)}))
    with pytest.raises(BadInput, match=r"model\.gguf has no chat template: take one that chats"):
        hf.check_model(path)
    words["tokenizer.chat_template"] = "{% for message in messages %}{{ message.content }}<end>{% endfor %}"
    write_gguf(path, gguf_model("llama"), metadata=words)
    hf.check_model(path)
    hf.save_model(tmp_path / "folder", hf.load_model(path))
    again = hf.load_model(tmp_path / "folder")
    assert (again.config, again.tokenizer.stop_ids) == (model.config, (256,))
    assert again.tokenizer.encode("abc<end>") == model.tokenizer.encode("abc<end>")
    np.testing.assert_array_equal(again.params["q"], model.params["q"])
