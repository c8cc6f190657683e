"""The curves: drawn from what a run wrote, and every line told from the others."""

import pytest

from flowgrpo.report.figures import PICTURES, RunLines
from flowgrpo.report.metrics import MetricsWriter
from flowgrpo.report.plots import COLOURS, curve, draw_curves, line_style, make_figure, tool_mix_curves
from flowgrpo.types import BadInput


def write_run(folder, tools=("lookup", "add"), updates: int = 12) -> list[dict]:
    """A run that learns, with an evaluation every fourth update."""
    lines = [{"phase": "warmstart", "update": 1, "loss": 2.0}]
    for update in range(updates):
        rate, mix = update / 40, {tool: (i + update) / 60 for i, tool in enumerate(tools)}
        lines.append({"phase": "train", "update": update, "success": rate, "tools": mix})
        if update % 4 == 0:
            bounds = {"success_low": rate / 2, "success_high": rate + 0.1, "right_tool": 0.6}
            lines.append({"phase": "validation", "update": update, "success": rate, **bounds})
    with MetricsWriter(folder) as metrics:
        for line in lines:
            metrics.write(line)
    return lines


def size(png: bytes) -> tuple[int, int]:
    """Width and height, from the header of a PNG."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")


def test_curves_are_drawn_with_reproducible_bytes(tmp_path):
    write_run(tmp_path, tools=[f"tool {i}" for i in range(len(COLOURS) + 2)])  # more than there are colours
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"phase": "tra')  # a run that still goes on
    path = draw_curves(tmp_path)
    assert path == tmp_path / "curves.png"
    assert size(path.read_bytes()) == (1125, 1245)
    again = draw_curves(tmp_path, tmp_path / "other.png", title=tmp_path.name)
    assert again.read_bytes() == path.read_bytes()
    assert {file.name for file in tmp_path.iterdir()} == {"metrics.jsonl", "timings.jsonl", "curves.png", "other.png"}


def test_run_without_tools_has_no_tool_panel(tmp_path):
    lines = write_run(tmp_path, tools=(), updates=5)
    assert [axis.get_ylabel() for axis in make_figure(lines).axes] == [
        "success rate",
        "fraction of calls\nto the right tool",
    ]
    assert curve(lines, "validation", "success") == ([0, 4], [0.0, 0.1])
    lines = write_run(tmp_path, updates=5)
    assert tool_mix_curves(lines, "train")["add"] == ([0, 1, 2, 3, 4], [i / 60 for i in range(1, 6)])
    assert tool_mix_curves(lines, "validation") == {}


def test_ticks_are_integers_and_axes_end_at_the_data(tmp_path):
    success, right, tools = make_figure(write_run(tmp_path)).axes
    assert all(float(tick).is_integer() for tick in tools.get_xticks())
    assert [round(axis.get_ylim()[1] / 1.02, 3) for axis in (success, right, tools)] == [0.3, 0.6, 0.2]
    labels = [[line.get_label() for line in axis.get_lines()] for axis in (success, right, tools)]
    assert labels == [["train", "validation"], ["validation"], ["lookup", "add"]]
    assert [line.get_color() for line in success.get_lines()] == COLOURS[:2]  # as in every picture of a run


@pytest.mark.parametrize("other", ["linestyle", "marker"])
def test_thirty_two_line_styles_are_distinct(other):
    styles = [line_style(index) for index in range(32)]
    assert len({(style["color"], style[other]) for style in styles}) == 32
    assert [style["color"] for style in styles[: len(COLOURS)]] == COLOURS


def test_lines_and_areas_of_a_figure_differ(tmp_path):
    lines = write_run(tmp_path, tools=[f"tool {i}" for i in range(24)])
    drawn = make_figure(lines).axes[-1].get_lines()
    assert len({(line.get_color(), line.get_linestyle()) for line in drawn}) == 24
    assert len({(line.get_color(), line.get_marker()) for line in drawn}) == 24
    areas = PICTURES["tools"](RunLines(lines, [], "run")).axes[0].collections
    assert len({(tuple(area.get_facecolor()[0]), area.get_hatch()) for area in areas}) == 24


def test_missing_data_or_folder_is_refused(tmp_path):
    with pytest.raises(BadInput, match="can't be read"):
        draw_curves(tmp_path)
    write_run(tmp_path, updates=0)
    with pytest.raises(BadInput, match="has no line with a success rate yet: continue the run"):
        draw_curves(tmp_path)
    write_run(tmp_path)
    with pytest.raises(BadInput, match=r"curves.png could not be written \(No such file or directory\)"):
        draw_curves(tmp_path, tmp_path / "nowhere" / "curves.png")
