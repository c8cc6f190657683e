"""Measurements and tables: `timed` calls, `medians` of them, and records as `show_lines` and `show_columns`."""

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds until the results are ready, and the results."""
    start = time.perf_counter()
    result = jax.block_until_ready(work())
    return time.perf_counter() - start, result


def seconds(work: Callable[[], Any]) -> float:
    """Seconds until the results are ready."""
    return timed(work)[0]


def significant(value: float, digits: int = 3) -> float:
    """The value rounded to `digits` significant digits, so that a small fraction isn't printed as zero."""
    return float(f"{value:.{digits}g}")


def medians(rows: Iterable[dict[str, float]]) -> dict[str, float]:
    """The median of each column, without the first row, in which programs were compiled."""
    _, *counted = rows
    return {name: statistics.median(row[name] for row in counted) for name in counted[0]}


def show_lines(rows: list[dict]) -> None:
    """Print a table of records with the same fields, one per line."""
    widths = {name: 2 + max(len(name), *(len(str(row[name])) for row in rows)) for name in rows[0]} if rows else {}
    for row in [{name: name for name in widths}, *rows]:
        print("".join(f"{row[name]!s:>{width}}" for name, width in widths.items()))
    print(flush=True)


def show_columns(rows: list[dict]) -> None:
    """Print a table of records with many fields, one per column."""
    for name in rows[0] if rows else ():
        print(f"{name:32}" + "".join(f"{row[name]:>12}" for row in rows))
    print(flush=True)
