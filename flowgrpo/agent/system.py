"""The agent system as a host environment (A1): planner -> executor -> tool -> memory -> verifier -> ... -> generator.

    step(state, tokens, do):  the trained role's words are read; then the other roles speak and the tool runs, through
    `do`, until a trained role is to speak again or the episode is over

A step is a function of the state, the sampled ids and what `do` answers, so a record of those answers replays it (A2).
The ids are kept as they were sampled; text is made of them only to read it (A5). What the policy gets wrong is a record
with an error that it sees next time (A4); what a role that is not trained gets wrong is a `Lapse` in the state, and

    analyst: there is no analysis      planner, executor: a record with an error
    verifier: CONTINUE                 generator: the output is ""

What fails outside (`Result.failure`) ends the trajectory with TOOL_FAILURE. The contract of `reset` knows no end: where
the episode is over before a trained role could speak, `Said` is the prompt that it would have had (its beginning, where
it is too long), and the next step ends it, whatever the action. The deadline is the caller's.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from flowgrpo.agent import roles as make
from flowgrpo.agent.machine import System, go_on, hear
from flowgrpo.agent.rendering import Frame, Rendering, appending, first_tokens, fresh
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
    anchor,
    seed_of,
)
from flowgrpo.contracts import Do, HostEnv, HostStep, Said
from flowgrpo.text import Text, clean, guard
from flowgrpo.types import BadInput, Status, Task

ROUND = (PLANNER, EXECUTOR, VERIFIER)  # who speaks in each turn of the planner
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,127}")  # of a tool, as `tools.schema` has it: prompts show it bare
ANY_PLANNER = make.planner()


def agent_system(
    text: Text,
    *,
    schemas: Sequence[Schema],
    planner: Role | Rule = ANY_PLANNER,
    executor: Role | Rule = make.rule_executor,
    verifier: Role | Rule = make.rule_verifier,
    generator: Role | Rule = make.rule_generator,
    analyst: Role | Rule | None = None,
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
        reset=partial(_reset, system),
        step=partial(_step, system),
        anchor=anchor,
    )


def _reset(system: System, key: Any, task: Task, do: Do) -> tuple[AgentState, Said]:
    stage = PLANNER if system.roles[ANALYST] is None else ANALYST
    state = AgentState(task.id, clean(task.query), system.schemas, system.budget, stage, seed_of(key))
    state, said = go_on(system, state, do)
    return state, said or _unheard(system, state)


def _unheard(system: System, state: AgentState) -> Said:
    """The prompt of a trained role whose turn never came."""
    role = system.roles[system.trained[0]]
    assert isinstance(role, Role)  # what is trained is one
    said = fresh(system.frame, state, role)[1]
    room = system.budget.tokens
    return said or Said(first_tokens(system.frame.text, role.prompt(state, ""))[:room], appends=False)


def _step(system: System, state: AgentState, tokens: Sequence[int], do: Do) -> tuple[AgentState, HostStep]:
    state = replace(state, called="", error=False)
    if state.stage != DONE:
        state = hear(system, state, tuple(int(i) for i in tokens), do)
    state, said = go_on(system, state, do)
    done = said is None
    return state, HostStep(
        said=said,
        done=done,
        tool=state.called,
        error=state.error,
        output=state.output if done else None,
        status=state.status if done else Status.FINISHED,
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
    for name, role in filled.items():
        if role is not None and (not isinstance(role, Role | Rule) or role.name != name):
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
    for name in names:
        if not NAME.fullmatch(name) or name.casefold() == ANSWER:
            allowed = f"up to 128 letters, digits, _, -, . and /, other than {ANSWER!r}"
            raise BadInput(f"a tool has the name {name!r}: give it one of {allowed}")
        if [other.casefold() for other in names].count(name.casefold()) > 1:
            raise BadInput(f"two tools have the name {name!r}: give each one of its own")
    return tuple(own)
