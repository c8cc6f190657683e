"""The recipe of pure environments: what is compiled when, and examinations by the rollout's program."""

import warnings
from typing import Any

import jax
import numpy as np
import pytest
from compilations import counted_compilations

import flowgrpo as fg
from flowgrpo.models.trainable import actor_params
from flowgrpo.recipes import pure
from flowgrpo.recipes.recipe import Objects
from flowgrpo.report.metrics import read_metrics
from flowgrpo.rollout.exams import make_evaluation_rollout
from flowgrpo.training.iteration import train_loop
from flowgrpo.training.pure_env import CompiledRollout, split_step
from flowgrpo.training.session import run_session
from flowgrpo.training.stages import init_train_state


@pytest.fixture(scope="module")
def setup():
    return pure.build(pure.preset("lookup", queries=8, samples=4, test_tasks=40, model_dim=16, layers=1, head_dim=8))


@pytest.mark.slow
def test_iteration_and_evaluation_are_compiled_ahead_and_only_once(setup):
    work = pure.PureTrainable(setup)
    run = work.place(init_train_state(work.place(work.init_params()), setup.optimizer, jax.random.key(0)))
    programs = [f"jit({name})" for name in ("generate", "compute_advantages", "_take_steps", "rollout_metrics", "draw")]
    with counted_compilations() as compiled:
        work.compile_ahead(run)
        assert [compiled[program] for program in programs] == [1] * len(programs)
        step = work.make_step()
        for _ in range(2):
            run, _ = step(run)
            work.validate(run.learner.params)
    assert [compiled[program] for program in programs] == [1] * len(programs)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_a_disagreeing_sampler_is_reported_by_runs_and_loops(tmp_path, temperature):
    """Once, in the first update: in `warnings.jsonl` of a run, by a warning of Python's in a loop."""
    sizes: dict[str, Any] = {"queries": 8, "samples": 4, "test_tasks": 40, "model_dim": 16, "layers": 1, "head_dim": 8}
    config = pure.preset("lookup", updates=2, warm_steps=1, **sizes)
    setup = pure.build(
        config, objects=Objects(algorithm=fg.flow_grpo(beta=0.05))
    )  # KL, so that groups without a signal count, too
    rollout = fg.make_rollout(setup.env, setup.policy, temperature=temperature)

    def play(params, drawn):
        return rollout(actor_params(params), drawn.tasks, drawn.keys, drawn.group, drawn.version)

    setup = setup._replace(stages=setup.stages._replace(generate=play))
    run_session(pure.PureTrainable(setup), tmp_path, every=2)
    told = [(line["warning"], line["update"]) for line in read_metrics(tmp_path / "warnings.jsonl")]
    expected = [] if temperature == 1.0 else [("sampler_kl", 1)]
    assert [one for one in told if one[0] == "sampler_kl"] == expected
    run = init_train_state(setup.policy.init(jax.random.key(0)), setup.optimizer, jax.random.key(1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(train_loop(split_step(setup.stages), run, 2))
    assert ["other probabilities than the sampler" in str(one.message) for one in caught] == [True] * len(expected)


@pytest.mark.parametrize("tasks", [40, 1000])
def test_evaluation_by_the_iterations_program_equals_a_program_of_its_own(setup, tasks):
    """In blocks of 32, the last filled up; 1000 tasks are too many for them, and have a program of their own."""
    roll_out, key = CompiledRollout(setup.stages), jax.random.key(3)
    exam = pure._Evaluation(setup, roll_out, "test", tasks)
    assert (exam._own_program is None) == (tasks == 40)
    params = setup.to_mesh(setup.policy.init(jax.random.key(0)))
    found = exam(params, key, 7)
    assert (found.version == 7).all()  # of the parameters that played
    expected = jax.device_get(
        jax.jit(make_evaluation_rollout(setup.env, setup.policy, "test", tasks=tasks))(actor_params(params), key)
    )
    for name in ("tokens", "chosen", "correct", "status", "outcome"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    np.testing.assert_allclose(found.logp_sampled, expected.logp_sampled, atol=1e-5)
