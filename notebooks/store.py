"""Run notebooks from their first cell to their last, and store what they show.

    python notebooks/store.py                    all of them
    python notebooks/store.py notebooks/1_*      some

Needs the extra [notebooks]. A cell that fails ends it, and that notebook stays as it was.
"""

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient


def store(path: Path) -> None:
    """Run the notebook in an empty folder, and write it with its outputs and without the times of its cells."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    with TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=None, record_timing=False, resources=resources).execute()
    nbformat.write(notebook, path)


if __name__ == "__main__":
    # What tqdm says where there are no ipywidgets, and transformers where there is no PyTorch.
    os.environ |= {"PYTHONWARNINGS": "ignore:IProgress not found", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}
    for name in sys.argv[1:] or sorted(Path(__file__).parent.glob("*.ipynb")):
        store(Path(name))
        print(f"{name} is stored", flush=True)
