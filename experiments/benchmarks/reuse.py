"""Gain from not doing work twice: by the cache of a trajectory's turns, and by one vmap over seeds.

`iteration` calls both, and says what to expect. A rollout appends to its cache from turn to turn; against it stands
every turn with its whole context in a fresh cache, in a program of that context's length, and without the environment.
Runs under one vmap share a program and its overhead; against them stand the same runs, one after the other.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from experiments.benchmarks.measured import medians, significant, timed
from experiments.setups import Setup
from flowgrpo import loop
from flowgrpo.contracts import Params, Policy
from flowgrpo.envs.env import END, PAD
from flowgrpo.generate.sampler import decode, feed, sampling, start_rows
from flowgrpo.layouts import filled
from flowgrpo.rollout.compiled import make_rollout, repeat
from flowgrpo.rollout.exam import draw_tasks
from flowgrpo.types import Trajectories

UPDATES = 3  # of each seed


# The cache --------------------------------------------------------------------------------------------


def measure_prefill(setup: Setup, params: Params, repeats: int) -> dict:
    """Seconds of a rollout, and of its turns answered again with nothing kept between them."""
    env, policy, sizes = setup.env, setup.policy, setup.sizes
    roll_out = jax.jit(make_rollout(env, policy))
    again = jax.jit(partial(answer, policy, action=env.sizes.action))
    task_key, own_key = jax.random.split(jax.random.key(0))
    tasks, group_n = repeat(draw_tasks(env, task_key, sizes.queries, "train"), sizes.samples)
    keys = jax.random.split(own_key, len(group_n))
    played = jax.device_get(roll_out(params, tasks, keys, group_n)).trajectories
    told = [context(played, turn) for turn in range(played.turns.sum(axis=1).max())]
    given = [(*told[t], jax.vmap(jax.random.fold_in, (0, None))(keys, 1 + t)) for t in range(len(told))]
    rows, said = [], []
    for _ in range(1 + repeats):
        kept, _ = timed(lambda: roll_out(params, tasks, keys, group_n))
        afresh, said = timed(lambda: [again(params, *arrays) for arrays in given])
        rows.append({"kept": kept, "afresh": afresh})
    middle = medians(rows)
    return {
        "trajectories": len(group_n),
        "turns": len(told),
        "rollout_seconds": round(middle["kept"], 4),
        "prefilled_seconds": round(middle["afresh"], 4),
        "over_rollout": significant(middle["afresh"] / middle["kept"]),
        "same_turns": round(share_of_same(played, said), 5),  # both drew with the same keys
    }


def context(played: Trajectories, turn: int) -> tuple[np.ndarray, np.ndarray]:
    """Collect each trajectory's context before its answer of this turn, none where it had ended: tokens_ns, real_ns."""
    length_nt, rows = np.asarray(filled(played)[0]), []
    for n in range(len(played.group)):
        parts = [played.tokens[n, t, : length_nt[n, t]] for t in range(turn)]
        parts.append(played.tokens[n, turn, : np.argmax(played.chosen[n, turn])])
        rows.append(np.concatenate(parts) if played.turns[n, turn] else np.zeros(0, np.int32))
    lengths = np.array([len(row) for row in rows])
    real_ns = np.arange(lengths.max()) < lengths[:, None]
    tokens_ns = np.zeros(real_ns.shape, np.int32)
    tokens_ns[real_ns] = np.concatenate(rows)
    return tokens_ns, real_ns


def answer(policy: Policy, params: Params, tokens_ns: Array, real_ns: Array, keys: Array, *, action: int) -> Array:
    """Sample an action after the whole context -> action_na, padding after its end."""
    count, width = tokens_ns.shape
    assert policy.make_cache is not None
    budget_n = jnp.where(real_ns.any(axis=1), action, 0)
    rows = start_rows(policy.make_cache(count, width + action), jnp.zeros(count, jnp.int32), keys, budget_n)
    settings, stop_ids = sampling(count), jnp.full((count, 1), END)
    rows, first = feed(policy, params, rows, tokens_ns, real_ns, settings, stop_ids, banned=(PAD,))
    _, more = decode(policy, params, rows, settings, stop_ids, steps=action - 1, banned=(PAD,))
    tokens_an = jnp.concatenate([first.token[None], more.token])
    return jnp.where(jnp.concatenate([first.live[None], more.live]), tokens_an, PAD).T


def share_of_same(played: Trajectories, said: list[Array]) -> float:
    """How many turns were answered with the same tokens as in the rollout."""
    same = []
    for turn, action_na in enumerate(jax.device_get(said)):
        for n in np.flatnonzero(played.turns[:, turn]):
            was = played.tokens[n, turn][played.chosen[n, turn]]
            same.append(np.array_equal(action_na[n][: len(was)], was) and not action_na[n][len(was) :].any())
    return float(np.mean(same))


# Seeds ------------------------------------------------------------------------------------------------


def measure_seeds(setup: Setup, params: Params, seeds: int, repeats: int) -> dict:
    """Seconds of a few updates of all seeds, together and one after the other, and how far their parameters differ."""
    step = loop.one_program(setup.iteration, setup.env, setup.sizes)
    together, alone = jax.jit(jax.vmap(step)), jax.jit(step)
    runs = jax.vmap(partial(loop.start_run, params, setup.optimizer))(jax.random.split(jax.random.key(0), seeds))
    each = [jax.tree.map(lambda x, seed=seed: x[seed], runs) for seed in range(seeds)]
    rows, whole, single = [], runs, each
    for _ in range(1 + repeats):
        vmapped, whole = timed(lambda: play(together, runs))
        in_turn, single = timed(lambda: [play(alone, run) for run in each])
        rows.append({"vmapped": vmapped, "in_turn": in_turn})
    middle = medians(rows)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *(run.learner.params for run in single))
    return {
        "seeds": seeds,
        "updates": UPDATES,
        "vmapped_seconds": round(middle["vmapped"], 3),
        "in_turn_seconds": round(middle["in_turn"], 3),
        "over_vmapped": significant(middle["in_turn"] / middle["vmapped"]),
        "largest_difference": largest(whole.learner.params, stacked),
        "largest_change": largest(whole.learner.params, runs.learner.params),
    }


def play(step: Callable, run: loop.Run) -> loop.Run:
    """The run after some updates."""
    for _ in range(UPDATES):
        run, _ = step(run)
    return run


def largest(one: Params, other: Params) -> float:
    """The largest difference of any parameter."""
    return float(f"{max(float(jnp.abs(one[name] - other[name]).max()) for name in one):.3g}")
