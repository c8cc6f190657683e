"""The first command of the README: its figures."""

import json

import pytest

from experiments import family
from flowgrpo.recipes.registry import ALGORITHMS


@pytest.mark.slow
def test_default_run_shows_the_difference_between_paper_and_released_code(command):
    """Two 2-turn wins and two 6-turn losses: +-0.866 against +1.677 and -0.559."""
    table = json.loads(command("family", "--algorithms=flow_grpo,flow_grpo_released", "--json").stdout)
    advantages = {name: [row["first_turn"] for row in rows] for name, rows in table.items()}
    assert advantages["flow_grpo"] == pytest.approx([0.8660] * 2 + [-0.8660] * 2, abs=1e-4)
    assert advantages["flow_grpo_released"] == pytest.approx([1.6771] * 2 + [-0.5590] * 2, abs=1e-4)
    assert [row["share"] for row in table["flow_grpo"]] == pytest.approx([0.25] * 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ALGORITHMS.keys() - {"opd"}))  # whose teacher is the planner here
def test_every_algorithm_pushes_wins_up_and_losses_down(name):
    trajectories = family.make_group([1.0, 0.0, 0.0], [2, 1, 3], 4)
    rows = family.credit_of(family.build(name, 4, [2, 1, 3]), trajectories)
    assert rows[0]["push"] > 0 > min(row["push"] for row in rows[1:])
    assert sum(row["share"] for row in rows) == pytest.approx(1.0)
