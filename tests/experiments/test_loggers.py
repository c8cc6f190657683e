"""The flag `--loggers`, which names the sinks that a run's figures go to."""

from types import SimpleNamespace

import pytest

from experiments.cli import flags
from flowgrpo.types import BadInput


def chosen(monkeypatch, given: list[str]) -> tuple[str, ...]:
    monkeypatch.setattr(flags.flags, "FLAGS", {"loggers": SimpleNamespace(value=given)})
    return flags.chosen_sinks()


@pytest.mark.parametrize(
    ("given", "names"), [(["tensorboard"], ("tensorboard",)), (["none"], ()), ([], ()), ([" "], ())]
)
def test_the_flag_names_sinks_or_none(monkeypatch, given, names):
    assert chosen(monkeypatch, given) == names


def test_a_name_that_is_no_sink_is_refused(monkeypatch):
    with pytest.raises(BadInput, match="--loggers=none is unknown"):
        chosen(monkeypatch, ["none", "tensorboard"])
