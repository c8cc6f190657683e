"""The commands: `flowgrpo` lists them and `flowgrpo NAME --flags` runs one, as `python -m flowgrpo` does.

They are the modules of `experiments/`, which is next to the package in a checkout, and in the package if installed.
"""

import runpy
import sys
from importlib.util import find_spec
from pathlib import Path


def main() -> None:
    """Run `experiments/__main__.py` of the installed package, or else of the checkout."""
    package = "flowgrpo.experiments"
    if find_spec(package) is None:
        package, checkout = "experiments", Path(__file__).parents[1]
        sys.path.insert(0, str(checkout))  # before any other folder of that name
    runpy.run_module(package, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
