"""What a run shows in a Jupyter kernel, by a display that records what it is given."""

import base64
import sys
from types import ModuleType, SimpleNamespace

import pytest

from flowgrpo.report.notebook import SECONDS, LiveBar, kernel_display, show_picture
from flowgrpo.report.progress import Progress


class Display:
    """As IPython's `display`: called for a new place in the output, whose handle updates it."""

    def __init__(self):
        self.places: list[list[dict[str, str]]] = []

    def __call__(self, bundle, *, raw, display_id=False):
        assert raw
        place = [bundle]
        self.places.append(place)
        return SimpleNamespace(update=lambda bundle, raw: place.append(bundle if raw else None)) if display_id else None


@pytest.fixture
def display(monkeypatch):
    """The display of a kernel in which this process seems to run."""
    shown, ipython, module = Display(), ModuleType("IPython"), ModuleType("IPython.display")
    vars(ipython)["get_ipython"], vars(module)["display"] = lambda: SimpleNamespace(kernel=object()), shown
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return shown


def test_a_run_has_one_bar_and_lines_that_stay(display, capsys):
    times = [0.0]
    progress = Progress(4, clock=lambda: times[0])
    for update in range(5):
        progress.show("train", update, {"success": 0.2 * update})
        progress.step("rollout", 1, 2)
        times[0] += SECONDS
        progress.step("rollout", 2, 2)
    progress.log("saved <here>")
    progress.end()
    (place,) = display.places
    assert place[0]["text/plain"] == "train 0/4  success 0.00"
    assert place[0]["text/html"].startswith('<progress value="0" max="4"')
    assert place[-1]["text/plain"] == "rollout 2/2  0:00 left  |  train 4/4  0:00 left  success 0.80"
    assert 'value="4" max="4"' in place[-1]["text/html"]
    assert capsys.readouterr() == ("saved <here>\n", "")


def test_a_bar_is_drawn_at_intervals_and_where_it_ends(display):
    times = [0.0]
    bar = LiveBar(display, clock=lambda: times[0])
    for done in range(10):
        bar.draw(done, 100, f"<{done}>")
    assert [bundle["text/plain"] for bundle in display.places[0]] == ["<0>"]
    bar.flush()
    bar.draw(100, 100, "end")
    assert [bundle["text/plain"] for bundle in display.places[0]] == ["<0>", "<9>", "end"]
    assert "<code>&lt;9&gt;</code>" in display.places[0][1]["text/html"]


def test_pictures_are_shown_in_a_kernel_alone(display, tmp_path, monkeypatch):
    (tmp_path / "curves.png").write_bytes(b"picture")
    show_picture(tmp_path / "curves.png")
    assert base64.b64decode(display.places[0][0]["image/png"]) == b"picture"
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: SimpleNamespace())  # IPython in a terminal
    assert kernel_display() is None
    show_picture(tmp_path / "gone.png")
