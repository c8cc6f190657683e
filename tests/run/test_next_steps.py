"""The message at the end of a run: what it wrote, and commands that take it further."""

from flowgrpo.run.next_steps import after_training, command, contents, ending


def test_next_steps_stand_below_each_other_with_what_they_are_for():
    assert ending("written to x", [("a", "does this"), ("bcd", "does that")]) == (
        "\nwritten to x\nnext:\n    a    # does this\n    bcd  # does that"
    )
    assert ending("written to x", []) == "\nwritten to x"


def test_a_folder_with_a_space_is_quoted():
    assert command("chat", model="my models/a") == "python -m flowgrpo chat --model='my models/a'"


def test_only_what_is_there_is_said_to_be_written(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for name in ("result.json", ".lock"):
        (tmp_path / name).write_text("")
    assert contents(tmp_path) == "checkpoints/, result.json"


def test_a_run_is_sent_to_evaluate_where_that_takes_it(tmp_path):
    said = {evaluates: after_training(tmp_path, 7, evaluates=evaluates) for evaluates in (True, False)}
    assert [evaluates for evaluates, words in said.items() if "flowgrpo evaluate" in words] == [True]
    assert f"python -m flowgrpo view --workdir={tmp_path} " in said[False]
    assert "the same command with more --updates" in said[True]
    assert said[True].endswith("# goes on from update 7")
