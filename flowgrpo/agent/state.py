"""Hold the state of one trajectory of the agent system, an immutable value that can be saved, forked and replayed (A2).

    (q, K, M, turn, budget), what the roles said last, which role is to speak, and how it ended
    to_json: AgentState -> JSON object;   from_json: JSON object -> the same AgentState

Its memory M holds records of what the agent did and saw; `render` shows them within a budget of tokens:

    1. calculator("2*3") -> "6"
    2. "look it up": search("boiling point of water") -> "100 C" [continue: "the question asks for Fahrenheit"]
    3. add({"a": 2}) -> error: "b is missing"

Whatever a model or a tool said is JSON, so it ends where it says, and nothing in it passes for a word of ours. Two
memories that differ never give the same text, unless something is left out: `...` outside of quotation marks.
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

from flowgrpo.data.tokenizer import Conversation, as_json
from flowgrpo.types import BadInput, Status

Count = Callable[[str], int]  # tokens of a text
ANSWER = "answer"  # the planner's pseudo tool that ends the episode
ANALYST, PLANNER, EXECUTOR, VERIFIER, GENERATOR, DONE = "analyst", "planner", "executor", "verifier", "generator", ""
LONGEST_TOKEN = 16  # characters that one token of a budget stands for, before anything is counted
LEFT_OUT = "..."
LEAST_FIELD = 8  # tokens of a field that is cut
WHOLE, BRIEF, BARE = range(3)  # how much of a record is shown


# Values -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryRecord:
    """Action and outcome of one turn. `tool` is "" where the action could not be read."""

    turn: int  # from 1 on
    sub_goal: str
    tool: str
    command: str | Mapping[str, Any]  # its arguments: the text where they are one, else a JSON object
    observation: str
    error: bool = False
    stop: bool = False  # the verifier's decision after it
    reason: str = ""  # of the decision


@dataclass(frozen=True)
class Memory:
    """Records, the oldest first."""

    records: tuple[MemoryRecord, ...] = ()

    def add(self, record: MemoryRecord) -> "Memory":
        """This memory with `record` after the others."""
        return Memory((*self.records, record))

    def judged(self, stop: bool, reason: str) -> "Memory":
        """This memory with the verifier's decision on its newest record."""
        return Memory((*self.records[:-1], replace(self.records[-1], stop=stop, reason=reason)))

    def since(self, count: int) -> "Memory":
        """The records after the first `count`."""
        return Memory(self.records[count:])


class PlannerChoice(NamedTuple):
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
    plan: PlannerChoice | None = None
    output: str | None = None  # the generator's
    status: Status = Status.FINISHED  # how it ended, or is about to
    reason: str = ""  # why, where it did not end by itself
    called: str = ""  # the tool that ran since the last action
    error: bool = False  # that action could not be read, or its call gave an error
    conversation: Conversation | None = None  # where the context appends
    shown: int = 0  # records that stand in the conversation
    actors: tuple[tuple[str, int], ...] = ()  # of each action: who spoke, and in which turn of the planner
    lapses: tuple[Lapse, ...] = ()


# Of a state -------------------------------------------------------------------------------------------


def anchor(state: AgentState) -> int:
    """31 bits that are equal where query, memory and who is to speak on what are; the number of the turn is no part."""
    records = [[getattr(record, f.name) for f in fields(record) if f.name != "turn"] for record in state.memory.records]
    seen = [state.query, state.analysis, records, state.stage, state.plan]
    return small_digest(dumps(seen))


def small_digest(words: str) -> int:
    """31 bits of a text, which every server takes as a seed."""
    return int.from_bytes(blake2b(words.encode(), digest_size=4).digest(), "little") & 0x7FFFFFFF


def seed_of(key: Any) -> tuple[int, ...]:
    """The integers of a trajectory's key: a key of JAX, its data, an integer, or integers."""
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    found_s = np.asarray(key)
    if found_s.dtype.kind not in "iu":
        raise BadInput(f"the key of a trajectory must be a key of JAX or integers, not {key!r:.80}")
    return tuple(int(i) for i in found_s.ravel())


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
            memory=Memory(tuple(MemoryRecord(**record) for record in value["memory"])),
            plan=None if plan is None else PlannerChoice(*plan),
            status=Status[value["status"]],
            conversation=None if talk is None else Conversation(tuple(talk["tokens"]), tuple(talk["chosen"])),
            actors=tuple((name, turn) for name, turn in value["actors"]),
            lapses=tuple(Lapse(*lapse) for lapse in value["lapses"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"{value!r:.120} is no state of an agent ({error!r}): give what to_json wrote") from error


# Memory as text ---------------------------------------------------------------------------------------


def render(
    memory: Memory, *, budget: int, count: Count, each: int | None = None, write_record: "Line | None" = None
) -> str:
    """The records as text of at most `budget` tokens, as `count` counts them; each as `write_record` writes it.

    No field of a record (its observation, its command, …) takes more than `each` tokens, by default half of the
    budget: its middle is left out, and a mark says how many characters. Where the whole is still too long, as many of
    these steps are taken as it needs, each from the oldest record to the second newest: fields keep an eighth of
    `each`; the observation goes; the record goes, and one line at the top says how many did. The newest record takes
    the same steps after all others. Where not even that line fits, the text is empty.
    """
    each = max(budget // 2 if each is None else min(each, budget), LEAST_FIELD)
    line = partial(write_record or record_line, sizes=(each, max(each // 8, LEAST_FIELD)), count=count)
    lines: dict[tuple[int, int], str] = {}
    steps, found = _steps(len(memory.records)), ""
    too_long, fits = -1, len(steps)  # the step before the first does not fit; the one after the last, "", does
    while fits - too_long > 1:
        step = (too_long + fits) // 2 if too_long >= 0 else 0  # most often all fits
        for place in enumerate(steps[step]):
            if place[1] <= BARE and place not in lines:
                lines[place] = line(memory.records[place[0]], place[1])
        text = _joined(steps[step], lines)
        if len(text) <= budget * LONGEST_TOKEN and count(text) <= budget:
            fits, found = step, text
        else:
            too_long = step
    return found


def _steps(records: int) -> list[tuple[int, ...]]:
    """Say how much of each record is shown, step by step; BARE + 1 is a record that is left out."""
    levels = [WHOLE] * records
    steps = [tuple(levels)]
    for places in (range(records - 1), range(max(records - 1, 0), records)):
        for level in (BRIEF, BARE, BARE + 1):
            for place in places:
                levels[place] = level
                steps.append(tuple(levels))
    return steps


def _joined(levels: tuple[int, ...], lines: dict[tuple[int, int], str]) -> str:
    """The lines of the records that are shown, below how many are not."""
    shown = [lines[place] for place in enumerate(levels) if place[1] <= BARE]
    gone = len(levels) - len(shown)
    return "\n".join([f"({gone} earlier left out)"] * (gone > 0) + shown)


class Line(Protocol):
    """A way to write a record with as much of it as its level shows; `sizes` are tokens of a field, whole and cut."""

    def __call__(self, record: MemoryRecord, level: int, *, sizes: tuple[int, int], count: Count) -> str:
        """The record as text."""
        ...


def record_line(record: MemoryRecord, level: int, *, sizes: tuple[int, int], count: Count) -> str:
    """A record as a line of JSON texts: `2. "look it up": search("boiling point") -> "100 C"`."""
    field = partial(_field, size=sizes[min(level, BRIEF)], count=count)
    head = f"{record.turn}. " + (f"{field(record.sub_goal)}: " if record.sub_goal else "")
    called = f"{record.tool}({field(record.command)}) -> " if record.tool or record.command != "" else ""
    seen = field(record.observation)
    if level == BARE and len(seen) > len(LEFT_OUT):
        seen = LEFT_OUT
    return head + called + ("error: " if record.error else "") + seen + _verdict(record, field)


def observation_line(record: MemoryRecord, level: int, *, sizes: tuple[int, int], count: Count) -> str:
    """What the tool said, as it stands, for a message of its own in a conversation that has the call."""
    size = sizes[min(level, BRIEF)]
    seen = shorten(record.observation, size, count) if level < BARE else ""
    if not seen and record.observation:
        seen = LEFT_OUT
    return ("error: " if record.error else "") + seen + _verdict(record, partial(_field, size=size, count=count))


def _verdict(record: MemoryRecord, field: Callable[[str], str]) -> str:
    if not (record.stop or record.reason):
        return ""
    reason = f": {field(record.reason)}" if record.reason else ""
    return f" [{'stop' if record.stop else 'continue'}{reason}]"


def _field(value: str | Mapping[str, Any], size: int, count: Count) -> str:
    """Write a field as JSON of at most `size` tokens, or both of its ends as two texts; no arguments are nothing."""
    if not isinstance(value, str):
        written = as_json(value) if value else ""
        if shorten(written, size, count) == written:
            return written
        value = written
    return shorten(value, size, count, as_json) or LEFT_OUT


def shorten(string: str, budget: int, count: Count, write: Callable[[str], str] = str) -> str:
    """Write `string` in at most `budget` tokens: both ends around a mark where it has more; "" where nothing fits."""
    if len(string) <= budget * LONGEST_TOKEN and count(whole := write(string)) <= budget:
        return whole
    fits, too_many = -1, min(len(string), budget * LONGEST_TOKEN)
    start = string[: 2 * max(budget, 1)]
    guess = len(start) * budget // max(count(start), 1)
    # Of the characters that are kept, `fits` fits (-1: none was found to) and `too_many` does not, to 3 %.
    while too_many - fits > 1 + max(fits, 0) // 32:
        keep = guess if fits < guess < too_many else (fits + too_many) // 2
        tokens = count(_cut(string, keep, write))
        fits, too_many = (keep, too_many) if tokens <= budget else (fits, keep)
        if budget * 15 // 16 <= tokens <= budget:
            break
        guess = keep * budget * 31 // (32 * max(tokens, 1))
    return _cut(string, fits, write) if fits >= 0 else ""


def _cut(string: str, keep: int, write: Callable[[str], str]) -> str:
    """Write `keep` characters of both ends, and how many are left out between them."""
    head, tail = string[: keep - keep // 2], string[len(string) - keep // 2 :]
    return f"{write(head)} [... {len(string) - keep} characters ...] {write(tail)}"
