"""Python tests, split by `split_sources` so that the model's code and the expected values are never in one process.

    test sources -> SplitPlan: steps for the candidate's run, its inputs, items for the tests' run

In `assert sorted(f(x)) == [1, 2]` the part `sorted(f(x))` is a step: it is evaluated in the candidate's run, which gets
the value of x and nothing else of the tests. Its result is returned as plain data and replaces the step in the tests'
run, where the remaining expression is evaluated. Supported, besides docstrings and prints:

    imports         of the standard library; names imported from elsewhere are the candidate's
    assignments     of data, of a call into the candidate (`s = Stack()`: the object stays there), or of a mixture
    statements      calls into the candidate (`s.push(1)`; it may change its arguments), or of other functions
    assert          expressions over calls into the candidate, names, literals, builtins and imports
    for             over a literal, a name of one, or a range: unrolled
    functions       `def test_…():`, and functions that assert about their arguments, are inlined where they are
                    called (`def check(candidate):` is called with the one entry point if nothing else calls it);
                    other functions are the tests' own, and must not call the candidate
    pytest          `with pytest.raises(ValueError):` over one call, and `pytest.approx`

Undefined names are the candidate's, and so are the entry points, even if they have names of builtins. An argument is
passed as a copy, and the original stays in the tests' run: `assert f(x) == sorted(x)` is about x as the tests made it.
If a part of an assert is about the argument alone (`x == [1, 2]`), or slices it by the candidate's values (`x[:n]`), it
is about the candidate's copy. Anything else raises `Unsplittable` with its line: `while`, `if`, `try`, classes, a call
into the candidate inside a comprehension (unless it is the element of the comprehension), comparisons of the
candidate's functions or classes themselves, tests in which the candidate decides whether its own value is right
(`assert same(f(2), 3)`, or `Point(1, 2) == Point(1, 2)`, where its class defines equality), `id()`, and `is` with
anything but None, True, False or a class: values are copied between the runs, so one object here is two there.
"""

import ast
import copy
import sys
from collections.abc import Collection, Sequence

from flowgrpo.rewards.code.split_scope import (
    CANDIDATE_KINDS,
    RETURNED_KINDS,
    Scope,
    SplitPlan,
    Unsplittable,
    is_literal,
    names_in,
    stores,
)

MAX_UNROLLED = 2000  # statements of all unrolled loops of a task's tests
NONDETERMINISTIC = {"random", "secrets", "time", "uuid"}  # modules whose results differ between runs


def split_sources(sources: Sequence[str], entry_points: Collection[str] = ()) -> SplitPlan:
    """Make the plan of test sources, which share their names."""
    reader = _TestReader(entry_points)
    for number, source in enumerate(sources, 1):
        reader.read(source, f"test {number}, " if len(sources) > 1 else "")
    return reader.scope.plan


class _TestReader(ast.NodeVisitor):
    """Reads statements in order; its scope has the current kinds of names, and the plan."""

    def __init__(self, entry_points: Collection[str]):
        self.scope = Scope(entry_points)
        self.entry_points = list(entry_points)
        self.templates: dict[str, ast.FunctionDef] = {}  # functions that are inlined where they are called
        self.called: set[str] = set()
        self.unrolled = self.renamed = 0
        self.pytest: set[str] = set()  # names of the module pytest
        self.raises: set[str] = set()  # names of `pytest.raises`

    def read(self, source: str, label: str) -> None:
        """Add a source to the plan."""
        self.scope.label = label
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise Unsplittable(f"{label}the tests can't be parsed ({error}); fix them") from None
        self.scope.find_classes(tree)
        for statement in tree.body:
            self.visit(statement)
        for name in self.templates.keys() - self.called:
            template = self.templates[name]
            if len(self.entry_points) != 1 or [part.arg for part in template.args.args] != ["candidate"]:
                self.scope.refuse(template, f"defines {name}, which nothing calls; call it, or name one entry_point")
            self.called.add(name)
            self.inline(template, [ast.Name(self.entry_points[0], ast.Load())])

    def visit(self, node: ast.AST) -> None:
        """Read a statement."""
        if not isinstance(node, ast.FunctionDef | ast.For | ast.If):  # whose own statements are visited, too
            self.check(node)
        super().visit(node)

    def check(self, node: ast.AST) -> None:
        """Refuse what neither run can evaluate, anywhere in a statement."""
        self.scope.check_identity(node)
        for part in ast.walk(node):
            if not isinstance(part, ast.Attribute) or ast.unparse(part.value) not in self.pytest:
                continue
            if part.attr not in ("raises", "approx"):
                self.scope.refuse(part, f"uses {ast.unparse(part)}; of pytest, only raises and approx can be used")

    def generic_visit(self, node: ast.AST) -> None:
        """Refuse a statement that has no method of its own here."""
        self.scope.refuse(node, f"holds `{type(node).__name__.lower()}`, which can't be split into calls and checks")

    def visit_Pass(self, node: ast.Pass) -> None:
        """Nothing to do."""

    # Imports ------------------------------------------------------------------------------------------

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            top = alias.name.split(".")[0]
            if top not in sys.stdlib_module_names - NONDETERMINISTIC and top != "pytest":
                self.scope.refuse(
                    node, f"imports {alias.name}; only steady modules of the standard library can be used"
                )
            if top == "pytest":
                self.pytest.add(alias.asname or top)
                self.raises.add(f"{alias.asname or top}.raises")
                self.bind_in_tests(node, alias.asname or top, "__pytest__")
            else:
                self.add_shared_import(ast.copy_location(ast.Import([alias]), node), alias.asname or top)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        top = (node.module or "").split(".")[0]
        for alias in node.names:
            if top in sys.stdlib_module_names - NONDETERMINISTIC and not node.level and alias.name != "*":
                statement = ast.copy_location(ast.ImportFrom(node.module, [alias], 0), node)
                self.add_shared_import(statement, alias.asname or alias.name)
            elif top == "pytest" and alias.name == "approx":
                self.bind_in_tests(node, alias.asname or alias.name, "__pytest__.approx")
            elif top == "pytest" and alias.name == "raises":
                self.raises.add(alias.asname or alias.name)
            elif alias.asname or top == "pytest" or top in sys.stdlib_module_names:
                self.scope.refuse(node, f"imports {alias.name} from {node.module} in a way that can't be split")
            elif alias.name != "*":
                self.scope.names[alias.name] = "candidate"

    def add_shared_import(self, node: ast.stmt, name: str) -> None:
        """Add an import to both runs."""
        self.scope.names[name] = "shared"
        self.scope.plan.steps.append((None, ast.unparse(node)))
        self.add_setup(node)

    def bind_in_tests(self, node: ast.stmt, name: str, source: str) -> None:
        """Bind a name to an expression in the tests' run."""
        self.scope.names[name] = "pure"
        self.add_setup(ast.copy_location(ast.parse(f"{name} = {source}").body[0], node))

    # Assignments --------------------------------------------------------------------------------------

    def visit_Assign(self, node: ast.Assign) -> None:
        if len(node.targets) > 1 and self.scope.kinds(node.value) & CANDIDATE_KINDS:
            self.scope.refuse(node, "assigns what the candidate returns to several names at once; write one for each")
        for target in node.targets:
            self.assign(node, target, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.assign(node, node.target, node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if self.scope.kinds(node) & RETURNED_KINDS:
            self.scope.refuse(node, "changes in place what comes from the candidate; assign it again")
        self.add_own_statement(node, "kept" in self.scope.kinds(node.target))

    def assign(self, node: ast.stmt, target: ast.expr, value: ast.expr) -> None:
        """Assign a value to a target; `a, b = 1, f(2)` part by part, so that neither run gets the other's values."""
        parts, values = getattr(target, "elts", None), getattr(value, "elts", None)
        is_parallel = isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List)
        if is_parallel and not names_in(target) & names_in(value) and len(parts or ()) == len(values or ()):
            for part_target, part_value in zip(parts or (), values or (), strict=True):
                self.assign(node, part_target, part_value)
            return
        if any(isinstance(part, ast.Starred) for part in ast.walk(target)):
            self.scope.refuse(node, "assigns to a starred name; write it without")
        loaded = [part for part in ast.walk(target) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)]
        target_kinds = {self.scope.kind(part.id) for part in loaded}
        kind = self.place_assignment(node, target, value, target_kinds)
        stored = {
            part.id for part in ast.walk(target) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
        }
        for name in stored:
            self.scope.names[name] = kind
            self.scope.literals.pop(name, None)
        if kind == "pure" and isinstance(target, ast.Name) and is_literal(value):
            self.scope.literals[target.id] = value

    def place_assignment(self, node: ast.stmt, target: ast.expr, value: ast.expr, target_kinds: set[str]) -> str:
        """Add an assignment to the run that must make it -> kind of the assigned names."""
        scope, kinds = self.scope, self.scope.kinds(value)
        if target_kinds & {*CANDIDATE_KINDS, "changed"} or ("kept" in target_kinds and kinds & RETURNED_KINDS):
            scope.keep_arguments(value)
            scope.names |= {name: "changed" for name in names_in(target) if scope.kind(name) == "kept"}
            scope.plan.steps.append((None, _assignment(scope.for_candidate(target), scope.for_candidate(value))))
            scope.note_call(node)
            return "remote"
        if scope.is_step(value) and not target_kinds:
            self.assign_step(node, target, value)
            return "remote"
        if kinds & RETURNED_KINDS or "derived" in target_kinds:
            scope.plan.items.append(("derive", node.lineno, _assignment(target, scope.for_tests(value, []))))
            scope.names |= {name: "derived" for name in _changed_names(target) if scope.kind(name) == "pure"}
            return "derived"
        self.add_own_statement(ast.copy_location(ast.Assign([target], value), node), "kept" in target_kinds)
        return "pure"

    def assign_step(self, node: ast.stmt, target: ast.expr, value: ast.expr) -> None:
        """Assign the candidate's value; what is computed from such values alone, the tests compute, too."""
        scope, names = self.scope, stores(target)
        scope.keep_arguments(value)
        expression = None if "candidate" in scope.kinds(value) else scope.on_plain_data(value)
        is_settled = expression is not None and scope.is_settled(value)
        is_result = is_settled or scope.is_function_result(value)
        scope.plan.steps.append((None, _assignment(target, scope.for_candidate(value))))
        if not is_settled:
            scope.note_call(value)
        scope.returned = scope.returned | names if is_result else scope.returned - names
        scope.names |= dict.fromkeys(names, "remote")
        if is_settled:
            if not isinstance(value, ast.Call):
                scope.unchanged -= names_in(value)  # since they have another name now
            for name in sorted(names):
                scope.forget(name)
                scope.claims[name] = (None, scope.plan.value(name))
        else:
            scope.note_assignment(sorted(names), value)
        if expression is not None and is_settled:
            scope.plan.items.append(("derive", node.lineno, _assignment(scope.on_plain_data(target), expression)))

    def add_own_statement(self, node: ast.stmt, is_argument: bool) -> None:
        """Add a statement of the tests' own, to both runs if it changes an argument that both have."""
        if isinstance(node, ast.Expr) and self.scope.is_own_call(node.value):  # the arguments are passed again
            self.scope.names |= {name: "pure" for name in names_in(node) if self.scope.kind(name) == "kept"}
        elif is_argument:
            self.scope.plan.steps.append((None, ast.unparse(self.scope.for_candidate(node))))
            self.scope.note_call(node)
        self.add_setup(node)

    def add_setup(self, node: ast.stmt) -> None:
        """Add a statement of the tests' own, which may change the values of the names in it."""
        for name in names_in(node):
            self.scope.literals.pop(name, None)
        item = ("setup", node.lineno, ast.unparse(node))
        self.scope.plan.inputs.append(item)
        self.scope.plan.items.append(item)

    # Calls and checks ---------------------------------------------------------------------------------

    def visit_Expr(self, node: ast.Expr) -> None:
        scope, call, kinds = self.scope, node.value, self.scope.kinds(node)
        name = call.func.id if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else ""
        if isinstance(call, ast.Constant) or name == "print":
            return
        if isinstance(call, ast.Call) and name in self.templates:
            self.called.add(name)
            self.inline(self.templates[name], call.args)
        elif isinstance(call, ast.Call) and (scope.is_step(call) or ("changed" in kinds and "pure" not in kinds)):
            self.add_candidate_statement(node, call)
        elif kinds & {*CANDIDATE_KINDS, "changed"}:
            scope.refuse(node, "mixes a call into the candidate with other things; assign its value first")
        elif "derived" in kinds:
            scope.plan.items.append(("derive", node.lineno, ast.unparse(node)))
        else:
            self.add_own_statement(node, "kept" in kinds)

    def add_candidate_statement(self, node: ast.Expr, call: ast.Call) -> None:
        """Add a statement to the candidate's run; the tests run it, too, on a value that they have."""
        scope, is_settled = self.scope, self.scope.is_settled(call)
        scope.keep_arguments(call, statement=True)
        expression = scope.on_plain_data(call) if is_settled else None
        scope.plan.steps.append((None, ast.unparse(scope.for_candidate(call))))
        if expression is not None:
            scope.plan.items.append(("derive", node.lineno, ast.unparse(expression)))
        if is_settled:
            return
        scope.note_call(call)
        if isinstance(call.func, ast.Name):
            changed = {part.id for part in call.args if isinstance(part, ast.Name) and scope.kind(part.id) == "changed"}
            scope.note_assignment(sorted(changed), call)

    def visit_Assert(self, node: ast.Assert) -> None:
        scope, uses = self.scope, []
        is_conjunction = isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.And)
        parts = node.test.values if is_conjunction else [node.test]  # type: ignore
        if not scope.kinds(node.test) & {*RETURNED_KINDS, "kept"}:
            return  # only about the tests' own data: no test of the candidate
        scope.check_judges(node.test)
        conjuncts = [f"({self.assert_part(part, uses)})" for part in parts]
        scope.plan.check(" and ".join(conjuncts), self.in_words(node, node.test), uses)

    def assert_part(self, node: ast.expr, uses: list[int]) -> str:
        """Split a part of an assert; an argument that it isn't about has its value from before this part."""
        scope, names = self.scope, self.scope.names_about(node)
        kept = {name for name in names if scope.kind(name) == "kept"}
        changed = {name for name in names_in(node) - names if scope.kind(name) == "changed"}
        scope.earlier_values = {name: scope.value_number(name) for name in sorted(changed)}
        scope.names |= dict.fromkeys(kept, "changed")
        expression = scope.for_tests(scope.as_truth_value(node), uses)
        scope.earlier_values = {}
        scope.names |= dict.fromkeys(kept, "kept")
        return ast.unparse(expression)

    def visit_With(self, node: ast.With) -> None:
        context, body = node.items[0].context_expr, node.body[0]
        is_simple = isinstance(context, ast.Call) and not context.keywords and node.items[0].optional_vars is None
        raises = is_simple and ast.unparse(context.func) in self.raises and len(context.args) == 1  # type: ignore
        call = body.value if isinstance(body, ast.Expr | ast.Assign) else None
        if not raises or len(node.items) + len(node.body) > 2 or call is None or not self.scope.is_step(call):
            self.scope.refuse(node, "is a `with` other than pytest.raises(ERROR) over one call into the candidate")
        expected = context.args[0]  # type: ignore
        names = [ast.unparse(part) for part in (expected.elts if isinstance(expected, ast.Tuple) else [expected])]
        self.scope.keep_arguments(call)
        number = self.scope.plan.value(ast.unparse(self.scope.for_candidate(call)))
        self.scope.note_call(call)
        self.scope.plan.check(f"__raised__({number}, {names!r})", self.in_words(node, body), [number])

    def in_words(self, node: ast.stmt, node_in_words: ast.AST) -> str:
        text = ast.unparse(node_in_words)
        return f"{self.scope.label}line {node.lineno}: {text if len(text) <= 80 else text[:77] + '…'}"

    # Blocks -------------------------------------------------------------------------------------------

    def visit_If(self, node: ast.If) -> None:
        if not ast.unparse(node.test).startswith("__name__ ==") or node.orelse:
            self.scope.refuse(node, "holds `if`, which can't be split into calls and checks")
        for statement in node.body:
            self.visit(statement)

    def visit_For(self, node: ast.For) -> None:
        values = self.scope.literal_values(node.iter)
        if values is None or node.orelse:
            self.scope.refuse(node, "loops over something other than a literal, a name of one, or a range")
        for value in values or ():
            self.unrolled += len(node.body)
            if self.unrolled > MAX_UNROLLED:
                self.scope.refuse(node, f"loops over more than {MAX_UNROLLED} statements")
            self.assign(node, copy.deepcopy(node.target), ast.parse(repr(value), mode="eval").body)
            for statement in copy.deepcopy(node.body):
                self.visit(statement)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        arguments = [part.arg for part in node.args.args]
        free_kinds = self.scope.kinds(node, frozenset({*stores(node), node.name}))
        if node.decorator_list:
            self.scope.refuse(node, f"decorates {node.name}; write its cases out")
        if node.name.startswith("test") and not arguments:
            self.inline(node, [])
            self.templates[node.name] = ast.FunctionDef(
                node.name, node.args, [], []
            )  # calling it later does nothing more
            self.called.add(node.name)
        elif arguments and _is_test(node):
            self.templates[node.name] = node
        elif free_kinds & RETURNED_KINDS:
            self.scope.refuse(node, f"defines {node.name}, a helper that uses the candidate")
        else:
            self.check(node)
            self.add_setup(node)
            self.scope.names[node.name] = "pure"

    def inline(self, template: ast.FunctionDef, values: list[ast.expr]) -> None:
        """Inline the body of a test function, with its local names renamed."""
        parameters = [part.arg for part in template.args.args]
        if len(parameters) != len(values):
            self.scope.refuse(template, f"defines {template.name}, which is called with {len(values)} arguments")
        self.renamed += 1
        new_names = {name: f"{name}__{self.renamed}" for name in stores(template)}
        for parameter, value in zip(parameters, values, strict=True):
            if isinstance(value, ast.Name) and self.scope.kind(value.id) == "candidate":
                new_names[parameter] = value.id
            else:
                self.assign(template, ast.Name(new_names[parameter], ast.Store()), value)
        for statement in copy.deepcopy(template.body):
            for part in ast.walk(statement):
                if isinstance(part, ast.Name):
                    part.id = new_names.get(part.id, part.id)
                elif isinstance(part, ast.arg):
                    part.arg = new_names.get(part.arg, part.arg)
            if not isinstance(statement, ast.Return):
                self.visit(statement)


def _changed_names(target: ast.expr) -> set[str]:
    """Name that an assignment to an item or an attribute changes."""
    while isinstance(target, ast.Subscript | ast.Attribute):
        target = target.value
    return names_in(target) if isinstance(target, ast.Name) else set()


def _assignment(target: ast.expr, value: ast.expr) -> str:
    return ast.unparse(ast.fix_missing_locations(ast.Assign([target], value)))


def _is_test(node: ast.FunctionDef) -> bool:
    """Whether a function tests its arguments: it asserts, and returns nothing."""
    inside = list(ast.walk(node))
    returns = any(isinstance(part, ast.Return) and part.value is not None for part in inside)
    return any(isinstance(part, ast.Assert) for part in inside) and not returns and not node.args.defaults
