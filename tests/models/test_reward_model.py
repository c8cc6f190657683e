"""Scalar-head reward models: scores equal transformers' PyTorch; other folders are refused with one sentence."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import FAMILIES, random_model
from safetensors.numpy import load_file, save_file

from flowgrpo.models import hf
from flowgrpo.models.critic import HEAD
from flowgrpo.models.reward_model import CLASSES, load_scorer
from flowgrpo.rewards.reward_model import make_score_tokens
from flowgrpo.types import BadInput


def write(folder, name="qwen2", head=None, **changes):
    """A random decoder under a head, saved as sequence classification."""
    model = random_model(name)
    hf.save_model(folder, model)
    source = json.loads((folder / "config.json").read_text())
    source |= {"architectures": [CLASSES[source["model_type"]]], "id2label": {"0": "LABEL_0"}} | changes
    (folder / "config.json").write_text(json.dumps(source))
    tensors = {key: value for key, value in load_file(folder / hf.SINGLE).items() if key != "lm_head.weight"}
    weight = np.random.default_rng(1).normal(size=(1, model.config.d)).astype(np.float32) if head is None else head
    save_file(tensors if weight is False else tensors | {"score.weight": weight}, folder / hf.SINGLE)
    return model


def test_the_score_is_the_head_over_the_last_hidden_state(tmp_path):
    model = write(tmp_path, "llama")
    scorer = load_scorer(tmp_path, tokenizer=False)
    tokens = [5, 9, 2, 77, 3]
    states = model.policy.hidden(model.params, jnp.asarray([tokens]))[0]
    expected = float(np.asarray(states)[0, -1] @ np.asarray(scorer.params[HEAD]))
    actual = make_score_tokens(scorer.score, scorer.params, rows=2, lengths=(8,))([tokens])
    np.testing.assert_allclose(actual, [expected], rtol=1e-5)
    assert scorer.params[HEAD].dtype == jnp.float32
    assert "unembed" not in scorer.params


def test_a_score_depends_neither_on_padding_nor_on_neighbours(tmp_path):
    write(tmp_path)
    scorer, lists = load_scorer(tmp_path, tokenizer=False), [[1, 2, 3], [0, 0], [5] * 7, [9], [4, 3, 2, 1, 0]]
    score_tokens = make_score_tokens(scorer.score, scorer.params, rows=2, lengths=(4, 8))
    together = score_tokens(lists)
    np.testing.assert_array_equal(together, [score_tokens([tokens])[0] for tokens in lists])
    assert len(set(together.tolist())) == len(lists)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head": np.zeros((2, 48), np.float32)}, r"shape \[2, 48\] .* one label"),
        ({"head": np.zeros((1, 48), np.int32)}, r"score.weight .* is I32"),
        ({"head": False}, r"no score\.weight"),
        ({"architectures": ["Qwen2ForCausalLM"]}, "Qwen2ForCausalLM is not read as a reward model"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification is not read"),
        ({"model_type": "bert"}, "is not read as a reward model"),
        ({"hidden_size": 60}, r"shape \[1, 48\] and not \[1, 60\]"),
    ],
)
def test_folders_that_are_no_scalar_reward_models_are_refused(tmp_path, change, message):
    write(tmp_path, **change)
    with pytest.raises(BadInput, match=message):
        load_scorer(tmp_path, tokenizer=False)


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama llama3", "mistral window", "gemma", "gemma2", "gemma3"])
def test_scores_of_unequal_lengths_equal_those_of_transformers(peer, tmp_path, name):
    theirs = peer.make("ForSequenceClassification", FAMILIES[name], num_labels=1)
    theirs.save_pretrained(tmp_path)
    scorer, random = load_scorer(tmp_path, tokenizer=False), np.random.default_rng(0)
    lists = [random.integers(1, 131, length).tolist() for length in (23, 9, 1, 16, 30)]
    padded = peer.torch.tensor([tokens + [0] * (30 - len(tokens)) for tokens in lists])
    mask = peer.torch.tensor([[1] * len(tokens) + [0] * (30 - len(tokens)) for tokens in lists])
    with peer.torch.no_grad():
        expected = theirs(padded, attention_mask=mask).logits.numpy()[:, 0]
    assert expected.std() > 0.3, "the scores are too flat to compare"
    actual = make_score_tokens(scorer.score, scorer.params, rows=5, lengths=(32,))(lists)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4)
