"""The contracts between families: environments, policies, algorithms, rewards, tools and generators.

A member of a family is a small NamedTuple of pure functions, made by a constructor that binds its settings. What one
family needs of another (a judge needs `Generate`, an agent needs tools) is passed in as one of these.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import struct
from jax import Array
from jaxtyping import Float, Int

from flowgrpo.types import (
    AnyArray,
    BadInput,
    Batch,
    Metrics,
    Params,
    Status,
    Task,
    Trajectories,
    check_range,
    checked,
)


class Observation(NamedTuple):
    """What an environment shows the policy: `length` tokens in a fixed number of slots l, then padding."""

    tokens: Array  # l
    length: Array


class Step(NamedTuple):
    """Result of one turn of an environment, without the next state.

        observation     the next Observation; of length 0 if the episode is done
        reward          float32, of this turn; 0 before the end, unless the Env has by_turn
        done            bool: the episode has ended, in this turn or before
        correct         bool: the episode is done and the task is solved; equal to the state's
        tool            int32: index of the tool that was called; -1 if none was
        error           bool: the action was malformed, or its tool call was refused

    All are arrays of one example.
    """

    observation: Observation
    reward: Array
    done: Array
    correct: Array
    tool: Array
    error: Array


@checked
class Sizes(NamedTuple):
    """Static upper bounds on the sizes of an episode.

    prompt          tokens of the first observation
    observation     tokens of any later observation
    action          tokens of an action, including its <end>
    turns           turns of an episode; one that is not done then ends at the turn limit
    """

    prompt: int
    observation: int
    action: int
    turns: int

    def check(self) -> None:
        """Raise `BadInput` for a size below 1."""
        for name, size in zip(self._fields, self, strict=True):
            check_range("Sizes", name, size, 1, whole=True)


class Env(NamedTuple):
    """A pure environment: states and tasks are pytrees, functions are for one example, and done states are absorbing.

        name            for messages and figures
        vocabulary      the word of each token; token 0 is padding and can't be chosen, token 1 ends an action
        tools           names of the tools; a Step has the index of the one that was called
        sizes           a Sizes: slots of observations and actions, and turns
        make_task       (key, split) -> task, unlimited; splits are "train", "validation" and "test"
        reset           (key, task) -> (state, Observation); a state has the fields done and correct
        step            (state, tokens, length) -> (state, Step); wrap it in envs.env.absorbing
        oracle          state -> (tokens, length): the best action, which proves that tasks can be solved
        demonstrate     (key, state) -> (tokens, length): the imperfect demonstrator that a warm start imitates
        anchor          state -> an int32 that is equal for equal states; needed by gigpo only
        by_turn         rewards are given turn by turn, not only as an outcome
        answer          task -> (tokens, length): the one action that solves it, for reports; None if there are several
        hindsight       task -> hint tokens that a teacher reads before the prompt, of fixed length; for sdpo only

    No combination of a task's parts occurs in two splits.
    """

    name: str
    vocabulary: tuple[str, ...]
    tools: tuple[str, ...]
    sizes: Sizes
    make_task: Callable[..., Any]
    reset: Callable[..., tuple]
    step: Callable[..., tuple]
    oracle: Callable[..., tuple]
    demonstrate: Callable[..., tuple]
    anchor: Callable[..., Array] = lambda _: jnp.int32(0)
    by_turn: bool = False
    answer: Callable[..., tuple] | None = None
    hindsight: Callable[..., Array] | None = None


class Cache(struct.PyTreeNode):
    """Keys and values of the tokens so far, c slots per row; the slots from `next` on are free (n is the layer).

    Keys and values are one array, or one per layer, or one per block of a layer; keys may be [r k e c]
    (`models.kv_cache`). In a call for some rows only, `rows` are their indices, and `next` is theirs; writes to an
    index out of range are dropped.
    """

    keys: Float[Array, "n r k c e"] | tuple[Array | tuple[Array, ...], ...]
    values: Float[Array, "n r k c e"] | tuple[Array | tuple[Array, ...], ...]
    positions: Int[Array, "r c"]
    segments: Int[Array, "r c"]
    next: Int[Array, "r"]
    rows: Int[Array, "r"] | None = None  # rows of the cache that a call is for; None: all, in order


class ShardedPolicy(NamedTuple):
    """Functions of a policy whose parameters are sharded over the devices of a mesh."""

    unsharded: Any  # the same Policy for one device
    over_rows: Callable[..., Any]  # (function, params, rows): `function(unembed, params, rows)` on the rows' devices
    in_dtype: Callable[[Any], Any]  # dtype -> Policy that casts its parameters while they are sharded


class Policy(NamedTuple):
    """A language model as pure functions of its parameters, and the mesh over which its users shard rows."""

    init: Callable[..., Params]  # key -> params
    hidden: Callable[..., tuple]  # (params, tokens, positions, segments, cache) -> (hidden, cache)
    unembed: Callable[..., Array]  # (params, hidden) -> logits
    make_cache: Callable[..., Cache] | None = None  # (rows, slots) -> an empty cache
    unstack_layers: Callable[[Params], Params] | None = None  # a layout of the parameters for many small steps
    hidden_tree: Callable[..., Array] | None = None  # (params, tokens, positions, ends) of a `PrefixTree` -> hidden
    sharded: ShardedPolicy | None = None  # if a mesh shards parameters (`parallel.sharding.shard_policy`)
    mesh: Any = None  # a DeviceMesh of `parallel.row_sharding`; None: one device

    def apply(self, params, tokens, positions=None, segments=None, cache=None) -> tuple:
        """`(logits, cache)`: `unembed` after `hidden`."""
        hidden, cache = self.hidden(params, tokens, positions, segments, cache)
        return self.unembed(params, hidden), cache


class Scores(NamedTuple):
    """Per-token scores of a batch under the trained policy."""

    logp: AnyArray  # r s
    entropy: AnyArray | None = None  # r s, if there is an entropy bonus
    value: AnyArray | None = None  # r s, if there is a critic


class Algorithm(NamedTuple):
    """One member of the family: advantages, ratio and clip, aggregation and KL, bound together.

    `loss` returns a weighted sum over tokens, so micro-batches add up; so do its metrics, which are
    weighted by `weight` too (divide each by the metric `weight` for a mean). `sequence_sums`, unless
    None, is a first pass over a whole mini-batch with the current log-probabilities, needed before
    each step whose mini-batch is split into micro-batches: `loss` uses the sums that a batch carries, and
    computes them itself if it carries none.
    """

    name: str
    advantages: Callable[[Trajectories], Array]  # -> adv_nt or adv_ntl
    weights: Callable[[Trajectories], Array]  # -> w_ntl
    loss: Callable[[Scores, Batch], tuple[Array, Metrics]]
    sequence_sums: Callable[[Batch, Array], Batch] | None = None  # (batch, logp_rs) -> batch with its sequence sums
    targets: Callable[[Trajectories], Array] | None = None  # -> target_ntl, if there is a critic
    laws: frozenset[str] = frozenset()  # of F1, F2, F4 and F8, those that it promises
    needs: frozenset[str] = frozenset()  # of logp_old, logp_ref, value, entropy: what must be scored for its loss
    needs_for_advantages: frozenset[str] = frozenset()  # of these, what its advantages read
    minibatch_unit: str = "trajectory"  # must not be split over mini-batches; "group" if the loss is of pairs
    skips_zero_advantage: bool = False  # a zero advantage gives an exactly zero gradient: rows can be skipped (F8)
    reference_every: int | None = None  # number of updates after which the reference becomes the current policy
    hindsight: bool = False  # the reference reads Trajectories.hint before the first turn


@checked
class RewardResult(NamedTuple):
    """Result of a reward: a finite value, or None with the reason why there is none. Invalid is never 0."""

    value: float | None
    reason: str = ""
    parts: Mapping[str, float] = {}

    def check(self) -> None:
        """Raise `BadInput` unless the value is None or a finite number."""
        if self.value is not None and not (isinstance(self.value, Real) and math.isfinite(self.value)):
            raise BadInput(f"RewardResult: the value is {self.value!r}; give a finite number, or None and the reason")


class Reward(NamedTuple):
    """Judges the output of a system on a task. `score_many`, if given, judges several at once (batching, pooling)."""

    score: Callable[[Task, str], RewardResult]
    score_many: Callable[[Sequence[Task], Sequence[str]], list[RewardResult]] | None = None

    def score_all(self, tasks: Sequence[Task], outputs: Sequence[str]) -> list[RewardResult]:
        """One `RewardResult` for each task and output; raise `BadInput` if a reward returns anything else."""
        if self.score_many is not None:
            results = self.score_many(tasks, outputs)
        else:
            results = [self.score(task, output) for task, output in zip(tasks, outputs, strict=True)]
        for result in results:
            if not isinstance(result, RewardResult):
                raise BadInput(
                    f"a reward returned {result!r:.200}, which is no fg.RewardResult: return fg.RewardResult(value)"
                )
        return results


class Tool(NamedTuple):
    """A function that an agent may call, with its JSON Schema."""

    name: str
    schema: Mapping[str, Any]  # {"name", "description", "parameters": JSON Schema of an object}
    call: Callable[[Mapping[str, Any]], str]  # its exception is the observation of a caller's mistake
    pure: bool = False  # equal arguments give equal observations, so results may be cached
    timeout: float | None = None  # seconds; None: that of the toolset


class Call(NamedTuple):
    """A host environment's call of a tool, or of a frozen role: every effect outside its state."""

    kind: str  # "tool" or "role"
    name: str
    arguments: Mapping[str, Any]  # JSON
    seed: tuple[int, ...] = ()  # of randomness in the result


class Result(NamedTuple):
    """Result of a `Call`."""

    text: str
    error: bool = False  # the caller's mistake (unknown, malformed, refused, raised, too slow); `text` says which
    failure: str = ""  # the infrastructure's: why there is no result; the trajectory is then invalid (F5)


ToolRunner = Callable[[Call], Result]


class HostObservation(NamedTuple):
    """What a host environment shows the policy before an action.

        tokens          ids, at least one
        extends_context whether they follow all earlier tokens; else they are a new, whole context
        chosen          in a new context, which tokens the policy sampled in earlier turns; None: none
        max_tokens      maximum length of the action; None: that of the environment
        stop            strings that end the action, besides the environment's stop tokens

    If the first observation has extends_context=False, all have.
    """

    tokens: Sequence[int]
    extends_context: bool = True
    chosen: Sequence[bool] | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()


class HostStep(NamedTuple):
    """Result of one action in a host environment, without the next state.

        observation     a HostObservation; None if done
        done            whether the episode has ended
        reward          of this action; None if there is an outcome only
        correct         whether the task is solved, if the environment itself judges
        tool            name of the tool that was called, one of the environment's; "" if none was
        error           whether the action was malformed, or its call gave an error
        output          final output of the system, for a reward to judge
        status          how the episode ended, if done
        reason          the status explained, for people
        is_judged       in the last step, that the rewards stand: no reward function judges the output

    Most steps need the first two only.
    """

    observation: HostObservation | None
    done: bool
    reward: float | None = None
    correct: bool = False
    tool: str = ""
    error: bool = False
    output: str | None = None
    status: Status = Status.FINISHED
    reason: str = ""
    is_judged: bool = False


class HostEnv(NamedTuple):
    """An environment of Python values: states are immutable, and all effects go through `call_tool`, which may block.

        name            for messages and figures
        tools           names of the tools that its steps call
        max_turns       number of actions after which the rollout ends a trajectory
        max_tokens      maximum length of an action, including its stop token
        stop_ids        tokens that end an action
        reset           (key, task, call_tool) -> (state, HostObservation)
        step            (state, tokens, call_tool) -> (state, HostStep)
        anchor          state -> an integer that is equal for equal states; needed by gigpo only

    Each action is a turn of the trajectory.
    """

    name: str
    tools: tuple[str, ...]
    max_turns: int
    max_tokens: int
    stop_ids: tuple[int, ...]
    reset: Callable[..., tuple[Any, HostObservation]]
    step: Callable[..., tuple[Any, HostStep]]
    anchor: Callable[[Any], int] = lambda _: 0


class Completion(NamedTuple):
    """Answer of a generator to a `Request`: the sampled tokens, with what training needs of each.

    `finish_reason` is stop, length, budget, timeout or cancelled; the last three keep what was sampled so far.
    """

    tokens: Sequence[int]
    logp_sampled: Sequence[float]
    version: Sequence[int]  # of the weights that sampled each token
    finish_reason: str
    reused: int = 0  # number of prompt tokens that were in the cache


@dataclass(eq=False)
class Conversation:
    """Identity of consecutive requests, each a continuation of the previous one, one at a time.

    An engine keeps the slot of a conversation for its next request, until it is over.
    """

    over: bool = False
    computed_by: object = None  # the params that an engine last computed it with


class Request(NamedTuple):
    """Request to a generator to continue these tokens under this key.

    `chosen` marks tokens that a generator sampled in earlier turns, so that a lost cache is recomputed in the same way,
    to the same bits (E3). The completion ends with the first token of `stop_ids`, or when one of the strings of `stop`
    is complete in the text of the sampled tokens.

    With a `budget` the completion may end before that, as "budget". The same request with that completion as `partial`
    resumes it: the result holds both parts, and equals that of one request (E3), unless weights were updated between.
    """

    tokens: Sequence[int]
    key: Any
    max_tokens: int  # of the completion, including `partial`
    temperature: float = 1.0
    top_k: int = 64
    top_p: float = 1.0
    min_p: float = 0.0
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    chosen: Sequence[bool] | None = None  # None: no token was sampled
    deadline: float | None = None  # seconds from submission
    partial: Completion | None = None  # to resume
    budget: int | None = None  # maximum number of tokens to sample now; None: up to max_tokens
    conversation: Conversation | None = None  # whose next request continues this one; None: there is none


class EngineClosed(BadInput):
    """A request was made after the engine was closed; no later request can succeed."""


class RequestFailed(RuntimeError):
    """A generator failed to answer a request, through no fault of the request: the trajectory is invalid (F5)."""


Generate = Callable[[Sequence[Request]], Sequence[Completion]]
