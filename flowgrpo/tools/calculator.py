"""Arithmetic as a tool: `calculator`, exact if possible.

    calculator().call({"expression": "0.1 + 0.2"})      # "0.3"
    calculator().call({"expression": "sqrt(2) ** 2"})   # "2"

The expression is parsed, and never run as Python. Integers, decimals and quotients are exact (as fractions); roots that
aren't whole, logarithms and the like are floats. Whole results print as integers, others with 12 significant digits.
Every number has at most `DIGITS` digits, so that no expression takes long.
"""

import ast
import math
import operator
import re
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction

from flowgrpo.contracts import Tool
from flowgrpo.tools.schema import tool
from flowgrpo.tools.toolset import ToolError

Number = Fraction | float

MAX_CHARS = 2000  # characters of an expression
MAX_DEPTH = 50  # parentheses and calls within each other
DIGITS = 1000
BITS = math.ceil(DIGITS * math.log2(10))
SIGNIFICANT = 12  # digits of numbers that aren't whole
CONSTANTS = {"pi": math.pi, "e": math.e}
SIGNS = str.maketrans({"\u00d7": "*", "\u00b7": "*", "\u00f7": "/", "\u2212": "-"})  # typeset signs
# Never arithmetic; some of it makes the parser warn.
FOREIGN = re.compile(r"[\\\"'`]|(?<![A-Za-z_])(and|else|for|if|in|is|not|or)(?![A-Za-z_])")
EXPONENT = re.compile(r"[eE][+-]?0*(\d{4,})")


def calculator() -> Tool:
    """The tool "calculator"."""
    return tool(calculate, name="calculator", pure=True)


def calculate(expression: str) -> str:
    """Computes an arithmetic expression, exactly where possible.

    Knows + - * / // % ** and parentheses; the functions sqrt, abs, round, min, max, factorial, gcd, log, exp, sin and
    cos; and the constants pi and e. Angles are in radians, log(x) is the natural logarithm, log(x, b) that to base b.

    expression: for example "(12.5 - 3) * 4 / 7"
    """
    if len(expression) > MAX_CHARS:
        raise ToolError(f"The expression has {len(expression)} characters, but may have {MAX_CHARS}.")
    source = " ".join(expression.translate(SIGNS).split())
    if not source:
        raise ToolError("The expression is empty.")
    if foreign := FOREIGN.search(source):
        raise ToolError(f"{foreign.group()!r} is no arithmetic; write numbers, operators and functions only.")
    if EXPONENT.search(source.replace("_", "")):
        raise ToolError(f"A number in the expression has more than {DIGITS} digits.")
    try:
        tree = ast.parse(source, mode="eval")
        return _show(_value(tree.body, source, 0))
    except SyntaxError as error:
        at = f" near position {error.offset}" if error.offset else ""
        raise ToolError(f"The expression can't be read{at}: {error.msg}.") from None
    except ZeroDivisionError:
        raise ToolError("The expression divides by zero.") from None
    except OverflowError:
        raise ToolError("A number in the expression becomes too large.") from None
    except (RecursionError, MemoryError):
        raise ToolError("The expression is nested too deeply.") from None
    except ToolError:
        raise
    except ValueError as error:
        raise ToolError(f"The expression can't be computed: {error}.") from None


def _show(value: Number) -> str:
    """Print a number: as an integer if it is whole, else with at most 12 significant digits."""
    if isinstance(value, float):
        if value.is_integer() and abs(value) < 10**SIGNIFICANT:
            return str(int(value))
        return f"{value:.{SIGNIFICANT}g}"
    if value.denominator == 1:
        return str(value.numerator)
    context = Context(prec=SIGNIFICANT)
    shown = context.divide(Decimal(value.numerator), Decimal(value.denominator)).normalize(context)
    return f"{shown:f}" if -5 <= shown.adjusted() < SIGNIFICANT else str(shown).replace("E", "e")


# The tree -----------------------------------------------------------------------------------------------


def _value(node: ast.expr, source: str, depth: int) -> Number:
    """Value of a part of the expression."""
    if depth > MAX_DEPTH:
        raise ToolError("The expression is nested too deeply.")
    if isinstance(node, ast.Constant):
        return _literal(node, source)
    if isinstance(node, ast.BinOp):
        return _chain(node, source, depth)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = _value(node.operand, source, depth + 1)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.Name) and node.id in CONSTANTS:
        return CONSTANTS[node.id]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        return _call(node.func.id, [_value(item, source, depth + 1) for item in node.args])
    raise ToolError(f"{_part(node, source)!r} is no arithmetic; use numbers, + - * / // % ** ( ), {', '.join(NAMES)}.")


def _chain(node: ast.expr, source: str, depth: int) -> Number:
    """Value of `a + b - c ...`, in a loop: the tree is as deep to the left as the chain is long."""
    steps = []
    while isinstance(node, ast.BinOp):
        if type(node.op) not in OPERATORS:
            hint = "use ** for powers" if isinstance(node.op, ast.BitXor) else "use + - * / // % **"
            raise ToolError(f"{_part(node, source)!r} has an operator that isn't known here; {hint}.")
        steps.append((OPERATORS[type(node.op)], node.right))
        node = node.left
    value = _value(node, source, depth + 1)
    for operate, right in reversed(steps):
        value = _checked(operate(value, _value(right, source, depth + 1)))
    return value


def _literal(node: ast.Constant, source: str) -> Number:
    """A number as it is written: 0.1 is one tenth."""
    if isinstance(node.value, bool) or not isinstance(node.value, (int, float)):
        raise ToolError(f"{_part(node, source)!r} is no number.")
    if isinstance(node.value, int):
        return _checked(Fraction(node.value))
    return _checked(Fraction((ast.get_source_segment(source, node) or repr(node.value)).replace("_", "")))


def _part(node: ast.expr, source: str) -> str:
    return (ast.get_source_segment(source, node) or source)[:60]


def _checked(value: Number | int | complex) -> Number:
    """The value, unless it is too large or not a real number."""
    if isinstance(value, complex):
        raise ToolError("The expression has no real value: a root of a negative number.")
    if isinstance(value, float):
        if not math.isfinite(value):
            raise OverflowError
    elif max(value.numerator.bit_length(), value.denominator.bit_length()) > BITS:
        raise ToolError(f"A number in the expression has more than {DIGITS} digits.")
    return Fraction(value) if isinstance(value, int) else value


# Operators and functions --------------------------------------------------------------------------------


def _power(base: Number, exponent: Number) -> Number | complex:
    """base ** exponent, if its size is bearable."""
    if isinstance(base, Fraction) and isinstance(exponent, Fraction):
        if exponent == Fraction(1, 2) and base >= 0:
            return _sqrt(base)
        if exponent.denominator == 1:
            bits = max(abs(base.numerator).bit_length(), base.denominator.bit_length()) - 1
            if abs(base) not in (0, 1) and bits * abs(exponent.numerator) > BITS:
                raise ToolError(f"A power in the expression has more than {DIGITS} digits.")
            if abs(base) == 1:
                return base ** (exponent.numerator % 2)
            return base**exponent.numerator
    return float(base) ** float(exponent)


def _sqrt(value: Number) -> Number:
    """Square root, exact if it is rational."""
    if value < 0:
        raise ToolError(f"sqrt of {_show(value)}, which is negative.")
    if isinstance(value, Fraction):
        root = Fraction(math.isqrt(value.numerator), math.isqrt(value.denominator))
        if root * root == value:
            return root
    return math.sqrt(value)


def _log(value: Number, base: Number | None = None) -> Number:
    if value <= 0 or (base is not None and (base <= 0 or base == 1)):
        raise ToolError("log takes a number above 0, and a base above 0 that isn't 1.")
    if base is None:
        return _natural(value)
    quotient = _natural(value) / _natural(base)
    nearest = round(quotient)
    if not (isinstance(base, Fraction) and isinstance(value, Fraction)):
        return quotient
    bits = max(base.numerator.bit_length(), base.denominator.bit_length()) - 1
    # A power that would be too large to compute is not checked for exactness.
    return Fraction(nearest) if bits * abs(nearest) <= BITS and base**nearest == value else quotient


def _natural(value: Number) -> float:
    if isinstance(value, float):
        return math.log(value)
    return math.log(value.numerator) - math.log(value.denominator)


def _round(value: Number, places: Number = Fraction(0)) -> Number:
    """Round half to even."""
    digits = _whole("round", places)
    if abs(digits) > DIGITS:
        raise ToolError(f"round takes at most {DIGITS} places.")
    return round(Fraction(value), digits)


def _factorial(value: Number) -> int:
    count = _whole("factorial", value)
    if count < 0 or count > DIGITS // 2:
        raise ToolError(f"factorial takes a whole number from 0 to {DIGITS // 2}, not {_show(value)}.")
    return math.factorial(count)


def _whole(name: str, value: Number) -> int:
    if value != int(value):
        raise ToolError(f"{name} takes whole numbers, not {_show(value)}.")
    return int(value)


def _call(name: str, values: list[Number]) -> Number:
    """Call a function."""
    if name not in FUNCTIONS:
        raise ToolError(f"There is no function {name[:40]!r}; there are {', '.join(FUNCTIONS)}.")
    function, low, high = FUNCTIONS[name]
    if not low <= len(values) <= high:
        takes = f"{low}" if low == high else f"at least {low}" if high == MAX_CHARS else f"{low} or {high}"
        raise ToolError(f"{name} takes {takes} argument{'s' * (takes != '1')}, not {len(values)}.")
    return _checked(function(*values))


OPERATORS: dict[type[ast.operator], Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
FUNCTIONS: dict[str, tuple[Callable, int, int]] = {
    "sqrt": (_sqrt, 1, 1),
    "abs": (abs, 1, 1),
    "round": (_round, 1, 2),
    "min": (min, 1, MAX_CHARS),
    "max": (max, 1, MAX_CHARS),
    "factorial": (_factorial, 1, 1),
    "gcd": (lambda *values: math.gcd(*(_whole("gcd", value) for value in values)), 1, MAX_CHARS),
    "log": (_log, 1, 2),
    "exp": (math.exp, 1, 1),
    "sin": (math.sin, 1, 1),
    "cos": (math.cos, 1, 1),
}
NAMES = (*FUNCTIONS, *CONSTANTS)
