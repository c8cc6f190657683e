"""`lookup`: multi-hop questions over knowledge bases, each kind of fact behind a tool of its own.

    ada friend boss ?                  who is the boss of ada's friend?
    registry friend ada <end>          ivo
    gazette boss ivo <end>             none          (the wrong tool for this kind of fact)
    archive boss ivo <end>             mei
    answer mei <end>                   right

A task is a knowledge base (every relation of every entity, drawn afresh for each task, so that only a tool can tell),
an entity to start from, and a chain of 2 or 3 relations. The right tool of a relation never changes; it is what
a policy can learn. It knows the fact; every other tool answers `none` or a wrong entity, by the key of the trajectory,
and a wrong entity looks just like a right one. There are 2 turns a hop; an answer ends the episode, and pays 1 where it
is right. A malformed action is answered `error` and costs its turn.

The splits share no chain: one belongs to validation where its relations (by number) sum to 0 modulo their count, to
test where to 1, and to training otherwise; 42, 42 and 168 of the 252. So training holds every relation in every place,
and every pair of successive ones.

Demonstrations are well-formed and believe what they are told, but choose the tool nearly at chance, and slip now and
then. Over 20,000 training tasks (`python -m experiments.environments`; the same on the other splits within 0.5):

                      success   2 hops   3 hops   turns   calls to the right tool
    oracle            100.0 %    100 %    100 %     3.5                     100 %
    demonstrations       17 %     20 %     14 %     4.0      35 % (25 % is chance)
    random tokens       0.0 %      0 %      0 %     5.0                         -

An answer without a tool is right in at most 1 case of 15. What a model makes of the demonstrations is not in here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array
from jaxtyping import Bool, Int

from flowgrpo.contracts import Env, Observation, Sizes, Step
from flowgrpo.envs.env import END, SPECIAL, absorbing, pad_tokens, select, split_index
from flowgrpo.types import BadInput, check_names, check_range

PEOPLE = ("ada", "bo", "cy", "dee", "eli", "fay", "gus", "hal", "ivo", "jo", "kim", "lou", "mei", "ned", "ola", "pat")
RELATIONS = ("friend", "boss", "mentor", "rival", "doctor", "tenant")
TOOLS = ("registry", "archive", "gazette", "directory")
# After the special tokens; relations follow the tools, entities the relations.
QUESTION, NONE, ERROR, ANSWER, FIRST_TOOL = range(len(SPECIAL), len(SPECIAL) + 5)
SPREAD = 0x61C88647  # odd, so that within a task different progress always differs, overflow and all


# Tasks and states -------------------------------------------------------------------------------------


class LookupTask(struct.PyTreeNode):
    """A question, and the knowledge base that answers it."""

    facts: Int[Array, "entity relation"]  # an entity; never the one that was asked about
    start: Int[Array, ""]
    chain: Int[Array, "hop"]  # relations; what is past `hops` is never read
    hops: Int[Array, ""]
    identity: Int[Array, ""]  # tells tasks apart
    hinted: Any = False  # the question comes after the tools that are right for it


class LookupState(struct.PyTreeNode):
    """How far the truth was followed (`hop`, `entity`); how far somebody thinks who believes all (`heard`, `told`)."""

    task: LookupTask
    key: Array  # decides what wrong tools answer
    hop: Int[Array, ""]
    entity: Int[Array, ""]
    heard: Int[Array, ""]
    told: Int[Array, ""]
    turn: Int[Array, ""]
    done: Bool[Array, ""]
    correct: Bool[Array, ""]


class Action(NamedTuple):
    """Action that the tokens of a turn ask for; neither a call nor an answer where they are malformed."""

    calls: Array
    answers: Array
    tool: Array
    relation: Array
    entity: Array


# The environment --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class World:
    """A lookup environment: its settings, where its tokens lie, and the functions of its `Env`."""

    entities: int = 16
    relations: int = 6
    tools: int = 4
    hops: tuple[int, int] = (2, 3)  # fewest and most
    turns_per_hop: int = 2
    lies: float = 0.5  # how often a wrong tool answers a wrong entity rather than `none`
    skill: float = 0.13  # how often a demonstration knows the right tool; else it takes any
    pay: float = 0.0  # for each hop that is found out, once; with it rewards come by turn, beside the outcome
    slips: float = 0.05  # how often it answers too early, and how often it takes another relation
    hints: float = 0.0  # share of the tasks that begin with a hint, the right tools, which demonstrations then take

    def __post_init__(self):
        least = {"entities": 3, "relations": 3, "tools": 2, "turns_per_hop": 1}
        for name, low in least.items():
            check_range("lookup", name, getattr(self, name), low, whole=True)
        for name in ("lies", "skill", "slips", "pay", "hints"):
            check_range("lookup", name, getattr(self, name), 0.0, 1.0)
        if not isinstance(self.hops, tuple | list) or len(self.hops) != 2:
            raise BadInput(f"lookup: hops is {self.hops!r}, but must be (fewest, most), such as (2, 3)")
        check_range("lookup", "the fewest hops", self.hops[0], 1, whole=True)
        check_range("lookup", "the most hops", self.hops[1], self.hops[0], whole=True)

    @property
    def first_relation(self) -> int:
        """The token of the first relation."""
        return FIRST_TOOL + self.tools

    @property
    def first_entity(self) -> int:
        """The token of the first entity."""
        return self.first_relation + self.relations

    @property
    def words(self) -> tuple[str, ...]:
        """Word that each token stands for, in the order of their ids."""
        names = _names(TOOLS, "tool", self.tools) + _names(RELATIONS, "relation", self.relations)
        return (*SPECIAL, "?", "none", "error", "answer", *names, *_names(PEOPLE, "entity", self.entities))

    def tool_of(self, relation: Array) -> Array:
        """The right tool for a kind of fact. The first tools cover more kinds where they don't share evenly."""
        return relation % self.tools

    def make_task(self, key: Array, split: str) -> LookupTask:
        """A knowledge base and a question whose chain belongs to `split`."""
        keys = jax.random.split(jax.random.fold_in(key, split_index(split)), 3)
        least, most = self.hops
        draws = jax.random.uniform(keys[0], (most + 3,))
        hops = least + _pick(draws[0], most - least + 1)
        away = 1 + _pick(jax.random.uniform(keys[1], (self.entities, self.relations)), self.entities - 1)
        return LookupTask(
            facts=(jnp.arange(self.entities)[:, None] + away) % self.entities,
            start=_pick(draws[1], self.entities),
            chain=self._deal(draws[2:], hops, split_index(split)),
            hops=hops,
            hinted=jax.random.uniform(jax.random.fold_in(keys[2], 1)) < self.hints,
            identity=(jax.random.bits(keys[2]) >> 1).astype(jnp.int32),
        )

    def _deal(self, draws: Array, hops: Array, split: int) -> Array:
        """A chain whose relations sum to what the split holds, modulo their count."""
        first, count = ((2, self.relations - 2), (0, 1), (1, 1))[split]
        place = jnp.arange(self.hops[1])
        chain = jnp.where(place < hops - 1, _pick(draws[1:], self.relations), 0)
        last = (first + _pick(draws[0], count) - chain.sum()) % self.relations
        return jnp.where(place == hops - 1, last, chain)

    def reset(self, key: Array, task: LookupTask) -> tuple[LookupState, Observation]:
        """The question: the entity to start from, the relations to follow, and a question mark."""
        zero, no = jnp.int32(0), jnp.bool_(False)
        state = LookupState(task, key, zero, task.start, zero, task.start, zero, no, no)
        place = jnp.arange(self.hops[1] + 1)
        links = jnp.append(task.chain + self.first_relation, QUESTION)
        asked = jnp.where(place < task.hops, links, jnp.where(place == task.hops, QUESTION, 0))
        prompt = jnp.concatenate([task.start[None] + self.first_entity, asked])
        if self.hints > 0:
            hint = self.hindsight(task)
            after = jnp.concatenate([hint, prompt])
            prompt = jnp.where(task.hinted, after, jnp.pad(prompt, (0, len(hint))))
        return state, Observation(prompt, task.hops + 2 + jnp.where(task.hinted, self.hops[1], 0))

    def hindsight(self, task: LookupTask) -> Array:
        """Name the right tool for each hop, and `none` for hops that the question doesn't have."""
        tools = FIRST_TOOL + self.tool_of(task.chain)
        return jnp.where(jnp.arange(self.hops[1]) < task.hops, tools, NONE)

    def step(self, state: LookupState, tokens: Array, length: Array) -> tuple[LookupState, Step]:
        """One action: a call is answered, an answer or the last turn ends the episode."""
        task, action = state.task, self.read(tokens, length)
        correct = action.answers & (action.entity == solution(task))
        done = action.answers | (state.turn + 1 >= self.turns_per_hop * task.hops)
        following, said = self._call(state, action)
        said = jnp.where(done, 0, jnp.where(action.calls, said, ERROR))
        return following.replace(turn=state.turn + 1, done=done, correct=correct), Step(
            observation=Observation(said[None], jnp.where(done, 0, 1)),
            reward=correct.astype(jnp.float32) + self.pay * (following.hop - state.hop).astype(jnp.float32),
            done=done,
            correct=correct,
            tool=jnp.where(action.calls, action.tool, -1),
            error=~(action.calls | action.answers),
        )

    def read(self, tokens: Array, length: Array) -> Action:
        """`TOOL relation entity END` is a call, `answer entity END` an answer; anything else is malformed."""
        tool, relation = tokens[0] - FIRST_TOOL, tokens[1] - self.first_relation
        calls = (length == 4) & _within(tool, self.tools) & _within(relation, self.relations) & (tokens[3] == END)
        answers = (length == 3) & (tokens[0] == ANSWER) & (tokens[2] == END)
        entity = jnp.where(calls, tokens[2], tokens[1]) - self.first_entity
        known = _within(entity, self.entities)
        return Action(calls & known, answers & known, tool, relation, entity)

    def _call(self, state: LookupState, action: Action) -> tuple[LookupState, Array]:
        """The state after a call, and the token that its tool says; both mean nothing where the action is no call."""
        task = state.task
        fact = task.facts[action.entity, action.relation]
        right = action.tool == self.tool_of(action.relation)
        lies, wrong = self._lie(state.key, action, fact)
        told = jnp.where(right, fact, wrong)
        hears = action.calls & (right | lies)
        asked = (action.relation == task.chain[state.hop]) & (action.entity == state.entity) & (state.hop < task.hops)
        follows = hears & right & asked
        heard = jnp.where(follows, state.hop, state.heard) + 1
        following = state.replace(
            hop=jnp.where(follows, state.hop + 1, state.hop),
            entity=jnp.where(follows, fact, state.entity),
            heard=jnp.where(hears, jnp.minimum(heard, task.hops), state.heard),
            told=jnp.where(hears, told, state.told),
        )
        return following, jnp.where(hears, told + self.first_entity, NONE)

    def _lie(self, key: Array, action: Action, fact: Array) -> tuple[Array, Array]:
        """Say whether a wrong tool lies about this fact, and what it says: neither the fact nor the entity asked about.

        It says the same whenever it is asked the same, so asking twice tells nothing.
        """
        question = (action.tool * self.relations + action.relation) * self.entities + action.entity
        draws = jax.random.uniform(jax.random.fold_in(key, question), (2,))
        others = self.entities - 1
        shift = 1 + _pick(draws[1], others - 1)
        away = (fact - action.entity - 1 + shift) % others + 1
        return draws[0] < self.lies, (action.entity + away) % self.entities

    def anchor(self, state: LookupState) -> Array:
        """Equal where the task and the progress in it are; turns used up don't count."""
        links = self.hops[1] + 1
        progress = ((state.hop * links + state.heard) * self.entities + state.entity) * self.entities + state.told
        return state.task.identity + progress * SPREAD

    def oracle(self, state: LookupState) -> tuple[Array, Array]:
        """The right tool for the next fact that is not yet known; then the answer."""
        relation = state.task.chain[state.hop]
        call = self._call_tokens(self.tool_of(relation), relation, state.entity)
        return select(state.hop >= state.task.hops, self._answer_tokens(state.entity), call)

    def answer(self, task: LookupTask) -> tuple[Array, Array]:
        """The action that ends a task rightly."""
        return self._answer_tokens(solution(task))

    def demonstrate(self, key: Array, state: LookupState) -> tuple[Array, Array]:
        """A well-formed action of somebody who believes what he is told, and knows the right tool now and then."""
        draws = jax.random.uniform(key, (5,))
        early, slips = draws[0] < self.slips, draws[1] < self.slips
        knows = (draws[2] < self.skill) | state.task.hinted
        relation = jnp.where(slips, _pick(draws[3], self.relations), state.task.chain[state.heard])
        tool = jnp.where(knows, self.tool_of(relation), _pick(draws[4], self.tools))
        call = self._call_tokens(tool, relation, state.told)
        return select(early | (state.heard >= state.task.hops), self._answer_tokens(state.told), call)

    def _call_tokens(self, tool: Array, relation: Array, entity: Array) -> tuple[Array, Array]:
        return pad_tokens(
            [tool + FIRST_TOOL, relation + self.first_relation, entity + self.first_entity, END], 4
        ), jnp.int32(4)

    def _answer_tokens(self, entity: Array) -> tuple[Array, Array]:
        return pad_tokens([ANSWER, entity + self.first_entity, END], 4), jnp.int32(3)


def lookup(**settings) -> Env:
    """The environment; `World` lists its settings."""
    check_names("lookup", settings, [item.name for item in fields(World)])
    world = World(**settings)
    most = world.hops[1]
    return Env(
        name="lookup",
        words=world.words,
        tools=_names(TOOLS, "tool", world.tools),
        sizes=Sizes(
            prompt=most + 2 + (most if world.hints else 0), observation=1, action=4, turns=world.turns_per_hop * most
        ),
        make_task=world.make_task,
        reset=world.reset,
        step=absorbing(world.step),
        anchor=world.anchor,
        oracle=world.oracle,
        demonstrate=world.demonstrate,
        answer=world.answer,
        by_turn=world.pay > 0,
        hindsight=world.hindsight,
    )


def calls_right_tool(tokens: Array, length: Array, *, world: World = World()) -> Array:
    """Say whether an action calls the right tool for the relation that it asks for, whatever else it gets wrong."""
    action = world.read(tokens, length)
    return action.calls & (action.tool == world.tool_of(action.relation))


def solution(task: LookupTask) -> Array:
    """The entity at the end of the chain."""
    entity = task.start
    for hop, relation in enumerate(task.chain):
        entity = jnp.where(hop < task.hops, task.facts[entity, relation], entity)
    return entity


def _pick(draw: Array, count: int) -> Array:
    """One of `count` numbers from a uniform draw: much cheaper to compile and to run than a call of `randint` each."""
    return (draw * count).astype(jnp.int32)


def _within(number: Array, size: int) -> Array:
    return (number >= 0) & (number < size)


def _names(known: Sequence[str], kind: str, count: int) -> tuple[str, ...]:
    """The first `count` names; numbers after the known ones."""
    return tuple(known[:count]) + tuple(f"{kind}{number}" for number in range(len(known), count))
