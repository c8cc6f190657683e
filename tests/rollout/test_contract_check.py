"""`check_host_env` passes environments that keep the contract, and names the rule that another breaks."""

from functools import partial

import pytest
from hosted_cases import answer, make_env, tasks_of

import flowgrpo as fg
from flowgrpo.contracts import HostObservation, HostStep
from flowgrpo.types import Status

TASKS = tasks_of(3, 1)[0]
check = partial(fg.check_host_env, tasks=TASKS, vocabulary=12, call_tool=answer)


def test_an_environment_that_keeps_the_contract_passes():
    played = check(make_env())
    assert len(played) == 4 * len(TASKS)
    assert {one.status for one in played} <= {Status.FINISHED, Status.TURN_LIMIT}


def raises(_state, _tokens, _do):
    raise KeyError("lost")


def remembers(counted, state, tokens, _do):
    """A state outside the state."""
    counted.append(tokens)
    return state, HostStep(HostObservation([3 + len(counted) % 5]), False)


def observes_nothing(state, _tokens, _do):
    return state, HostStep(None, False)


BROKEN = {
    "step raised KeyError": raises,
    "gave no observation, but is not done": observes_nothing,
    "other tokens before turn|two steps from one state differ": partial(remembers, []),
}


@pytest.mark.parametrize("said", ["a b", [0.5]])
def test_words_as_tokens_are_refused(said):
    with pytest.raises(fg.BadInput, match=r"toy observed .*: tokens are ids; encode words first"):
        check(make_env()._replace(reset=lambda *_: (None, HostObservation(said))))


@pytest.mark.parametrize("name", ["reset", "step"])
def test_a_result_that_is_no_pair_is_refused(name):
    form = {"reset": HostObservation([3]), "step": HostStep(HostObservation([3]), False)}[name]
    with pytest.raises(fg.BadInput, match=rf"toy: {name} must return \(state, {type(form).__name__}\(.*and returned"):
        check(make_env()._replace(**{name: lambda *_: form}))


def test_undeclared_tools_long_actions_and_wrong_stop_tokens_are_refused():
    with pytest.raises(fg.BadInput, match=r"step called the tool 'echo', but tools are \('other',\)"):
        check(make_env()._replace(tools=("other",)))
    with pytest.raises(fg.BadInput, match="act gave 7 tokens, but an action has at most max_tokens=6"):
        check(make_env(), act=lambda *_: [3] * 7)
    with pytest.raises(fg.BadInput, match="no action ended with one of stop_ids"):
        check(make_env(), act=lambda *_: [4, 3])
    with pytest.raises(fg.BadInput, match="no token reaches vocabulary=12"):
        check(make_env()._replace(stop_ids=(12,)))


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_named(rule):
    with pytest.raises(fg.BadInput, match=rule):
        check(make_env()._replace(step=BROKEN[rule]))
