"""Every family against transformers' PyTorch models: logits, greedy tokens, and files in both directions (M1, M3).

Weights are random, also those that start as zeros or ones. Run with `-m oracle -n 0 -s` for the table of largest
absolute errors.
"""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import FAMILIES

from flowgrpo.models.families import decoder_config, text_source
from flowgrpo.models.hf import load_model, save_model

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*"),
]

TOLERANCE = 1e-4
ROWS, LENGTH, NEW = 3, 23, 32
ERRORS: dict[str, dict[str, float]] = {}


@pytest.fixture(scope="module", autouse=True)
def table():
    """One line per family after the last of them."""
    yield
    print()
    for name, errors in ERRORS.items():
        print(f"{name:28s} " + ", ".join(f"{part} {error:.1e}" for part, error in errors.items()))


@pytest.fixture
def tokens_rs():
    return np.random.default_rng(0).integers(1, 131, (ROWS, LENGTH))


def randomise(torch, model):
    """Every weight random, so that no bias is zero and no norm one; logits spread enough to be told apart."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, value in model.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            value.copy_(noise * (0.3 if value.ndim == 1 else 0.15) + (1.0 if "norm" in name else 0.0))
    return model.eval()


def make_theirs(peer, source):
    """A random PyTorch model of the shape that a config.json says."""
    config = peer.hf.AutoConfig.for_model(**json.loads(json.dumps(source)))
    return randomise(peer.torch, peer.hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager"))


def open_theirs(peer, folder):
    """A folder as transformers opens it, in float32."""
    model, report = peer.hf.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=peer.torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    return model.eval()


def their_logits(peer, model, tokens_rs):
    with peer.torch.no_grad():
        return model(peer.torch.tensor(tokens_rs)).logits.float().numpy()


def our_logits(model, tokens_rs):
    return np.asarray(jax.jit(model.policy.apply)(model.params, jnp.asarray(tokens_rs, jnp.int32))[0])


def compare(name, part, found, expected):
    """Record the largest absolute error and hold it to the tolerance."""
    assert found.shape == expected.shape
    assert expected.std() > 0.3, "the logits are too flat to compare"
    ERRORS.setdefault(name, {})[part] = error = float(np.abs(found - expected).max())
    assert error <= TOLERANCE, f"{name}: {part} differ by {error:.1e}"


def our_greedy(model, tokens_rs, new):
    """Prefill, then one token at a time with the cache."""
    step = jax.jit(model.policy.apply)
    cache = model.policy.make_cache(ROWS, LENGTH + new)
    logits, cache = step(model.params, jnp.asarray(tokens_rs, jnp.int32), cache=cache)
    chosen = [logits[:, -1].argmax(-1)]
    while len(chosen) < new:
        logits, cache = step(model.params, chosen[-1][:, None], cache=cache)
        chosen.append(logits[:, -1].argmax(-1))
    return np.stack(chosen, axis=1)


def their_greedy(peer, model, tokens_rs, new):
    tokens = peer.torch.tensor(tokens_rs)
    settings = peer.hf.GenerationConfig(max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)
    with peer.torch.no_grad():
        out = model.generate(tokens, attention_mask=peer.torch.ones_like(tokens), generation_config=settings)
    return out[:, LENGTH:].numpy()


@pytest.mark.parametrize("name", FAMILIES)
def test_M1_logits_and_greedy_tokens_equal_those_of_transformers(peer, tmp_path, tokens_rs, name):
    theirs = make_theirs(peer, FAMILIES[name])
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path, text=False)
    assert ours.config == decoder_config(text_source(FAMILIES[name])), "old and new style differ"
    compare(name, "logits", our_logits(ours, tokens_rs), their_logits(peer, theirs, tokens_rs))
    np.testing.assert_array_equal(our_greedy(ours, tokens_rs, NEW), their_greedy(peer, theirs, tokens_rs, NEW))


@pytest.mark.parametrize("shard_bytes", [5e9, 30_000])
@pytest.mark.parametrize("name", FAMILIES)
def test_M3_what_we_write_transformers_opens_and_every_tensor_is_the_same(peer, tmp_path, tokens_rs, name, shard_bytes):
    theirs = make_theirs(peer, FAMILIES[name])
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size=int(shard_bytes))
    ours = load_model(tmp_path / "theirs", text=False)
    save_model(tmp_path / "ours", ours, max_shard_bytes=shard_bytes)
    assert (tmp_path / "ours/model.safetensors.index.json").exists() == (shard_bytes < 5e9)
    assert (tmp_path / "theirs/model.safetensors.index.json").exists() == (shard_bytes < 5e9)
    read, written = (tensors(tmp_path / folder) for folder in ("theirs", "ours"))
    assert read.keys() == written.keys()
    assert all(read[key].tobytes() == written[key].tobytes() and read[key].shape == written[key].shape for key in read)
    again = open_theirs(peer, tmp_path / "ours")
    np.testing.assert_array_equal(their_logits(peer, again, tokens_rs), their_logits(peer, theirs, tokens_rs))


def tensors(folder):
    """Every tensor in the files of a folder."""
    from safetensors.numpy import load_file

    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
def test_M1_files_of_half_precision(peer, tmp_path, tokens_rs, name, dtype):
    make_theirs(peer, FAMILIES[name]).to(getattr(peer.torch, dtype)).save_pretrained(tmp_path / "theirs")
    wide = load_model(tmp_path / "theirs", text=False)
    theirs = open_theirs(peer, tmp_path / "theirs")
    compare(f"{name} {dtype} file", "logits", our_logits(wide, tokens_rs), their_logits(peer, theirs, tokens_rs))
    save_model(tmp_path / "ours", load_model(tmp_path / "theirs", text=False, dtype=dtype))
    read, written = (tensors(tmp_path / folder) for folder in ("theirs", "ours"))
    assert {key: value.tobytes() for key, value in read.items()} == {k: v.tobytes() for k, v in written.items()}
    assert json.loads((tmp_path / "ours/config.json").read_text())["dtype"] == dtype


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_M1_the_text_part_of_a_multimodal_folder(peer, tmp_path, tokens_rs, prefix):
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = peer.hf.Gemma3Config(text_config=FAMILIES["gemma3"], vision_config=vision, mm_tokens_per_image=4)
    both = peer.hf.Gemma3ForConditionalGeneration._from_config(config, attn_implementation="eager")
    theirs = randomise(peer.torch, both)
    theirs.save_pretrained(tmp_path)
    rename(tmp_path / "model.safetensors", prefix)
    ours = load_model(tmp_path, text=False)
    compare(f"gemma3 in {prefix}", "logits", our_logits(ours, tokens_rs), their_logits(peer, theirs, tokens_rs))
    save_model(tmp_path / "ours", ours)
    again = open_theirs(peer, tmp_path / "ours")
    compare(f"gemma3 in {prefix}", "written", their_logits(peer, again, tokens_rs), our_logits(ours, tokens_rs))


def rename(path, prefix):
    """The same file with another prefix before the tensors of the text part."""
    from safetensors.numpy import load_file, save_file

    held = load_file(path)
    known = next(each for each in ("model.language_model.", "language_model.model.") if f"{each}norm.weight" in held)
    save_file({name.replace(known, prefix): value for name, value in held.items()}, path, {"format": "pt"})


@pytest.mark.parametrize("name", ["llama llama3", "qwen2 yarn", "gemma3"])
def test_M1_holds_where_rows_are_padded(peer, tmp_path, tokens_rs, name):
    theirs = make_theirs(peer, FAMILIES[name])
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path, text=False)
    mask_rs = np.arange(LENGTH)[None] >= np.array([[0], [4], [9]])
    positions_rs = np.maximum(mask_rs.cumsum(1) - 1, 0)
    mask, positions = peer.torch.tensor(mask_rs.astype(int)), peer.torch.tensor(positions_rs)
    with peer.torch.no_grad():
        expected = theirs(peer.torch.tensor(tokens_rs), attention_mask=mask, position_ids=positions).logits.numpy()
    segments_rs = jnp.asarray(mask_rs, jnp.int32)
    found, _ = partial(ours.policy.apply, ours.params)(jnp.asarray(tokens_rs, jnp.int32), segments=segments_rs)
    compare(f"{name} padded", "logits", np.asarray(found)[mask_rs], expected[mask_rs])
