"""A whole run of the quickstart's recipe with fewer updates: imitation, rollouts, updates, evaluations."""

from pathlib import Path
from tempfile import TemporaryDirectory

from flowgrpo.recipes import pure
from flowgrpo.report.tables import timed

from .bench import Bench
from .figures import CheckLine, expect, measured, skipped

MIN_RISE = 0.2  # of the success rate, which 40 updates on a CPU exceed by far


def check_quickstart(bench: Bench) -> list[CheckLine]:
    """Run the recipe, and check that the success rate rises."""
    if bench.size == "small":
        return [skipped("a whole run", "The small size compiles few programs: python -m experiments.quickstart.")]
    config = pure.preset("lookup", updates=bench.sizes.updates, mesh="none")
    with TemporaryDirectory() as folder:
        duration, result = timed(lambda: pure.RECIPE.train(config, Path(folder) / "run", every=bench.sizes.updates))
    before, after = (float(result[f"success_{when}"]) for when in ("before", "after"))
    lines = [measured(f"run of {bench.sizes.updates} updates", duration, "s"), measured("success before", before)]
    lines.append(measured("success after", after))
    advice = "The same run learns on a CPU: something that only a whole run meets is wrong here; look at its curves."
    return [*lines, expect(f"success rose by {MIN_RISE}", after - before >= MIN_RISE, advice)]
