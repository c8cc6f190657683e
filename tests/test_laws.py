"""The table of what guards what, in tests/README.md, is true."""

import re
from pathlib import Path

import laws

PAGE = (Path(__file__).parent / "README.md").read_text()


def test_every_law_has_a_check_that_ci_runs():
    guarded = {check.law for check in laws.checks() if check.tier != "soak"}
    assert guarded == set(laws.LAWS)


def test_the_law_table_lists_the_tests():
    assert laws.table() in PAGE, "put what `python -m tests.laws` prints into tests/README.md"


def test_promises_name_tests_that_exist():
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) > 10
    for file, test in named:
        assert f"def {test}(" in (Path(__file__).parent / file).read_text(), f"{file}::{test}"
