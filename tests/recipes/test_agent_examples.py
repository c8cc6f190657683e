"""Worked examples of a run: none that it is measured by, none that leaves no room, the same from its beginning on."""

import json

import pytest
from tiny_planner import EXAMPLE, SIZES, planner_folder, settings, write_tasks

from flowgrpo.recipes import agent, cluster, cluster_config
from flowgrpo.recipes.agent_config import preset
from flowgrpo.training.run_dir import delete_run
from flowgrpo.training.run_files import EXAMPLES, RUN
from flowgrpo.types import BadInput

TALK = [
    {"role": "user", "content": EXAMPLE["query"]},
    {"role": "assistant", "content": "calculator(2 + 3)"},
    {"role": "user", "content": "5"},
    {"role": "assistant", "content": "answer(5)"},
]


def never():
    pytest.fail("an earlier run would have been removed")


def refusal(config, folder) -> str:
    """Why these settings open nothing, and nothing is removed or written."""
    with pytest.raises(BadInput) as refused, agent.build(config, folder, on_ready=never):
        pytest.fail("it was opened")
    assert not folder.exists()
    return str(refused.value)


def open_once(config, folder) -> dict:
    """What is saved of the examples once a run was opened."""
    with agent.build(config, folder):
        return json.loads((folder / EXAMPLES).read_text())


def as_record(task) -> dict:
    return {"id": "mine", "query": task.query, "answers": [*task.answers], **task.metadata}


@pytest.mark.parametrize("split", ["validation", "test"])
def test_an_example_that_the_run_is_measured_by_is_refused(tmp_path, split):
    config = settings(tmp_path)
    (_, known) = agent.task_source_of(config).draw(split, 0, 2)
    (later,) = agent.task_source_of(config).draw(split, 2, 1)
    write_tasks(tmp_path / "known.jsonl", EXAMPLE, as_record(known))
    said = refusal(config.replace(examples=str(tmp_path / "known.jsonl")), tmp_path / "run")
    assert f"the example 'mine' is a task of the {split} ('{known.query[:60]}" in said
    assert said.endswith("take one that the run is not measured by")
    write_tasks(tmp_path / "later.jsonl", as_record(later))
    assert open_once(config.replace(examples=str(tmp_path / "later.jsonl")), tmp_path / "run")["messages"]


@pytest.mark.parametrize("name", ["word_problems", "two_hop", "reverse_text", "alphabet_sort"])
def test_the_examples_that_come_with_tasks_are_none_of_them(name):
    config = preset("x", tasks=name, warm_start="none")
    assert agent.example_tasks(config, agent.task_source_of(config))


def test_a_file_that_is_missing_or_bad_removes_no_earlier_run(tmp_path):
    config = settings(tmp_path, examples=str(tmp_path / "none.jsonl"))
    assert "none.jsonl is no file; give the path of a task file" in refusal(config, tmp_path / "run")
    (tmp_path / "none.jsonl").write_text("{}\n")
    assert "none.jsonl, line 1: field 'query' is missing" in refusal(config, tmp_path / "run")


def test_a_cluster_removes_no_earlier_run_either(tmp_path):
    given = {"tasks": "word_problems", "examples": str(tmp_path / "none.jsonl"), **SIZES}
    config = cluster_config.preset(str(planner_folder()), **given)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / RUN).write_text("{}")
    with pytest.raises(BadInput, match=r"none\.jsonl is no file"):
        cluster.RECIPE.train(config, tmp_path / "run", resume=False)
    assert (tmp_path / "run" / RUN).read_text() == "{}"


def test_examples_without_room_for_an_action_are_refused(tmp_path):
    config = settings(tmp_path, context_tokens=64, max_tokens=16)
    with pytest.raises(BadInput) as refused, agent.build(config, tmp_path / "run"):
        pytest.fail("it was opened")
    said = str(refused.value)
    assert said.startswith(f"--examples={config.agent.examples} take ")
    assert "--context_tokens=64 leaves 48 before an action of --max_tokens=16: raise it, or give fewer examples" in said
    assert int(said.partition(" take ")[2].partition(" ")[0]) >= 48
    assert not (tmp_path / "run" / EXAMPLES).exists()


def test_examples_are_stored_at_the_start_of_a_run(tmp_path):
    config, folder = settings(tmp_path), tmp_path / "run"
    made = open_once(config, folder)
    assert made["messages"] == TALK
    assert made["made_with"]["actions"] == "calls"
    changed = made | {"messages": [*TALK[:2], {"role": "user", "content": "five"}, *TALK[3:]]}

    (folder / EXAMPLES).write_text(json.dumps(changed))  # as a dry run left them, after which the file was edited
    assert open_once(config, folder) == made

    (folder / RUN).write_text("{}")
    (folder / EXAMPLES).write_text(json.dumps(changed))  # as the tools answered when the run began
    assert open_once(config, folder) == changed
    with agent.build(config, folder) as setup:
        shown = agent.first_prompt(setup.env, setup.model.tokenizer, setup.tasks("train", 0, 1)[0], setup.call_tool)
    assert "five" in shown

    others = {"made_with": changed["made_with"] | {"actions": "lines"}, "messages": changed["messages"]}
    (folder / EXAMPLES).write_text(json.dumps(others))
    assert open_once(config, folder) == made


def test_a_run_may_begin_anew_where_a_dry_run_was(tmp_path):
    open_once(settings(tmp_path), tmp_path / "run")
    (tmp_path / "run" / "notes.txt").write_text("mine")
    delete_run(tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir() if path.name != ".lock"] == ["notes.txt"]


def test_without_examples_nothing_is_written(tmp_path):
    config = settings(tmp_path, examples="none", warm_start="none")
    with agent.build(config, tmp_path / "run") as setup:
        shown = agent.first_prompt(setup.env, setup.model.tokenizer, setup.tasks("train", 0, 1)[0], setup.call_tool)
    assert "Lucy" not in shown
    assert not (tmp_path / "run").exists()
    assert config.model.model == str(planner_folder())
