"""Compiled rollouts of pure environments.

    reset -> prefill the observation -> decode an action -> step the environment -> prefill ...   until all are done

`make_rollout` is the entry point; everything is pure, to be jitted by the caller. The cache is extended from turn to
turn, so nothing is computed twice, and the loop ends with the last trajectory. A trajectory depends on its own key
alone (E3): the environment's randomness comes from `fold_in(key, 0)`, that of turn t from `fold_in(key, 1 + t)`, one
uniform number per token.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array
from jaxtyping import Bool, Int

from flowgrpo import masked
from flowgrpo.batching.layouts import resolve_lengths
from flowgrpo.contracts import Env, Metrics, Observation, Policy
from flowgrpo.envs.env import END, PAD
from flowgrpo.generate.sampler import DecodeState, SampledTokens, Sampling, decode, feed, make_sampling
from flowgrpo.parallel.row_sharding import DeviceMesh, shard_map_rows
from flowgrpo.types import BadInput, Params, PyTree, Status, Trajectories, check_range


class TurnRecord(struct.PyTreeNode):
    """One turn of all trajectories; the fields become those of `Trajectories`."""

    tokens: Int[Array, "n l"]
    chosen: Bool[Array, "n l"]
    logp_sampled: Array  # n l
    length: Int[Array, "n"]
    turns: Bool[Array, "n"]  # the turn exists
    reward: Array  # n
    anchor: Int[Array, "n"]
    tool: Int[Array, "n"]
    error: Bool[Array, "n"]


class RolloutState(struct.PyTreeNode):
    """State of all trajectories between two turns."""

    rows: DecodeState
    states: PyTree  # of the environment, n of them
    observation: Observation  # n l, n
    done: Bool[Array, "n"]
    correct: Bool[Array, "n"]


def make_rollout(
    env: Env, policy: Policy, *, temperature: float = 1.0, min_decode_batch: int | None = None, hints: bool = False
) -> Callable:
    """`rollout(params, tasks, keys_n, group_n, version=0) -> Trajectories`, to be jitted by the caller.

    Tasks and keys have one entry per trajectory. Over the policy's mesh each device rolls out its rows.

    Args:
        env: the environment.
        policy: the policy, with a cache.
        temperature: of sampling.
        min_decode_batch: halve the decode batch whenever half of a turn's actions have ended, down to this size
            (`sampler.decode`): it pays if a few long actions are waited for, and takes one compilation per size. None:
            always decode all rows.
        hints: add `Trajectories.hint`, the hindsight of each trajectory's task.
    """
    if policy.make_cache is None:
        raise BadInput("the policy has no make_cache, and a rollout needs one")
    check_range("make_rollout", "temperature", temperature, 0.0, exclusive=True)
    check_range("make_rollout", "min_decode_batch", min_decode_batch, 1, whole=True, optional=True)
    if hints and env.hindsight is None:
        raise BadInput(f"hints come from Env.hindsight, and {env.name} has none: give it Env.hindsight")
    mesh, policy = policy.mesh, policy if policy.sharded is None else policy.sharded.unsharded
    policy_unembed, count = policy.unembed, len(env.vocabulary)

    def unembed(params: Params, hidden: Array) -> Array:
        logits = policy_unembed(params, hidden)
        if logits.shape[-1] != count:  # known only while tracing
            raise BadInput(
                f"the policy chooses among {logits.shape[-1]} tokens, but {env.name} has {count} words: "
                f"give it a vocabulary of {count}"
            )
        return logits

    policy = policy._replace(unembed=unembed)
    return _Rollout(env, policy, mesh, temperature, min_decode_batch, env.hindsight if hints else None)


def repeat(tasks: PyTree, samples: int) -> tuple[PyTree, Array]:
    """Each task `samples` times, and the group of every trajectory: (tasks, group_n)."""
    count = len(jax.tree.leaves(tasks)[0])
    group_n = jnp.repeat(jnp.arange(count), samples)
    return jax.tree.map(lambda x: x[group_n], tasks), group_n


# The loop over turns ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Rollout:
    """The function that `make_rollout` returns, with all that it is bound to."""

    env: Env
    policy: Policy  # of one device
    mesh: DeviceMesh
    temperature: float
    min_decode_batch: int | None
    hindsight: Callable | None

    def __call__(self, params: Params, tasks: PyTree, keys: Array, group_n: Array, version=0) -> Trajectories:
        rows = (tasks, keys)
        # Parameters are gathered once, and not in every step.
        record, (done_n, correct_n) = (
            self.run(params, rows) if self.mesh is None else shard_map_rows(self.run, self.mesh, params, rows)
        )
        trajectories = _to_trajectories(self.env, record, done_n, correct_n, group_n, version)
        return trajectories if self.hindsight is None else trajectories.replace(hint=jax.vmap(self.hindsight)(tasks))

    def run(self, params: Params, rows: tuple[PyTree, Array]) -> tuple[TurnRecord, tuple[Array, Array]]:
        """All turns of these (tasks, keys) -> (record of the turns [n t ...], (done_n, correct_n))."""
        if self.policy.unstack_layers is not None:
            params = self.policy.unstack_layers(params)  # here, and not in each turn
        tasks, keys = rows
        count, sizes = len(keys), self.env.sizes
        fold = jax.vmap(jax.random.fold_in, in_axes=(0, None))
        states, prompt = jax.vmap(self.env.reset)(fold(keys, 0), tasks)
        slots = sizes.prompt + sizes.turns * (sizes.action + sizes.observation)
        assert self.policy.make_cache is not None
        zeros = jnp.zeros(count, jnp.int32)
        decode_state = DecodeState(
            self.policy.make_cache(count, slots), zeros, keys, zeros, zeros, jnp.zeros(count, bool)
        )
        width = max(sizes.prompt, sizes.observation)
        state = RolloutState(decode_state, states, _pad(prompt, width), jnp.zeros(count, bool), jnp.zeros(count, bool))
        state, first = self.prefill(params, state, fold(keys, 1), prompt.tokens, _is_real(prompt))
        shapes = jax.eval_shape(self.decode, params, state, first)[1]
        record = jax.tree.map(lambda x: jnp.zeros((sizes.turns, *x.shape), x.dtype), shapes)

        def has_next(index: Array, state: RolloutState) -> Array:
            return (index < sizes.turns) & ~state.done.all()

        def prefill_observation(index: Array, state: RolloutState) -> tuple[RolloutState, SampledTokens]:
            turn_keys = fold(keys, 1 + index)
            # The action's last token was sampled but is not in the cache yet: it comes before the observation.
            observation = state.observation._replace(tokens=state.observation.tokens[:, : sizes.observation])
            tokens_ns = jnp.concatenate([state.rows.token[:, None], observation.tokens], axis=1)
            is_real_ns = jnp.pad(_is_real(observation), ((0, 0), (1, 0)), constant_values=True)
            return self.prefill(params, state, turn_keys, tokens_ns, is_real_ns)

        def turn(carry):
            index, state, first, record = carry
            state, turn_record = self.decode(params, state, first)
            record, index = jax.tree.map(lambda all_x, x: all_x.at[index].set(x), record, turn_record), index + 1
            state, first = jax.lax.cond(
                has_next(index, state),
                lambda state, _: prefill_observation(index, state),
                lambda state, first: (state, first),
                state,
                first,
            )
            return index, state, first, record

        start = (jnp.int32(0), state, first, record)
        _, state, _, record = jax.lax.while_loop(lambda carry: has_next(*carry[:2]), turn, start)
        return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), record), (state.done, state.correct)

    def prefill(
        self, params: Params, state: RolloutState, keys: Array, tokens_ns: Array, is_real_ns: Array
    ) -> tuple[RolloutState, SampledTokens]:
        """Feed tokens to every trajectory that is not done, and sample the first token of its next action."""
        count = len(state.done)
        rows = state.rows.replace(
            key=keys,
            count=jnp.zeros(count, jnp.int32),
            budget=jnp.full(count, self.env.sizes.action),
            active=~state.done,
        )
        sampling, stop_ids = self.sampling(count)
        rows, first = feed(self.policy, params, rows, tokens_ns, is_real_ns, sampling, stop_ids, banned=(PAD,))
        return state.replace(rows=rows), first

    def decode(self, params: Params, state: RolloutState, first: SampledTokens) -> tuple[RolloutState, TurnRecord]:
        """Sample the rest of each action, step the environment, and record the turn."""
        env, sampling = self.env, self.sampling(len(state.done))
        rows, later = decode(
            self.policy,
            params,
            state.rows,
            *sampling,
            steps=env.sizes.action - 1,
            min_decode_batch=self.min_decode_batch,
            banned=(PAD,),
        )
        sampled = jax.tree.map(lambda x, xs: jnp.concatenate([x[None], xs]).swapaxes(0, 1), first, later)
        action_na = jnp.where(sampled.live, sampled.token, PAD)
        states, step = jax.vmap(env.step)(state.states, action_na, sampled.live.sum(axis=1, dtype=jnp.int32))
        observation = _pad(step.observation, state.observation.tokens.shape[1])
        next_state = RolloutState(rows, states, observation, step.done, step.correct)

        # The record has the observation before the action at the start of its slots, and the action right after it.
        is_live_n = ~state.done
        context_n = jnp.where(is_live_n, state.observation.length, 0)
        chosen_n = sampled.live.sum(axis=1, dtype=jnp.int32)
        slots = max(env.sizes.prompt, env.sizes.observation) + env.sizes.action
        index_nl = jnp.arange(slots)[None, :] - context_n[:, None]  # within the action
        is_chosen_nl = (index_nl >= 0) & (index_nl < chosen_n[:, None])
        at_nl = jnp.clip(index_nl, 0, sampled.token.shape[1] - 1)
        action_nl, logp_nl = (jnp.take_along_axis(x, at_nl, axis=1) for x in (sampled.token, sampled.logp_sampled))
        context = state.observation.tokens
        context_nl = jnp.pad(context, ((0, 0), (0, slots - context.shape[1])))
        return next_state, TurnRecord(
            tokens=jnp.where(is_chosen_nl, action_nl, jnp.where(index_nl < 0, context_nl, PAD)),
            chosen=is_chosen_nl,
            logp_sampled=jnp.where(is_chosen_nl, logp_nl, 0.0),
            length=context_n + chosen_n,
            turns=is_live_n,
            reward=step.reward,
            anchor=jax.vmap(env.anchor)(state.states),
            tool=step.tool,
            error=step.error,
        )

    def sampling(self, count: int) -> tuple[Sampling, Array]:
        """Sampling settings and stop tokens of `count` rows."""
        return make_sampling(count, temperature=self.temperature), jnp.full((count, 1), END)


def _is_real(observation: Observation) -> Array:
    return jnp.arange(observation.tokens.shape[1])[None, :] < observation.length[:, None]


def _pad(observation: Observation, width: int) -> Observation:
    """Pad the tokens to `width` slots."""
    return observation._replace(tokens=jnp.pad(observation.tokens, ((0, 0), (0, width - observation.tokens.shape[1]))))


def _to_trajectories(
    env: Env, record: TurnRecord, done_n: Array, correct_n: Array, group_n: Array, version
) -> Trajectories:
    """The turns [n t ...] as `Trajectories`: the outcome is the sum of the rewards of the turns that exist."""
    outcome_n = jnp.where(record.turns, record.reward, 0.0).sum(axis=1)
    reward_nt = record.reward if env.by_turn else jnp.broadcast_to(outcome_n[:, None], record.reward.shape)
    return Trajectories(
        tokens=record.tokens,
        chosen=record.chosen,
        logp_sampled=record.logp_sampled,
        turns=record.turns,
        anchor=record.anchor,
        length=record.length,
        version=jnp.full(record.tokens.shape, version, jnp.int32),
        reward=jnp.where(record.turns, reward_nt, 0.0),
        outcome=outcome_n,
        correct=correct_n,
        status=jnp.where(done_n, int(Status.FINISHED), int(Status.TURN_LIMIT)),
        group=group_n,
        by_turn=jnp.full(len(group_n), env.by_turn),
        tool=jnp.where(record.turns, record.tool, -1),
        error=record.error & record.turns,
    )


# Metrics ----------------------------------------------------------------------------------------------


def shuffled_rewards(trajectories: Trajectories, key: Array, *, samples: int) -> Trajectories:
    """A control: outcomes permuted within each group, so that they are independent of the actions."""
    order_gs = jax.vmap(lambda key: jax.random.permutation(key, samples))(
        jax.random.split(key, len(trajectories.group) // samples)
    )
    order_n = (order_gs + jnp.arange(len(order_gs))[:, None] * samples).ravel()
    return trajectories.replace(outcome=trajectories.outcome[order_n], correct=trajectories.correct[order_n])


def trajectory_metrics(trajectories: Trajectories, *, samples: int) -> Metrics:
    """Metrics of the valid trajectories of a batch, except `tokens` and `chosen_tokens`, which are of all."""
    valid_n = trajectories.valid
    turns_nt = jnp.asarray(trajectories.turns) & valid_n[:, None]
    count = jnp.maximum(turns_nt.sum(), 1)
    correct_gs, valid_gs = (jnp.asarray(x).reshape(-1, samples) for x in (trajectories.correct, valid_n))
    is_mixed_g = (correct_gs & valid_gs).any(axis=1) & (~correct_gs & valid_gs).any(axis=1)
    return {
        "success": masked.mean(correct_gs.astype(jnp.float32), valid_gs),
        "outcome": masked.mean(jnp.asarray(trajectories.outcome), valid_n),
        "invalid": (~valid_n).sum(),
        "turns": masked.mean(turns_nt.sum(axis=1).astype(jnp.float32), valid_n),
        "tool_errors": (jnp.asarray(trajectories.error) & turns_nt).sum() / count,
        "mixed_groups": is_mixed_g.mean(),
        "tokens": jnp.where(jnp.asarray(trajectories.turns), resolve_lengths(trajectories)[0], 0).sum(),
        "chosen_tokens": trajectories.action_mask.sum(),
        "chosen_per_trajectory": masked.mean(trajectories.action_mask.sum(axis=(1, 2)).astype(jnp.float32), valid_n),
    }


def tool_counts(trajectories: Trajectories, tools: int) -> Array:
    """Number of calls of each of `tools` tools."""
    return (jnp.asarray(trajectories.tool)[:, :, None] == jnp.arange(tools)[None, None, :]).sum(axis=(0, 1))
