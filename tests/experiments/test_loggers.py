"""The commands around figures: where they go, and what is drawn of them."""

from pathlib import Path

import pytest
from absl import flags
from absl.testing import flagsaver
from commands import run_module

from experiments.loggers import chosen_loggers
from flowgrpo.types import BadInput

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def parsed():
    flags.FLAGS.mark_as_parsed()


@pytest.mark.parametrize(
    ("given", "chosen"), [(["tensorboard"], ("tensorboard",)), (["none"], ()), ([], ()), ([" "], ())]
)
def test_the_flag_names_sinks_or_none(given, chosen):
    with flagsaver.flagsaver(loggers=given):
        assert chosen_loggers() == chosen


def test_a_name_that_is_no_sink_is_refused():
    with (
        flagsaver.flagsaver(loggers=["none", "tensorboard"]),
        pytest.raises(BadInput, match="--loggers=none is unknown"),
    ):
        chosen_loggers()


def test_plots_of_no_run_are_one_sentence(tmp_path):
    said = run_module("experiments.plots", f"--workdir={tmp_path}")
    assert said.returncode == 1
    assert said.stderr.strip().endswith("metrics.jsonl can't be read (No such file or directory)")
    assert said.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
