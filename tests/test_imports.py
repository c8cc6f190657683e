"""The structure: imports run downwards, the pure core stays pure, and importing has no effect."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "flowgrpo"
MODULES = sorted(path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for path in PACKAGE.rglob("*.py"))

# From the ground up; a module may import from floors below its own, and from its own folder.
FLOORS = [
    ["types"],
    ["files"],
    ["masked", "text", "sandbox", "spread", "launch", "stuck", "under_way"],
    ["contracts", "ragged", "layouts", "tasks", "schedule", "buffer", "report"],
    ["packing", "task_files", "effects", "simulation", "priorities"],
    ["algorithms", "models", "envs", "agent", "generate", "tools", "rewards", "evaluate", "statistics", "many"],
    ["learner", "rollout"],
    ["loop"],
    ["staged"],
    ["distributed"],
]
PURE = [
    "types",
    "contracts",
    "masked",
    "under_way",
    "schedule",
    "buffer",
    "priorities",
    "algorithms",
    "layouts",
    "ragged",
    "packing",
    "envs",
    "evaluate",
    "statistics",
    "many",
]
PURE_FILES = [f"models.{name}" for name in ("attention", "cache", "config", "critic", "decoder", "image_text")]
PURE_FILES += [f"generate.{name}" for name in ("jobs", "pieces", "programs", "sampler", "slots", "stops")]
PURE_FILES += [f"learner.{name}" for name in ("appraise", "critic", "micro", "state", "trained", "update", "warmstart")]
PURE_FILES += [f"learner.{name}" for name in ("floor", "optimizers", "quantised", "sharding", "traced", "watch")]
EFFECTS = {"ray", "absl", "transformers", "subprocess", "os", "io", "pathlib", "time", "datetime", "random", "torch"}


def imports(module: str) -> set[str]:
    """The modules that a module imports, anywhere in it."""
    path = ROOT / Path(*module.split("."))
    tree = ast.parse(
        (path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py").read_text()
    )
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def part(module: str) -> str:
    """The file or folder of the package that a module belongs to."""
    return module.split(".")[1]


def floor(name: str) -> int:
    return next(level for level, names in enumerate(FLOORS) if name in names)


@pytest.mark.parametrize("module", [m for m in MODULES if m != "flowgrpo.__init__"])
def test_imports_run_downwards(module):
    own = part(module)
    used = {part(name) for name in imports(module) if name.startswith("flowgrpo.")} - {own}
    used &= {name for names in FLOORS for name in names}
    assert all(floor(name) < floor(own) for name in used), f"{module} imports {used}"


@pytest.mark.parametrize("module", [m for m in MODULES if part(m) in PURE or m.split(".", 1)[1] in PURE_FILES])
def test_the_pure_core_has_no_effects(module):
    assert not {name.split(".")[0] for name in imports(module)} & EFFECTS


@pytest.mark.parametrize("module", [m for m in MODULES if not m.startswith("flowgrpo.distributed")])
def test_only_distributed_imports_ray_and_nothing_imports_torch(module):
    assert not {name.split(".")[0] for name in imports(module)} & {"ray", "torch"}


def test_importing_has_no_effect():
    """No flag, device, thread or file: JAX's backend has not started after importing everything."""
    program = f"""
import sys, threading
before = threading.active_count()
for name in {MODULES!r}:
    __import__(name.removesuffix(".__init__"))
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized(), "a backend was started"
assert threading.active_count() == before, "a thread was started"
heavy = {{"torch", "ray", "transformers", "matplotlib", "mcp", "bm25s"}} & set(sys.modules)
assert not heavy, "a heavy module was imported"
from absl import flags
assert not [f for f in flags.FLAGS.flags_by_module_dict() if "flowgrpo" in f], "a flag was defined"
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_public_names_carry_docstrings():
    import flowgrpo as fg

    public = {name: value for name, value in vars(fg).items() if not name.startswith("_")}
    bare = [name for name, value in public.items() if callable(value) and not getattr(value, "__doc__", None)]
    assert not [name for name in bare if name != "Generate"]
