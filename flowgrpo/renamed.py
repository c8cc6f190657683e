"""Names of an earlier version that are still read, and never written: settings, metrics and keys of JSON records.

A setting also has its old name where it is declared (`setting(..., was="old_name")`), from which its flag follows.
"""

from collections.abc import Mapping
from typing import Any

METRICS: dict[str, str] = {  # old -> new, of metrics.jsonl and timings.jsonl
    "credit_seconds": "advantages_seconds",
    "obedience": "format_compliance",
}
RECORD_KEYS: dict[str, str] = {  # old -> new, of recorded trajectories (one JSON object a line)
    "appends": "extends_context",
    "begins": "starts_context",
    "begun": "partial_action",
    "lens": "effect_counts",
    "said": "context",
    "sampled": "completion",
    "scored": "reward_result",
}
SETTINGS: dict[str, str] = {  # old -> new, of run.json and the settings that other files of a run depend on
    "agents": "concurrent_agents",
    "base": "base_dtype",
    "budget": "segment_tokens",
    "chunk": "prefill_chunk",
    "d": "model_dim",
    "decay": "decay_to",
    "doubted": "judge_false_negatives",
    "episodes": "concurrent_episodes",
    "exam_turns": "eval_turns",
    "handed_over": "weight_transfer",
    "head": "head_dim",
    "learn_from": "loss_versions",
    "overlooked": "judge_false_positives",
    "passages": "search_top_k",
    "recorded": "recorded_groups",
    "right": "imitated_accuracy",
    "room": "worker_capacity",
    "sampled_by": "sampling_server",
    "served_folder": "weight_folder",
    "spare": "extra_groups",
    "steps": "decode_steps",
}
REMOVED: dict[str, tuple[str, ...]] = {  # settings that a recipe had and never read
    "own_env": ("domains", "demonstrations", "warm_rate", "warm_rows", "warm_steps"),
}


def current_names(values: Mapping[str, Any], table: Mapping[str, str]) -> dict[str, Any]:
    """The same values, each under its current name."""
    return {table.get(name, name): value for name, value in values.items()}
