"""Compiled rollouts of pure environments, and their figures.

    observe -> feed the cache -> sample an action -> step the environment,  until every trajectory is done

The cache is appended to from turn to turn, so nothing is computed twice, and the loop ends with the last
trajectory. What a trajectory gets depends on its own key alone (E3): the environment's randomness comes
from `fold_in(key, 0)`, that of turn t from `fold_in(key, 1 + t)`, one uniform number per token. `make_rollout` is the
entry point; everything is pure, to be jitted by the caller.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array
from jaxtyping import Bool, Int

from flowgrpo import masked
from flowgrpo.batching.layouts import filled
from flowgrpo.contracts import Env, Metrics, Observation, Policy, Step
from flowgrpo.envs.env import END, PAD
from flowgrpo.generate.sampler import Rows, Sampled, Sampling, decode, feed, sampling
from flowgrpo.parallel.row_sharding import DeviceMesh, map_own_rows
from flowgrpo.types import BadInput, Status, Trajectories, check_range


class Spoken(struct.PyTreeNode):
    """A turn of all trajectories, under the names that `Trajectories` has; `turns` says where it is."""

    tokens: Int[Array, "n l"]
    chosen: Bool[Array, "n l"]
    logp_sampled: Array  # n l
    length: Int[Array, "n"]
    turns: Bool[Array, "n"]
    reward: Array  # n
    anchor: Int[Array, "n"]
    tool: Int[Array, "n"]
    error: Bool[Array, "n"]


class RolloutState(struct.PyTreeNode):
    """State of the trajectories between two turns."""

    rows: Rows
    states: object  # of the environment, n of them
    said: Observation  # n l, n
    done: Bool[Array, "n"]
    correct: Bool[Array, "n"]


def make_rollout(
    env: Env, policy: Policy, *, temperature: float = 1.0, narrowest: int | None = None, hints: bool = False
) -> Callable:
    """`rollout(params, tasks, keys_n, group_n, version=0) -> Trajectories`, to be jitted by the caller.

    Tasks and keys have one entry per trajectory. With `narrowest`, the actions of a turn that are left when half have
    ended are decoded in half the width, down to that many (`sampler.decode`): it pays where a few long actions are
    waited for, and takes a compilation per width. With `hints` each trajectory has the hindsight of its task. Over the
    policy's mesh each device rolls out its share.
    """
    if policy.make_cache is None:
        raise BadInput("the policy has no make_cache, and a rollout needs one")
    check_range("make_rollout", "temperature", temperature, 0.0, exclusive=True)
    check_range("make_rollout", "narrowest", narrowest, 1, whole=True, optional=True)
    mesh, policy = policy.mesh, policy if policy.settled is None else policy.settled.alone
    policy = policy._replace(unembed=partial(_unembed, env, policy.unembed))
    if hints and env.hindsight is None:
        raise BadInput(f"hints are told in hindsight, and {env.name} has none: give it Env.hindsight")
    return _Roller(env, policy, mesh, temperature, narrowest, env.hindsight if hints else None)


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


def _collect(env: Env, spoken: Spoken, ended: tuple[Array, Array], group_n, version) -> Trajectories:
    done_n, correct_n = ended
    paid_n = jnp.where(spoken.turns, spoken.reward, 0.0).sum(axis=1)
    shown_nt = spoken.reward if env.by_turn else jnp.broadcast_to(paid_n[:, None], spoken.reward.shape)
    same = {name: getattr(spoken, name) for name in ("tokens", "chosen", "logp_sampled", "turns", "anchor", "length")}
    return Trajectories(
        **same,
        version=jnp.full(spoken.tokens.shape, version, jnp.int32),
        reward=jnp.where(spoken.turns, shown_nt, 0.0),
        outcome=paid_n,
        correct=correct_n,
        status=jnp.where(done_n, int(Status.FINISHED), int(Status.TURN_LIMIT)),
        group=group_n,
        by_turn=jnp.full(len(group_n), env.by_turn),
        tool=jnp.where(spoken.turns, spoken.tool, -1),
        error=spoken.error & spoken.turns,
    )


# Turn by turn -----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Roller:
    """A rollout, with all that it is bound to."""

    env: Env
    policy: Policy  # of one device
    mesh: DeviceMesh
    temperature: float
    narrowest: int | None
    hindsight: Callable | None

    def __call__(self, params, tasks, keys, group_n, version=0) -> Trajectories:
        given = (tasks, keys)
        # Parameters are gathered once, and not in every step.
        spoken, ended = (
            self.run(params, given) if self.mesh is None else map_own_rows(self.run, self.mesh, params, given)
        )
        played = _collect(self.env, spoken, ended, group_n, version)
        return played if self.hindsight is None else played.replace(hint=jax.vmap(self.hindsight)(tasks))

    def run(self, params, given: tuple) -> tuple[Spoken, tuple[Array, Array]]:
        """All turns of the given (tasks, keys) -> (their record [n t ...], (done_n, correct_n))."""
        if self.policy.unstack_layers is not None:
            params = self.policy.unstack_layers(params)  # here, and not in each turn
        tasks, keys = given
        count, sizes = len(keys), self.env.sizes
        fold = jax.vmap(jax.random.fold_in, in_axes=(0, None))
        states, said = jax.vmap(self.env.reset)(fold(keys, 0), tasks)
        slots = sizes.prompt + sizes.turns * (sizes.action + sizes.observation)
        assert self.policy.make_cache is not None
        nothing = jnp.zeros(count, jnp.int32)
        rows = Rows(self.policy.make_cache(count, slots), nothing, keys, nothing, nothing, jnp.zeros(count, bool))
        widest = max(sizes.prompt, sizes.observation)
        going = RolloutState(rows, states, _widen(said, widest), jnp.zeros(count, bool), jnp.zeros(count, bool))
        going, first = self.hear(params, going, fold(keys, 1), said.tokens, _real(said))
        blank = jax.eval_shape(self.act, params, going, first)[1]
        record = jax.tree.map(lambda x: jnp.zeros((sizes.turns, *x.shape), x.dtype), blank)

        def goes_on(index: Array, going: RolloutState) -> Array:
            return (index < sizes.turns) & ~going.done.all()

        def body(carry):
            index, going, first, record = carry
            going, now = self.act(params, going, first)
            record, index = jax.tree.map(lambda all_x, x: all_x.at[index].set(x), record, now), index + 1
            going, first = jax.lax.cond(
                goes_on(index, going),
                lambda going, _: self.hear(params, going, fold(keys, 1 + index), *_given(going, sizes.observation)),
                lambda going, first: (going, first),
                going,
                first,
            )
            return index, going, first, record

        start = (jnp.int32(0), going, first, record)
        _, going, _, record = jax.lax.while_loop(lambda carry: goes_on(*carry[:2]), body, start)
        return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), record), (going.done, going.correct)

    def hear(
        self, params, going: RolloutState, keys: Array, tokens_ns: Array, real_ns: Array
    ) -> tuple[RolloutState, Sampled]:
        """Feed tokens to every trajectory that is not done, and draw the first one of its next action."""
        count = len(going.done)
        rows = going.rows.replace(
            key=keys,
            count=jnp.zeros(count, jnp.int32),
            budget=jnp.full(count, self.env.sizes.action),
            active=~going.done,
        )
        settings, stop_ids = self.drawing(count)
        rows, first = feed(self.policy, params, rows, tokens_ns, real_ns, settings, stop_ids, banned=(PAD,))
        return going.replace(rows=rows), first

    def act(self, params, going: RolloutState, first: Sampled) -> tuple[RolloutState, Spoken]:
        """Draw the rest of an action, and let the environment answer it."""
        env, settings = self.env, self.drawing(len(going.done))
        rest = {"steps": env.sizes.action - 1, "narrowest": self.narrowest, "banned": (PAD,)}
        rows, more = decode(self.policy, params, going.rows, *settings, **rest)
        sampled = jax.tree.map(lambda x, xs: jnp.concatenate([x[None], xs]).swapaxes(0, 1), first, more)
        action_na = jnp.where(sampled.live, sampled.token, PAD)
        states, now = jax.vmap(env.step)(going.states, action_na, sampled.live.sum(axis=1, dtype=jnp.int32))
        said = _widen(now.observation, going.said.tokens.shape[1])
        return RolloutState(rows, states, said, now.done, now.correct), _record(env, going, sampled, now)

    def drawing(self, count: int) -> tuple[Sampling, Array]:
        """Say how so many rows draw, and what ends their actions."""
        return sampling(count, temperature=self.temperature), jnp.full((count, 1), END)


def _real(said: Observation) -> Array:
    return jnp.arange(said.tokens.shape[1])[None, :] < said.length[:, None]


def _widen(said: Observation, width: int) -> Observation:
    """Pad the tokens to so many."""
    return said._replace(tokens=jnp.pad(said.tokens, ((0, 0), (0, width - said.tokens.shape[1]))))


def _given(going: RolloutState, width: int) -> tuple[Array, Array]:
    """Join the tokens to feed between two actions: that sampled last, which the cache lacks, and the observation."""
    said = going.said._replace(tokens=going.said.tokens[:, :width])
    tokens_ns = jnp.concatenate([going.rows.token[:, None], said.tokens], axis=1)
    return tokens_ns, jnp.pad(_real(said), ((0, 0), (1, 0)), constant_values=True)


def _record(env: Env, going: RolloutState, sampled: Sampled, now: Step) -> Spoken:
    """The turn's tokens, what was chosen right after what was said; and what the environment made of them."""
    said, live_n = going.said, ~going.done
    heard_n = jnp.where(live_n, said.length, 0)
    spoken_n = sampled.live.sum(axis=1, dtype=jnp.int32)
    slots = max(env.sizes.prompt, env.sizes.observation) + env.sizes.action
    place_nl = jnp.arange(slots)[None, :] - heard_n[:, None]
    chosen_nl = (place_nl >= 0) & (place_nl < spoken_n[:, None])
    at_nl = jnp.clip(place_nl, 0, sampled.token.shape[1] - 1)
    action_nl, logp_nl = (jnp.take_along_axis(x, at_nl, axis=1) for x in (sampled.token, sampled.logp_sampled))
    context_nl = jnp.pad(said.tokens, ((0, 0), (0, slots - said.tokens.shape[1])))
    return Spoken(
        tokens=jnp.where(chosen_nl, action_nl, jnp.where(place_nl < 0, context_nl, PAD)),
        chosen=chosen_nl,
        logp_sampled=jnp.where(chosen_nl, logp_nl, 0.0),
        length=heard_n + spoken_n,
        turns=live_n,
        reward=now.reward,
        anchor=jax.vmap(env.anchor)(going.states),
        tool=now.tool,
        error=now.error,
    )


# Figures ----------------------------------------------------------------------------------------------


def shuffled_rewards(trajectories: Trajectories, key: Array, *, samples: int) -> Trajectories:
    """A control: outcomes permuted within each group, so that they say nothing of who earned them."""
    order_gs = jax.vmap(lambda key: jax.random.permutation(key, samples))(
        jax.random.split(key, len(trajectories.group) // samples)
    )
    order_n = (order_gs + jnp.arange(len(order_gs))[:, None] * samples).ravel()
    return trajectories.replace(outcome=trajectories.outcome[order_n], correct=trajectories.correct[order_n])


def summarise(trajectories: Trajectories, *, samples: int) -> Metrics:
    """Compute figures of a batch of trajectories: of those that are valid, but `tokens` and `chosen_tokens` of all."""
    valid_n = trajectories.valid
    turns_nt = jnp.asarray(trajectories.turns) & valid_n[:, None]
    count = jnp.maximum(turns_nt.sum(), 1)
    right_gs, valid_gs = (jnp.asarray(x).reshape(-1, samples) for x in (trajectories.correct, valid_n))
    mixed_g = (right_gs & valid_gs).any(axis=1) & (~right_gs & valid_gs).any(axis=1)
    return {
        "success": masked.mean(right_gs.astype(jnp.float32), valid_gs),
        "outcome": masked.mean(jnp.asarray(trajectories.outcome), valid_n),
        "invalid": (~valid_n).sum(),
        "turns": masked.mean(turns_nt.sum(axis=1).astype(jnp.float32), valid_n),
        "tool_errors": (jnp.asarray(trajectories.error) & turns_nt).sum() / count,
        "mixed_groups": mixed_g.mean(),
        "tokens": jnp.where(jnp.asarray(trajectories.turns), filled(trajectories)[0], 0).sum(),
        "chosen_tokens": trajectories.actions.sum(),
        "chosen_per_trajectory": masked.mean(trajectories.actions.sum(axis=(1, 2)).astype(jnp.float32), valid_n),
    }


def tool_mix(trajectories: Trajectories, tools: int) -> Array:
    """Say how often each tool was called."""
    return (jnp.asarray(trajectories.tool)[:, :, None] == jnp.arange(tools)[None, None, :]).sum(axis=(0, 1))
