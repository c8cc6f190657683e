"""The page's data: what goes in comes out, whatever was recorded; and a page that needs nothing else."""

import base64
import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from viewer_cases import HOSTILE, make_many, make_shown, make_turn

from flowgrpo.report.trajectory_page import as_script, page, page_columns, scales, viewer
from flowgrpo.types import BadInput


def unpacked(column, kind: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(column), kind)


@given(st.lists(st.booleans(), max_size=12).filter(lambda chosen: sum(chosen) > 1))
def test_the_tokens_of_a_turn_come_back(chosen):
    count, chosen_l = len(chosen), np.array(chosen)
    pieces, tokens = [f"{n % 3} " for n in range(count)], 100 + np.arange(count) % 3
    turn = make_turn("a", tokens=tokens, pieces=pieces, chosen=chosen_l, logp=-np.arange(count) / 8)
    found = page_columns([make_shown(turns=[turn])])
    (own,) = found["details"][0]["turns"]
    numbers = unpacked(own["tokens"], "<u4")
    assert [found["vocabulary"]["ids"][n] for n in numbers] == tokens.tolist()
    assert [found["vocabulary"]["pieces"][n] for n in numbers] == pieces
    np.testing.assert_array_equal(np.repeat(np.arange(len(own["chosen"])) % 2 == 1, own["chosen"]), chosen_l)
    np.testing.assert_array_equal(unpacked(own["logp"], "<f4"), (-np.arange(count) / 8)[chosen_l])
    assert (own["version"], own["advantage"], own["ratio"]) == (3.0, None, None)


def test_fields_are_columns_over_one_table_of_strings():
    found = page_columns(make_many())
    strings, fields = found["strings"], found["fields"]
    assert len(strings) == len(set(strings))
    assert {len(column) for column in fields.values()} == {20}
    assert [strings[n] for n in fields["phase"]][4:8] == ["test before"] * 2 + ["test after"] * 2
    assert fields["reward"][-1] is None
    assert fields["counts"][-3:] == [True, False, False]
    assert strings[fields["query"][-2]] == HOSTILE
    kind, name, asked, answer, is_error, failure = found["details"][0]["turns"][0]["calls"][0]
    assert (strings[kind], strings[name], is_error, strings[failure]) == ("tool", "calculator", True, "")
    assert [[strings[a], strings[b]] for a, b in asked] == [["expression", "2 +"]]
    assert strings[answer] == "it is not complete"


def test_scales_end_where_the_figures_do():
    expected = {"version": 4.0, "logp": 5.0, "advantage": 1.0, "ratio": np.log(1.25)}
    assert scales(make_many()) == pytest.approx(expected, rel=1e-5)
    assert scales([make_shown()])["advantage"] is scales([make_shown()])["ratio"] is None


def test_what_is_not_finite_is_no_number_of_json():
    turn = make_turn("a b", logp=np.array([0.0, 0.0, -np.inf, np.nan]), advantage=np.nan)
    found = page_columns([make_shown(turns=[turn], reward=np.nan, seconds=np.inf, parts={"x": np.nan})])
    text = as_script(found)
    (own,) = json.loads(text)["details"][0]["turns"]
    np.testing.assert_array_equal(unpacked(own["logp"], "<f4"), [-np.inf, np.nan])
    assert found["fields"]["reward"] == found["fields"]["seconds"] == [None]
    assert found["scales"]["advantage"] is None


@given(st.text() | st.just(HOSTILE) | st.just("<!--<script>") | st.just("\ud800"))
def test_no_text_ends_the_script_that_holds_it(text):
    held = as_script({"x": text})
    assert "<" not in held
    assert held.isascii()
    assert json.loads(held) == {"x": text}


def test_the_page_needs_nothing_else_and_forbids_it(tmp_path):
    path = viewer(make_many(), tmp_path / "deep" / "page.html", title="a < b")
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
    half = viewer(make_many(), tmp_path / "half.html", title="half a pair \ud800", note="\ud800")  # which UTF-8 lacks
    assert "<title>half a pair ?</title>" in half.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        ([], "there is no trajectory to show"),
        ([make_shown(turns=[make_turn("a b", logp=np.zeros(3))])], "trajectory 0, turn 0: the lengths disagree"),
        ([make_shown(turns=[make_turn("a b", ratio=np.zeros(2))])], "tokens 4, chosen 4, logp 4, pieces 4, ratio 2"),
    ],
)
def test_what_cannot_be_shown_is_refused(tmp_path, shown, said):
    with pytest.raises(BadInput, match=said):
        viewer(shown, tmp_path / "page.html")
    assert not list(tmp_path.iterdir())
