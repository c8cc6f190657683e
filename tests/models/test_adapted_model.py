"""A model with an adapter: read with one, and saved merged, as an adapter alone or as one file."""

import json

import jax
import numpy as np
import pytest
from gguf_models import tiny_model
from model_cases import random_model

from flowgrpo.models.hf import Model, load_model, save_model
from flowgrpo.models.lora import LoraConfig, init_adapter, merge_adapter
from flowgrpo.models.peft import load_adapter
from flowgrpo.models.quantised import Quantised
from flowgrpo.types import BadInput

TOKENS_RS = np.arange(12, dtype=np.int32).reshape(2, 6)


@pytest.fixture
def folder(tmp_path):
    save_model(tmp_path / "base", random_model("qwen3", "float32"))
    return tmp_path / "base"


def trained(model: Model) -> Model:
    """The model with another adapter than a new one, whose product is not 0."""
    adapter = {name: x + 0.05 for name, x in model.params.adapter.items()}
    return model._replace(params=model.params._replace(adapter=adapter))


def assert_equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def logits(model: Model):
    return jax.jit(model.policy.apply)(model.params, TOKENS_RS)[0]


def test_a_new_adapter_is_that_of_its_settings_and_seed_over_the_same_weights(folder):
    plain, lora = load_model(folder, tokenizer=False), LoraConfig(3, 8.0, ("q", "down"))
    model = load_model(folder, tokenizer=False, lora=lora, seed=5)
    assert (model.lora, model.source) == (lora, str(folder))
    assert_equal(model.params.base, plain.params)
    assert_equal(model.params.adapter, init_adapter(jax.random.key(5), model.config, lora))
    assert load_model(folder, tokenizer=False, lora=3).lora == LoraConfig(rank=3)


@pytest.mark.parametrize("quantised", [None, "int8"])
def test_a_saved_folder_has_the_adapter_merged(folder, tmp_path, quantised):
    model = trained(load_model(folder, tokenizer=False, lora=2, quantised=quantised))
    assert isinstance(model.params.base["q"], Quantised) == (quantised is not None)
    model.save(tmp_path / "out", card="A planner.")
    read = load_model(tmp_path / "out", tokenizer=False)
    assert_equal(read.params, merge_adapter(model.params, model.config, model.lora))
    np.testing.assert_allclose(logits(read), logits(model), atol=1e-4)
    assert (tmp_path / "out" / "README.md").read_text() == "A planner."


def test_an_adapter_alone_is_read_back_and_names_its_base(folder, tmp_path):
    model = trained(load_model(folder, tokenizer=False, lora=2))
    model.save(tmp_path / "adapter", adapter_only=True)
    lora, adapter = load_adapter(tmp_path / "adapter", model.config)
    assert lora == model.lora
    assert_equal(adapter, model.params.adapter)
    described = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == str(folder)


def test_a_path_of_gguf_is_one_file_of_the_merged_model(tmp_path):
    pytest.importorskip("gguf")
    tiny_model("qwen2").save(tmp_path / "base")
    model = trained(load_model(tmp_path / "base", lora=2))
    model.save(tmp_path / "out.gguf")
    np.testing.assert_allclose(load_model(tmp_path / "out.gguf").params["q"], model.merged().params["q"], atol=1e-3)


def test_what_cannot_be_saved_or_adapted_is_refused(folder, tmp_path):
    model = load_model(folder, tokenizer=False)
    with pytest.raises(BadInput, match="the model has no adapter: leave out adapter_only"):
        model.save(tmp_path / "out", adapter_only=True)
    with pytest.raises(BadInput, match=r"out\.gguf is one file, for a whole model"):
        load_model(folder, tokenizer=False, lora=2).save(tmp_path / "out.gguf", adapter_only=True)
    with pytest.raises(BadInput, match="an adapter: rank is 0"):
        load_model(folder, tokenizer=False, lora=0)
    assert not (tmp_path / "out").exists()
