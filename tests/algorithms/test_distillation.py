"""Distillation: its expected gradient by enumeration, and nothing where the teacher says what the policy says."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flowgrpo as fg

WORDS = 3
EVERY = np.array(list(product(range(WORDS), repeat=2)))  # all actions of two tokens


class Table(dict):
    """Logits of a policy that knows the first token (3) and the second one after each first (3 x 3)."""

    def logp(self) -> jax.Array:
        """Score each token of each action -> [9, 2]."""
        first, second = jax.nn.log_softmax(self["first"]), jax.nn.log_softmax(self["second"])
        return jnp.stack([first[EVERY[:, 0]], second[EVERY[:, 0], EVERY[:, 1]]], axis=1)


def table(seed: int) -> Table:
    rng = np.random.default_rng(seed)
    return Table(first=jnp.asarray(rng.normal(size=3)), second=jnp.asarray(rng.normal(size=(3, 3))))


def played(student: Table, teacher: Table) -> fg.Trajectories:
    """Every action once, each in a group of its own, scored by both."""
    logp, said = np.asarray(student.logp(), np.float32), np.asarray(teacher.logp(), np.float32)
    records = [
        fg.Trajectory([fg.Turn(tokens, [True, True], own)], 0.0, number)
        for number, (tokens, own) in enumerate(zip(EVERY, logp, strict=True))
    ]
    return fg.collate(records).replace(logp_old=logp[:, None], logp_ref=said[:, None])


def expected_gradient(student: Table, teacher: Table) -> Table:
    """Average the gradient of opd's loss over all actions, each as likely as the student makes it."""
    algorithm, x = fg.algorithms.opd(), played(student, teacher)
    batch = fg.batching.rows_by_trajectory(x, algorithm.advantages(x), algorithm.weights(x))
    chance_n = np.exp(np.asarray(student.logp()).sum(axis=1))
    batch = batch.replace(weight=batch.weight * len(EVERY) * chance_n[:, None])
    loss = jax.jit(lambda one: algorithm.loss(fg.contracts.Scores(Table(one).logp()), batch)[0])
    return Table(jax.grad(loss)(dict(student)))


def divergence(one: dict, teacher: dict, student: dict) -> jax.Array:
    """KL(one || teacher) of both tokens, in the contexts that the student comes to, in the mean over tokens."""

    def kl(mine, other):
        mine, other = jax.nn.log_softmax(mine), jax.nn.log_softmax(other)
        return (jnp.exp(mine) * (mine - other)).sum(axis=-1)

    second = (jax.nn.softmax(student["first"]) * kl(one["second"], teacher["second"])).sum()
    return 0.5 * (kl(one["first"], teacher["first"]) + second)


def test_opd_follows_the_gradient_of_the_reverse_kl():
    student, teacher = table(0), table(10)
    exact = jax.jit(jax.grad(divergence))(dict(student), dict(teacher), dict(student))
    found = expected_gradient(student, teacher)
    for name, slope in exact.items():
        assert np.abs(slope).max() > 1e-2
        np.testing.assert_allclose(found[name], slope, atol=2e-6)


def test_opd_has_no_gradient_if_the_teacher_is_the_student():
    """Exactly: not to rounding."""
    student = table(0)
    x, algorithm = played(student, student), fg.algorithms.opd()
    assert not np.asarray(algorithm.advantages(x)).any()
    assert not any(np.asarray(slope).any() for slope in expected_gradient(student, student).values())


def test_opd_dead_only_acts_in_groups_of_equal_outcomes():
    """The first three actions are a group of mixed outcomes, the next three one of failures."""
    x = played(table(1), table(2)).replace(group=np.arange(9) // 3, outcome=np.array([1, 0, 0, *[0] * 6], np.float32))
    adv_ntl = np.asarray(fg.algorithms.opd(dead_only=True).advantages(x))
    assert not adv_ntl[:3].any()
    np.testing.assert_allclose(adv_ntl[3:], (x.logp_ref - x.logp_old)[3:], atol=1e-6)
    both_ntl = np.asarray(fg.algorithms.opd(dead_only=True, outcome=1.0).advantages(x))
    np.testing.assert_allclose(both_ntl[:3, 0, 0], [2 / 3**0.5, -1 / 3**0.5, -1 / 3**0.5], atol=1e-5)


def test_sdpo_is_opd_with_a_hint_for_the_teacher():
    x = played(table(1), table(2))
    opd, sdpo = fg.algorithms.opd(outcome=0.5), fg.algorithms.sdpo(outcome=0.5)
    np.testing.assert_array_equal(sdpo.advantages(x), opd.advantages(x))
    assert (opd.hindsight, sdpo.hindsight, sdpo.needs_for_advantages) == (False, True, {"logp_ref"})
    assert fg.algorithms.sdpo(reference_every=1).reference_every == 1
    with pytest.raises(
        fg.BadInput, match=r"sdpo: Trajectories\.logp_ref is missing, and the teacher's advantage needs it"
    ):
        sdpo.advantages(x.replace(logp_ref=None))
