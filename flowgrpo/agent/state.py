"""State of one trajectory of the agent system: an immutable value that can be saved, forked and replayed (A2).

    (q, K, M, turn, budget), the last values of the roles, the role that speaks next, and how the trajectory ended
    to_json: AgentState -> JSON object;   from_json: JSON object -> the same AgentState

The memory M has a record of every action and its observation; `render_memory` writes them within a budget of tokens:

    1. calculator("2*3") -> "6"
    2. "look it up": search("boiling point of water") -> "100 C" [continue: "the question asks for Fahrenheit"]
    3. add({"a": 2}) -> error: "b is missing"

Everything that a model or a tool wrote is JSON, so that it can't pass for syntax of ours. Two memories that differ
never give the same text, unless something is left out: `...` outside of quotation marks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from hashlib import blake2b
from json import dumps
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from flowgrpo.data.tokenizer import Conversation, to_json_line
from flowgrpo.types import JSON, BadInput, Status

CountTokens = Callable[[str], int]  # number of tokens of a text
ANSWER = "answer"  # the planner's pseudo tool that ends the episode
ANSWER_SCHEMA: Mapping[str, JSON] = {
    "name": ANSWER,
    "description": "Give the answer and end.",
    "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
}
ANALYST, PLANNER, EXECUTOR, VERIFIER, GENERATOR, DONE = "analyst", "planner", "executor", "verifier", "generator", ""
MAX_TOKEN_CHARS = 16  # characters that a token of a budget allows for, before any tokens are counted
LEFT_OUT = "..."
MIN_FIELD_TOKENS = 8  # of a field that is cut
WHOLE, BRIEF, BARE, ABSENT = range(4)  # how much of a record is written


# Values -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryRecord:
    """Action and observation of one turn. `tool` is "" if the action could not be parsed."""

    turn: int  # from 1 on
    sub_goal: str
    tool: str
    command: str | Mapping[str, JSON]  # its arguments: the text if there is one only, else a JSON object
    observation: str
    error: bool = False
    stop: bool = False  # the verifier's decision after it
    reason: str = ""  # of the decision


@dataclass(frozen=True)
class Memory:
    """Records, the oldest first."""

    records: tuple[MemoryRecord, ...] = ()

    def add(self, record: MemoryRecord) -> "Memory":
        """This memory with one more record."""
        return Memory((*self.records, record))

    def with_verdict(self, stop: bool, reason: str) -> "Memory":
        """This memory with the verifier's decision on its newest record."""
        return Memory((*self.records[:-1], replace(self.records[-1], stop=stop, reason=reason)))

    def since(self, count: int) -> "Memory":
        """The records after the first `count`."""
        return Memory(self.records[count:])


class PlannerChoice(NamedTuple):
    """The planner's action in one turn."""

    sub_goal: str
    tool: str
    context: str


class Verdict(NamedTuple):
    """Decision of the verifier, with its reason."""

    stop: bool
    reason: str = ""


class Budget(NamedTuple):
    """Turns and tokens that a trajectory has left."""

    turns: int  # of the planner
    tokens: int  # of the next prompt, at most


class Lapse(NamedTuple):
    """Text of an untrained role that could not be parsed; the trajectory continued."""

    role: str
    reason: str


@dataclass(frozen=True)
class AgentState:
    """One trajectory so far. `stage` is the role that speaks next, "" once the episode is over."""

    task_id: str
    query: str
    schemas: tuple[Mapping[str, JSON], ...]  # of the toolset K
    budget: Budget
    stage: str
    seed: tuple[int, ...] = ()  # from the trajectory's key
    memory: Memory = field(default_factory=Memory)
    turn: int = 0  # of the planner, from 1 on
    analysis: str = ""
    plan: PlannerChoice | None = None
    output: str | None = None  # the generator's
    status: Status = Status.FINISHED  # how it ended, or is about to
    reason: str = ""  # why, if it did not end by itself
    called: str = ""  # the tool that was called since the last action
    error: bool = False  # that action could not be parsed, or its call gave an error
    conversation: Conversation | None = None  # if the context grows
    shown: int = 0  # number of records that are in the conversation
    actors: tuple[tuple[str, int], ...] = ()  # of each action: the role, and the turn of the planner
    lapses: tuple[Lapse, ...] = ()


# Identity and JSON --------------------------------------------------------------------------------------


def anchor(state: AgentState) -> int:
    """31 bits that are equal for equal query, memory, next role and plan; the number of the turn doesn't matter."""
    records = [[getattr(record, f.name) for f in fields(record) if f.name != "turn"] for record in state.memory.records]
    return digest31(dumps([state.query, state.analysis, records, state.stage, state.plan]))


def digest31(text: str) -> int:
    """31 bits of a text, which every server takes as a seed."""
    return int.from_bytes(blake2b(text.encode(), digest_size=4).digest(), "little") & 0x7FFFFFFF


def to_seed(key: Any) -> tuple[int, ...]:
    """The integers of a trajectory's key: a key of JAX, its data, an integer, or integers."""
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    seed_s = np.asarray(key)
    if seed_s.dtype.kind not in "iu":
        raise BadInput(f"the key of a trajectory must be a key of JAX or integers, not {key!r:.80}")
    return tuple(int(i) for i in seed_s.ravel())


def to_json(state: AgentState) -> dict[str, JSON]:
    """The state as a JSON object."""
    conversation = state.conversation
    return {field.name: getattr(state, field.name) for field in fields(state)} | {
        "schemas": [dict(schema) for schema in state.schemas],
        "budget": list(state.budget),
        "seed": list(state.seed),
        "memory": [vars(record) for record in state.memory.records],
        "plan": None if state.plan is None else list(state.plan),
        "status": state.status.name,
        "conversation": None
        if conversation is None
        else {"tokens": list(conversation.tokens), "chosen": list(conversation.chosen)},
        "actors": [list(actor) for actor in state.actors],
        "lapses": [list(lapse) for lapse in state.lapses],
    }


def from_json(value: Mapping[str, JSON]) -> AgentState:
    """The state that `to_json` wrote."""
    try:
        conversation, plan = value["conversation"], value["plan"]
        return replace(
            AgentState(**value),
            schemas=tuple(value["schemas"]),
            budget=Budget(*value["budget"]),
            seed=tuple(value["seed"]),
            memory=Memory(tuple(MemoryRecord(**record) for record in value["memory"])),
            plan=None if plan is None else PlannerChoice(*plan),
            status=Status[value["status"]],
            conversation=None
            if conversation is None
            else Conversation(tuple(conversation["tokens"]), tuple(conversation["chosen"])),
            actors=tuple((name, turn) for name, turn in value["actors"]),
            lapses=tuple(Lapse(*lapse) for lapse in value["lapses"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"{value!r:.120} is no state of an agent ({error!r}): give what to_json wrote") from error


# Memory as text ---------------------------------------------------------------------------------------


class RecordWriter(Protocol):
    """Writes a record, with as much of it as `level` says; `sizes` are tokens of a field, whole and brief."""

    def __call__(self, record: MemoryRecord, level: int, *, sizes: tuple[int, int], count: CountTokens) -> str:
        """The record as text."""
        ...


def render_memory(
    memory: Memory,
    *,
    budget: int,
    count: CountTokens,
    max_field_tokens: int | None = None,
    write_record: RecordWriter | None = None,
) -> str:
    """The records as text of at most `budget` tokens; "" if nothing fits.

    If the whole is too long, as many of these steps are taken as it needs, each from the oldest record to the second
    newest: fields keep an eighth of `max_field_tokens`; the observation is left out; the record is left out, and one
    line at the top says how many are. The newest record takes the same steps after all others.

    Args:
        memory: the records.
        budget: maximal number of tokens.
        count: number of tokens of a text.
        max_field_tokens: of a field of a record (its observation, its command, ...), whose middle is left out if it has
            more, with a mark of how many characters. By default half of the budget.
        write_record: writes a record; by default as a line of JSON texts.
    """
    whole = max(budget // 2 if max_field_tokens is None else min(max_field_tokens, budget), MIN_FIELD_TOKENS)
    sizes = (whole, max(whole // 8, MIN_FIELD_TOKENS))
    write = partial(write_record or record_line, sizes=sizes, count=count)
    num_records = len(memory.records)
    levels = [WHOLE] * num_records
    steps = [tuple(levels)]  # the level of each record, step by step
    for indices in (range(num_records - 1), range(max(num_records - 1, 0), num_records)):
        for level in (BRIEF, BARE, ABSENT):
            for index in indices:
                levels[index] = level
                steps.append(tuple(levels))

    # Bisection: `too_long` doesn't fit (-1: before the first step), `fits` does (the one after the last is "").
    lines: dict[tuple[int, int], str] = {}  # by (index, level)
    too_long, fits, fitting_text = -1, len(steps), ""
    while fits - too_long > 1:
        step = (too_long + fits) // 2 if too_long >= 0 else 0  # most often everything fits
        written = [(index, level) for index, level in enumerate(steps[step]) if level != ABSENT]
        for index, level in written:
            if (index, level) not in lines:
                lines[index, level] = write(memory.records[index], level)
        num_absent = num_records - len(written)
        text = "\n".join([f"({num_absent} earlier left out)"] * (num_absent > 0) + [lines[key] for key in written])
        if len(text) <= budget * MAX_TOKEN_CHARS and count(text) <= budget:
            fits, fitting_text = step, text
        else:
            too_long = step
    return fitting_text


def record_line(record: MemoryRecord, level: int, *, sizes: tuple[int, int], count: CountTokens) -> str:
    """A record as a line of JSON texts: `2. "look it up": search("boiling point") -> "100 C"`."""
    write = partial(_field, size=sizes[min(level, BRIEF)], count=count)
    head = f"{record.turn}. " + (f"{write(record.sub_goal)}: " if record.sub_goal else "")
    call = f"{record.tool}({write(record.command)}) -> " if record.tool or record.command != "" else ""
    observation = write(record.observation)
    if level == BARE and len(observation) > len(LEFT_OUT):
        observation = LEFT_OUT
    return head + call + ("error: " if record.error else "") + observation + _verdict(record, write)


def observation_line(record: MemoryRecord, level: int, *, sizes: tuple[int, int], count: CountTokens) -> str:
    """The tool's plain text, for a message of its own in a conversation that has the call."""
    size = sizes[min(level, BRIEF)]
    observation = shorten(record.observation, size, count) if level < BARE else ""
    if not observation and record.observation:
        observation = LEFT_OUT
    verdict = _verdict(record, partial(_field, size=size, count=count))
    return ("error: " if record.error else "") + observation + verdict


def _verdict(record: MemoryRecord, write: Callable[[str], str]) -> str:
    if not (record.stop or record.reason):
        return ""
    reason = f": {write(record.reason)}" if record.reason else ""
    return f" [{'stop' if record.stop else 'continue'}{reason}]"


def _field(value: str | Mapping[str, JSON], size: int, count: CountTokens) -> str:
    """A field as JSON of at most `size` tokens, or both of its ends as two texts; "" for no arguments."""
    if not isinstance(value, str):
        written = to_json_line(value) if value else ""
        if shorten(written, size, count) == written:
            return written
        value = written
    return shorten(value, size, count, to_json_line) or LEFT_OUT


def shorten(string: str, budget: int, count: CountTokens, write: Callable[[str], str] = str) -> str:
    """`write(string)` in at most `budget` tokens: both ends around a mark if it has more; "" if nothing fits."""
    if len(string) <= budget * MAX_TOKEN_CHARS and count(whole := write(string)) <= budget:
        return whole
    fits, too_many = -1, min(len(string), budget * MAX_TOKEN_CHARS)
    start = string[: 2 * max(budget, 1)]
    guess = len(start) * budget // max(count(start), 1)
    # Number of characters to keep: `fits` fits (-1: none known to) and `too_many` does not, to 3 %.
    while too_many - fits > 1 + max(fits, 0) // 32:
        keep = guess if fits < guess < too_many else (fits + too_many) // 2
        tokens = count(_cut(string, keep, write))
        fits, too_many = (keep, too_many) if tokens <= budget else (fits, keep)
        if budget * 15 // 16 <= tokens <= budget:
            break
        guess = keep * budget * 31 // (32 * max(tokens, 1))
    return _cut(string, fits, write) if fits >= 0 else ""


def _cut(string: str, keep: int, write: Callable[[str], str]) -> str:
    """`keep` characters of both ends, around the number of those that are left out."""
    head, tail = string[: keep - keep // 2], string[len(string) - keep // 2 :]
    return f"{write(head)} [... {len(string) - keep} characters ...] {write(tail)}"
