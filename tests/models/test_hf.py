"""Model folders without PyTorch: what is written is read back bit for bit (M3), sharded and placed; hubs and text."""

import json
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import file_size_limit
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from model_cases import FAMILIES, random_model
from safetensors.numpy import load_file
from tokenizer_cases import STYLES, byte_level, fast

from flowgrpo.models import hf
from flowgrpo.models.decoder import parameters
from flowgrpo.models.families import checkpoint_tensors, from_file
from flowgrpo.types import BadInput


def assert_equal(actual, expected):
    """Two models with the same config and the same bits."""
    assert actual.config == expected.config
    assert actual.params.keys() == expected.params.keys()
    for name, value in expected.params.items():
        assert actual.params[name].dtype == value.dtype
        np.testing.assert_array_equal(actual.params[name], value, err_msg=name)


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in FAMILIES), ("qwen3", "bfloat16"), ("gemma2", "float16")]
)
def test_M3_write_then_read_gives_the_same_bytes(tmp_path, name, dtype):
    model = random_model(name, dtype)
    hf.save_model(tmp_path / "one", model)
    again = hf.load_model(tmp_path / "one", dtype=dtype, tokenizer=False)
    assert_equal(again, model)
    assert again.hf_config == {**model.hf_config, "dtype": dtype}
    hf.save_model(tmp_path / "two", again)
    assert files(tmp_path / "one") == files(tmp_path / "two")
    assert files(tmp_path / "one").keys() == {"config.json", "model.safetensors"}
    (tmp_path / "any").touch()  # others may read what was written as they may any file
    assert {path.stat().st_mode for path in (tmp_path / "one").iterdir()} == {(tmp_path / "any").stat().st_mode}


def test_a_random_model_needs_a_config_only(tmp_path):
    source = dict(FAMILIES["gemma2"])
    model = hf.init_model(source, jax.random.key(0), dtype="bfloat16")
    assert source == FAMILIES["gemma2"]
    assert model.hf_config == source | {"architectures": ["Gemma2ForCausalLM"]}
    assert {value.dtype.name for value in model.params.values()} == {"bfloat16"}
    assert not np.any(model.params["norm"])  # one is added to it
    assert 0.01 < np.asarray(model.params["gate"], np.float32).std() < 0.03
    hf.save_model(tmp_path, model)
    assert_equal(hf.load_model(tmp_path, tokenizer=False, dtype="bfloat16"), model)


def test_a_projection_is_transposed_head_by_head():
    config = random_model("qwen3").config
    stored = np.arange(config.h * config.e * config.d).reshape(config.h * config.e, config.d)
    wide = from_file(stored, checkpoint_tensors(config)["q"], "dhe", config)
    assert wide[5, 2, 3] == stored[2 * config.e + 3, 5]


@pytest.mark.parametrize("most", [1, 20_000])
def test_M3_shards_are_written_and_read(tmp_path, most):
    model = random_model("gemma3")
    hf.save_model(tmp_path, model, max_shard_bytes=most)
    index = json.loads((tmp_path / hf.INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in model.params.values())
    for shard in set(index["weight_map"].values()):
        sizes = {name: value.nbytes for name, value in load_file(tmp_path / shard).items()}
        assert sizes.keys() == {name for name, file in index["weight_map"].items() if file == shard}
        assert len(sizes) == 1 or sum(sizes.values()) <= most
    assert_equal(hf.load_model(tmp_path, tokenizer=False), model)


def test_saving_again_leaves_nothing_of_before(tmp_path):
    """No weights, chat template or generation config of the model that was there: two are never mixed."""
    for i, most in enumerate([20_000, 5e9, 60_000, 20_000]):
        model = random_model("llama", seed=i)
        hf.save_model(tmp_path, model, max_shard_bytes=most)
        assert (tmp_path / hf.SINGLE).exists() == (most == 5e9) != (tmp_path / hf.INDEX).exists()
        assert_equal(hf.load_model(tmp_path, tokenizer=False), model)
        assert not any((tmp_path / name).exists() for name in ("chat_template.jinja", "generation_config.json"))
        for name in ("chat_template.jinja", "generation_config.json", "tokenizer.json"):
            (tmp_path / name).write_text("of before")


def test_a_failed_write_leaves_the_old_model(tmp_path):
    hf.save_model(tmp_path, random_model("llama"))
    before, other = files(tmp_path), random_model("llama", seed=1)
    broken = Mock(save=Mock(side_effect=OSError("disk full")))
    with pytest.raises(BadInput, match=r"could not be written \(disk full\): make room"):
        hf.save_model(tmp_path, other._replace(tokenizer=broken))
    with file_size_limit(1000), pytest.raises(BadInput, match=r"could not be written \(.*File too large"):
        hf.save_model(tmp_path, other)
    assert files(tmp_path) == before


def test_parameters_are_placed_by_a_sharding_or_a_function(tmp_path):
    def place(name, axes):
        requested[name] = axes
        return NamedSharding(mesh, PartitionSpec(*({"d": "data", "f": "model"}.get(axis) for axis in axes)))

    requested, model, mesh = {}, random_model("gemma2"), Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    hf.save_model(tmp_path, model)
    everywhere = NamedSharding(mesh, PartitionSpec())
    params = hf.load_model(tmp_path, tokenizer=False, sharding=everywhere).params
    assert all(value.sharding == everywhere for value in params.values())
    placed = hf.load_model(tmp_path, tokenizer=False, sharding=place)
    assert requested == {name: parameter.axes for name, parameter in parameters(model.config).items()}
    assert placed.params["gate"].sharding.shard_shape((3, 48, 56)) == (3, 24, 14)
    assert len(placed.params["gate"].addressable_shards) == 8
    assert_equal(placed, model)
    hf.save_model(tmp_path / "again", placed)
    assert files(tmp_path / "again")[hf.SINGLE] == (tmp_path / hf.SINGLE).read_bytes()


def test_dtype_is_what_parameters_are_stored_in(tmp_path):
    model = random_model("qwen2", "bfloat16")
    hf.save_model(tmp_path, model)
    wide = hf.load_model(tmp_path, tokenizer=False)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y.astype(jnp.float32)), wide.params, model.params)
    assert {x.dtype.name for x in jax.tree.leaves(wide.policy.make_cache(1, 4).keys)} == {"float32"}
    half = hf.load_model(tmp_path, tokenizer=False, dtype=jnp.float16)
    assert {value.dtype.name for value in half.params.values()} == {"float16"}


def test_an_old_name_of_the_dtype_is_kept(tmp_path):
    model = random_model("llama")
    hf.save_model(tmp_path, model._replace(hf_config=model.hf_config | {"torch_dtype": "bfloat16", "mine": {"a": [1]}}))
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["torch_dtype"], written["mine"]) == ("float32", {"a": [1]})
    assert "dtype" not in written


def test_the_tokenizer_is_saved_and_loaded_with_the_model(tmp_path, monkeypatch):
    words = Mock(save=lambda folder: (folder / "tokenizer.json").write_text("{}"), vocab_size=1)
    hf.save_model(tmp_path, random_model("llama"))
    with pytest.raises(BadInput):
        hf.load_model(tmp_path)
    monkeypatch.setattr(
        "flowgrpo.models.hf.load_tokenizer",
        lambda folder, _template: words if (folder / "tokenizer.json").exists() else 1,
    )
    hf.save_model(tmp_path, random_model("llama")._replace(tokenizer=words))
    assert hf.load_model(tmp_path).tokenizer is words
    assert hf.load_model(tmp_path, tokenizer=False).tokenizer is None


def test_a_tokenizer_with_ids_that_have_no_embedding_is_refused(tmp_path):
    hf.save_model(tmp_path, random_model("llama"))
    fast(byte_level(), STYLES["qwen2.5"], STYLES["qwen2.5"].template).save_pretrained(tmp_path)
    for read in (hf.load_model, hf.check_model):
        with pytest.raises(BadInput, match=r"has the id 131, but vocab_size .* is 131"):
            read(tmp_path)


def test_a_hub_id_is_fetched(tmp_path, monkeypatch):
    model, fetch = random_model("llama"), Mock(return_value=str(tmp_path))
    hf.save_model(tmp_path, model)
    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert_equal(hf.load_model("owner/name-1.5", tokenizer=False), model)
    fetch.assert_called_once_with("owner/name-1.5", allow_patterns=hf.HUB_FILES)
    fetch.side_effect = ConnectionError("no route\nmany more lines")
    with pytest.raises(BadInput, match=r"owner/name is no folder here, .*: no route$"):
        hf.load_model("owner/name")
