"""Tokens a second of whole training iterations, and of what they are made of, against what could be reached.

    python -m experiments.benchmarks.iteration
    python -m experiments.benchmarks.iteration --parts=iteration,prefill --repeats=3
    python -m experiments.benchmarks.iteration --parts=iteration --cpu_devices=2

`iteration`: 32 tasks of `arithmetic` with 8 trajectories each and a model of 0.34 M parameters, which imitates
demonstrations for some steps before, so that episodes take seven turns and groups have mixed outcomes. As three
programs with packing between them, as one program, and stage by stage. Only real tokens count, no padding.
`scaling`: the same in three programs with other group sizes, widths and turn limits, one at a time. `prefill`: the
rollout, whose cache is appended to, against every turn with its whole context in a fresh cache. Medians of several
runs, which alternate where they are compared. `benchmarks.update` measures the update alone, `benchmarks.seeds` several
seeds, `benchmarks.peers` the iterations of other systems.

Measured on two shared cores: 14,800 tokens a second in three programs, of whose time three quarters are rollout, and
11,000 in one; 27,700 with `--cpu_devices=2`. Prefilling every turn takes 2.3 times as long as the rollout, and gives
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

flag_heading("What is run")
_PARTS = flags.DEFINE_list("parts", list(PARTS), f"Any of {', '.join(PARTS)}.")
flag_heading("Sizes")
_QUERIES = flags.DEFINE_integer("queries", 32, "Tasks of an iteration.", lower_bound=1)
_SAMPLES = flags.DEFINE_integer("samples", 8, "Trajectories of a task.", lower_bound=1)
_WIDTH = flags.DEFINE_integer("width", 108, "Width of the prototype's model.", lower_bound=16)
_LAYERS = flags.DEFINE_integer("layers", 3, "Layers of the prototype's model.", lower_bound=1)
_WARM_STEPS = flags.DEFINE_integer("warm_steps", 200, "Steps of imitation before anything is measured.", lower_bound=1)
_GROUPS = flags.DEFINE_list("groups", ["4", "8", "16"], "Trajectories of a task in `scaling`.")
_WIDTHS = flags.DEFINE_list("widths", ["64", "96", "128"], "Widths in `scaling`.")
_TURNS = flags.DEFINE_list("turns", ["9", "10", "14"], "Turn limits in `scaling`.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Runs of which the median counts.", lower_bound=1)

app.read_flags(__name__)

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import flowgrpo as fg
from flowgrpo import loop
from flowgrpo.batching.layouts import filled
from flowgrpo.contracts import Params, Policy
from flowgrpo.envs.env import END, PAD
from flowgrpo.generate.sampler import decode, feed, sampling, start_rows
from flowgrpo.parallel.row_sharding import share
from flowgrpo.recipes import pure
from flowgrpo.report.progress import with_progress
from flowgrpo.report.tables import medians, seconds, show_columns, significant, timed
from flowgrpo.rollout.compiled import make_rollout, repeat
from flowgrpo.rollout.exams import draw_tasks
from flowgrpo.run.warm_start import warm_start
from flowgrpo.types import Trajectories

from . import measuring

HEAD = 16  # dimensions of the prototype's heads


def _prototype(*, env: fg.Env | None = None, **chosen: Any) -> pure.Setup:
    """The preset of `arithmetic` in the size of the flags, with what was chosen in its place."""
    sizes: dict[str, Any] = {"queries": _QUERIES.value, "samples": _SAMPLES.value, "warm_steps": _WARM_STEPS.value}
    sizes |= {"head": HEAD, "d": _WIDTH.value, "layers": _LAYERS.value}
    return pure.open(pure.preset("arithmetic", **(sizes | chosen)), env=env)


@cache
def _imitate(width: int) -> Params:
    """Parameters of this width after some steps of imitation; group size and turn limit leave them as they are."""
    setup = _prototype(d=width)
    with tempfile.TemporaryDirectory() as folder:
        return warm_start(pure.planner_imitation(setup, pure.seed_keys(0)), Path(folder), lambda *_: None)


def _play(setup: pure.Setup, params: Params, more: Callable[[loop.Run, float], dict[str, float]]) -> dict[str, float]:
    """Median figures of iterations in three programs; `more(run, tokens)` measures the same run in its own way."""
    step = loop.three_programs(setup.iteration)
    begun = share(loop.start_run(params, setup.optimizer, jax.random.key(0)), setup.policy.mesh)
    rows = []
    for update in range(1 + _REPEATS.value):
        run = begun.replace(update=jnp.int32(update))
        took, (_, metrics) = timed(partial(step, run))
        found = {name: float(metrics[name]) for name in ("tokens", "turns", "success", "mixed_groups")}
        found |= {"seconds": took, "tokens_per_second": found["tokens"] / took}
        rows.append(found | more(run, found["tokens"]))
    return medians(rows)


def _make_stages(setup: pure.Setup) -> Callable[[loop.Run, float], dict[str, float]]:
    """A function that measures an iteration as one program, and stage by stage."""
    one = jax.jit(loop.one_program(setup.iteration))
    roll_out, credit, update = map(jax.jit, (setup.iteration.rollout, setup.iteration.credit, setup.iteration.update))
    sizes = {"longest": loop.longest(setup.env), "trajectories": setup.sizes.queries * setup.sizes.samples}
    packing = setup.iteration.packer(**sizes)

    def lay_out(played: Trajectories) -> fg.Batch:  # as `loop.three_programs` does it
        adv, weights, _ = jax.device_get(credit(played))
        return packing(jax.device_get(played), adv, weights, skip_no_signal=setup.algorithm.skips)

    def measure(run: loop.Run, tokens: float) -> dict[str, float]:
        whole = seconds(lambda: one(run))
        rolling, rollout = timed(lambda: roll_out(run))
        packing, batch = timed(lambda: lay_out(rollout))
        clocks = {"rollout": rolling, "credit_and_pack": packing, "update": seconds(lambda: update(run, batch))}
        return {"one_program_tokens_per_second": tokens / whole} | {f"{name}_seconds": x for name, x in clocks.items()}

    return measure


def _measure_iteration(setup: pure.Setup, params: Params) -> dict:
    """Both forms of an iteration and its stages, on the same trajectories."""
    middle = _play(setup, params, _make_stages(setup))
    names = ("turns", "success", "mixed_groups", "tokens", "tokens_per_second", "one_program_tokens_per_second")
    digits = {"turns": 2, "success": 3, "mixed_groups": 3}
    return {
        "params": sum(value.size for value in params.values()),
        "trajectories": setup.sizes.queries * setup.sizes.samples,
        **{name: round(middle[name], digits.get(name)) for name in names},
        "one_program_over_three": significant(middle[names[-1]] / middle["tokens_per_second"]),
        **{f"{name}_seconds": round(middle[f"{name}_seconds"], 4) for name in ("rollout", "credit_and_pack", "update")},
    }


def _measure_scaling() -> list[dict]:
    """Tokens a second in three programs, where one size differs from the prototype's."""
    setups = [_prototype(samples=count) for count in measuring.whole_numbers(_GROUPS)]
    setups += [_prototype(d=width) for width in measuring.whole_numbers(_WIDTHS)]
    setups += [_prototype(env=fg.arithmetic(turns=turns)) for turns in measuring.whole_numbers(_TURNS)]
    found = []
    for setup in setups:
        middle = _play(setup, _imitate(setup.config.d), lambda *_: {})
        sizes = {"samples": setup.sizes.samples, "d": setup.config.d, "turn_limit": setup.env.sizes.turns}
        clock = {"turns": round(middle["turns"], 2), "seconds": round(middle["seconds"], 4)}
        found.append(sizes | clock | {"tokens_per_second": round(middle["tokens_per_second"])})
    return found


def _measure_prefill(setup: pure.Setup, params: Params) -> dict:
    """Seconds of a rollout, and of its turns answered again with nothing kept between them."""
    env, policy, sizes = setup.env, setup.policy, setup.sizes
    roll_out = jax.jit(make_rollout(env, policy._replace(mesh=None)))
    again = jax.jit(_answer, static_argnums=0, static_argnames="action")
    task_key, own_key = jax.random.split(jax.random.key(0))
    tasks, group_n = repeat(draw_tasks(env, task_key, sizes.queries, "train"), sizes.samples)
    keys = jax.random.split(own_key, len(group_n))
    played = jax.device_get(roll_out(params, tasks, keys, group_n))
    told = [_context(played, turn) for turn in range(played.turns.sum(axis=1).max())]
    given = [(*arrays, jax.vmap(jax.random.fold_in, (0, None))(keys, 1 + t)) for t, arrays in enumerate(told)]

    def prefill_all() -> list[Array]:
        return [again(policy, params, *arrays, action=env.sizes.action) for arrays in given]

    works = {"kept": lambda: roll_out(params, tasks, keys, group_n), "afresh": prefill_all}
    middle = measuring.medians_in_turn(works, _REPEATS.value)
    return {
        "trajectories": len(group_n),
        "turns": len(told),
        "rollout_seconds": round(middle["kept"], 4),
        "prefilled_seconds": round(middle["afresh"], 4),
        "over_rollout": significant(middle["afresh"] / middle["kept"]),
        "same_turns": round(_share_of_same(played, prefill_all()), 5),  # both drew with the same keys
    }


def _context(played: Trajectories, turn: int) -> tuple[np.ndarray, np.ndarray]:
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


def _answer(policy: Policy, params: Params, tokens_ns: Array, real_ns: Array, keys: Array, *, action: int) -> Array:
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


def _share_of_same(played: Trajectories, said: list[Array]) -> float:
    """Say how many turns were answered with the same tokens as in the rollout."""
    same = []
    for turn, action_na in enumerate(jax.device_get(said)):
        for n in np.flatnonzero(played.turns[:, turn]):
            was = played.tokens[n, turn][played.chosen[n, turn]]
            same.append(np.array_equal(action_na[n][: len(was)], was) and not action_na[n][len(was) :].any())
    return float(np.mean(same))


def _measure(part: str) -> list[dict]:
    """The records of one part."""
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
        fg.arithmetic(turns=turns)  # which refuses a limit that is too low
    result: dict[str, list[dict]] = {}
    for part in with_progress("part", [part for part in PARTS if part in _PARTS.value]):
        result[part] = _measure(part)
        show_columns(result[part])
    measuring.print_result("iteration", **result)


if __name__ == "__main__":
    app.run(main)
