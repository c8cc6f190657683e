"""Pictures: drawn from what there are figures for, to the same bytes again, and what is left out has a reason."""

from pathlib import Path

import numpy as np
import pytest

from flowgrpo.report.figures import PICTURES, draw_plots, stage_parts, stage_spans, turn_mix
from flowgrpo.report.metrics import ADVANTAGE, RATIO, MetricsWriter
from flowgrpo.types import BadInput


def write_run(folder: Path, updates: int, *, ratio_bins: int = 6, stages: bool = True) -> None:
    """A run with every figure that can be drawn."""
    rng = np.random.default_rng(0)
    with MetricsWriter(folder) as metrics:
        for update in range(1, updates + 1):
            rate, ratio, advantage = update / updates, np.zeros(32, int), np.zeros(33, int)
            ratio[16 - ratio_bins // 2 : 16 + ratio_bins // 2] = rng.integers(1, 99, ratio_bins)
            advantage[10:25] = rng.integers(0, 99, 15)
            line = {"phase": "train", "update": update, RATIO: ratio, ADVANTAGE: advantage, "kl_old": 1e-13}
            line |= dict.fromkeys(("success", "outcome", "second_check", "kl", "clip_low_fraction"), rate)
            line |= dict.fromkeys(("entropy", "tool_errors", "clip_high_fraction"), 1 - rate)
            line |= {"turns": 3 + rate, "chosen_per_trajectory": 40.0 * rate, "live_tokens": 100 * (update != 3)}
            line |= {"live_tokens_by_turn": [60, 30, 10, 0], "tools": {"calculator": rate, "search": 1 - rate}}
            spent = {"rollout_seconds": 1.0, "rewards_seconds": 0.5, "inference_seconds": 0.25, "train_seconds": 0.75}
            timed = {"seconds": 3.0 if update > 1 else 30.0, "tokens_per_second": 1000.0 * rate}
            metrics.write(line, timed | (spent if stages else {}))
            if update % 5 == 0:
                metrics.write(
                    {"phase": "validation", "update": update, "success": rate, "turns": 3.0, "tool_errors": 0.1}
                    | {"success_low": rate / 2, "success_high": 1.0, "tools": {"calculator": 0.5, "search": 0.5}}
                )


@pytest.mark.slow
def test_all_plots_are_drawn_with_reproducible_bytes(tmp_path):
    write_run(tmp_path, 20)
    written, left_out = draw_plots(tmp_path, formats=("png", "svg"))
    assert (len(written), left_out) == (2 * len(PICTURES), {})
    drawn = {path.name: path.read_bytes() for path in written}
    for path in draw_plots(tmp_path, tmp_path / "again", formats=("svg",))[0]:
        assert path.read_bytes() == drawn[path.name]
    assert b"update" in drawn["policy.svg"]  # letters stay letters
    assert b"<dc:date>" not in drawn["policy.svg"]
    assert all(drawn[f"{name}.png"].startswith(b"\x89PNG") for name in PICTURES)


def test_plots_without_data_are_left_out_with_reason(tmp_path):
    write_run(tmp_path, 6, ratio_bins=2, stages=False)
    written, left_out = draw_plots(tmp_path)
    assert {path.stem for path in written} == set(PICTURES) - {"ratios", "stages"}
    assert left_out["ratios"].startswith("every ratio was 1")
    assert left_out["stages"].startswith("timings.jsonl has no stages")
    with MetricsWriter(tmp_path) as metrics:
        metrics.write({"phase": "warm start", "update": 1, "loss": 2.0})
    (tmp_path / "timings.jsonl").unlink()
    written, left_out = draw_plots(tmp_path)
    assert (written, list(left_out)) == ([], list(PICTURES))


def test_invalid_format_or_folder_is_one_sentence(tmp_path):
    with pytest.raises(BadInput, match="--format=gif is unknown; choose from png, svg"):
        draw_plots(tmp_path, formats=["gif"])
    with pytest.raises(BadInput, match=r"metrics.jsonl can't be read"):
        draw_plots(tmp_path)
    write_run(tmp_path, 2)
    with pytest.raises(BadInput, match="choose another --out"):
        draw_plots(tmp_path, tmp_path / "metrics.jsonl")


def test_turn_mix_is_the_fraction_of_tokens_by_turn():
    rows = [{"phase": "train", "update": u, "live_tokens_by_turn": [u, 1, 0]} for u in (1, 3)]
    rows.append({"phase": "train", "update": 5, "live_tokens": 0, "live_tokens_by_turn": [0, 0, 0]})
    assert turn_mix(rows) == {"turn 1": ([1, 3], [0.5, 0.75]), "turn 2": ([1, 3], [0.5, 0.25])}


def test_rewards_overlap_inference_in_stage_times():
    line = {"rollout_seconds": 2.0, "rewards_seconds": 1.5, "inference_seconds": 1.0, "train_seconds": 3.0}
    line["seconds"] = 7.0
    parts = stage_parts(line)
    assert (parts["rewards"], parts["other"], sum(parts.values())) == (0.5, 0.5, 7.0)
    assert stage_spans(line).items() >= {"rewards": (2.0, 1.5), "inference": (2.0, 1.0), "train": (3.5, 3.0)}.items()
