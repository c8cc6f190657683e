"""A whole run in one call, from objects or names: `train`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Unpack

import optax

from flowgrpo.api.choice import Environment, RewardFunction, Subject, TaskSource
from flowgrpo.api.result import RunResult
from flowgrpo.api.settings import Settings, choose_run
from flowgrpo.contracts import Algorithm, Tool
from flowgrpo.gateway.agent_start import ExternalAgent
from flowgrpo.models.config import DecoderConfig
from flowgrpo.models.hf import Model
from flowgrpo.models.lora import LoraConfig
from flowgrpo.training.time_budget import UNLIMITED, TimeBudget


def train(
    env: Environment | None = None,
    *,
    tasks: TaskSource | None = None,
    agent: ExternalAgent | None = None,
    model: str | Path | Model | DecoderConfig | None = None,
    algorithm: str | Algorithm = "flow_grpo",
    optimizer: str | optax.GradientTransformation | None = None,
    reward: RewardFunction | None = None,
    tools: Sequence[Tool | Callable[..., Any]] | None = None,
    lora: int | LoraConfig | None = None,
    folder: str | Path | None = None,
    every: int = 10,
    resume: bool = True,
    loggers: Sequence[str] = (),
    budget: TimeBudget = UNLIMITED,
    on_update: Callable[[dict[str, Any]], object] | None = None,
    **settings: Unpack[Settings],
) -> RunResult:
    """Train a planner in an environment, inside an agent, or on tasks -> the result; the same call resumes a run.

    Give one of: an environment; an agent; tasks with a reward, which are answered in one turn, or with tools by the
    agent system. A pure environment brings its tasks, its reward and the vocabulary of a small planner; everything else
    needs a model.

    Args:
        env: an `fg.Env`, an `fg.TextEnv` class, an `fg.HostEnv`, a function (tokenizer) -> `fg.HostEnv`; or by name:
            lookup, arithmetic, maze, MODULE:NAME, or KIND:SPEC of an external one, such as gymnasium:Taxi-v3.
        tasks: a file (.jsonl, .parquet), reasoning_gym:NAME, or a list of `fg.Task`s or of dicts.
        agent: a command, or a function of a task and a base URL that returns its answer.
        model: a folder, GGUF file, packaged model, hub id, or what `fg.load_model` returns; of a pure environment the
            `fg.models.DecoderConfig` of a small planner.
        algorithm: an `fg.Algorithm`, or its name.
        optimizer: an optax transformation with its learning rate, or a name, with `learning_rate=` among the settings.
        reward: judges outputs: an `fg.Reward`, a function (task, output) -> `fg.RewardResult`, or its MODULE:NAME.
            None: the environment's, or that of each task's domain.
        tools: functions with types and a docstring, or `fg.contracts.Tool`s, of the agent system.
        lora: trains an adapter of this rank, or with these settings; None: all parameters.
        folder: of the run; by default one below runs/, named by environment, algorithm and seed.
        every: updates between validations, each with a checkpoint.
        resume: False deletes an earlier run in the folder.
        loggers: where metrics go too: tensorboard, wandb, trackio.
        budget: time after which the run stops, saved (`fg.training.time_budget("5h")`).
        on_update: called after each update with its metrics and timings.
        settings: of the recipe by name, such as updates, seed, queries, samples, learning_rate, beta, max_tokens. Sizes
            that are not given follow from environment, model and devices.
    """
    subject = Subject(
        env=env,
        tasks=tasks,
        agent=agent,
        model=model,
        algorithm=algorithm,
        optimizer=optimizer,
        reward=reward,
        tools=tools,
        lora=lora,
    )
    choice = choose_run(subject, settings)
    path = Path("runs") / choice.name if folder is None else Path(folder)
    values = choice.recipe.train(
        choice.config,
        path,
        objects=choice.objects,
        every=every,
        resume=resume,
        loggers=loggers,
        budget=budget,
        on_update=on_update,
    )
    return RunResult(path, values, choice.config, choice.objects)
