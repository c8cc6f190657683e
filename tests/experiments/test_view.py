"""A recorded run as the page of `view` shows it: phases, advantages, texts, and messages about what is missing."""

import json

import numpy as np
import pytest

import flowgrpo as fg
from flowgrpo.publish.pages import read_trajectories, token_decoder_of, write_page
from flowgrpo.recipes import agent_config, pure
from flowgrpo.recipes.planner_reader import TEXT
from flowgrpo.rollout.records import RecordedTrajectory, make_turn
from flowgrpo.training.language_model import write_advantages, write_trajectories
from flowgrpo.types import Status

ENV = {"env": "lookup", "seed": 3, "algorithm": "flow_grpo"}


def played(group: int = 0, sample: int = 0, turns: int = 2, **ended) -> RecordedTrajectory:
    sequence = [make_turn([19, 11], [7, 11, 1], [-0.5, -0.25, 0.0], 0, None, 0)] * turns
    return RecordedTrajectory(
        task=fg.Task(f"t{group}", "dee boss ?", ("hal",), "lookup"),
        key=(),
        group=group,
        sample=sample,
        turns=sequence,
        tools=("archive",) * turns,
        errors=(False,) * turns,
        effect_counts=(0,) * (turns + 1),
        output="hal",
        seconds=0.5,
        **{"outcome": 1.0} | ended,
    )


@pytest.fixture
def run(tmp_path):
    """A run of two updates, the second without advantages."""
    (tmp_path / "run.json").write_text(
        json.dumps({"recipe": "pure", "settings": pure.preset("lookup").to_json(), "machine": {}})
    )
    folder = tmp_path / "trajectories"
    lost = played(0, 1, turns=1, outcome=None, status=Status.TOOL_FAILURE)
    for name in ("test-after", "000002", "test-before"):
        write_trajectories(folder / f"{name}.jsonl", [played()])
    write_trajectories(folder / "000001.jsonl", [played(), lost])
    adv_nt = np.array([[0.5, 0.5, 0.0], [0.0, 0.0, 0.0]])
    write_advantages(folder / "000001.advantages.jsonl", [played(), lost], adv_nt)
    return tmp_path


def test_evaluations_come_first_and_advantages_match_group_and_sample(run):
    """A trajectory that takes no part has no advantage."""
    assert [(one.phase, one.update, one.advantages) for one in read_trajectories(run)] == [
        ("test before", None, None),
        ("test after", None, None),
        ("train", 1, [0.5, 0.5]),
        ("train", 1, None),
        ("train", 2, None),
    ]


def test_advantages_by_token_end_with_the_turn(tmp_path):
    path = tmp_path / "000001.advantages.jsonl"
    adv_ntl = np.arange(16, dtype=np.float32).reshape(1, 2, 8)
    write_advantages(path, [played()], adv_ntl)
    assert json.loads(path.read_text()) == {"group": 0, "sample": 0, "advantage": adv_ntl[0, :, :5].tolist()}


def test_a_line_that_is_being_written_is_left_out(run):
    with (run / "trajectories" / "000002.jsonl").open("a") as file:
        file.write('{"task": {"Ta')
    assert len(read_trajectories(run)) == 5


def test_a_runs_page_has_its_tokens_and_names_what_is_missing(run):
    assert write_page(run, run / "page.html") == 5
    html = (run / "page.html").read_text(encoding="utf-8")
    assert '"dee "' in html
    assert "give --ratios=best" in html


def test_missing_records_are_refused(run, tmp_path):
    out = tmp_path / "page.html"
    with pytest.raises(fg.BadInput, match=r"holds no run: run\.json is missing; give the folder of one"):
        write_page(tmp_path / "nowhere", out)
    with pytest.raises(fg.BadInput, match="has no checkpoint yet: continue the run"):
        write_page(run, out, ratios="best")
    (run / "trajectories" / "000001.advantages.jsonl").write_text("[1]\n")
    with pytest.raises(fg.BadInput, match=r"000001\.advantages\.jsonl holds no advantages"):
        write_page(run, out)
    for path in (run / "trajectories").iterdir():
        path.unlink()
    with pytest.raises(fg.BadInput, match=r"holds no trajectories: .*continue the run"):
        write_page(run, out)


def test_a_tokenizer_that_is_gone_can_be_named(tmp_path):
    with pytest.raises(fg.BadInput, match=r"there is no model folder .*; or name the run's tokenizer by --tokenizer"):
        token_decoder_of(TEXT, agent_config.preset(str(tmp_path / "gone")), tmp_path, None)
