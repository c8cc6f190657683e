"""Which recipe, settings and objects the arguments of `train` and `Trainer` stand for.

    an `fg.Env`, or the name of a built-in one                              -> pure
    an `fg.TextEnv` class, an `fg.HostEnv`, a function of the tokenizer,
    or KIND:SPEC, such as gymnasium:Taxi-v3; tasks with a reward alone      -> own_env
    an agent: a command, or a function of a task and a base URL             -> own_agent
    tasks with tools                                                        -> agent

Names stand in the settings, and objects beside them (`recipes.recipe.Objects`). All is checked here, before anything is
read from the disk but tasks, and before anything compiles.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import optax

from flowgrpo.contracts import Algorithm, Env, HostEnv, Reward, RewardResult, Tool
from flowgrpo.data.task_files import to_tasks
from flowgrpo.data.tasks import Tasks
from flowgrpo.envs.text import TextEnv, single_turn, to_reward
from flowgrpo.files import import_named
from flowgrpo.gateway.agent_start import ExternalAgent
from flowgrpo.models.config import DecoderConfig
from flowgrpo.models.hf import Model
from flowgrpo.models.lora import LoraConfig
from flowgrpo.recipes.own_env import NO_TASKS_YET
from flowgrpo.recipes.recipe import Objects, Recipe, find_recipe, name_of
from flowgrpo.recipes.registry import ENVIRONMENTS
from flowgrpo.tools.schema import tool
from flowgrpo.training.config import RunConfig, flat_settings
from flowgrpo.training.names import EXTERNAL_ENVIRONMENTS
from flowgrpo.types import JSON, BadInput, Task

Environment = Env | HostEnv | type[TextEnv] | Callable[..., HostEnv] | str
TaskSource = str | Path | Tasks | Sequence[Task | Mapping[str, JSON]]
RewardFunction = Reward | Callable[[Task, str], RewardResult] | str
ENV_FORMS = "an fg.Env, an fg.TextEnv class, an fg.HostEnv, a function (tokenizer) -> fg.HostEnv, or a name"


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is trained, and by what, as a script gives it; see `train`."""

    env: Environment | None = None
    tasks: TaskSource | None = None
    agent: ExternalAgent | None = None
    model: str | Path | Model | DecoderConfig | None = None
    algorithm: str | Algorithm | None = None
    optimizer: str | optax.GradientTransformation | None = None
    reward: RewardFunction | None = None
    tools: Sequence[Tool | Callable[..., Any]] | None = None
    lora: int | LoraConfig | None = None


class Choice(NamedTuple):
    """A recipe with its settings and objects."""

    recipe: Recipe
    config: RunConfig
    objects: Objects

    @property
    def name(self) -> str:
        """A short name for the folder of a run."""
        objects, flat = self.objects, flat_settings(self.config.to_json())
        subject = objects.env or objects.agent or flat.get("env") or flat.get("agent") or flat.get("tasks") or "tasks"
        name = getattr(subject, "name", None) or getattr(subject, "__name__", None) or str(subject)
        algorithm = flat["algorithm"] if objects.algorithm is None else objects.algorithm.name
        words = f"{Path(name).stem if '/' in name else name}-{algorithm}-{flat['seed']}"
        return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in words)


def choose(subject: Subject, settings: Mapping[str, Any], *, needs_tasks: bool = True) -> Choice:
    """The recipe, settings and objects of a run; raises `BadInput` for what is missing, or contradicts itself.

    Args:
        subject: what is trained.
        settings: of the recipe, by name.
        needs_tasks: whether an environment that needs tasks must have some already.
    """
    if subject.env is not None and subject.agent is not None:
        raise BadInput("env= and agent= are both given: an agent brings its own surroundings, so leave one of them out")
    env, objects, chosen = _open_env(subject.env), {}, dict(settings)
    if isinstance(env, Env):
        recipe = _pure(subject, env, objects, chosen)
    elif subject.agent is not None:
        recipe = find_recipe("own_agent")
        if isinstance(subject.agent, str):
            chosen["agent"] = subject.agent
        else:
            objects["agent"] = subject.agent
            chosen["agent"] = name_of(subject.agent)
    elif env is None and subject.tools:
        recipe = find_recipe("agent")
        objects["tools"] = tuple(tool(x) if inspect.isfunction(x) else x for x in subject.tools)
    else:
        if env is None and subject.tasks is None:
            raise BadInput(f"there is nothing to train on: give env= ({ENV_FORMS}), agent=, or tasks= with a reward=")
        recipe = find_recipe("own_env")
        if isinstance(env, str):
            chosen["env"] = env
        else:
            objects["env"] = single_turn() if env is None else env
            chosen["env"] = name_of(objects["env"])
    if recipe.name != "agent" and subject.tools:
        fix = "list them in its attribute tools" if recipe.name == "own_env" else "give them to it in your code"
        raise BadInput(f"tools= is for tasks without an environment: {fix}, and leave out tools=")
    if recipe.name != "pure":
        _language_model(subject, objects, chosen, needs_tasks=needs_tasks)
    for kind in ("algorithm", "optimizer"):
        value = getattr(subject, kind)
        if isinstance(value, str):
            chosen[kind] = value
        elif value is not None:
            objects[kind] = _checked(kind, value, Algorithm if kind == "algorithm" else optax.GradientTransformation)
    return Choice(recipe, recipe.preset(**chosen), Objects(**objects))


def _open_env(env: Any) -> Any:
    """The environment, imported if it is named by MODULE:NAME; KIND:SPEC of an external one stays a name."""
    if isinstance(env, str):
        if env in ENVIRONMENTS:
            return ENVIRONMENTS[env]()
        kind, _, spec = env.partition(":")
        if kind in EXTERNAL_ENVIRONMENTS:
            return env
        if not spec:
            kinds = ", ".join(f"{kind}:…" for kind in EXTERNAL_ENVIRONMENTS)
            raise BadInput(f"environment {env!r} is unknown: give {', '.join(ENVIRONMENTS)}, MODULE:NAME, or {kinds}")
        value = import_named(env, "environment")
        return _open_env(value() if inspect.isfunction(value) and not inspect.signature(value).parameters else value)
    if isinstance(env, TextEnv):
        raise BadInput(f"env is an instance of {type(env).__name__}: give the class, since each episode makes its own")
    if env is None or isinstance(env, Env | HostEnv):
        return env
    if inspect.isclass(env) and not issubclass(env, TextEnv):
        raise BadInput(f"env is the class {env.__name__}, which is no fg.TextEnv: give {ENV_FORMS}")
    if not callable(env):
        raise BadInput(f"env is {env!r:.80}: give {ENV_FORMS}")
    return env


def _pure(subject: Subject, env: Env, objects: dict[str, Any], chosen: dict[str, Any]) -> Recipe:
    """The recipe of a pure environment, which brings tasks, rewards and a vocabulary of its own."""
    for kind in ("tasks", "reward", "lora"):
        if getattr(subject, kind) is not None:
            raise BadInput(f"{env.name} is a pure environment, which has its own tasks and rewards: leave out {kind}=")
    if isinstance(subject.model, str | Path | Model):
        raise BadInput(
            f"{env.name} is a pure environment with a vocabulary of its own, which model={subject.model!r:.60} doesn't "
            "speak: leave out model=, or give an fg.models.DecoderConfig as the shape of a small one"
        )
    if subject.model is not None:
        objects["model"] = _checked("model", subject.model, DecoderConfig)
    if isinstance(subject.env, str) and subject.env in ENVIRONMENTS:
        chosen["env"] = subject.env
    else:
        objects["env"] = env
        chosen["env"] = env.name if env.name in ENVIRONMENTS else f"env:{env.name}"
    return find_recipe("pure")


def _language_model(subject: Subject, objects: dict[str, Any], chosen: dict[str, Any], *, needs_tasks: bool) -> None:
    """Fill in the model, tasks and reward of a run on a language model."""
    model, env = subject.model, objects.get("env")
    if model is None:
        raise BadInput(
            "model= is missing: give a model folder, a hub id, a GGUF file, a packaged model or an fg.models.Model"
        )
    if isinstance(model, str | Path):
        chosen["model"] = str(model)
    else:
        objects["model"] = _checked("model", model, Model)
        chosen["model"] = name_of(model)
    own_lora = model.lora if isinstance(model, Model) else None
    if own_lora is not None and subject.lora is not None:
        raise BadInput("the model has an adapter already, and lora= would give it another: leave out one of them")
    lora = LoraConfig(rank=subject.lora) if isinstance(subject.lora, int) else subject.lora or own_lora
    if lora is not None:
        if lora.rslora:  # no setting of a run has it, so neither would an export
            alpha = lora.alpha * lora.rank**0.5
            raise BadInput(
                f"lora has rslora=True, which a run can't store: give alpha={alpha:g} without it, for the same scale"
            )
        chosen |= {"lora_rank": lora.rank, "lora_alpha": lora.alpha, "lora_targets": ",".join(lora.targets)}
    is_text = inspect.isclass(env) and issubclass(env, TextEnv)
    if isinstance(subject.tasks, str | Path):
        chosen["tasks"] = str(subject.tasks)
    elif subject.tasks is not None:
        objects["tasks"] = to_tasks(subject.tasks, any_fields=True)
    elif needs_tasks and is_text and env is not None:
        raise BadInput(f"the environment {getattr(env, '__name__', '')} has no tasks: give tasks=, a file or a list")
    elif is_text:
        objects["tasks"] = NO_TASKS_YET
    if isinstance(subject.reward, str):
        chosen["reward"] = subject.reward
    elif subject.reward is not None:
        objects["reward"] = to_reward(subject.reward)


def _checked(kind: str, value: Any, expected: type) -> Any:
    """The value, if it has the expected type."""
    if isinstance(value, expected):
        return value
    if inspect.isfunction(value):
        forms = {
            "algorithm": "call it if it makes one, as in fg.flow_grpo(); put @fg.algorithm above an advantage function",
            "optimizer": "call it, as in fg.adamw(1e-5)",
        }
        if kind in forms:
            raise BadInput(f"{kind}={value.__name__} is no {expected.__name__}, but a function: {forms[kind]}")
    article = "an" if expected.__name__[0] in "AEIOU" else "a"
    raise BadInput(f"{kind}={value!r:.80} is no {expected.__name__}: give {article} {expected.__name__}, or its name")
