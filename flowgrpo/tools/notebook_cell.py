"""Runs a program in the sandbox like a cell of a notebook: the value of its last expression is printed after a mark.

The source of this module is what runs there (`python.py` adds the call), so it imports only the standard library.
"""

import ast
import sys
import traceback

FILE = "code.py"


def run_cell(mark):
    """Run `code.py`; then print the mark and the value of the last expression, if it has one."""
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


def _stop(error, trace):
    """Print the traceback from the program's own first line on, and exit as Python does."""
    sys.stdout.flush()
    traceback.print_exception(type(error), error, trace)
    sys.stderr.flush()
    sys.exit(1)
