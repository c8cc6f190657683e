"""The machine inside the agent system: a state and what a role said flow in, the state at the next role flows out.

analyst -> planner -> executor, tool -> verifier -> planner -> ... -> generator -> over
              `answer`, or no turn left ------------------------------^

hear(system, state, sampled, do):  a trained role's action is read and acted on
go_on(system, state, do):  the others speak until a trained role is to; its prompt, or None where it is over
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from flowgrpo.agent.memory import Record, render
from flowgrpo.agent.parsing import command_of
from flowgrpo.agent.rendering import Frame, Rendering, count_tokens
from flowgrpo.agent.roles import Role, Rule, Schema
from flowgrpo.agent.state import (
    ANALYST,
    ANSWER,
    DONE,
    EXECUTOR,
    GENERATOR,
    PLANNER,
    VERIFIER,
    AgentState,
    Budget,
    Lapse,
    Malformed,
    Plan,
    Verdict,
)
from flowgrpo.contracts import Call, Do, Said
from flowgrpo.text import Text, clean
from flowgrpo.types import Status

TOOL = "tool"
SPEAKERS = (ANALYST, PLANNER, EXECUTOR, TOOL, VERIFIER, GENERATOR)  # the place of each in the seeds of calls
NO_PLAN = Plan("", "", "")


class System(NamedTuple):
    """Roles of an agent system, and the bounds within which they speak."""

    text: Text  # to read actions
    frame: Frame
    roles: Mapping[str, Role | Rule | None]
    trained: tuple[str, ...]
    rendering: Rendering
    schemas: tuple[Schema, ...]
    budget: Budget


def hear(system: System, state: AgentState, sampled: tuple[int, ...], do: Do) -> AgentState:
    """The state after the action of the trained role that was to speak."""
    stage, text = state.stage, system.text
    if state.conversation is not None:
        talk = state.conversation.extend(sampled, chosen=True)
        budget = state.budget._replace(tokens=state.budget.tokens - len(sampled))
        state = replace(state, conversation=talk, budget=budget)
    whole = bool(sampled) and sampled[-1] in text.stop_ids
    if max(sampled, default=0) >= text.vocab_size:
        value = Malformed("the action holds ids that stand for no text")
    elif not whole and stage != GENERATOR:
        value = Malformed("the action was cut before its end")
    else:
        value = _parse(system, state, text.decode(sampled[:-1] if whole else sampled))
    state = replace(
        state,
        actors=(*state.actors, (stage, state.turn + (stage == PLANNER))),
        error=isinstance(value, Malformed) or not whole,
        status=state.status if whole or stage != GENERATOR else Status.TOKEN_LIMIT,
    )
    return TAKE[stage](state, value, do)


def go_on(system: System, state: AgentState, do: Do) -> tuple[AgentState, Said | None]:
    """The state at which a trained role is to speak, and what it is shown; None where the episode is over."""
    state = _others(system, state, do)
    if state.stage == DONE:
        return state, None
    role = system.roles[state.stage]
    assert isinstance(role, Role)  # what is trained is one
    state, said = system.rendering(system.frame, state, role)
    if said is not None:
        return state, said
    reason = f"the prompt of the {role.name} has more than {max(state.budget.tokens, 0)} tokens without any memory"
    state = replace(state, stage=GENERATOR, status=Status.TOKEN_LIMIT, reason=reason)
    if state.turn == 0 or GENERATOR in system.trained:
        return replace(state, stage=DONE, output=""), None
    return _others(system, state, do), None


def _others(system: System, state: AgentState, do: Do) -> AgentState:
    """The state after all that speak before a trained role does."""
    while state.stage != DONE and state.stage not in system.trained:
        role, stage = system.roles[state.stage], state.stage
        if isinstance(role, Rule):
            state = TAKE[stage](state, role.act(state), do)
            continue
        assert role is not None  # only the analyst may be, and then no state is at its stage
        seen = render(state.memory, budget=system.frame.memory_tokens, count=partial(count_tokens, system.frame.text))
        messages = [dict(message) for message in role.prompt(state, seen)]
        result = do(Call("role", role.name, {"messages": messages}, _seed(state, stage)))
        if result.failure:
            return _failed(state, f"{role.name}: {result.failure}")
        value = Malformed(result.text) if result.error else _parse(system, state, result.text)
        if isinstance(value, Malformed):
            state = replace(state, lapses=(*state.lapses, Lapse(role.name, clean(value.reason))))
        state = TAKE[stage](state, value, do)
    return state


def _parse(system: System, state: AgentState, words: str) -> Any:
    """Parse the words of the role at this stage into its value, or `Malformed`."""
    role = system.roles[state.stage]
    assert isinstance(role, Role)  # only a role has words
    return role.parse(state, clean(words))


# What follows from what was said ------------------------------------------------------------------------


def _analyzed(state: AgentState, value: str | Malformed, _do: Do) -> AgentState:
    return replace(state, stage=PLANNER, analysis="" if isinstance(value, Malformed) else value)


def _planned(state: AgentState, value: Plan | Malformed, _do: Do) -> AgentState:
    """A turn is spent, whatever was said."""
    budget = state.budget._replace(turns=state.budget.turns - 1)
    state = replace(state, turn=state.turn + 1, budget=budget, plan=None)
    if isinstance(value, Malformed):
        return _refused(state, NO_PLAN, value.reason)
    return replace(state, plan=value, stage=GENERATOR if value.tool == ANSWER else EXECUTOR)


def _executed(state: AgentState, value: Mapping[str, Any] | Malformed, do: Do) -> AgentState:
    """The tool is called."""
    plan = state.plan or NO_PLAN
    if isinstance(value, Malformed):
        return _refused(state, plan, value.reason)
    result = do(Call("tool", plan.tool, value, _seed(state, TOOL)))
    if result.failure:
        return _failed(replace(state, called=plan.tool), f"{plan.tool}: {result.failure}")
    record = Record(state.turn, plan.sub_goal, plan.tool, command_of(value), clean(result.text), result.error)
    error = state.error or result.error
    return replace(state, memory=state.memory.add(record), called=plan.tool, error=error, stage=VERIFIER)


def _verified(state: AgentState, value: Verdict | Malformed, _do: Do) -> AgentState:
    """STOP ends the episode; what can't be read is CONTINUE."""
    verdict = Verdict(False) if isinstance(value, Malformed) else value
    state = replace(state, memory=state.memory.judged(*verdict))
    return replace(state, stage=GENERATOR) if verdict.stop else _next_turn(state)


def _generated(state: AgentState, value: str | Malformed, _do: Do) -> AgentState:
    return replace(state, stage=DONE, output="" if isinstance(value, Malformed) else value)


TAKE = {ANALYST: _analyzed, PLANNER: _planned, EXECUTOR: _executed, VERIFIER: _verified, GENERATOR: _generated}


def _refused(state: AgentState, plan: Plan, reason: str) -> AgentState:
    """The record of an action that led to no call; there is nothing to verify."""
    record = Record(state.turn, plan.sub_goal, plan.tool, plan.context, clean(reason), error=True)
    return _next_turn(replace(state, memory=state.memory.add(record), error=True))


def _next_turn(state: AgentState) -> AgentState:
    """The planner's next turn, or the generator's word where none is left."""
    if state.budget.turns > 0:
        return replace(state, stage=PLANNER)
    return replace(state, stage=GENERATOR, status=Status.TURN_LIMIT, reason="no turn is left")


def _failed(state: AgentState, reason: str) -> AgentState:
    return replace(state, stage=DONE, status=Status.TOOL_FAILURE, reason=clean(reason))


def _seed(state: AgentState, speaker: str) -> tuple[int, ...]:
    """Compute a call's seed: what is random in an answer depends on trajectory key, turn and speaker only (E3)."""
    return (*state.seed, state.turn, SPEAKERS.index(speaker))
