"""The state of one trajectory of the agent system: an immutable value that can be saved, forked and replayed (A2).

(q, K, M, turn, budget), what the roles said last, which role is to speak, and how it ended
to_json: AgentState -> JSON object;   from_json: JSON object -> the same AgentState
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from json import dumps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flowgrpo.agent.memory import Memory, Record
from flowgrpo.text import Conversation
from flowgrpo.types import BadInput, Status

ANSWER = "answer"  # the planner's pseudo tool that ends the episode
ANALYST, PLANNER, EXECUTOR, VERIFIER, GENERATOR, DONE = "analyst", "planner", "executor", "verifier", "generator", ""


class Plan(NamedTuple):
    """Choice of the planner in one turn."""

    sub_goal: str
    tool: str
    context: str


class Verdict(NamedTuple):
    """Decision of the verifier, with its reason."""

    stop: bool
    reason: str = ""


class Malformed(NamedTuple):
    """Stand-in for a role's value where its words could not be read, with the reason."""

    reason: str


class Budget(NamedTuple):
    """Turns and tokens that a trajectory has left."""

    turns: int  # of the planner
    tokens: int  # of the next prompt, at most


class Lapse(NamedTuple):
    """A role that is not trained said something that could not be read; the trajectory went on."""

    role: str
    reason: str


@dataclass(frozen=True)
class AgentState:
    """One trajectory so far. `stage` is the role that is to speak next, "" where the episode is over."""

    task_id: str
    query: str
    schemas: tuple[Mapping[str, Any], ...]  # of the toolset K
    budget: Budget
    stage: str
    seed: tuple[int, ...] = ()  # from the trajectory's key
    memory: Memory = field(default_factory=Memory)
    turn: int = 0  # of the planner, from 1 on
    analysis: str = ""
    plan: Plan | None = None
    output: str | None = None  # the generator's
    status: Status = Status.FINISHED  # how it ended, or is about to
    reason: str = ""  # why, where it did not end by itself
    called: str = ""  # the tool that ran since the last action
    error: bool = False  # that action could not be read, or its call gave an error
    conversation: Conversation | None = None  # where the context appends
    shown: int = 0  # records that stand in the conversation
    actors: tuple[tuple[str, int], ...] = ()  # of each action: who spoke, and in which turn of the planner
    lapses: tuple[Lapse, ...] = ()


def lapses(state: AgentState) -> dict[str, int]:
    """How often each role that is not trained could not be understood: a metric."""
    names = [lapse.role for lapse in state.lapses]
    return {name: names.count(name) for name in dict.fromkeys(names)}


def anchor(state: AgentState) -> int:
    """31 bits that are equal where query, memory and who is to speak on what are; the number of the turn is no part."""
    records = [[getattr(record, f.name) for f in fields(record) if f.name != "turn"] for record in state.memory.records]
    seen = [state.query, state.analysis, records, state.stage, state.plan]
    return int.from_bytes(blake2b(dumps(seen).encode(), digest_size=4).digest(), "little") & 0x7FFFFFFF


def seed_of(key: Any) -> tuple[int, ...]:
    """The integers of a trajectory's key: a key of JAX, its data, an integer, or integers."""
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    found_s = np.asarray(key)
    if found_s.dtype.kind not in "iu":
        raise BadInput(f"the key of a trajectory must be a key of JAX or integers, not {key!r:.80}")
    return tuple(int(i) for i in found_s.ravel())


# As JSON ----------------------------------------------------------------------------------------------


def to_json(state: AgentState) -> dict[str, Any]:
    """The state as a JSON object."""
    value = {item.name: getattr(state, item.name) for item in fields(state)}
    talk = state.conversation
    return value | {
        "schemas": [dict(schema) for schema in state.schemas],
        "budget": list(state.budget),
        "seed": list(state.seed),
        "memory": [vars(record) for record in state.memory.records],
        "plan": None if state.plan is None else list(state.plan),
        "status": state.status.name,
        "conversation": None if talk is None else {"tokens": list(talk.tokens), "chosen": list(talk.chosen)},
        "actors": [list(actor) for actor in state.actors],
        "lapses": [list(lapse) for lapse in state.lapses],
    }


def from_json(value: Mapping[str, Any]) -> AgentState:
    """The state that `to_json` wrote."""
    try:
        talk, plan = value["conversation"], value["plan"]
        return replace(
            AgentState(**value),
            schemas=tuple(value["schemas"]),
            budget=Budget(*value["budget"]),
            seed=tuple(value["seed"]),
            memory=Memory(tuple(Record(**record) for record in value["memory"])),
            plan=None if plan is None else Plan(*plan),
            status=Status[value["status"]],
            conversation=None if talk is None else Conversation(tuple(talk["tokens"]), tuple(talk["chosen"])),
            actors=tuple((name, turn) for name, turn in value["actors"]),
            lapses=tuple(Lapse(*lapse) for lapse in value["lapses"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"{value!r:.120} is no state of an agent ({error!r}): give what to_json wrote") from error
