"""Collapse: worked examples that warn, with their figure and their limit, and healthy runs that don't."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from flowgrpo.report.health import WORST, HealthLimits, all_warnings, diagnose, health_sink, health_summary
from flowgrpo.report.metrics import MetricsWriter, read_metrics
from flowgrpo.types import BadInput

HERE = Path(__file__).parent
HEALTHY = {"success": 0.5, "entropy": 0.3, "repeated_text": 0.05, "repeated_actions": 0.1}
HEALTHY |= {"ratio_p01": 0.9, "ratio_p99": 1.1, "clip_low_fraction": 0.02, "clip_high_fraction": 0.05}
HEALTHY |= {
    "zero_signal_groups": 0.3,
    "tool_errors": 0.03,
    "chosen_per_trajectory": 100.0,
    "gap": 0.05,
    "live_tokens": 1000.0,
}


def run(count=10, **changed):
    """So many updates of training, healthy but for figures that go evenly from the first to the second of a pair."""
    lines = []
    for i in range(count):
        now = {name: a + (b - a) * i / (count - 1) for name, (a, b) in changed.items()}
        lines.append({"phase": "train", "update": i + 1, **HEALTHY, **now})
    return lines


def names(lines, **limits):
    return [one.name for one in diagnose(lines, HealthLimits(**limits))]


def test_learning_run_has_no_warnings():
    """The quickstart on `lookup`: entropy falls to a twentieth and groups fall silent, since it succeeds."""
    assert all_warnings(read_metrics(HERE / "learns.jsonl")) == []
    assert names(run()) == []
    assert names([]) == []


def test_collapsing_run_is_warned():
    """A planner of the agent system that learned too fast, from few trajectories."""
    warnings = all_warnings(read_metrics(HERE / "collapses.jsonl"))
    summary = [(one["warning"], one["phase"], one["update"]) for one in warnings]
    assert summary == [("success", "validation", 10), ("zero_signal_groups", "train", 19)]
    assert warnings[0]["words"].startswith(
        "validation success fell from 0.13 to 0.02, by more than 0.1 and than chance"
    )


@pytest.mark.parametrize(
    ("field", "first", "last", "name", "figure"),
    [
        ("entropy", 0.005, 0.005, "entropy", 0.005),
        ("entropy", 0.36, 0.0, "entropy_falls", 0.08),
        ("task_information", 2.7, 0.0, "task_information", 0.6),
        ("repeated_text", 0.4, 0.4, "repeated_text", 0.4),
        ("repeated_actions", 0.7, 0.7, "repeated_actions", 0.7),
        ("ratio_p99", 2.5, 2.5, "ratio", 2.5),
        ("ratio_p01", 0.25, 0.25, "ratio", 4.0),
        ("clip_low_fraction", 0.4, 0.4, "clip_fraction", 0.45),
        ("zero_signal_groups", 0.9, 0.9, "zero_signal_groups", 0.9),
        ("chosen_per_trajectory", 60.0, 330.0, "chosen_per_trajectory", 270.0),
        ("chosen_per_trajectory", 360.0, 0.0, "chosen_per_trajectory", 80.0),
        ("gap", 0.0, 0.36, "gap", 0.2),
        ("sampler_kl", 0.03, 0.03, "sampler_kl", 0.03),
    ],
)
def test_each_check_reports_its_number(field, first, last, name, figure):
    (one,) = diagnose(run(**{field: (first, last)}))
    assert (one.name, one.figure) == (name, pytest.approx(figure))
    assert one.severity > 1
    assert "\n" not in one.words


@pytest.mark.parametrize(
    "changed",
    [
        {"entropy": (0.36, 0.0), "success": (0.3, 0.7)},  # it pays
        {"entropy": (0.005, 0.005), "success": (0.95, 0.95)},  # there is nothing left to explore for
        {"zero_signal_groups": (0.9, 0.9), "success": (0.95, 0.95)},
        {"chosen_per_trajectory": (60.0, 330.0), "success": (0.3, 0.7)},
        {"task_information": (2.7, 0.9), "success": (0.3, 0.7)},  # one way that is right for all
        {"task_information": (0.02, 0.0)},  # next to nothing from the start
        {"gap": (0.5, 0.5)},  # it was there from the start
        {"zero_signal_groups": (0.2, 0.8), "success": (0.3, 0.6), "count": 40},
        {"tool_errors": (0.0, 0.6), "success": (0.3, 0.6), "count": 40},
        {"success": (0.5, 0.42), "count": 40},
        {"sampler_kl": (0.001, 0.001)},
        {"sampler_kl": (0.03, 0.03), "correction": (0.9, 0.9)},
        {"ratio_p01": (0.0, 0.0), "ratio_p99": (0.0, 0.0), "entropy": (0.0, 0.0), "live_tokens": (0.0, 0.0)},
    ],
)
def test_healthy_lookalikes_have_no_warnings(changed):
    assert names(run(**changed)) == []


COLLAPSE = {"success": (0.16, 0.05), "tool_errors": (0.03, 0.94), "zero_signal_groups": (0.31, 0.75)}


def test_collapse_is_found_without_validations():
    """Success fell from 16 to 5 % while nearly all turns became errors; lines of `train_loop` have no phase."""
    lines = run(count=60, **COLLAPSE)
    first = {one["warning"]: one for one in reversed(all_warnings(lines))}  # the first of each
    assert {name: one["update"] for name, one in first.items()} == {
        "tool_errors_rise": 27,
        "zero_signal_groups_rise": 51,
        "training_success": 51,
    }
    assert first["tool_errors_rise"]["words"].startswith(
        "turns that end in an error rose from 10% to 36%, by more than"
    )
    assert first["training_success"]["words"].startswith(
        "training success fell from 0.15 to 0.08, by more than 0.08 and"
    )
    bare = [{name: value for name, value in line.items() if name != "phase"} for line in lines]
    assert names(bare) == names(lines) == ["zero_signal_groups_rise", "tool_errors_rise", "training_success"]
    steady = [validation(0, 0.5), *lines, validation(60, 0.5)]  # what validations say goes before training success
    assert names(steady) == ["zero_signal_groups_rise", "tool_errors_rise"]


@pytest.mark.parametrize(("queries", "rate"), [(4, 0.15), (16, 0.15), (16, 0.5)])
def test_chance_is_no_collapse(queries, rate):
    """Over 300 updates, of groups of 8 whose tasks differ in difficulty, the best and the last window differ."""
    rng = np.random.default_rng(0)
    won = rng.binomial(8, rng.beta(2 * rate, 2 - 2 * rate, (300, queries))) / 8
    lines = run(count=300)
    for line, won_g in zip(lines, won, strict=True):
        line |= {"success": won_g.mean(), "zero_signal_groups": ((won_g == 0) | (won_g == 1)).mean()}
    assert [one for one in all_warnings(lines) if one["warning"] != "zero_signal_groups"] == []


def test_no_warning_before_a_full_window():
    assert names(run(count=4, repeated_text=(1.0, 1.0))) == []
    assert names(run(count=4, repeated_text=(1.0, 1.0)), window=4) == ["repeated_text"]
    assert names(run(), repeated_text=0.01) == ["repeated_text"]
    with pytest.raises(BadInput, match="window=0 must be at least 1"):
        HealthLimits(window=0)


def validation(update, success, width=0.05, **more):
    bounds = {"success_low": success - width, "success_high": success + width}
    return {"phase": "validation", "update": update, "success": success, **bounds, **more}


def test_fall_of_validation_success_must_exceed_chance():
    assert names([validation(0, 0.6), validation(10, 0.4)]) == ["success"]
    assert names([validation(0, 0.6, 0.2), validation(10, 0.4, 0.2)]) == []
    assert names([validation(0, 0.6), validation(10, 0.4), validation(20, 0.7)]) == []


def test_gap_of_validations_has_priority():
    """R3: the training reward rises above what its held-out check says."""
    hacked = [validation(0, 0.5, gap=0.05), *run(), validation(10, 0.5, gap=0.25)]
    (one,) = diagnose(hacked)
    assert (one.name, round(one.figure, 6)) == ("gap", 0.2)
    assert "has grown from +0.05 to +0.25, by more than 0.1" in one.words
    assert names([validation(0, 0.5, gap=0.05), *run(gap=(0.0, 0.9)), validation(10, 0.5, gap=0.1)]) == []


def test_warning_is_repeated_when_twice_as_severe():
    assert [one["update"] for one in all_warnings(run(sampler_kl=(0.03, 0.05)))] == [1]  # no window is waited for
    warnings = all_warnings(run(count=200, repeated_text=(0.0, 1.0)))
    assert [(one["warning"], one["update"]) for one in warnings] == [("repeated_text", 63), ("repeated_text", 124)]
    assert [one["figure"] for one in warnings] == pytest.approx([0.30, 0.60], abs=0.01)
    gone = run(count=100, entropy=(0.0099, 0.0))
    severities = [one.severity for one in (diagnose(gone[:5])[0], diagnose(gone)[0])]
    assert severities == pytest.approx([0.01 / 0.0097, WORST], rel=1e-2)
    assert len([one for one in all_warnings(gone) if one["warning"] == "entropy"]) == 4


def test_resumed_run_writes_the_same_warnings(tmp_path):
    lines, logs, position = list(read_metrics(HERE / "collapses.jsonl")), [], None
    for folder, parts in (("whole", [lines]), ("parts", [lines[:13], lines[13:20], lines[13:]])):
        (tmp_path / folder).mkdir()
        for part in parts:
            logs.append([])
            with MetricsWriter(
                tmp_path / folder, position, sinks=[partial(health_sink, log=logs[-1].append)]
            ) as metrics:
                for line in part:
                    metrics.write(line)
                position = metrics.position if part is parts[0] and len(parts) > 1 else position
    whole, parts = ((tmp_path / name / "warnings.jsonl").read_text() for name in ("whole", "parts"))
    assert whole == parts
    assert [len(one) for one in logs] == [2, 0, 1, 2]
    assert logs[0] == logs[3]
    assert logs[0][0].startswith("warning: validation 10: validation success fell")
    assert health_summary([json.loads(line) for line in whole.splitlines()]) == (
        "2 warnings: success (from update 10 on), zero_signal_groups (from update 19 on); see warnings.jsonl"
    )
    assert health_summary([]) is None
