"""For tests of soaks: the run of `tiny_work` as a command, slow enough for a signal at any stage."""

import time
from pathlib import Path

from absl import flags
from tiny_work import tiny_work

from experiments.cli import app
from flowgrpo.training.session import run_session

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the results.", required=True)


def wait(_stage: str, _update: int) -> None:
    """Sleep 0.05 s, to slow down the run."""
    time.sleep(0.05)


def main() -> None:
    """Train."""
    run_session(tiny_work(wait), Path(_WORKDIR.value), every=2)


if __name__ == "__main__":
    app.run(main)
