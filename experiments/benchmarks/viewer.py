"""Time to write a page of trajectories, and to open it in a browser.

    python -m experiments.benchmarks.viewer
    python -m experiments.benchmarks.viewer --trajectories=2000 --turns=4 --tokens=250 --repeats=5

Synthetic trajectories. Opening lasts from the start of the navigation until the list is filtered and the first
trajectory rendered, in a headless Chromium that already runs; then the medians of a key press that opens the next one,
and of a search. Needs the Debian packages `chromium` and `chromium-driver`, and selenium, which is in the extra [test].
Prints a table and one JSON line.

Two million tokens in 2,000 trajectories: 21 MB, open in 1.1 s on two busy cores.
"""

import shutil
import statistics
import tempfile
from pathlib import Path

from absl import flags

from ..cli import app
from ..cli.help import flag_heading

flag_heading("Sizes")
_COUNT = flags.DEFINE_integer("trajectories", 2000, "Number of trajectories.", lower_bound=2)
_TURNS = flags.DEFINE_integer("turns", 4, "Turns of each trajectory.", lower_bound=1)
_TOKENS = flags.DEFINE_integer("tokens", 250, "Tokens of a turn, of which one in five is chosen.", lower_bound=5)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Number of times that the page is opened.", lower_bound=1)

app.read_flags(__name__)

import numpy as np

from flowgrpo.report.tables import show_lines, significant, timed
from flowgrpo.report.trajectory_page import PageCall, PageTrajectory, PageTurn, write_viewer
from flowgrpo.types import BadInput

from .measuring import print_result

FLAGS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,800")
OPENED = "return performance.getEntriesByName('opened').map(mark => mark.startTime)[0]"
TIMED = "const t = performance.now(); {}; document.body.getBoundingClientRect(); return performance.now() - t;"
PRESS = TIMED.format("document.body.dispatchEvent(new KeyboardEvent('keydown', {key: 'j', bubbles: true}))")
SEARCH = TIMED.format(
    "const f = document.getElementById('search'); f.value = arguments[0]; "
    "f.dispatchEvent(new Event('input', {bubbles: true}))"
)


def _make_turn(rng: np.random.Generator, size: int, words: list[str]) -> PageTurn:
    """A turn with tokens of a realistic vocabulary, most of them context."""
    tokens = rng.integers(0, len(words), size)
    chosen = np.arange(size) >= size - size // 5
    return PageTurn(
        tokens=tokens,
        pieces=[words[token] for token in tokens],
        chosen=chosen,
        logp=np.where(chosen, -rng.exponential(1.0, size), 0.0),
        version=int(rng.integers(0, 9)),
        tool="search",
        calls=(PageCall("tool", "search", {"query": words[tokens[0]]}, " ".join(words[i] for i in tokens[:40])),),
        advantage=float(rng.normal()),
        ratio=np.exp(rng.normal(0.0, 0.1, size)),
    )


def _make_trajectories(count: int, turns: int, tokens: int) -> list[PageTrajectory]:
    """Trajectories of a run, half before and half after training."""
    rng = np.random.default_rng(0)
    words = [f" word{i}" for i in range(50_000)]
    return [
        PageTrajectory(
            task=f"task-{n % (count // 2)}",
            query=f"Question {n % (count // 2)}: what is {n} and {n + 1}?",
            turns=[_make_turn(rng, tokens, words) for _ in range(turns)],
            answers=(str(n),),
            domain="mathematics",
            phase="test before" if n < count // 2 else "test after",
            outcome=float(n % 3 == 0),
            correct=n % 3 == 0,
            output=str(n),
        )
        for n in range(count)
    ]


def _measure_browser(path: Path, repeats: int) -> dict[str, float]:
    """Median seconds until the page is usable, of showing the next trajectory, and of a search."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = _find_program("chromium")
    for flag in FLAGS:
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=Service(_find_program("chromedriver")))
    try:
        rows = []
        for repeat in range(repeats):
            driver.get("about:blank")
            driver.get(path.as_uri())
            open_seconds, next_seconds = driver.execute_script(OPENED) / 1e3, driver.execute_script(PRESS) / 1e3
            search_seconds = driver.execute_script(SEARCH, f"question {repeat + 1}") / 1e3
            rows.append({"open_s": open_seconds, "next_s": next_seconds, "search_s": search_seconds})
    finally:
        driver.quit()
    return {name: significant(statistics.median(row[name] for row in rows)) for name in rows[0]}


def _find_program(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise BadInput(f"{name} is not installed: apt-get install chromium chromium-driver")
    return path


def main() -> None:
    """Write the page, open it, print the table and one JSON line."""
    sizes = {"trajectories": _COUNT.value, "turns": _TURNS.value, "tokens": _TOKENS.value}
    trajectories = _make_trajectories(*sizes.values())
    with tempfile.TemporaryDirectory() as folder:
        seconds, path = timed(lambda: write_viewer(trajectories, Path(folder) / "page.html"))
        written = {"write_s": significant(seconds), "mb": significant(path.stat().st_size / 1e6)}
        row = sizes | written | _measure_browser(path, _REPEATS.value)
    show_lines([row])
    print_result("viewer", **row)


if __name__ == "__main__":
    app.run(main)
