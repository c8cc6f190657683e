"""The imitation before reinforcement: it stops by itself, and goes on where it was killed, to the same bits (S1)."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from flowgrpo.learner.state import LearnerState, init_learner
from flowgrpo.models.trainable import TrainableSubset
from flowgrpo.training.checkpoints import Checkpoints, params_sha256
from flowgrpo.training.warm_start import WARM, WarmStart, finish_warm_start, no_warm_start, saved_position, warm_start
from flowgrpo.types import BadInput

OPTIMIZER = optax.adam(0.05)
TRUTH = jnp.array([1.0, -2.0])


@jax.jit
def step(state: LearnerState, x_rd: jax.Array) -> tuple[LearnerState, None]:
    grads = jax.grad(lambda params: jnp.mean((x_rd @ (params["w"] - TRUTH)) ** 2))(state.params)
    with jax.numpy_dtype_promotion("standard"):
        changes, memory = OPTIMIZER.update(grads, state.optimizer, state.params)
    return state.replace(params=optax.apply_updates(state.params, changes), optimizer=memory), None


def make(steps: int = 24, *, killed_at: int | None = None, loss=lambda params: jnp.sum((params["w"] - TRUTH) ** 2)):
    """A warm start of a few numbers, which is killed before one of its batches."""

    def batches(first: int):
        for number in range(first, 100):
            if number == killed_at:
                raise KeyboardInterrupt
            yield jax.random.normal(jax.random.fold_in(jax.random.key(0), number), (8, 2))

    state = init_learner({"w": jnp.zeros(2)}, OPTIMIZER)
    return WarmStart(state, step, batches, loss, steps=steps, every=4, patience=3)


@pytest.mark.parametrize("killed_at", [1, 4, 9, 15, 23])
def test_S1_killed_warm_start_resumes_bit_for_bit(tmp_path, killed_at):
    expected, calls = [], []
    whole = warm_start(make(), tmp_path / "whole", lambda *args: expected.append(args))

    def record(*args):
        calls.append(args)

    position = partial(lambda: {"metrics.jsonl": len(calls)})
    with pytest.raises(KeyboardInterrupt):
        warm_start(make(killed_at=killed_at), tmp_path / "parts", record, position)
    del calls[(saved_position(tmp_path / "parts") or {}).get("metrics.jsonl", 0) :]  # as the files of metrics are cut
    again = warm_start(make(), tmp_path / "parts", record, position)
    assert params_sha256(again) == params_sha256(whole)
    assert calls == expected
    assert [count for count, _ in expected] == [0, 4, 8, 12, 16, 20, 24]


def frozen_beside(killed_at: int | None = None) -> WarmStart:
    """The same warm start, of which a base that is frozen is no part."""
    warm, base = make(killed_at=killed_at), jnp.full(1000, 3.0)
    trainable = TrainableSubset(lambda params: {"w": params["w"]}, lambda params, part: {**params, **part})

    def step_part(state: LearnerState, batch: jax.Array) -> tuple[LearnerState, None]:
        params = state.params
        state, _ = step(state.replace(params=trainable.split(params)), batch)
        return state.replace(params=trainable.merge(params, state.params)), None

    state = warm.state.replace(params={"base": base, **warm.state.params})
    return warm._replace(state=state, step=step_part, trainable=trainable)


@pytest.mark.parametrize("killed_at", [1, 9, 23])
def test_S1_checkpoints_store_the_trained_subset_alone(tmp_path, killed_at):
    expected, calls = [], []
    whole = warm_start(frozen_beside(), tmp_path / "whole", lambda *args: expected.append(args))
    plain = warm_start(make(), tmp_path / "plain", lambda *_: None)
    np.testing.assert_array_equal(whole["w"], plain["w"])
    with pytest.raises(KeyboardInterrupt):
        warm_start(frozen_beside(killed_at), tmp_path / "parts", lambda *args: calls.append(args))
    checkpoints = Checkpoints(tmp_path / "parts" / WARM)
    if (latest := checkpoints.latest()) is not None:
        assert [set(checkpoints.restore_part(latest, place)) for place in ("state/params", "best")] == [{"w"}, {"w"}]
        del calls[1 + latest // 4 :]
    else:
        calls.clear()
    again = warm_start(frozen_beside(), tmp_path / "parts", lambda *args: calls.append(args))
    assert calls == expected
    assert params_sha256(again) == params_sha256(whole)
    np.testing.assert_array_equal(again["base"], np.full(1000, 3.0))


def test_early_stopping_returns_parameters_of_lowest_loss(tmp_path):
    losses = iter([3.0, 2.0, 1.0, 5.0, 6.0, 7.0, 0.0])
    params_seen, calls = [], []

    def loss(params):
        params_seen.append(np.asarray(params["w"]))
        return next(losses)

    best = warm_start(make(loss=loss), tmp_path, lambda *args: calls.append(args))
    assert calls == [(0, 3.0), (4, 2.0), (8, 1.0), (12, 5.0), (16, 6.0), (20, 7.0)]
    np.testing.assert_array_equal(best["w"], params_seen[2])


def test_finished_warm_start_returns_at_once(tmp_path):
    first = warm_start(make(), tmp_path, lambda *_: None)
    again = warm_start(make(killed_at=0), tmp_path, lambda *_: pytest.fail("nothing is left to validate"))
    assert params_sha256(first) == params_sha256(again)
    finish_warm_start(tmp_path)
    assert not (tmp_path / WARM).exists()
    assert saved_position(tmp_path) is None


def test_no_warm_start_returns_its_parameters(tmp_path):
    params = {"w": jnp.ones(2)}
    trained = warm_start(no_warm_start(params), tmp_path, lambda *_: pytest.fail("nothing is validated"))
    assert trained is params
    assert list(tmp_path.iterdir()) == []


def test_nan_loss_is_refused_with_the_flag(tmp_path):
    with pytest.raises(BadInput, match="validation loss is not finite: lower --warm_rate"):
        warm_start(make(loss=lambda _: np.nan), tmp_path, lambda *_: None)
