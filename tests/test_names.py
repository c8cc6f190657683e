"""Tests of names: a class or a public function has a name of its own, so that a search for it finds one thing."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
RECIPES = {"Config", "preset", "open", "train", "evaluate", "rehearse"}  # what recipes offer
COMMANDS = {"main"}
PAIRS = {"to_json", "from_json"}  # what is written, and read again


def homes() -> dict[str, list[str]]:
    """The modules that define a class of this name, or a public function, at their top."""
    found = defaultdict(list)
    for top in ("flowgrpo", "experiments"):
        for path in sorted((ROOT / top).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            for node in ast.parse(path.read_text()).body:
                public = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_")
                if isinstance(node, ast.ClassDef) or public:
                    found[node.name].append(module)
    return found


def test_no_class_and_no_public_function_has_the_name_of_another():
    twice = {name: modules for name, modules in homes().items() if len(modules) > 1}
    assert not {name: modules for name, modules in twice.items() if name not in RECIPES | COMMANDS | PAIRS}
    for name in RECIPES & set(twice):
        assert all(module.startswith("flowgrpo.recipes.") for module in twice[name]), name
