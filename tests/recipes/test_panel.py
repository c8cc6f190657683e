"""The panel: its sets are what they were, in any process and on any number of devices; a planner plays those it can."""

import json
import os
import subprocess
import sys

import jax
import pytest

import flowgrpo as fg
from flowgrpo.recipes import panel, pure
from flowgrpo.recipes.registry import ENVIRONMENTS

DRAW = "import json; from flowgrpo.recipes import panel; print(json.dumps(panel.draw_hashes()))"


def test_the_hashes_are_of_every_environment_and_differ():
    assert panel.HASHES.keys() == ENVIRONMENTS.keys()
    assert len(set(panel.HASHES.values())) == len(ENVIRONMENTS)


def test_sets_are_the_same_in_another_process_with_8_devices():
    assert panel.draw_hashes() == panel.HASHES
    devices = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    out = subprocess.run([sys.executable, "-c", DRAW], env=os.environ | devices, capture_output=True, text=True)
    assert json.loads(out.stdout) == panel.HASHES, out.stderr


def test_a_set_that_is_drawn_otherwise_is_refused(monkeypatch):
    monkeypatch.setitem(panel.HASHES, "maze", "0" * 12)
    with pytest.raises(fg.BadInput, match="the panel's set maze is 000000000000, but what is drawn here is add6"):
        panel.panel_set("maze")


def test_a_planner_is_evaluated_on_sets_with_its_vocabulary():
    assert panel.panel_names(fg.maze()) == ["maze", "maze_hard"]
    assert panel.panel_names(fg.lookup()) == ["lookup"]  # the hard one has more tools
    with pytest.raises(fg.BadInput, match="no set with the vocabulary of lookup; it has lookup, arithmetic"):
        panel.panel_names(fg.lookup(tools=3))


@pytest.mark.slow
def test_figures_of_the_panel_are_those_of_its_tasks():
    """A fresh planner solves next to nothing, twice the same, and what it plays is named with its hash."""
    setup = pure.build(pure.preset("maze", model_dim=32, layers=1))
    params = setup.policy.init(jax.random.key(0))
    first, again = (panel.evaluate_panel(setup.policy, params, ["maze"]) for _ in range(2))
    assert first == again
    (label, figures), *_ = first.items()
    assert label == f"maze@{panel.HASHES['maze']}"
    assert (figures.tasks, figures.samples) == (panel.TASKS, panel.TASKS)
    assert figures.success < 0.2
    assert "maze@" in panel.panel_table({label: [figures, figures]})
