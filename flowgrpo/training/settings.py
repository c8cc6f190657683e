"""Sections of every run on a host environment: the model, its tasks, rollouts over one engine, the learner, devices.

Beside a Config there is a TypedDict whose keys are its settings, so that an editor completes keyword arguments.
"""

from dataclasses import dataclass
from typing import TypedDict

from flowgrpo.errors import BadInput
from flowgrpo.training.config import RunConfig, RunSection, RunSettings, Section, setting
from flowgrpo.training.names import ATTENTION, BASE_DTYPES, DTYPES, OFFLOAD, OPTIMIZERS, PROJECTIONS, WHOLE_BASE

PROMPTS = ("uniform", "hard", "curriculum")


@dataclass(frozen=True, kw_only=True)
class HostedRunSection(RunSection):
    """How long a run is, and what it records."""

    updates: int = setting(150, "Number of RL updates; 0 stops after imitation.", "Sizes", at_least=0, may_change=True)
    recorded_groups: int = setting(
        4,
        "Number of groups per update whose trajectories are written to trajectories/; 0: none.",
        "Sizes",
        at_least=0,
        was="recorded",
    )
    watch_seconds: float = setting(
        1800.0,
        "Seconds of one iteration after which a message says what it is waiting for.",
        "Devices and memory",
        at_least=1.0,
        may_change=True,
    )


@dataclass(frozen=True, kw_only=True)
class ModelSection(Section):
    """The model, the part of it that is trained, its types and kernels."""

    model: str | None = setting(
        None, "Model folder, GGUF file, smollm2, gemma3, or hub id; none: a small model is made.", "Run"
    )
    chat_template: str | None = setting(
        None, "Chat template for a model without one: a Jinja file, or chatml, gemma, lines, plain.", "Run"
    )
    lora_rank: int = setting(0, "Rank of the LoRA adapter; 0 trains all parameters.", "Learning", at_least=0)
    lora_alpha: float = setting(32.0, "LoRA alpha: the adapter is scaled by alpha / rank.", "Learning", at_least=0.0)
    lora_targets: str = setting(
        ",".join(PROJECTIONS), "Projections that the adapter changes, separated by commas.", "Learning"
    )
    base_dtype: str = setting(
        WHOLE_BASE,
        "Frozen weights under an adapter: whole (in --dtype), int8, or nf4.",
        "Devices and memory",
        choices=BASE_DTYPES,
        was="base",
    )
    dtype: str = setting(
        "float32",
        "Type of weights and activations in the forward pass; without an adapter, float32 master weights are trained.",
        "Devices and memory",
        choices=DTYPES,
    )
    attention: str = setting(
        "auto",
        "Attention kernel for whole rows: plain (XLA), splash (TPU), flash (GPU), or auto, which follows the platform.",
        "Devices and memory",
        choices=ATTENTION,
    )
    remat: bool = setting(
        False,
        "Recompute each layer in the backward pass (gradient checkpointing), to save memory.",
        "Devices and memory",
    )


@dataclass(frozen=True, kw_only=True)
class TasksSection(Section):
    """The file of tasks."""

    tasks: str | None = setting(None, "Task file (.jsonl, .parquet), or reasoning_gym:NAME; needs --model.", "Run")
    fields: tuple[str, ...] = setting(
        (), "Fields of the task file by their names there, such as query=question,answers=gold.", "Run"
    )
    domain: str | None = setting(
        None, "Domain (and so the reward) of tasks that name none, or one that has no reward.", "Run"
    )


@dataclass(frozen=True, kw_only=True)
class ChosenTasksSection(TasksSection):
    """Tasks, and how those of an update are chosen."""

    prompts: str = setting(
        "uniform",
        "Choice of training tasks: uniform, hard (low success rate first), or curriculum (easy tasks first).",
        "Run",
        choices=PROMPTS,
    )
    difficulty: str | None = setting(
        None, "Field of the task metadata with the difficulty, a number; for --prompts=curriculum.", "Run"
    )
    curriculum_updates: int | None = setting(
        None,
        "Length of the curriculum in updates; all tasks are open after half of it; --updates by default.",
        "Run",
        at_least=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompts == "curriculum":
            if not self.difficulty:
                raise BadInput(
                    "--prompts=curriculum needs --difficulty: a field of the tasks' metadata that holds a number"
                )
            return
        for name in ("difficulty", "curriculum_updates"):
            if getattr(self, name) is not None:
                raise BadInput(f"--{name}={getattr(self, name)} needs --prompts=curriculum: nothing else reads it")


@dataclass(frozen=True, kw_only=True)
class RolloutSection(Section):
    """Rollouts of an update: how many, how long, how they are sampled."""

    rendering: str = setting(
        "fresh",
        "Contexts of a trajectory: fresh (each turn's context is rendered anew), or append (one growing conversation).",
        None,
        choices=("fresh", "append"),
    )
    queries: int = setting(32, "Number of queries (groups) per update.", "Sizes", at_least=1)
    samples: int = setting(8, "Number of trajectories per query (group size).", "Sizes", at_least=2)
    max_tokens: int = setting(40, "Maximum number of tokens of an action.", "Sizes", at_least=1)
    context_tokens: int = setting(
        256, "Maximum number of tokens of a context, its actions included.", "Sizes", at_least=2
    )
    temperature: float = setting(1.0, "Sampling temperature of the planner; 0: greedy.", "Sampling", at_least=0.0)
    turn_seconds: float = setting(
        60.0, "Timeout of a turn's tools, other roles and environment, in seconds.", "Sampling", at_least=0.1
    )
    group_seconds: float = setting(
        300.0,
        "Timeout of a group in seconds; its late trajectories are aborted and take no part in the update.",
        "Sampling",
        at_least=0.1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_tokens >= self.context_tokens:
            room = f"--context_tokens={self.context_tokens}, which holds both"
            raise BadInput(f"--max_tokens={self.max_tokens} leaves no room for a context within {room}")


@dataclass(frozen=True, kw_only=True)
class LearnerSection(Section):
    """The loss of an update, its batches, and its optimizer."""

    optimizer: str = setting(
        "adamw",
        "Optimizer: adamw, adamw8bit (8-bit moments), adafactor (factored second moments).",
        "Learning",
        choices=OPTIMIZERS,
    )
    learning_rate: float = setting(1e-3, "Learning rate of RL.", "Learning", at_least=0.0)
    beta: float = setting(
        0.0, "KL coefficient; at 0 the reference is not scored and the KL is not measured.", "Learning", at_least=0.0
    )
    clip_high: float = setting(
        0.28, "Upper clip width: ratios are clipped at 1 + clip_high; 0: the algorithm's own.", "Learning", at_least=0.0
    )
    mini_batches: int = setting(1, "Number of gradient steps per update.", "Learning", at_least=1)
    micro_rows: int = setting(8, "Number of rows per forward and backward pass (micro-batch).", "Learning", at_least=1)


@dataclass(frozen=True, kw_only=True)
class WarmStartSection(Section):
    """Imitation before reinforcement learning."""

    warm_steps: int = setting(0, "Maximum number of imitation steps before RL; 0: none.", "Learning", at_least=0)
    warm_rate: float = setting(3e-3, "Learning rate of imitation.", "Learning", at_least=0.0)
    warm_rows: int = setting(16, "Number of rows per imitation step.", "Learning", at_least=1)


@dataclass(frozen=True, kw_only=True)
class EvaluationSection(Section):
    """Sizes of evaluations."""

    validation_tasks: int = setting(128, "Number of tasks per validation.", "Sizes", at_least=1)
    test_tasks: int = setting(400, "Number of test tasks of the final table.", "Sizes", at_least=1)


@dataclass(frozen=True, kw_only=True)
class DevicesSection(Section):
    """Devices and their memory: the mesh of the update, and the engine that samples."""

    mesh: str | None = setting(
        None, "Device mesh of the update, such as data=2,fsdp=4; one device by default.", "Devices and memory"
    )
    offload: str = setting(
        "none",
        "Where a stage keeps the models that it does not use: none (on the device), host (memory), or disk.",
        "Devices and memory",
        choices=OFFLOAD,
        may_change=True,
    )
    slots: int = setting(64, "Number of engine slots: requests that decode together.", "Devices and memory", at_least=2)
    prefill_chunk: int = setting(
        32, "Number of prompt tokens per prefill step.", "Devices and memory", at_least=1, was="chunk"
    )
    decode_steps: int = setting(
        8,
        "Number of tokens per slot that the engine decodes before it looks at new requests.",
        "Devices and memory",
        at_least=1,
        was="steps",
    )


@dataclass(frozen=True, kw_only=True)
class HostedConfig(RunConfig):
    """Sections of every run whose environment runs on the host, over one engine."""

    run: HostedRunSection
    model: ModelSection
    tasks: TasksSection
    rollout: RolloutSection
    learner: LearnerSection
    evaluation: EvaluationSection
    devices: DevicesSection


class HostedSettings(RunSettings, total=False):
    """Settings of a run on a host environment, but for `model` and `tasks`, as keyword arguments."""

    updates: int
    recorded_groups: int
    watch_seconds: float
    chat_template: str | None
    lora_rank: int
    lora_alpha: float
    lora_targets: str
    base_dtype: str
    dtype: str
    attention: str
    remat: bool
    fields: tuple[str, ...]
    domain: str | None
    rendering: str
    queries: int
    samples: int
    max_tokens: int
    context_tokens: int
    temperature: float
    turn_seconds: float
    group_seconds: float
    optimizer: str
    learning_rate: float
    beta: float
    clip_high: float
    mini_batches: int
    micro_rows: int
    validation_tasks: int
    test_tasks: int
    mesh: str | None
    offload: str
    slots: int
    prefill_chunk: int
    decode_steps: int


class WarmStartSettings(TypedDict, total=False):
    """Settings of imitation before reinforcement learning, as keyword arguments."""

    warm_steps: int
    warm_rate: float
    warm_rows: int
