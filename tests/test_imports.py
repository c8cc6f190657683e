"""The structure: imports run downwards, the pure core stays pure, and importing has no effect."""

import ast
import re
import subprocess
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "flowgrpo"
MODULES = sorted(path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for path in PACKAGE.rglob("*.py"))

# From the ground up; a module may import from floors below its own, and from its own folder.
FLOORS = [
    ["errors", "renamed"],
    ["types"],
    ["files"],
    ["masked", "launch", "sandbox"],
    ["contracts", "report"],
    ["data"],
    ["batching"],
    ["algorithms", "models", "envs", "agent", "generate", "tools", "rewards", "evaluation"],
    ["parallel"],
    ["learner", "rollout"],
    ["gateway"],
    ["external_envs"],
    ["training", "planning"],
    ["distributed"],
    ["recipes"],
    ["publish"],
    ["api"],
]
PURE = ["errors", "renamed", "types", "contracts", "masked", "algorithms", "batching", "envs", "evaluation"]
PURE_FILES = [f"models.{name}" for name in ("attention", "kv_cache", "config", "critic", "decoder", "trainable")]
PURE_FILES += [f"generate.{name}" for name in ("requests", "sampler", "kv_slots")]
PURE_FILES += [f"learner.{name}" for name in ("adam8bit", "critic", "diagnostics", "imitation", "scoring", "state")]
PURE_FILES += ["learner.update", "parallel.sharding", "parallel.row_sharding", "planning.cost_model"]
PURE_FILES += ["data.task_sampling", "distributed.schedule", "distributed.cluster_state"]
EFFECTS = {"ray", "absl", "transformers", "subprocess", "os", "io", "pathlib", "time", "datetime", "random", "torch"}


@cache
def imports(module: str) -> set[str]:
    """The modules that a module imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / Path(*module.split("."))).with_suffix(".py").read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def packages(module: str) -> set[str]:
    return {name.split(".")[0] for name in imports(module)}


def part(module: str) -> str:
    """The file or folder of the package that a module belongs to."""
    return module.split(".")[1]


def floor(name: str) -> int:
    return next(level for level, names in enumerate(FLOORS) if name in names)


def test_imports_go_down_the_floors():
    for module in set(MODULES) - {"flowgrpo.__init__"}:
        own = part(module)
        used = {part(name) for name in imports(module) if name.startswith("flowgrpo.")} - {own, "__version__"}
        assert not [name for name in imports(module) if name.split(".")[0] == "experiments"], module
        assert all(floor(name) < floor(own) for name in used), f"{module} imports {used}"


def test_the_pure_core_has_no_effects_and_only_distributed_imports_ray():
    for module in MODULES:
        if part(module) in PURE or module.split(".", 1)[1] in PURE_FILES:
            assert not packages(module) & EFFECTS, module
        if part(module) != "distributed":
            assert not packages(module) & {"ray", "torch"}, module


def test_importing_has_no_effect():
    """No flag, device, thread or file: JAX's backend has not started after importing everything."""
    program = f"""
import os, sys, threading
before, flags = threading.active_count(), os.environ.get("XLA_FLAGS")
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
for name in {MODULES!r}:
    __import__(name.removesuffix(".__init__"))
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized(), "a backend was started"
assert threading.active_count() == before, "a thread was started"
import jax
assert os.environ.get("XLA_FLAGS") == flags and jax.config.jax_compilation_cache_dir is None, "JAX was configured"
heavy = {{"torch", "ray", "transformers", "matplotlib", "mcp", "bm25s"}} & set(sys.modules)
assert not heavy, "a heavy module was imported"
from absl import flags
assert not [f for f in flags.FLAGS.flags_by_module_dict() if "flowgrpo" in f], "a flag was defined"
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_the_package_and_the_commands_import_from_modules():
    """Not through the flat list: the first use of a name of `flowgrpo` itself configures JAX, as a script wants it."""
    import flowgrpo as fg

    through_list = set(fg.__all__) - {"launch", "__version__"}
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "experiments").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "flowgrpo":
                assert not {alias.name for alias in node.names} & through_list, path
            if isinstance(node, ast.Import):
                assert "fg" not in [alias.asname for alias in node.names], path


def public_names() -> dict[str, object]:
    """List all that `flowgrpo` and its folders offer, by dotted name."""
    import flowgrpo as fg

    offered = {name: getattr(fg, name) for name in fg.__all__}
    names = {part(module) for module in MODULES if module.count(".") > 1} | {"contracts", "types", "masked", "launch"}
    folders = {name: import_module(f"flowgrpo.{name}") for name in names}
    inside = {f"{name}.{own}": value for name, one in folders.items() for own, value in vars(one).items()}
    return offered | {name: value for name, value in inside.items() if not name.split(".")[1].startswith("_")}


def test_public_names_carry_docstrings():
    own = {name: x for name, x in public_names().items() if getattr(x, "__module__", "").startswith("flowgrpo.")}
    assert len(own) > 300
    assert not [name for name, value in own.items() if callable(value) and not getattr(value, "__doc__", None)]


def test_importing_the_package_loads_nothing_until_a_name_is_used():
    program = f"""
import sys, flowgrpo as fg, flowgrpo.launch, flowgrpo.report.figures
import flowgrpo.training.signals, flowgrpo.training.time_budget
for name in {[name for name in MODULES if name.endswith("_config") and "recipes" in name]!r}:
    __import__(name)
assert "jax" not in sys.modules, "settings and flags are read before JAX is imported"
assert fg.ppo is fg.algorithms.ppo
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_guides_and_notebooks_import_from_folders_only():
    deep = re.compile(r"(?:from|import) flowgrpo\.\w+\.\w+")
    paths = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("notebooks/*.ipynb")]
    assert not [f"{path.name}: {found[0]}" for path in paths for found in deep.finditer(path.read_text())]
