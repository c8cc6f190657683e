"""Run the agent system as a host environment (A1): `agent_system` binds roles, tools and bounds into a `HostEnv`.

    analyst -> planner -> executor, tool -> verifier -> planner -> ... -> generator -> over
                  `answer`, or no turn left ------------------------------^

A step reads the words of the trained role (`hear`); then the other roles speak and the tool runs, through `do`, until a
trained role is to speak again or the episode is over (`go_on`). It is a function of the state, the sampled ids and what
`do` answers, so a record of those answers replays it (A2). Ids are kept as they were sampled (A5). What the policy gets
wrong is a record with an error that it sees next time (A4); what another role gets wrong is a `Lapse` in the state, and

    analyst: there is no analysis      planner, executor: a record with an error
    verifier: CONTINUE                 generator: the output is ""

A failure outside (`Result.failure`) ends the trajectory with TOOL_FAILURE. Where an episode is over before a trained
role could speak, `reset` says the prompt that it would have had, and the next step ends it. The deadline is the
caller's.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from flowgrpo.agent import roles as make
from flowgrpo.agent.rendering import Frame, Rendering, appending, first_tokens, fresh
from flowgrpo.agent.roles import Role, ScriptedRole
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
    MemoryRecord,
    PlannerChoice,
    Verdict,
    anchor,
    record_line,
    render,
    seed_of,
)
from flowgrpo.agent.tool_arguments import Schema, command_of
from flowgrpo.contracts import Call, Do, HostEnv, HostStep, Said
from flowgrpo.data.tokenizer import Text, clean, guard
from flowgrpo.types import BadInput, Status, Task

TOOL = "tool"
SPEAKERS = (ANALYST, PLANNER, EXECUTOR, TOOL, VERIFIER, GENERATOR)  # the place of each in the seeds of calls
ROUND = (PLANNER, EXECUTOR, VERIFIER)  # who speaks in each turn of the planner
NO_PLAN = PlannerChoice("", "", "")
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,127}")  # of a tool, as `tools.schema` has it: prompts show it bare
ANY_PLANNER = make.planner()


# The environment --------------------------------------------------------------------------------------


class System(NamedTuple):
    """Roles of an agent system, and the bounds within which they speak."""

    text: Text  # to read actions
    frame: Frame
    roles: Mapping[str, Role | ScriptedRole | None]
    trained: tuple[str, ...]
    rendering: Rendering
    schemas: tuple[Schema, ...]
    budget: Budget

    def reset(self, key: Any, task: Task, do: Do) -> tuple[AgentState, Said]:
        """The state at the first action of a trained role, and its prompt."""
        stage = PLANNER if self.roles[ANALYST] is None else ANALYST
        state = AgentState(task.id, clean(task.query), self.schemas, self.budget, stage, seed_of(key))
        state, said = go_on(self, state, do)
        return state, said or self._unheard(state)

    def _unheard(self, state: AgentState) -> Said:
        """The prompt of a trained role whose turn never came."""
        role = self.roles[self.trained[0]]
        assert isinstance(role, Role)  # what is trained is one
        said = fresh(self.frame, state, role)[1]
        room = self.budget.tokens
        return said or Said(first_tokens(self.frame.text, role.prompt(state, ""))[:room], appends=False)

    def step(self, state: AgentState, tokens: Sequence[int], do: Do) -> tuple[AgentState, HostStep]:
        """The state at the next action of a trained role, and what came of this one."""
        state = replace(state, called="", error=False)
        if state.stage != DONE:
            state = hear(self, state, tuple(int(i) for i in tokens), do)
        state, said = go_on(self, state, do)
        done = said is None
        return state, HostStep(
            said=said,
            done=done,
            tool=state.called,
            error=state.error,
            output=state.output if done else None,
            status=state.status if done else Status.FINISHED,
        )


def agent_system(
    text: Text,
    *,
    schemas: Sequence[Schema],
    planner: Role | ScriptedRole = ANY_PLANNER,
    executor: Role | ScriptedRole = make.rule_executor,
    verifier: Role | ScriptedRole = make.rule_verifier,
    generator: Role | ScriptedRole = make.rule_generator,
    analyst: Role | ScriptedRole | None = None,
    trained: Sequence[str] = (PLANNER,),
    turns: int = 3,
    max_tokens: int = 2048,
    context_tokens: int = 8192,
    memory_tokens: int = 2048,
    rendering: Rendering = fresh,
    name: str = "agent",
) -> HostEnv:
    """The system over the tools of `schemas`, which `do` runs; a `Role` that is not `trained` is spoken by `do`, too.

    `turns` are the planner's. An action has at most `max_tokens`; a prompt and its action have at most `context_tokens`
    together, and where the context appends, so has the whole trajectory. Of that, `memory_tokens` at most are memory.
    """
    filled = {ANALYST: analyst, PLANNER: planner, EXECUTOR: executor, VERIFIER: verifier, GENERATOR: generator}
    _check_roles(filled, trained, rendering)
    if turns < 1 or max_tokens < 1 or context_tokens <= max_tokens:
        given = f"turns={turns}, max_tokens={max_tokens}, context_tokens={context_tokens}"
        raise BadInput(f"{given}, but turns and max_tokens must be at least 1, and context_tokens above max_tokens")
    known, budget = _own(schemas), Budget(turns, context_tokens - max_tokens)
    system = System(text, Frame(guard(text), memory_tokens), filled, tuple(trained), rendering, known, budget)
    return HostEnv(
        name=name,
        tools=tuple(schema["name"] for schema in known),
        turns=sum(turns if role in ROUND else 1 for role in set(trained)),
        max_tokens=max_tokens,
        stop_ids=text.stop_ids,
        reset=system.reset,
        step=system.step,
        anchor=anchor,
    )


def _check_roles(filled: Mapping[str, Any], trained: Sequence[str], rendering: Rendering) -> None:
    """Raise `BadInput` unless somebody is trained who can be, and in a way that renders."""
    if isinstance(trained, str) or not trained:
        raise BadInput(f"trained is {trained!r}, but must be a list of at least one of {', '.join(filled)}")
    for name in trained:
        if not isinstance(filled.get(name), Role):
            raise BadInput(f"{name!r} can't be trained: name one of {', '.join(filled)}, and fill it with a Role")
    if rendering is appending and len(set(trained)) != 1:
        raise BadInput(f"a context that appends is of one trained role, not of {', '.join(trained)}: render it fresh")
    planner = filled[PLANNER]
    if isinstance(planner, Role) and planner.line is not record_line and rendering is not appending:
        raise BadInput("a planner of this form sees calls and answers as a conversation: give rendering=appending")
    for name, role in filled.items():
        if role is not None and (not isinstance(role, Role | ScriptedRole) or role.name != name):
            raise BadInput(f"{name}={role!r:.80} must be a Role or a Rule of that name, as roles.{name}() makes one")


def _own(schemas: Sequence[Schema]) -> tuple[Schema, ...]:
    """A copy of the schemas, whose names are plain words that differ in more than their case."""
    try:
        own = json.loads(json.dumps(list(schemas)))
        names = [str(schema["name"]) for schema in own]
    except (TypeError, KeyError, ValueError) as error:
        raise BadInput(
            f"schemas must be JSON objects with a name: give `tool.schema` of each tool ({error})"
        ) from error
    times = Counter(name.casefold() for name in names)
    for name in names:
        if not NAME.fullmatch(name) or name.casefold() == ANSWER:
            allowed = f"up to 128 letters, digits, _, -, . and /, other than {ANSWER!r}"
            raise BadInput(f"a tool has the name {name!r}: give it one of {allowed}")
        if times[name.casefold()] > 1:
            raise BadInput(f"two tools have the name {name!r}: give each one of its own")
    return tuple(own)


# Who speaks -------------------------------------------------------------------------------------------


def hear(system: System, state: AgentState, sampled: tuple[int, ...], do: Do) -> AgentState:
    """The state after the action of the trained role that was to speak."""
    stage, text = state.stage, system.text
    if state.conversation is not None:
        talk = state.conversation.extend(sampled, chosen=True)
        budget = state.budget._replace(tokens=state.budget.tokens - len(sampled))
        state = replace(state, conversation=talk, budget=budget)
    words, whole = text.spoken(sampled)
    if max(sampled, default=0) >= text.vocab_size:
        value = Malformed("the action holds ids that stand for no text")
    elif not whole and stage != GENERATOR:
        value = Malformed("the action was cut before its end")
    else:
        value = _parse(system, state, words)
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
        if isinstance(role, ScriptedRole):
            state = TAKE[stage](state, role.act(state), do)
            continue
        assert role is not None  # only the analyst may be, and then no state is at its stage
        seen = render(state.memory, budget=system.frame.memory_tokens, count=system.frame.count)
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


def _seed(state: AgentState, speaker: str) -> tuple[int, ...]:
    """Compute a call's seed: what is random in an answer depends on trajectory key, turn and speaker only (E3)."""
    return (*state.seed, state.turn, SPEAKERS.index(speaker))


# What follows from what was said ----------------------------------------------------------------------


def _planned(state: AgentState, value: PlannerChoice | Malformed, _do: Do) -> AgentState:
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
    record = MemoryRecord(state.turn, plan.sub_goal, plan.tool, command_of(value), clean(result.text), result.error)
    error = state.error or result.error
    return replace(state, memory=state.memory.add(record), called=plan.tool, error=error, stage=VERIFIER)


def _verified(state: AgentState, value: Verdict | Malformed, _do: Do) -> AgentState:
    """STOP ends the episode; what can't be read is CONTINUE."""
    verdict = Verdict(False) if isinstance(value, Malformed) else value
    state = replace(state, memory=state.memory.judged(*verdict))
    return replace(state, stage=GENERATOR) if verdict.stop else _next_turn(state)


def _refused(state: AgentState, plan: PlannerChoice, reason: str) -> AgentState:
    """The record of an action that led to no call; there is nothing to verify."""
    record = MemoryRecord(state.turn, plan.sub_goal, plan.tool, plan.context, clean(reason), error=True)
    return _next_turn(replace(state, memory=state.memory.add(record), error=True))


def _next_turn(state: AgentState) -> AgentState:
    """The planner's next turn, or the generator's word where none is left."""
    if state.budget.turns > 0:
        return replace(state, stage=PLANNER)
    return replace(state, stage=GENERATOR, status=Status.TURN_LIMIT, reason="no turn is left")


def _failed(state: AgentState, reason: str) -> AgentState:
    return replace(state, stage=DONE, status=Status.TOOL_FAILURE, reason=clean(reason))


def _words(value: str | Malformed) -> str:
    return "" if isinstance(value, Malformed) else value


TAKE = {
    ANALYST: lambda state, value, _: replace(state, stage=PLANNER, analysis=_words(value)),
    PLANNER: _planned,
    EXECUTOR: _executed,
    VERIFIER: _verified,
    GENERATOR: lambda state, value, _: replace(state, stage=DONE, output=_words(value)),
}
