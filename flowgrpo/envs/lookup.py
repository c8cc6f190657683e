"""`lookup`: multi-hop questions over a knowledge base, each relation behind a tool of its own.

    ada friend boss ?                  who is the boss of ada's friend?
    registry friend ada <end>          ivo
    gazette boss ivo <end>             none          (the wrong tool for this relation)
    archive boss ivo <end>             mei
    answer mei <end>                   right

A task is a knowledge base (every relation of every entity, drawn for each task, so that only a tool can tell), an
entity to start from, and a chain of 2 or 3 relations. The right tool of a relation never changes; it is what a policy
can learn. It knows the fact; every other tool answers `none` or a wrong entity, by the key of the trajectory, and a
wrong entity looks just like a right one. There are 2 turns a hop; an answer ends the episode, with reward 1 if it is
right. The observation after a malformed action is `error`, and it costs its turn.

The splits share no chain: a chain is of validation if its relations (by index) sum to 0 modulo their count, of test if
they sum to 1, and of training otherwise; 42, 42 and 168 of the 252. So training has every relation in every place, and
every pair of successive ones.

Demonstrations are well-formed and believe every tool, but choose the tool nearly at chance, and sometimes slip. Over
20,000 training tasks (`python -m experiments.environments`; the same on the other splits within 0.5):

                      success   2 hops   3 hops   turns   calls to the right tool
    oracle            100.0 %    100 %    100 %     3.5                     100 %
    demonstrations       17 %     20 %     14 %     4.0      35 % (25 % is chance)
    random tokens       0.0 %      0 %      0 %     5.0                         -

An answer without a tool is right in at most 1 case of 15.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypedDict, Unpack

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
ANCHOR_FACTOR = 0x61C88647  # odd: within a task, different progress has different anchors even with overflow


# Tasks and states -------------------------------------------------------------------------------------


class LookupTask(struct.PyTreeNode):
    """A question, and the knowledge base that answers it."""

    facts: Int[Array, "entity relation"]  # an entity; never the one in question
    start: Int[Array, ""]
    chain: Int[Array, "hop"]  # relations; entries past `hops` are never read
    hops: Int[Array, ""]
    identity: Int[Array, ""]  # a random number
    hinted: Any = False  # the prompt begins with the right tools


class LookupState(struct.PyTreeNode):
    """True progress along the chain (`hop`, `entity`), and that of an agent who believes every tool (`believed_`)."""

    task: LookupTask
    key: Array  # decides the answers of wrong tools
    hop: Int[Array, ""]
    entity: Int[Array, ""]
    believed_hop: Int[Array, ""]
    believed_entity: Int[Array, ""]
    turn: Int[Array, ""]
    done: Bool[Array, ""]
    correct: Bool[Array, ""]


class Action(NamedTuple):
    """Parsed action of a turn; neither a call nor an answer if it is malformed."""

    is_call: Array
    is_answer: Array
    tool: Array
    relation: Array
    entity: Array


# The environment --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class World:
    """A lookup environment: its settings, its tokens, and the functions of its `Env`.

    Args:
        entities: number of entities.
        relations: number of relations.
        tools: number of tools.
        hops: fewest and most hops of a question.
        turns_per_hop: turns for each hop of a question.
        lies: probability that a wrong tool answers a wrong entity, and not `none`.
        skill: probability that a demonstration knows the right tool; otherwise it takes a random one.
        hop_reward: reward for each hop that is followed, once; if it is positive, rewards are by turn.
        slips: probability that a demonstration answers too early, and that it takes another relation.
        hints: fraction of the tasks that begin with the right tools, which demonstrations then take.
    """

    entities: int = 16
    relations: int = 6
    tools: int = 4
    hops: tuple[int, int] = (2, 3)
    turns_per_hop: int = 2
    lies: float = 0.5
    skill: float = 0.13
    hop_reward: float = 0.0
    slips: float = 0.05
    hints: float = 0.0

    def __post_init__(self):
        least = {"entities": 3, "relations": 3, "tools": 2, "turns_per_hop": 1}
        for name, low in least.items():
            check_range("lookup", name, getattr(self, name), low, whole=True)
        for name in ("lies", "skill", "slips", "hop_reward", "hints"):
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
    def vocabulary(self) -> tuple[str, ...]:
        """The word of each token id."""
        names = _names(TOOLS, "tool", self.tools) + _names(RELATIONS, "relation", self.relations)
        return (*SPECIAL, "?", "none", "error", "answer", *names, *_names(PEOPLE, "entity", self.entities))

    def tool_of(self, relation: Array) -> Array:
        """The right tool for a relation."""
        return relation % self.tools

    def make_task(self, key: Array, split: str) -> LookupTask:
        """A knowledge base, and a question whose chain is of `split`."""
        keys = jax.random.split(jax.random.fold_in(key, split_index(split)), 3)
        least, most = self.hops
        draws = jax.random.uniform(keys[0], (most + 3,))
        hops = least + _pick(draws[0], most - least + 1)
        away = 1 + _pick(jax.random.uniform(keys[1], (self.entities, self.relations)), self.entities - 1)
        return LookupTask(
            facts=(jnp.arange(self.entities)[:, None] + away) % self.entities,
            start=_pick(draws[1], self.entities),
            chain=self._draw_chain(draws[2:], hops, split_index(split)),
            hops=hops,
            hinted=jax.random.uniform(jax.random.fold_in(keys[2], 1)) < self.hints,
            identity=(jax.random.bits(keys[2]) >> 1).astype(jnp.int32),
        )

    def _draw_chain(self, draws: Array, hops: Array, split: int) -> Array:
        """A chain whose last relation makes the sum one of the split's, modulo the number of relations."""
        first, count = ((2, self.relations - 2), (0, 1), (1, 1))[split]
        index = jnp.arange(self.hops[1])
        chain = jnp.where(index < hops - 1, _pick(draws[1:], self.relations), 0)
        last = (first + _pick(draws[0], count) - chain.sum()) % self.relations
        return jnp.where(index == hops - 1, last, chain)

    def reset(self, key: Array, task: LookupTask) -> tuple[LookupState, Observation]:
        """The question: the entity to start from, the relations to follow, and a question mark."""
        zero, false = jnp.int32(0), jnp.bool_(False)
        state = LookupState(task, key, zero, task.start, zero, task.start, zero, false, false)
        index = jnp.arange(self.hops[1] + 1)
        relations = jnp.append(task.chain + self.first_relation, QUESTION)
        question = jnp.where(index < task.hops, relations, jnp.where(index == task.hops, QUESTION, 0))
        prompt = jnp.concatenate([task.start[None] + self.first_entity, question])
        if self.hints > 0:
            hint = self.hindsight(task)
            hinted_prompt = jnp.concatenate([hint, prompt])
            prompt = jnp.where(task.hinted, hinted_prompt, jnp.pad(prompt, (0, len(hint))))
        return state, Observation(prompt, task.hops + 2 + jnp.where(task.hinted, self.hops[1], 0))

    def hindsight(self, task: LookupTask) -> Array:
        """The right tool for each hop, and `none` for hops that the question doesn't have."""
        tools = FIRST_TOOL + self.tool_of(task.chain)
        return jnp.where(jnp.arange(self.hops[1]) < task.hops, tools, NONE)

    def step(self, state: LookupState, tokens: Array, length: Array) -> tuple[LookupState, Step]:
        """A call is answered with an entity or `none`; an answer or the last turn ends the episode."""
        task, action = state.task, self.parse(tokens, length)
        correct = action.is_answer & (action.entity == solution(task))
        done = action.is_answer | (state.turn + 1 >= self.turns_per_hop * task.hops)
        next_state, token = self._call(state, action)
        token = jnp.where(done, 0, jnp.where(action.is_call, token, ERROR))
        return next_state.replace(turn=state.turn + 1, done=done, correct=correct), Step(
            observation=Observation(token[None], jnp.where(done, 0, 1)),
            reward=correct.astype(jnp.float32) + self.hop_reward * (next_state.hop - state.hop).astype(jnp.float32),
            done=done,
            correct=correct,
            tool=jnp.where(action.is_call, action.tool, -1),
            error=~(action.is_call | action.is_answer),
        )

    def parse(self, tokens: Array, length: Array) -> Action:
        """`TOOL relation entity END` is a call, `answer entity END` an answer; anything else is malformed."""
        tool, relation = tokens[0] - FIRST_TOOL, tokens[1] - self.first_relation
        is_call = (length == 4) & _within(tool, self.tools) & _within(relation, self.relations) & (tokens[3] == END)
        is_answer = (length == 3) & (tokens[0] == ANSWER) & (tokens[2] == END)
        entity = jnp.where(is_call, tokens[2], tokens[1]) - self.first_entity
        is_entity = _within(entity, self.entities)
        return Action(is_call & is_entity, is_answer & is_entity, tool, relation, entity)

    def _call(self, state: LookupState, action: Action) -> tuple[LookupState, Array]:
        """The state after a call, and the token of the tool's answer; both mean nothing if the action is no call."""
        task = state.task
        fact = task.facts[action.entity, action.relation]
        is_right = action.tool == self.tool_of(action.relation)
        is_lie, wrong = self._lie(state.key, action, fact)
        answer = jnp.where(is_right, fact, wrong)
        answers = action.is_call & (is_right | is_lie)
        is_next = (action.relation == task.chain[state.hop]) & (action.entity == state.entity) & (state.hop < task.hops)
        follows = answers & is_right & is_next
        believed_hop = jnp.where(follows, state.hop, state.believed_hop) + 1
        next_state = state.replace(
            hop=jnp.where(follows, state.hop + 1, state.hop),
            entity=jnp.where(follows, fact, state.entity),
            believed_hop=jnp.where(answers, jnp.minimum(believed_hop, task.hops), state.believed_hop),
            believed_entity=jnp.where(answers, answer, state.believed_entity),
        )
        return next_state, jnp.where(answers, answer + self.first_entity, NONE)

    def _lie(self, key: Array, action: Action, fact: Array) -> tuple[Array, Array]:
        """Whether a wrong tool lies about this fact, and its answer: neither the fact nor the entity in question.

        The same question always has the same answer, so asking twice tells nothing.
        """
        question = (action.tool * self.relations + action.relation) * self.entities + action.entity
        draws = jax.random.uniform(jax.random.fold_in(key, question), (2,))
        count = self.entities - 1
        shift = 1 + _pick(draws[1], count - 1)
        offset = (fact - action.entity - 1 + shift) % count + 1
        return draws[0] < self.lies, (action.entity + offset) % self.entities

    def anchor(self, state: LookupState) -> Array:
        """Equal for equal task and progress; the number of the turn doesn't matter."""
        hops = self.hops[1] + 1
        hop = state.hop * hops + state.believed_hop
        progress = (hop * self.entities + state.entity) * self.entities + state.believed_entity
        return state.task.identity + progress * ANCHOR_FACTOR

    def oracle(self, state: LookupState) -> tuple[Array, Array]:
        """The right tool for the next hop; then the answer."""
        relation = state.task.chain[state.hop]
        call = self._call_tokens(self.tool_of(relation), relation, state.entity)
        return select(state.hop >= state.task.hops, self._answer_tokens(state.entity), call)

    def answer(self, task: LookupTask) -> tuple[Array, Array]:
        """The action that ends a task rightly."""
        return self._answer_tokens(solution(task))

    def demonstrate(self, key: Array, state: LookupState) -> tuple[Array, Array]:
        """A well-formed action of an agent that believes every tool, and sometimes knows the right one."""
        draws = jax.random.uniform(key, (5,))
        early, slips = draws[0] < self.slips, draws[1] < self.slips
        knows = (draws[2] < self.skill) | state.task.hinted
        relation = jnp.where(slips, _pick(draws[3], self.relations), state.task.chain[state.believed_hop])
        tool = jnp.where(knows, self.tool_of(relation), _pick(draws[4], self.tools))
        call = self._call_tokens(tool, relation, state.believed_entity)
        is_over = early | (state.believed_hop >= state.task.hops)
        return select(is_over, self._answer_tokens(state.believed_entity), call)

    def _call_tokens(self, tool: Array, relation: Array, entity: Array) -> tuple[Array, Array]:
        tokens = [tool + FIRST_TOOL, relation + self.first_relation, entity + self.first_entity, END]
        return pad_tokens(tokens, 4), jnp.int32(4)

    def _answer_tokens(self, entity: Array) -> tuple[Array, Array]:
        return pad_tokens([ANSWER, entity + self.first_entity, END], 4), jnp.int32(3)


class LookupSettings(TypedDict, total=False):
    """Settings of `lookup`, which `World` describes."""

    entities: int
    relations: int
    tools: int
    hops: tuple[int, int]
    turns_per_hop: int
    lies: float
    skill: float
    hop_reward: float
    slips: float
    hints: float


def lookup(**settings: Unpack[LookupSettings]) -> Env:
    """The environment; `World` describes its settings."""
    check_names("lookup", settings, [field.name for field in fields(World)])
    world = World(**settings)
    most = world.hops[1]
    return Env(
        name="lookup",
        vocabulary=world.vocabulary,
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
        by_turn=world.hop_reward > 0,
        hindsight=world.hindsight,
    )


def calls_right_tool(tokens: Array, length: Array, *, world: World = World()) -> Array:
    """Whether an action calls the right tool for its relation, even if the relation or the entity is wrong."""
    action = world.parse(tokens, length)
    return action.is_call & (action.tool == world.tool_of(action.relation))


def solution(task: LookupTask) -> Array:
    """The entity at the end of the chain."""
    entity = task.start
    for hop, relation in enumerate(task.chain):
        entity = jnp.where(hop < task.hops, task.facts[entity, relation], entity)
    return entity


def _pick(draw: Array, count: int) -> Array:
    """One of `count` integers from a uniform draw: much cheaper to compile and to run than a `randint` for each."""
    return (draw * count).astype(jnp.int32)


def _within(number: Array, size: int) -> Array:
    return (number >= 0) & (number < size)


def _names(names: Sequence[str], kind: str, count: int) -> tuple[str, ...]:
    """`count` names, numbered ones after those that are given."""
    return tuple(names[:count]) + tuple(f"{kind}{number}" for number in range(len(names), count))
