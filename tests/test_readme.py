"""The README's commands and its map; `test_docs` runs its Python."""

import ast
import re
import shlex
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_commands_name_what_exists():
    """The modules of the main command and of a real model are there, and CI runs the test command to the letter."""
    main, test, real = (block.strip() for block in blocks("sh"))
    for command in (main, real):
        words = shlex.split(command)
        module = [after for word, after in pairwise(words) if word == "-m"][-1].replace(".", "/")
        assert (ROOT / f"{module}.py").exists()
    assert test in (ROOT / ".ci/run").read_text()


def test_map_is_true():
    """Every folder and every loose module of the package is on the map, and all that it names is there."""
    drawn = README.split("## Map")[1].split("## Licence")[0]
    package = ROOT / "flowgrpo"
    folders = {path.parent.relative_to(package).as_posix() for path in package.rglob("__init__.py")} - {"."}
    loose = {path.name for path in package.glob("*.py")} - {"__init__.py"}
    named = set(re.findall(r"(?<![\w/])([\w/]+\.py)\b", drawn))
    assert {f"{folder}/" for folder in folders if "/" not in folder} <= set(re.findall(r"[\w/]+/", drawn))
    assert loose <= named
    for name in named:
        assert any((base / name).exists() for base in (package, ROOT)), name


def test_every_folder_lists_its_modules():
    for path in (ROOT / "flowgrpo").rglob("__init__.py"):
        modules = {module.stem for module in path.parent.glob("*.py")} - {"__init__"}
        listed = set(re.findall(r"^    (\w+)  ", ast.get_docstring(ast.parse(path.read_text())) or "", re.MULTILINE))
        assert path.parent.name == "flowgrpo" or modules <= listed, path


def test_every_member_of_the_family_has_a_row():
    from flowgrpo.recipes.registry import ALGORITHMS

    guide = (ROOT / "docs/algorithms.md").read_text()
    family = guide.split("## The family")[1].split("\n## ")[0]
    members = {*ALGORITHMS, "sdpo"}  # which no flag names: its planners have to know hints
    assert set(re.findall(r"^\| `(\w+)` \|", family, re.MULTILINE)) == members
    assert set(re.findall(r"^### `(\w+)`$", guide, re.MULTILINE)) == members
