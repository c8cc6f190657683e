"""Choices of settings and flags. What they name is in modules that import JAX, which no flag should wait for."""

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
HARD_VARIANTS = {"lookup_hard": "lookup", "arithmetic_hard": "arithmetic", "maze_hard": "maze"}
ENVIRONMENTS = ("lookup", "arithmetic", "maze", *HARD_VARIANTS)  # of `recipes.registry`
ENV_IMPORT = "MODULE:FUNCTION, which is called without arguments and returns an fg.Env"
EXTERNAL_ENVIRONMENTS = ("trl", "gymnasium", "textarena", "openenv")  # of `external_envs.worker`
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
TASK_SETS = {  # of `recipes.task_sets`, with their tools
    "word_problems": "calculator",
    "two_hop": "search",
    "reverse_text": "",
    "alphabet_sort": "",
}
PACKAGED_MODELS = ("smollm2", "gemma3")  # of `data.named_models`: small enough for a CPU
BUILTIN_EXAMPLES = "tasks"  # the examples of a built-in task set
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
CHECKPOINT_NAMES = (
    "best",
    "last",
    "start",
)  # of a run: best in validation, the last one, the start of RL
GGUF_TYPES = ("f16", "bf16", "f32", "q8_0")  # of `models.gguf_export`
SPLITS = ("train", "validation", "test")  # of `envs.env`
DTYPES = ("float32", "bfloat16", "float16")
WHOLE_BASE = "whole"
BASE_DTYPES = (
    WHOLE_BASE,
    "int8",
    "nf4",
)  # of the weights under an adapter; the last two are those of `models.quantised`
PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")  # of `models.lora`
ATTENTION = ("auto", "plain", "splash", "flash")  # of `models.attention_kernels`
OFFLOAD = ("none", "host", "disk")  # of `recipes.planner`
