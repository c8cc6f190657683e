"""Settings: earlier names are still read, and never written; keyword arguments are typed as the Configs are."""

import typing

import pytest
from commands import run_module

from flowgrpo.recipes import (
    agent_config,
    cluster_config,
    finetune_config,
    own_agent_config,
    own_env_config,
    pure_config,
    self_verify_config,
)
from flowgrpo.renamed import SETTINGS
from flowgrpo.training.config import flat_settings, make_config, section_types, setting_infos
from flowgrpo.types import BadInput

MODULES = (
    agent_config,
    cluster_config,
    finetune_config,
    own_agent_config,
    own_env_config,
    pure_config,
    self_verify_config,
)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_keyword_arguments_of_a_preset_have_the_types_of_its_config(module):
    keywords: dict[str, object] = typing.get_type_hints(module.Settings)
    declared: dict[str, object] = {}
    for section in section_types(module.Config).values():
        declared |= typing.get_type_hints(section)
    positional = {pure_config: {"env", "algorithm"}, finetune_config: {"method"}}.get(module, {"model"})
    assert keywords == {name: kind for name, kind in declared.items() if name not in positional}


def test_earlier_names_of_settings_are_those_of_the_table():
    infos = [info for module in MODULES for info in setting_infos(module.Config).items()]
    assert {info.was: name for name, info in infos if info.was is not None} == SETTINGS
    assert not SETTINGS.keys() & {name for name, _ in infos}


def test_a_stored_run_with_earlier_names_is_read():
    earlier = {new: old for old, new in SETTINGS.items()}
    config = pure_config.preset("maze", head_dim=8, decay_to=0.5)
    stored = {earlier.get(name, name): value for name, value in flat_settings(config.to_json()).items()}
    assert {"d", "head", "decay"} <= stored.keys()
    assert pure_config.Config.from_json(stored) == pure_config.Config.from_json(config.to_json()) == config
    assert not SETTINGS.keys() & config.settings().keys()


def test_an_earlier_name_is_no_keyword_argument_but_names_the_new_one():
    with pytest.raises(BadInput, match="'exam_turns' is no setting; did you mean 'eval_turns'"):
        make_config(agent_config.Config, {"exam_turns": 3})


@pytest.mark.parametrize(("name", "ours"), [("group_size", "samples"), ("lr", "learning_rate"), ("max_turns", "turns")])
def test_what_others_call_a_setting_names_ours(name, ours):
    with pytest.raises(BadInput, match=f"'{name}' is no setting; did you mean '{ours}'"):
        make_config(agent_config.Config, {name: 3})


def test_an_earlier_flag_works_and_prints_its_new_name():
    done = run_module("experiments.quickstart", "--d=32", "--env=chess")
    first, second = done.stderr.splitlines()
    assert first == "--d is now called --model_dim"
    assert "environment 'chess' is unknown" in second
