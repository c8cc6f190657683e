"""The agent system as a host environment (A1): `agent_system` binds roles, tools and limits into a `HostEnv`.

    analyst -> planner -> executor, tool -> verifier -> planner -> ... -> generator -> done
                  `answer`, or no turn left ------------------------------^

A step parses the action of the trained role; then the other roles and the tool are called, through `call_tool`, until a
trained role is next or the episode is over (`_advance`). It is a function of the state, the sampled ids and the results
of `call_tool`, so a record of those replays it (A2). Ids are kept as they were sampled (A5). An error of the policy is
a record that it sees in its next turn (A4); an error of another role is a `Lapse` in the state, and

    analyst: there is no analysis      planner, executor: a record with an error
    verifier: CONTINUE                 generator: the output is ""

A failure outside (`Result.failure`) ends the trajectory with TOOL_FAILURE. If an episode is over before a trained role
is called, `reset` gives the prompt that it would have had, and the next step ends it. Deadlines are the caller's.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from flowgrpo.agent.rendering import PromptSettings, Rendering, fresh_context, growing_context
from flowgrpo.agent.roles import Role, ScriptedRole, planner, rule_executor, rule_generator, rule_verifier
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
    MemoryRecord,
    PlannerChoice,
    Verdict,
    anchor,
    record_line,
    render_memory,
    to_seed,
)
from flowgrpo.contracts import Call, HostEnv, HostObservation, HostStep, ToolRunner
from flowgrpo.data.chat import encode_prompt
from flowgrpo.data.tokenizer import ChatTokenizer, clean, guard
from flowgrpo.data.tool_calls import Malformed, Schema, to_command
from flowgrpo.types import JSON, BadInput, Status, Task

TOOL = "tool"
SPEAKERS = (ANALYST, PLANNER, EXECUTOR, TOOL, VERIFIER, GENERATOR)  # their indices are part of the seeds of calls
EACH_TURN = (PLANNER, EXECUTOR, VERIFIER)  # roles that act in each turn of the planner
NO_PLAN = PlannerChoice("", "", "")
DEFAULT_PLANNER = planner()
TOOL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,127}")  # as in `tools.schema`: prompts show it without quotes


# The environment --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AgentRoles:
    """The roles of an agent system. A `Role` that is not trained is called through `call_tool`.

    Args:
        planner: chooses a tool and its context in each turn.
        executor: writes the arguments of the tool; by default the planner's context.
        verifier: decides whether to stop; by default at the planner's answer.
        generator: writes the output; by default the planner's answer.
        analyst: analyses the query before the first turn; None: nobody does.
        trained: names of the roles that the policy generates.
    """

    planner: Role | ScriptedRole = DEFAULT_PLANNER
    executor: Role | ScriptedRole = rule_executor
    verifier: Role | ScriptedRole = rule_verifier
    generator: Role | ScriptedRole = rule_generator
    analyst: Role | ScriptedRole | None = None
    trained: Sequence[str] = (PLANNER,)

    def __post_init__(self):
        by_name = self.by_name
        if isinstance(self.trained, str) or not self.trained:
            raise BadInput(f"trained is {self.trained!r}, but must be a list of at least one of {', '.join(by_name)}")
        for name in self.trained:
            if not isinstance(by_name.get(name), Role):
                raise BadInput(f"{name!r} can't be trained: name one of {', '.join(by_name)}, and fill it with a Role")
        for name, role in by_name.items():
            if role is not None and (not isinstance(role, Role | ScriptedRole) or role.name != name):
                raise BadInput(
                    f"{name}={role!r:.80} must be a Role or a ScriptedRole of that name, as roles.{name}() makes one"
                )

    @property
    def by_name(self) -> Mapping[str, Role | ScriptedRole | None]:
        """The roles by their names."""
        return {
            ANALYST: self.analyst,
            PLANNER: self.planner,
            EXECUTOR: self.executor,
            VERIFIER: self.verifier,
            GENERATOR: self.generator,
        }


@dataclass(frozen=True)
class AgentLimits:
    """Turns and tokens of an agent system.

    Args:
        turns: number of turns of the planner.
        max_tokens: of an action, its stop token included.
        context_tokens: of a prompt with its action; if the context grows, of the whole trajectory.
        memory_tokens: of the memory within a prompt.
    """

    turns: int = 3
    max_tokens: int = 2048
    context_tokens: int = 8192
    memory_tokens: int = 2048

    def __post_init__(self):
        if self.turns < 1 or self.max_tokens < 1 or self.context_tokens <= self.max_tokens:
            raise BadInput(
                f"turns={self.turns}, max_tokens={self.max_tokens}, context_tokens={self.context_tokens}, but turns "
                "and max_tokens must be at least 1, and context_tokens above max_tokens"
            )


def agent_system(
    tokenizer: ChatTokenizer,
    *,
    schemas: Sequence[Schema],
    roles: AgentRoles = AgentRoles(),
    limits: AgentLimits = AgentLimits(),
    rendering: Rendering = fresh_context,
    name: str = "agent",
) -> HostEnv:
    """An environment in which roles answer a query with tools.

    Args:
        tokenizer: that of the policy.
        schemas: of the tools, which `call_tool` runs.
        roles: who plans, executes, verifies and answers, and which of them are trained.
        limits: turns and tokens.
        rendering: `fresh_context`, a prompt of its own for each turn, or `growing_context`, one conversation.
        name: of the environment, for messages and metrics.
    """
    trained = tuple(roles.trained)
    if rendering is growing_context and len(set(trained)) != 1:
        raise BadInput(
            f"a growing context is of one trained role, not of {', '.join(trained)}: give rendering=fresh_context"
        )
    is_chat = isinstance(roles.planner, Role) and roles.planner.write_record is not record_line
    if is_chat and rendering is not growing_context:
        raise BadInput(
            "a planner of this form sees a conversation of calls and answers: give rendering=growing_context"
        )
    system = AgentSystem(
        tokenizer=tokenizer,
        prompts=PromptSettings(guard(tokenizer), limits.memory_tokens),
        roles=roles.by_name,
        trained=trained,
        rendering=rendering,
        schemas=_checked_copy(schemas),
        budget=Budget(limits.turns, limits.context_tokens - limits.max_tokens),
    )
    return HostEnv(
        name=name,
        tools=tuple(schema["name"] for schema in system.schemas),
        max_turns=sum(limits.turns if role in EACH_TURN else 1 for role in set(trained)),
        max_tokens=limits.max_tokens,
        stop_ids=tokenizer.stop_ids,
        reset=system.reset,
        step=system.step,
        anchor=anchor,
    )


def _checked_copy(schemas: Sequence[Schema]) -> tuple[Schema, ...]:
    """A copy of the schemas; raises unless their names are plain words that differ in more than their case."""
    try:
        copies = json.loads(json.dumps(list(schemas)))
        names = [str(schema["name"]) for schema in copies]
    except (TypeError, KeyError, ValueError) as error:
        raise BadInput(
            f"schemas must be JSON objects with a name: give `tool.schema` of each tool ({error})"
        ) from error
    counts = Counter(name.casefold() for name in names)
    for name in names:
        if not TOOL_NAME.fullmatch(name) or name.casefold() == ANSWER:
            allowed = f"up to 128 letters, digits, _, -, . and /, other than {ANSWER!r}"
            raise BadInput(f"a tool has the name {name!r}: give it one of {allowed}")
        if counts[name.casefold()] > 1:
            raise BadInput(f"two tools have the name {name!r}: give each one of its own")
    return tuple(copies)


class AgentSystem(NamedTuple):
    """The functions of an agent system's environment."""

    tokenizer: ChatTokenizer  # to parse actions
    prompts: PromptSettings
    roles: Mapping[str, Role | ScriptedRole | None]
    trained: tuple[str, ...]
    rendering: Rendering
    schemas: tuple[Schema, ...]
    budget: Budget

    def reset(self, key: Any, task: Task, call_tool: ToolRunner) -> tuple[AgentState, HostObservation]:
        """The state before the first action of a trained role, and its prompt."""
        stage = PLANNER if self.roles[ANALYST] is None else ANALYST
        state = AgentState(task.id, clean(task.query), self.schemas, self.budget, stage, to_seed(key))
        state, observation = _advance(self, state, call_tool)
        if observation is None:  # over already: the prompt that the trained role would have had
            role = self.roles[self.trained[0]]
            assert isinstance(role, Role)  # as `AgentRoles` checked
            _, observation = fresh_context(self.prompts, state, role)
            if observation is None:
                prompt = encode_prompt(self.prompts.tokenizer, role.prompt(state, ""))
                observation = HostObservation(prompt[: self.budget.tokens], extends_context=False)
        return state, observation

    def step(self, state: AgentState, tokens: Sequence[int], call_tool: ToolRunner) -> tuple[AgentState, HostStep]:
        """The state before the next action of a trained role, and the result of this one."""
        state = replace(state, called="", error=False)
        if state.stage != DONE:
            state = _apply_action(self, state, tuple(int(i) for i in tokens), call_tool)
        state, observation = _advance(self, state, call_tool)
        is_done = observation is None
        return state, HostStep(
            observation=observation,
            done=is_done,
            tool=state.called,
            error=state.error,
            output=state.output if is_done else None,
            status=state.status if is_done else Status.FINISHED,
        )


# Who acts next ----------------------------------------------------------------------------------------


def _apply_action(
    system: AgentSystem, state: AgentState, sampled: tuple[int, ...], call_tool: ToolRunner
) -> AgentState:
    """The state after the action of the trained role whose turn it was."""
    stage, tokenizer = state.stage, system.tokenizer
    if state.conversation is not None:
        budget = state.budget._replace(tokens=state.budget.tokens - len(sampled))
        state = replace(state, conversation=state.conversation.extend(sampled, chosen=True), budget=budget)
    text, is_complete = tokenizer.decode_action(sampled)
    if max(sampled, default=0) >= tokenizer.vocab_size:
        value = Malformed("the action holds ids that stand for no text")
    elif not is_complete and stage != GENERATOR:
        value = Malformed("the action was cut before its end")
    else:
        value = _parse(system, state, text)
    state = replace(
        state,
        actors=(*state.actors, (stage, state.turn + (stage == PLANNER))),
        error=isinstance(value, Malformed) or not is_complete,
        status=state.status if is_complete or stage != GENERATOR else Status.TOKEN_LIMIT,
    )
    return TRANSITIONS[stage](state, value, call_tool)


def _advance(
    system: AgentSystem, state: AgentState, call_tool: ToolRunner
) -> tuple[AgentState, HostObservation | None]:
    """The state at which a trained role is next, and its prompt; None if the episode is over."""
    state = _call_untrained(system, state, call_tool)
    if state.stage == DONE:
        return state, None
    role = system.roles[state.stage]
    assert isinstance(role, Role)  # trained
    state, observation = system.rendering(system.prompts, state, role)
    if observation is not None:
        return state, observation
    reason = f"the prompt of the {role.name} has more than {max(state.budget.tokens, 0)} tokens without any memory"
    state = replace(state, stage=GENERATOR, status=Status.TOKEN_LIMIT, reason=reason)
    if state.turn == 0 or GENERATOR in system.trained:
        return replace(state, stage=DONE, output=""), None
    return _call_untrained(system, state, call_tool), None


def _call_untrained(system: AgentSystem, state: AgentState, call_tool: ToolRunner) -> AgentState:
    """The state after all roles that act before the next trained one."""
    while state.stage != DONE and state.stage not in system.trained:
        role, stage = system.roles[state.stage], state.stage
        if isinstance(role, ScriptedRole):
            state = TRANSITIONS[stage](state, role.act(state), call_tool)
            continue
        assert role is not None  # only the analyst may be, and then no state is at its stage
        memory = render_memory(state.memory, budget=system.prompts.memory_tokens, count=system.prompts.count)
        messages = [dict(message) for message in role.prompt(state, memory)]
        result = call_tool(Call("role", role.name, {"messages": messages}, _seed(state, stage)))
        if result.failure:
            return _fail(state, f"{role.name}: {result.failure}")
        value = Malformed(result.text) if result.error else _parse(system, state, result.text)
        if isinstance(value, Malformed):
            state = replace(state, lapses=(*state.lapses, Lapse(role.name, clean(value.reason))))
        state = TRANSITIONS[stage](state, value, call_tool)
    return state


def _parse(system: AgentSystem, state: AgentState, text: str) -> Any:
    """The value of the role at this stage, or `Malformed`."""
    role = system.roles[state.stage]
    assert isinstance(role, Role)  # only a role has text
    return role.parse(state, clean(text))


def _seed(state: AgentState, speaker: str) -> tuple[int, ...]:
    """A call's seed: the randomness of its answer depends on trajectory key, turn and speaker only (E3)."""
    return (*state.seed, state.turn, SPEAKERS.index(speaker))


# Transitions ------------------------------------------------------------------------------------------


def _after_planner(state: AgentState, value: PlannerChoice | Malformed, _call_tool: ToolRunner) -> AgentState:
    """A turn is used up, whatever the value is."""
    budget = state.budget._replace(turns=state.budget.turns - 1)
    state = replace(state, turn=state.turn + 1, budget=budget, plan=None)
    if isinstance(value, Malformed):
        return _refuse(state, NO_PLAN, value.reason)
    return replace(state, plan=value, stage=GENERATOR if value.tool == ANSWER else EXECUTOR)


def _after_executor(state: AgentState, value: Mapping[str, JSON] | Malformed, call_tool: ToolRunner) -> AgentState:
    """The tool is called."""
    plan = state.plan or NO_PLAN
    if isinstance(value, Malformed):
        return _refuse(state, plan, value.reason)
    result = call_tool(Call("tool", plan.tool, value, _seed(state, TOOL)))
    if result.failure:
        return _fail(replace(state, called=plan.tool), f"{plan.tool}: {result.failure}")
    record = MemoryRecord(state.turn, plan.sub_goal, plan.tool, to_command(value), clean(result.text), result.error)
    error = state.error or result.error
    return replace(state, memory=state.memory.add(record), called=plan.tool, error=error, stage=VERIFIER)


def _after_verifier(state: AgentState, value: Verdict | Malformed, _call_tool: ToolRunner) -> AgentState:
    """STOP ends the episode; a text that can't be parsed is CONTINUE."""
    verdict = Verdict(False) if isinstance(value, Malformed) else value
    state = replace(state, memory=state.memory.with_verdict(*verdict))
    return replace(state, stage=GENERATOR) if verdict.stop else _next_turn(state)


def _refuse(state: AgentState, plan: PlannerChoice, reason: str) -> AgentState:
    """Record an action that led to no call; there is nothing to verify."""
    record = MemoryRecord(state.turn, plan.sub_goal, plan.tool, plan.context, clean(reason), error=True)
    return _next_turn(replace(state, memory=state.memory.add(record), error=True))


def _next_turn(state: AgentState) -> AgentState:
    """The planner is next, or the generator if no turn is left."""
    if state.budget.turns > 0:
        return replace(state, stage=PLANNER)
    return replace(state, stage=GENERATOR, status=Status.TURN_LIMIT, reason="no turn is left")


def _fail(state: AgentState, reason: str) -> AgentState:
    return replace(state, stage=DONE, status=Status.TOOL_FAILURE, reason=clean(reason))


def _text_or_empty(value: str | Malformed) -> str:
    return "" if isinstance(value, Malformed) else value


TRANSITIONS = {  # (state, value of the role at its stage, call_tool) -> the next state
    ANALYST: lambda state, value, _: replace(state, stage=PLANNER, analysis=_text_or_empty(value)),
    PLANNER: _after_planner,
    EXECUTOR: _after_executor,
    VERIFIER: _after_verifier,
    GENERATOR: lambda state, value, _: replace(state, stage=DONE, output=_text_or_empty(value)),
}
