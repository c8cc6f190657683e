"""The contracts: what a member of each family is.

A member is a small NamedTuple of pure functions, made by a constructor that binds its settings. What
one family needs of another (a judge needs `Generate`, an agent needs tools) is passed in as one of these.
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

from flowgrpo.types import AnyArray, BadInput, Batch, Status, Task, Trajectories, check_range, checked

Metrics = dict[str, Array]


class Observation(NamedTuple):
    """Tokens that an environment shows the policy: `length` at the start of a fixed number of slots l, then padding."""

    tokens: Array  # l
    length: Array


class Step(NamedTuple):
    """Result of one turn of an environment, without the next state.

        observation     what is said next, an Observation; of length 0 where the episode is over
        reward          float32: paid for this turn; 0 before the end, unless the Env has by_turn
        done            bool: the episode has ended, by this turn or before
        correct         bool: it ended, and the task is solved; the same as the state's
        tool            int32: index of the tool that was called; -1 where none was
        error           bool: the action was malformed, or its call was refused

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
    """How large things can get.

        prompt          tokens of the first observation
        observation     tokens of any later one
        action          tokens of an action, its <end> included
        turns           actions of an episode; one that is not over then has ended at the turn limit

    All are static.
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
    """A pure environment: states and tasks are pytrees, all functions are for one example, and finished states absorb.

        name            for messages and figures
        words           what each token means; token 0 is padding and can't be chosen, token 1 ends an action
        tools           their names; a Step says which of them was called
        sizes           a Sizes: slots of what is said and done, and turns
        make_task       (key, split) -> task, without end; splits are "train", "validation" and "test"
        reset           (key, task) -> (state, Observation); a state has the fields done and correct
        step            (state, tokens, length) -> (state, Step); wrap it in envs.env.absorbing
        oracle          state -> (tokens, length): the best action, which proves that tasks can be solved
        demonstrate     (key, state) -> (tokens, length): what a warm start imitates, of a stated, lesser quality
        anchor          state -> an int32 that is equal where the state is; only gigpo reads it, and needs it
        by_turn         rewards are paid turn by turn, and not only for the outcome
        answer          task -> (tokens, length): the one action that ends it rightly, for reports; None where many do
        hindsight       task -> tokens that a teacher is told before the prompt, always as many; only sdpo reads it

    Tasks of one split share no combination with those of the others.
    """

    name: str
    words: tuple[str, ...]
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


Params = dict[str, Array]


class Cache(struct.PyTreeNode):
    """Keys and values of the tokens so far, c slots a row; the slots from `next` on are free (n is the layer).

    Or an array for each layer, or for each of its blocks; the keys of one may be [r k e c] (`models.kv_cache`).
    """

    keys: Float[Array, "n r k c e"] | tuple[Array | tuple[Array, ...], ...]
    values: Float[Array, "n r k c e"] | tuple[Array | tuple[Array, ...], ...]
    positions: Int[Array, "r c"]
    segments: Int[Array, "r c"]
    next: Int[Array, "r"]


class Settled(NamedTuple):
    """Functions of a policy whose parameters are divided over the devices of a mesh."""

    alone: Any  # the policy of one device
    over_rows: Callable[..., Any]  # (function, params, rows): `function(unembed, params, rows)` where the rows lie
    in_dtype: Callable[[Any], Any]  # dtype -> the policy, casting parameters where they lie divided


class Policy(NamedTuple):
    """A language model as pure functions of its parameters, and the mesh over which what is made of it deals rows."""

    init: Callable[..., Any]  # key -> params
    hidden: Callable[..., tuple]  # (params, tokens, positions, segments, cache) -> (hidden, cache)
    unembed: Callable[..., Array]  # (params, hidden) -> logits
    make_cache: Callable[..., Cache] | None = None  # (rows, slots) -> an empty cache
    unstack_layers: Callable[[Any], Any] | None = None  # params -> the same, laid out for many small steps
    hidden_tree: Callable[..., Array] | None = None  # (params, tokens, positions, ends) of a `PrefixTree` -> hidden
    settled: Settled | None = None  # where a mesh divides parameters (`parallel.sharding.settle`)
    mesh: Any = None  # a DeviceMesh of `parallel.row_sharding`; None: everything runs where it is

    def apply(self, params, tokens, positions=None, segments=None, cache=None) -> tuple:
        """`(logits, cache)`: `unembed` after `hidden`."""
        hidden, cache = self.hidden(params, tokens, positions, segments, cache)
        return self.unembed(params, hidden), cache


class Scores(NamedTuple):
    """Per-token scores of a batch under the policy that is being trained."""

    logp: AnyArray  # r s
    entropy: AnyArray | None = None  # r s, where an entropy bonus is paid
    value: AnyArray | None = None  # r s, where there is a critic


class Algorithm(NamedTuple):
    """One member of the family: advantages, ratio and clip, aggregation and KL, bound together.

    `loss` returns a weighted sum over tokens, so micro-batches add up; so do its metrics, which are
    weighted by `weight` too (divide each by the metric `weight` for a mean). `sums`, where it is not
    None, is the first pass over a whole mini-batch with the current log-probabilities, needed before
    each step whose mini-batch is split into micro-batches: `loss` uses the sums that a batch carries, and
    takes them itself where it carries none.
    """

    name: str
    advantages: Callable[[Trajectories], Array]  # -> adv_nt or adv_ntl
    weights: Callable[[Trajectories], Array]  # -> w_ntl
    loss: Callable[[Scores, Batch], tuple[Array, Metrics]]
    sums: Callable[[Batch, Array], Batch] | None = None  # (batch, logp_rs) -> batch with its sequence sums
    targets: Callable[[Trajectories], Array] | None = None  # -> target_ntl, where there is a critic
    keeps: frozenset[str] = frozenset()  # of the laws F1, F2, F4 and F8, those that it declares
    needs: frozenset[str] = frozenset()  # of logp_old, logp_ref, value, entropy: what must be scored for it
    before: frozenset[str] = frozenset()  # of these, what its advantages read already
    whole: str = "trajectory"  # what a mini-batch must hold whole: "group" where the loss is of pairs
    skips: bool = False  # a zero advantage gives an exactly zero gradient, so such groups can be left out (F8)
    reference_every: int | None = None  # updates after which the reference becomes the current policy
    hindsight: bool = False  # the reference is told Trajectories.hint before the first turn


@checked
class Scored(NamedTuple):
    """Result of a reward: a finite value, or None and the reason why there is none. Invalid is never 0."""

    value: float | None
    reason: str = ""
    parts: Mapping[str, float] = {}

    def check(self) -> None:
        """Raise `BadInput` for a value that is no finite number."""
        if self.value is not None and not (isinstance(self.value, Real) and math.isfinite(self.value)):
            raise BadInput(f"Scored: the value is {self.value!r}; give a finite number, or None and the reason")


class Reward(NamedTuple):
    """A judge of what a system answered. `score_many`, where there is one, judges several at once in its own way."""

    score: Callable[[Task, str], Scored]
    score_many: Callable[[Sequence[Task], Sequence[str]], list[Scored]] | None = None

    def many(self, tasks: Sequence[Task], outputs: Sequence[str]) -> list[Scored]:
        """One `Scored` for each task and output; raise `BadInput` where a reward gives anything else."""
        if self.score_many is not None:
            found = self.score_many(tasks, outputs)
        else:
            found = [self.score(task, output) for task, output in zip(tasks, outputs, strict=True)]
        for scored in found:
            if not isinstance(scored, Scored):
                raise BadInput(f"a reward gave {scored!r:.200}, which is no fg.Scored: return fg.Scored(value)")
        return found


class Tool(NamedTuple):
    """A function that an agent may call; its schema is derived from signature and docstring."""

    name: str
    schema: Mapping[str, Any]  # {"name", "description", "parameters": JSON Schema of an object}
    call: Callable[[Mapping[str, Any]], str]  # raises for what the caller did wrong; the message is the observation
    pure: bool = False  # equal arguments give equal observations, so that one may be kept and given again
    seconds: float | None = None  # a deadline of its own


class Call(NamedTuple):
    """Call of a host environment to the world outside: to a tool, a frozen role, whatever its state can't answer."""

    kind: str  # "tool" or "role"
    name: str
    arguments: Mapping[str, Any]  # JSON
    seed: tuple[int, ...] = ()  # of what is random in the answer


class Result(NamedTuple):
    """Answer of the world outside to a `Call`."""

    text: str
    error: bool = False  # the caller's doing: unknown, malformed, refused, raised, too slow; an observation like any
    failure: str = ""  # the world's own: why no answer can be had, so that the trajectory does not count (F5)


Do = Callable[[Call], Result]


class Said(NamedTuple):
    """Message of a host environment to the policy.

        tokens          ids, at least one
        appends         they come after all that was said and done before; else they are a context of their own
        chosen          in a context of its own, which of them the policy sampled in earlier turns; None: none of them
        max_tokens      of the action; None: as many as the environment allows
        stop            strings that end the action, beside the environment's stop tokens

    An environment whose first message does not append never does.
    """

    tokens: Sequence[int]
    appends: bool = True
    chosen: Sequence[bool] | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()


class HostStep(NamedTuple):
    """Result of one action in a host environment, without the next state.

        said            a Said; None where it is done
        done            the episode is over
        reward          paid for this action; None where there is an outcome only
        correct         the task is solved, where the environment itself judges
        tool            name of the tool that was called, one of the environment's; "" where none was
        error           the action was malformed, or its call gave an error
        output          what the system answered in the end, for a reward to judge
        status          how it ended, where it is done
        reason          why it ended so, for people

    Most steps give the first two alone.
    """

    said: Said | None
    done: bool
    reward: float | None = None
    correct: bool = False
    tool: str = ""
    error: bool = False
    output: str | None = None
    status: Status = Status.FINISHED
    reason: str = ""


class HostEnv(NamedTuple):
    """An environment of Python values: states are immutable, and all effects go through `do`, which may take its time.

        name            for messages and figures
        tools           names of the tools that its steps call
        turns           actions at most; whoever plays ends the trajectory then
        max_tokens      of an action, its stop token included
        stop_ids        tokens that end an action
        reset           (key, task, do) -> (state, Said)
        step            (state, tokens, do) -> (state, HostStep)
        anchor          state -> an integer that is equal where the state is; only gigpo reads it, and needs it

    Each action is a turn of the trajectory.
    """

    name: str
    tools: tuple[str, ...]
    turns: int
    max_tokens: int
    stop_ids: tuple[int, ...]
    reset: Callable[..., tuple[Any, Said]]
    step: Callable[..., tuple[Any, HostStep]]
    anchor: Callable[[Any], int] = lambda _: 0


class Completion(NamedTuple):
    """Answer of a generator to a `Request`: the tokens that it sampled, with what training needs of each.

    `finish_reason` is stop, length, budget, timeout or cancelled; the last three keep what was sampled so far.
    """

    tokens: Sequence[int]
    logp_sampled: Sequence[float]
    version: Sequence[int]  # of the weights that chose the token
    finish_reason: str
    reused: int = 0  # tokens of the prompt whose cache was found


@dataclass(eq=False)
class Conversation:
    """Requests of which each goes on from the last, one at a time.

    An engine keeps the slot of a conversation for its next request, unless it is over.
    """

    over: bool = False
    computed_by: object = None  # what an engine last computed it with


class Request(NamedTuple):
    """Request to a generator to continue these tokens under this key.

    `chosen` says which of them a generator sampled in earlier turns, so that a cache that was lost is
    computed again in the same way, to the same bits (E3). The completion ends with the first token among `stop_ids`,
    or with that which completes one of the strings of `stop` in the text of the sampled tokens.

    With a `budget` the completion may end before that, as "budget". The same request with that completion as `begun`
    goes on: what then comes back holds both parts, and is what one request would have got (E3), but for weights that
    were swapped meanwhile.
    """

    tokens: Sequence[int]
    key: Any
    max_tokens: int  # of the completion, with what was begun
    temperature: float = 1.0
    top_k: int = 64
    top_p: float = 1.0
    min_p: float = 0.0
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    chosen: Sequence[bool] | None = None  # None: all tokens are given
    deadline: float | None = None  # seconds from submission
    begun: Completion | None = None  # what was sampled before
    budget: int | None = None  # tokens to sample now at most; None: up to max_tokens
    conversation: Conversation | None = None  # whose next request goes on from this one; None: there is none


class EngineClosed(BadInput):
    """A request came after an engine was closed: whoever made it can't go on, whatever else it asks for."""


class RequestFailed(RuntimeError):
    """A generator could not answer a request, for a reason of its own: the trajectory does not count (F5)."""


Generate = Callable[[Sequence[Request]], Sequence[Completion]]
