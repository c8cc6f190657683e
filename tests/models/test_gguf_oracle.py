"""GGUF files beside transformers, which dequantises them itself: logits within 1e-4, token ids equal (M5).

Two of the files are real models, of the extras [smollm2] and [gemma3]; where one is not installed, its tests skip.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf_cases import CASES, gguf_model, write_gguf
from gguf_models import packaged
from gguf_strings import make_strings

from flowgrpo.data.named_models import NAMED_MODELS
from flowgrpo.data.tokenizer import load_tokenizer
from flowgrpo.models import hf

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore"),  # those of transformers, which are not ours
]
# transformers reads neither rope factors nor the scaling of a rope, nor softcaps, nor a llama's window.
SAME = ("llama", "qwen2", "qwen3", "gemma2, as published", "gemma3, as published")


def compare(peer, file: Path, tokens: np.ndarray) -> float:
    """The largest absolute difference between logits of ours and of transformers, which loads the file itself."""
    model = hf.load_model(file, tokenizer=False)
    ours = np.asarray(jax.jit(model.policy.apply)(model.params, jnp.asarray(tokens))[0])
    del model
    quantised = peer.hf.GgufConfig(dequantize=True)
    theirs = peer.hf.AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        quantization_config=quantised,
        dtype=peer.torch.float32,
        attn_implementation="eager",
    )
    with peer.torch.no_grad():
        wanted = theirs.eval()(peer.torch.from_numpy(tokens)).logits.numpy()
    return float(np.abs(ours - wanted).max())


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_1", "Q6_K"])
@pytest.mark.parametrize("name", SAME)
def test_M5_logits_of_random_models(peer, tmp_path, name, kind):
    file = tmp_path / "model.gguf"
    words = {"tokenizer.ggml.tokens": [f"w{i}" for i in range(CASES[name]["vocab_size"])], "general.name": "random"}
    write_gguf(file, gguf_model(name), kind, metadata=words)
    tokens = np.random.default_rng(0).integers(0, 300, (2, 24))
    assert compare(peer, file, tokens) <= 1e-4


@pytest.mark.parametrize("name", NAMED_MODELS)
def test_M5_logits_of_real_models(peer, name):
    file = packaged(name)
    tokens = np.asarray([load_tokenizer(file).encode("The capital of France is Paris, and 17 + 25 = 42.\n\n" * 2)])
    assert compare(peer, file, tokens) <= 1e-4


def test_M5_token_ids_of_gemma_equal_those_of_transformers(peer):
    """For SmolLM2 transformers cuts words by GPT-2's rule, which is not its own; there llama.cpp was compared with."""
    file, strings = packaged("gemma3"), make_strings(2000)
    theirs = peer.hf.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    ours = load_tokenizer(file)
    for string in strings:
        assert ours.encode(string) == theirs.encode(string, add_special_tokens=False), string
        assert ours.hf_tokenizer.encode(string)[0] == theirs.bos_token_id
