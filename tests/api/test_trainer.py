"""`train` and `Trainer`: the same bits, from objects; own advantages, own tasks, checkpoints, the model at the end."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gateway_cases import tiny_folder
from text_env_cases import Parcel

import flowgrpo as fg
from flowgrpo.training.checkpoints import params_sha256

SMALL = {"model_dim": 32, "layers": 1, "warm_steps": 20, "queries": 4, "samples": 4, "test_tasks": 16}
TEXT = {
    "queries": 2,
    "samples": 2,
    "context_tokens": 250,
    "validation_tasks": 2,
    "test_tasks": 2,
    "slots": 4,
    "prefill_chunk": 16,
    "mini_batches": 1,
    "temperature": 1.0,
}
RECORDS = [{"person": f"Ann {n}", "address": f"{n} Elm"} for n in range(60)]


@fg.algorithm(weights=fg.flow_weights, surrogate=fg.clip(0.2, 0.28))
def hopeful(outcome_n, group_n, valid_n):
    centred_n = fg.group_center(outcome_n, group_n, valid_n)
    return jnp.where(centred_n > 0, 2.0, 1.0) * centred_n


def assert_same(one, other):
    for x, y in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.fixture(scope="module")
def pure_trainer():
    trainer = fg.Trainer(env=fg.lookup(), algorithm=hopeful, **SMALL)
    trainer.warm_start()
    with trainer:
        yield trainer


@pytest.mark.slow
def test_a_trainer_takes_the_steps_of_a_run_bit_for_bit(pure_trainer, tmp_path):
    seen = []
    result = fg.train(
        fg.lookup(), algorithm=hopeful, updates=2, folder=tmp_path, every=1, on_update=seen.append, **SMALL
    )
    metrics = [pure_trainer.step() for _ in range(2)]
    assert params_sha256(pure_trainer.params) == result["params_sha256"]
    assert [line["update"] for line in seen] == [1, 2]
    np.testing.assert_array_equal(result.metrics["loss"], [line["loss"] for line in metrics])
    assert result["algorithm"] == "hopeful"
    assert result.validation["update"].tolist() == [0, 1, 2]
    assert f"{result['success_after']:.1%}" in str(result)
    assert_same(result.model.params, pure_trainer.model.params if result["best_update"] == 2 else result.model.params)
    assert {"metrics.jsonl", "checkpoints", "curves.png"} <= set(result.paths)
    assert [evaluation.tasks for evaluation in result.evaluate(tasks=8).evaluations] == [8, 8]


@pytest.mark.slow
def test_advantages_of_ones_own(pure_trainer):
    rollout = pure_trainer.rollout(2, samples=3)
    assert len(rollout.trajectories.group) == 6
    with pytest.raises(fg.BadInput, match=r"advantages have the shape \(5,\): give one for each of 6 trajectories"):
        pure_trainer.update(rollout, np.ones(5))
    before = jax.tree.map(np.asarray, pure_trainer.params)
    metrics = pure_trainer.update(rollout, np.zeros(6))
    assert metrics["advantage_std"] == 0
    assert_same(before, pure_trainer.params)  # F8
    with pytest.raises(fg.BadInput, match="a warm start comes before the first update"):
        pure_trainer.warm_start()


@pytest.mark.slow
def test_a_trainer_of_text_saves_and_restores_bit_for_bit(tmp_path):
    """An adapter over a model that is handed in, tasks with each rollout, and the run of the same settings."""
    model = fg.load_model(tiny_folder(), lora=2)
    parts = {"env": Parcel, "algorithm": fg.flow_grpo(beta=0.01), "optimizer": fg.adamw(1e-2)}
    tasks, states = list(fg.batches(RECORDS, 2, epochs=1)), []
    with fg.Trainer(model, **parts, **TEXT) as trainer:
        for number, batch in enumerate(tasks[:3]):
            rollout = trainer.rollout(batch, samples=3)
            assert [record.task.id for record in rollout.records] == [task.id for task in batch for _ in range(3)]
            metrics = trainer.update(rollout, trainer.advantages(rollout))
            assert metrics["tokens_trained"] > 0
            if number == 0:
                trainer.save(tmp_path / "saved", cursor=number)
            states.append(jax.tree.map(np.asarray, trainer.params.adapter))
        assert 0 <= trainer.evaluate(batch).success <= 1
        trainer.model.save(tmp_path / "model")
        with pytest.raises(fg.BadInput, match="there are no tasks to roll out: pass some"):
            trainer.rollout()
    with fg.Trainer(model, **parts, **TEXT) as other:
        assert other.restore(tmp_path / "nothing") is None
        assert other.restore(tmp_path / "saved") == {"cursor": 0}
        for batch in tasks[1:3]:
            rollout = other.rollout(batch, samples=3)
            other.update(rollout, other.advantages(rollout))
        assert_same(other.params.adapter, states[-1])
        assert_same(fg.load_model(tmp_path / "model").params, other.model.merged().params)
    parts["env"] = fg.single_turn(reward=lambda _task, _output: 1.0)
    with fg.Trainer(model, **parts, **{**TEXT, "seed": 1}) as stranger:
        with pytest.raises(fg.BadInput, match=r"checkpoints of a trainer with other settings \(.*seed"):
            stranger.restore(tmp_path / "saved")
        with pytest.raises(fg.BadInput, match=r"none of 2 trajectories came to an outcome.*returned 1\.0"):
            stranger.rollout([{"query": "say something"}], samples=2)


@pytest.mark.slow
def test_a_run_of_text_trains_an_adapter_and_leaves_its_model(tmp_path):
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    result = fg.train(
        Parcel,
        tasks=tmp_path / "tasks.jsonl",
        model=tiny_folder(),
        lora=2,
        updates=1,
        folder=tmp_path / "run",
        **TEXT,
    )
    assert result["updates"] == 1
    model = result.model
    assert model.lora is not None
    assert model.lora.rank == 2
    model.save(tmp_path / "model")
    assert fg.load_model(tmp_path / "model").config == model.config
