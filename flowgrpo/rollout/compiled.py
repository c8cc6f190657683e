"""Rollouts of pure environments, compiled: tasks and keys flow in, trajectories flow out.

    observe -> feed the cache -> sample an action -> step the environment,  until every trajectory is done

The cache is appended to from turn to turn, so nothing is computed twice, and the loop ends with the last
trajectory. What a trajectory gets depends on its own key alone (E3): the environment's randomness comes
from `fold_in(key, 0)`, that of turn t from `fold_in(key, 1 + t)`, one uniform number a token.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array
from jaxtyping import Bool, Int

from flowgrpo.contracts import Env, Observation, Policy, Step
from flowgrpo.envs.env import END, PAD
from flowgrpo.generate.sampler import Rows, Sampled, decode, feed, sampling
from flowgrpo.spread import Spread, lay, map_rows
from flowgrpo.types import AnyArray, BadInput, Status, Trajectories, check_range


class Rollout(struct.PyTreeNode):
    """Trajectories, and what their environment said of each turn."""

    trajectories: Trajectories
    tool: Int[AnyArray, "n t"]  # that was called; -1 where none was
    error: Bool[AnyArray, "n t"]  # a malformed action or a refused call


class Turn(struct.PyTreeNode):
    """Record of a turn, for all trajectories; `exists` says for which it counts."""

    tokens: Int[Array, "n l"]
    chosen: Bool[Array, "n l"]
    logp: Array  # n l
    length: Int[Array, "n"]
    exists: Bool[Array, "n"]
    reward: Array  # n
    anchor: Int[Array, "n"]
    tool: Int[Array, "n"]
    error: Bool[Array, "n"]


class Going(struct.PyTreeNode):
    """State of the trajectories between two turns."""

    rows: Rows
    states: object  # of the environment, n of them
    said: Observation  # n l, n
    done: Bool[Array, "n"]
    correct: Bool[Array, "n"]


def make_rollout(
    env: Env, policy: Policy, *, temperature: float = 1.0, block: int | None = None, mesh: Spread = None
) -> Callable:
    """`rollout(params, tasks, keys_n, group_n, version=0) -> Rollout`, to be jitted by the caller.

    Tasks and keys have one entry a trajectory. With `block`, so many trajectories run at a time, one block after the
    other, which keeps their caches in the processor's. Over a `mesh` each device rolls out its share.
    """
    if policy.make_cache is None:
        raise BadInput("the policy has no make_cache, and a rollout needs one")
    check_range("make_rollout", "temperature", temperature, 0.0, exclusive=True)
    policy = policy._replace(unembed=partial(_unembed, env, policy.unembed))
    return partial(_rollout, env, policy, temperature=temperature, block=block, mesh=mesh)


def _unembed(env: Env, unembed: Callable, params, hidden: Array) -> Array:
    """The policy's logits, one for each word; their number is known while tracing."""
    logits = unembed(params, hidden)
    if logits.shape[-1] != len(env.words):
        raise BadInput(
            f"the policy chooses among {logits.shape[-1]} tokens, but {env.name} has {len(env.words)} words: "
            f"give it a vocabulary of {len(env.words)}"
        )
    return logits


def repeat(tasks, samples: int):
    """Each task `samples` times, and the group of every trajectory: a batch of groups -> (tasks, group_n)."""
    count = len(jax.tree.leaves(tasks)[0])
    group_n = jnp.repeat(jnp.arange(count), samples)
    return jax.tree.map(lambda x: x[group_n], tasks), group_n


def _rollout(env, policy, params, tasks, keys, group_n, version=0, *, temperature, block, mesh) -> Rollout:
    run = partial(_run, env, policy, temperature=temperature, mesh=mesh)
    turns, ended = map_rows(run if block is None else partial(_blocks, run, block), mesh, params, (tasks, keys))
    return _collect(env, turns, ended, group_n, version)


def _blocks(run: Callable, block: int, params, given: tuple) -> tuple[Turn, tuple[Array, Array]]:
    """One block of trajectories after the other."""
    count = len(given[1])
    if block >= count:
        return run(params, given)
    if count % block:
        raise BadInput(f"{count} trajectories are no whole number of blocks of {block}")
    split = jax.tree.map(lambda x: x.reshape(-1, block, *x.shape[1:]), given)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), jax.lax.map(partial(run, params), split))


def _collect(env: Env, turns: Turn, ended: tuple[Array, Array], group_n, version) -> Rollout:
    done_n, correct_n = ended
    paid_n = jnp.where(turns.exists, turns.reward, 0.0).sum(axis=1)
    shown_nt = turns.reward if env.by_turn else jnp.broadcast_to(paid_n[:, None], turns.reward.shape)
    trajectories = Trajectories(
        tokens=turns.tokens,
        chosen=turns.chosen,
        logp_sampled=turns.logp,
        version=jnp.full(turns.tokens.shape, version, jnp.int32),
        turns=turns.exists,
        reward=jnp.where(turns.exists, shown_nt, 0.0),
        anchor=turns.anchor,
        outcome=paid_n,
        correct=correct_n,
        status=jnp.where(done_n, int(Status.FINISHED), int(Status.TURN_LIMIT)),
        group=group_n,
        length=turns.length,
        by_turn=jnp.full(len(group_n), env.by_turn),
    )
    return Rollout(trajectories, jnp.where(turns.exists, turns.tool, -1), turns.error & turns.exists)


# One block --------------------------------------------------------------------------------------------


def _run(env: Env, policy: Policy, params, given: tuple, *, temperature, mesh) -> tuple[Turn, tuple[Array, Array]]:
    """All turns of the given (tasks, keys) -> (their record [n t ...], (done_n, correct_n))."""
    tasks, keys = lay(given, mesh)
    count, sizes = len(keys), env.sizes
    fold = jax.vmap(jax.random.fold_in, in_axes=(0, None))
    states, said = jax.vmap(env.reset)(fold(keys, 0), tasks)
    slots = sizes.prompt + sizes.turns * (sizes.action + sizes.observation)
    assert policy.make_cache is not None
    nothing = jnp.zeros(count, jnp.int32)
    rows = Rows(policy.make_cache(count, slots), nothing, keys, nothing, nothing, jnp.zeros(count, bool))
    going = Going(rows, states, said, jnp.zeros(count, bool), jnp.zeros(count, bool))
    turn = partial(_turn, env, policy, params, settings=sampling(count, temperature=temperature))
    going, first = turn(going, fold(keys, 1), going.said.tokens, _real(going.said))
    record = jax.tree.map(lambda x: jnp.zeros((sizes.turns, *x.shape), x.dtype).at[0].set(x), first)

    def body(carry):
        index, going, record = carry
        going, now = turn(going, fold(keys, 1 + index), *_given(going))
        return index + 1, going, jax.tree.map(lambda all_x, x: all_x.at[index].set(x), record, now)

    def wanted(carry):
        return (carry[0] < sizes.turns) & ~carry[1].done.all()

    _, going, record = jax.lax.while_loop(wanted, body, (jnp.int32(1), going, record))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), record), (going.done, going.correct)


def _turn(env: Env, policy: Policy, params, going: Going, keys, tokens_ns, real_ns, *, settings) -> tuple[Going, Turn]:
    """One turn of every trajectory that is not done, after the given tokens."""
    count, live_n = len(going.done), ~going.done
    rows = going.rows.replace(
        key=keys,
        count=jnp.zeros(count, jnp.int32),
        budget=jnp.full(count, env.sizes.action),
        active=live_n,
    )
    stop_ids = jnp.full((count, 1), END)
    rows, first = feed(policy, params, rows, tokens_ns, real_ns, settings, stop_ids, banned=(PAD,))
    rows, more = decode(policy, params, rows, settings, stop_ids, steps=env.sizes.action - 1, banned=(PAD,))
    sampled = jax.tree.map(lambda x, xs: jnp.concatenate([x[None], xs]).swapaxes(0, 1), first, more)
    action_na = jnp.where(sampled.live, sampled.token, PAD)
    states, now = jax.vmap(env.step)(going.states, action_na, sampled.live.sum(axis=1, dtype=jnp.int32))
    return Going(rows, states, now.observation, now.done, now.correct), _record(env, going, sampled, now)


def _real(said: Observation) -> Array:
    return jnp.arange(said.tokens.shape[1])[None, :] < said.length[:, None]


def _given(going: Going) -> tuple[Array, Array]:
    """Join the tokens to feed between two actions: that sampled last, which the cache lacks, and the observation."""
    tokens_ns = jnp.concatenate([going.rows.token[:, None], going.said.tokens], axis=1)
    return tokens_ns, jnp.pad(_real(going.said), ((0, 0), (1, 0)), constant_values=True)


def _record(env: Env, going: Going, sampled: Sampled, now: Step) -> Turn:
    """The turn's tokens, what was chosen right after what was said; and what the environment made of them."""
    said, live_n = going.said, ~going.done
    heard_n = jnp.where(live_n, said.length, 0)
    spoken_n = sampled.live.sum(axis=1, dtype=jnp.int32)
    slots = max(env.sizes.prompt, env.sizes.observation) + env.sizes.action
    place_nl = jnp.arange(slots)[None, :] - heard_n[:, None]
    chosen_nl = (place_nl >= 0) & (place_nl < spoken_n[:, None])
    at_nl = jnp.clip(place_nl, 0, sampled.token.shape[1] - 1)
    action_nl, logp_nl = (jnp.take_along_axis(x, at_nl, axis=1) for x in (sampled.token, sampled.logp))
    context_nl = jnp.pad(said.tokens, ((0, 0), (0, slots - said.tokens.shape[1])))
    return Turn(
        tokens=jnp.where(chosen_nl, action_nl, jnp.where(place_nl < 0, context_nl, PAD)),
        chosen=chosen_nl,
        logp=jnp.where(chosen_nl, logp_nl, 0.0),
        length=heard_n + spoken_n,
        exists=live_n,
        reward=now.reward,
        anchor=jax.vmap(env.anchor)(going.states),
        tool=now.tool,
        error=now.error,
    )
