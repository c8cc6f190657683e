"""The checks of a device: a planted error fails the line that it should, and none keeps the others from being made."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowgrpo.models.attention import Sight, attend
from flowgrpo.recipes import pure
from flowgrpo.recipes.device_checks import attentions, figures, sampling, small_runs, speeds, suite, updates
from flowgrpo.recipes.device_checks.bench import EXACT, HALF, Bench, open_bench
from flowgrpo.recipes.device_checks.figures import ERROR, FAIL, PASS, SKIPPED, at_most, holds, tell
from flowgrpo.types import BadInput

BENCH = Bench(jax.devices()[0], jax.devices()[0], "small", "tiny")


def status_of(lines) -> dict[str, str]:
    return {line.name: line.status for line in lines}


def test_what_is_no_number_fails_and_is_told_as_a_word():
    line = at_most("error", float("nan"), 1.0, "Look.")
    assert (line.status, json.loads(json.dumps(figures.to_record(line)))["figure"]) == (FAIL, "nan")
    assert figures.to_record(at_most("error", 0.0, 1.0, "Look."))["figure"] == 0.0


def test_only_what_guards_correctness_costs_the_trust():
    slow, wrong = holds("fast", False, "Wait.", guards=False), holds("right", False, "Stop.")._replace(check="logits")
    assert not figures.failed([slow, tell("speed", 3.0)])
    assert figures.failed([slow, wrong])
    assert figures.summary([wrong]).endswith("of what guards correctness, logits failed.")
    assert "1 other figures" in figures.summary([slow])
    words = figures.verdict_words([slow, wrong])
    assert "logits, right: failed (no; yes). Stop." in words
    assert "FAIL" in figures.verdict_table([wrong])


def test_a_check_that_raises_is_a_line_and_the_others_are_made():
    def broken(_):
        raise RuntimeError("out of memory\nand a long trace")

    said, kept = [], []
    checks = {"rates": broken, "ratio": broken, "decode": lambda _: [tell("speed", 1.0)]}
    lines = suite.run_checks(BENCH, checks, seconds=60, said=said.append, kept=kept.append)
    bad = [line for line in lines if line.status == ERROR]
    assert [(line.check, line.guards) for line in bad] == [("rates", False), ("ratio", True)]
    assert bad[0].advice.startswith("out of memory. Run --checks=rates alone")
    assert [line.name for line in lines if line.check == "decode"] == ["speed", "seconds"]
    assert (len(said), len(kept)) == (6, 3)


def test_no_check_begins_after_the_time_is_over():
    lines = suite.run_checks(BENCH, {"ratio": sampling.check_ratio}, seconds=-1.0, said=lambda _: None)
    assert [(line.check, line.status) for line in lines] == [("ratio", SKIPPED)]


def test_bad_names_are_refused():
    for refused in (partial(suite.check_chosen, ["logit"]), partial(open_bench, "small", "qwen9")):
        with pytest.raises(BadInput):
            refused()
    with pytest.raises(BadInput, match="--size=huge is unknown; choose from small, full"):
        open_bench("huge", None)
    assert open_bench("full", None).model == "tiny"  # a CPU tells no memory


def test_without_a_host_what_needs_it_is_skipped_with_what_to_do():
    alone = BENCH._replace(host=None)
    for check in (sampling.check_logits, updates.check_update):
        (line,) = check(alone)
        assert (line.status, "JAX_PLATFORMS" in line.advice) == (SKIPPED, True)


def test_logits_of_another_model_fail(monkeypatch):
    right = sampling._logits

    def off(bench, params, tokens, form, device):
        moved = 1e-3 if form is HALF else 0.0
        return right(bench, params, tokens, EXACT, device) + np.float32(moved)

    monkeypatch.setattr(sampling, "_logits", off)
    lines = sampling.check_logits(BENCH)
    assert status_of(lines)["largest error, float32, highest"] == PASS
    assert lines[-1].figure == pytest.approx(1e-3, rel=0.1)


def leaky(q, k, v, sight, config):
    """See every key that is not later, whatever its segment: as a kernel that ignores segments."""
    one, place = jnp.ones_like(sight.q_segment), jnp.broadcast_to(jnp.arange(k.shape[2]), sight.q_segment.shape)
    return attend(q, k, v, Sight(place, place, one, one, sight.window), config)


@pytest.mark.slow
def test_M2_F6_an_attention_that_ignores_segments_fails_every_line(monkeypatch):
    cases = {"plain": attentions.AttentionCase(attend, EXACT), "leaky": attentions.AttentionCase(leaky, EXACT)}
    cases["broken"] = attentions.AttentionCase(lambda *_: 1 / 0, EXACT)
    monkeypatch.setattr(attentions, "attentions", lambda _: cases)
    found = status_of(attentions.check_packing(BENCH))
    assert {status for name, status in found.items() if name.startswith("plain")} == {PASS}
    assert {status for name, status in found.items() if name.startswith("leaky")} == {FAIL}
    assert found["broken attention"] == ERROR


def test_peaks_are_held_against_the_plan_and_skipped_where_they_can_not_be_told():
    class Analysis:
        output_size_in_bytes, alias_size_in_bytes, temp_size_in_bytes = 300, 100, 800

    before = {"bytes_in_use": 1000, "peak_bytes_in_use": 1500}
    told = {peak: speeds._hold_peak("x", before, {"peak_bytes_in_use": peak}, Analysis) for peak in (1500, 2000, 4000)}
    assert [told[peak].status for peak in told] == [SKIPPED, PASS, FAIL]
    assert told[2000].figure == 1.0
    assert speeds._hold_peak("x", {}, {}, Analysis).status == SKIPPED


def test_differences_are_over_the_largest_number_of_an_array():
    assert updates.largest_difference({"a": np.array([1.0, 11.0])}, {"a": np.array([1.0, 10.0])}) == pytest.approx(0.1)
    assert np.isnan(updates.largest_difference([np.array([np.nan])], [np.array([1.0])]))


def test_a_run_whose_success_does_not_rise_fails(monkeypatch):
    for after, status in ((0.9, PASS), (0.2, FAIL)):
        played = {"success_before": 0.15, "success_after": after}
        monkeypatch.setattr(pure, "train", lambda *_, played=played, **__: played)
        assert small_runs.check_quickstart(BENCH._replace(size="full"))[-1].status == status
    assert small_runs.check_quickstart(BENCH)[0].status == SKIPPED
