"""Settings of every run on a host environment: the planner, the choice of tasks, rollouts over one engine.

Each Config has a TypedDict beside it, whose keys are its settings, so that an editor completes keyword arguments.
"""

from dataclasses import dataclass

from flowgrpo.errors import BadInput
from flowgrpo.training.config import TrainingConfig, TrainingSettings, setting
from flowgrpo.training.names import ATTENTION, BASE_DTYPES, DTYPES, OFFLOAD, OPTIMIZERS, PROJECTIONS, WHOLE_BASE

PROMPTS = ("uniform", "hard", "curriculum")


@dataclass(frozen=True, kw_only=True)
class PlannerConfig(TrainingConfig):
    """Settings of the planner: the model, the part of it that is trained, its types, its devices."""

    model: str | None = setting(
        None, "Model folder, GGUF file, smollm2, gemma3, or hub id; none: a small model is made.", "Run"
    )
    chat_template: str | None = setting(
        None, "Chat template for a model without one: a Jinja file, or chatml, gemma, lines, plain.", "Run"
    )
    optimizer: str = setting(
        "adamw",
        "Optimizer: adamw, adamw8bit (8-bit moments), adafactor (factored second moments).",
        "Learning",
        choices=OPTIMIZERS,
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
    watch_seconds: float = setting(
        1800.0,
        "Seconds of one iteration after which a message says what it is waiting for.",
        "Devices and memory",
        at_least=1.0,
        may_change=True,
    )


class PlannerSettings(TrainingSettings, total=False):
    """Settings of the planner, but for `model`, as keyword arguments."""

    chat_template: str | None
    optimizer: str
    lora_rank: int
    lora_alpha: float
    lora_targets: str
    base_dtype: str
    dtype: str
    attention: str
    remat: bool
    mesh: str | None
    offload: str
    watch_seconds: float


@dataclass(frozen=True, kw_only=True)
class ChoiceConfig(TrainingConfig):
    """Settings of how the tasks of an update are chosen."""

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
            # Resolved here, so that a run that is resumed with more updates keeps its curriculum.
            object.__setattr__(self, "curriculum_updates", self.curriculum_updates or max(self.updates, 1))
            return
        for name in ("difficulty", "curriculum_updates"):
            if getattr(self, name) is not None:
                raise BadInput(f"--{name}={getattr(self, name)} needs --prompts=curriculum: nothing else reads it")


class ChoiceSettings(TrainingSettings, total=False):
    """Settings of how the tasks of an update are chosen, as keyword arguments."""

    prompts: str
    difficulty: str | None
    curriculum_updates: int | None


@dataclass(frozen=True, kw_only=True)
class HostedConfig(PlannerConfig):
    """Settings of a run whose environment runs on the host, over one engine."""

    tasks: str | None = setting(None, "Task file (.jsonl, .parquet), or reasoning_gym:NAME; needs --model.", "Run")
    fields: tuple[str, ...] = setting(
        (), "Fields of the task file by their names there, such as query=question,answers=gold.", "Run"
    )
    domain: str | None = setting(
        None, "Domain (and so the reward) of tasks that name none, or one that has no reward.", "Run"
    )
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
    validation_tasks: int = setting(128, "Number of tasks per validation.", "Sizes", at_least=1)
    test_tasks: int = setting(400, "Number of test tasks of the final table.", "Sizes", at_least=1)
    recorded_groups: int = setting(
        4,
        "Number of groups per update whose trajectories are written to trajectories/; 0: none.",
        "Sizes",
        at_least=0,
        was="recorded",
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
    warm_rate: float = setting(3e-3, "Learning rate of imitation.", "Learning", at_least=0.0)
    warm_rows: int = setting(16, "Number of rows per imitation step.", "Learning", at_least=1)
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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_tokens >= self.context_tokens:
            room = f"--context_tokens={self.context_tokens}, which holds both"
            raise BadInput(f"--max_tokens={self.max_tokens} leaves no room for a context within {room}")


class HostedSettings(PlannerSettings, total=False):
    """Settings of a run on a host environment, but for `model` and `tasks`, as keyword arguments."""

    fields: tuple[str, ...]
    domain: str | None
    rendering: str
    queries: int
    samples: int
    max_tokens: int
    context_tokens: int
    validation_tasks: int
    test_tasks: int
    recorded_groups: int
    learning_rate: float
    beta: float
    clip_high: float
    mini_batches: int
    micro_rows: int
    warm_rate: float
    warm_rows: int
    temperature: float
    turn_seconds: float
    group_seconds: float
    slots: int
    prefill_chunk: int
    decode_steps: int
