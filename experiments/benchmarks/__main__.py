"""List the benchmarks, or run one by name.

python -m experiments.benchmarks
python -m experiments.benchmarks decode --help
"""

import sys
from pathlib import Path

from ..cli.listing import run_or_list

GROUPS = {
    "The machine": ("ceilings", "startup"),
    "Learning": ("update", "attention", "packing", "prefixes", "meshes"),
    "Rollouts": ("decode", "hosted", "gateway", "exactness", "loading"),
    "Real models": ("agents",),
    "Inspecting runs": ("viewer",),
    "Rewards": ("answers", "rewards"),
    "Whole iterations": ("iteration", "seeds", "staged", "cluster"),
    "Other systems": ("peers", "real"),
}

if __name__ == "__main__":
    sys.exit(run_or_list(str(__package__), Path(__file__).parent, GROUPS, sys.argv[1:]))
