"""`experiments.train`: the flags choose the recipe, and a recipe of one's own has a command."""

import pytest

from experiments.cli.choice import choose_recipe, complete_settings
from flowgrpo.api.choice import Subject
from flowgrpo.api.settings import choose_run
from flowgrpo.recipes.recipe import find_recipe
from flowgrpo.types import BadInput
from tests.experiments.conftest import last_line

SMALL = ("--updates=1", "--queries=2", "--samples=2", "--test_tasks=4", "--warm_steps=2", "--loggers=none")
SMALL += ("--model_dim=16", "--layers=1", "--head_dim=8", "--cpu_devices=1")
MINE = """
from dataclasses import replace

from flowgrpo.recipes.pure import RECIPE as PURE

RECIPE = replace(PURE, name="recipe_in_a_file", command="train")
"""


@pytest.mark.parametrize(
    ("given", "recipe"),
    [
        ({"env": "maze"}, "pure"),
        ({"env": "my_module:my_env"}, "pure"),
        ({"env": "my_module:Parcel", "model": "small"}, "own_env"),
        ({"env": "gymnasium:Taxi-v3"}, "own_env"),
        ({"agent": "python agent.py", "tasks": "train.jsonl", "model": "small"}, "own_agent"),
        ({"tasks": "train.jsonl", "model": "small"}, "own_env"),
        ({"tasks": "train.jsonl", "model": "small", "tools": "calculator"}, "agent"),
        ({"recipe": "my_module", "env": "maze", "agent": "x"}, "my_module"),
    ],
)
def test_flags_choose_the_recipe(given, recipe):
    assert choose_recipe(given) == recipe


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, "nothing says what to train on: give --env, --agent or --tasks"),
        ({"model": "small"}, "nothing says what to train on"),
        ({"env": "maze", "agent": "true"}, "--env and --agent are both given"),
        ({"env": "maze", "model": "small"}, "--env=maze trains a small planner of its words.*leave out --model"),
        ({"env": "a:b", "tasks": "train.jsonl"}, "--tasks=train.jsonl is for an environment of text"),
    ],
)
def test_contradictions_are_one_sentence(given, why):
    with pytest.raises(BadInput, match=why) as refused:
        choose_recipe(given)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "given",
    [
        {"env": "maze", "algorithm": "ppo", "updates": 3},
        {"env": "tests.text_env_cases:Parcel", "model": "small", "tasks": "train.jsonl", "seed": 1},
        {"env": "gymnasium:Taxi-v3", "model": "small", "lora_rank": 4},
        {"agent": "python agent.py", "tasks": "train.jsonl", "model": "small"},
        {"tasks": "train.jsonl", "model": "small", "reward": "a:b"},
    ],
)
def test_flags_mean_what_the_arguments_of_fg_train_mean(given):
    recipe = choose_recipe(given)
    config = find_recipe(recipe).preset(**complete_settings(recipe, given))
    arguments = {name: value for name, value in given.items() if name in Subject.__dataclass_fields__}
    settings = {name: value for name, value in given.items() if name not in arguments}
    if "lora_rank" in settings:
        arguments["lora"] = settings.pop("lora_rank")
    subject = Subject(**arguments)
    choice = choose_run(subject, settings)
    assert (choice.recipe.name, choice.config) == (recipe, config)


@pytest.mark.slow
def test_a_recipe_in_a_file_trains_is_evaluated_and_exported_like_ours(command, tmp_path):
    (tmp_path / "recipe_in_a_file.py").write_text(MINE)
    ours = command("train", "--env=lookup", "--workdir=ours", *SMALL, cwd=tmp_path)
    mine = command("train", "--recipe=recipe_in_a_file", "--workdir=mine", *SMALL, cwd=tmp_path)
    assert last_line(mine)["params_sha256"] == last_line(ours)["params_sha256"]
    assert last_line(command("evaluate", "--workdir=mine", "--num_tasks=4", cwd=tmp_path))["tasks"] == 4
    command("export", "--workdir=mine", "--out=model", cwd=tmp_path)
    assert "python -m flowgrpo train --recipe=recipe_in_a_file --" in (tmp_path / "model" / "README.md").read_text()
