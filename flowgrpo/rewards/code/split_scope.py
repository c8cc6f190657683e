"""Expressions of tests, for `split_tests`: a `Scope` splits them between two runs and adds steps to a `SplitPlan`.

The scope knows the kind of each name's current value. Kinds:

    candidate   from the model's code           pure      computed by the tests alone
    remote      is in the candidate's run       derived   computed by the tests from the candidate's values
    kept        an argument: the tests have the original, the candidate's run a copy that it may change
    changed     an argument passed to a statement that may change it: its value is what the candidate's run returns
    shared      an import, in both runs         builtin   in both runs

Every expression over a remote name or an argument is computed in the tests' run, on one value that the candidate's run
returns and that is used until the candidate is called again. Only if that value is not plain data (an object of the
candidate's class, a generator) does the candidate's run compute `s.pop()` or `len(s)`, which are calls of its methods.
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

# Methods whose result is the verdict itself: they are called on the plain value, in the tests' run.
PREDICATES = {name for kind in (str, set, float) for name in dir(kind) if name.startswith("is")}
PREDICATES |= {"startswith", "endswith"}
# Methods of plain data.
METHODS = {name for kind in (str, bytes, list, dict, set) for name in dir(kind) if not name.startswith("_")}
# Functions of one argument that only convert a value to plain data, so they may run in the candidate's process.
CONVERTERS = {"list", "tuple", "set", "frozenset", "dict", "str", "repr", "len", "next", "sorted", "sum", "min", "max"}
CONVERTERS |= {"bool", "int", "float", "abs"}
OBJECT_CONVERTERS = {"str", "repr", "next"}  # whose result depends on more than an object's data
# Attributes of plain data; a name of the candidate's that is used with any other attribute is a class.
PLAIN_NAMES = METHODS | {name for kind in (int, float, complex, Counter, deque, OrderedDict) for name in dir(kind)}
PLAIN_NAMES |= {name for kind in (Decimal, Fraction, datetime, timedelta, range) for name in dir(kind)}
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
CANDIDATE_KINDS = {"candidate", "remote"}  # kinds of names that refer to the candidate's run
RETURNED_KINDS = {*CANDIDATE_KINDS, "changed", "derived"}  # kinds with values from the candidate's run
NONE = frozenset()
MAX_UNROLLED_CALLS = 200  # of a comprehension


class Unsplittable(BadInput):
    """The tests contain something that can't be split; the message names the line."""


@dataclass
class SplitPlan:
    """Tests, split into the steps of the candidate's run and the items of the tests' run.

    The number of an item is that of its value, its check or its line.
    """

    entry_points: frozenset[str] = frozenset()
    steps: list[tuple[int | None, str]] = field(default_factory=list)  # (number of the value or None, source)
    inputs: list[tuple[str, int, str]] = field(default_factory=list)  # setups, and values passed to the candidate
    items: list[tuple[str, int, str]] = field(default_factory=list)  # (setup, derive or check; number; source)
    checks: list[str] = field(default_factory=list)  # description of each check
    uses: list[list[int]] = field(default_factory=list)  # numbers of the values that each check reads
    initial_values: dict[int, int] = field(default_factory=dict)  # number of a name's value -> that of its first value

    @property
    def input_count(self) -> int:
        """Number of values that the tests compute before the candidate runs."""
        return sum(kind == "given" for kind, _, _ in self.inputs)

    def value(self, source: str) -> int:
        """Add a step whose value is returned -> its number."""
        number = sum(step_number is not None for step_number, _ in self.steps)
        self.steps.append((number, source))
        return number

    def check(self, source: str, words: str, uses: list[int]) -> None:
        """Add a check to the tests' run."""
        self.items.append(("check", len(self.checks), source))
        self.checks.append(words)
        self.uses.append(uses)


class Scope:
    """Kinds of the values of names, updated statement by statement, and the `SplitPlan` so far."""

    def __init__(self, entry_points: Collection[str]):
        self.plan = SplitPlan(frozenset(entry_points))
        self.entry_points = set(entry_points)
        self.names = dict.fromkeys(entry_points, "candidate")
        self.literals: dict[str, ast.expr] = {}  # of pure names with a known value
        self.returned: set[str] = set()  # remote names of results of the candidate's functions
        self.objects: dict[str, str] = {}  # remote names of objects of the candidate's classes -> class name
        self.classes: set[str] = set()  # names of the candidate's that are known to be classes
        self.calls = 0  # number of calls into the candidate
        self.claims: dict[str, tuple[int | None, int]] = {}  # name -> (number of calls before, number of its value)
        self.unchanged: set[str] = set()  # names of results that no call has been passed since
        self.earlier_values: dict[str, int] = {}  # name -> number of its value before a part of an assert
        self.assigned_values: dict[str, int] = {}  # name -> number of its value when it was assigned
        self.verdict_calls: set[ast.Call] = set()  # whose result is the verdict, so the candidate must not compute it
        self.label = ""  # of the source that is read, for messages

    def refuse(self, node: ast.AST, problem: str) -> NoReturn:
        raise Unsplittable(f"{self.label}line {getattr(node, 'lineno', '?')} of the tests {problem}")

    # Names --------------------------------------------------------------------------------------------

    def kind(self, name: str) -> str:
        kind = self.names.get(name)
        return kind or ("builtin" if hasattr(builtins, name) or name == "__name__" else "candidate")

    def kinds(self, node: ast.AST, bound: frozenset[str] = NONE) -> set[str]:
        """Kinds of the free names in a node."""
        return {self.kind(name) for name in free_names(node, bound)}

    # In which run an expression is evaluated ----------------------------------------------------------------------

    def is_step(self, node: ast.expr, bound: frozenset[str] = NONE) -> bool:
        """Whether a whole expression is evaluated in the candidate's run."""
        match node:
            case ast.Name():
                return node.id not in bound and self.kind(node.id) == "remote"
            case ast.Attribute():
                return (
                    self.leads_to_candidate(node.value, bound)
                    and node.attr not in PREDICATES
                    and not node.attr.startswith("__")
                )
            case ast.Subscript():
                return self.leads_to_candidate(node.value, bound)
            case ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[single]):
                return self.class_of(single) in self.classes and not bound
            case ast.ListComp(elt=ast.Attribute(value=ast.Name(id=name)), generators=[single]) if not single.ifs:
                inner_bound = bound | binds(node)
                return self.leads_to_candidate(node.elt, inner_bound) or (
                    name in inner_bound and self.is_step(single.iter, bound)
                )
            case ast.ListComp():
                inner_bound = bound | binds(node)
                has_candidate = any(self.kinds(part, inner_bound) & CANDIDATE_KINDS for part in node.generators)
                return self.is_step(node.elt, inner_bound) and not has_candidate
            case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in CONVERTERS:
                if self.kind(name) == "builtin":
                    return self.is_step(argument, bound)
        return isinstance(node, ast.Call) and self.leads_to_candidate(node.func, bound)

    def is_own_call(self, node: ast.AST) -> bool:
        """Whether a node calls a function of the tests themselves, or a builtin."""
        called = node.func if isinstance(node, ast.Call) else None
        return isinstance(called, ast.Name) and self.kind(called.id) in ("pure", "builtin")

    def leads_to_candidate(self, node: ast.expr, bound: frozenset[str] = NONE) -> bool:
        """Whether a call, an attribute or an item of a node is the candidate's."""
        if isinstance(node, ast.Name):
            return node.id not in bound and self.kind(node.id) in CANDIDATE_KINDS
        return self.is_step(node, bound)

    def class_of(self, node: ast.expr) -> str:
        """Class of the candidate that a node is an object of, as its capital letter suggests; "" if none."""
        match node:
            case ast.Name(id=name) if self.kind(name) == "remote":
                return self.objects.get(name, "")
            case ast.Call(func=ast.Name(id=name)) if self.is_class(name):
                return name
        return ""

    def is_class(self, name: str) -> bool:
        return name[:1].isupper() and self.kind(name) == "candidate" and name not in self.entry_points

    def find_classes(self, tree: ast.AST) -> None:
        """Record the names of classes: they are called, and the result has attributes that no plain data has."""
        class_of_name: dict[str, str] = {}
        for node in ast.walk(tree):
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=ast.Name(id=kind))):
                    class_of_name[name] = kind
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(value=ast.Call(func=ast.Name(id=kind))) if node.attr not in PLAIN_NAMES:
                    self.classes.add(kind)
                case ast.Attribute(value=ast.BinOp() as operation) if node.attr not in PLAIN_NAMES:
                    self.classes |= {class_of_name.get(name, name) for name in names_in(operation)}
                case ast.Attribute(value=ast.Name(id=name)) if node.attr not in PLAIN_NAMES:
                    self.classes.add(class_of_name.get(name, name))

    def check_operands(self, node: ast.expr) -> None:
        """Refuse to compare or combine objects if only the candidate's own methods define equality."""
        if not isinstance(node, ast.Compare | ast.BinOp):
            return
        operands = [node.left, *(node.comparators if isinstance(node, ast.Compare) else [node.right])]
        for part in operands if sum(bool(self.kinds(part) & RETURNED_KINDS) for part in operands) > 1 else ():
            name = self.class_of(part)
            if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and self.is_class(part.value.id):
                name = part.value.id
            if name and (isinstance(node, ast.Compare) or name in self.classes):
                problem = f"leaves it to the class {name} what is equal; compare attributes with values instead"
                self.refuse(node, problem)

    def check_identity(self, node: ast.AST) -> None:
        """Refuse tests of identity: values are copied between the runs."""
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
                    for first, op, second in zip(operands, part.ops, operands[1:], strict=False):
                        names = names_in(first) | names_in(second)
                        is_returned = names & local or {self.kind(name) for name in names} & {*RETURNED_KINDS, "kept"}
                        if (
                            isinstance(op, ast.Is | ast.IsNot)
                            and is_returned
                            and not self.are_singletons(first, second)
                        ):
                            self.refuse(part, "compares by `is`, but values are copied between the runs; use ==")

    def are_singletons(self, *operands: ast.expr) -> bool:
        """Whether equal operands are always the same object: None, a bool, an ellipsis, or classes."""
        for part in operands:
            if isinstance(part, ast.Constant) and (part.value in (None, ...) or isinstance(part.value, bool)):
                return True
            if isinstance(part, ast.Name) and part.id in ("NotImplemented", "Ellipsis"):
                return self.kind(part.id) == "builtin"
        are_classes = [ast.unparse(part).startswith("type(") or _ends_in_class(part) for part in operands]
        are_known = [not self.kinds(part) - {"builtin", "shared"} for part in operands]
        return any(are_classes) and all(map(operator.or_, are_classes, are_known))

    def names_about(self, node: ast.expr) -> set[str]:
        """Names whose current state a part of an assert is about: alone, or sliced by the candidate's values."""
        returned = {*CANDIDATE_KINDS, "derived"}
        if not self.kinds(node) & returned:
            return names_in(node)
        items = [part for part in ast.walk(node) if isinstance(part, ast.Subscript)]
        sliced = [
            part.value for part in items if isinstance(part.slice, ast.Slice) and self.kinds(part.slice) & returned
        ]
        return set().union(*map(names_in, sliced))

    def check_judges(self, node: ast.expr, number: bool = False) -> None:
        """Refuse tests in which the candidate itself decides whether its result is right.

        A method of plain data is called in the tests' run only: `f(1).count("a") == 1` fails if f returns an object.
        """
        if isinstance(node, ast.BoolOp):
            for part in node.values:
                self.check_judges(part)
        elif isinstance(node, ast.UnaryOp):
            self.check_judges(node.operand)
        elif isinstance(node, ast.Compare) and is_literal(node.comparators[0]):
            expected, is_equality = ast.literal_eval(node.comparators[0]), isinstance(node.ops[0], ast.Eq)
            if not is_equality or expected in (True, False, None):
                self.check_judges(node.left, is_equality and type(expected) is int)
        elif isinstance(node, ast.Call) and self.is_step(node):
            arguments = [*node.args, *(word.value for word in node.keywords)]
            is_conversion = (
                isinstance(node.func, ast.Name)
                and node.func.id in CONVERTERS
                and not self.leads_to_candidate(node.func)
            )
            is_method_of_result = (
                isinstance(node.func, ast.Attribute) and self.is_function_result(node.func.value) and bool(arguments)
            )
            is_constructor = isinstance(node.func, ast.Name) and node.func.id[:1].isupper()
            if is_method_of_result and node.func.attr in METHODS:  # type: ignore
                self.verdict_calls.add(node)
            elif not number and (
                is_method_of_result
                or (not is_conversion and not is_constructor and any(map(self.has_step_call, arguments)))
            ):
                self.for_candidate(node)  # which refuses what can't be evaluated at all
                self.refuse(node, "has the candidate judge its own value; compare it with == instead")

    def is_function_result(self, node: ast.expr) -> bool:
        """Whether a value is the result of a function of the candidate, and not an object of a class."""
        if isinstance(node, ast.Name):
            return node.id in self.returned
        return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.func.id[:1].isupper()

    def has_step_call(self, node: ast.expr) -> bool:
        return any(isinstance(part, ast.Call) and self.is_step(part) for part in ast.walk(node))

    # Splitting expressions -------------------------------------------------------------------------

    def value_number(self, name: str) -> int:
        """Number of a name's value in the candidate's run; the same until the candidate is called again."""
        if name in self.earlier_values:
            return self.earlier_values[name]
        call_count, number = self.claims.get(name, (-1, -1))
        if name not in self.unchanged and call_count not in (None, self.calls):
            number = self.plan.value(name)
            self.claims[name] = (self.calls, number)
            if name in self.assigned_values:
                self.plan.initial_values[number] = self.assigned_values[name]
        return number

    def note_assignment(self, names: Collection[str], value: ast.expr) -> None:
        """Request the values of assigned names before a later call can reveal what they should have been.

        The result of a function with arguments stays unchanged until it is passed to a call; the result of a method,
        or of a function without arguments, may be a view of what later calls change.
        """
        for name in names:
            self.forget(name)
            if class_name := self.class_of(value):
                self.objects[name] = class_name
            if class_name not in self.classes:
                self.assigned_values[name] = self.value_number(name)
                if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and (value.args or value.keywords):
                    self.unchanged.add(name)

    def forget(self, name: str) -> None:
        """Forget the value of a name."""
        self.claims.pop(name, None)
        self.assigned_values.pop(name, None)
        self.objects.pop(name, None)
        self.unchanged.discard(name)

    def note_call(self, node: ast.AST) -> None:
        """Count a call into the candidate, which may change its arguments."""
        self.calls += 1
        for name in names_in(node):
            self.unchanged.discard(name)
            call_count, number = self.claims.get(name, (-1, -1))
            if call_count is None:
                self.claims[name] = (-1, number)

    def is_settled(self, node: ast.AST) -> bool:
        """Whether a step is only about results of functions, and so hardly calls the candidate's code."""
        return {name for name in free_names(node) if self.kind(name) in RETURNED_KINDS} <= self.returned

    def for_tests(self, node, uses: list[int], bound: frozenset[str] = NONE):
        """Expression for the tests' run: parts that the candidate's run evaluates are replaced by their value."""
        if isinstance(node, ast.Name) and node.id not in bound and self.kind(node.id) in ("remote", "changed"):
            if self.objects.get(node.id) in self.classes:
                self.refuse(node, f"uses {node.id}, an object of the candidate's, as if it were plain data")
            uses.append(self.value_number(node.id))
            return _value_expression(uses[-1])
        self.check_operands(node)
        if isinstance(node, ast.Compare) and _is_none_test(node) and self.is_step(node.left, bound):
            return self.is_none(node, uses, bound)
        if isinstance(node, ast.Call) and node in self.verdict_calls:
            method = _map_children(node.func, self.for_tests, uses, bound=bound)
            args, keywords = (
                [self.for_tests(part, uses, bound) for part in parts] for parts in (node.args, node.keywords)
            )
            return ast.Call(method, args, keywords)
        if isinstance(node, ast.ListComp) and not bound and self.is_step(node) and (parts := self.unrolled(node)):
            return ast.List([self.for_tests(part, uses) for part in parts], ast.Load())
        if isinstance(node, ast.expr) and self.is_step(node, bound):
            calls_candidate, bound_inside = "candidate" in self.kinds(node, bound), free_names(node) & bound
            if calls_candidate and bound_inside:
                self.refuse(node, "calls the candidate inside a comprehension or lambda; write a `for` over a literal")
            if self.class_of(node) in self.classes:
                self.refuse(
                    node, f"uses an object of {self.class_of(node)}, which is the candidate's, as if it were plain data"
                )
            if calls_candidate or not (bound_inside or "derived" in self.kinds(node, bound)):
                return self.add_step(node, uses, about_data=not calls_candidate)
        if isinstance(node, ast.Name) and node.id not in bound and self.kind(node.id) == "candidate":
            is_library = node.id in sys.stdlib_module_names
            fix = "import it in the tests" if is_library else "compare what it returns"
            self.refuse(node, f"uses {node.id} itself, which is the candidate's; {fix}")
        if isinstance(node, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom):
            self.refuse(node, "holds an assignment or a yield inside an expression")
        return _map_children(node, self.for_tests, uses, bound=bound | binds(node))

    def unrolled(self, node: ast.ListComp) -> list[ast.expr]:
        """Calls of a comprehension over literal values, each a step of its own; empty if it can't be unrolled."""
        generator, *others = node.generators
        target = generator.target
        names = [part.id for part in getattr(target, "elts", [target]) if isinstance(part, ast.Name)]
        values = self.literal_values(generator.iter)
        if others or generator.ifs or names_in(target) != set(names) or not values or len(values) > MAX_UNROLLED_CALLS:
            return []
        if any(isinstance(part, (*COMPREHENSIONS, ast.Lambda)) for part in ast.walk(node.elt)):
            return []
        parts = []
        for value in values:
            items = [value] if isinstance(target, ast.Name) else list(value)
            if len(items) != len(names):
                return []
            parts.append(_Substitution(dict(zip(names, items, strict=True))).visit(copy.deepcopy(node.elt)))
        return parts

    def literal_values(self, node: ast.expr) -> Sequence | None:
        """Values that a loop iterates over, if they are literals in the source; else None."""
        if isinstance(node, ast.Name):
            node = self.literals.get(node.id, node)
        is_range = isinstance(node, ast.Call) and ast.unparse(node.func) == "range" and not node.keywords
        if isinstance(node, ast.Call) and is_range and node.args and all(map(is_literal, node.args)):
            return range(*map(ast.literal_eval, node.args))
        value = ast.literal_eval(node) if is_literal(node) else None
        return list(value) if isinstance(value, list | tuple | dict | str) else None

    def is_none(self, node: ast.Compare, uses: list[int], bound: frozenset[str]) -> ast.expr:
        """`… is None` for the tests' run: an object that is no plain data is not None."""
        classes, self.classes = self.classes, set()
        value = self.for_tests(node.left, uses, bound)
        self.classes = classes
        expression = _parsed(f"__is_none__(lambda: {ast.unparse(value)})")
        return expression if isinstance(node.ops[0], ast.Is) else ast.UnaryOp(ast.Not(), expression)

    def add_step(self, node: ast.expr, uses: list[int], *, about_data: bool) -> ast.expr:
        """Add a step -> its expression in the tests' run: the returned value, or the same computation on plain data."""
        self.keep_arguments(node)
        expression = self.on_plain_data(node) if about_data else None
        uses.append(self.plan.value(ast.unparse(self.for_candidate(node))))
        if not self.is_settled(node):
            self.note_call(node)
        if expression is None:
            return _value_expression(uses[-1])
        return _parsed(f"__either__({uses[-1]}, lambda: {ast.unparse(expression)})")

    def on_plain_data(self, node, bound: frozenset[str] = NONE):
        """Expression over the candidate's values that the tests' run computes if they are plain data."""
        if isinstance(node, ast.Name) and node.id not in bound and self.kind(node.id) in ("remote", "changed"):
            return _value_expression(self.value_number(node.id), "__plain__")
        if (name := self.data_name(node)) is not None and name.id not in bound:
            value = _value_expression(self.value_number(name.id))
            return _map_children(
                node, lambda part, bound: value if part is name else self.on_plain_data(part, bound), bound=bound
            )
        return _map_children(node, self.on_plain_data, bound=bound | binds(node))

    def data_name(self, node: ast.AST) -> ast.Name | None:
        """Name of a function's result, if a node reads nothing but its data (its length, an item); else None.

        The data decide, whatever methods of its own the value has in the candidate's run.
        """
        match node:
            case ast.Subscript(value=ast.Name() as name):
                pass
            case ast.Attribute(value=ast.Name() as name) if node.attr in METHODS:
                pass
            case ast.Call(func=ast.Name(id=function), args=[ast.Name() as name]) if (
                function in CONVERTERS - OBJECT_CONVERTERS
            ):
                pass
            case _:
                return None
        return name if name.id in self.returned and self.kind(name.id) == "remote" else None

    def as_truth_value(self, node: ast.expr) -> ast.expr:
        """Wrap a bare asserted expression in `bool`, which also works for objects that are no plain data."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return ast.copy_location(ast.UnaryOp(node.op, self.as_truth_value(node.operand)), node)
        if isinstance(node, ast.BoolOp):
            return ast.copy_location(ast.BoolOp(node.op, [self.as_truth_value(part) for part in node.values]), node)
        if node in self.verdict_calls or not self.is_step(node) or self.kind("bool") != "builtin":
            return node
        return ast.copy_location(ast.Call(ast.Name("bool", ast.Load()), [node], []), node)

    def for_candidate(self, node, bound: frozenset[str] = NONE):
        """Expression for the candidate's run: parts that the tests computed are replaced by their value."""
        kinds = self.kinds(node, bound)
        if "derived" in kinds:
            self.refuse(node, "passes the candidate a value computed from its own values; nest the calls instead")
        if isinstance(node, ast.Name) and node.id in sys.stdlib_module_names and self.kind(node.id) == "candidate":
            self.refuse(node, f"uses {node.id} without importing it")
        is_known = isinstance(node, ast.Name) and node.id in self.literals and self.kind(node.id) == "pure"
        if is_known and node.id not in bound:
            return copy.deepcopy(self.literals[node.id])
        is_expression = isinstance(node, ast.expr) and not isinstance(node, ast.Starred | ast.Slice)
        is_own = isinstance(node, COMPREHENSIONS) or self.is_own_call(node)  # the tests compute it of their own data
        candidate_kinds = kinds & ({*CANDIDATE_KINDS, "changed"} if is_own else {*CANDIDATE_KINDS, "changed", "kept"})
        if is_expression and "pure" in kinds and not candidate_kinds and not free_names(node) & bound:
            number = self.plan.input_count
            self.plan.inputs.append(("given", number, ast.unparse(node)))
            return _parsed(f"__given__({number})")
        return _map_children(node, self.for_candidate, bound=bound | binds(node))

    def keep_arguments(self, node: ast.expr, *, statement: bool = False) -> None:
        """Assign the names that are passed to a step in the candidate's run, which may change their values."""
        kind = "changed" if statement and "candidate" in self.kinds(node) else "kept"
        calls = [part for part in ast.walk(node) if isinstance(part, ast.Call)]
        for value in (value for part in calls for value in [*part.args, *(word.value for word in part.keywords)]):
            if not isinstance(value, ast.Name) or self.kind(value.id) not in ("pure", "kept"):
                continue
            if isinstance(self.literals.get(value.id), ast.Constant):  # it can't change
                continue
            if self.kind(value.id) == "pure":
                self.plan.steps.append((None, f"{value.id} = {ast.unparse(self.for_candidate(value))}"))
            self.names[value.id] = kind
            self.forget(value.id)
            if kind == "changed":
                self.literals.pop(value.id, None)


class _Substitution(ast.NodeTransformer):
    """Replaces names by values."""

    def __init__(self, values: dict):
        self.values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return _parsed(repr(self.values[node.id])) if node.id in self.values else node


def _parsed(source: str) -> ast.expr:
    return ast.parse(source, mode="eval").body


def _value_expression(number: int, table: str = "__held__") -> ast.expr:
    """Expression of a returned value in the tests' run."""
    return _parsed(f"{table}[{number}]")


def _ends_in_class(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "__class__"


def _is_none_test(node: ast.Compare) -> bool:
    """Whether a comparison is `… is None` or `… is not None`."""
    is_identity = len(node.ops) == 1 and isinstance(node.ops[0], ast.Is | ast.IsNot)
    return is_identity and isinstance(node.comparators[0], ast.Constant) and node.comparators[0].value is None


def _map_children(node, function, *arguments, bound: frozenset[str]):
    """Copy a node, with a function applied to its children."""
    mapped = copy.copy(node)
    for name, value in ast.iter_fields(node):
        if isinstance(value, list):
            parts = [function(part, *arguments, bound) if isinstance(part, ast.AST) else part for part in value]
            setattr(mapped, name, parts)
        elif isinstance(value, ast.AST):
            setattr(mapped, name, function(value, *arguments, bound))
    return mapped


def binds(node: ast.AST) -> frozenset[str]:
    """Names that a comprehension, one of its parts or a lambda binds."""
    if isinstance(node, COMPREHENSIONS):
        return frozenset().union(*(binds(part) for part in node.generators))
    if isinstance(node, ast.comprehension):
        return frozenset(names_in(node.target))
    if isinstance(node, ast.Lambda):
        return frozenset(part.arg for part in ast.walk(node.args) if isinstance(part, ast.arg))
    return NONE


def free_names(node: ast.AST, bound: frozenset[str] = NONE) -> set[str]:
    """Free names of a node."""
    if isinstance(node, ast.Name):
        return {node.id} - bound
    inner = bound | binds(node)
    return set().union(*(free_names(child, inner) for child in ast.iter_child_nodes(node)))


def names_in(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def stores(node: ast.AST) -> set[str]:
    """Names that a function binds: its arguments and the names that it assigns."""
    assigned = {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and not isinstance(part.ctx, ast.Load)}
    return assigned | {part.arg for part in ast.walk(node) if isinstance(part, ast.arg)}


def is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return False
    return True
