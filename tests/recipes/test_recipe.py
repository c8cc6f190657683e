"""Recipes: one object each, runs that are handed objects, and recipes of one's own."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optax
import pytest
from gateway_cases import tiny_folder
from tiny_env import tiny_env

import flowgrpo as fg
from flowgrpo.agent.single_turn import single_turn
from flowgrpo.contracts import RewardResult
from flowgrpo.data.tasks import Tasks
from flowgrpo.data.tokenizer import ChatTokenizer
from flowgrpo.models.config import small_config
from flowgrpo.publish.export import read_config
from flowgrpo.recipes import own_env, pure
from flowgrpo.recipes.recipe import Objects, all_recipes, find_config, find_recipe, name_of, recipe_names
from flowgrpo.training.run_dir import read_run

SIZES: dict[str, Any] = {
    "updates": 2,
    "queries": 4,
    "samples": 4,
    "test_tasks": 8,
    "warm_steps": 2,
    "model_dim": 16,
    "layers": 1,
    "head_dim": 8,
}


def judge(_task: fg.Task, output: str) -> RewardResult:
    return RewardResult(float(len(output)))


def test_a_recipe_has_the_name_of_its_module_and_its_settings_are_light():
    for name in recipe_names():
        recipe = find_recipe(name)
        assert recipe.name == name
        assert find_config(name) is recipe.Config
    assert len({recipe.command for recipe in all_recipes()}) == len(recipe_names()) == 7


def test_a_recipe_of_ones_own_is_one_file_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("recipe_of_mine.py").write_text(
        "from dataclasses import replace\nfrom flowgrpo.recipes.pure import RECIPE as PURE\n"
        'RECIPE = replace(PURE, name="recipe_of_mine")\nSECOND = replace(PURE, name="second")\nTHIRD = 3\n'
    )
    assert find_recipe("recipe_of_mine").name == "recipe_of_mine"
    assert find_recipe("recipe_of_mine:SECOND").name == "second"
    assert find_config("recipe_of_mine") is pure.Config
    with pytest.raises(fg.BadInput, match="'recipe_of_mine:THIRD' is 3, which is no Recipe"):
        find_recipe("recipe_of_mine:THIRD")
    with pytest.raises(fg.BadInput, match=r"No module named 'chess'.*ours are agent, cluster, finetune"):
        find_recipe("chess")


TASKS = (fg.Task("1", "one", ("1",), "answer"), fg.Task("2", "two", ("2",), "answer"))


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (judge, f"{__name__}:judge"),
        (fg.Reward(judge), f"{__name__}:judge"),
        (SimpleNamespace, "types:SimpleNamespace"),
        (["python", "agent.py"], "python agent.py"),
        (tiny_env(), "Env:tiny"),
        (fg.flow_grpo(), "Algorithm:flow_grpo"),
        (partial(judge), "functools:partial"),
    ],
)
def test_an_object_stands_by_its_name(value, name):
    assert name_of(value) == name


def test_tasks_and_shapes_stand_by_their_content():
    assert name_of(TASKS) == name_of(Tasks(TASKS)) != name_of(TASKS[:1])
    assert name_of(small_config(8, d=16)) == name_of(small_config(8, d=16)) != name_of(small_config(8, d=32))
    assert name_of(optax.sgd(0.1)).startswith("optax.")


@pytest.mark.parametrize(
    ("objects", "why"),
    [
        (Objects(tools=[]), "the recipe pure has no place for tools: leave out tools= .it takes env, model, algorithm"),
        (Objects(agent="true"), "the recipe pure has no place for an agent"),
        (Objects(env=SimpleNamespace()), "is no fg.Env, which the recipe pure compiles"),
        (Objects(env=tiny_env(), model=small_config(3, d=16)), "the model has 3 words and the environment tiny"),
    ],
)
def test_objects_without_a_place_are_refused(objects, why, tmp_path):
    with pytest.raises(fg.BadInput, match=why):
        pure.RECIPE.train(pure.preset(**SIZES), tmp_path / "run", objects=objects)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_S1_a_run_with_objects_resumes_and_knows_their_names(tmp_path):
    """Killed after the first update by the callback; other objects are refused, as changed settings are."""
    env, seen = tiny_env(), []
    own = Objects(env=env, model=small_config(len(env.vocabulary), d=16, layers=1, head=8), algorithm=fg.grpo())
    train = partial(pure.RECIPE.train, pure.preset(**SIZES), objects=own, every=1)
    whole = train(tmp_path / "whole", on_update=seen.append)
    assert [numbers["update"] for numbers in seen] == [1, 2]
    assert (whole["env"], whole["algorithm"]) == ("tiny", "grpo")

    def stop(_numbers):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "parts", on_update=stop)
    assert read_run(tmp_path / "parts")["objects"] == own.names()
    for others in (Objects(), Objects(env=env, model=own.model, algorithm=fg.flow_grpo())):
        with pytest.raises(fg.BadInput, match=r"holds another run: .*algorithm: there .Algorithm:grpo., here"):
            train(tmp_path / "parts", objects=others)
    parts = train(tmp_path / "parts")
    assert parts["resumed_at"] == [1]
    assert parts["params_sha256"] == whole["params_sha256"]
    with pytest.raises(fg.BadInput, match=r"was trained with env Env:tiny, .*: evaluate it in the program"):
        pure.RECIPE.evaluate(pure.preset(**SIZES), tmp_path / "parts", tasks=8)
    best, report = pure.RECIPE.evaluate(pure.preset(**SIZES), tmp_path / "parts", tasks=8, objects=own)
    assert best is not None
    assert len(report.evaluations) == 2


HOSTED: dict[str, Any] = {
    "updates": 1,
    "queries": 2,
    "samples": 2,
    "turns": 1,
    "eval_turns": 1,
    "max_tokens": 4,
    "context_tokens": 64,
    "slots": 4,
    "prefill_chunk": 16,
    "validation_tasks": 2,
    "test_tasks": 2,
    "dtype": "float32",
    "remat": False,
}


def answering(tokenizer: ChatTokenizer) -> fg.HostEnv:
    return single_turn(tokenizer, max_tokens=4)


def own_objects(**others) -> Objects:
    tasks = [fg.Task(str(n), f"Say {n}.", (str(n),), "answer") for n in range(60)]
    return Objects(env=answering, tasks=tasks, model=fg.load_model(tiny_folder()), reward=fg.Reward(judge), **others)


@pytest.mark.slow
def test_a_run_with_a_model_takes_objects_for_everything_that_it_names(tmp_path):
    objects = own_objects(optimizer=fg.adamw(1e-3), algorithm=fg.grpo())
    config = own_env.preset(**{**HOSTED, "model": "tiny", "env": "a:function"})
    result = own_env.RECIPE.train(config, tmp_path, objects=objects)
    assert (result["updates"], result["algorithm"]) == (1, "grpo")
    named = read_run(tmp_path)["objects"]
    assert named.keys() == {"env", "tasks", "model", "algorithm", "optimizer", "reward"}
    assert (named["env"], named["reward"]) == (f"{__name__}:answering", f"{__name__}:judge")
    with pytest.raises(fg.BadInput, match=r"was trained with model Model:.*: save its model in the program"):
        read_config(tmp_path)


def test_objects_of_a_run_with_a_model_are_checked_before_anything_is_written(tmp_path):
    config = own_env.preset(**{**HOSTED, "model": "tiny", "env": "a:function"})
    for objects, why in (
        (replace(own_objects(), env=lambda _: None), "gave None, which is no fg.HostEnv"),
        (replace(own_objects(), reward=fg.Reward(lambda _task, output: len(output))), "came to 0 for task"),
        (replace(own_objects(), model=small_config(8, d=16)), "has to read and write text"),
    ):
        with pytest.raises(fg.BadInput, match=why):
            own_env.RECIPE.train(config, tmp_path / "run", objects=objects)
    assert not (tmp_path / "run").exists()
