"""`check_host_env` passes what keeps the contract of host environments, and names what a broken one does."""

from functools import partial

import pytest
from hosted_cases import answer, make_env, tasks_of

import flowgrpo as fg
from flowgrpo.contracts import HostStep, Said
from flowgrpo.types import Status

TASKS = tasks_of(3, 1)[0]
check = partial(fg.check_host_env, tasks=TASKS, vocabulary=12, do=answer)


def test_an_environment_that_keeps_the_contract_passes_and_its_trajectories_come_back():
    played = check(make_env())
    assert len(played) == 4 * len(TASKS)
    assert {one.trajectory.status for one in played} <= {Status.FINISHED, Status.TURN_LIMIT}


def raises(_state, _tokens, _do):
    raise KeyError("lost")


def remembers(counted, state, tokens, _do):
    """A state outside the state."""
    counted.append(tokens)
    return state, HostStep(Said([3 + len(counted) % 5]), False)


def says_nothing(state, _tokens, _do):
    return state, HostStep(None, False)


BROKEN = {
    "step raised KeyError": raises,
    "says nothing, but is not done": says_nothing,
    "says other tokens before turn|two steps from one state differ": partial(remembers, []),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_named(rule):
    with pytest.raises(fg.BadInput, match=rule):
        check(make_env()._replace(step=BROKEN[rule]))
