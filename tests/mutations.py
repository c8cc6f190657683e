"""Mutation checks: change one operator or constant of a module at a time, and see whether its tests notice.

    python -m tests.mutations flowgrpo/masked.py tests/test_masked.py --sample=40 --seed=0

Every mutant runs the given tests of the quick tier in a process of its own, forked from one that has imported the
libraries already. What no test notices is listed with its line: a gap in the tests, or a change that changes nothing.
The source on disk is never touched: the mutated module is compiled when it is imported. CI doesn't run this.
"""

import argparse
import ast
import copy
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PRELOADED = ("jax", "jax.numpy", "flax.struct", "optax", "chex", "numpy", "pytest", "transformers", "orbax.checkpoint")
SWAPPED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


class Mutant(NamedTuple):
    """One change: the node's place in the walk of the tree, which of its changes, and how it reads."""

    node: int
    change: int
    line: int
    before: str
    after: str


def changes_of(node: ast.AST) -> list[Callable[[ast.AST], ast.AST]]:
    """List functions that return the changed node, given a copy of it."""
    if isinstance(node, ast.Compare):
        return [_swap_comparison(i) for i in range(len(node.ops))]
    if isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in SWAPPED:
        return [_swap_operator]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub | ast.Invert):
        return [lambda new: new.operand]
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        return [_change_constant]
    if isinstance(node, ast.If | ast.IfExp | ast.While) and not isinstance(
        node.test, ast.Compare | ast.BoolOp | ast.UnaryOp
    ):
        return [_negate_test]
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return [lambda _: ast.Pass()]
    return []


def _swap_comparison(i: int) -> Callable[[ast.AST], ast.AST]:
    def swap(new):
        new.ops[i] = SWAPPED[type(new.ops[i])]()
        return new

    return swap


def _swap_operator(new):
    new.op = SWAPPED[type(new.op)]()
    return new


def _change_constant(new):
    new.value = not new.value if isinstance(new.value, bool) else new.value + 1
    return new


def _negate_test(new):
    new.test = ast.UnaryOp(ast.Not(), new.test)
    return new


def visited(tree: ast.AST) -> Iterator[ast.AST]:
    """Walk the code of a module in a fixed order, without its annotations and what only type checkers read."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "type_comment"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child
                yield from visited(child)


def mutants_of(source: str) -> list[Mutant]:
    """List every change of a module."""
    mutants = []
    for place, node in enumerate(visited(ast.parse(source))):
        for number, change in enumerate(changes_of(node)):
            before, after = (" ".join(ast.unparse(x).split())[:90] for x in (node, change(copy.deepcopy(node))))
            if before != after:
                mutants.append(Mutant(place, number, getattr(node, "lineno", 0), before, after))
    return mutants


def mutated(source: str, mutant: Mutant) -> ast.Module:
    """Return the tree of the module with one change."""
    tree = ast.parse(source)
    target = next(node for place, node in enumerate(visited(tree)) if place == mutant.node)
    changed = changes_of(target)[mutant.change](copy.deepcopy(target))

    class Replace(ast.NodeTransformer):
        def visit(self, node):
            return ast.copy_location(changed, node) if node is target else self.generic_visit(node)

    return ast.fix_missing_locations(Replace().visit(tree))


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Give the mutated tree to whoever imports the module."""

    def __init__(self, name: str, path: Path, tree: ast.Module):
        self.name, self.path, self.tree = name, path, tree

    def find_spec(self, fullname, path=None, target=None):  # noqa: ARG002
        if fullname != self.name:
            return None
        return importlib.util.spec_from_file_location(fullname, self.path, loader=self)

    def create_module(self, spec):  # noqa: ARG002
        return None

    def exec_module(self, module):
        exec(compile(self.tree, str(self.path), "exec"), module.__dict__)


def run_tests(tests: list[str], log: Path, finder: _Finder | None, seconds: float) -> int:
    """Run the tests in a fork and return pytest's status, or 124 where they took too long."""
    child = os.fork()
    if child == 0:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        import pytest

        if finder is not None:
            sys.meta_path.insert(0, finder)
        options = [
            "-x",
            "-q",
            "-W",
            "ignore::pytest.PytestAssertRewriteWarning",
            "-p",
            "no:xdist",
            "-p",
            "no:cacheprovider",
            "-m",
            "not slow and not oracle and not soak",
        ]
        try:
            status = int(pytest.main([*options, *tests]))
        except BaseException:  # a mutant that ends the process is noticed
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        os._exit(status)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            _kill_group(child)
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    _kill_group(child)
    os.waitpid(child, 0)
    return 124


def _kill_group(child: int) -> None:
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        return


def main() -> None:
    """Run the mutants of one module and print a line for each that survives, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module", help="the file to change, as flowgrpo/masked.py")
    parser.add_argument("tests", nargs="+", help="the tests that should notice, the quickest first")
    parser.add_argument("--sample", type=int, default=40, help="how many mutants are drawn (0: all)")
    parser.add_argument("--seed", type=int, default=0, help="of that draw")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of single mutants, as printed")
    parser.add_argument("--log", default=None, help="a folder for what each mutant's tests printed")
    chosen = parser.parse_args()
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    path = Path(chosen.module)
    source = path.read_text()
    mutants = mutants_of(source)
    numbers = list(range(len(mutants)))
    if chosen.only is not None:
        numbers = chosen.only
    elif chosen.sample and chosen.sample < len(mutants):
        numbers = sorted(random.Random(chosen.seed).sample(numbers, chosen.sample))
    for name in PRELOADED:
        importlib.import_module(name)
    logs = Path(chosen.log or f"/tmp/mutations-{os.getpid()}")
    logs.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    if (status := run_tests(chosen.tests, logs / "plain.log", None, 1800)) != 0:
        sys.exit(f"the tests end with status {status} without any change: see {logs / 'plain.log'}")
    limit = 3 * (time.monotonic() - start) + 30
    print(f"{path}: {len(numbers)} of {len(mutants)} mutants, tests alone {time.monotonic() - start:.1f} s", flush=True)
    name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    survivors = []
    for number in numbers:
        mutant = mutants[number]
        finder = _Finder(name, path, mutated(source, mutant))
        if run_tests(chosen.tests, logs / f"{number}.log", finder, limit) == 0:
            survivors.append(number)
            print(f"survived {number}: line {mutant.line}: {mutant.before}  ->  {mutant.after}", flush=True)
    made, killed = len(numbers), len(numbers) - len(survivors)
    seconds = round(time.monotonic() - start)
    print(json.dumps({"module": str(path), "made": made, "killed": killed, "survivors": survivors, "seconds": seconds}))


if __name__ == "__main__":
    main()
