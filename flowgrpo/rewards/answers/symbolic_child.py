"""math-verify on pairs of strings, in a process that can be killed: `readable`, `compare`.

The warm interpreter of the sandbox loads this module once and is forked for every call. It imports nothing of flowgrpo,
and math-verify only when it is called.
"""

import sys
import time

# Pairs that exercise the whole grammar and every comparison.
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
    """Parse the expressions of a text; empty if it can't be read."""
    import logging

    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    # It warns that its own timeouts are off, as they are here.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    # Its `units` drop c, d, h, l, s, t, ab and bc at the end of a formula, so that 2ab would be 2h.
    form = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all")
    config = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=form)]
    return parse("\\boxed{" + text + "}", config, fallback_mode="no_fallback", parsing_timeout=0)


def readable(gold: str) -> bool:
    """Whether a text can be parsed as mathematics."""
    return bool(_read(gold))


def compare(gold: str, answer: str) -> tuple[str, float]:
    """Compare two formulas -> "same", "different" or "unreadable" (the answer can't be parsed), and the seconds."""
    from math_verify import verify

    start = time.monotonic()
    gold_parsed, answer_parsed = _read(gold), _read(answer)
    is_same = bool(answer_parsed) and (
        verify(gold_parsed, answer_parsed, timeout_seconds=0) or _rounds(gold, answer_parsed)
    )
    return "same" if is_same else "different" if answer_parsed else "unreadable", time.monotonic() - start


def _rounds(gold: str, answers: list) -> bool:
    """Whether gold is a decimal of at least three digits and two places to which an exact answer rounds."""
    import sympy

    whole, _, places = gold.strip("$ -").partition(".")
    if not (whole + places).isdecimal() or len(places) < 2 or len((whole + places).lstrip("0")) < 3:
        return False
    values = [value for value in answers if getattr(value, "is_number", False) and value.is_real and not value.is_Float]
    errors = [abs(value.evalf(len(gold) + 10) - sympy.Rational(gold.strip("$ "))) for value in values]
    return any(2 * value <= sympy.Rational(1, 10 ** len(places)) for value in errors)


def verify_alone(gold: str, output: str) -> bool:
    """Whether math-verify alone accepts a whole output: the baseline of the matcher."""
    from math_verify import parse, verify

    gold_parsed = parse(f"${gold}$", parsing_timeout=0)
    in_dollars = output if "$" in output or "\\boxed" in output else f"${output}$"  # it doesn't read bare LaTeX
    readings = [parse(text, parsing_timeout=0) for text in {output, in_dollars}]
    return any(verify(gold_parsed, reading, timeout_seconds=0) for reading in readings)


def warm() -> None:
    """Compare formulas of every kind, so that forks of this process have the grammar loaded."""
    for gold, answer in WARMING:
        compare(gold, answer)
    _warmed.append(True)


def is_warm() -> bool:
    """Whether `warm` has run in this process."""
    return bool(_warmed)


if "flowgrpo.sandbox.zygote" in sys.modules:  # preloaded by the sandbox, to be forked
    warm()
