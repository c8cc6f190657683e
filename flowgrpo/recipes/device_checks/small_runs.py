"""A whole run of the quickstart's recipe with fewer updates: imitation, rollouts, updates, examinations."""

from pathlib import Path
from tempfile import TemporaryDirectory

from flowgrpo.recipes import pure
from flowgrpo.recipes.device_checks.bench import Bench
from flowgrpo.recipes.device_checks.figures import CheckLine, holds, skipped, tell
from flowgrpo.report.tables import timed

RISE = 0.2  # of success, which 40 updates on a CPU exceed by far


def check_quickstart(bench: Bench) -> list[CheckLine]:
    """Run it, and look at what came out."""
    if bench.size == "small":
        return [skipped("a whole run", "The small size compiles few programs: python -m experiments.quickstart.")]
    config = pure.preset("lookup", updates=bench.sizes.updates, mesh="none")
    with TemporaryDirectory() as folder:
        took, result = timed(lambda: pure.train(config, Path(folder) / "run", every=bench.sizes.updates))
    before, after = (float(result[f"success_{when}"]) for when in ("before", "after"))
    lines = [tell(f"run of {bench.sizes.updates} updates", took, "s"), tell("success before", before)]
    lines.append(tell("success after", after))
    advice = "The same run learns on a CPU: something that only a whole run meets is wrong here; look at its curves."
    return [*lines, holds(f"success rose by {RISE}", after - before >= RISE, advice)]
