"""The data of the viewer survives packing, whatever was recorded; the page is self-contained."""

import base64
import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from viewer_cases import HOSTILE, make_many, make_trajectory, make_turn

from flowgrpo.report.trajectory_page import as_script, page, page_columns, scales, write_viewer
from flowgrpo.types import BadInput


def unpacked(column, kind: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(column), kind)


@given(st.lists(st.booleans(), max_size=12).filter(lambda chosen: sum(chosen) > 1))
def test_tokens_of_a_turn_survive_packing(chosen):
    count, chosen_l = len(chosen), np.array(chosen)
    pieces, tokens = [f"{n % 3} " for n in range(count)], 100 + np.arange(count) % 3
    turn = make_turn("a", tokens=tokens, pieces=pieces, chosen=chosen_l, logp=-np.arange(count) / 8)
    data = page_columns([make_trajectory(turns=[turn])])
    (packed,) = data["details"][0]["turns"]
    indices = unpacked(packed["tokens"], "<u4")
    assert [data["vocabulary"]["ids"][n] for n in indices] == tokens.tolist()
    assert [data["vocabulary"]["pieces"][n] for n in indices] == pieces
    np.testing.assert_array_equal(np.repeat(np.arange(len(packed["chosen"])) % 2 == 1, packed["chosen"]), chosen_l)
    np.testing.assert_array_equal(unpacked(packed["logp"], "<f4"), (-np.arange(count) / 8)[chosen_l])
    assert (packed["version"], packed["advantage"], packed["ratio"]) == (3.0, None, None)


def test_fields_are_columns_over_one_table_of_strings():
    data = page_columns(make_many())
    strings, fields = data["strings"], data["fields"]
    assert len(strings) == len(set(strings))
    assert {len(column) for column in fields.values()} == {20}
    assert [strings[n] for n in fields["phase"]][4:8] == ["test before"] * 2 + ["test after"] * 2
    assert fields["outcome"][-1] is None
    assert fields["counts"][-3:] == [True, False, False]
    assert strings[fields["query"][-2]] == HOSTILE
    kind, name, arguments, answer, is_error, failure = data["details"][0]["turns"][0]["calls"][0]
    assert (strings[kind], strings[name], is_error, strings[failure]) == ("tool", "calculator", True, "")
    assert [[strings[a], strings[b]] for a, b in arguments] == [["expression", "2 +"]]
    assert strings[answer] == "it is not complete"


def test_scales_end_at_the_largest_values():
    expected = {"version": 4.0, "logp": 5.0, "advantage": 1.0, "ratio": np.log(1.25)}
    assert scales(make_many()) == pytest.approx(expected, rel=1e-5)
    assert scales([make_trajectory()])["advantage"] is scales([make_trajectory()])["ratio"] is None


def test_values_that_are_not_finite_are_null_or_bytes():
    turn = make_turn("a b", logp=np.array([0.0, 0.0, -np.inf, np.nan]), advantage=np.nan)
    data = page_columns([make_trajectory(turns=[turn], outcome=np.nan, seconds=np.inf, parts={"x": np.nan})])
    text = as_script(data)
    (packed,) = json.loads(text)["details"][0]["turns"]
    np.testing.assert_array_equal(unpacked(packed["logp"], "<f4"), [-np.inf, np.nan])
    assert data["fields"]["outcome"] == data["fields"]["seconds"] == [None]
    assert data["scales"]["advantage"] is None


@given(st.text() | st.just(HOSTILE) | st.just("<!--<script>") | st.just("\ud800"))
def test_no_text_ends_the_script_element(text):
    script = as_script({"x": text})
    assert "<" not in script
    assert script.isascii()
    assert json.loads(script) == {"x": text}


def test_page_is_self_contained_and_its_policy_forbids_loading(tmp_path):
    path = write_viewer(make_many(), tmp_path / "deep" / "page.html", title="a < b")
    html = path.read_text(encoding="utf-8")
    assert not re.search(r"https?://|<link|@import|url\(|innerHTML|eval\(", html)
    assert html.count("</script>") == 2
    assert "<title>a &lt; b</title>" in html
    assert "default-src 'none'" in html
    assert [each.name for each in path.parent.iterdir()] == ["page.html"]
    filled = page(
        {"x": "@@script@@ @@title@@", "title": "@@data@@"}
    )  # what looks like a place of the template is a text
    assert "<title>@@data@@</title>" in filled
    assert '{"x":"@@script@@ @@title@@",' in filled
    half = write_viewer(
        make_many(), tmp_path / "half.html", title="half a pair \ud800", note="\ud800"
    )  # which UTF-8 lacks
    assert "<title>half a pair ?</title>" in half.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("trajectories", "error"),
    [
        ([], "there is no trajectory to show"),
        ([make_trajectory(turns=[make_turn("a b", logp=np.zeros(3))])], "trajectory 0, turn 0: the lengths disagree"),
        (
            [make_trajectory(turns=[make_turn("a b", ratio=np.zeros(2))])],
            "tokens 4, chosen 4, logp 4, pieces 4, ratio 2",
        ),
    ],
)
def test_invalid_trajectories_are_refused(tmp_path, trajectories, error):
    with pytest.raises(BadInput, match=error):
        write_viewer(trajectories, tmp_path / "page.html")
    assert not list(tmp_path.iterdir())
