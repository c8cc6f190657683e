"""Tokens a second of whole training iterations, and of what they are made of, against what could be reached.

    python -m experiments.benchmarks.iteration
    python -m experiments.benchmarks.iteration --parts=trl           (needs the extra [oracle])
    python -m experiments.benchmarks.iteration --parts=iteration,prefill --repeats=3
    python -m experiments.benchmarks.iteration --parts=iteration --cpu_devices=2

`iteration`: 32 tasks of `arithmetic` with 8 trajectories each and a model of 0.34 M parameters, which imitates
demonstrations for some steps before, so that episodes take seven turns and groups have mixed outcomes. As three
programs with packing between them, as one program, and stage by stage. Only real tokens count, no padding.
`scaling`: the same iteration with other group sizes, widths and turn limits, one at a time. `prefill`: the rollout,
whose cache is appended to, against every turn with its whole context in a fresh cache. `seeds`: runs of `lookup` under
one vmap against one after the other, and how far their parameters differ after 3 updates. `trl`: steps of GRPOTrainer
and of this loop in turn, with one turn and with three (see `trl_peer`). Medians of several runs, which alternate where
they are compared. The update alone is measured by `benchmarks.update`.

Measured on two shared cores: 14,800 tokens a second in three programs, of whose time three quarters are rollout, and
11,000 in one. Prefilling every turn takes 2.3 times as long as the rollout, and gives the
same tokens. 16 seeds of 256 trajectories take 1.35 times as long under one vmap; their parameters differ by 1e-6 where
training moved them by 3e-3. With `--cpu_devices=2` an iteration comes to 27,700 tokens a second.
Of TRL's steps a second 0.9 to 1.0 with one turn, and 1.2 to 1.3 with three, where it prefills
every turn. Ten minutes, and three more for `trl`.
"""

import json
import os
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags

import flowgrpo as fg
from experiments import common, setups
from experiments.benchmarks import ceilings, reuse, trl_peer
from experiments.benchmarks.measured import medians, show_columns, significant, timed
from experiments.headings import heading
from flowgrpo import loop
from flowgrpo.contracts import Metrics
from flowgrpo.packing import pack
from flowgrpo.report.progress import counted
from flowgrpo.spread import share
from flowgrpo.types import BadInput, Batch, Trajectories

PARTS = ("iteration", "scaling", "prefill", "seeds", "trl")

heading("What is run")
_PARTS = flags.DEFINE_list("parts", list(PARTS[:-1]), f"Any of {', '.join(PARTS)}.")
heading("Sizes")
_QUERIES = flags.DEFINE_integer("queries", 32, "Tasks of an iteration.", lower_bound=1)
_SAMPLES = flags.DEFINE_integer("samples", 8, "Trajectories of a task.", lower_bound=1)
_WIDTH = flags.DEFINE_integer("width", 108, "Width of the prototype's model.", lower_bound=16)
_LAYERS = flags.DEFINE_integer("layers", 3, "Layers of the prototype's model.", lower_bound=1)
_WARM_STEPS = flags.DEFINE_integer("warm_steps", 200, "Steps of imitation before anything is measured.", lower_bound=1)
_GROUPS = flags.DEFINE_list("groups", ["4", "8", "16"], "Trajectories of a task in `scaling`.")
_WIDTHS = flags.DEFINE_list("widths", ["64", "96", "128"], "Widths in `scaling`.")
_TURNS = flags.DEFINE_list("turns", ["9", "10", "14"], "Turn limits in `scaling`.")
_SEEDS = flags.DEFINE_integer("seeds", 16, "Runs of the part `seeds`.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Runs of which the median counts.", lower_bound=1)

HEAD = 16  # dimensions of the prototype's heads


# Parts of a run ---------------------------------------------------------------------------------------


def make_setup(name: str = "arithmetic", /, *, turns: int | None = None, **chosen: Any) -> setups.Setup:
    """The preset of an environment in the size of the flags, with what was chosen in its place."""
    sizes = {"queries": _QUERIES.value, "samples": _SAMPLES.value, "warm_steps": _WARM_STEPS.value}
    setup = setups.build(setups.settings_of(name, **({"head": HEAD} | sizes | chosen)))
    if turns is None:
        return setup
    env = fg.arithmetic(turns=turns)
    parts = (env, setup.policy, setup.algorithm, setup.optimizer, setup.sizes)
    iteration = loop.make_iteration(*parts, mesh=setup.mesh)
    return setup._replace(env=env, iteration=iteration)


def prototype() -> setups.Setup:
    """The setup of the parts `iteration` and `prefill`."""
    return make_setup(d=_WIDTH.value, layers=_LAYERS.value)


def imitate(setup: setups.Setup) -> Any:
    """Parameters after some steps of imitation."""
    keys = setups.seed_keys(0)
    params = jax.jit(setup.policy.init)(keys["start"])
    return setups.warm_start(setup, params, keys["demonstrations"], lambda *_: None)


# Iterations -------------------------------------------------------------------------------------------


def measure_iteration(setup: setups.Setup, params) -> dict:
    """Both forms of an iteration and its stages, on the same trajectories."""
    start = share(loop.start_run(params, setup.optimizer, jax.random.key(0)), setup.mesh)
    three = loop.three_programs(setup.iteration, setup.env, setup.algorithm, setup.sizes)
    one = jax.jit(loop.one_program(setup.iteration, setup.env, setup.sizes))
    stages = [jax.jit(x) for x in (setup.iteration.rollout, setup.iteration.credit, setup.iteration.update)]
    rows = []
    for index in range(1 + _REPEATS.value):
        run = start.replace(update=jnp.int32(index))  # which gives it other tasks
        in_three, (_, metrics) = timed(partial(three, run))
        in_one, _ = timed(partial(one, run))
        rows.append({"in_three": in_three, "in_one": in_one} | stage_by_stage(setup, stages, run) | numbers(metrics))
    middle = medians(rows)
    tokens = statistics.median(row["tokens"] / row["in_three"] for row in rows[1:])
    whole = statistics.median(row["tokens"] / row["in_one"] for row in rows[1:])
    return {
        "params": ceilings.count(params),
        "trajectories": setup.sizes.queries * setup.sizes.samples,
        "turns": round(middle["turns"], 2),
        "success": round(middle["success"], 3),
        "mixed_groups": round(middle["mixed_groups"], 3),
        "tokens": round(middle["tokens"]),
        "tokens_per_second": round(tokens),
        "one_program_tokens_per_second": round(whole),
        "one_program_over_three": significant(whole / tokens),
        **{f"{name}_seconds": round(middle[name], 4) for name in ("rollout", "credit_and_pack", "update")},
    }


def stage_by_stage(setup: setups.Setup, stages: list[Callable], run: loop.Run) -> dict[str, float]:
    """Seconds of each stage."""
    roll_out, credit, update = stages
    rolling, rollout = timed(lambda: roll_out(run))
    packing, batch = timed(lambda: laid_out(setup, credit, rollout.trajectories))
    return {"rollout": rolling, "credit_and_pack": packing, "update": timed(lambda: update(run, batch))[0]}


def laid_out(setup: setups.Setup, credit: Callable, trajectories: Trajectories) -> Batch:
    """Packed as `loop.three_programs` does it."""
    adv, weights, _ = jax.device_get(credit(trajectories))
    rows, length = len(trajectories.group), loop.longest(setup.env)
    skips = setup.algorithm.skips
    return pack(jax.device_get(trajectories), adv, weights, row_length=length, rows=rows, skip_no_signal=skips)


def numbers(metrics: Metrics) -> dict[str, float]:
    """Select the metrics that describe the trajectories, as floats."""
    return {name: float(metrics[name]) for name in ("tokens", "turns", "success", "mixed_groups")}


def measure_scaling() -> list[dict]:
    """Tokens a second where one size differs from the prototype's."""
    base: dict[str, Any] = {"d": _WIDTH.value, "layers": _LAYERS.value, "samples": _SAMPLES.value, "turns": None}
    shapes = [{"samples": int(value)} for value in _GROUPS.value]
    shapes += [{"d": int(value)} for value in _WIDTHS.value]
    shapes += [{"turns": int(value)} for value in _TURNS.value]
    learned = {}  # by width; group size and turn limit leave the model as it is
    rows = []
    for shape in shapes:
        setup = make_setup(**(base | shape))
        width = setup.settings["d"]
        if width not in learned:
            learned[width] = imitate(make_setup(d=width, layers=_LAYERS.value))
        rows.append(measure_scale(setup, learned[width]))
    return rows


def measure_scale(setup: setups.Setup, params) -> dict:
    """Tokens a second of one shape, in three programs."""
    start = share(loop.start_run(params, setup.optimizer, jax.random.key(0)), setup.mesh)
    step = loop.three_programs(setup.iteration, setup.env, setup.algorithm, setup.sizes)
    rows = []
    for index in range(1 + _REPEATS.value):
        took, (_, metrics) = timed(partial(step, start.replace(update=jnp.int32(index))))
        rows.append(numbers(metrics) | {"seconds": took, "speed": float(metrics["tokens"]) / took})
    middle = medians(rows)
    return {
        "samples": setup.sizes.samples,
        "d": setup.settings["d"],
        "turn_limit": setup.env.sizes.turns,
        "turns": round(middle["turns"], 2),
        "seconds": round(middle["seconds"], 4),
        "tokens_per_second": round(middle["speed"]),
    }


# The command ------------------------------------------------------------------------------------------


def check_flags() -> None:
    """Refuse unknown parts and models, and lists that aren't numbers, before anything takes time."""
    for part in _PARTS.value:
        if part not in PARTS:
            raise BadInput(f"--parts={','.join(_PARTS.value)} has {part!r}; choose from {', '.join(PARTS)}")
    for flag in (_GROUPS, _WIDTHS, _TURNS):
        if not all(value.isdecimal() and int(value) > 0 for value in flag.value):
            raise BadInput(f"--{flag.name}={','.join(flag.value)} must be a comma-separated list of positive integers")
    if "trl" in _PARTS.value:
        trl_peer.check_installed()


def measure(part: str, *, params: Any) -> list[dict]:
    """The records of one part; `params` are the prototype's after imitation."""
    match part:
        case "iteration":
            return [measure_iteration(prototype(), params)]
        case "scaling":
            return measure_scaling()
        case "prefill":
            return [reuse.measure_prefill(prototype(), params, _REPEATS.value)]
        case "seeds":
            setup = make_setup("lookup")
            return [reuse.measure_seeds(setup, imitate(setup), _SEEDS.value, _REPEATS.value)]
        case _:
            return [trl_peer.measure(turns, _REPEATS.value) for turns in trl_peer.ACTION]


def main() -> None:
    """Measure, print the tables and one JSON line."""
    # PyTorch's threads spin while they wait, which slows shared cores down. It must be said before it is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    check_flags()
    parts = [part for part in PARTS if part in _PARTS.value]
    params = imitate(prototype()) if {"iteration", "prefill"} & set(parts) else None
    result: dict[str, Any] = {"benchmark": "iteration"}
    for part in counted("part", parts):
        result[part] = measure(part, params=params)
        show_columns(result[part])
    print(json.dumps(result))


if __name__ == "__main__":
    common.run(main)
