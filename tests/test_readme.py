"""What the README says is run: its Python, its commands, its map."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_python_examples_run_one_after_another(capsys):
    """Each example may use what the ones before it made; what a comment promises is printed."""
    namespace: dict = {}
    for source in blocks("python"):
        exec(compile(source, "README.md", "exec"), namespace)
    assert capsys.readouterr().out.strip() == "[ 0.866  0.866 -0.866 -0.866]"
    assert "# [ 0.866  0.866 -0.866 -0.866]" in README


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

    family = README.split("## The family")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", family, re.MULTILINE)) == set(ALGORITHMS)
