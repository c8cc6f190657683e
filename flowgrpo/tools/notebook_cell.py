"""A program run in the sandbox as a notebook runs a cell: the value of its last expression is written behind a mark.

Its text is what runs there (`python.py` adds the call), so it imports nothing but the standard library.
"""

import ast
import sys
import traceback

FILE = "code.py"


def carry_out(mark):
    """Run `code.py`; then write the mark, and the value of the last expression where it has one."""
    try:
        with open(FILE, encoding="utf-8", errors="surrogatepass", newline="") as file:
            tree = ast.parse(file.read(), FILE)
    except (SyntaxError, ValueError, RecursionError) as error:
        _stop(error, None)
    names = sys.modules["__main__"].__dict__
    names["__file__"] = FILE
    try:
        end = tree.body[-1] if tree.body else None
        last = ast.Expression(end.value) if isinstance(end, ast.Expr) else None
        if last:
            tree.body.pop()
        exec(compile(tree, FILE, "exec", dont_inherit=True), names)
        value = eval(compile(last, FILE, "eval", dont_inherit=True), names) if last else None
        if value is not None:
            print(f"{mark}{value!r}", flush=True)
    except (MemoryError, SystemExit):  # the sandbox tells these apart itself
        raise
    except BaseException as error:
        _stop(error, error.__traceback__ and error.__traceback__.tb_next)


def _stop(error, where):
    """Write the traceback from the program's own first line on, and end as Python does."""
    sys.stdout.flush()
    traceback.print_exception(type(error), error, where)
    sys.stderr.flush()
    sys.exit(1)
