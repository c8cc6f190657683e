"""Train the agent system in the flow: a planner learns which tool to call, with what, and when to answer.

    python -m experiments.agentflow
    python -m experiments.agentflow --seed=1 --workdir=runs/mine --control=shuffled_rewards
    python -m experiments.agentflow --dry_run
    python -m experiments.agentflow --dry_run=compile --model=PATH --mesh=fsdp=8 --cpu_devices=8 --device_memory=80GiB
    python -m experiments.agentflow --dry_run=compile --model=PATH --mesh=fsdp=8 --target=v5e-8
    python -m experiments.agentflow --model=PATH --tasks=train.jsonl --corpus=wiki.jsonl

Without --model everything is made here and runs offline on a CPU: a small model with its own tokenizer imitates flawed
demonstrations of the real tools (calculator, Python in the sandbox, search), and is then trained by Flow-GRPO on four
domains at once: mathematics, code that is tested, questions over a corpus, drawings. With --model the settings are
those of the paper (batch 32, group 8, learning rate 1e-6, KL 0.001, clip 0.2, temperature 0.5, 3 turns in training and
10 in evaluations, 2048 new tokens), and executor, verifier and generator are the model's frozen weights.

Expected offline, on held-out tasks: success from 58 to 95 % (medians of ten seeds, which end between 91 and 97 %),
tool errors from 8 to 1 %, in 9 minutes of one core.

At the end a table compares warm start and best checkpoint on held-out tasks, of combinations used neither in training
nor to choose the checkpoint. The work directory is that of every run (docs/checkpoints.md), with `trajectories/`, which
can be replayed without tools. The same command resumes a run that was stopped.
"""

import json
from pathlib import Path

from absl import flags

from flowgrpo.recipes.agent_config import Config

from .cli import app
from .cli.help import flag_heading
from .cli.recipes import define_recipe, run_command, run_of_flags, train_by_recipe

define_recipe("agent", Config, "runs/agentflow-SEED")
flag_heading("Run")
_DRY = flags.DEFINE_flag(
    flags.Flag(
        name="dry_run",
        default="false",
        parser=flags.EnumParser(["false", "true", "compile"]),
        serializer=flags.ArgumentSerializer(),
        help_string="Print the first prompts and one rollout, and stop; or, as --dry_run=compile, what the programs of "
        "the run take of a device, without weights.",
        boolean=True,  # which may stand without a value
    )
)
flag_heading("Devices and memory")
_MEMORY = flags.DEFINE_string("device_memory", None, "Memory of a device for --dry_run=compile, such as 80GiB or 24GB.")
_TARGET = flags.DEFINE_string("target", None, "Machine that --dry_run=compile compiles for, such as v5e-8 or h100-1.")

app.read_flags(__name__)

import jax

from flowgrpo.planning.cost_model import count_parameters
from flowgrpo.planning.mesh_search import shape_of_model
from flowgrpo.planning.targets import parse_target
from flowgrpo.recipes import agent
from flowgrpo.recipes.dry_runs import hosted_programs, parse_memory, show_programs


def dry_compile(config: Config, folder: Path) -> None:
    """Print what the programs of the run take of a device, as a table and a JSON line."""
    if config.model.model is None:
        with agent.build(config, folder) as setup:
            decoder = setup.model.config
    else:
        decoder = shape_of_model(config.model.model)
    target = None if _TARGET.value is None else parse_target(_TARGET.value)
    memory = None if target is None else target.chip.memory or None
    memory = memory if _MEMORY.value is None else parse_memory(_MEMORY.value, "--device_memory")
    programs = hosted_programs(config, decoder, agent.algorithm_of(config), agent.optimizer_of(config), target)
    print(f"{count_parameters(decoder):,} parameters on {config.devices.mesh or 'one device'}: GiB of one device")
    rows = show_programs(programs, memory, offload=config.devices.offload != "none", target=target)
    print(json.dumps({"parameters": count_parameters(decoder), "mesh": config.devices.mesh, "programs": rows}))


def main() -> None:
    """Train, or look."""
    if _DRY.value != "compile":
        train_by_recipe()
        return
    jax.config.update("jax_platforms", "cpu")  # whatever there is: devices are virtual
    _, config, folder, _ = run_of_flags()
    dry_compile(config, folder)


if __name__ == "__main__":
    run_command(main)
