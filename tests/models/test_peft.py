"""Adapters in PEFT's format: the same bytes again, PEFT's names, every refusal; and PEFT itself, in both directions."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import FAMILIES
from safetensors.numpy import load_file, save_file

from flowgrpo.models.config import DecoderConfig, Rope
from flowgrpo.models.hf import load_model
from flowgrpo.models.lora import PROJECTIONS, LoraConfig, LoraParams, adapter_shapes, lora_policy
from flowgrpo.models.peft import load_adapter, save_adapter
from flowgrpo.types import BadInput

PLAIN = DecoderConfig(v=31, d=12, h=4, k=2, e=6, f=20, windows=(None,) * 3, ropes=(Rope(),) * 3)
TENSORS = "adapter_model.safetensors"


def random_adapter(config, lora, dtype="float32"):
    draw, shapes = np.random.default_rng(7), adapter_shapes(config, lora)
    return {name: jnp.asarray(draw.normal(0, 0.1, shape), dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("targets", "dtype"), [(PROJECTIONS, "float32"), (("q", "v"), "bfloat16"), (("o", "down"), "float16")]
)
def test_write_then_read_gives_the_same_bytes(tmp_path, targets, dtype):
    first, second, lora = tmp_path / "one", tmp_path / "two", LoraConfig(3, 6.5, targets, rslora=True)
    adapter = random_adapter(PLAIN, lora, dtype)
    save_adapter(first, adapter, PLAIN, lora, base_model="owner/name")
    actual_lora, actual = load_adapter(first, PLAIN, dtype=dtype)
    assert (actual_lora, list(actual)) == (lora, list(adapter_shapes(PLAIN, lora)))
    assert all(actual[name].dtype == value.dtype for name, value in adapter.items())
    jax.tree.map(np.testing.assert_array_equal, actual, adapter)
    save_adapter(second, actual, PLAIN, actual_lora, base_model="owner/name")
    files = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in (first, second)]
    assert files[0] == files[1]
    assert set(files[0]) == {"adapter_config.json", TENSORS}


def test_names_and_shapes_in_the_file_are_those_of_peft(tmp_path):
    lora = LoraConfig(3, 6.0, ("o", "down", "k"))
    adapter = random_adapter(PLAIN, lora)
    save_adapter(tmp_path, adapter, PLAIN, lora)
    actual, stem = load_file(tmp_path / TENSORS), "base_model.model.model.layers.1."
    shapes = {name.removeprefix(stem): value.shape for name, value in actual.items() if name.startswith(stem)}
    assert (len(actual), len(shapes)) == (2 * 3 * PLAIN.num_layers, 2 * 3)
    assert [shapes[f"self_attn.o_proj.lora_{side}.weight"] for side in "AB"] == [(3, 24), (12, 3)]
    head, dim = 1, 4
    row = actual[stem + "self_attn.k_proj.lora_B.weight"][head * PLAIN.e + dim]
    np.testing.assert_array_equal(row, adapter["k_b"][1, :, head, dim])
    source = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (source["r"], repr(source["lora_alpha"]), source["peft_type"]) == (3, "6", "LORA")


@pytest.fixture
def folder(tmp_path):
    lora = LoraConfig(3, 6.0, ("q", "v"))
    save_adapter(tmp_path, random_adapter(PLAIN, lora), PLAIN, lora)
    return tmp_path


def rewrite(folder, changes):
    """Change fields of the config; None leaves a field out."""
    path = folder / "adapter_config.json"
    source = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in source.items() if value is not None}))


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": ["v_proj", "q_proj"]},
        {"target_modules": ["self_attn.q_proj", "v_proj"]},
        {"target_modules": r".*self_attn\.(q|v)_proj"},
        {"target_modules": r"model\.layers\.\d+\..*\.[qv]_proj"},
        {"lora_dropout": 0.1, "peft_version": "0.21", "rank_pattern": {}},
        {"init_lora_weights": "gaussian", "use_dora": False},
    ],
)
def test_all_forms_of_target_modules_are_read_and_notes_ignored(folder, changes):
    rewrite(folder, changes)
    assert load_adapter(folder, PLAIN)[0] == LoraConfig(3, 6.0, ("q", "v"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_dora": True}, "use_dora is True, which is not supported"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern is"),
        ({"some_later_variant": {"a": 1}}, "some_later_variant is"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS'"),
        ({"r": None}, "r is missing"),
        ({"r": 0}, "rank is 0, but must be at least 1"),
        ({"lora_alpha": -1}, "alpha is -1"),
        ({"target_modules": ["q_proj", "lm_head"]}, "has a name that is none of q, k"),
        ({"target_modules": []}, r"targets are \(\)"),
        ({"target_modules": 3}, "give a list of names or a regular expression"),
        ({"target_modules": "(q"}, "no regular expression"),
        ({"target_modules": r"(\w*|\.*)*x"}, "comes to no end"),
        ({"lora_alpha": float("nan")}, "alpha"),
        ({"r": 10**9}, "does not fit rank"),
        ({"target_modules": ["layers.1.self_attn.q_proj"]}, "in some layers only"),
        ({"r": 4}, r"lora_A.weight has shape \[3, 12\] and not \[4, 12\]"),
        ({"target_modules": ["q_proj"]}, "6 wrong: .*v_proj.lora_A.weight is unexpected"),
        ({"target_modules": "all-linear"}, "30 wrong: .*k_proj.lora_A.weight is missing.*and 20 more"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(folder, changes, words, monkeypatch):
    monkeypatch.setattr("flowgrpo.models.peft.MATCH_SECONDS", 1.0)
    rewrite(folder, changes)
    with pytest.raises(BadInput, match=words) as caught:
        load_adapter(folder, PLAIN)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("adapter_config.json", None, "adapter_config.json is missing"),
        ("adapter_config.json", b"{", "is not JSON"),
        pytest.param("adapter_config.json", b"[" * 100_000, "is not JSON: it is nested too deep", id="deep"),
        ("adapter_config.json", b"[]", "holds a list"),
        (TENSORS, None, "adapter_model.safetensors is missing"),
        (TENSORS, b"nonsense", "can't be read as safetensors"),
    ],
)
def test_broken_folders_are_refused(folder, file, content, words):
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_bytes(content)
    with pytest.raises(BadInput, match=words):
        load_adapter(folder, PLAIN)


def test_tensors_of_another_dtype_are_refused(folder):
    tensors = load_file(folder / TENSORS)
    save_file({name: value.astype(np.int8) for name, value in tensors.items()}, folder / TENSORS)
    with pytest.raises(BadInput, match="is I8 and not one of F32"):
        load_adapter(folder, PLAIN)


def test_a_wrong_adapter_or_folder_is_refused_before_writing(tmp_path):
    lora = LoraConfig(3, 6.0, ("q", "v"))
    adapter = random_adapter(PLAIN, lora)
    with pytest.raises(BadInput, match="v_a is unexpected"):
        save_adapter(tmp_path / "new", adapter, PLAIN, LoraConfig(3, targets=("q",)))
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="it is a file"):
        save_adapter(tmp_path / "file", adapter, PLAIN, lora)
    (tmp_path / "config.json").write_text("{}")  # as of a model, which PEFT would read together with the adapter
    with pytest.raises(BadInput, match=r"holds config.json, which is no part of an adapter: name a new folder"):
        save_adapter(tmp_path, adapter, PLAIN, lora)
    save_adapter(tmp_path / "new", adapter, PLAIN, lora)
    modes = {path.stat().st_mode for path in [tmp_path / "config.json", *(tmp_path / "new").iterdir()]}
    assert len(modes) == 1  # others may read it as they may any file


SOME = ("q", "v", "down")
ALL = {"r": 5, "lora_alpha": 8, "target_modules": "all-linear", "lora_dropout": 0.1}
LISTED = {"r": 3, "lora_alpha": 2, "target_modules": ["v_proj", "q_proj", "down_proj"], "use_rslora": True}
MATCHED = {"r": 4, "lora_alpha": 8, "target_modules": r".*\.(q_proj|v_proj|down_proj)"}


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("name", "settings", "targets"),
    [
        ("qwen2", ALL, PROJECTIONS),
        ("qwen3", LISTED, SOME),
        ("llama", MATCHED, SOME),
        ("mistral window", LISTED, SOME),
        ("gemma", ALL, PROJECTIONS),
        ("gemma2", MATCHED, SOME),
        ("gemma3", ALL, PROJECTIONS),
    ],
)
def test_logits_and_files_equal_those_of_peft_in_both_directions(peer, tmp_path, name, settings, targets):
    import peft

    def their_logits(model):
        with peer.torch.no_grad():
            return model.eval()(peer.torch.tensor(tokens_rs)).logits.numpy()

    tokens_rs = np.random.default_rng(0).integers(1, 131, (2, 17))
    peer.make("ForCausalLM", FAMILIES[name]).save_pretrained(tmp_path / "base")
    theirs = peft.get_peft_model(
        peer.hf.AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager"),
        peft.LoraConfig(task_type="CAUSAL_LM", **settings),
    )
    base = their_logits(theirs)  # PEFT starts with zeros
    peer.randomise([(key, value) for key, value in theirs.named_parameters() if "lora_" in key])
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_model(tmp_path / "base", tokenizer=False)
    lora, adapter = load_adapter(tmp_path / "theirs", ours.config)
    assert lora == LoraConfig(settings["r"], settings["lora_alpha"], targets, settings.get("use_rslora", False))
    params, expected = LoraParams(ours.params, adapter), their_logits(theirs)
    actual = jax.jit(lora_policy(ours.config, lora).apply)(params, tokens_rs.astype(np.int32))[0]
    assert np.abs(expected - base).max() > 0.3, "the adapter must change more than rounding does"
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4)
    save_adapter(tmp_path / "ours", adapter, ours.config, lora, base_model=str(tmp_path / "base"))
    jax.tree.map(np.testing.assert_array_equal, *(load_file(tmp_path / x / TENSORS) for x in ("ours", "theirs")))
    opened = peft.PeftModel.from_pretrained(theirs.unload(), tmp_path / "ours")
    np.testing.assert_allclose(their_logits(opened), expected, rtol=0, atol=1e-6)
