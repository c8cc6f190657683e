"""Benchmarks on real weights, in tiny sizes: the reference in float64 is right, errors are found, systems race."""

import jax
import numpy as np
import pytest
from gateway_cases import tiny_folder
from model_cases import FAMILIES, random_model

from experiments.benchmarks import exactness_paths, float64
from experiments.benchmarks.racers.real_workload import Sizes, step_prompts
from flowgrpo.models.hf import save_model
from tests.experiments.conftest import last_line

CONTEXT = np.random.default_rng(0).integers(4, 131, 40).tolist()
PATHS = {"sampled", "sampled again", "greedy", "scored", "scored in trees", "echoed"}


def test_sizes_of_a_step_count_shared_tokens_once():
    sizes = Sizes(queries=2, samples=3, shared=5, own=2, answer=4)
    assert (sizes.laid_out, sizes.distinct) == (6 * 11, 5 + 2 * (2 + 3 * 4))
    first, second = step_prompts(100, sizes, seed=0)
    assert first[:5] == second[:5]
    assert first[5:] != second[5:]
    assert step_prompts(100, sizes, seed=2) != [first, second]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    most = logits.max(axis=-1, keepdims=True)
    return logits - most - np.log(np.exp(logits - most).sum(axis=-1, keepdims=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2 window, yarn", "llama llama3", "gemma2", "gemma3"])
def test_the_reference_agrees_with_the_decoder_to_float32(name):
    model = random_model(name)
    logits, _ = jax.jit(model.policy.apply)(model.params, np.array([CONTEXT], np.int32))
    reference = float64.Reference(jax.device_get(model.params), model.config, banned=(3,))
    reference.score([*CONTEXT[:20], *CONTEXT[:9]])  # whose first 20 tokens are not computed again
    scores = reference.score(CONTEXT)
    logits_sv = np.asarray(logits[0], np.float64)
    place = (np.arange(len(CONTEXT) - 1), CONTEXT[1:])
    np.testing.assert_allclose(scores["logp_all"][1:], log_softmax(logits_sv)[:-1][place], atol=2e-5)
    logits_sv[:, 3] = -np.inf
    np.testing.assert_allclose(scores["logp"][1:], log_softmax(logits_sv)[:-1][place], atol=2e-5)
    margin = np.sort(logits_sv, axis=-1)[:-1, -1] - logits_sv[:-1][place]
    np.testing.assert_allclose(-np.minimum(scores["margin"][1:], 0), margin, atol=2e-4)


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
@pytest.mark.parametrize("name", FAMILIES)
def test_the_reference_is_pytorch_in_float64(tmp_path, name):
    torch = pytest.importorskip("torch", reason="needs the extra [oracle]")
    transformers = pytest.importorskip("transformers")
    model = random_model(name)
    save_model(tmp_path / "model", model)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", attn_implementation="eager", dtype=torch.float64
    ).eval()
    with torch.inference_mode():
        logits_sv = theirs(input_ids=torch.tensor([CONTEXT])).logits[0].numpy()
    scores = float64.Reference(jax.device_get(model.params), model.config).score(CONTEXT)
    expected = log_softmax(logits_sv.astype(np.float64))[:-1][np.arange(len(CONTEXT) - 1), CONTEXT[1:]]
    # Both round angles to float32, and the embedding's scale, too, in Gemma.
    np.testing.assert_allclose(scores["logp_all"][1:], expected, atol=5e-6)


@pytest.mark.slow
def test_every_path_is_compared_with_float64_and_errors_are_counted(command):
    found = last_line(command("benchmarks.exactness", f"--models={tiny_folder()}", "--lengths=40,140", "--modes=fast"))
    assert {line["path"] for line in found["paths"]} == PATHS
    assert {line["positions"] for line in found["paths"]} == {"0-127", "128-511"}
    assert all(line["max"] < 5e-6 for line in found["paths"])
    assert not any(line["over_bar"] for line in found["paths"])
    tokens = tuple(CONTEXT)
    off = [exactness_paths.ScoredContext("scored", tokens, len(tokens) - 1, (logp,)) for logp in (0.0, -100.0)]
    (line,) = exactness_paths.compare_paths(str(tiny_folder()), off)
    assert (line["tokens"], line["over_bar"], line["max"] > 80) == (2, 2, True)


@pytest.mark.slow
def test_systems_race_on_a_model_folder(command):
    sizes = {"rows": 4, "prompt": 24, "steps": 4, "update_rows": 2, "update_length": 32, "queries": 2, "samples": 2}
    sizes |= {"shared": 12, "own": 6, "answer": 5}
    flags = ["--parts=decode,update,step,profile", "--systems=flowgrpo,products", "--repeats=1"]
    flags += [f"--{name}={size}" for name, size in sizes.items()]
    found = last_line(command("benchmarks.real", f"--model={tiny_folder()}", *flags))
    assert (found["failed"], found["sizes"]) == ({}, sizes)
    pairs = [(record["part"], record["system"]) for record in found["records"]]
    assert pairs == [(part, name) for part in ("decode", "update") for name in ("flowgrpo", "products")] + [
        ("step", "flowgrpo")
    ]
    assert all(record["peak_gib"] > 0 and record["first_seconds"] > 0 for record in found["records"])
    step = found["records"][-1]
    assert step["tokens"] == 4 * 23
    assert 0 < step["computed_tokens"] < step["context_tokens"] <= step["tokens"]
    assert {"a step of 1 row", "prefill", "update: optimizer"} <= {line["of"] for line in found["profile"]}
