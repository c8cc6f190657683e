"""List what there is to run, in a line each, or run it.

    python -m experiments
    python -m experiments quickstart --seed=1
    python -m experiments.benchmarks

The lines are the first ones of the modules' docstrings, which are read and not imported. `NAME --help` says what a
command does, and its flags. `python -m flowgrpo` is the same, in any folder.
"""

import sys
from pathlib import Path

from .cli.listing import run_or_list

GROUPS = {
    "Train": ("train", "quickstart", "agentflow", "train_agent", "train_env", "self_verify", "cluster", "finetune"),
    "Look": ("view", "plots", "family", "environments"),
    "Compare": ("compare", "evaluate", "replay", "soak"),
    "Serve": ("gateway", "export", "chat", "score"),
    "Plan": ("plan", "simulate", "device_check"),
}
MEASURED = "python -m experiments.benchmarks lists what is measured: speed, memory, exactness."

if __name__ == "__main__":
    sys.exit(run_or_list(str(__package__), Path(__file__).parent, GROUPS, sys.argv[1:], ending=MEASURED))
