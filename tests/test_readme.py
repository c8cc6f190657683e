"""The README's commands and its map; `test_docs` runs its Python."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_commands_name_what_exists():
    """The main command's module is there, and CI runs the test command to the letter."""
    main, test = (block.strip() for block in blocks("sh"))
    module = shlex.split(main)[-1].replace(".", "/")
    assert (ROOT / f"{module}.py").exists()
    assert test in (ROOT / ".ci/run").read_text()


def test_map_is_true():
    """Every module of the package is on the map, and every name on the map is a module or folder."""
    drawn = README.split("## Map")[1].split("## Licence")[0]
    modules = {path.name for path in (ROOT / "flowgrpo").rglob("*.py") if path.name != "__init__.py"}
    named = set(re.findall(r"\b(\w+\.py)\b", drawn))
    assert modules <= named
    assert named <= modules | {path.name for path in (ROOT / "experiments").glob("*.py")} | {"naive.py"}


def test_every_member_of_the_family_has_a_row():
    from experiments.members import ALGORITHMS

    guide = (ROOT / "docs/algorithms.md").read_text()
    family = guide.split("## The family")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", family, re.MULTILINE)) == set(ALGORITHMS)
    assert set(re.findall(r"^### `(\w+)`$", guide, re.MULTILINE)) == set(ALGORITHMS)
