"""Find which tests guard which law, by the numbers in names and docstrings; `python -m tests.laws` prints the table."""

import ast
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parent
LAW = re.compile(r"(?<![A-Za-z0-9])([FAERSM][1-9]\d?)(?![A-Za-z0-9])")
TIERS = ("quick", "slow", "oracle", "soak")
LAWS = {
    "F1": "group statistics over trajectories",
    "F2": "trajectory, then turn, then token",
    "F3": "layout, micro-batches and devices change nothing",
    "F4": "equal rewards give no advantage",
    "F5": "what has no valid reward takes no part, and is counted",
    "F6": "chosen tokens alone carry loss",
    "F7": "ratio 1 on policy; one function scores",
    "F8": "no advantage, no gradient; scale and shift change nothing",
    "F9": "the released statistics under their own name",
    "F10": "shared prefixes are computed once, exactly",
    "A1": "the planner's view is an environment",
    "A2": "state is a value; effects are recorded",
    "A3": "nothing leaks between trajectories",
    "A4": "a malformed action is an observation",
    "A5": "tokens in, tokens out",
    "A6": "every token is accounted for",
    "A7": "an agent over HTTP is under the same laws",
    "E1": "one contract for every environment",
    "E2": "compiled and hosted rollouts agree",
    "E3": "an outcome depends on its own key",
    "R1": "rewards run beside the reference",
    "R2": "every check has a deadline",
    "R3": "a held-out second check",
    "S1": "a kill changes nothing",
    "S2": "a recorded order replays",
    "S3": "deadlines; a watchdog names what hangs",
    "S4": "nothing hangs, nothing is dropped silently",
    "M1": "logits equal transformers'",
    "M2": "the cache equals the full forward; rows and time don't leak",
    "M3": "write then read, the same bytes",
    "M4": "no array over rows, tokens and vocabulary",
    "M5": "GGUF gives the logits of its weights and the ids of its tokenizer",
}


class Check(NamedTuple):
    """A test that names a law."""

    law: str
    tier: str
    module: str  # as rollout/test_compiled
    name: str


def checks() -> list[Check]:
    """List every test that names a law, in the order of files."""
    checks = []
    for path in sorted(TESTS.rglob("test_*.py")):
        tree = ast.parse(path.read_text())
        module = path.relative_to(TESTS).with_suffix("").as_posix()
        usual = _tier([node.value for node in tree.body if _assigns_marks(node)], "quick")
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                text = f"{node.name.replace('_', ' ')} {ast.get_docstring(node) or ''}"
                tier = _tier(node.decorator_list, usual)
                checks += [Check(law, tier, module, node.name) for law in sorted(set(LAW.findall(text)))]
    return checks


def _assigns_marks(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"


def _tier(marks: list, usual: str) -> str:
    names = [ast.unparse(mark) for mark in marks]
    return next(
        (tier for tier in reversed(TIERS) if any(re.search(rf"\bmark\.{tier}\b", name) for name in names)), usual
    )


def table() -> str:
    """Return the laws as rows of Markdown: how many tests of which files guard each, by tier."""
    by_law = defaultdict(lambda: defaultdict(Counter))
    for check in checks():
        by_law[check.law][check.tier][check.module.removeprefix("test_").replace("/test_", "/")] += 1
    rows = ["| law | says | quick | slow, in CI | oracle, in CI |", "|---|---|---|---|---|"]
    for law, says in LAWS.items():
        cells = [", ".join(f"{name} {count}" for name, count in by_law[law][tier].items()) for tier in TIERS[:3]]
        rows.append(f"| {law} | {says} | {' | '.join(cells)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
