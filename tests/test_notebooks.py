"""The notebooks: each runs from its first cell to its last, and is stored as it ran."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT, xla_flags

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
ALLOWED = {"flowgrpo", "jax", "flax", "numpy", "matplotlib", "optax", "tokenizers", "transformers"}
IN_CI = {"1_flow_grpo_in_one_page"}  # the others take a minute or two each: python -m pytest -m soak


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


def test_there_are_six_in_order():
    assert [path.stem.partition("_")[0] for path in NOTEBOOKS] == list("123456")


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=pytest.mark.slow if path.stem in IN_CI else pytest.mark.soak)
        for path in NOTEBOOKS
    ],
)
def test_cells_run_and_their_claims_hold(path, tmp_path):
    """In a process and a folder of their own, with warnings as errors; cells assert what the text claims."""
    script = tmp_path / "cells.py"
    script.write_text("\n\n".join(sources(path)))
    environment = os.environ | {"XLA_FLAGS": xla_flags(1), "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
    command = [sys.executable, "-W", "error", script.name]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert [item.name for item in tmp_path.iterdir()] == ["cells.py"]  # nothing is left behind


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_imports_the_package_and_what_it_depends_on_and_begins_with_configure(path):
    assert imported(path) <= ALLOWED | set(sys.stdlib_module_names)
    assert "launch.configure()" in sources(path)[0]
    assert "jax" not in sources(path)[0].replace("JAX", "")


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
