"""The commands: `flowgrpo` lists them and `flowgrpo NAME --flags` runs one, as `python -m flowgrpo` does.

They are the modules of `experiments/`, which lies beside the package in a checkout, and in it where it was installed.
"""

import runpy
import sys
from importlib.util import find_spec
from pathlib import Path


def main() -> None:
    """Run `experiments/__main__.py`, wherever it is."""
    package = "flowgrpo.experiments"
    if find_spec(package) is None:
        package, checkout = "experiments", Path(__file__).parents[1]
        sys.path.insert(0, str(checkout))  # another folder of that common name may be nearer
    runpy.run_module(package, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
