"""A planner that starts weak learns to use tools over several turns, by Flow-GRPO, while you watch.

    python -m experiments.quickstart
    python -m experiments.quickstart --env=arithmetic --seed=1 --workdir=runs/mine
    python -m experiments.quickstart --env=my_module:my_env
    python -m experiments.quickstart --control=shuffled_rewards

Two phases: a small model imitates flawed demonstrations, and is then trained in the environment on nothing but the
outcome. At the end the table compares both on tasks of kinds that neither training nor the choice of the checkpoint
has seen, and shows one of them before and after. Everything lies in the work directory: `metrics.jsonl`,
`timings.jsonl`, `curves.png`, `result.json`, `checkpoints/`. The same command goes on where a run was stopped.

Runs on any CPU, offline. Expected of `lookup` on two cores: 75 seconds, in which the success on test tasks rises from
15 to 99 %, and the share of calls to the right of four tools from 32 % to 99 %. `arithmetic` takes eight minutes, and
rises from 21 to 84 or 88 %; `maze` comes to 48 or 55 %. On `lookup` every control stays where the warm start was. There
`--algorithm=ppo` comes to 99 % in 75 updates, and `--algorithm=dpo` in 150 (seed 0): 182 and 124 seconds of one core.
"""

import json
from pathlib import Path
from typing import Any

import jax
from absl import flags

from experiments import common, loggers, setups
from experiments.headings import heading
from experiments.loggers import chosen_loggers
from experiments.members import ALGORITHMS, BY_IMPORT
from experiments.pure_work import pure_work
from experiments.session import one_run
from flowgrpo import launch

heading("What is run")
_ENV = flags.DEFINE_string("env", "lookup", f"Any of {', '.join(setups.PRESETS)}, or {BY_IMPORT}.")
_ALGORITHM = flags.DEFINE_enum("algorithm", None, list(ALGORITHMS), "Member of the family; flow_grpo by default.")
_CONTROL = flags.DEFINE_enum(
    "control", None, setups.CONTROLS, "Shuffle rewards within groups, imitate on, or credit the last turn only."
)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of everything.")
_NUM_SEEDS = flags.DEFINE_integer("num_seeds", 1, "Runs with successive seeds, one after another.", lower_bound=1)
heading("Sizes")
_UPDATES = flags.DEFINE_integer("updates", None, "Updates of the reinforcement phase.", lower_bound=0)
_QUERIES = flags.DEFINE_integer("queries", None, "Queries of an update.", lower_bound=1)
_SAMPLES = flags.DEFINE_integer("samples", None, "Trajectories of a query.", lower_bound=2)
_TEST = flags.DEFINE_integer("test_tasks", 1000, "Test tasks of the final table.", lower_bound=1)
heading("Learning")
_RATE = flags.DEFINE_float("learning_rate", None, "Of the reinforcement phase.", lower_bound=0.0)
_WARM = flags.DEFINE_integer("warm_steps", None, "Steps of imitation at most.", lower_bound=1)
heading("Devices and memory")
_MESH = flags.DEFINE_string("mesh", None, "How devices are arranged, such as data=2,fsdp=4; all as data by default.")
heading("Files and resuming")
_WORKDIR = flags.DEFINE_string("workdir", None, "Where results lie; runs/quickstart-ENV-SEED by default.")
_RESUME = flags.DEFINE_bool("resume", True, "Go on with what is in the work directory; --noresume begins anew.")
_EVERY = flags.DEFINE_integer("checkpoint_every", 10, "Updates between validations and checkpoints.", lower_bound=1)
flags.adopt_module_key_flags(loggers)

flags.register_validator(
    _ENV, lambda name: name in setups.PRESETS or ":" in name, f"one of {', '.join(setups.PRESETS)}, or {BY_IMPORT}"
)

# The command ------------------------------------------------------------------------------------------


def read_flags(seed: int) -> dict[str, Any]:
    """The run's settings: the environment's preset, with what the flags say."""
    chosen = {
        "seed": seed,
        "algorithm": _ALGORITHM.value,
        "control": _CONTROL.value,
        "mesh": _MESH.value,
        "updates": _UPDATES.value,
        "queries": _QUERIES.value,
        "samples": _SAMPLES.value,
        "learning_rate": _RATE.value,
        "warm_steps": _WARM.value,
    }
    # A run goes on bit for bit on as many devices only, so their number belongs to what may not differ.
    return setups.settings_of(_ENV.value, **chosen) | {"devices": jax.device_count()}


def main() -> None:
    """Run every seed."""
    results = []
    for seed in range(_SEED.value, _SEED.value + _NUM_SEEDS.value):
        settings = read_flags(seed)
        base = Path(_WORKDIR.value or f"runs/quickstart-{settings['env'].replace(':', '-')}-{seed}")
        folder = base / f"seed{seed}" if _WORKDIR.value and _NUM_SEEDS.value > 1 else base
        work = pure_work(setups.build(settings), test_tasks=_TEST.value, folder=folder)
        results.append(one_run(work, folder, every=_EVERY.value, resume=_RESUME.value, loggers=chosen_loggers()))
    if len(results) > 1:
        for result in results:
            print(f"seed {result['seed']}: {result['success_before']:.1%} -> {result['success_after']:.1%}")
    print(json.dumps(results if len(results) > 1 else results[0]))


if __name__ == "__main__":
    common.run(main, cpu_devices=launch.cores())
