"""The flag `--loggers`, which names the sinks that a run's figures go to."""

import pytest
from absl import flags
from absl.testing import flagsaver

from experiments.loggers import chosen_loggers
from flowgrpo.types import BadInput


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
