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
    assert {one.status for one in played} <= {Status.FINISHED, Status.TURN_LIMIT}


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


@pytest.mark.parametrize("said", ["a b", [0.5]])
def test_words_are_no_tokens(said):
    with pytest.raises(fg.BadInput, match=r"toy said .*: tokens are ids; encode words first"):
        check(make_env()._replace(reset=lambda *_: (None, Said(said))))


@pytest.mark.parametrize("name", ["reset", "step"])
def test_what_is_no_pair_is_said_to_be_none(name):
    form = {"reset": Said([3]), "step": HostStep(Said([3]), False)}[name]
    with pytest.raises(fg.BadInput, match=rf"toy: {name} must give \(state, {type(form).__name__}\(.*and gave"):
        check(make_env()._replace(**{name: lambda *_: form}))


def test_tools_actions_and_stop_tokens_are_those_that_it_names():
    with pytest.raises(fg.BadInput, match=r"step called the tool 'echo', but tools are \('other',\)"):
        check(make_env()._replace(tools=("other",)))
    with pytest.raises(fg.BadInput, match="act said 7 tokens, but an action has at most max_tokens=6"):
        check(make_env(), act=lambda *_: [3] * 7)
    with pytest.raises(fg.BadInput, match="no action ended with one of stop_ids"):
        check(make_env(), act=lambda *_: [4, 3])
    with pytest.raises(fg.BadInput, match="no token reaches vocabulary=12"):
        check(make_env()._replace(stop_ids=(12,)))


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_named(rule):
    with pytest.raises(fg.BadInput, match=rule):
        check(make_env()._replace(step=BROKEN[rule]))
