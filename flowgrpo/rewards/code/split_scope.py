"""Expressions of tests, for `split_tests`: a `Scope` takes them apart between two runs and adds steps to a `SplitPlan`.

The scope knows what kind of thing each name holds by now. Kinds:

    candidate   from the model's code           pure      computed by the tests alone
    remote      lives in the candidate's run    derived   computed by the tests from the candidate's values
    kept        an argument: the tests hold what they made, the candidate's run a copy that it may change
    changed     an argument that a statement handed over to be changed: it is what the candidate's run says that it is
    shared      an import, in both runs         builtin   in both runs

All that is said of a remote name or of an argument is computed in the tests' run, on one value that the candidate's run
returns until the candidate is called again. Only where that value is not plain data (an object of the candidate's
class, a generator) does the candidate's run compute `s.pop()` or `len(s)`, which are calls of its methods.
"""

import ast
import builtins
import copy
import operator
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import NoReturn

from flowgrpo.types import BadInput

# Methods whose answer is the verdict itself: they are called on the plain value, in the tests' run.
VERDICTS = {name for kind in (str, set, float) for name in dir(kind) if name.startswith("is")}
VERDICTS |= {"startswith", "endswith"}
# Methods of plain data.
METHODS = {name for kind in (str, bytes, list, dict, set) for name in dir(kind) if not name.startswith("_")}
# Functions of one argument that only make plain data of a value, so they may run beside the candidate.
CONVERTERS = {"list", "tuple", "set", "frozenset", "dict", "str", "repr", "len", "next", "sorted", "sum", "min", "max"}
CONVERTERS |= {"bool", "int", "float", "abs"}
OF_OBJECTS = {"str", "repr", "next"}  # which tell more of an object than its data
# What makes a name of the candidate's that of a class: it is used with something that no plain data has.
PLAIN_NAMES = METHODS | {name for kind in (int, float, complex, Counter, deque, OrderedDict) for name in dir(kind)}
PLAIN_NAMES |= {name for kind in (Decimal, Fraction, datetime, timedelta, range) for name in dir(kind)}
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
THEIRS = {"candidate", "remote"}  # kinds of names that lead into the candidate's run
SAID = {*THEIRS, "changed", "derived"}  # kinds of which the tests know what the candidate's run says
NONE = frozenset()
UNROLLED_CALLS = 200  # of a comprehension


class Unsplittable(BadInput):
    """The tests hold something that can't be split; the message names the line."""


@dataclass
class SplitPlan:
    """Division of tests between two runs, the candidate's and the tests' own.

    Numbers lead from an item to its value, its verdict or its line.
    """

    entry_points: frozenset[str] = frozenset()
    steps: list[tuple[int | None, str]] = field(default_factory=list)  # (number of the value or None, source)
    given: list[tuple[str, int, str]] = field(default_factory=list)  # setups, and what the candidate is handed
    items: list[tuple[str, int, str]] = field(default_factory=list)  # (setup, derive or check; number; source)
    checks: list[str] = field(default_factory=list)  # each check in words
    uses: list[list[int]] = field(default_factory=list)  # the values that each check looks at
    first: dict[int, int] = field(default_factory=dict)  # from a name's value to the one when it was assigned

    @property
    def handed(self) -> int:
        """Count the values that the tests have to compute before the candidate runs."""
        return sum(kind == "given" for kind, _, _ in self.given)

    def value(self, source: str) -> int:
        """Add a step whose value comes back -> its number."""
        number = sum(known is not None for known, _ in self.steps)
        self.steps.append((number, source))
        return number

    def check(self, source: str, words: str, uses: list[int]) -> None:
        """Add a check to the tests' run."""
        self.items.append(("check", len(self.checks), source))
        self.checks.append(words)
        self.uses.append(uses)


class Scope:
    """Kinds of the things that names hold, brought up to date statement by statement, with the `SplitPlan` so far."""

    def __init__(self, entry_points: Collection[str]):
        self.plan = SplitPlan(frozenset(entry_points))
        self.entry_points = set(entry_points)
        self.names = dict.fromkeys(entry_points, "candidate")
        self.literals: dict[str, ast.expr] = {}  # of pure names whose value is known here
        self.returned: set[str] = set()  # remote names of what a function of the candidate returned
        self.objects: dict[str, str] = {}  # remote names of what a class of the candidate made, and its name
        self.classes: set[str] = set()  # names of the candidate's that are known to be classes
        self.calls = 0  # into the candidate, so far
        self.claims: dict[str, tuple[int | None, int]] = {}  # number of a name's value, and after how many calls
        self.fixed: set[str] = set()  # names of what a call returned, which no call has been handed since
        self.before: dict[str, int] = {}  # number of the value that an argument had before a part of an assert
        self.assigned: dict[str, int] = {}  # number of the value that a name had when it was assigned
        self.judges: set[ast.Call] = set()  # calls whose answer is the verdict, so no method of the candidate gives it
        self.where = ""  # which source is read

    def refuse(self, node: ast.AST, why: str) -> NoReturn:
        raise Unsplittable(f"{self.where}line {getattr(node, 'lineno', '?')} of the tests {why}")

    # Names --------------------------------------------------------------------------------------------

    def kind(self, name: str) -> str:
        known = self.names.get(name)
        return known or ("builtin" if hasattr(builtins, name) or name == "__name__" else "candidate")

    def kinds(self, node: ast.AST, bound: frozenset[str] = NONE) -> set[str]:
        """List the kinds of the names in a node that nothing binds."""
        return {self.kind(name) for name in free_names(node, bound)}

    # Where an expression belongs ----------------------------------------------------------------------

    def is_step(self, node: ast.expr, bound: frozenset[str] = NONE) -> bool:
        """Say whether an expression is evaluated in the candidate's run, as a whole."""
        match node:
            case ast.Name():
                return node.id not in bound and self.kind(node.id) == "remote"
            case ast.Attribute():
                return self.leads(node.value, bound) and node.attr not in VERDICTS and not node.attr.startswith("__")
            case ast.Subscript():
                return self.leads(node.value, bound)
            case ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[one]):
                return self.class_of(one) in self.classes and not bound
            case ast.ListComp(elt=ast.Attribute(value=ast.Name(id=name)), generators=[one]) if not one.ifs:
                inside = bound | binds(node)
                return self.leads(node.elt, inside) or (name in inside and self.is_step(one.iter, bound))
            case ast.ListComp():
                inside = bound | binds(node)
                theirs = any(self.kinds(part, inside) & THEIRS for part in node.generators)
                return self.is_step(node.elt, inside) and not theirs
            case ast.Call(func=ast.Name(id=name), args=[only], keywords=[]) if name in CONVERTERS:
                if self.kind(name) == "builtin":
                    return self.is_step(only, bound)
        return isinstance(node, ast.Call) and self.leads(node.func, bound)

    def is_own_call(self, node: ast.AST) -> bool:
        """Say whether a node calls a function of the tests themselves, or a builtin."""
        called = node.func if isinstance(node, ast.Call) else None
        return isinstance(called, ast.Name) and self.kind(called.id) in ("pure", "builtin")

    def leads(self, node: ast.expr, bound: frozenset[str] = NONE) -> bool:
        """Say whether a call, an attribute or an item of it is the candidate's."""
        if isinstance(node, ast.Name):
            return node.id not in bound and self.kind(node.id) in THEIRS
        return self.is_step(node, bound)

    def class_of(self, node: ast.expr) -> str:
        """Name the class of the candidate that a node is an object of, as far as its capital letter says so; or ""."""
        match node:
            case ast.Name(id=name) if self.kind(name) == "remote":
                return self.objects.get(name, "")
            case ast.Call(func=ast.Name(id=name)) if self.is_class(name):
                return name
        return ""

    def is_class(self, name: str) -> bool:
        return name[:1].isupper() and self.kind(name) == "candidate" and name not in self.entry_points

    def find_classes(self, tree: ast.AST) -> None:
        """Note names that are called, and whose value has attributes that no plain data has: those of classes."""
        made: dict[str, str] = {}
        for node in ast.walk(tree):
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=ast.Name(id=kind))):
                    made[name] = kind
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(value=ast.Call(func=ast.Name(id=kind))) if node.attr not in PLAIN_NAMES:
                    self.classes.add(kind)
                case ast.Attribute(value=ast.BinOp() as both) if node.attr not in PLAIN_NAMES:
                    self.classes |= {made.get(name, name) for name in names_in(both)}
                case ast.Attribute(value=ast.Name(id=name)) if node.attr not in PLAIN_NAMES:
                    self.classes.add(made.get(name, name))

    def check_operands(self, node: ast.expr) -> None:
        """Refuse to compare or join objects of which only the candidate's own methods say what is equal."""
        if not isinstance(node, ast.Compare | ast.BinOp):
            return
        operands = [node.left, *(node.comparators if isinstance(node, ast.Compare) else [node.right])]
        for part in operands if sum(bool(self.kinds(part) & SAID) for part in operands) > 1 else ():
            name = self.class_of(part)
            if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and self.is_class(part.value.id):
                name = part.value.id
            if name and (isinstance(node, ast.Compare) or name in self.classes):
                why = f"leaves it to the class {name} what is equal; compare attributes with values instead"
                self.refuse(node, why)

    def check_identity(self, node: ast.AST) -> None:
        """Refuse tests that ask whether values are one object: they are copied on their way between the runs."""
        parts = list(ast.walk(node))
        local = frozenset().union(*map(binds, parts))
        for part in parts:
            match part:
                case ast.FunctionDef():
                    local |= stores(part)
                case ast.Name(id="id", ctx=ast.Load()) if self.kind("id") == "builtin" and "id" not in local:
                    self.refuse(part, "uses id(), but values are copied between the runs; compare values")
                case ast.Attribute(attr="is_" | "is_not") if self.kinds(part) == {"shared"}:
                    self.refuse(part, f"uses {ast.unparse(part)}, but values are copied between the runs; use ==")
                case ast.Name(id="is_" | "is_not" as name) if self.kind(name) == "shared":
                    self.refuse(part, f"uses {name}, but values are copied between the runs; use ==")
                case ast.Compare():
                    operands = [part.left, *part.comparators]
                    for first, op, other in zip(operands, part.ops, operands[1:], strict=False):
                        names = names_in(first) | names_in(other)
                        theirs = names & local or {self.kind(name) for name in names} & {*SAID, "kept"}
                        if isinstance(op, ast.Is | ast.IsNot) and theirs and not self.are_single(first, other):
                            self.refuse(part, "compares by `is`, but values are copied between the runs; use ==")

    def are_single(self, *operands: ast.expr) -> bool:
        """Say whether two operands are one object wherever they are equal: None, a bool, an ellipsis, or classes."""
        for part in operands:
            if isinstance(part, ast.Constant) and (part.value in (None, ...) or isinstance(part.value, bool)):
                return True
            if isinstance(part, ast.Name) and part.id in ("NotImplemented", "Ellipsis"):
                return self.kind(part.id) == "builtin"
        of_values = [ast.unparse(part).startswith("type(") or _ends_in_class(part) for part in operands]
        named = [not self.kinds(part) - {"builtin", "shared"} for part in operands]
        return any(of_values) and all(map(operator.or_, of_values, named))

    def about(self, node: ast.expr) -> set[str]:
        """List the names whose state by now a part of an assert is about: alone, or cut where the candidate says."""
        said = {*THEIRS, "derived"}
        if not self.kinds(node) & said:
            return names_in(node)
        items = [part for part in ast.walk(node) if isinstance(part, ast.Subscript)]
        cut = [part.value for part in items if isinstance(part.slice, ast.Slice) and self.kinds(part.slice) & said]
        return set().union(*map(names_in, cut))

    def check_judges(self, node: ast.expr, number: bool = False) -> None:
        """Refuse tests in which the candidate says itself whether what it computed is right.

        A method of plain data is left to the tests' run alone: `f(1).count("a") == 1` fails where f returns an object.
        """
        if isinstance(node, ast.BoolOp):
            for part in node.values:
                self.check_judges(part)
        elif isinstance(node, ast.UnaryOp):
            self.check_judges(node.operand)
        elif isinstance(node, ast.Compare) and is_literal(node.comparators[0]):
            expected, equal = ast.literal_eval(node.comparators[0]), isinstance(node.ops[0], ast.Eq)
            if not equal or expected in (True, False, None):
                self.check_judges(node.left, equal and type(expected) is int)
        elif isinstance(node, ast.Call) and self.is_step(node):
            arguments = [*node.args, *(word.value for word in node.keywords)]
            converts = isinstance(node.func, ast.Name) and node.func.id in CONVERTERS and not self.leads(node.func)
            made = isinstance(node.func, ast.Attribute) and self.is_made(node.func.value) and bool(arguments)
            of_class = isinstance(node.func, ast.Name) and node.func.id[:1].isupper()
            if made and node.func.attr in METHODS:  # type: ignore
                self.judges.add(node)
            elif not number and (made or (not converts and not of_class and any(map(self.asks, arguments)))):
                self.child(node)  # which refuses what can't be evaluated at all
                self.refuse(node, "has the candidate judge its own value; compare it with == instead")

    def is_made(self, node: ast.expr) -> bool:
        """Say whether a value is what a function of the candidate returned, and not an object of a class."""
        if isinstance(node, ast.Name):
            return node.id in self.returned
        return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.func.id[:1].isupper()

    def asks(self, node: ast.expr) -> bool:
        return any(isinstance(part, ast.Call) and self.is_step(part) for part in ast.walk(node))

    # Expressions, taken apart -------------------------------------------------------------------------

    def claim(self, name: str) -> int:
        """Get the number of a name's value in the candidate's run; one until the candidate is called again."""
        if name in self.before:
            return self.before[name]
        after, number = self.claims.get(name, (-1, -1))
        if name not in self.fixed and after not in (None, self.calls):
            number = self.plan.value(name)
            self.claims[name] = (self.calls, number)
            if name in self.assigned:
                self.plan.first[number] = self.assigned[name]
        return number

    def assign(self, names: Collection[str], value: ast.expr) -> None:
        """Have the values of names returned before another call tells what they should have been.

        What a function returned for arguments stays as it is until it is handed to a call; what a method returned, or
        a function without arguments, may be a view of what later calls change.
        """
        for name in names:
            self.forget(name)
            if made := self.class_of(value):
                self.objects[name] = made
            if made not in self.classes:
                self.assigned[name] = self.claim(name)
                if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and (value.args or value.keywords):
                    self.fixed.add(name)

    def forget(self, name: str) -> None:
        """Forget what a name held."""
        self.claims.pop(name, None)
        self.assigned.pop(name, None)
        self.objects.pop(name, None)
        self.fixed.discard(name)

    def call(self, node: ast.AST) -> None:
        """Count a call into the candidate, which may change what it is handed."""
        self.calls += 1
        for name in names_in(node):
            self.fixed.discard(name)
            after, number = self.claims.get(name, (-1, -1))
            if after is None:
                self.claims[name] = (-1, number)

    def settled(self, node: ast.AST) -> bool:
        """Say whether a step is only about what functions returned, and so hardly calls the candidate's code."""
        return {name for name in free_names(node) if self.kind(name) in SAID} <= self.returned

    def checked(self, node, uses: list[int], bound: frozenset[str] = NONE):
        """Make the expression for the tests' run: what is evaluated in the candidate's is replaced by the value."""
        if isinstance(node, ast.Name) and node.id not in bound and self.kind(node.id) in ("remote", "changed"):
            if self.objects.get(node.id) in self.classes:
                self.refuse(node, f"uses {node.id}, an object of the candidate's, as if it were plain data")
            uses.append(self.claim(node.id))
            return _held(uses[-1])
        self.check_operands(node)
        if isinstance(node, ast.Compare) and _asks_for_none(node) and self.is_step(node.left, bound):
            return self.is_none(node, uses, bound)
        if isinstance(node, ast.Call) and node in self.judges:
            method = _replaced(node.func, self.checked, uses, bound=bound)
            args, keywords = (
                [self.checked(part, uses, bound) for part in given] for given in (node.args, node.keywords)
            )
            return ast.Call(method, args, keywords)
        if isinstance(node, ast.ListComp) and not bound and self.is_step(node) and (parts := self.unrolled(node)):
            return ast.List([self.checked(part, uses) for part in parts], ast.Load())
        if isinstance(node, ast.expr) and self.is_step(node, bound):
            calls, inside = "candidate" in self.kinds(node, bound), free_names(node) & bound
            if calls and inside:
                self.refuse(node, "calls the candidate inside a comprehension or lambda; write a `for` over a literal")
            if self.class_of(node) in self.classes:
                self.refuse(
                    node, f"uses an object of {self.class_of(node)}, which is the candidate's, as if it were plain data"
                )
            if calls or not (inside or "derived" in self.kinds(node, bound)):
                return self.step(node, uses, own=not calls)
        if isinstance(node, ast.Name) and node.id not in bound and self.kind(node.id) == "candidate":
            imported = node.id in sys.stdlib_module_names
            fix = "import it in the tests" if imported else "compare what it returns"
            self.refuse(node, f"uses {node.id} itself, which is the candidate's; {fix}")
        if isinstance(node, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom):
            self.refuse(node, "holds an assignment or a yield inside an expression")
        return _replaced(node, self.checked, uses, bound=bound | binds(node))

    def unrolled(self, node: ast.ListComp) -> list[ast.expr]:
        """List the calls of a comprehension over known values, so that each is a step of its own; else nothing."""
        one, *more = node.generators
        target = one.target
        names = [part.id for part in getattr(target, "elts", [target]) if isinstance(part, ast.Name)]
        values = self.known(one.iter)
        if more or one.ifs or names_in(target) != set(names) or not values or len(values) > UNROLLED_CALLS:
            return []
        if any(isinstance(part, (*COMPREHENSIONS, ast.Lambda)) for part in ast.walk(node.elt)):
            return []
        parts = []
        for value in values:
            items = [value] if isinstance(target, ast.Name) else list(value)
            if len(items) != len(names):
                return []
            parts.append(_Filled(dict(zip(names, items, strict=True))).visit(copy.deepcopy(node.elt)))
        return parts

    def known(self, node: ast.expr) -> Sequence | None:
        """List the values that a loop goes over, where they stand in the source."""
        if isinstance(node, ast.Name):
            node = self.literals.get(node.id, node)
        ranges = isinstance(node, ast.Call) and ast.unparse(node.func) == "range" and not node.keywords
        if isinstance(node, ast.Call) and ranges and node.args and all(map(is_literal, node.args)):
            return range(*map(ast.literal_eval, node.args))
        value = ast.literal_eval(node) if is_literal(node) else None
        return list(value) if isinstance(value, list | tuple | dict | str) else None

    def is_none(self, node: ast.Compare, uses: list[int], bound: frozenset[str]) -> ast.expr:
        """Make `… is None` for the tests' run: an object that is no plain data is not None."""
        known, self.classes = self.classes, set()
        value = self.checked(node.left, uses, bound)
        self.classes = known
        made = _parsed(f"__is_none__(lambda: {ast.unparse(value)})")
        return made if isinstance(node.ops[0], ast.Is) else ast.UnaryOp(ast.Not(), made)

    def step(self, node: ast.expr, uses: list[int], *, own: bool) -> ast.expr:
        """Add a step; in the tests' run it is a value, or where that can be, their own computation."""
        self.keep_handed(node)
        computed = self.own(node) if own else None
        uses.append(self.plan.value(ast.unparse(self.child(node))))
        if not self.settled(node):
            self.call(node)
        if computed is None:
            return _held(uses[-1])
        return _parsed(f"__either__({uses[-1]}, lambda: {ast.unparse(computed)})")

    def own(self, node, bound: frozenset[str] = NONE):
        """Make an expression about the candidate's values that the tests' run computes on those that are plain data."""
        if isinstance(node, ast.Name) and node.id not in bound and self.kind(node.id) in ("remote", "changed"):
            return _held(self.claim(node.id), "__plain__")
        if (name := self.data_in(node)) is not None and name.id not in bound:
            held = _held(self.claim(name.id))
            return _replaced(node, lambda part, bound: held if part is name else self.own(part, bound), bound=bound)
        return _replaced(node, self.own, bound=bound | binds(node))

    def data_in(self, node: ast.AST) -> ast.Name | None:
        """Find the name of what a function returned, if a node asks for nothing but its data: its length, an item.

        The data decide, whatever methods of its own the value has there.
        """
        match node:
            case ast.Subscript(value=ast.Name() as name):
                pass
            case ast.Attribute(value=ast.Name() as name) if node.attr in METHODS:
                pass
            case ast.Call(func=ast.Name(id=made), args=[ast.Name() as name]) if made in CONVERTERS - OF_OBJECTS:
                pass
            case _:
                return None
        return name if name.id in self.returned and self.kind(name.id) == "remote" else None

    def truth(self, node: ast.expr) -> ast.expr:
        """Ask for the truth of what is asserted alone, which objects that are no plain data have, too."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return ast.copy_location(ast.UnaryOp(node.op, self.truth(node.operand)), node)
        if isinstance(node, ast.BoolOp):
            return ast.copy_location(ast.BoolOp(node.op, [self.truth(part) for part in node.values]), node)
        if node in self.judges or not self.is_step(node) or self.kind("bool") != "builtin":
            return node
        return ast.copy_location(ast.Call(ast.Name("bool", ast.Load()), [node], []), node)

    def child(self, node, bound: frozenset[str] = NONE):
        """Make the expression for the candidate's run: what the tests computed is replaced by its value."""
        kinds = self.kinds(node, bound)
        if "derived" in kinds:
            self.refuse(node, "hands the candidate what was computed from its own values; write a call inside the call")
        if isinstance(node, ast.Name) and node.id in sys.stdlib_module_names and self.kind(node.id) == "candidate":
            self.refuse(node, f"uses {node.id} without importing it")
        known = isinstance(node, ast.Name) and node.id in self.literals and self.kind(node.id) == "pure"
        if known and node.id not in bound:
            return copy.deepcopy(self.literals[node.id])
        whole = isinstance(node, ast.expr) and not isinstance(node, ast.Starred | ast.Slice)
        alone = isinstance(node, COMPREHENSIONS) or self.is_own_call(node)  # the tests compute it of their own data
        alive = kinds & ({*THEIRS, "changed"} if alone else {*THEIRS, "changed", "kept"})
        if whole and "pure" in kinds and not alive and not free_names(node) & bound:
            number = self.plan.handed
            self.plan.given.append(("given", number, ast.unparse(node)))
            return _parsed(f"__given__({number})")
        return _replaced(node, self.child, bound=bound | binds(node))

    def keep_handed(self, node: ast.expr, *, statement: bool = False) -> None:
        """Let the names that a step is handed live in the candidate's run, which may change what they hold."""
        kind = "changed" if statement and "candidate" in self.kinds(node) else "kept"
        calls = [part for part in ast.walk(node) if isinstance(part, ast.Call)]
        for value in (value for part in calls for value in [*part.args, *(word.value for word in part.keywords)]):
            if not isinstance(value, ast.Name) or self.kind(value.id) not in ("pure", "kept"):
                continue
            if isinstance(self.literals.get(value.id), ast.Constant):  # nobody can change it
                continue
            if self.kind(value.id) == "pure":
                self.plan.steps.append((None, f"{value.id} = {ast.unparse(self.child(value))}"))
            self.names[value.id] = kind
            self.forget(value.id)
            if kind == "changed":
                self.literals.pop(value.id, None)


class _Filled(ast.NodeTransformer):
    """Puts values in the place of names."""

    def __init__(self, values: dict):
        self.values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return _parsed(repr(self.values[node.id])) if node.id in self.values else node


def _parsed(source: str) -> ast.expr:
    return ast.parse(source, mode="eval").body


def _held(number: int, where: str = "__held__") -> ast.expr:
    """Make the expression that is a value in the tests' run."""
    return _parsed(f"{where}[{number}]")


def _ends_in_class(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "__class__"


def _asks_for_none(node: ast.Compare) -> bool:
    """Say whether a comparison is `… is None` or `… is not None`."""
    asks = len(node.ops) == 1 and isinstance(node.ops[0], ast.Is | ast.IsNot)
    return asks and isinstance(node.comparators[0], ast.Constant) and node.comparators[0].value is None


def _replaced(node, function, *arguments, bound: frozenset[str]):
    """Copy a node with its children put through a function."""
    made = copy.copy(node)
    for name, value in ast.iter_fields(node):
        if isinstance(value, list):
            parts = [function(part, *arguments, bound) if isinstance(part, ast.AST) else part for part in value]
            setattr(made, name, parts)
        elif isinstance(value, ast.AST):
            setattr(made, name, function(value, *arguments, bound))
    return made


def binds(node: ast.AST) -> frozenset[str]:
    """List the names that a comprehension, one of its parts or a lambda binds."""
    if isinstance(node, COMPREHENSIONS):
        return frozenset().union(*(binds(part) for part in node.generators))
    if isinstance(node, ast.comprehension):
        return frozenset(names_in(node.target))
    if isinstance(node, ast.Lambda):
        return frozenset(part.arg for part in ast.walk(node.args) if isinstance(part, ast.arg))
    return NONE


def free_names(node: ast.AST, bound: frozenset[str] = NONE) -> set[str]:
    """List the names in a node that nothing in it binds."""
    if isinstance(node, ast.Name):
        return {node.id} - bound
    inner = bound | binds(node)
    return set().union(*(free_names(child, inner) for child in ast.iter_child_nodes(node)))


def names_in(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def stores(node: ast.AST) -> set[str]:
    """List the names that a function binds: its arguments and what it assigns."""
    assigned = {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and not isinstance(part.ctx, ast.Load)}
    return assigned | {part.arg for part in ast.walk(node) if isinstance(part, ast.arg)}


def is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return False
    return True
