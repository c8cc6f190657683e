"""The arguments of `train` and `Trainer`: which recipe they choose, and one sentence for what contradicts itself."""

from typing import get_type_hints

import jax.numpy as jnp
import pytest

import flowgrpo as fg
from flowgrpo.api.choice import Subject
from flowgrpo.api.settings import Settings, choose_run
from flowgrpo.models.lora import LoraConfig
from flowgrpo.recipes import agent_config, own_agent_config, own_env_config, pure_config
from flowgrpo.training.config import flat_settings

TASKS = [{"query": f"say {n}", "answers": [str(n)], "domain": "answer"} for n in range(40)]


class Guess(fg.TextEnv):
    """One guess."""

    max_turns = 3

    def step(self, action):
        return fg.Done(reward=float(action == "7"))


def exact(task, output):
    return fg.RewardResult(float(output in task.answers))


@fg.algorithm
def centred(outcome_n, group_n, valid_n):
    return fg.group_center(outcome_n, group_n, valid_n)


def chosen(settings=None, **subject):
    return choose_run(Subject(**subject), settings or {})


def flat(config) -> dict:
    return flat_settings(config.to_json())


@pytest.mark.parametrize(
    ("subject", "recipe", "name"),
    [
        ({"env": "lookup"}, "pure", "lookup-flow_grpo-0"),
        ({"env": fg.maze(), "algorithm": centred}, "pure", "maze-centred-0"),
        ({"env": Guess, "tasks": TASKS, "model": "m"}, "own_env", "Guess-flow_grpo-0"),
        ({"env": "gymnasium:Taxi-v3", "model": "m"}, "own_env", "gymnasium-Taxi-v3-flow_grpo-0"),
        ({"tasks": TASKS, "model": "m", "reward": exact}, "own_env", "SingleTurn-flow_grpo-0"),
        ({"agent": "python agent.py", "tasks": "t.jsonl", "model": "m"}, "own_agent", "python-agent.py-flow_grpo-0"),
    ],
)
def test_arguments_choose_a_recipe_and_a_folder(subject, recipe, name):
    choice = chosen(algorithm=subject.pop("algorithm", "flow_grpo"), **subject)
    assert (choice.recipe.name, choice.name) == (recipe, name)


def test_tools_and_tasks_are_the_agent_system():
    def look(word: str) -> str:
        """Look a word up."""
        return word

    choice = chosen(tasks=TASKS, tools=[look], model="m", reward=exact)
    assert choice.recipe.name == "agent"
    assert choice.objects.tools is not None
    assert [tool.name for tool in choice.objects.tools] == ["look"]


def test_sizes_follow_from_the_environment_and_can_be_set():
    derived = flat(chosen(env=Guess, tasks=TASKS, model="m", lora=8).config)
    given = flat(chosen({"turns": 2, "slots": 4}, env=Guess, tasks=TASKS, model="m").config)
    assert (derived["turns"], derived["slots"], derived["lora_rank"], derived["dtype"]) == (3, 64, 8, "float32")
    assert (given["turns"], given["slots"], given["lora_rank"]) == (2, 4, 0)


def test_settings_of_the_entrances_are_those_of_the_recipes():
    """But for what has a parameter of its own."""
    own = {"algorithm", "optimizer", "tasks", "reward", "tools", "agent", "env"}
    own |= {"lora_rank", "lora_alpha", "lora_targets"}
    recipes = (pure_config, agent_config, own_agent_config, own_env_config)
    expected = {name for module in recipes for name in get_type_hints(module.Settings)}
    assert set(Settings.__annotations__) == expected - own


REFUSED = [
    ({}, "there is nothing to train on"),
    ({"env": "lookup", "agent": "python agent.py"}, "env= and agent= are both given"),
    ({"env": "lookap"}, "'lookap' is unknown"),
    ({"env": Guess(), "tasks": TASKS, "model": "m"}, "give the class"),
    ({"env": dict, "model": "m"}, "the class dict, which is no fg.TextEnv"),
    ({"env": 3, "model": "m"}, "env is 3: give"),
    ({"env": Guess, "model": "m"}, "the environment Guess has no tasks"),
    ({"env": Guess, "tasks": TASKS}, "model= is missing"),
    ({"env": Guess, "tasks": [], "model": "m"}, "holds no task"),
    ({"env": "lookup", "tasks": TASKS}, "lookup is a pure environment.* leave out tasks="),
    ({"env": "lookup", "model": "m"}, "a vocabulary of its own"),
    ({"env": "lookup", "lora": 8}, "leave out lora="),
    ({"env": Guess, "tasks": TASKS, "model": 3}, "model=3 is no Model"),
    ({"env": "lookup", "algorithm": jnp.sum}, "is no Algorithm"),
    ({"env": "lookup", "algorithm": fg.flow_grpo}, r"no Algorithm, but a function.* fg\.flow_grpo\(\)"),
    ({"env": "lookup", "optimizer": fg.adamw}, r"but a function.* fg\.adamw\(1e-5\)"),
    ({"env": "lookup", "algorithm": "grop"}, "grop is unknown; choose from"),
    ({"env": Guess, "tasks": TASKS, "model": "m", "tools": [exact]}, "list them in its attribute tools"),
    ({"env": Guess, "tasks": TASKS, "model": "m", "reward": 3}, "reward is 3: give an fg.Reward"),
    (
        {"env": Guess, "tasks": TASKS, "model": "m", "lora": LoraConfig(4, 8.0, rslora=True)},
        "rslora=True, which a run can't store: give alpha=16 without it",
    ),
]


@pytest.mark.parametrize(("subject", "sentence"), REFUSED, ids=[sentence for _, sentence in REFUSED])
def test_contradictions_are_one_sentence_before_anything_is_made(subject, sentence):
    with pytest.raises(fg.BadInput, match=sentence) as refusal:
        chosen(**{"algorithm": "flow_grpo", **subject})
    assert "\n" not in str(refusal.value)


def test_sizes_that_cannot_hold_one_turn_are_refused():
    with pytest.raises(fg.BadInput, match="--max_tokens=64 leaves no room for a context"):
        chosen({"context_tokens": 64}, env=Guess, tasks=TASKS, model="m")


@pytest.mark.parametrize(
    ("objects", "settings"),
    [
        ({"algorithm": centred}, {"beta": 0.1}),
        ({"algorithm": "grpo", "optimizer": fg.adamw(1e-5)}, {"learning_rate": 1e-4}),
        ({"lora": 8}, {"lora_rank": 4}),
    ],
)
def test_a_setting_that_an_object_has_is_refused(objects, settings):
    (name,) = settings
    with pytest.raises(fg.BadInput, match=f"{name}=.* contradicts .*=, an object that has its own"):
        chosen(settings, env=Guess, tasks=TASKS, model="m", **objects)


def test_lora_settings_reach_the_recipe():
    config = flat(chosen(env=Guess, tasks=TASKS, model="m", lora=LoraConfig(4, 8.0, ("q", "v"))).config)
    assert (config["lora_rank"], config["lora_alpha"], config["lora_targets"]) == (4, 8.0, "q,v")
