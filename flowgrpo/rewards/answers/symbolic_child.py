"""Verdicts of math-verify on pairs of strings, reached in a process that can be killed.

The warm interpreter of the sandbox loads this module once and is forked for every call. It imports nothing of flowgrpo,
and math-verify only where it is called.
"""

import sys
import time

# Pairs that take every way through the grammar and the comparison.
WARMING = (
    ("x^2 + 2x + 1", "(x+1)^2"),
    ("\\frac{\\sqrt{3}}{2}", "\\sqrt{\\frac{3}{4}}"),
    ("\\{1, -2\\}", "\\{-2, 1\\}"),
    ("(1, 2]", "[1, 2)"),
    ("x \\le 3", "x < 3"),
    ("\\sin(2\\pi x) + e^{x+1}", "e \\cdot e^x + \\log_2 8"),
    ("\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}", "\\begin{bmatrix} 1 & 2 \\\\ 3 & 5 \\end{bmatrix}"),
    ("y = \\pm 2", "y = 2"),
    ("3 + 4i", "4i + 3"),
    ("\\binom{5}{2} - 5! + |-3|", "1/\\sqrt(2)"),
)
_warmed: list[bool] = []


def _read(text: str) -> list:
    """Parse the expressions that a text is; none where it can't be read."""
    import logging

    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    # It warns that its own alarms are off, as they are here.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    # Its `units` drop c, d, h, l, s, t, ab and bc at the end of a formula, so that 2ab would be 2h.
    form = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all")
    config = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=form)]
    return parse("\\boxed{" + text + "}", config, fallback_mode="no_fallback", parsing_timeout=0)


def readable(gold: str) -> bool:
    """Say whether a text can be read as mathematics."""
    return bool(_read(gold))


def compare(gold: str, answer: str) -> tuple[str, float]:
    """Say whether two formulas are the "same" or "different", and in how many seconds.

    "unreadable" where the answer can't be read.
    """
    from math_verify import verify

    start = time.monotonic()
    wanted, given = _read(gold), _read(answer)
    same = bool(given) and (verify(wanted, given, timeout_seconds=0) or _rounds(gold, given))
    return "same" if same else "different" if given else "unreadable", time.monotonic() - start


def _rounds(gold: str, given: list) -> bool:
    """Say if gold is a decimal of three digits and two places, or more, and an exact value is that when rounded."""
    import sympy

    whole, _, places = gold.strip("$ -").partition(".")
    if not (whole + places).isdecimal() or len(places) < 2 or len((whole + places).lstrip("0")) < 3:
        return False
    exact = [one for one in given if getattr(one, "is_number", False) and one.is_real and not one.is_Float]
    off = [abs(one.evalf(len(gold) + 10) - sympy.Rational(gold.strip("$ "))) for one in exact]
    return any(2 * one <= sympy.Rational(1, 10 ** len(places)) for one in off)


def verify_alone(gold: str, output: str) -> bool:
    """Decide whether math-verify accepts a whole output without any help: the baseline of the matcher."""
    from math_verify import parse, verify

    wanted = parse(f"${gold}$", parsing_timeout=0)
    spelled = output if "$" in output or "\\boxed" in output else f"${output}$"  # bare LaTeX is not looked at
    given = [parse(text, parsing_timeout=0) for text in {output, spelled}]
    return any(verify(wanted, one, timeout_seconds=0) for one in given)


def warm() -> None:
    """Compare formulas of every kind, so that a fork of this process need not read the grammar first."""
    for gold, answer in WARMING:
        compare(gold, answer)
    _warmed.append(True)


def is_warm() -> bool:
    """Say whether this process has read formulas before."""
    return bool(_warmed)


if "flowgrpo.sandbox.zygote" in sys.modules:  # loaded to be forked, in a process of its own
    warm()
