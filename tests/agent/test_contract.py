"""The agent system keeps the contract of host environments, so that what trains in one trains in the other."""

import pytest
from agent_cases import SCHEMAS, agent_text, ids, make_system, plan, run_tools, task

import flowgrpo as fg
from flowgrpo.agent.rendering import fresh_context, growing_context
from flowgrpo.types import Status

TEXT = agent_text()


@pytest.mark.parametrize("rendering", [fresh_context, growing_context])
def test_A1_the_planners_view_is_an_environment(rendering):
    """Tokens in, tokens out, a replay without effects: calls, mistakes and answers among the actions."""
    words = (plan("echo", "hi"), plan("add", '{"a": 2, "b": 3}'), "nothing to say", plan("answer", "5"))
    env = make_system(TEXT, schemas=SCHEMAS, rendering=rendering, turns=3, max_tokens=100, context_tokens=4000)
    played = fg.check_host_env(
        env,
        [task(), task("what is 3 + 3?", "other")],
        vocabulary=TEXT.vocab_size,
        call_tool=run_tools,
        act=lambda rng, _: ids(TEXT, words[rng.integers(len(words))]),
    )
    assert len(played) == 8
    assert {one.status for one in played} <= {Status.FINISHED, Status.TURN_LIMIT}
    assert {one.output for one in played} >= {"5"}
