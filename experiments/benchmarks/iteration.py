"""Tokens per second of whole training iterations and of their stages.

    python -m experiments.benchmarks.iteration
    python -m experiments.benchmarks.iteration --parts=iteration,prefill --repeats=3
    python -m experiments.benchmarks.iteration --parts=iteration --cpu_devices=2

`iteration`: 32 tasks of `arithmetic` with 8 trajectories each and a model of 0.34 M parameters, which first imitates
demonstrations for some steps, so that episodes take seven turns and groups have mixed outcomes. As three programs with
packing between them, as one program, and stage by stage. Only real tokens count, no padding. `scaling`: three programs
with other group sizes, widths and turn limits, one at a time. `prefill`: the rollout, which appends to its cache,
against prefilling the whole context of every turn. Medians of several runs, which alternate if they are compared.
`benchmarks.update` measures the update alone, `benchmarks.seeds` several seeds, `benchmarks.peers` other systems.

Measured on two shared cores: 14,800 tokens per second in three programs, three quarters of the time in the rollout, and
11,000 in one; 27,700 with `--cpu_devices=2`. Prefilling every turn takes 2.3 times as long as the rollout, and samples
the same tokens. Ten minutes.
"""

import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from absl import flags

from ..cli import app
from ..cli.help import flag_heading

PARTS = ("iteration", "scaling", "prefill")

flag_heading("Run")
_PARTS = flags.DEFINE_list("parts", list(PARTS), f"Any of {', '.join(PARTS)}.")
flag_heading("Sizes")
_QUERIES = flags.DEFINE_integer("queries", 32, "Tasks of an iteration.", lower_bound=1)
_SAMPLES = flags.DEFINE_integer("samples", 8, "Trajectories of a task.", lower_bound=1)
_WIDTH = flags.DEFINE_integer("width", 108, "Width of the prototype's model.", lower_bound=16)
_LAYERS = flags.DEFINE_integer("layers", 3, "Layers of the prototype's model.", lower_bound=1)
_WARM_STEPS = flags.DEFINE_integer("warm_steps", 200, "Steps of imitation before the measurements.", lower_bound=1)
_GROUPS = flags.DEFINE_list("groups", ["4", "8", "16"], "Trajectories of a task in `scaling`.")
_WIDTHS = flags.DEFINE_list("widths", ["64", "96", "128"], "Widths in `scaling`.")
_TURNS = flags.DEFINE_list("turns", ["9", "10", "14"], "Turn limits in `scaling`.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Number of runs; their median is reported.", lower_bound=1)

app.read_flags(__name__)

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from flowgrpo.batching.layouts import resolve_lengths
from flowgrpo.contracts import Env, Params, Policy
from flowgrpo.envs.arithmetic import arithmetic
from flowgrpo.envs.env import END, PAD
from flowgrpo.generate.sampler import decode, feed, make_sampling, start_rows
from flowgrpo.parallel.row_sharding import replicate
from flowgrpo.recipes import pure
from flowgrpo.recipes.recipe import Objects
from flowgrpo.report.progress import with_progress
from flowgrpo.report.tables import medians, seconds, show_columns, significant, timed
from flowgrpo.rollout.compiled import make_rollout, repeat
from flowgrpo.rollout.exams import draw_tasks
from flowgrpo.training.pure_env import fused_step, max_trajectory_tokens, split_step
from flowgrpo.training.stages import TrainState, init_train_state
from flowgrpo.training.warm_start import warm_start
from flowgrpo.types import Batch, Trajectories

from . import measuring

HEAD = 16  # dimensions of the prototype's heads


def _prototype(*, env: Env | None = None, **chosen: Any) -> pure.Setup:
    """Preset of `arithmetic` with the sizes of the flags, and changed settings."""
    sizes: dict[str, Any] = {"queries": _QUERIES.value, "samples": _SAMPLES.value, "warm_steps": _WARM_STEPS.value}
    sizes |= {"head_dim": HEAD, "model_dim": _WIDTH.value, "layers": _LAYERS.value}
    return pure.build(pure.preset("arithmetic", **(sizes | chosen)), objects=Objects(env=env))


@cache
def _imitate(width: int) -> Params:
    """Parameters of this width after some steps of imitation, independent of group size and turn limit."""
    setup = _prototype(model_dim=width)
    with tempfile.TemporaryDirectory() as folder:
        return warm_start(pure.planner_imitation(setup, pure.seed_keys(0)), Path(folder), lambda *_: None)


def _play(
    setup: pure.Setup, params: Params, measure_more: Callable[[TrainState, float], dict[str, float]]
) -> dict[str, float]:
    """Median figures of iterations in three programs; `measure_more(run, tokens)` adds measurements of the same run."""
    step = split_step(setup.stages)
    start = replicate(init_train_state(params, setup.optimizer, jax.random.key(0)), setup.policy.mesh)
    rows = []
    for update in range(1 + _REPEATS.value):
        run = start.replace(update=jnp.int32(update))
        duration, (_, metrics) = timed(partial(step, run))
        figures = {name: float(metrics[name]) for name in ("tokens", "turns", "success", "mixed_groups")}
        figures |= {"seconds": duration, "tokens_per_second": figures["tokens"] / duration}
        rows.append(figures | measure_more(run, figures["tokens"]))
    return medians(rows)


def _make_stages(setup: pure.Setup) -> Callable[[TrainState, float], dict[str, float]]:
    """Make the function that measures an iteration as one program, and stage by stage."""
    whole = jax.jit(fused_step(setup.stages))
    roll_out, compute_advantages, update = map(
        jax.jit, (setup.stages.rollout, setup.stages.update.compute_advantages, setup.stages.update.update)
    )
    sizes = {
        "max_trajectory_tokens": max_trajectory_tokens(setup.env),
        "trajectories": setup.sizes.queries * setup.sizes.samples,
    }
    packing = setup.stages.update.packer(**sizes)

    def lay_out(trajectories: Trajectories) -> Batch:  # as `pure_env.split_step` does it
        adv, weights, _ = jax.device_get(compute_advantages(trajectories))
        return packing(jax.device_get(trajectories), adv, weights, skip_no_signal=setup.algorithm.skips_zero_advantage)

    def measure(run: TrainState, tokens: float) -> dict[str, float]:
        fused_seconds = seconds(lambda: whole(run))
        rolling, rollout = timed(lambda: roll_out(run))
        packing, batch = timed(lambda: lay_out(rollout))
        durations = {"rollout": rolling, "credit_and_pack": packing, "update": seconds(lambda: update(run, batch))}
        return {"one_program_tokens_per_second": tokens / fused_seconds} | {
            f"{name}_seconds": duration for name, duration in durations.items()
        }

    return measure


def _measure_iteration(setup: pure.Setup, params: Params) -> dict:
    """Both forms of an iteration and its stages, on the same trajectories."""
    median = _play(setup, params, _make_stages(setup))
    names = ("turns", "success", "mixed_groups", "tokens", "tokens_per_second", "one_program_tokens_per_second")
    digits = {"turns": 2, "success": 3, "mixed_groups": 3}
    return {
        "params": sum(value.size for value in params.values()),
        "trajectories": setup.sizes.queries * setup.sizes.samples,
        **{name: round(median[name], digits.get(name)) for name in names},
        "one_program_over_three": significant(median[names[-1]] / median["tokens_per_second"]),
        **{f"{name}_seconds": round(median[f"{name}_seconds"], 4) for name in ("rollout", "credit_and_pack", "update")},
    }


def _measure_scaling() -> list[dict]:
    """Tokens per second in three programs, with one size different from the prototype's."""
    setups = [_prototype(samples=count) for count in measuring.whole_numbers(_GROUPS)]
    setups += [_prototype(model_dim=width) for width in measuring.whole_numbers(_WIDTHS)]
    setups += [_prototype(env=arithmetic(turns=turns)) for turns in measuring.whole_numbers(_TURNS)]
    rows = []
    for setup in setups:
        median = _play(setup, _imitate(setup.config.model.model_dim), lambda *_: {})
        sizes = {"samples": setup.sizes.samples, "d": setup.config.model.model_dim, "turn_limit": setup.env.sizes.turns}
        figures = {"turns": round(median["turns"], 2), "seconds": round(median["seconds"], 4)}
        rows.append(sizes | figures | {"tokens_per_second": round(median["tokens_per_second"])})
    return rows


def _measure_prefill(setup: pure.Setup, params: Params) -> dict:
    """Seconds of a rollout, and of sampling its turns again without a cache between turns."""
    env, policy, sizes = setup.env, setup.policy, setup.sizes
    roll_out = jax.jit(make_rollout(env, policy._replace(mesh=None)))
    answer_afresh = jax.jit(_answer, static_argnums=0, static_argnames="action")
    task_key, own_key = jax.random.split(jax.random.key(0))
    tasks, group_n = repeat(draw_tasks(env, task_key, sizes.queries, "train"), sizes.samples)
    keys = jax.random.split(own_key, len(group_n))
    trajectories = jax.device_get(roll_out(params, tasks, keys, group_n))
    contexts = [_context(trajectories, turn) for turn in range(trajectories.turns.sum(axis=1).max())]
    inputs = [(*arrays, jax.vmap(jax.random.fold_in, (0, None))(keys, 1 + t)) for t, arrays in enumerate(contexts)]

    def prefill_all() -> list[Array]:
        return [answer_afresh(policy, params, *arrays, action=env.sizes.action) for arrays in inputs]

    functions = {"kept": lambda: roll_out(params, tasks, keys, group_n), "afresh": prefill_all}
    median = measuring.medians_in_turn(functions, _REPEATS.value)
    return {
        "trajectories": len(group_n),
        "turns": len(contexts),
        "rollout_seconds": round(median["kept"], 4),
        "prefilled_seconds": round(median["afresh"], 4),
        "over_rollout": significant(median["afresh"] / median["kept"]),
        "same_turns": round(_fraction_of_same(trajectories, prefill_all()), 5),  # both sample with the same keys
    }


def _context(trajectories: Trajectories, turn: int) -> tuple[np.ndarray, np.ndarray]:
    """Contexts of all trajectories before their action of this turn, empty if they had ended -> tokens_ns, real_ns."""
    length_nt, rows = np.asarray(resolve_lengths(trajectories)[0]), []
    for n in range(len(trajectories.group)):
        parts = [trajectories.tokens[n, t, : length_nt[n, t]] for t in range(turn)]
        parts.append(trajectories.tokens[n, turn, : np.argmax(trajectories.chosen[n, turn])])
        rows.append(np.concatenate(parts) if trajectories.turns[n, turn] else np.zeros(0, np.int32))
    lengths = np.array([len(row) for row in rows])
    real_ns = np.arange(lengths.max()) < lengths[:, None]
    tokens_ns = np.zeros(real_ns.shape, np.int32)
    tokens_ns[real_ns] = np.concatenate(rows)
    return tokens_ns, real_ns


def _answer(policy: Policy, params: Params, tokens_ns: Array, real_ns: Array, keys: Array, *, action: int) -> Array:
    """Sample an action after the whole context -> action_na, padding after its end."""
    count, width = tokens_ns.shape
    assert policy.make_cache is not None
    budget_n = jnp.where(real_ns.any(axis=1), action, 0)
    rows = start_rows(policy.make_cache(count, width + action), jnp.zeros(count, jnp.int32), keys, budget_n)
    settings, stop_ids = make_sampling(count), jnp.full((count, 1), END)
    rows, first = feed(policy, params, rows, tokens_ns, real_ns, settings, stop_ids, banned=(PAD,))
    _, more = decode(policy, params, rows, settings, stop_ids, steps=action - 1, banned=(PAD,))
    tokens_an = jnp.concatenate([first.token[None], more.token])
    return jnp.where(jnp.concatenate([first.live[None], more.live]), tokens_an, PAD).T


def _fraction_of_same(trajectories: Trajectories, answers: list[Array]) -> float:
    """Fraction of turns with the same action as in the rollout."""
    are_same = []
    for turn, action_na in enumerate(jax.device_get(answers)):
        for n in np.flatnonzero(trajectories.turns[:, turn]):
            action = trajectories.tokens[n, turn][trajectories.chosen[n, turn]]
            are_same.append(
                np.array_equal(action_na[n][: len(action)], action) and not action_na[n][len(action) :].any()
            )
    return float(np.mean(are_same))


def _measure(part: str) -> list[dict]:
    """Rows of one part."""
    if part == "scaling":
        return _measure_scaling()
    measure = {"iteration": _measure_iteration, "prefill": _measure_prefill}[part]
    return [measure(_prototype(), _imitate(_WIDTH.value))]


def main() -> None:
    """Measure, print the tables and one JSON line."""
    measuring.check_known(_PARTS, PARTS)
    for flag in (_GROUPS, _WIDTHS):
        measuring.whole_numbers(flag)
    for turns in measuring.whole_numbers(_TURNS):
        arithmetic(turns=turns)  # raises for a limit that is too low
    result: dict[str, list[dict]] = {}
    for part in with_progress("part", [part for part in PARTS if part in _PARTS.value]):
        result[part] = _measure(part)
        show_columns(result[part])
    measuring.print_result("iteration", **result)


if __name__ == "__main__":
    app.run(main)
