"""Every family against transformers' PyTorch models: logits, and files in both directions (M1, M3).

Weights are random, also those that start as zeros or ones. `-m oracle -n 0 -s` prints the largest absolute errors.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import FAMILIES
from safetensors.numpy import load_file, save_file

from flowgrpo.models.families import decoder_config, text_model_config
from flowgrpo.models.hf import load_model, save_model

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*"),
]

TOKENS_RS = np.random.default_rng(0).integers(1, 131, (3, 40)).astype(np.int32)
REAL_RS = np.arange(40)[None] >= np.array([[0], [4], [9]])  # the others are padding, on the left


def open_theirs(peer, folder):
    """A folder as transformers opens it, in float32."""
    model, report = peer.hf.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=peer.torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    return model.eval()


def their_logits(peer, model):
    tokens, mask, positions = map(peer.torch.tensor, (TOKENS_RS, REAL_RS.astype(int), REAL_RS.cumsum(1) - 1))
    with peer.torch.no_grad():
        actual = model(tokens, attention_mask=mask, position_ids=positions.clamp(min=0)).logits
    return actual.float().numpy()[REAL_RS]


def check_logits(peer, ours, theirs):
    """Hold the largest absolute error to the tolerance."""
    actual = jax.jit(ours.policy.apply)(ours.params, TOKENS_RS, segments=jnp.asarray(REAL_RS, jnp.int32))[0]
    expected = their_logits(peer, theirs)
    assert expected.std() > 0.3, "the logits are too flat to compare"
    print(f"{ours.hf_config['model_type']:12s} {np.abs(np.asarray(actual)[REAL_RS] - expected).max():.1e}")
    np.testing.assert_allclose(np.asarray(actual)[REAL_RS], expected, rtol=0, atol=1e-4)


def check_tensors(their_folder, our_folder):
    """The files of two folders hold the same tensors, bit for bit."""
    read, written = (
        {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}
        for folder in (their_folder, our_folder)
    )
    assert read.keys() == written.keys()
    assert all(read[key].tobytes() == written[key].tobytes() and read[key].shape == written[key].shape for key in read)


@pytest.mark.parametrize("name", FAMILIES)
def test_M1_logits_equal_those_of_transformers_with_padded_rows(peer, tmp_path, name):
    theirs = peer.make("ForCausalLM", FAMILIES[name])
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path, tokenizer=False)
    assert ours.config == decoder_config(text_model_config(FAMILIES[name])), "old and new style differ"
    check_logits(peer, ours, theirs)


@pytest.mark.parametrize("name", FAMILIES)
def test_M3_transformers_opens_what_we_write_with_equal_tensors(peer, tmp_path, name):
    theirs = peer.make("ForCausalLM", FAMILIES[name])
    for most in (30_000, 5_000_000_000):
        their_folder, our_folder = tmp_path / f"theirs {most}", tmp_path / f"ours {most}"
        theirs.save_pretrained(their_folder, max_shard_size=most)
        save_model(our_folder, load_model(their_folder, tokenizer=False), max_shard_bytes=most)
        for folder in (their_folder, our_folder):
            assert (folder / "model.safetensors.index.json").exists() == (most == 30_000)
        check_tensors(their_folder, our_folder)
        np.testing.assert_array_equal(their_logits(peer, open_theirs(peer, our_folder)), their_logits(peer, theirs))


@pytest.mark.parametrize(("name", "dtype"), [("qwen2", "bfloat16"), ("gemma3", "float16")])
def test_M1_files_of_half_precision(peer, tmp_path, name, dtype):
    their_folder, our_folder = tmp_path / "theirs", tmp_path / "ours"
    peer.make("ForCausalLM", FAMILIES[name]).to(getattr(peer.torch, dtype)).save_pretrained(their_folder)
    check_logits(peer, load_model(their_folder, tokenizer=False), open_theirs(peer, their_folder))
    save_model(our_folder, load_model(their_folder, tokenizer=False, dtype=dtype))
    check_tensors(their_folder, our_folder)
    assert json.loads((our_folder / "config.json").read_text())["dtype"] == dtype


def test_M1_text_part_of_multimodal_folders_with_new_and_old_names(peer, tmp_path):
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = peer.hf.Gemma3Config(text_config=FAMILIES["gemma3"], vision_config=vision, mm_tokens_per_image=4)
    theirs = peer.hf.Gemma3ForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    peer.randomise(theirs.named_parameters())
    theirs.save_pretrained(tmp_path)
    tensors, prefixes = load_file(tmp_path / "model.safetensors"), ("model.language_model.", "language_model.model.")
    old_prefix = next(prefix for prefix in prefixes if f"{prefix}norm.weight" in tensors)
    for prefix in prefixes:
        renamed = {name.replace(old_prefix, prefix): value for name, value in tensors.items()}
        save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
        ours = load_model(tmp_path, tokenizer=False)
        check_logits(peer, ours, theirs)
        save_model(tmp_path / "ours", ours)
        check_logits(peer, ours, open_theirs(peer, tmp_path / "ours"))
