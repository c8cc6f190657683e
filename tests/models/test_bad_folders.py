"""Every way in which a model folder can be wrong is one sentence that names the place (SPEC section 9)."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import FAMILIES as CASES
from model_cases import random_model
from safetensors.numpy import load_file, save_file

from flowgrpo.models.families import FAMILIES
from flowgrpo.models.hf import INDEX, init_model, load_model, save_model
from flowgrpo.models.hf import SINGLE as WEIGHTS
from flowgrpo.types import BadInput


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


def change(folder, **fields) -> None:
    """Replace fields of the folder's config.json."""
    source = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(source | fields))


def retensor(folder, tensors) -> None:
    """Replace tensors of the folder's weights by name; None takes one away."""
    held = load_file(folder / WEIGHTS) | tensors
    save_file({name: value for name, value in held.items() if value is not None}, folder / WEIGHTS)


@pytest.mark.parametrize("path", ["/nowhere/at/all", "./missing", "missing"])
def test_a_missing_folder(path):
    assert f"model folder {path} does not exist" in refused(path)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", None, "config.json"),
        (WEIGHTS, None, WEIGHTS),
        ("pytorch_model.bin", b"", "pytorch_model.bin is there: save it again in the safetensors format"),
        *[(name, content, name) for name in ("config.json", INDEX) for content in (b"{", b"[]", b"\xff")],
        (INDEX, b"{}", f"{INDEX} has no weight_map"),
        *[(WEIGHTS, size, f"{WEIGHTS} can't be read as safetensors") for size in (0, 4, 300, -100)],
    ],
)
def test_a_file_that_is_missing_or_can_not_be_read(folder, name, content, words):
    """`content` may be a number of bytes that are left of the weights, of which there are none otherwise."""
    weights = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).unlink()
    if isinstance(content, int):
        (folder / name).write_bytes(weights[:content])
    elif content is not None:
        (folder / name).write_bytes(content)
    elif name == "config.json":
        (folder / name).unlink()
    message = refused(folder)
    assert str(folder) in message
    assert words in message


def test_an_absent_shard(folder):
    save_model(folder, random_model("llama"), max_shard_bytes=30_000)
    _, shard, *_ = sorted(folder.glob("model-*.safetensors"))
    shard.unlink()
    assert f"names {shard.name} (1 such), which is absent" in refused(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "architecture MambaForCausalLM is not"),
        ({"model_type": "mamba", "architectures": None}, "architecture mamba is not supported; supported are Qwen2For"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification is not supported"),
        ({"model_type": None, "architectures": None}, "architecture None is not supported"),
        ({"model_type": "mixtral", "architectures": ["MixtralFor"], "num_local_experts": 8}, "a mixture of exp"),
        ({"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3MoeForCausalLM is a mixture"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            "quantised by gptq, which is not read: give the",
        ),
        ({"quantization_config": {"load_in_4bit": True}}, "quantised by bitsandbytes, which is not read"),
        ({"quantization_config": {"bits": 4}}, "quantised by an unnamed method"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not"),
        ({"rope_scaling": {"type": "strange"}}, "rope scaling 'strange' is not supported; supported are default, lin"),
        ({"rope_scaling": {"type": "yarn"}}, "factor"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is set"),
        ({"hidden_act": "relu"}, "activation 'relu' is unknown; choose silu or gelu_tanh"),
        ({"num_attention_heads": 16, "num_key_value_heads": 3}, "16 heads can't share 3 kv-heads"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"intermediate_size": 0}, "f is 0, but every size of a decoder is at least 1"),
        ({"num_hidden_layers": 0}, "number of layers is 0"),
        ({"head_dim": 15}, "15"),
        (
            CASES["qwen2"] | {"layer_types": ["full_attention", "chunked_attention"]},
            "layer_types has chunked_attention",
        ),
        (
            CASES["gemma3"] | {"use_bidirectional_attention": True},
            "use_bidirectional_attention is set, but the decoder",
        ),
    ],
)
def test_a_config_that_the_decoder_can_not_run(folder, fields, message):
    if "model_type" in fields:
        fields = {"architectures": None} | fields
    change(folder, **fields)
    assert message in refused(folder)
    assert str(folder / "config.json") in refused(folder)


def test_a_random_model_of_an_unsupported_family():
    assert {source["model_type"] for source in CASES.values()} == set(FAMILIES)
    with pytest.raises(BadInput, match=r"config.json: architecture gpt2 is not supported"):
        init_model({"model_type": "gpt2"}, None)


def test_all_wrong_tensors_are_in_one_error(folder):
    wrong = {
        "model.norm.weight": None,
        "model.extra": np.zeros(3, np.float32),
        "model.layers.1.mlp.gate_proj.weight": np.zeros((48, 56), np.float32),
        "model.layers.0.mlp.up_proj.weight": np.zeros((56, 48), np.int32),
    }
    retensor(folder, wrong)
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


def test_an_unembedding_is_passed_over_where_it_is_tied_and_missed_where_it_is_not(folder):
    before = load_model(folder, text=False).params
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32)}
    retensor(folder, old | {"lm_head.weight": np.zeros((131, 48), np.float32)})
    after = load_model(folder, text=False).params
    assert all(jnp.array_equal(after[name], value) for name, value in before.items())
    change(folder, tie_word_embeddings=False)
    retensor(folder, {"lm_head.weight": None})
    assert "1 wrong: lm_head.weight is missing" in refused(folder)


@pytest.mark.parametrize("dtype", ["int8", "float64", "float", "nonsense", jnp.int32])
def test_a_dtype_that_holds_no_parameters(folder, dtype):
    assert "can't hold parameters; choose one of float32, bfloat16, float16" in refused(folder, dtype=dtype)


def test_what_can_not_be_written_leaves_everything_as_it_was(tmp_path):
    model = random_model("llama")
    params = {name: value for name, value in model.params.items() if name != "norm"}
    params |= {"more": model.params["norm"], "embed": model.params["embed"][1:]}
    with pytest.raises(BadInput, match=r"3 wrong: norm is missing; more is unexpected; embed has shape \[130, 48\]"):
        save_model(tmp_path / "new", model._replace(params=params))
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(BadInput, match="it is a file; name a folder"):
        save_model(tmp_path / "file", model)
    assert (tmp_path / "file").read_text() == "mine"
