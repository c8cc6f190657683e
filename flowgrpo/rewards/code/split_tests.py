"""Tests in Python, split by `split_sources` so that the model's code and what they expect are never in one process.

    test sources -> SplitPlan: steps for the candidate's run, given values, items for the tests' run

In `assert sorted(f(x)) == [1, 2]` the part `sorted(f(x))` is a step: it is evaluated in the candidate's run, which gets
the value of x and nothing else of the tests. What it comes to returns as plain data, and stands for it in the tests'
run, where the rest is evaluated. What is understood, besides docstrings and prints:

    imports         of the standard library; names imported from elsewhere are the candidate's
    assignments     of data, of a call into the candidate (`s = Stack()`: the object stays there), or of both mixed
    statements      calls into the candidate (`s.push(1)`; it may change what it is handed), or of other things
    assert          expressions over calls into the candidate, names, literals, builtins and imports
    for             over a literal, a name that holds one, or a range: unrolled
    functions       `def test_…():`, and what asserts about its arguments where it is called, are read as if they
                    stood there (`def check(candidate):` is called with the one entry point where nothing calls it);
                    other functions are the tests' own, and may not call the candidate
    pytest          `with pytest.raises(ValueError):` over one call, and `pytest.approx`

Names that nothing defines are the candidate's, and so are the entry points, even where they are named like builtins.
An argument is handed over as a copy, and stays what it was in the tests' run: `assert f(x) == sorted(x)` is about x as
the tests made it. Where a part of an assert is about the argument alone (`x == [1, 2]`), or cuts it where the candidate
says (`x[:n]`), it is about the copy that the candidate had. Anything else raises `Unsplittable` with its line: `while`,
`if`, `try`, classes, a call into the candidate inside a comprehension (unless it is what the comprehension collects),
the candidate's functions or classes compared themselves, the candidate asked whether its own value is right
(`assert same(f(2), 3)`, or `Point(1, 2) == Point(1, 2)`, where its class says what is equal), `id()`, and `is` with
anything but None, True, False or a class: values are copied on their way, so what is one object here is two there.
"""

import ast
import copy
import sys
from collections.abc import Collection, Sequence

from flowgrpo.rewards.code.split_scope import SAID, THEIRS, Scope, SplitPlan, Unsplittable, is_literal, names_in, stores

UNROLLED = 2000  # statements of all loops of a task's tests
UNSTEADY = {"random", "secrets", "time", "uuid"}  # give something else in each run


def split_sources(sources: Sequence[str], entry_points: Collection[str] = ()) -> SplitPlan:
    """Make the plan of the tests in some sources, which share their names."""
    reader = _Reader(entry_points)
    for number, source in enumerate(sources, 1):
        reader.read(source, f"test {number}, " if len(sources) > 1 else "")
    return reader.scope.plan


class _Reader(ast.NodeVisitor):
    """Reads statements in their order; its scope knows what names hold by then, and keeps the plan."""

    def __init__(self, entry_points: Collection[str]):
        self.scope = Scope(entry_points)
        self.entry_points = list(entry_points)
        self.templates: dict[str, ast.FunctionDef] = {}  # functions that are read where they are called
        self.called: set[str] = set()
        self.unrolled = self.renamed = 0
        self.pytest: set[str] = set()  # names of the module
        self.raises: set[str] = set()  # what its `raises` is called

    def read(self, source: str, where: str) -> None:
        """Add a source to the plan."""
        self.scope.where = where
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise Unsplittable(f"{where}the tests can't be parsed ({error}); fix them") from None
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
        if not isinstance(node, ast.FunctionDef | ast.For | ast.If):  # whose own statements come here, too
            self.check(node)
        super().visit(node)

    def check(self, node: ast.AST) -> None:
        """Refuse what no run can answer, wherever it stands in a statement."""
        self.scope.check_identity(node)
        for part in ast.walk(node):
            if not isinstance(part, ast.Attribute) or ast.unparse(part.value) not in self.pytest:
                continue
            if part.attr not in ("raises", "approx"):
                self.scope.refuse(part, f"uses {ast.unparse(part)}; of pytest, only raises and approx can be used")

    def generic_visit(self, node: ast.AST) -> None:
        """Refuse a statement that is not read by a method of its own."""
        self.scope.refuse(node, f"holds `{type(node).__name__.lower()}`, which can't be split into calls and checks")

    def visit_Pass(self, node: ast.Pass) -> None:
        """Read nothing."""

    # Imports ------------------------------------------------------------------------------------------

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            top = alias.name.split(".")[0]
            if top not in sys.stdlib_module_names - UNSTEADY and top != "pytest":
                self.scope.refuse(
                    node, f"imports {alias.name}; only steady modules of the standard library can be used"
                )
            if top == "pytest":
                self.pytest.add(alias.asname or top)
                self.raises.add(f"{alias.asname or top}.raises")
                self.given(node, alias.asname or top, "__pytest__")
            else:
                self.shared(ast.copy_location(ast.Import([alias]), node), alias.asname or top)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        top = (node.module or "").split(".")[0]
        for alias in node.names:
            if top in sys.stdlib_module_names - UNSTEADY and not node.level and alias.name != "*":
                made = ast.copy_location(ast.ImportFrom(node.module, [alias], 0), node)
                self.shared(made, alias.asname or alias.name)
            elif top == "pytest" and alias.name == "approx":
                self.given(node, alias.asname or alias.name, "__pytest__.approx")
            elif top == "pytest" and alias.name == "raises":
                self.raises.add(alias.asname or alias.name)
            elif alias.asname or top == "pytest" or top in sys.stdlib_module_names:
                self.scope.refuse(node, f"imports {alias.name} from {node.module} in a way that can't be split")
            elif alias.name != "*":
                self.scope.names[alias.name] = "candidate"

    def shared(self, node: ast.stmt, name: str) -> None:
        """Add an import that both runs make."""
        self.scope.names[name] = "shared"
        self.scope.plan.steps.append((None, ast.unparse(node)))
        self.setup(node)

    def given(self, node: ast.stmt, name: str, source: str) -> None:
        """Add a name that the tests' run has something for."""
        self.scope.names[name] = "pure"
        self.setup(ast.copy_location(ast.parse(f"{name} = {source}").body[0], node))

    # Assignments --------------------------------------------------------------------------------------

    def visit_Assign(self, node: ast.Assign) -> None:
        if len(node.targets) > 1 and self.scope.kinds(node.value) & THEIRS:
            self.scope.refuse(node, "assigns what the candidate returns to several names at once; write one for each")
        for target in node.targets:
            self.assign(node, target, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.assign(node, node.target, node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if self.scope.kinds(node) & SAID:
            self.scope.refuse(node, "changes in place what comes from the candidate; assign it again")
        self.change(node, "kept" in self.scope.kinds(node.target))

    def assign(self, node: ast.stmt, target: ast.expr, value: ast.expr) -> None:
        """Assign a value to a target; `a, b = 1, f(2)` part by part, and no run gets what is for the other."""
        parts, values = getattr(target, "elts", None), getattr(value, "elts", None)
        ordered = isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List)
        if ordered and not names_in(target) & names_in(value) and len(parts or ()) == len(values or ()):
            for one, other in zip(parts or (), values or (), strict=True):
                self.assign(node, one, other)
            return
        if any(isinstance(part, ast.Starred) for part in ast.walk(target)):
            self.scope.refuse(node, "assigns to a starred name; write it without")
        loaded = [part for part in ast.walk(target) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)]
        into = {self.scope.kind(part.id) for part in loaded}
        kind = self.place(node, target, value, into)
        stored = {
            part.id for part in ast.walk(target) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
        }
        for name in stored:
            self.scope.names[name] = kind
            self.scope.literals.pop(name, None)
        if kind == "pure" and isinstance(target, ast.Name) and is_literal(value):
            self.scope.literals[target.id] = value

    def place(self, node: ast.stmt, target: ast.expr, value: ast.expr, into: set[str]) -> str:
        """Add an assignment to the run where it belongs, and say what its names hold from then on."""
        scope, kinds = self.scope, self.scope.kinds(value)
        if into & {*THEIRS, "changed"} or ("kept" in into and kinds & SAID):
            scope.keep_handed(value)
            scope.names |= {name: "changed" for name in names_in(target) if scope.kind(name) == "kept"}
            scope.plan.steps.append((None, _assigned(scope.child(target), scope.child(value))))
            scope.call(node)
            return "remote"
        if scope.is_step(value) and not into:
            self.take(node, target, value)
            return "remote"
        if kinds & SAID or "derived" in into:
            scope.plan.items.append(("derive", node.lineno, _assigned(target, scope.checked(value, []))))
            scope.names |= {name: "derived" for name in _changed(target) if scope.kind(name) == "pure"}
            return "derived"
        self.change(ast.copy_location(ast.Assign([target], value), node), "kept" in into)
        return "pure"

    def take(self, node: ast.stmt, target: ast.expr, value: ast.expr) -> None:
        """Assign what the candidate returned; what is made of such values alone, the tests compute, too."""
        scope, names = self.scope, stores(target)
        scope.keep_handed(value)
        own = None if "candidate" in scope.kinds(value) else scope.own(value)
        settled = own is not None and scope.settled(value)
        made = settled or scope.is_made(value)
        scope.plan.steps.append((None, _assigned(target, scope.child(value))))
        if not settled:
            scope.call(value)
        scope.returned = scope.returned | names if made else scope.returned - names
        scope.names |= dict.fromkeys(names, "remote")
        if settled:
            if not isinstance(value, ast.Call):
                scope.fixed -= names_in(value)  # which have another name now
            for name in sorted(names):
                scope.forget(name)
                scope.claims[name] = (None, scope.plan.value(name))
        else:
            scope.assign(sorted(names), value)
        if own is not None and settled:
            scope.plan.items.append(("derive", node.lineno, _assigned(scope.own(target), own)))

    def change(self, node: ast.stmt, argument: bool) -> None:
        """Add a statement of the tests' own, in both runs where it changes an argument that both have."""
        if isinstance(node, ast.Expr) and self.scope.is_own_call(node.value):  # the arguments are handed over again
            self.scope.names |= {name: "pure" for name in names_in(node) if self.scope.kind(name) == "kept"}
        elif argument:
            self.scope.plan.steps.append((None, ast.unparse(self.scope.child(node))))
            self.scope.call(node)
        self.setup(node)

    def setup(self, node: ast.stmt) -> None:
        """Add a statement of the tests' own; what it mentions may hold something else after it."""
        for name in names_in(node):
            self.scope.literals.pop(name, None)
        item = ("setup", node.lineno, ast.unparse(node))
        self.scope.plan.given.append(item)
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
            self.act(node, call)
        elif kinds & {*THEIRS, "changed"}:
            scope.refuse(node, "mixes a call into the candidate with other things; assign its value first")
        elif "derived" in kinds:
            scope.plan.items.append(("derive", node.lineno, ast.unparse(node)))
        else:
            self.change(node, "kept" in kinds)

    def act(self, node: ast.Expr, call: ast.Call) -> None:
        """Add a statement to the candidate's run; the tests do the same to a value that they know."""
        scope, settled = self.scope, self.scope.settled(call)
        scope.keep_handed(call, statement=True)
        own = scope.own(call) if settled else None
        scope.plan.steps.append((None, ast.unparse(scope.child(call))))
        if own is not None:
            scope.plan.items.append(("derive", node.lineno, ast.unparse(own)))
        if settled:
            return
        scope.call(call)
        if isinstance(call.func, ast.Name):
            changed = {part.id for part in call.args if isinstance(part, ast.Name) and scope.kind(part.id) == "changed"}
            scope.assign(sorted(changed), call)

    def visit_Assert(self, node: ast.Assert) -> None:
        scope, uses = self.scope, []
        both = isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.And)
        parts = node.test.values if both else [node.test]  # type: ignore
        if not scope.kinds(node.test) & {*SAID, "kept"}:
            return  # about the tests' own data: no test of the candidate
        scope.check_judges(node.test)
        checked = [f"({self.part(part, uses)})" for part in parts]
        scope.plan.check(" and ".join(checked), self.words(node, node.test), uses)

    def part(self, node: ast.expr, uses: list[int]) -> str:
        """Read a part of an assert; an argument that it isn't about is what it was before the calls of this part."""
        scope, about = self.scope, self.scope.about(node)
        kept = {name for name in about if scope.kind(name) == "kept"}
        changed = {name for name in names_in(node) - about if scope.kind(name) == "changed"}
        scope.before = {name: scope.claim(name) for name in sorted(changed)}
        scope.names |= dict.fromkeys(kept, "changed")
        made = scope.checked(scope.truth(node), uses)
        scope.before = {}
        scope.names |= dict.fromkeys(kept, "kept")
        return ast.unparse(made)

    def visit_With(self, node: ast.With) -> None:
        context, body = node.items[0].context_expr, node.body[0]
        bare = isinstance(context, ast.Call) and not context.keywords and node.items[0].optional_vars is None
        raises = bare and ast.unparse(context.func) in self.raises and len(context.args) == 1  # type: ignore
        call = body.value if isinstance(body, ast.Expr | ast.Assign) else None
        if not raises or len(node.items) + len(node.body) > 2 or call is None or not self.scope.is_step(call):
            self.scope.refuse(node, "is a `with` other than pytest.raises(ERROR) over one call into the candidate")
        expected = context.args[0]  # type: ignore
        names = [ast.unparse(part) for part in (expected.elts if isinstance(expected, ast.Tuple) else [expected])]
        self.scope.keep_handed(call)
        number = self.scope.plan.value(ast.unparse(self.scope.child(call)))
        self.scope.call(call)
        self.scope.plan.check(f"__raised__({number}, {names!r})", self.words(node, body), [number])

    def words(self, node: ast.stmt, shown: ast.AST) -> str:
        text = ast.unparse(shown)
        return f"{self.scope.where}line {node.lineno}: {text if len(text) <= 80 else text[:77] + '…'}"

    # Blocks -------------------------------------------------------------------------------------------

    def visit_If(self, node: ast.If) -> None:
        if not ast.unparse(node.test).startswith("__name__ ==") or node.orelse:
            self.scope.refuse(node, "holds `if`, which can't be split into calls and checks")
        for statement in node.body:
            self.visit(statement)

    def visit_For(self, node: ast.For) -> None:
        values = self.scope.known(node.iter)
        if values is None or node.orelse:
            self.scope.refuse(node, "loops over something other than a literal, a name of one, or a range")
        for value in values or ():
            self.unrolled += len(node.body)
            if self.unrolled > UNROLLED:
                self.scope.refuse(node, f"loops over more than {UNROLLED} statements")
            self.assign(node, copy.deepcopy(node.target), ast.parse(repr(value), mode="eval").body)
            for statement in copy.deepcopy(node.body):
                self.visit(statement)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        arguments = [part.arg for part in node.args.args]
        free = self.scope.kinds(node, frozenset({*stores(node), node.name}))
        if node.decorator_list:
            self.scope.refuse(node, f"decorates {node.name}; write its cases out")
        if node.name.startswith("test") and not arguments:
            self.inline(node, [])
            self.templates[node.name] = ast.FunctionDef(node.name, node.args, [], [])  # a call does nothing more
            self.called.add(node.name)
        elif arguments and _tests(node):
            self.templates[node.name] = node
        elif free & SAID:
            self.scope.refuse(node, f"defines {node.name}, a helper that uses the candidate")
        else:
            self.check(node)
            self.setup(node)
            self.scope.names[node.name] = "pure"

    def inline(self, template: ast.FunctionDef, values: list[ast.expr]) -> None:
        """Read the body of a test function as if it stood here, with names of its own."""
        parameters = [part.arg for part in template.args.args]
        if len(parameters) != len(values):
            self.scope.refuse(template, f"defines {template.name}, which is called with {len(values)} arguments")
        self.renamed += 1
        new = {name: f"{name}__{self.renamed}" for name in stores(template)}
        for parameter, value in zip(parameters, values, strict=True):
            if isinstance(value, ast.Name) and self.scope.kind(value.id) == "candidate":
                new[parameter] = value.id
            else:
                self.assign(template, ast.Name(new[parameter], ast.Store()), value)
        for statement in copy.deepcopy(template.body):
            for part in ast.walk(statement):
                if isinstance(part, ast.Name):
                    part.id = new.get(part.id, part.id)
                elif isinstance(part, ast.arg):
                    part.arg = new.get(part.arg, part.arg)
            if not isinstance(statement, ast.Return):
                self.visit(statement)


def _changed(target: ast.expr) -> set[str]:
    """Name what an assignment to an item or an attribute changes."""
    while isinstance(target, ast.Subscript | ast.Attribute):
        target = target.value
    return names_in(target) if isinstance(target, ast.Name) else set()


def _assigned(target: ast.expr, value: ast.expr) -> str:
    return ast.unparse(ast.fix_missing_locations(ast.Assign([target], value)))


def _tests(node: ast.FunctionDef) -> bool:
    """Say whether a function tests what it is given: it asserts, and returns nothing."""
    inside = list(ast.walk(node))
    returns = any(isinstance(part, ast.Return) and part.value is not None for part in inside)
    return any(isinstance(part, ast.Assert) for part in inside) and not returns and not node.args.defaults
