"""List the benchmarks in a line each, or print all about the one that is named.

python -m experiments.benchmarks
python -m experiments.benchmarks decode
"""

import sys
from pathlib import Path

from ..cli.listing import listing

GROUPS = {
    "The machine": ("ceilings", "startup"),
    "Learning": ("update", "attention", "packing", "meshes"),
    "Playing": ("decode", "hosted", "gateway", "exactness", "loading"),
    "Looking": ("viewer",),
    "Rewards": ("answers", "rewards"),
    "Whole iterations": ("iteration", "seeds", "staged", "cluster"),
    "Other systems": ("peers",),
}

if __name__ == "__main__":
    sys.exit(listing("experiments.benchmarks", Path(__file__).parent, GROUPS, sys.argv[1:]))
