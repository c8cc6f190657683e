"""Fine-tuning as a command: a folder in, a better folder out; it goes on where it was stopped, to the same bits."""

import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

import flowgrpo as fg
from flowgrpo.learner.conversations import preference_rows
from flowgrpo.recipes import finetune as module
from flowgrpo.recipes.finetune import RECIPE, batches, margins_of, split_examples
from flowgrpo.recipes.finetune_config import DataSection, preset
from flowgrpo.recipes.offline_start import write_model
from flowgrpo.training.checkpoints import Checkpoints
from tests.experiments.conftest import check_refused, last_line, metrics

SMALL = ("--max_tokens=48", "--batch=8", "--learning_rate=0.003", "--checkpoint_every=4")


def test_each_epoch_is_a_permutation_of_its_own():
    seen = list(batches(10, 4, seed=0, first=0, steps=5))
    flat = [i for chosen in seen for i in chosen]
    assert sorted(flat[:10]) == sorted(flat[10:]) == list(range(10))
    assert flat[:10] != flat[10:]
    assert list(batches(10, 4, seed=0, first=2, steps=5)) == seen[2:]
    assert list(islice(batches(10, 4, seed=1, first=0, steps=5), 2)) != seen[:2]


def conversation(size: int, group: int = 0, outcome: float = 1.0) -> fg.Trajectory:
    chosen = np.arange(size) > 0
    return fg.Trajectory([fg.Turn(np.arange(size) + 1, chosen, np.zeros(size, np.float32))], outcome, group)


def test_too_long_examples_are_left_out_and_counted():
    examples = [conversation(size) for size in (4, 9, 5, 6)]
    parts = split_examples(DataSection(data="x.jsonl", max_tokens=6, held_out=0.3), examples, seed=0)
    assert (len(parts.train), len(parts.held_out), parts.num_too_long) == (2, 1, 1)
    with pytest.raises(fg.BadInput, match=r"x.jsonl has 1 examples of at most 4 tokens, 1 of them held out: raise"):
        split_examples(DataSection(data="x.jsonl", max_tokens=4, held_out=0.3), examples, seed=0)


def test_a_margin_is_the_chosen_sides_gain_over_the_rejected():
    pairs = [(conversation(3, g), conversation(4, g, 0.0)) for g in (0, 1)]
    batch = preference_rows(pairs, row_length=8, rows=4)
    batch = batch.replace(logp_ref=np.zeros(batch.tokens.shape, np.float32))
    gain_rs = np.where(np.asarray(batch.group) == 0, 0.5, -1.0).astype(np.float32)
    # 2 tokens against 3, each of which gained as much.
    np.testing.assert_allclose(margins_of(batch, gain_rs), [0.5 * 2 - 0.5 * 3, -1.0 * 2 + 1.0 * 3])


# As a command -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> Path:
    """A small model, and what it may learn from."""
    folder = tmp_path_factory.mktemp("finetune")
    sums = [(a, b) for a in range(8) for b in range(8)]
    lines = {
        "sft": [{"prompt": f"{a} + {b} = ?", "completion": f"The sum is {a + b}."} for a, b in sums],
        "dpo": [{"prompt": f"{a} + {b} = ?", "chosen": f"{a + b}", "rejected": f"No, {a + b + 1}"} for a, b in sums],
    }
    for name, own in lines.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in own))
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
    write_model(folder / "model", [json.dumps(lines)], seed=0, shape=shape, vocab_size=320)
    return folder


def arguments(begun: Path, method: str, workdir: Path, *more: str, model: Path | None = None) -> tuple[str, ...]:
    data = begun / f"{method}.jsonl"
    start = model or begun / "model"
    return (f"--method={method}", f"--data={data}", f"--model={start}", f"--workdir={workdir}", *SMALL, *more)


@pytest.mark.slow
def test_demonstrations_are_learned_then_preferences_and_the_folder_opens(command, begun, tmp_path):
    taught = last_line(command("finetune", *arguments(begun, "sft", tmp_path / "sft", "--epochs=3")))
    assert taught["nll_after"] < taught["nll_before"] - 1
    assert (taught["examples"], taught["held_out"], taught["left_out"]) == (58, 6, 0)
    start = tmp_path / "sft" / "model"
    found = last_line(command("finetune", *arguments(begun, "dpo", tmp_path / "dpo", model=start)))
    assert (found["loss_before"], found["preferred_before"]) == (pytest.approx(np.log(2)), 0.5)
    assert found["loss_after"] < found["loss_before"]
    assert found["preferred_after"] > 0.8
    fg.load_model(tmp_path / "dpo" / "model")
    assert len(metrics(tmp_path / "dpo", "train")) == found["steps"]


@pytest.mark.slow
def test_S1_a_resumed_run_equals_an_uninterrupted_one(begun, tmp_path, monkeypatch):
    """Stopped by Ctrl-C in the middle of a step, between two checkpoints."""
    config = preset(
        "sft",
        data=str(begun / "sft.jsonl"),
        model=str(begun / "model"),
        batch=8,
        learning_rate=0.003,
        max_tokens=48,
    )
    whole = RECIPE.train(config, tmp_path / "whole", every=4)

    def interrupted(count, size, seed, first, steps):
        if first == 6:
            raise KeyboardInterrupt
        return batches(count, size, seed, first, steps)

    with monkeypatch.context() as patch:
        patch.setattr(module, "batches", interrupted)
        with pytest.raises(KeyboardInterrupt):
            RECIPE.train(config, tmp_path / "parts", every=4)
    validate = module.FinetuneTrainable.validate

    def at_the_end(trainable, params):
        if Checkpoints(tmp_path / "parts").latest() == 6:
            raise KeyboardInterrupt
        return validate(trainable, params)

    with monkeypatch.context() as patch:  # and once more, in the last validation
        patch.setattr(module.FinetuneTrainable, "validate", at_the_end)
        with pytest.raises(KeyboardInterrupt):
            RECIPE.train(config, tmp_path / "parts", every=4)
    again = RECIPE.train(config, tmp_path / "parts", every=4)
    assert again["resumed_at"][0] == 6
    assert again["params_sha256"] == whole["params_sha256"]
    for name in ("metrics.jsonl", "model/model.safetensors"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    with pytest.raises(fg.BadInput, match=r"holds another run: learning_rate: there 0.003, here 0.1"):
        RECIPE.train(config.replace(learning_rate=0.1), tmp_path / "parts")


@pytest.mark.slow
def test_lines_of_another_method_are_refused(command, begun, tmp_path):
    given = (f"--data={begun}/sft.jsonl", f"--model={begun}/model", f"--workdir={tmp_path}/run")
    check_refused(command("finetune", "--method=dpo", *given, check=False), "field 'chosen' is missing")
