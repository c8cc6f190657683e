"""The curves: drawn from what a run wrote, and every line told from the others."""

import pytest

from flowgrpo.report.metrics import Metrics
from flowgrpo.report.plots import COLOURS, curve, curves, tool_mix
from flowgrpo.types import BadInput


def write_run(folder, tools=("lookup", "add"), updates: int = 12) -> list[dict]:
    """A run that learns, with an evaluation every fourth update."""
    lines = [{"phase": "warmstart", "update": 1, "loss": 2.0}]
    for update in range(updates):
        rate, mix = update / 20, {tool: (i + update) / 30 for i, tool in enumerate(tools)}
        lines.append({"phase": "train", "update": update, "success": rate, "tools": mix})
        if update % 4 == 0:
            bounds = {"success_low": rate / 2, "success_high": 0.9}
            lines.append({"phase": "validation", "update": update, "success": rate, **bounds})
    with Metrics(folder) as metrics:
        for line in lines:
            metrics.write(line)
    return lines


def size(png: bytes) -> tuple[int, int]:
    """Width and height, from the header of a PNG."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")


def test_curves_are_drawn_beside_the_metrics_and_again_to_the_same_bytes(tmp_path):
    write_run(tmp_path, tools=[f"tool {i}" for i in range(len(COLOURS) + 2)])  # more than there are colours
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"phase": "tra')  # a run that still goes on
    path = curves(tmp_path)
    assert path == tmp_path / "curves.png"
    assert size(path.read_bytes()) == (1125, 1020)
    again = curves(tmp_path, tmp_path / "other.png", title=tmp_path.name)
    assert again.read_bytes() == path.read_bytes()
    assert {file.name for file in tmp_path.iterdir()} == {"metrics.jsonl", "timings.jsonl", "curves.png", "other.png"}


def test_a_run_without_tools_has_one_panel_and_points_are_those_of_the_phase(tmp_path):
    lines = write_run(tmp_path, tools=(), updates=5)
    assert size(curves(tmp_path).read_bytes()) == (1125, 540)
    assert curve(lines, "validation", "success") == ([0, 4], [0.0, 0.2])
    lines = write_run(tmp_path, updates=5)
    assert tool_mix(lines, "train")["add"] == ([0, 1, 2, 3, 4], [i / 30 for i in range(1, 6)])
    assert tool_mix(lines, "validation") == {}


def test_nothing_to_draw_and_no_place_to_draw_it_are_said(tmp_path):
    with pytest.raises(BadInput, match="can't be read"):
        curves(tmp_path)
    write_run(tmp_path, updates=0)
    with pytest.raises(BadInput, match="has no line with a success rate yet: let the run go on"):
        curves(tmp_path)
    write_run(tmp_path)
    with pytest.raises(BadInput, match=r"curves.png could not be written \(No such file or directory\)"):
        curves(tmp_path, tmp_path / "nowhere" / "curves.png")
