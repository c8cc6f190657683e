"""Every way in which a model folder can be wrong is one sentence that names the place (SPEC section 9)."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import FAMILIES, random_model
from safetensors.numpy import load_file, save_file

from flowgrpo.models.hf import init_model, load_model, save_model
from flowgrpo.types import BadInput

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path):
    save_model(tmp_path, random_model("llama llama3"))
    return tmp_path


def refused(folder, **settings) -> str:
    """The one sentence with which a folder is refused."""
    with pytest.raises(BadInput) as caught:
        load_model(folder, text=False, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def change(folder: Path, **fields) -> None:
    """The same config.json with other fields."""
    source = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(source | fields))


def retensor(folder: Path, **tensors) -> None:
    """The same weights with other tensors; None takes one away."""
    held = load_file(folder / WEIGHTS) | {name: value for name, value in tensors.items() if value is not None}
    save_file({name: held[name] for name in held if tensors.get(name, 0) is not None}, folder / WEIGHTS)


# Folder and files -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/nowhere/at/all", "./missing", "missing"])
def test_a_missing_folder(path):
    assert f"model folder {path} does not exist" in refused(path)


@pytest.mark.parametrize("name", ["config.json", WEIGHTS])
def test_a_missing_file(folder, name):
    (folder / name).unlink()
    assert name in refused(folder)
    assert str(folder) in refused(folder)


def test_weights_in_another_format(folder):
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    assert "pytorch_model.bin is there: save it again in the safetensors format" in refused(folder)


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_json_that_is_none(folder, name, text):
    (folder / WEIGHTS).unlink()
    (folder / name).write_bytes(text.encode("latin-1"))
    assert str(folder / name) in refused(folder)


def test_an_index_without_a_map(folder):
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text("{}")
    assert f"{folder / INDEX} has no weight_map" in refused(folder)


def test_an_absent_shard(folder):
    save_model(folder, random_model("llama"), max_shard_bytes=30_000)
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert f"names {shard.name} (1 such), which is absent" in refused(folder)


@pytest.mark.parametrize("size", [0, 4, 300, -100])
def test_a_truncated_file(folder, size):
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:size])
    assert f"{folder / WEIGHTS} can't be read as safetensors" in refused(folder)


# Architectures ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "architecture MambaForCausalLM is not"),
        ({"model_type": "mamba", "architectures": None}, "architecture mamba is not supported; supported are Qwen2For"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification is not supported"),
        ({"model_type": None, "architectures": None}, "architecture None is not supported"),
        (
            {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 8},
            "a mixture of exp",
        ),
        ({"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3MoeForCausalLM is a mixture"),
        ({"quantization_config": {"bits": 4}}, "quantised weights are not supported"),
        (
            {"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope scaling 'dynamic' is not",
        ),
        ({"rope_scaling": {"type": "strange"}}, "rope scaling 'strange' is not supported; supported are default, lin"),
        ({"rope_scaling": {"type": "yarn"}}, "factor"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is set"),
        ({"hidden_act": "relu"}, "activation 'relu' is unknown; choose silu or gelu_tanh"),
        ({"num_attention_heads": 16, "num_key_value_heads": 3}, "16 heads can't share 3 kv-heads"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"intermediate_size": 0}, "f is 0, but every size of a decoder is at least 1"),
        ({"num_key_value_heads": 0}, "k is 0, but every size of a decoder is at least 1"),
        ({"num_hidden_layers": 0}, "number of layers is 0"),
        ({"head_dim": 15}, "15"),
    ],
)
def test_a_config_that_the_decoder_can_not_run(folder, fields, message):
    change(folder, **fields)
    assert message in refused(folder)
    assert str(folder / "config.json") in refused(folder)


def test_layers_of_an_unknown_kind(folder):
    save_model(folder, random_model("qwen2"))
    change(folder, layer_types=["full_attention", "chunked_attention"])
    assert "layer_types has chunked_attention" in refused(folder)


def test_attention_to_later_tokens(folder):
    save_model(folder, random_model("gemma3"))
    change(folder, use_bidirectional_attention=True)
    assert "use_bidirectional_attention is set, but the decoder is causal" in refused(folder)


def test_a_random_model_of_an_unsupported_family():
    with pytest.raises(BadInput, match=r"config.json: architecture gpt2 is not supported"):
        init_model({"model_type": "gpt2"}, None)


# Tensors ----------------------------------------------------------------------------------------------


def test_all_wrong_tensors_are_in_one_error(folder):
    retensor(
        folder,
        **{
            "model.norm.weight": None,
            "model.extra": np.zeros(3, np.float32),
            "model.layers.1.mlp.gate_proj.weight": np.zeros((48, 56), np.float32),
            "model.layers.0.mlp.up_proj.weight": np.zeros((56, 48), np.int32),
        },
    )
    assert refused(folder).split(" are not those of its config.json, ")[1].split("; ") == [
        "4 wrong: model.norm.weight is missing",
        "model.extra is unexpected",
        "model.layers.0.mlp.up_proj.weight is I32 and not one of F32, BF16, F16",
        "model.layers.1.mlp.gate_proj.weight has shape [48, 56] and not [56, 48]",
    ]


def test_ten_wrong_tensors_are_listed_and_the_rest_counted(folder):
    change(folder, num_hidden_layers=4)
    message = refused(folder)
    assert "18 wrong: model.layers.2." in message
    assert message.count(" is missing") == 10
    assert message.endswith("; and 8 more")


def test_a_tied_unembedding_and_old_buffers_are_passed_over(folder):
    before = load_model(folder, text=False)
    retensor(
        folder,
        **{
            "lm_head.weight": np.zeros((131, 48), np.float32),
            "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32),
        },
    )
    after = load_model(folder, text=False)
    assert all(jnp.array_equal(after.params[name], value) for name, value in before.params.items())


def test_an_untied_unembedding_must_be_there(folder):
    change(folder, tie_word_embeddings=False)
    assert "1 wrong: lm_head.weight is missing" in refused(folder)


@pytest.mark.parametrize("dtype", ["int8", "float64", "float", "nonsense", jnp.int32])
def test_a_dtype_that_holds_no_parameters(folder, dtype):
    assert "can't hold parameters; choose one of float32, bfloat16, float16" in refused(folder, dtype=dtype)


# Writing ----------------------------------------------------------------------------------------------


def test_parameters_that_are_not_those_of_the_config(tmp_path):
    model = random_model("llama")
    params = dict(model.params) | {"more": model.params["norm"], "embed": model.params["embed"][1:]}
    del params["norm"]
    with pytest.raises(BadInput, match=r"3 wrong: norm is missing; more is unexpected; embed has shape \[130, 48\]"):
        save_model(tmp_path / "new", model._replace(params=params))
    assert not (tmp_path / "new").exists()


def test_a_file_where_the_folder_belongs(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(BadInput, match="it is a file; name a folder"):
        save_model(tmp_path / "file", random_model("llama"))
    assert (tmp_path / "file").read_text() == "mine"


def test_the_families_here_are_all_that_are_supported():
    from flowgrpo.models import families

    assert {source["model_type"] for source in FAMILIES.values()} == set(families.FAMILIES)
