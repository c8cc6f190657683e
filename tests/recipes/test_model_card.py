"""Model cards: what the hub reads, the command that makes the run again, nothing of this machine."""

import json
from pathlib import Path

import pytest

import experiments
from flowgrpo.publish.model_card import CardFacts, model_card, training_command
from flowgrpo.recipes import agent_config, cluster_config, pure, self_verify_tasks
from flowgrpo.recipes.recipe import all_recipes

RESULT = {"success_before": 0.154, "success_after": 0.987, "tool_error_before": None, "tool_error_after": 0.02}
RESULT |= {"updates": 150, "best_update": 120, "minutes": 12.34}
HUB = agent_config.preset(
    "Qwen/Qwen2.5-0.5B-Instruct",
    tasks="/home/me/data/train.jsonl",
    lora_rank=8,
    mcp=("python /home/me/server.py --key=secret",),
    executor="http://10.0.0.7:8000/v1#judge",
    algorithm="grpo",
)


def front_matter(text: str) -> dict:
    """The metadata of a card, whose values are JSON."""
    lines = text.split("---\n")[1].splitlines()
    return {name: json.loads(value) for name, value in (line.split(": ", 1) for line in lines)}


def test_a_card_has_the_hubs_metadata_and_no_local_paths(tmp_path):
    facts = CardFacts("agent", HUB, tmp_path, 7, "last", adapter=True)
    text = model_card(facts)
    assert front_matter(text) == {
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "base_model": "Qwen/Qwen2.5-0.5B-Instruct",
        "license": "other",
        "license_name": "that-of-the-base-model",
        "license_link": "https://huggingface.co/Qwen/Qwen2.5-0.5B-Instruct",
        "tags": ["flowgrpo", "reinforcement-learning", "agents", "tool-use", "grpo"],
    }
    assert "had not ended" in text
    assert "update 7, the last one of the run" in text
    assert not [word for word in ("/home/me", "10.0.0.7", "secret", str(tmp_path)) if word in text]
    assert front_matter(model_card(facts._replace(licence="mit")))["license"] == "mit"


def test_a_card_has_the_figures_of_the_run_and_all_settings(tmp_path):
    (tmp_path / "result.json").write_text(json.dumps(RESULT))
    config = pure.preset("lookup", seed=3)
    text = model_card(CardFacts("pure", config, tmp_path, 120, "best"))
    assert front_matter(text)["license"] == "apache-2.0"
    assert "base_model" not in front_matter(text)
    assert "| success on test tasks | 0.154 | 0.987 |\n| tool errors |  | 0.020 |\n" in text
    assert "turns" not in text.split("## How")[0]
    assert "150 updates, of which number 120 was best in validation; 12.3 minutes." in text
    stored = json.loads(text.split("```json\n")[1].split("```")[0])
    assert pure.Config.from_json(stored) == config


@pytest.mark.parametrize(
    ("recipe", "config", "words"),
    [
        ("pure", pure.preset("maze", "ppo", seed=3), "quickstart --seed=3 --env=maze --algorithm=ppo"),
        ("agent", agent_config.preset(updates=5), "agentflow --updates=5 --algorithm=flow_grpo"),
        ("cluster", cluster_config.preset(rollout_workers=3), "cluster --algorithm=flow_grpo --rollout_workers=3"),
        ("self_verify", self_verify_tasks.preset(updates=4), "self_verify --updates=4"),
    ],
)
def test_the_command_names_what_its_preset_does_not_say(recipe, config, words):
    assert training_command(recipe, config) == f"python -m flowgrpo {words}"


def test_the_command_of_a_hub_model_leaves_out_places_and_addresses():
    command = training_command("agent", HUB)
    assert "--mcp=SERVER" in command
    assert "--executor=SERVER#judge" in command.replace("'", "")
    assert "--tasks=train.jsonl" in command


def test_every_recipe_that_is_exported_has_a_command_of_its_name():
    recipes = [recipe for recipe in all_recipes() if recipe.planner is not None]
    assert len(recipes) == 6
    commands = Path(experiments.__file__).parent
    assert all((commands / f"{recipe.command}.py").exists() for recipe in recipes)
