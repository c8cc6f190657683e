"""Adapters in PEFT's format: the same bytes again, PEFT's names, and every refusal."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from flowgrpo.models.config import DecoderConfig, Rope
from flowgrpo.models.lora import PROJECTIONS, LoraConfig, adapter_shapes
from flowgrpo.models.peft import load_adapter, save_adapter
from flowgrpo.types import BadInput

PLAIN = DecoderConfig(v=31, d=12, h=4, k=2, e=6, f=20, windows=(None,) * 3, ropes=(Rope(),) * 3)
GEMMA = dataclasses.replace(PLAIN, sandwich_norms=True, qk_norm=True, tied=True)


def random_adapter(config, lora, dtype="float32"):
    draw, shapes = np.random.default_rng(7), adapter_shapes(config, lora)
    return {name: jnp.asarray(draw.normal(0, 0.3, shape), dtype) for name, shape in shapes.items()}


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("config", [PLAIN, GEMMA])
@pytest.mark.parametrize("targets", [PROJECTIONS, ("q", "v"), ("o", "down")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_write_then_read_gives_the_same_bytes(tmp_path, config, targets, dtype):
    lora = LoraConfig(3, 6.5, targets, rslora=True)
    adapter = random_adapter(config, lora, dtype)
    save_adapter(tmp_path / "one", adapter, config, lora, base_model="owner/name")
    found_lora, found = load_adapter(tmp_path / "one", config, dtype=dtype)
    assert found_lora == lora
    assert list(found) == list(adapter_shapes(config, lora))
    for name in adapter:
        assert found[name].dtype == adapter[name].dtype
        assert np.asarray(found[name]).tobytes() == np.asarray(adapter[name]).tobytes()
    save_adapter(tmp_path / "two", found, config, found_lora, base_model="owner/name")
    assert files(tmp_path / "one") == files(tmp_path / "two")
    assert set(files(tmp_path / "one")) == {"adapter_config.json", "adapter_model.safetensors"}


def test_names_and_shapes_in_the_file_are_those_of_peft(tmp_path):
    from safetensors.numpy import load_file

    lora = LoraConfig(3, 6.0, ("o", "down", "k"))
    adapter = random_adapter(PLAIN, lora)
    save_adapter(tmp_path, adapter, PLAIN, lora)
    found = load_file(tmp_path / "adapter_model.safetensors")
    assert len(found) == 2 * 3 * PLAIN.num_layers
    stem = "base_model.model.model.layers.1."
    assert found[stem + "self_attn.o_proj.lora_A.weight"].shape == (3, 24)
    assert found[stem + "self_attn.o_proj.lora_B.weight"].shape == (12, 3)
    assert found[stem + "mlp.down_proj.lora_A.weight"].shape == (3, 20)
    head, dim = 1, 4
    row = found[stem + "self_attn.k_proj.lora_B.weight"][head * PLAIN.e + dim]
    np.testing.assert_array_equal(row, adapter["k_b"][1, :, head, dim])
    source = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (source["r"], source["lora_alpha"], source["peft_type"]) == (3, 6, "LORA")
    assert isinstance(source["lora_alpha"], int)
    assert source["target_modules"] == ["o_proj", "down_proj", "k_proj"]


def rewritten(folder, **changes):
    """The same folder with other fields in its config; None leaves a field out."""
    path = folder / "adapter_config.json"
    source = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in source.items() if value is not None}))


@pytest.fixture
def folder(tmp_path):
    lora = LoraConfig(3, 6.0, ("q", "v"))
    save_adapter(tmp_path, random_adapter(PLAIN, lora), PLAIN, lora)
    return tmp_path


@pytest.mark.parametrize(
    "wanted",
    [
        ["v_proj", "q_proj"],
        ["self_attn.q_proj", "v_proj"],
        r".*self_attn\.(q|v)_proj",
        r"model\.layers\.\d+\..*\.[qv]_proj",
    ],
)
def test_target_modules_are_read_in_every_form(folder, wanted):
    rewritten(folder, target_modules=wanted)
    assert load_adapter(folder, PLAIN)[0].targets == ("q", "v")


def test_fields_that_change_nothing_are_read_over(folder):
    rewritten(
        folder, lora_dropout=0.1, peft_version="0.21", rank_pattern={}, init_lora_weights="gaussian", use_dora=False
    )
    assert load_adapter(folder, PLAIN)[0] == LoraConfig(3, 6.0, ("q", "v"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_dora": True}, "use_dora is True, which is not supported"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern is"),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern is"),
        ({"layers_to_transform": [1]}, "layers_to_transform is"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
        ({"some_later_variant": {"a": 1}}, "some_later_variant is"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS'"),
        ({"r": None}, "r is missing"),
        ({"r": 0}, "rank is 0; give a whole number from 1"),
        ({"r": "8"}, "rank is '8'"),
        ({"lora_alpha": -1}, "alpha is -1"),
        ({"target_modules": ["q_proj", "lm_head"]}, "has a name that is none of q, k"),
        ({"target_modules": []}, r"targets are \(\)"),
        ({"target_modules": 3}, "give a list of names or a regular expression"),
        ({"target_modules": "(q"}, "no regular expression"),
        ({"target_modules": ["layers.1.self_attn.q_proj"]}, "in some layers only"),
        ({"r": 4}, r"lora_A.weight has shape \[3, 12\] and not \[4, 12\]"),
        ({"target_modules": ["q_proj"]}, "6 wrong: .*v_proj.lora_A.weight is unexpected"),
        ({"target_modules": "all-linear"}, "30 wrong: .*k_proj.lora_A.weight is missing.*and 25 more"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(folder, changes, words):
    rewritten(folder, **changes)
    with pytest.raises(BadInput, match=words) as caught:
        load_adapter(folder, PLAIN)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("adapter_config.json", None, "adapter_config.json is missing"),
        ("adapter_config.json", b"{", "can't be read as JSON"),
        ("adapter_config.json", b"[]", "holds a list"),
        ("adapter_model.safetensors", None, "adapter_model.safetensors is missing"),
        ("adapter_model.safetensors", b"nonsense", "can't be read as safetensors"),
    ],
)
def test_broken_folders_are_refused(folder, file, content, words):
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_bytes(content)
    with pytest.raises(BadInput, match=words):
        load_adapter(folder, PLAIN)


def test_tensors_of_another_dtype_are_refused(folder):
    from safetensors.numpy import load_file, save_file

    path = folder / "adapter_model.safetensors"
    save_file({name: value.astype(np.int8) for name, value in load_file(path).items()}, path)
    with pytest.raises(BadInput, match="holds int8"):
        load_adapter(folder, PLAIN)


def test_another_model_is_refused(folder):
    with pytest.raises(BadInput, match=r"6 wrong: .*q_proj.lora_A.weight has shape \[3, 12\] and not \[3, 16\]"):
        load_adapter(folder, dataclasses.replace(PLAIN, d=16))


def test_a_wrong_adapter_or_place_is_refused_before_anything_is_written(tmp_path):
    lora = LoraConfig(3, 6.0, ("q", "v"))
    adapter = random_adapter(PLAIN, lora)
    with pytest.raises(BadInput, match="v_a is unexpected"):
        save_adapter(tmp_path / "new", adapter, PLAIN, LoraConfig(3, targets=("q",)))
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="it is a file"):
        save_adapter(tmp_path / "file", adapter, PLAIN, lora)
