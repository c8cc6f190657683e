"""Adapters against PEFT over transformers' PyTorch models: logits after exchanging files in both directions.

Run with `-m oracle -n 0 -s` for the largest absolute errors.
"""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import FAMILIES

from flowgrpo.models.hf import load_model
from flowgrpo.models.lora import PROJECTIONS, Adapted, LoraConfig, adapter_shapes, lora_policy, merge
from flowgrpo.models.peft import load_adapter, save_adapter

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

TOLERANCE = 1e-4
NAMES = ["qwen2", "qwen3", "llama", "mistral window", "gemma", "gemma2", "gemma3"]
SOME = ("q", "v", "down")


@pytest.fixture(scope="module")
def peer():
    """PyTorch, transformers and PEFT, imported here: collecting this file needs none of them."""
    import peft
    import torch
    import transformers

    torch.set_num_threads(1)
    return SimpleNamespace(torch=torch, hf=transformers, peft=peft)


@pytest.fixture
def tokens_rs():
    return np.random.default_rng(0).integers(1, 131, (2, 17))


def randomise(torch, named, deviation):
    """Every named weight random; those of norms lie around one."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, value in named:
            value.copy_(torch.randn(value.shape, generator=generator) * deviation + ("norm" in name))


def make_base(peer, name, folder):
    """A random model of a family: theirs, and ours from its files."""
    config = peer.hf.AutoConfig.for_model(**json.loads(json.dumps(FAMILIES[name])))
    theirs = peer.hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    randomise(peer.torch, theirs.named_parameters(), 0.1)
    theirs.save_pretrained(folder)
    return theirs, load_model(folder, text=False)


def random_adapter(config, lora):
    draw, shapes = np.random.default_rng(3), adapter_shapes(config, lora).items()
    return {name: jnp.asarray(draw.normal(0, 0.1, shape), jnp.float32) for name, shape in shapes}


def their_logits(peer, model, tokens_rs):
    with peer.torch.no_grad():
        return model.eval()(peer.torch.tensor(tokens_rs)).logits.float().numpy()


def our_logits(policy, params, tokens_rs):
    return np.asarray(jax.jit(policy.apply)(params, jnp.asarray(tokens_rs, jnp.int32))[0])


def compare(name, found, expected, base):
    """Hold the largest absolute error to the tolerance; the adapter must change much more than that."""
    error = float(np.abs(found - expected).max())
    print(f"{name:40s} {error:.1e}")
    assert error <= TOLERANCE
    assert np.abs(expected - base).max() > 0.3


@pytest.mark.parametrize("lora", [LoraConfig(5, 8.0), LoraConfig(3, 2.5, SOME, rslora=True)], ids=["all", "some"])
@pytest.mark.parametrize("name", NAMES)
def test_peft_opens_what_we_write(peer, tmp_path, tokens_rs, name, lora):
    theirs, ours = make_base(peer, name, tmp_path / "base")
    base = their_logits(peer, theirs, tokens_rs)
    params = Adapted(ours.params, random_adapter(ours.config, lora))
    save_adapter(tmp_path / "adapter", params.adapter, ours.config, lora, base_model=str(tmp_path / "base"))
    opened = peer.peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter")
    found = our_logits(lora_policy(ours.config, lora), params, tokens_rs)
    compare(f"{name}: ours in PEFT", found, their_logits(peer, opened, tokens_rs), base)
    merged = our_logits(ours.policy, merge(params, ours.config, lora), tokens_rs)
    compare(
        f"{name}: ours merged, theirs merged", merged, their_logits(peer, opened.merge_and_unload(), tokens_rs), base
    )


def write_theirs(peer, theirs, folder, **settings):
    """A random adapter that PEFT wrote; the model with it."""
    config = peer.peft.LoraConfig(task_type="CAUSAL_LM", **settings)
    wrapped = peer.peft.get_peft_model(theirs, config)
    randomise(peer.torch, [(name, value) for name, value in wrapped.named_parameters() if "lora_" in name], 0.1)
    wrapped.save_pretrained(folder)
    return wrapped


@pytest.mark.parametrize(
    ("settings", "targets"),
    [
        ({"r": 5, "lora_alpha": 8, "target_modules": "all-linear", "lora_dropout": 0.1}, PROJECTIONS),
        ({"r": 3, "lora_alpha": 2, "target_modules": ["v_proj", "q_proj", "down_proj"], "use_rslora": True}, SOME),
        ({"r": 4, "lora_alpha": 8, "target_modules": r".*\.(q_proj|v_proj|down_proj)"}, SOME),
    ],
    ids=["all", "some", "expression"],
)
@pytest.mark.parametrize("name", NAMES)
def test_we_open_what_peft_writes(peer, tmp_path, tokens_rs, name, settings, targets):
    theirs, ours = make_base(peer, name, tmp_path / "base")
    base = their_logits(peer, theirs, tokens_rs)
    wrapped = write_theirs(peer, theirs, tmp_path / "adapter", **settings)
    lora, adapter = load_adapter(tmp_path / "adapter", ours.config)
    expected = LoraConfig(settings["r"], settings["lora_alpha"], targets, settings.get("use_rslora", False))
    assert lora == expected
    found = our_logits(lora_policy(ours.config, lora), Adapted(ours.params, adapter), tokens_rs)
    compare(f"{name}: theirs in ours", found, their_logits(peer, wrapped, tokens_rs), base)
    save_adapter(tmp_path / "again", adapter, ours.config, lora)
    read, written = (tensors(tmp_path / folder) for folder in ("adapter", "again"))
    assert {key: value.tobytes() for key, value in read.items()} == {k: v.tobytes() for k, v in written.items()}


def tensors(folder):
    """The tensors of an adapter's file."""
    from safetensors.numpy import load_file

    return load_file(folder / "adapter_model.safetensors")
