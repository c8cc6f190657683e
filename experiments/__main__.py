"""List what there is to run, in a line each.

    python -m experiments
    python -m experiments quickstart
    python -m experiments.benchmarks

The lines are the first ones of the modules' docstrings, which are read and not imported. With a name, prints the whole
docstring of that one; its flags are in `python -m experiments.NAME --help`.
"""

import sys
from pathlib import Path

from .cli.listing import listing

GROUPS = {
    "Train": ("quickstart", "agentflow", "train_agent", "train_env", "self_verify", "cluster", "finetune"),
    "Look": ("view", "plots", "family", "environments"),
    "Compare": ("compare", "evaluate", "replay", "soak"),
    "Serve": ("gateway", "export", "chat", "score"),
    "Plan": ("plan", "simulate", "device_check"),
}
MEASURED = "python -m experiments.benchmarks lists what is measured: speed, memory, exactness."

if __name__ == "__main__":
    sys.exit(listing("experiments", Path(__file__).parent, GROUPS, sys.argv[1:], ending=MEASURED))
