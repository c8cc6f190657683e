"""Members of the family by name: each gets what a preset says as far as it has such a setting."""

import numpy as np
import pytest
from family_cases import batch_of, make_case, scores_of

import flowgrpo as fg
from experiments.device_checks import bench, suite
from experiments.studies import studies
from flowgrpo.envs.env import SPLITS
from flowgrpo.models import attention_kernels, lora, quantised
from flowgrpo.recipes import agent, agent_config, finetune, offline_tasks, pure, pure_config, registry
from flowgrpo.recipes.finetune_config import RATES
from flowgrpo.recipes.registry import ALGORITHMS, make_algorithm, make_env
from flowgrpo.training import names, planner


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_can_be_named_in_both_kinds_of_run(name):
    parts = pure.build(pure.preset("lookup", name, teacher="run" if name == "opd" else None))
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


def test_an_imported_environment_is_what_a_function_returns():
    assert make_env("tiny_env:tiny_env").name == "tiny"
    assert pure.preset("tiny_env:tiny_env", updates=3).model.model_dim == pure_config.IMPORTED["model_dim"]


BROKEN = """import flowgrpo as fg
class Needs:
    def __init__(self, words):
        pass
def raises():
    raise RuntimeError("two\\nlines")
def wrong():
    return fg.lookup(hop=3)
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("chess", "'chess' is unknown; choose from lookup, arithmetic, maze, lookup_hard,"),
        ("tiny_envy:tiny_env", "can't be imported: No module named 'tiny_envy'"),
        ("tiny_env:", "names a module and nothing in it: write MODULE:NAME"),
        ("tiny_env:chess", "can't be imported: module 'tiny_env' has no attribute 'chess'"),
        (":tiny_env", "has no name of a module before the colon"),
        ("..:tiny_env", "has no name of a module before the colon"),
        ("builtins:list", r"gave \[\], which is no fg.Env: give MODULE:FUNCTION"),
        ("os:path", "gave <module .*, which is no fg.Env"),
        ("json:dumps", r"can't be made: TypeError: dumps\(\) missing 1 required .*; give MODULE:FUNCTION"),
        ("builtins:exit", "can't be made: SystemExit"),
        ("own_broken:Needs", "can't be made: TypeError: .*Needs"),
        ("own_broken:raises", r"can't be made: RuntimeError: two lines \(own_broken.py, line 6\)"),
        ("own_broken:wrong", "can't be made: lookup has no option hop"),
        ("own_fails:env", r"can't be imported: ZeroDivisionError: .* \(own_fails.py, line 1\)"),
        ("own_quits:env", r"can't be imported: SystemExit: 0 \(own_quits.py, line 2\)"),
    ],
)
def test_what_gives_no_environment_is_refused(name, said, tmp_path, monkeypatch):
    (tmp_path / "own_broken.py").write_text(BROKEN)
    (tmp_path / "own_fails.py").write_text("1 / 0")
    (tmp_path / "own_quits.py").write_text("import sys\nsys.exit(0)")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(fg.BadInput, match=said):
        make_env(name)


def test_the_names_that_flags_offer_are_those_of_what_they_name():
    assert tuple(registry.ENVIRONMENTS) == names.ENVIRONMENTS
    assert tuple(registry.OPTIMIZERS) == names.OPTIMIZERS
    assert tuple(studies.STUDIES) == names.STUDIES
    assert (*offline_tasks.MAKERS, "drawing") == names.OFFLINE_DOMAINS
    assert (tuple(suite.CHECKS), tuple(bench.SIZES)) == (names.CHECKS, names.CHECK_SIZES)
    assert tuple(planner.OFFLOAD) == names.OFFLOAD
    assert (names.WHOLE_BASE, *quantised.KINDS) == names.BASE_DTYPES
    assert (names.PROJECTIONS, names.ATTENTION) == (lora.PROJECTIONS, attention_kernels.ATTENTION)
    assert (names.SPLITS, tuple(RATES)) == (SPLITS, tuple(finetune.METHODS))


def test_an_unknown_name_is_refused_with_those_that_are_known():
    with pytest.raises(fg.BadInput, match="algorithm 'grop' is unknown; choose from flow_grpo"):
        make_algorithm("grop", beta=0.0, clip_high=0.2, max_tokens=9)


def test_an_algorithm_of_ones_own_is_named_by_its_module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "algorithm_of_mine.py").write_text(
        "import flowgrpo as fg\nmine = fg.grpo(beta=0.5)\ndef make():\n    return mine\nnothing = 3\n"
    )
    config = pure.preset("lookup", "algorithm_of_mine:mine", model_dim=16, layers=1)
    assert pure.build(config).algorithm.name == "grpo"
    own = make_algorithm("algorithm_of_mine:make", beta=0.0, clip_high=0.0, max_tokens=8)
    assert "logp_ref" in own.needs  # of its own KL, which the settings don't change
    with pytest.raises(fg.BadInput, match=r"'algorithm_of_mine:nothing' is 3, which is no fg\.Algorithm"):
        make_algorithm("algorithm_of_mine:nothing", beta=0.0, clip_high=0.0, max_tokens=8)
    with pytest.raises(fg.BadInput, match=r"--algorithm=chess is unknown; choose from flow_grpo, .*, or MODULE:NAME"):
        pure.preset("lookup", "chess")
