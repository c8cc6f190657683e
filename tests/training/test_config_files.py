"""Settings in files: what is printed is read, and what can't be a setting is refused with file and key."""

import json

import pytest

from flowgrpo.recipes import agent_config, own_env_config, pure_config
from flowgrpo.training.config_files import format_config, parse_setting, read_settings
from flowgrpo.types import BadInput

CONFIGS = {
    "pure": pure_config.preset("arithmetic", "ppo", learning_rate=1e-5, mesh="data=2"),
    "agent": agent_config.preset(
        "a/model", tasks="x.jsonl", mcp=("a b", "c: d"), instructions="- no: 'yes'\n# \n", turns=2
    ),
    "own_env": own_env_config.preset("a/model", env="gymnasium:Taxi-v3", fields=("query=a", "answers=b")),
}


@pytest.mark.parametrize("recipe", CONFIGS)
def test_a_printed_config_and_a_run_json_are_read_as_they_were(recipe, tmp_path):
    config, path = CONFIGS[recipe], tmp_path / "settings"
    for text in (format_config(config, recipe), json.dumps({"recipe": recipe, "settings": config.to_json()})):
        path.write_text(text)
        assert type(config).from_file(path) == config
        assert read_settings(type(config), path).recipe == recipe
    path.write_text(json.dumps(config.to_json()))  # the settings of a run.json alone
    assert type(config).from_file(path) == config


def test_a_file_may_leave_settings_to_the_preset(tmp_path):
    path = tmp_path / "maze.yaml"
    path.write_text(
        "environment:\n  env: maze\nlearner:\n  learning_rate: 1e-5  # a text, for YAML\n  beta: 1\nrollout:\n"
    )
    assert pure_config.Config.from_file(path) == pure_config.preset("maze", learning_rate=1e-5, beta=1.0)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("learner: {learning_rat: 1}", "learner.learning_rat is no setting; did you mean learner.learning_rate?"),
        ("learner: {seed: 1}", "learner.seed is no setting; did you mean run.seed?"),
        ("lerner: {learning_rate: 1}", "lerner.learning_rate is no setting; did you mean learner.learning_rate?"),
        ("learner: {learning_rate: fast}", "learner.learning_rate='fast' must be a finite number"),
        ("learner: {epochs: 1.5}", "learner.epochs=1.5 must be a whole number"),
        ("run: {control: no}", "run.control=False must be a text"),
        ("run: {seed: -1}", "run.seed=-1 must be at least 0"),
        ("learner: 3", "learner is no setting"),
        ("- 1", "has no settings: give sections with settings"),
        ("a: [1", "is neither YAML nor JSON in line 1"),
        (None, r"can't be read \(No such file or directory\)"),
    ],
)
def test_what_is_no_setting_is_one_sentence_with_file_and_key(text, why, tmp_path):
    path = tmp_path / "mine.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(BadInput, match=rf"mine\.yaml:? {why}") as refused:
        pure_config.Config.from_file(path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("assignment", "name", "value"),
    [
        ("learner.learning_rate=1e-5", "learning_rate", 1e-5),
        ("updates=3", "updates", 3),
        ("agent.drop_examples=true", "drop_examples", True),
        ("tasks.fields=query=a,answers=b", "fields", ("query=a", "answers=b")),
        ("agent.mcp=one, two", "mcp", ("one, two",)),
        ("model.chat_template=null", "chat_template", None),
        ("rollout.exam_turns=2", "eval_turns", 2),
    ],
)
def test_a_value_is_read_by_the_type_of_its_setting(assignment, name, value):
    assert parse_setting(agent_config.Config, assignment) == (name, value)


@pytest.mark.parametrize(
    ("assignment", "why"),
    [
        ("learner.learning_rate", "--set learner.learning_rate has no value: give SECTION.NAME=VALUE"),
        ("learner.turns=1", "--set learner.turns is no setting; did you mean rollout.turns?"),
        ("turns=many", "--set turns='many' must be a whole number"),
        ("agent.drop_examples=1", "--set agent.drop_examples='1' must be true or false"),
    ],
)
def test_what_can_not_be_set_is_one_sentence(assignment, why):
    with pytest.raises(BadInput, match=why):
        parse_setting(agent_config.Config, assignment)
