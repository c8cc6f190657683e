"""Names that settings and flags offer; what they name is in modules that need JAX, which no flag should wait for."""

ALGORITHMS = (  # of `flowgrpo.algorithms`
    "flow_grpo",
    "flow_grpo_released",
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "rloo",
    "reinforce_pp",
    "gigpo",
    "mt_grpo",
    "trloo",
    "kimi",
    "ppo",
    "dpo",
    "opd",
)
HARDER = {"lookup_hard": "lookup", "arithmetic_hard": "arithmetic", "maze_hard": "maze"}
ENVIRONMENTS = ("lookup", "arithmetic", "maze", *HARDER)  # of `recipes.registry`
BY_IMPORT = "MODULE:FUNCTION, which is called without arguments and gives a fg.Env"
OPTIMIZERS = ("adamw", "adamw8bit", "adafactor")  # of `recipes.registry`
STUDIES = (  # of `recipes.studies`
    "credit",
    "statistics",
    "aggregation",
    "clip",
    "kl",
    "group_size",
    "collapse",
    "optimizer",
    "turns",
    "stale",
    "quantised_sampler",
    "imitation",
    "hindsight",
)
ACTION_FORMS = ("lines", "calls", "tool_calls")  # of `agent.action_forms`
TASK_SETS = {  # of `recipes.task_sets`, with the tools of each
    "word_problems": "calculator",
    "two_hop": "search",
    "reverse_text": "",
    "alphabet_sort": "",
}
PACKAGED = ("smollm2", "gemma3")  # of `data.named_models`: small enough for a processor
WITH_THE_TASKS = "tasks"  # the examples that come with a set of tasks
OFFLINE_DOMAINS = ("mathematics", "code", "search", "drawing")  # of `recipes.offline_tasks`
CHECKS = (  # of `recipes.device_checks.suite`
    "environment",
    "logits",
    "ratio",
    "widths",
    "packing",
    "update",
    "determinism",
    "rates",
    "decode",
    "training",
    "quickstart",
)
CHECK_SIZES = ("small", "full")  # of `recipes.device_checks.bench`
WHICH = ("best", "last", "start")  # checkpoints of a run: best in validation, last of all, the start of the training
GGUF_TYPES = ("f16", "bf16", "f32", "q8_0")  # of `models.gguf_export`
SPLITS = ("train", "validation", "test")  # of `envs.env`
DTYPES = ("float32", "bfloat16", "float16")
WHOLE_BASE = "whole"
BASES = (WHOLE_BASE, "int8", "nf4")  # how the weights under an adapter are kept, the last two of `models.quantised`
PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")  # of `models.lora`
ATTENTION = ("auto", "plain", "splash", "flash")  # of `models.attention_kernels`
OFFLOAD = ("none", "host", "disk")  # of `recipes.planner`
