"""Every way in which a model folder can be wrong is one sentence that names the place (SPEC section 9)."""

import json
import os

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

NAN = float("nan")
ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE |= {"original_max_position_embeddings": 32}


@pytest.fixture
def folder(tmp_path):
    save_model(tmp_path / "model", random_model("llama llama3"))
    return tmp_path / "model"


def refused(folder, **settings) -> str:
    """The one sentence with which a folder is refused."""
    with pytest.raises(BadInput) as caught:
        load_model(folder, tokenizer=False, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def change(folder, **fields) -> None:
    """Replace fields of the folder's config.json."""
    source = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(source | fields))


def retensor(folder, tensors) -> None:
    """Replace tensors of the folder's weights by name; None takes one away."""
    stored = load_file(folder / WEIGHTS) | tensors
    save_file({name: value for name, value in stored.items() if value is not None}, folder / WEIGHTS)


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
        ("config.json", b"[" * 100_000, "config.json"),
    ],
)
def test_a_file_that_is_missing_or_can_not_be_read(folder, name, content, words):
    """`content` is the file's, or the number of bytes to cut the weights to; otherwise there are no weights."""
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


def make_pipe(path) -> None:
    """A pipe in the place of a file: whoever opens it waits for ever."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def make_link(path, target) -> None:
    """A link in the place of a file."""
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def move_out(path) -> None:
    """Move the file next to its folder, and put a link to it in its place."""
    make_link(path, path.rename(path.parent.parent / f"outside-{path.name}"))


@pytest.mark.parametrize(
    ("change_file", "words"),
    [
        (make_pipe, "is no regular file"),
        (lambda path: make_link(path, "/dev/zero"), "is no regular file"),
        (lambda path: make_link(path, path.name), "can't be read"),
        (lambda path: make_link(path, "nowhere"), "can't be read"),
        (move_out, "leads out of its folder"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", WEIGHTS, "tokenizer.json", "chat_template.jinja"])
def test_pipes_devices_and_links_out_of_the_folder_are_refused(folder, name, change_file, words):
    if not (folder / name).exists():
        (folder / name).write_text("{}")
    change_file(folder / name)
    message = refused(folder)
    assert str(folder / name) in message
    assert words in message


def test_files_of_the_hubs_cache_are_links_to_its_blobs(folder, tmp_path):
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0f", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name in ("config.json", WEIGHTS):
        (folder / name).rename(blobs / f"sha-{name}")
        (snapshot / name).symlink_to(f"../../blobs/sha-{name}")
    assert load_model(snapshot, tokenizer=False).config.num_layers == 2
    make_link(snapshot / "config.json", "../../../elsewhere.json")
    (tmp_path / "elsewhere.json").write_text("{}")
    assert "leads out of its folder" in refused(snapshot)


NAMES = ["../outside.safetensors", "a/../../outside.safetensors", "/dev/zero", "", "a\0b", "a" * 300]


@pytest.mark.parametrize("name", [*NAMES, "absolute", "pipe.safetensors"])
def test_an_index_names_files_of_its_own_folder_alone(folder, name):
    outside = (folder / WEIGHTS).rename(folder.parent / "outside.safetensors")
    os.mkfifo(folder / "pipe.safetensors")
    name = str(outside) if name == "absolute" else name
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    expected = "is no regular file" if name.startswith("pipe") else "which is not in its folder"
    assert expected in refused(folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("name", "value"), [("embed_tokens", NAN), ("norm", np.inf), ("layers.1.mlp.up_proj", -np.inf)]
)
def test_weights_that_are_not_finite(tmp_path, dtype, name, value):
    save_model(tmp_path, random_model("llama", dtype))
    name = f"model.{name}.weight"
    array = np.array(load_file(tmp_path / WEIGHTS)[name])
    array.reshape(-1)[-1] = value
    retensor(tmp_path, {name: array})
    assert f"{WEIGHTS}: {name} holds NaN or infinity in {dtype}" in refused(tmp_path)


def two_norms(header: str) -> str:
    """A safetensors header that names one tensor twice."""
    return f'{header.rstrip()[:-1]},"model.norm.weight":{json.dumps(json.loads(header)["model.norm.weight"])}}}'


def overlapping(header: str) -> str:
    """A safetensors header in which two tensors share bytes."""
    tensors = json.loads(header)
    tensors["model.norm.weight"]["data_offsets"] = [0, 192]
    return json.dumps(tensors)


@pytest.mark.parametrize(
    ("change_header", "words"),
    [(two_norms, "twice in its header"), (overlapping, "can't be read"), (lambda _: "[" * 100_000, "can't be read")],
)
def test_a_header_that_contradicts_itself(folder, change_header, words):
    data = (folder / WEIGHTS).read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    header = change_header(data[8:size].decode()).encode()
    (folder / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header + data[size:])
    assert words in refused(folder)
    (folder / WEIGHTS).write_bytes((1 << 60).to_bytes(8, "little") + data[8:])
    assert "can't be read as safetensors" in refused(folder)


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
        *[
            ({name: value}, name)
            for name in ("num_hidden_layers", "vocab_size")
            for value in (10**9, -1, True, 2.0, "2")
        ],
        *[({name: 10**13}, name) for name in ("hidden_size", "intermediate_size", "head_dim", "num_attention_heads")],
        *[({"num_key_value_heads": value}, "num_key_value_heads") for value in (0, -2)],
        *[({"rope_theta": value}, "theta") for value in (NAN, 1e999, 0.0, -1.0)],
        *[({"rms_norm_eps": value}, "norm_eps") for value in (NAN, -1.0, "1e-5")],
        ({"rope_scaling": ROPE | {"high_freq_factor": 1.0}}, "high_freq_factor is 1.0"),
        ({"rope_scaling": ROPE | {"factor": NAN}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.0}}, "factor"),
        ({"initializer_range": -1e999}, "initializer_range is -inf"),
        ({"layer_types": ["full_attention"] * 10**5}, "layer_types has 100000 entries"),
        (CASES["mistral window"] | {"sliding_window": -1}, "sliding_window"),
        (CASES["gemma2"] | {"attn_logit_softcapping": NAN}, "attn_logit_softcapping is nan"),
        (CASES["gemma2"] | {"query_pre_attn_scalar": 0}, "do not fit together"),
        *[({"architectures": named}, "architectures is") for named in (7, [[1]])],
        ({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": 7}, "text_config is 7"),
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


def test_unembedding_is_ignored_if_tied_and_required_otherwise(folder):
    before = load_model(folder, tokenizer=False).params
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32)}
    retensor(folder, old | {"lm_head.weight": np.zeros((131, 48), np.float32)})
    after = load_model(folder, tokenizer=False).params
    assert all(jnp.array_equal(after[name], value) for name, value in before.items())
    change(folder, tie_word_embeddings=False)
    retensor(folder, {"lm_head.weight": None})
    assert "1 wrong: lm_head.weight is missing" in refused(folder)


@pytest.mark.parametrize("dtype", ["int8", "float64", "float", "nonsense", jnp.int32])
def test_a_dtype_that_holds_no_parameters(folder, dtype):
    assert "can't hold parameters; choose one of float32, bfloat16, float16" in refused(folder, dtype=dtype)


def test_a_refused_write_changes_nothing(tmp_path):
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
