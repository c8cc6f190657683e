"""Checks of a device: a planted error fails the right line, and an exception in one check doesn't stop the others."""

import json
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.device_checks import attentions, figures, sampling, small_runs, speeds, suite, updates
from experiments.device_checks.bench import EXACT, HALF, Bench, make_bench
from experiments.device_checks.figures import ERROR, FAIL, PASS, SKIPPED, at_most, expect, measured
from flowgrpo.models.attention import MaskSpec, attend
from flowgrpo.recipes import pure
from flowgrpo.types import BadInput

BENCH = Bench(jax.devices()[0], jax.devices()[0], "small", "tiny")


def status_of(lines) -> dict[str, str]:
    return {line.name: line.status for line in lines}


def test_NaN_fails_and_is_a_string_in_JSON():
    line = at_most("error", float("nan"), 1.0, "Look.")
    assert (line.status, json.loads(json.dumps(figures.to_record(line)))["figure"]) == (FAIL, "nan")
    assert figures.to_record(at_most("error", 0.0, 1.0, "Look."))["figure"] == 0.0


def test_only_lines_that_guard_correctness_cost_the_trust():
    slow, wrong = expect("fast", False, "Wait.", guards=False), expect("right", False, "Stop.")._replace(check="logits")
    assert not figures.failed([slow, measured("speed", 3.0)])
    assert figures.failed([slow, wrong])
    assert figures.summary([wrong]).endswith("of what guards correctness, logits failed.")
    assert "1 other figures" in figures.summary([slow])
    words = figures.verdict_lines([slow, wrong])
    assert "logits, right: failed (no; yes). Stop." in words
    assert "FAIL" in figures.verdict_table([wrong])


def test_a_check_that_raises_is_a_line_and_the_others_are_run():
    def broken(_):
        raise RuntimeError("out of memory\nand a long trace")

    progress, reports = [], []
    checks = {"rates": broken, "ratio": broken, "decode": lambda _: [measured("speed", 1.0)]}
    lines = suite.run_checks(BENCH, checks, seconds=60, on_line=progress.append, on_lines=reports.append)
    bad = [line for line in lines if line.status == ERROR]
    assert [(line.check, line.guards) for line in bad] == [("rates", False), ("ratio", True)]
    assert bad[0].advice.startswith("out of memory. Run --checks=rates alone")
    assert [line.name for line in lines if line.check == "decode"] == ["speed", "seconds"]
    assert (len(progress), len(reports)) == (6, 3)


def test_no_check_starts_after_the_deadline():
    lines = suite.run_checks(BENCH, {"ratio": sampling.check_ratio}, seconds=-1.0, on_line=lambda _: None)
    assert [(line.check, line.status) for line in lines] == [("ratio", SKIPPED)]


def test_bad_names_are_refused():
    for refused in (partial(suite.check_chosen, ["logit"]), partial(make_bench, "small", "qwen9")):
        with pytest.raises(BadInput):
            refused()
    with pytest.raises(BadInput, match="--size=huge is unknown; choose from small, full"):
        make_bench("huge", None)
    assert make_bench("full", None).model == "tiny"  # a CPU reports no memory


def test_without_a_host_checks_that_need_it_are_skipped_with_advice():
    alone = BENCH._replace(host=None)
    for check in (sampling.check_logits, updates.check_update):
        (line,) = check(alone)
        assert (line.status, "JAX_PLATFORMS" in line.advice) == (SKIPPED, True)


def test_logits_of_another_model_fail(monkeypatch):
    correct_logits = sampling._logits

    def wrong_logits(bench, params, tokens, form, device):
        error = 1e-3 if form is HALF else 0.0
        return correct_logits(bench, params, tokens, EXACT, device) + np.float32(error)

    monkeypatch.setattr(sampling, "_logits", wrong_logits)
    lines = sampling.check_logits(BENCH)
    assert status_of(lines)["largest error, float32, highest"] == PASS
    assert lines[-1].figure == pytest.approx(1e-3, rel=0.1)


def leaky(q, k, v, mask, config):
    """An attention that sees every earlier key of any segment, like a kernel that ignores segments."""
    segment, position = jnp.ones_like(mask.q_segment), jnp.broadcast_to(jnp.arange(k.shape[2]), mask.q_segment.shape)
    return attend(q, k, v, MaskSpec(position, position, segment, segment, mask.window), config)


@pytest.mark.slow
def test_M2_F6_an_attention_that_ignores_segments_fails_every_line(monkeypatch):
    cases = {"plain": attentions.AttentionCase(attend, EXACT), "leaky": attentions.AttentionCase(leaky, EXACT)}
    cases["broken"] = attentions.AttentionCase(lambda *_: 1 / 0, EXACT)
    monkeypatch.setattr(attentions, "attentions", lambda _: cases)
    statuses = status_of(attentions.check_packing(BENCH))
    assert {status for name, status in statuses.items() if name.startswith("plain")} == {PASS}
    assert {status for name, status in statuses.items() if name.startswith("leaky")} == {FAIL}
    assert statuses["broken attention"] == ERROR


def test_peaks_are_compared_with_the_plan_and_skipped_if_unknown():
    class Analysis:
        output_size_in_bytes, alias_size_in_bytes, temp_size_in_bytes = 300, 100, 800

    before = {"bytes_in_use": 1000, "peak_bytes_in_use": 1500}
    lines = {
        peak: speeds._check_peak("x", before, {"peak_bytes_in_use": peak}, Analysis) for peak in (1500, 2000, 4000)
    }
    assert [lines[peak].status for peak in lines] == [SKIPPED, PASS, FAIL]
    assert lines[2000].figure == 1.0
    assert speeds._check_peak("x", {}, {}, Analysis).status == SKIPPED


def test_differences_are_over_the_largest_number_of_an_array():
    assert updates.largest_difference({"a": np.array([1.0, 11.0])}, {"a": np.array([1.0, 10.0])}) == pytest.approx(0.1)
    assert np.isnan(updates.largest_difference([np.array([np.nan])], [np.array([1.0])]))


def test_a_run_whose_success_does_not_rise_fails(monkeypatch):
    for after, status in ((0.9, PASS), (0.2, FAIL)):
        result = {"success_before": 0.15, "success_after": after}
        recipe = SimpleNamespace(train=lambda *_, result=result, **__: result)
        monkeypatch.setattr(pure, "RECIPE", recipe)
        assert small_runs.check_quickstart(BENCH._replace(size="full"))[-1].status == status
    assert small_runs.check_quickstart(BENCH)[0].status == SKIPPED
