"""List the benchmarks in a line each, or run the one that is named.

python -m experiments.benchmarks
python -m experiments.benchmarks decode --help
"""

import sys
from pathlib import Path

from ..cli.listing import run_or_list

GROUPS = {
    "The machine": ("ceilings", "startup"),
    "Learning": ("update", "attention", "packing", "prefixes", "meshes"),
    "Playing": ("decode", "hosted", "gateway", "exactness", "loading"),
    "Real models": ("agents",),
    "Looking": ("viewer",),
    "Rewards": ("answers", "rewards"),
    "Whole iterations": ("iteration", "seeds", "staged", "cluster"),
    "Other systems": ("peers", "real"),
}

if __name__ == "__main__":
    sys.exit(run_or_list(str(__package__), Path(__file__).parent, GROUPS, sys.argv[1:]))
