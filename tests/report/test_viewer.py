"""The page's data: what goes in comes out, whatever was recorded; and a page that needs nothing else."""

import base64
import json
import re
from importlib.resources import files

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shown_cases import HOSTILE, make_many, make_shown, make_turn

from flowgrpo.report.shown import columns, scales
from flowgrpo.report.viewer import SCRIPTS, STYLES, as_script, page, viewer
from flowgrpo.types import BadInput


def unpacked(column, kind: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(column), kind)


def test_the_tokens_of_a_turn_come_back():
    turn = make_turn("a b c", said="x y")
    found = columns([make_shown(turns=[turn])])
    (own,) = found["details"][0]["turns"]
    numbers = unpacked(own["tokens"], "<u4")
    assert [found["vocabulary"]["ids"][n] for n in numbers] == turn.tokens.tolist()
    assert [found["vocabulary"]["pieces"][n] for n in numbers] == list(turn.pieces)
    assert own["chosen"] == [2, 3]
    np.testing.assert_array_equal(unpacked(own["logp"], "<f4"), [0.0, -1.0, -2.0])
    assert own["version"] == 3.0
    assert own["advantage"] is own["ratio"] is None


@given(st.lists(st.booleans(), min_size=1, max_size=12))
def test_runs_of_context_and_action_come_back(chosen):
    chosen_l = np.array(chosen)
    turn = make_turn("a", said=" ".join("x" * len(chosen)))
    pieces, zeros = turn.pieces[: len(chosen)], np.zeros(len(chosen))
    turn = make_turn("a", tokens=zeros, pieces=pieces, chosen=chosen_l, logp=zeros)
    runs = columns([make_shown(turns=[turn])])["details"][0]["turns"][0]["chosen"]
    np.testing.assert_array_equal(np.repeat(np.arange(len(runs)) % 2 == 1, runs), chosen_l)


def test_fields_are_columns_over_one_table_of_strings():
    found = columns(make_many())
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
    found = scales(make_many())
    assert found["version"] == 4.0
    assert found["logp"] == 5.0
    assert found["advantage"] == pytest.approx(1.0)
    assert found["ratio"] == pytest.approx(np.log(1.25), rel=1e-5)
    assert scales([make_shown()])["advantage"] is scales([make_shown()])["ratio"] is None


def test_what_is_not_finite_is_no_number_of_json():
    turn = make_turn("a b", logp=np.array([0.0, 0.0, -np.inf, np.nan]), advantage=np.nan)
    found = columns([make_shown(turns=[turn], reward=np.nan, seconds=np.inf, parts={"x": np.nan})])
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


def test_parts_of_the_page_are_put_in_once():
    """A text that looks like a place of the template stays a text."""
    html = page({"x": "@@script@@ @@title@@"}, "@@data@@")
    assert "<title>@@data@@</title>" in html
    assert '{"x":"@@script@@ @@title@@"}' in html


def test_the_parts_of_the_page_are_in_the_package():
    folder = files("flowgrpo.report") / "page"
    assert all((folder / name).is_file() for name in (*STYLES, *SCRIPTS, "page.html"))


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


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="file can't be made"):
        viewer([make_shown()], tmp_path / "file" / "page.html")
