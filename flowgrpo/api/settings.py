"""Settings of `train` and `Trainer` by name, and those that follow from environment, model and devices."""

import inspect
from collections.abc import Mapping
from typing import Any, TypedDict

import jax

from flowgrpo.api.choice import Choice, Subject, choose
from flowgrpo.contracts import Env
from flowgrpo.envs.text import TextEnv
from flowgrpo.recipes.own_env_config import sizes_of_env
from flowgrpo.recipes.registry import ENVIRONMENTS
from flowgrpo.types import BadInput

# A language model on a CPU: float32, short contexts, few trajectories. Elsewhere the recipes' own defaults count.
ON_CPU: dict[str, Any] = {
    "dtype": "float32",
    "remat": False,
    "max_tokens": 64,
    "context_tokens": 1024,
    "queries": 8,
    "samples": 8,
    "temperature": 1.0,
    "micro_rows": 1,
    "prefill_chunk": 32,
    "decode_steps": 4,
    "validation_tasks": 32,
    "test_tasks": 64,
    "learning_rate": 1e-5,
    "beta": 0.0,
    "clip_high": 0.28,
}
OF_OBJECTS = {  # settings of what is given by name, which an object has itself
    "algorithm": ("beta", "clip_high", "entropy_bonus", "gamma", "lam", "correction"),
    "optimizer": ("learning_rate", "decay_to", "decay_updates"),
    "lora": ("lora_rank", "lora_alpha", "lora_targets"),
}
MAX_SLOTS = 64  # of an engine on a CPU
WITH_ADAPTER = {"learning_rate": 1e-4}


class Settings(TypedDict, total=False):
    """Settings of all recipes by name, as keyword arguments of `train` and `Trainer`; each recipe takes those it has.

    Their meaning, defaults and bounds are in the Config of the recipe, and in the `--help` of its command.
    """

    seed: int
    control: str
    updates: int
    warm_steps: int
    teacher: str | None
    model_dim: int
    layers: int
    head_dim: int
    queries: int
    samples: int
    oversample: int
    test_tasks: int
    learning_rate: float
    mini_batches: int
    epochs: int
    beta: float
    clip_high: float
    entropy_bonus: float
    decay_to: float
    decay_updates: int
    warm_rate: float
    warm_rows: int
    critic: str
    critic_rate: float
    gamma: float
    lam: float
    temperature: float
    mesh: str | None
    chat_template: str | None
    base_dtype: str
    dtype: str
    attention: str
    remat: bool
    offload: str
    watch_seconds: float
    fields: tuple[str, ...]
    domain: str | None
    rendering: str
    max_tokens: int
    context_tokens: int
    validation_tasks: int
    recorded_groups: int
    micro_rows: int
    turn_seconds: float
    group_seconds: float
    slots: int
    prefill_chunk: int
    decode_steps: int
    prompts: str
    difficulty: str | None
    curriculum_updates: int | None
    domains: str
    turns: int
    eval_turns: int
    demonstrations: int
    correction: float
    sampling_server: str | None
    weight_transfer: str
    weight_folder: str | None
    loss_versions: str
    corpus: str | None
    mcp: tuple[str, ...]
    actions: str
    examples: str
    drop_examples: bool
    warm_start: str
    warm_temperature: float
    instructions: str
    executor: str
    verifier: str
    generator: str
    analyst: str
    memory_tokens: int
    search_top_k: int
    tool_seconds: float
    concurrent_agents: int | None
    agent_seconds: float
    silent_seconds: float
    retries: int
    python: str
    concurrent_episodes: int | None
    env_seconds: float


def derived_settings(subject: Subject, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The given settings, with those that follow from environment, model and devices where they are not given."""
    env = subject.env
    if isinstance(env, Env) or (isinstance(env, str) and env in ENVIRONMENTS):
        return dict(settings)
    derived: dict[str, Any] = {}
    if jax.default_backend() == "cpu" and subject.agent is None and not subject.tools:
        derived |= ON_CPU
        counts = {name: int(settings.get(name, ON_CPU[name])) for name in ("queries", "samples")}
        derived["slots"] = max(min(counts["queries"] * counts["samples"], MAX_SLOTS), 2)
        if subject.lora is not None:
            derived |= WITH_ADAPTER
    if inspect.isclass(env) and issubclass(env, TextEnv):
        if "max_turns" in settings:
            raise BadInput(f"max_turns is no setting: write it into the class, as an attribute of {env.__name__}")
        derived |= sizes_of_env(env)
    return derived | dict(settings)


def choose_run(subject: Subject, settings: Mapping[str, Any], *, needs_tasks: bool = True) -> Choice:
    """The recipe, settings and objects of what a script gives, with the settings that follow from it.

    Raises `BadInput` for a setting that an object of the subject has, too, since only one of the two can count.
    """
    for kind, names in OF_OBJECTS.items():
        value = getattr(subject, kind)
        for name in names:
            if name in settings and value is not None and not isinstance(value, str):
                raise BadInput(
                    f"{name}={settings[name]!r} contradicts {kind}=, an object that has its own: give one of the two"
                )
    return choose(subject, derived_settings(subject, settings), needs_tasks=needs_tasks)
