"""What a kind of run is: one `Recipe` object in one module, which everything that lists recipes reads.

    recipe = find_recipe("pure")                     # or "my_module", or "my_module:MINE"
    config = recipe.preset("maze", updates=50)
    result = recipe.train(config, "runs/maze")
    best, report = recipe.evaluate(config, "runs/maze", tasks=500)

A new recipe is one module with a `RECIPE`, anywhere. `Objects` hand a run what no setting can name: an environment, an
agent, an algorithm.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields
from functools import partial
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from flowgrpo.errors import BadInput
from flowgrpo.files import import_named
from flowgrpo.training.config import RunConfig
from flowgrpo.training.next_steps import command
from flowgrpo.training.time_budget import UNLIMITED, TimeBudget

if TYPE_CHECKING:  # these import JAX, which flags should not wait for
    import optax

    from flowgrpo.contracts import Algorithm, Env, HostEnv, Reward, Tool
    from flowgrpo.data.tasks import Tasks
    from flowgrpo.data.tokenizer import ChatTokenizer
    from flowgrpo.gateway.agent_start import ExternalAgent
    from flowgrpo.models.config import DecoderConfig
    from flowgrpo.models.hf import Model
    from flowgrpo.recipes.planner_reader import PlannerReader
    from flowgrpo.training.session import TestReport, Trainable
    from flowgrpo.types import Metrics, Task

FOLDER = Path(__file__).parent
DECLARED = re.compile(r"^RECIPE\b.*= ", re.MULTILINE)
RECIPE_IMPORT = "a module of yours that has a RECIPE, or MODULE:NAME"


# Objects ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Objects:
    """Objects of a run that replace what its settings name; None: the settings decide.

    A run is resumed with the same objects: `run.json` has their names, and a run with others is refused.

    Args:
        env: an `fg.Env`; for a run with a model an `fg.HostEnv`, or a function of the tokenizer that returns one.
        agent: a command, or a function of a task and a base URL that returns its answer.
        tasks: tasks of all splits, which are divided by a hash of their ids.
        model: the planner's start, or the shape of a small one.
        algorithm: an `fg.Algorithm`.
        optimizer: an optax transformation with its learning rate.
        reward: an `fg.Reward`.
        tools: all tools of the agent system.
    """

    env: "Env | HostEnv | Callable[[ChatTokenizer], HostEnv] | None" = None
    agent: "ExternalAgent | None" = None
    tasks: "Tasks | Sequence[Task] | None" = None
    model: "Model | DecoderConfig | None" = None
    algorithm: "Algorithm | None" = None
    optimizer: "optax.GradientTransformation | None" = None
    reward: "Reward | None" = None
    tools: "Sequence[Tool] | None" = None

    def given(self) -> dict[str, Any]:
        """The objects that are not None, by what they replace."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}

    def names(self) -> dict[str, str]:
        """A name of each object, as `run.json` stores it, by what it replaces."""
        return {kind: name_of(value) for kind, value in self.given().items()}

    def check(self, recipe: str, *kinds: str) -> None:
        """Raise `BadInput` unless all objects are of these kinds, which a recipe can use."""
        for kind in self.given():
            if kind not in kinds:
                article = "an" if kind[0] in "aeiou" else "a"
                part = kind if kind in ("tasks", "tools") else f"{article} {kind}"
                raise BadInput(
                    f"the recipe {recipe} has no place for {part}: leave out {kind}= "
                    f"({'it takes ' + ', '.join(kinds) if kinds else 'it takes no objects'})"
                )


NO_OBJECTS = Objects()


def name_of(value: Any) -> str:
    """A name of an object for `run.json`: MODULE:NAME of a function or class, else its kind and its own name."""
    kind = type(value).__name__
    if kind == "str":
        return value
    if kind in ("list", "tuple"):
        if all(isinstance(item, str) for item in value):  # a command
            return " ".join(value)
        if all(hasattr(item, "schema") for item in value):  # tools
            return ",".join(item.name for item in value)
    if kind in ("list", "tuple", "Tasks"):
        return f"tasks:{_digest(*value)}"
    if kind == "Model":  # by its shape, since weights are long
        return f"Model:{_digest(sorted(value.hf_config.items(), key=str))}"
    if kind == "DecoderConfig":
        return f"DecoderConfig:{_digest(value)}"
    if isinstance(name := getattr(value, "name", None), str):  # an environment, an algorithm
        return f"{kind}:{name}"
    function = value[0] if hasattr(value, "_fields") else value  # a reward and an optimizer are tuples of functions
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"


def _digest(*values: Any) -> str:
    return sha256("\n".join(map(repr, values)).encode()).hexdigest()[:12]


# Recipes ------------------------------------------------------------------------------------------------

C = TypeVar("C", bound=RunConfig)
P = TypeVar("P")


@dataclass(frozen=True, kw_only=True)
class Recipe(Generic[C, P]):
    """One kind of run, with settings C and parts P.

    Args:
        name: that of its module, by which `run.json` and `find_recipe` know it.
        command: of `experiments`, which trains by this recipe; `train` can by any, with --recipe.
        Config: class of its settings.
        preset: from keyword arguments, settings that fit each other.
        build: `build(config, folder, objects=..., on_ready=...)`, a context manager of the parts. It checks all that
            the settings and objects name, then calls `on_ready`, and only then writes or compiles.
        make_trainable: (parts, folder) -> the stages of a run; with None for the folder it is only read.
        test: `test(parts, params, seed=..., tasks=..., samples=...)` of several parameters on the same fresh tasks;
            None: `evaluate` has nothing to test such a run on.
        planner: how the planner is read from the folder of a run; None: it can't be exported.
        rehearse: prints what a run begins with, from its parts; None: it has no dry run.
        exact: whether commands compute exactly, as an engine needs (`launch.configure`).
        all_devices: whether commands give it as many CPU devices as there are cores, instead of one.
    """

    name: str
    command: str = "train"
    Config: type[C]
    preset: Callable[..., C]
    build: Callable[..., AbstractContextManager[P]]
    make_trainable: "Callable[[P, Path | None], Trainable]"
    test: "Callable[..., TestReport] | None" = None
    planner: "PlannerReader | None" = None
    rehearse: Callable[[P], None] | None = None
    exact: bool = True
    all_devices: bool = False

    def command_line(self) -> str:
        """The command that trains by this recipe, to which settings are added as flags."""
        return command(self.command, **({"recipe": self.name} if self.command == "train" else {}))

    def train(
        self,
        config: C,
        folder: str | Path,
        *,
        objects: Objects = NO_OBJECTS,
        every: int = 10,
        resume: bool = True,
        loggers: Sequence[str] = (),
        budget: TimeBudget = UNLIMITED,
        on_update: "Callable[[Metrics], object] | None" = None,
    ) -> dict[str, Any]:
        """Train in a folder, or resume the run there -> the result.

        Args:
            config: settings of the run.
            folder: of the run.
            objects: replace what the settings name.
            every: updates between validations and checkpoints.
            resume: False deletes an earlier run in the folder, as soon as everything that the new one needs was found.
            loggers: names of loggers for metrics (tensorboard, wandb, trackio).
            budget: time after which the run stops, saved.
            on_update: called after each update with its metrics and timings.
        """
        from flowgrpo.training.run_dir import delete_run
        from flowgrpo.training.session import run_session

        path = Path(folder)
        if resume:
            self.check_folder(config, path, objects)
        on_ready = None if resume else partial(delete_run, path)
        with self.build(config, path, objects=objects, on_ready=on_ready) as parts:
            trainable = self._named(self.make_trainable(parts, path), objects)
            return run_session(trainable, path, every=every, loggers=loggers, budget=budget, on_update=on_update)

    def evaluate(
        self,
        config: C,
        folder: str | Path,
        *,
        seed: int = 1000,
        tasks: int = 1000,
        samples: int = 1,
        objects: Objects = NO_OBJECTS,
    ) -> "tuple[int | None, TestReport]":
        """Test a run's start and its best planner on fresh tasks -> (the update of the best, the report).

        Args:
            config: settings of the run.
            folder: of the run.
            seed: of sampling, and of tasks that are generated.
            tasks: number of test tasks, none of which is in the run's own table.
            samples: trajectories a task; above 1 the report has pass@k.
            objects: those that the run was trained with.
        """
        from flowgrpo.training.run_dir import read_run
        from flowgrpo.training.session import open_session

        path = Path(folder)
        if self.test is None:
            raise BadInput(f"{path} is a run of {self.command}, whose own result.json says how it did")
        recorded = read_run(path).get("objects", {})
        if missing := [f"{kind} {name}" for kind, name in recorded.items() if kind not in objects.given()]:
            raise BadInput(
                f"{path} was trained with {', '.join(missing)}, and run.json only has the name: evaluate it in the "
                "program that has them, with objects="
            )
        with self.build(config, path, objects=objects) as parts:
            session = open_session(self._named(self.make_trainable(parts, None), objects), path)
            best, best_params = session.best_params()
            session.progress.log(f"rolling out {tasks} test tasks with the start, and with update {best}")
            params = (session.start_params, best_params)
            return best, self.test(parts, params, seed=seed, tasks=tasks, samples=samples)

    def _named(self, trainable: "Trainable", objects: Objects) -> "Trainable":
        """The stages of a run under the names by which `run.json` knows recipe and objects."""
        trainable.recipe, trainable.objects = self.name, objects.names()
        unread = () if self.planner is None else self.planner.replaced_by
        trainable.can_evaluate = self.test is not None and not objects.given()
        trainable.can_export = self.planner is not None and not objects.given().keys() & {*unread}
        return trainable

    def dry_run(self, config: C, folder: str | Path, *, objects: Objects = NO_OBJECTS) -> None:
        """Print what a run would begin with; nothing is trained."""
        if self.rehearse is None:
            raise BadInput(f"a run of {self.name} has no dry run: train it with few updates")
        path = Path(folder)
        self.check_folder(config, path, objects)
        with self.build(config, path, objects=objects) as parts:
            self.rehearse(parts)

    def check_folder(self, config: C, folder: Path, objects: Objects = NO_OBJECTS) -> None:
        """Raise `BadInput` before anything is written if the folder belongs to another run."""
        from flowgrpo.training.run_dir import check_same_run

        check_same_run(folder, self.name, config.to_json(), objects=objects.names(), may_change=config.may_change())


def plain_build(make: Callable[..., P]) -> Callable[..., AbstractContextManager[P]]:
    """The `build` of a function `make(config, objects=...)` whose parts need no folder and no closing."""

    @contextmanager
    def build(
        config: RunConfig,
        folder: Path,  # noqa: ARG001  other recipes read it
        *,
        objects: Objects = NO_OBJECTS,
        on_ready: Callable[[], object] | None = None,
    ) -> Iterator[P]:
        parts = make(config, objects=objects)
        if on_ready is not None:
            on_ready()
        yield parts

    return build


# All of them --------------------------------------------------------------------------------------------


def recipe_names() -> tuple[str, ...]:
    """The names of our recipes: the modules of this folder that declare one."""
    return tuple(path.stem for path in sorted(FOLDER.glob("*.py")) if DECLARED.search(path.read_text("utf-8")))


def all_recipes() -> list[Recipe[Any, Any]]:
    """Our recipes, each of which imports everything that its kind of run needs."""
    return [find_recipe(name) for name in recipe_names()]


def find_recipe(name: str) -> Recipe[Any, Any]:
    """The recipe of that name, or of a module of yours: `MODULE`, which has a `RECIPE`, or `MODULE:NAME`."""
    if name in recipe_names():
        return import_module(f"flowgrpo.recipes.{name}").RECIPE
    try:
        recipe = import_named(name if ":" in name else f"{name}:RECIPE", "recipe")
    except BadInput as error:
        raise BadInput(f"{error}; ours are {', '.join(recipe_names())}") from None
    if not isinstance(recipe, Recipe):
        raise BadInput(f"recipe {name!r} is {recipe!r:.80}, which is no Recipe: give {RECIPE_IMPORT}")
    return recipe


def find_config(name: str) -> type[RunConfig]:
    """The Config of a recipe, without importing JAX if it is one of ours, whose settings have a module of their own."""
    if name in recipe_names() and (FOLDER / f"{name}_config.py").exists():
        return import_module(f"flowgrpo.recipes.{name}_config").Config
    return find_recipe(name).Config


def recipe_of(folder: str | Path) -> Recipe[Any, Any]:
    """The recipe of the run in a folder."""
    from flowgrpo.training.run_dir import read_run

    return find_recipe(read_run(folder)["recipe"])
