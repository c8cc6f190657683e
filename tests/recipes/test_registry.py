"""Members of the family by name: each gets what a preset says as far as it has such a setting."""

import numpy as np
import pytest
from family_cases import batch_of, make_case, scores_of

import flowgrpo as fg
from flowgrpo.recipes import agent, agent_config, pure, pure_config
from flowgrpo.recipes.registry import ALGORITHMS, make_algorithm, make_env


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_can_be_named_in_both_kinds_of_run(name):
    parts = pure.open(pure.preset("lookup", name, teacher="run" if name == "opd" else None))
    assert parts.algorithm.name == make_algorithm(name, beta=0.1, clip_high=0.2, max_tokens=9).name
    config = agent_config.preset(algorithm=name, beta=0.01)
    if name in ("ppo", "opd"):
        with pytest.raises(fg.BadInput, match=f"--algorithm={name} needs a (critic|teacher)"):
            agent.algorithm_of(config)
    else:
        assert agent.algorithm_of(config).name == parts.algorithm.name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "same"),
    [("gspo", {}), ("cispo", {}), ("flow_grpo_released", {}), ("flow_grpo", {"clip_high": 0.25})],
)
def test_a_preset_does_not_change_bounds_of_another_kind(name, same):
    case = make_case(40)
    one, two = make_algorithm(name, beta=0.01, clip_high=0.25, max_tokens=9), ALGORITHMS[name](beta=0.01, **same)
    batch = batch_of(two, case.trajectories)
    scores = scores_of(case, batch)
    np.testing.assert_array_equal(one.loss(scores, batch)[0], two.loss(scores, batch)[0])


def test_an_environment_from_outside_is_one_that_a_function_gives():
    assert make_env("tiny_env:tiny_env").name == "tiny"
    assert pure.preset("tiny_env:tiny_env", updates=3).d == pure_config.OUTSIDE["d"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("chess", "'chess' is unknown; choose from lookup, arithmetic, maze, lookup_hard,"),
        ("tiny_envy:tiny_env", "can't be imported: No module named 'tiny_envy'"),
        ("tiny_env:", "names a module and nothing in it: write MODULE:NAME"),
        ("tiny_env:chess", "can't be imported: module 'tiny_env' has no attribute 'chess'"),
        ("builtins:list", r"gave \[\], which is no fg.Env: give MODULE:FUNCTION"),
    ],
)
def test_what_gives_no_environment_is_refused(name, said):
    with pytest.raises(fg.BadInput, match=said):
        make_env(name)


def test_an_unknown_name_is_refused_with_those_that_are_known():
    with pytest.raises(fg.BadInput, match="algorithm 'grop' is unknown; choose from flow_grpo"):
        make_algorithm("grop", beta=0.0, clip_high=0.2, max_tokens=9)
