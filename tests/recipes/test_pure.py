"""The recipe of pure environments: what is compiled when, and examinations by the rollout's program."""

import jax
import numpy as np
import pytest
from compilations import counted_compilations

from flowgrpo import loop
from flowgrpo.models.trainable import acting
from flowgrpo.recipes import pure
from flowgrpo.rollout.exams import make_exam


@pytest.fixture(scope="module")
def setup():
    return pure.open(pure.preset("lookup", queries=8, samples=4, test_tasks=40, d=16, layers=1, head=8))


@pytest.mark.slow
def test_an_iteration_and_an_examination_are_compiled_ahead_and_not_again(setup):
    work = pure.PureWork(setup)
    run = work.place(loop.start_run(work.place(work.initial()), setup.optimizer, jax.random.key(0)))
    programs = [f"jit({name})" for name in ("play", "credit", "update", "rollout_metrics", "draw")]
    with counted_compilations() as compiled:
        work.compile_ahead(run)
        assert [compiled[program] for program in programs] == [1] * len(programs)
        step = work.make_step()
        for _ in range(2):
            run, _ = step(run)
            work.examine(run.learner.params)
    assert [compiled[program] for program in programs] == [1] * len(programs)


@pytest.mark.parametrize("tasks", [40, 1000])
def test_an_examination_by_the_iterations_program_is_that_of_a_program_of_its_own(setup, tasks):
    """In blocks of 32, the last filled up; 1000 tasks are too many for them, and have a program of their own."""
    step, key = loop.three_programs(setup.iteration), jax.random.key(3)
    exam = pure._Exam(setup, step, "test", tasks)
    assert (exam._alone is None) == (tasks == 40)
    params = setup.place(setup.policy.init(jax.random.key(0)))
    found = exam(params, key, 7)
    assert (found.version == 7).all()  # of the parameters that played
    expected = jax.device_get(jax.jit(make_exam(setup.env, setup.policy, "test", tasks=tasks))(acting(params), key))
    for name in ("tokens", "chosen", "correct", "status", "outcome"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    np.testing.assert_allclose(found.logp_sampled, expected.logp_sampled, atol=1e-5)
