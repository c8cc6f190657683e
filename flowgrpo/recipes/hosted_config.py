"""Settings that all runs on a host environment share: of their planner, of the tasks that come up, of rollouts."""

from dataclasses import dataclass

from flowgrpo.errors import BadInput
from flowgrpo.recipes.names import ATTENTION, BASES, DTYPES, OFFLOAD, OPTIMIZERS, PROJECTIONS, WHOLE_BASE
from flowgrpo.run.config import TrainingConfig, setting

PROMPTS = ("uniform", "hard", "curriculum")


@dataclass(frozen=True, kw_only=True)
class PlannerConfig(TrainingConfig):
    """Settings of a planner that is a model of its own: what is trained of it, in which type, on which devices."""

    model: str | None = setting(
        None, "Model folder, GGUF file, smollm2, gemma3, hub id; none: a small one is made.", "What is run"
    )
    chat_template: str | None = setting(
        None, "Of a model without one: a file of Jinja, or chatml, gemma, lines, plain.", "What is run"
    )
    optimizer: str = setting("adamw", "What remembers gradients.", "Learning", choices=OPTIMIZERS)
    lora_rank: int = setting(0, "Rank of an adapter; 0 trains all parameters.", "Learning", at_least=0)
    lora_alpha: float = setting(32.0, "Scale of an adapter, times its rank.", "Learning", at_least=0.0)
    lora_targets: str = setting(",".join(PROJECTIONS), "Projections that an adapter changes, by commas.", "Learning")
    base: str = setting(
        WHOLE_BASE, "How the frozen weights under an adapter are kept.", "Devices and memory", choices=BASES
    )
    dtype: str = setting("float32", "What the weights compute in.", "Devices and memory", choices=DTYPES)
    attention: str = setting(
        "auto", "What computes attention over whole rows; by platform.", "Devices and memory", choices=ATTENTION
    )
    remat: bool = setting(
        False, "Compute layers again for the gradient, which takes less memory.", "Devices and memory"
    )
    mesh: str | None = setting(
        None,
        "How devices are arranged for learning, such as data=2,fsdp=4; one device by default.",
        "Devices and memory",
    )
    offload: str = setting(
        "none", "Where models are that a stage doesn't use.", "Devices and memory", choices=OFFLOAD, may_differ=True
    )
    watch_seconds: float = setting(
        1800.0, "Of an iteration, until it says what it waits for.", "Devices and memory", at_least=1.0, may_differ=True
    )


@dataclass(frozen=True, kw_only=True)
class ChoiceConfig(TrainingConfig):
    """Settings of how tasks are chosen."""

    prompts: str = setting(
        "uniform", "Which tasks come up: all, those that fail, easy ones first.", "What is run", choices=PROMPTS
    )
    difficulty: str | None = setting(
        None, "Field of a task's metadata: a number, for --prompts=curriculum.", "What is run"
    )
    curriculum_updates: int | None = setting(
        None, "Length of the curriculum; --updates by default.", "What is run", at_least=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompts == "curriculum":
            if not self.difficulty:
                raise BadInput(
                    "--prompts=curriculum needs --difficulty: a field of the tasks' metadata that holds a number"
                )
            # Resolved here, so that a run that is made longer keeps its curriculum.
            object.__setattr__(self, "curriculum_updates", self.curriculum_updates or max(self.updates, 1))
            return
        for name in ("difficulty", "curriculum_updates"):
            if getattr(self, name) is not None:
                raise BadInput(f"--{name}={getattr(self, name)} needs --prompts=curriculum: nothing else reads it")


@dataclass(frozen=True, kw_only=True)
class HostedConfig(PlannerConfig):
    """Settings of a run whose environment lives on the host, over one engine."""

    tasks: str | None = setting(
        None, "Task file (.jsonl, .parquet) or reasoning_gym:NAME; with --model.", "What is run"
    )
    fields: tuple[str, ...] = setting(
        (), "Names of fields in the task file: query=question,answers=gold.", "What is run"
    )
    domain: str | None = setting(None, "The domain of tasks that name none, or one that nobody judges.", "What is run")
    rendering: str = setting(
        "fresh", "Render each context afresh, or append to one.", None, choices=("fresh", "append")
    )
    queries: int = setting(32, "Queries of an update.", "Sizes", at_least=1)
    samples: int = setting(8, "Trajectories of a query.", "Sizes", at_least=2)
    max_tokens: int = setting(40, "New tokens of an action.", "Sizes", at_least=1)
    context_tokens: int = setting(256, "Tokens of a context with its action.", "Sizes", at_least=2)
    validation_tasks: int = setting(128, "Tasks of each validation.", "Sizes", at_least=1)
    test_tasks: int = setting(400, "Test tasks of the final table.", "Sizes", at_least=1)
    recorded: int = setting(4, "Groups of an update whose trajectories are written.", "Sizes", at_least=0)
    learning_rate: float = setting(1e-3, "Of the reinforcement phase.", "Learning", at_least=0.0)
    beta: float = setting(0.0, "Weight of the KL term; at 0 it is not measured.", "Learning", at_least=0.0)
    clip_high: float = setting(0.28, "Upper bound of the ratio, above 1.", "Learning", at_least=0.0)
    mini_batches: int = setting(1, "Gradient steps of an update.", "Learning", at_least=1)
    micro_rows: int = setting(8, "Rows that go through the model together.", "Learning", at_least=1)
    warm_rate: float = setting(3e-3, "Learning rate of the imitation.", "Learning", at_least=0.0)
    warm_rows: int = setting(16, "Rows of a step of imitation.", "Learning", at_least=1)
    temperature: float = setting(1.0, "Of the planner's words.", "Sampling", at_least=0.0)
    turn_seconds: float = setting(60.0, "Of what follows one action of the planner.", "Sampling", at_least=0.1)
    group_seconds: float = setting(
        300.0, "Of a group, until it goes on without what is late.", "Sampling", at_least=0.1
    )
    slots: int = setting(64, "Requests that decode together.", "Devices and memory", at_least=2)
    chunk: int = setting(32, "Tokens of a prompt that enter the cache together.", "Devices and memory", at_least=1)
    steps: int = setting(8, "Tokens that are decoded between two looks at the queue.", "Devices and memory", at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_tokens >= self.context_tokens:
            room = f"--context_tokens={self.context_tokens}, which holds both"
            raise BadInput(f"--max_tokens={self.max_tokens} leaves no room for a context within {room}")
